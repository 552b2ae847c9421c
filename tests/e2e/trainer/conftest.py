"""One trainer process per model family for the whole folder, each with its own parallelism."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import fovea_tinyvlm
from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.client import TrainerClient
from tests.checkpoints import with_one_processor_file
from tests.e2e.trainer.copied_trainer import CopiedTrainer
from tests.e2e.trainer.image_service import ImageService

ARGUMENTS = {
    # Parameters stay gathered, with all datums in one micro-batch per rank.
    "qwen3_vl": [],
    # Every block is gathered, freed and recomputed in each of many micro-batches.
    "qwen2_5_vl": [
        *("--keep-gathered", "never", "--recompute", "always"),
        *("--token-budget", "160", "--logit-chunk-mib", "1"),
        *("--recovery-lag-s", "60"),  # the others write a point after every step
    ],
    # No room for a second snapshot of all parameters.
    "qwen3": ["--token-budget", "48", "--join-timeout-s", "8", "--snapshot-memory-mib", "2"],
    # One rank, which accumulates full gradients alone; several micro-batches.
    "one_rank": ["--ranks", "1", "--token-budget", "160"],
    # The default settings, with which calls of several models share passes.
    "shared_1": ["--ranks", "1"],
    "shared_2": [],
}


@dataclass
class Bench:
    """A running trainer and its test helpers."""

    kind: str
    model_dir: Path
    client: TrainerClient
    process: CopiedTrainer
    images: ImageService
    reference: Any
    scratch: Path
    created: list[str] = field(default_factory=list)

    async def adapter(self, rank: int = 8, seed: int = 7, vision: bool = False, **changes: Any) -> str:
        """Creates a LoRA model; returns its id."""
        settings: dict[str, Any] = {
            "rank": rank,
            "seed": seed,
            "train_attention": True,
            "train_mlp": True,
            "train_unembedding": True,
            "train_vision": vision,
            **changes,
        }
        return await self.create(weights_pb2.LoraConfig(**settings))

    async def create(self, lora: weights_pb2.LoraConfig | None) -> str:
        """Creates a model, with full parameters if `lora` is None; returns its id."""
        model_id = f"m{uuid.uuid4().hex[:8]}"
        await self.client.create_model(model_id, lora)
        self.created.append(model_id)
        return model_id

    async def clean(self) -> None:
        """Deletes the models of the test."""
        while self.created:
            await self.client.delete_model(self.created.pop())

    async def weights(self, model_id: str) -> dict[str, torch.Tensor]:
        """Returns all trained tensors by their names in a PEFT adapter or a Hugging Face checkpoint."""
        folder = self.scratch / uuid.uuid4().hex
        await self.client.take_snapshot(model_id, f"{model_id}@{uuid.uuid4().hex}", str(folder))
        found: dict[str, torch.Tensor] = {}
        for path in folder.glob("*.safetensors"):
            found |= load_file(path)
        return found

    async def descend(self, model_id: str) -> dict[str, torch.Tensor]:
        """Returns minus the accumulated gradients, by a step with a huge eps, which turns AdamW into gradient descent
        of rate 1.
        """
        before = await self.weights(model_id)
        await self.client.optim_step(model_id, adam(learning_rate=1e10, eps=1e10))
        after = await self.weights(model_id)
        return {name: after[name] - before[name] for name in before}


def adam(**changes: float) -> trainer_pb2.AdamParams:
    """Returns the SDK's defaults with `changes`."""
    defaults = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    return trainer_pb2.AdamParams(**{**defaults, **changes})


async def start_bench(name: str, scratch: Path) -> Bench:
    """Starts a trainer with its test helpers."""
    kind: fovea_tinyvlm.Kind = (
        "qwen3_vl" if name in ("one_rank", "shared_1", "shared_2") else cast(fovea_tinyvlm.Kind, name)
    )
    model_dir = fovea_tinyvlm.ensure(kind)
    if name == "one_rank":  # and the checkpoint as the newest transformers saves it
        model_dir = with_one_processor_file(model_dir, scratch)
    process = CopiedTrainer(model_dir, scratch / "trainer.log", *ARGUMENTS[name])
    loader = AutoModelForCausalLM if kind == "qwen3" else AutoModelForImageTextToText
    reference = loader.from_pretrained(model_dir, dtype=torch.float32)
    images = ImageService(model_dir, getattr(reference.model, "get_rope_index", None))
    return Bench(kind, model_dir, await process.ready(), process, images, reference, scratch)


async def stop_bench(bench: Bench) -> None:
    """Ends the trainer, which must exit cleanly."""
    await bench.client.close()
    bench.images.close()
    assert bench.process.stop() == 0, bench.process.log.read_text()


@pytest.fixture(scope="package")
async def benches(
    tmp_path_factory: pytest.TempPathFactory, new_bucket: Callable[[], str]
) -> AsyncIterator[Callable[[str], Awaitable[Bench]]]:
    """Starts each trainer of ARGUMENTS on demand, with access to the buckets.

    The three most recent ones keep running; each takes more than a GiB beside the Fovea of other tests.
    """
    running: dict[str, Bench] = {}

    async def get(name: str) -> Bench:
        if name in running:
            running[name] = running.pop(name)
        else:
            if len(running) == 3:
                await stop_bench(running.pop(next(iter(running))))
            running[name] = await start_bench(name, tmp_path_factory.mktemp(name))
        return running[name]

    yield get
    for bench in running.values():
        await stop_bench(bench)


Benches = Callable[[str], Awaitable[Bench]]


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
async def vlm(request: pytest.FixtureRequest, benches: Benches) -> AsyncIterator[Bench]:
    """Each vision-language family, without models of earlier tests."""
    bench = await benches(request.param)
    yield bench
    await bench.clean()


@pytest.fixture
async def one_rank(benches: Benches) -> AsyncIterator[Bench]:
    """Qwen3-VL on one rank, without models of earlier tests."""
    bench = await benches("one_rank")
    yield bench
    await bench.clean()


@pytest.fixture(params=["shared_1", "shared_2"])
async def shared(request: pytest.FixtureRequest, benches: Benches) -> AsyncIterator[Bench]:
    """Qwen3-VL on one or two ranks with the default settings, without models of earlier tests."""
    bench = await benches(request.param)
    yield bench
    await bench.clean()


@pytest.fixture
async def qwen3_vl(benches: Benches) -> AsyncIterator[Bench]:
    """Qwen3-VL, without models of earlier tests."""
    bench = await benches("qwen3_vl")
    yield bench
    await bench.clean()


@pytest.fixture
async def qwen3(benches: Benches) -> AsyncIterator[Bench]:
    """The text-only family, without models of earlier tests."""
    bench = await benches("qwen3")
    yield bench
    await bench.clean()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, so that references do not slow down the trainer's ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
