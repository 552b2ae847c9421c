"""Calls of several models in one pass: calls that may not share a pass, and failures of a single call."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import FoveaError, Internal
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import BatchLayout
from fovea_trainer.batches.places import Place
from fovea_trainer.batches.vision_cache import VisionOutputCache
from fovea_trainer.command_queue import ForwardBackward
from fovea_trainer.forward_backward import PreparedCall
from fovea_trainer.loss_results import ForwardBackwardResult
from fovea_trainer.losses import loss_of
from fovea_trainer.losses.custom import Custom
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.memory_budget import Budgets
from fovea_trainer.model.small_passes import SmallPasses
from fovea_trainer.model.trained_model import AdapterModel, FullModel, TrainedModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.shared_calls import SharedCalls
from tests.unit.trainer.model.test_small_passes import SETTINGS, _loaded

CPU = torch.device("cpu")


class _OneRank(ControlGroup):
    """The control group of a trainer with one rank, which needs no other process."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1


class _FirstOfTwo(_OneRank):
    """The first of two ranks. `other` is the contribution of the second to each `gather`."""

    def __init__(self, other: Any) -> None:
        self.rank, self.world_size, self.other = 0, 2, other

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


class _Trainer:
    """Computes calls alone and counts memory. The inputs of the model `broken` cannot be read."""

    def __init__(
        self, most_tokens: int = 8192, fits: Callable[[int], bool] = lambda _: True, control: ControlGroup | None = None
    ) -> None:
        self.module, self.injector, self.targets = _loaded("cpu")
        self.small_passes = SmallPasses(self.module, self.injector, 2048, False, lambda _: False, fits, lambda _: None)
        self.most_tokens, self.broken = most_tokens, ""
        self.alone: list[str] = []
        self.abandoned = 0
        cache = VisionOutputCache(2**20)
        itself: Any = self
        vision: Any = SimpleNamespace(position_rows=3)
        self.shared = SharedCalls(itself, itself, control or _OneRank(), BatchLayout(vision, CPU), cache, itself)

    def model(self, name: str, settings: LoraSettings = SETTINGS) -> AdapterModel:
        return AdapterModel(name, settings, self.targets, self.injector, CPU, torch.float32, None)

    def call(self, model: AdapterModel, place: Place | None = None) -> ForwardBackward:
        header = trainer_pb2.ForwardBackwardHeader(
            model_id=model.model_id, loss_function="cross_entropy", backward=True
        )
        tokens = np.arange(30)
        weights = {"weights": np.ones(30, np.float32)}
        datums = [Datum(0, tokens, np.tile(tokens, (3, 1)), (), 0, tokens[:, None], weights, True)]
        share = self.shared.share_of(model, loss_of(header), datums, True)
        assert share is not None
        sizes = [datum.size for datum in datums]
        return ForwardBackward(model.model_id, header.SerializeToString(), True, False, [], sizes, datums, share, place)

    def inputs(
        self, command: ForwardBackward, model: TrainedModel, alone: bool, indices: Iterable[int]
    ) -> PreparedCall:
        if command.model_id == self.broken:
            raise ValueError("a renderer sent nonsense")
        loss = loss_of(trainer_pb2.ForwardBackwardHeader.FromString(command.header))
        return PreparedCall(command, model, alone, loss, dict(enumerate(command.decoded or ())), {}, {})

    def run(self, command: ForwardBackward, model: TrainedModel) -> ForwardBackwardResult:
        self.alone.append(command.model_id)
        return ForwardBackwardResult({}, {}, 1.0)

    def gather(self) -> None: ...

    def abandon_pass(self) -> None:
        self.abandoned += 1

    def collect(self) -> None: ...

    def make_room(self, token_count: int) -> None: ...

    def budgets(self, pending_bytes: int, trains_vision: bool) -> Budgets:
        return Budgets(self.most_tokens, 0)

    def recomputed_share(self, token_count: int, budgets: Budgets) -> float:
        return 0.0


def _places(found: list[ForwardBackwardResult | FoveaError]) -> list[str]:
    return [one.place if isinstance(one, ForwardBackwardResult) else type(one).__name__ for one in found]


def test_inputs_that_cannot_be_read_fail_their_own_call() -> None:
    """As for a call alone, no exception ends the trainer."""
    trainer = _Trainer()
    models = {name: trainer.model(name) for name in ("a", "b")}
    trainer.broken = "a"
    found = trainer.shared.run([trainer.call(model) for model in models.values()], models)
    assert isinstance(found[0], Internal)
    assert _places(found) == ["Internal", "2x64:0@0"]
    assert [model.has_gradients for model in models.values()] == [False, True]


def test_a_traced_loss_shares_no_pass_also_where_it_is_only_checked() -> None:
    """Otherwise its time would count against other tenants."""
    trainer = _Trainer()
    model, custom = trainer.model("a"), Custom.__new__(Custom)
    custom.config, custom._seconds_left = {"temperature": 1.0}, None  # as `loss_of` makes it without a sandbox
    assert trainer.shared.share_of(model, custom, [Datum.blank(30)], True) is None


def test_a_model_made_anew_with_other_settings_since_the_check_computes_alone() -> None:
    trainer = _Trainer()
    models = {name: trainer.model(name) for name in ("a", "b", "c")}
    calls = [trainer.call(model) for model in models.values()]
    other = LoraSettings(8, 8.0, 0, True, True, True, False)
    found = trainer.shared.run(calls, models | {"b": trainer.model("b", other)})
    assert _places(found) == ["2x64:0@0", "alone", "2x64:1@0"]
    whole = FullModel.__new__(FullModel)
    assert _places(trainer.shared.run([calls[0]], {"a": whole})) == ["alone"]


@pytest.mark.parametrize("most_tokens", [0, 32, 64])
def test_a_place_is_used_only_if_its_pass_fits_without_recomputation(most_tokens: int) -> None:
    trainer = _Trainer(most_tokens)
    model = trainer.model("a")
    found = trainer.shared.run([trainer.call(model, Place(1, 64, 0, 0))], {"a": model})
    assert _places(found) == ["1x64:0@0" if most_tokens == 64 else "alone"]


def test_without_memory_for_several_adapters_a_pass_of_one_takes_none_for_more() -> None:
    trainer = _Trainer(fits=lambda _: False)
    model = trainer.model("a")
    assert trainer.small_passes.slots_of(model.weights) == 1
    found = trainer.shared.run([trainer.call(model, Place(1, 64, 0, 0))], {"a": model})
    assert _places(found) == ["1x64:0@0"]
    assert [len(one.cast_KN) for one in trainer.small_passes._stand_ins.values()] == [1]


@pytest.mark.parametrize("given", ["", "alone", "2x64:2@0", "0x64:0@0", "2x65:0@0", "2x64:0@1", "9" * 5000 + "x64:0@0"])
def test_a_place_that_no_pass_has_is_none(given: str) -> None:
    assert Place.parse(given, 2048, 1) is None


@pytest.mark.parametrize("here", [True, False], ids=["this rank", "the other rank"])
def test_memory_that_runs_out_on_one_rank_ends_the_passes_of_that_rank_and_all_ranks_start_anew(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only one rank dropped gathered parameters, it would wait for the others in its next pass for ever."""
    trainer = _Trainer(fits=lambda _: False, control=_FirstOfTwo(({}, not here)))
    models = {name: trainer.model(name) for name in "abcd"}
    passes: list[int] = []
    plain = trainer.small_passes.shared_logprobs

    def logprobs(*arguments: Any) -> torch.Tensor:
        passes.append(1)
        if here:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*arguments)

    monkeypatch.setattr(trainer.small_passes, "shared_logprobs", logprobs)
    found = trainer.shared.run([trainer.call(model) for model in models.values()], models)
    assert trainer.abandoned == 1
    assert len(passes) == (1 if here else 2)
    assert trainer.alone == (list("abcd") if here else ["b", "d"])
    assert all(isinstance(one, ForwardBackwardResult) for one in found)
