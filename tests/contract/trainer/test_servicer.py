"""The servicer behind a real gRPC server: the command that each call gives the ranks, and its response."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from fovea.api.v1 import model_input_pb2, trainer_pb2, trainer_pb2_grpc, weights_pb2
from fovea.client import TrainerClient
from fovea.runtime import tracing
from fovea.runtime.server import ServiceServer
from fovea.wire import tensors
from fovea.wire.conventions import TRAINER_SERVICE
from fovea.wire.errors import DiskFull, FeatureEvicted, FoveaError, Internal, InvalidInput, Unavailable
from fovea_trainer import command_queue, trainer_metrics
from fovea_trainer.batches.datum_decoding import DatumLimits, DatumSize
from fovea_trainer.command_queue import CommandQueue, resolve
from fovea_trainer.loss_results import ForwardBackwardResult
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from fovea_trainer.model.packed_model import family_of
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.trainer_servicer import TrainerServicer
from fovea_trainer.weights.snapshot_taker import TakenSnapshot
from fovea_trainer.weights.training_state import PendingSave
from tests.otlp_collector import Collector
from tests.vision_families import small_qwen3_vl
from tests.waiting import eventually

ADAM = trainer_pb2.AdamParams(learning_rate=0.1, beta1=0.2, beta2=0.3, eps=0.4, weight_decay=0.5, grad_clip_norm=0.6)


class RecordingRank:
    """Replaces rank 0's thread: takes commands off the real queue and answers from a list."""

    def __init__(self, queue: CommandQueue) -> None:
        self.commands: list[command_queue.Command] = []
        self.answers: list[Any] = []
        self._queue = queue
        self.engine = self
        self.family = family_of("qwen3_vl")
        self.limits = DatumLimits(100, 16, small_qwen3_vl())
        self.models = {"m": None}
        self.shared = SimpleNamespace(most_tokens=0, share_of=lambda *_: None, place_of=lambda *_: None)
        self.hints: list[tuple[str, list[str]]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def model(self, model_id: str) -> None:
        """Finds every model."""

    def fetch_ahead(self, model_id: str, features: Iterable[model_input_pb2.VisionFeature]) -> None:
        """Records a fetch hint."""
        self.hints.append((model_id, [feature.digest for feature in features]))

    def _run(self) -> None:
        while not isinstance((job := self._queue.next()[0]).command, command_queue.Shutdown):
            with job.traced():
                self.commands.append(job.command)
            answer = self.answers.pop(0) if self.answers else None
            error = answer if isinstance(answer, Exception) else None
            resolve(job.result, answer, error)


class Trainer:
    """A served trainer with a recording rank."""

    def __init__(self, queue: CommandQueue, rank: RecordingRank, client: TrainerClient) -> None:
        self.queue, self.rank, self.client = queue, rank, client

    async def asked(self, call: Any, answer: Any = None) -> tuple[Any, command_queue.Command]:
        """Returns the result of a call and the single command that it queued."""
        self.rank.answers[:] = [answer]
        self.rank.commands.clear()
        result = await call
        (command,) = self.rank.commands
        return result, command


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    settings = TrainerSettings(model="/nowhere", port=0, drain_s=0)
    queue = CommandQueue(60)
    queue.open()
    rank = RecordingRank(queue)
    server = ServiceServer(settings, [TRAINER_SERVICE])
    servicer = TrainerServicer(settings, queue, rank, None, None)  # type: ignore[arg-type]
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    async with TrainerClient(server.address) as client:
        yield Trainer(queue, rank, client)
    queue.shut_down()
    await server.grpc.stop(None)


async def test_create_and_delete(trainer: Trainer) -> None:
    lora = weights_pb2.LoraConfig(rank=4, seed=9, train_mlp=True, train_vision=True)
    spec = weights_pb2.TensorSpec(name="a", dtype="float32", shape=[4, 8])
    adapter, command = await trainer.asked(trainer.client.create_model("m", lora), (32, [spec]))
    assert adapter is not None
    assert (adapter.snapshot.kind, list(adapter.tensors)) == (weights_pb2.SNAPSHOT_KIND_ADAPTER, [spec])
    assert (adapter.lora.rank, adapter.lora.alpha, adapter.bucket_bytes) == (4, 32.0, 256 << 20)
    assert command == command_queue.CreateModel("m", LoraSettings(4, 32.0, 9, False, True, False, True))
    nothing, command = await trainer.asked(trainer.client.create_model("m", None), (5, []))
    assert nothing is None
    assert command == command_queue.CreateModel("m", None)
    _, command = await trainer.asked(trainer.client.delete_model("m"))
    assert command == command_queue.DeleteModel("m")


async def test_a_broken_trainer_says_so_and_names_no_model(trainer: Trainer) -> None:
    trainer.queue.fail_all(Unavailable("rank 1 died"))
    with pytest.raises(Unavailable, match="rank 1 died"):
        await trainer.client.info()


@pytest.mark.parametrize("in_groups", [False, True])
async def test_forward_backward(trainer: Trainer, in_groups: bool) -> None:
    datums = [_datum(3), _datum(5)]
    header = trainer_pb2.ForwardBackwardHeader(
        model_id="m", loss_function="cross_entropy", backward=True, datum_count=2
    )
    outcome = ForwardBackwardResult(
        {1: np.arange(5, dtype=np.float32), 0: np.zeros(3, np.float32)}, {"loss:sum": 2.5}, 0.9
    )
    asked = trainer.client.forward_backward(header, datums, in_groups=in_groups)
    result, command = await trainer.asked(asked, outcome)
    assert isinstance(command, command_queue.ForwardBackward)
    assert command.sizes == [DatumSize(3, 0), DatumSize(5, 0)]
    assert [trainer_pb2.Datum.FromString(data) for data in command.datums] == datums
    assert command.backward
    assert trainer_pb2.ForwardBackwardHeader.FromString(command.header) == header
    assert [tensors.decode(output.tensors["logprobs"]).shape for output in result.outputs] == [(3,), (5,)]
    assert result.metrics == {"loss:sum": 2.5}


async def test_a_caller_that_reads_no_groups_gets_one_output_per_message(trainer: Trainer) -> None:
    header = trainer_pb2.ForwardBackwardHeader(model_id="m", loss_function="cross_entropy", datum_count=2)
    requests = [
        trainer_pb2.ForwardBackwardRequest(header=header),
        *(trainer_pb2.ForwardBackwardRequest(datum=_datum(length)) for length in (3, 5)),
    ]
    stub = trainer_pb2_grpc.TrainerServiceStub(trainer.client.channel)

    async def read() -> list[trainer_pb2.ForwardBackwardResponse]:
        return [response async for response in stub.ForwardBackward(iter(requests))]

    outcome = ForwardBackwardResult({0: np.zeros(3, np.float32), 1: np.zeros(5, np.float32)}, {"loss:sum": 2.5}, 0.9)
    answers, _ = await trainer.asked(read(), outcome)
    assert [answer.WhichOneof("record") for answer in answers] == ["output", "output", "metrics"]


async def test_more_datums_than_announced_are_refused_in_groups_too(trainer: Trainer) -> None:
    header = trainer_pb2.ForwardBackwardHeader(model_id="m", loss_function="cross_entropy", datum_count=1)
    with pytest.raises(InvalidInput, match="datum_count is 1, but more datums were sent"):
        await trainer.client.forward_backward(header, [_datum(3), _datum(5)], in_groups=True)


async def test_a_hint_is_no_command(trainer: Trainer) -> None:
    await trainer.client.fetch_ahead("m", [model_input_pb2.VisionFeature(digest="d")])
    assert trainer.rank.hints == [("m", ["d"])]
    assert not trainer.rank.commands


async def test_the_gap_to_the_sampler_is_shown_for_the_model(trainer: Trainer) -> None:
    datum = _datum(3)
    for name, values in {"logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.0, 1.0]}.items():
        datum.loss_inputs[name].CopyFrom(tensors.encode(np.array(values, np.float32)))
    del datum.loss_inputs["weights"]
    header = trainer_pb2.ForwardBackwardHeader(
        model_id="m", loss_function="importance_sampling", backward=True, datum_count=1
    )
    outcome = ForwardBackwardResult({0: np.array([-9.0, -1.5, -2.25], np.float32)}, {}, 0.9)
    await trainer.asked(trainer.client.forward_backward(header, [datum]), outcome)
    gap = "fovea_trainer_logprob_gap_nats"
    assert REGISTRY.get_sample_value(gap, {"model": "m"}) == pytest.approx(0.375)
    trainer_metrics.forget_model("m")
    assert REGISTRY.get_sample_value(gap, {"model": "m"}) is None


async def test_a_command_goes_on_in_its_callers_trace(trainer: Trainer) -> None:
    with Collector() as collector:
        tracing.configure("fovea-test", collector.url)
        with tracing.span("caller"):
            await trainer.asked(trainer.client.clear_gradients("m"))
        await asyncio.to_thread(tracing.shutdown)
    call = collector.one(f"{TRAINER_SERVICE}/ClearGradients")
    command = collector.one("command ClearGradients")
    assert call.trace_id == command.trace_id == collector.one("caller").trace_id
    assert command.parent_span_id == call.span_id
    assert collector.one("queue").parent_span_id == command.span_id


async def test_optim_step_carries_every_field(trainer: Trainer) -> None:
    response, command = await trainer.asked(trainer.client.optim_step("m", ADAM), ({"grad_norm:mean": 1.5}, 7))
    assert command == command_queue.OptimStep("m", Adam(0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    assert response.step == 7
    assert dict(response.metrics.values) == {"grad_norm:mean": 1.5}
    _, command = await trainer.asked(trainer.client.clear_gradients("m"))
    assert command == command_queue.ClearGradients("m")


async def test_missing_adam_parameters_have_the_documented_defaults(trainer: Trainer) -> None:
    answer: tuple[dict[str, float], int] = ({}, 1)
    _, command = await trainer.asked(trainer.client.optim_step("m", trainer_pb2.AdamParams(learning_rate=0.1)), answer)
    assert command == command_queue.OptimStep("m", Adam(0.1, 0.9, 0.95, 1e-12, 0.0, 0.0))
    _, command = await trainer.asked(trainer.client.optim_step("m", trainer_pb2.AdamParams()), answer)
    assert command == command_queue.OptimStep("m", Adam(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0))
    zero = trainer_pb2.AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0, eps=0.0)
    _, command = await trainer.asked(trainer.client.optim_step("m", zero), answer)
    assert command == command_queue.OptimStep("m", Adam(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)), "explicit zeros must be kept"


async def test_state_and_snapshots(trainer: Trainer) -> None:
    saved, command = await trainer.asked(trainer.client.save_state("m", "/x"), PendingSave(written(99), 3))
    assert command == command_queue.SaveState("m", "/x")
    assert (saved.size_bytes, saved.step) == (99, 3)
    step, command = await trainer.asked(trainer.client.load_state("m", "/x", optimizer=True), 3)
    assert (step, command) == (3, command_queue.LoadState("m", "/x", True))
    identity = weights_pb2.Snapshot(snapshot_id="m@1", model_id="m", step=3)
    taken = TakenSnapshot(identity, written(50))
    snapshot, command = await trainer.asked(trainer.client.take_snapshot("m", "m@1", "/y"), taken)
    assert (snapshot, command) == (identity, command_queue.TakeSnapshot("m", "m@1", "/y"))
    _, command = await trainer.asked(trainer.client.forget_snapshot("m@1"))
    assert command == command_queue.ForgetSnapshot("m@1")


async def test_saves_occupy_the_ranks_only_while_they_are_copied(trainer: Trainer) -> None:
    """Other commands run while a save is written. The next save is copied once the first is in storage."""
    slow: Future[int] = Future()
    identity = weights_pb2.Snapshot(snapshot_id="m@1", model_id="m", step=3)
    trainer.rank.answers[:] = [PendingSave(slow, 3), 7, TakenSnapshot(identity, written(5))]
    first = asyncio.create_task(trainer.client.save_state("m", "/x"))
    await eventually(lambda: len(trainer.rank.commands) == 1)
    second = asyncio.create_task(trainer.client.take_snapshot("m", "m@1", "/y"))
    assert await trainer.client.load_state("other", "/x", optimizer=True) == 7
    assert [type(command).__name__ for command in trainer.rank.commands] == ["SaveState", "LoadState"]
    assert not first.done()
    slow.set_result(99)
    assert (await first).size_bytes == 99
    assert await second == identity


async def test_an_error_of_storage_reaches_the_caller_that_saves(trainer: Trainer) -> None:
    failed: Future[int] = Future()
    failed.set_exception(DiskFull("the disk of /x is full", place="/x"))
    trainer.rank.answers[:] = [PendingSave(failed, 3)]
    with pytest.raises(DiskFull, match="/x"):
        await trainer.client.save_state("m", "/x")


def written(size_bytes: int) -> "Future[int]":
    """A completed write."""
    found: Future[int] = Future()
    found.set_result(size_bytes)
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.create_model("", weights_pb2.LoraConfig(rank=4, train_mlp=True)),
        lambda client: client.create_model("m", weights_pb2.LoraConfig(rank=65, train_mlp=True)),
        lambda client: client.optim_step("m", trainer_pb2.AdamParams(learning_rate=-1)),
        lambda client: client.take_snapshot("m", ""),
    ],
)
async def test_invalid_requests_never_reach_the_ranks(trainer: Trainer, call: Callable[[TrainerClient], Any]) -> None:
    with pytest.raises(InvalidInput):
        await call(trainer.client)
    assert not trainer.rank.commands


@pytest.mark.parametrize("error", [FeatureEvicted("gone"), Unavailable("rank 1 died")])
async def test_errors_of_the_ranks_reach_the_caller(trainer: Trainer, error: FoveaError) -> None:
    trainer.rank.answers[:] = [error]
    with pytest.raises(type(error), match=error.message):
        await trainer.client.clear_gradients("m")


async def test_unmapped_errors_say_nothing(trainer: Trainer) -> None:
    trainer.rank.answers[:] = [ValueError("secret path")]
    with pytest.raises(Internal) as caught:
        await trainer.client.clear_gradients("m")
    assert "secret" not in caught.value.message


async def test_a_broken_trainer_answers_at_once(trainer: Trainer) -> None:
    trainer.queue.fail_all(Unavailable("rank 1 of the trainer died"))
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable, match="rank 1"):
            await trainer.client.clear_gradients("m")
    assert not trainer.rank.commands


def _datum(count: int) -> trainer_pb2.Datum:
    return trainer_pb2.Datum(
        input=model_input_pb2.RenderedInput(tokens=tensors.encode_tokens([1] * count)),
        loss_inputs={
            "target_tokens": tensors.encode(np.zeros(count, np.int64)),
            "weights": tensors.encode(np.ones(count, np.float32)),
        },
    )
