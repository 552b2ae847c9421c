"""A sampler, a renderer and a reference for the whole folder, and a sampler of another family for two files."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import fovea_tinyvlm
from fovea.api.v1 import model_input_pb2
from fovea.client.inference import SamplerClient
from fovea.wire import tensors
from fovea.wire.tensors import FeatureTensors
from tests.e2e.sampler.asking import Part, rendered
from tests.e2e.sampler.copies import close_copies
from tests.e2e.sampler.process import SamplerProcess, running_sampler
from tests.e2e.sampler.reference import Reference
from tests.e2e.sampler.renderer import TinyRenderer, running_renderer
from tests.families import ensure_family

MIXTURE = "qwen3_5_moe"
THREE_SLOTS = ("--max-loras", "3", "--max-adapters", "8")


@pytest.fixture(scope="package")
def model() -> Path:
    """The tiny Qwen3-VL."""
    return fovea_tinyvlm.ensure("qwen3_vl")


@pytest.fixture(scope="package", autouse=True)
def _copies() -> Iterator[None]:
    """Ends the process that forks samplers, which holds 0.5 GiB."""
    yield
    close_copies()


@pytest.fixture(scope="package")
def renderer(model: Path) -> Iterator[TinyRenderer]:
    """Serves vision tensors."""
    with running_renderer(model) as renderer:
        yield renderer


@pytest.fixture(scope="package")
def sampler(model: Path) -> Iterator[SamplerProcess]:
    """The sampler under test: it batches two adapters and holds three."""
    most = ("--max-loras", "3", "--max-cpu-loras", "3", "--max-adapters", "4")
    with running_sampler(model, *most, is_copy=True) as sampler:
        yield sampler


@pytest.fixture(scope="package")
def mixture() -> Iterator[SamplerProcess]:
    """A sampler of another family, which has delta nets, experts and images."""
    with running_sampler(ensure_family(MIXTURE), *THREE_SLOTS, is_copy=True) as sampler:
        yield sampler


@contextmanager
def sampler_of(family: str, request: pytest.FixtureRequest, *arguments: str) -> Iterator[SamplerProcess]:
    """Returns the folder's sampler for `MIXTURE`, or a new sampler with these arguments for other families."""
    if family == MIXTURE:
        yield request.getfixturevalue("mixture")
    else:
        with running_sampler(ensure_family(family), *arguments, is_copy=True) as sampler:
            yield sampler


@pytest.fixture(scope="package")
def reference(model: Path) -> Reference:
    """The base model in transformers."""
    return Reference(model)


@pytest.fixture(scope="package")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer."""
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture
async def client(sampler: SamplerProcess) -> AsyncIterator[SamplerClient]:
    """A client of the sampler."""
    async with SamplerClient(sampler.address) as client:
        yield client


@dataclass
class Prompt:
    """A prompt in both forms: the message, and the ids with the tensors of its images."""

    wire: model_input_pb2.RenderedInput
    tokens: npt.NDArray[np.int32]
    images: list[FeatureTensors]


@dataclass
class PromptMaker:
    """Makes prompts from text and images."""

    renderer: TinyRenderer
    tokenizer: PreTrainedTokenizerBase
    image_token_id: int

    def make(self, *parts: str | npt.NDArray[np.uint8]) -> Prompt:
        """Makes a prompt from text and RGB images, in order."""
        pieces: list[Part] = []
        images: list[FeatureTensors] = []
        for part in parts:
            if isinstance(part, str):
                pieces.append(self.tokenizer(part, add_special_tokens=False)["input_ids"])
            else:
                feature = self.renderer.render(part)
                images.append(self.renderer.features[feature.digest])
                pieces.append(feature)
        wire = rendered(pieces, self.image_token_id)
        return Prompt(wire, tensors.decode_tokens(wire.tokens), images)


@pytest.fixture(scope="package")
def prompts(renderer: TinyRenderer, tokenizer: PreTrainedTokenizerBase, reference: Reference) -> PromptMaker:
    """Makes prompts."""
    return PromptMaker(renderer, tokenizer, reference.module.config.image_token_id)


def picture(seed: int, height: int = 96, width: int = 128) -> npt.NDArray[np.uint8]:
    """Returns an image of noise, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
