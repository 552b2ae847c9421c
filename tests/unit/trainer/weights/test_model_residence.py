"""Adapters that leave the device and return: the same bits, and views that stay valid."""

import pytest
import torch
from torch import Tensor, nn

from fovea_trainer.model.lora import LoraInjector, LoraSettings
from fovea_trainer.model.model_family import LoraTarget, Role
from fovea_trainer.model.optimizer import Adam
from fovea_trainer.model.trained_model import AdapterModel
from fovea_trainer.weights.host_memory import ModelResidence

DEVICES = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
NAMES = ("a", "b", "c")


class Card:
    """Some adapters of one module. Without a residence no adapter leaves."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.module = nn.Linear(6, 8, bias=False, dtype=dtype, device=device).requires_grad_(False)
        self.module.weight.copy_(torch.arange(48).view(8, 6) / 48)
        targets = [LoraTarget("model.layers.0.mlp.up_proj", self.module, Role.MLP, False)]
        self.injector = LoraInjector(targets)
        self.models = {
            name: AdapterModel(
                name, LoraSettings(2, 32.0, seed, True, True, False, False), targets, self.injector, device, dtype, None
            )
            for seed, name in enumerate(NAMES)
        }

    def pass_(self, name: str, seed: int) -> Tensor:
        """Runs a forward and a backward pass, as forward_backward does."""
        model = self.models[name]
        model.activate()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(self.module.weight)
        loss = self.module(x).float().square().sum()
        loss.backward()
        model.gradients_added()
        return loss.detach()

    def step(self, name: str) -> None:
        model = self.models[name]
        model.weights.flat.grad = model.weights.flat_grad
        model.optimizer.step(Adam(0.01))
        model.zero_gradients()
        model.step += 1

    def state(self, name: str) -> list[Tensor]:
        model = self.models[name]
        return [model.weights.flat, model.weights.flat_grad, *model.optimizer.moments()[0].values()]


def size_of(model: AdapterModel) -> int:
    """Returns the bytes of an adapter on the device."""
    tensors = {model.weights.flat, model.weights.flat_grad, model.weights.cast_weights}
    tensors |= set(model.optimizer.moments()[0].values())
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_leaves_and_returns_trains_on_with_equal_bits(dtype: torch.dtype, device: torch.device) -> None:
    """Including between passes, so that its gradients move with it."""
    still, moving = Card(dtype, device), Card(dtype, device)
    whole = size_of(moving.models["a"])
    residence = ModelResidence(device, whole, lambda: 2**62)
    for seed in range(24):
        name = NAMES[seed * 5 % 3]
        residence.use([moving.models[name]])
        assert [size_of(model) for model in moving.models.values()].count(whole) <= 3
        assert moving.pass_(name, seed).equal(still.pass_(name, seed))
        if seed % 4 == 3:
            moving.step(name)
            still.step(name)
    for name in NAMES:
        residence.use([moving.models[name]])
        for found, expected in zip(moving.state(name), still.state(name), strict=True):
            assert found.equal(expected)
        assert [size_of(moving.models[other]) for other in NAMES if other != name] == [0, 0]


def test_the_least_recently_used_leave_and_never_those_in_use() -> None:
    card = Card(torch.float32, DEVICES[0])
    whole = size_of(card.models["a"])
    residence = ModelResidence(DEVICES[0], 0, lambda: 2**62)
    for name in ("c", "a", "b"):
        residence.use([card.models[name]])
    assert residence.leave(1)
    assert [size_of(card.models[name]) for name in NAMES] == [whole, whole, 0]
    assert residence.leave(10 * whole)
    assert [size_of(card.models[name]) for name in NAMES] == [0, whole, 0], "b is in use"
    assert not residence.leave(10 * whole)
    residence.expect([card.models["a"]])
    assert [size_of(card.models[name]) for name in NAMES] == [whole, whole, 0]


def test_a_model_returns_to_a_full_device_in_the_place_of_others() -> None:
    card = Card(torch.float32, DEVICES[0])
    whole = size_of(card.models["a"])
    residence = ModelResidence(DEVICES[0], 0, lambda: int(1.5 * whole) - sum(map(size_of, card.models.values())))
    for name in ("a", "b", "c"):
        residence.use([card.models[name]])
    residence.leave(2 * whole)
    residence.use([card.models["b"]])
    assert [size_of(card.models[name]) for name in NAMES] == [0, whole, 0]
    residence.forget("a")
    residence.expect([card.models["c"]])
    assert size_of(card.models["c"]) == 0, "there must be no room for it now"


def test_a_model_that_returns_leaves_room_for_an_optimizer_step() -> None:
    card = Card(torch.float32, DEVICES[0])
    whole, room = size_of(card.models["a"]), 2**28

    def free_bytes() -> int:
        return 3 * whole + room - 1 - sum(map(size_of, card.models.values()))

    residence = ModelResidence(DEVICES[0], 0, free_bytes)
    for name in NAMES:
        residence.use([card.models[name]])
    residence.leave(1)
    assert [size_of(card.models[name]) for name in NAMES] == [0, whole, whole]
    residence.use([card.models["a"]])
    assert [size_of(card.models[name]) for name in NAMES] == [whole, 0, whole], "one byte was missing"
    assert free_bytes() >= room


def test_a_model_that_is_brought_ahead_moves_no_other_away() -> None:
    card = Card(torch.float32, DEVICES[0])
    whole = size_of(card.models["a"])

    def free_bytes() -> int:
        return 6 * whole - sum(map(size_of, card.models.values()))

    residence = ModelResidence(DEVICES[0], 0, free_bytes)
    for name in NAMES:
        residence.use([card.models[name]])
    residence.leave(1)
    residence.expect([card.models["a"]])
    assert [size_of(card.models[name]) for name in NAMES] == [0, whole, whole]


def test_models_fit_together_if_those_that_are_away_have_room_beside_the_others() -> None:
    card, free_bytes = Card(torch.float32, DEVICES[0]), 2**62
    whole = size_of(card.models["a"])
    residence = ModelResidence(DEVICES[0], 0, lambda: free_bytes)
    a, b, c = card.models.values()
    residence.use([a, b, c])
    free_bytes = 0
    assert residence.fit([a, b, c]), "none of them needs more room"
    residence.use([c])
    residence.leave(2 * whole)
    assert not residence.fit([a, b])
    free_bytes = whole
    assert residence.fit([a, c]) is False
    assert residence.fit([a]), "c may leave"
    limited = ModelResidence(DEVICES[0], 2 * whole, lambda: 2**62)
    assert (limited.fit([a, b]), limited.fit([a, b, c])) == (True, False)


class _Unpinned(ModelResidence):
    """A host with a driver that pins no more memory."""

    def _copied(self, tensor: Tensor) -> list[Tensor]:
        raise RuntimeError("CUDA error: out of memory")


def test_models_stay_if_the_host_cannot_pin_memory_for_them(caplog: pytest.LogCaptureFixture) -> None:
    card = Card(torch.float32, DEVICES[0])
    whole = size_of(card.models["a"])
    residence = _Unpinned(DEVICES[0], 0, lambda: 2**62)
    residence.use([card.models["a"]])
    residence.use([])
    for _ in range(2):
        assert not residence.leave(whole)
    assert size_of(card.models["a"]) == whole
    (warning,) = caplog.records
    assert "pins no more memory" in warning.message
