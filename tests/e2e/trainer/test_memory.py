"""Accounted memory and real exhaustion: requests that do not fit are refused, and no model is lost."""

import re
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import fovea_tinyvlm
from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.client import TrainerClient
from fovea.wire.errors import ResourceExhausted
from tests.e2e.trainer.conftest import adam
from tests.e2e.trainer.copied_trainer import CopiedTrainer
from tests.e2e.trainer.examples import datum, header, logprobs_of, text
from tests.e2e.trainer.image_service import ImageService

MIB = 2**20
LORA = weights_pb2.LoraConfig(rank=8, seed=1, train_attention=True, train_mlp=True)


class Cramped:
    """A trainer on two ranks with memory that a test can limit."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        model_dir = fovea_tinyvlm.ensure("qwen3")
        self.images = ImageService(model_dir, None)
        self.process = CopiedTrainer(model_dir, folder / "trainer.log", "--max-lora-rank", "4096", *arguments)
        self.client: TrainerClient

    def datums(self, *lengths: int) -> list[trainer_pb2.Datum]:
        return [datum(self.images.render([text(length, seed)]), seed) for seed, length in enumerate(lengths)]

    async def add(self, model_id: str, *lengths: int) -> list[float]:
        """Calls forward_backward; returns the first log-probability of each datum."""
        result = await self.client.forward_backward(header(model_id, len(lengths)), self.datums(*lengths))
        return [float(logprobs_of(output).flatten()[0]) for output in result.outputs]

    async def step(self, model_id: str) -> tuple[float, int]:
        """Calls optim_step; returns the norm of its gradient and the number of steps."""
        response = await self.client.optim_step(model_id, adam())
        return response.metrics.values["grad_norm:mean"], response.step

    @contextmanager
    def left(self, room_bytes: int) -> Iterator[None]:
        """Limits every rank's address space to its present size plus this; the kernel refuses more."""
        pids = self.process.rank_pids()
        before = [resource.prlimit(pid, resource.RLIMIT_AS) for pid in pids]
        for pid in pids:
            size_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (size_bytes + room_bytes, resource.RLIM_INFINITY))
        try:
            yield
        finally:
            for pid, limits in zip(pids, before, strict=True):
                resource.prlimit(pid, resource.RLIMIT_AS, limits)


@pytest.fixture
async def cramped(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cramped]:
    started = Cramped(tmp_path, *getattr(request, "param", ()))
    try:
        started.client = await started.process.ready()
        yield started
        await started.client.close()
        assert started.process.stop() == 0, started.process.log.read_text()
    finally:
        started.images.close()
        started.process.kill()


async def test_running_out_of_memory_costs_one_call_and_no_model(cramped: Cramped) -> None:
    """The neighbour and the model itself continue, with the gradients of earlier calls."""
    for name in ("neighbour", "m", "alike"):
        await cramped.client.create_model(name, LORA)
    for name in ("m", "alike"):
        await cramped.add(name, 40, 12, 30)
    await cramped.add("neighbour", 20, 30)
    with cramped.left(96 * MIB), pytest.raises(ResourceExhausted, match=r"ran out of memory.*shorter datums"):
        await cramped.add("m", *[8000] * 4)
    for name in ("m", "alike"):
        await cramped.add(name, 25, 16)
    assert await cramped.step("m") == pytest.approx(await cramped.step("alike"), rel=1e-5)
    assert (await cramped.step("neighbour"))[1] == 1
    assert await cramped.add("m", 9, 20) == await cramped.add("alike", 9, 20)


async def test_a_call_that_fits_in_smaller_pieces_is_computed_in_them(cramped: Cramped) -> None:
    """The second attempt has one datum per micro-batch and recomputes activations: the same log-probabilities."""
    lengths = [700] * 20
    for name in ("m", "alike"):
        await cramped.client.create_model(name, LORA)
    with cramped.left(160 * MIB):
        found = await cramped.add("m", *lengths)
    assert "with the smallest micro-batches" in cramped.process.log.read_text()
    assert found == pytest.approx(await cramped.add("alike", *lengths), abs=1e-5)
    assert (await cramped.step("m")) == pytest.approx(await cramped.step("alike"), rel=1e-4)


@pytest.mark.parametrize("cramped", [("--memory-limit-mib", "1500")], indirect=True)
async def test_models_and_snapshots_that_do_not_fit_are_refused_by_name(cramped: Cramped) -> None:
    """Creates models until memory is full; they train; takes snapshots until they are refused; deleted models make
    room.
    """
    large = weights_pb2.LoraConfig(rank=1024, train_attention=True, train_mlp=True)

    async def create(name: str) -> None:
        await cramped.client.create_model(name, large)

    async def freeze(name: str) -> None:
        await cramped.client.take_snapshot(name, f"{name}@1")

    names, refused = await _until_refused(create)
    assert len(names) >= 2
    found = re.fullmatch(
        r"an adapter of rank 1024 needs ([\d,]+) MiB on each of .* devices, but only ([\d,]+) MiB are free beside "
        r"[\d,]+ MiB reserved for computing: delete a model, or use a lower rank",
        refused.message,
    )
    assert found
    assert int(found[1].replace(",", "")) > int(found[2].replace(",", ""))
    for name in names:
        await cramped.add(name, 100, 200)
        assert (await cramped.step(name))[1] == 1
    frozen, refused = await _until_refused(freeze)
    assert len(frozen) < len(names)
    assert refused.message.startswith(f"a snapshot of model 'm{len(frozen)}' needs 28 MiB of the trainer's memory")
    while True:  # snapshots took some of the room since, and recovery copies leave it once written
        await cramped.client.delete_model(names.pop())
        assert names, "deleting all models must make room for one"
        with suppress(ResourceExhausted):
            await create("again")
            break
    for name in [*names, "again"]:
        await cramped.add(name, 100, 200)
        await cramped.step(name)


async def _until_refused(call: Callable[[str], Awaitable[None]]) -> tuple[list[str], ResourceExhausted]:
    names: list[str] = []
    while True:
        try:
            await call(f"m{len(names)}")
        except ResourceExhausted as error:
            return names, error
        names.append(f"m{len(names)}")
