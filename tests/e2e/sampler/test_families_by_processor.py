"""Families with images for their own Hugging Face processor: renderer and sampler against transformers.

The renderer's ids and tensors equal the processor's; vLLM's log-probabilities equal transformers' own forward.
"""

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from fovea.api.v1 import model_input_pb2
from fovea.client.inference import SamplerClient
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput
from fovea_trainer.model.model_family import family_of
from tests.contract.renderer.inputs import image, model_input, text
from tests.e2e.sampler.asking import ask, request_for
from tests.e2e.sampler.conftest import MIXTURE, sampler_of
from tests.e2e.sampler.reference import ALPHA
from tests.e2e.sampler.sender import Sender
from tests.families import ensure_family
from tests.served_renderer import Served, serving
from tests.unit.renderer.pictures import encoded

TOLERANCE = 1e-3
SIZES = [(112, 60), (90, 140), (300, 40), (40, 300), (64, 64), (28, 28), (200, 133), (57, 171), (320, 240), (513, 85)]
FAMILIES = [MIXTURE, *(pytest.param(name, marks=pytest.mark.long) for name in ("idefics3", "mistral3"))]
"""The families that differ most; `make models` covers all."""


def picture(width: int, height: int) -> Image.Image:
    """Returns an image of noise."""
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


class Own:
    """A checkpoint in transformers: its processor and its forward."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(1)
        self.processor: Any = AutoProcessor.from_pretrained(model)
        self._model: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()

    def process(self, parts: list[str | Image.Image]) -> dict[str, torch.Tensor]:
        """Returns the processor's output for text and images together."""
        words = "".join(part if isinstance(part, str) else self.processor.image_token for part in parts)
        images = [part for part in parts if not isinstance(part, str)]
        made = self.processor(text=[words], images=images or None, return_tensors="pt", add_special_tokens=False)
        # Llama 4's processor computes in bfloat16.
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in made.items()}

    @torch.no_grad()
    def prompt_logprobs(self, made: dict[str, torch.Tensor]) -> npt.NDArray[np.float32]:
        """Returns log p(token i | tokens before i) from the second token on."""
        rows: torch.Tensor = self._model(**made).logits[0, :-1].log_softmax(-1)
        return rows.gather(1, made["input_ids"][0, 1:, None])[:, 0].numpy()  # type: ignore[no-any-return]

    @torch.no_grad()
    def adapt_tower(self, seed: int) -> dict[str, torch.Tensor]:
        """Adds an adapter of rank 4 to the modules of the tower that the trainer adapts, and returns it."""
        generator, adapter = torch.Generator().manual_seed(seed), {}
        for target in family_of(self._model.config.model_type).lora_targets(self._model):
            if target.vision:
                weight, path = self._model.get_submodule(target.name).weight, f"base_model.model.{target.name}"
                a, b = (
                    torch.randn(*shape, generator=generator) * 0.1 for shape in ((4, weight.shape[1]), (len(weight), 4))
                )
                weight += ALPHA / 4 * b @ a
                adapter |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        return adapter

    def chunks(self, parts: list[str | Image.Image]) -> model_input_pb2.ModelInput:
        """Returns the same input as a client sends it."""
        return model_input(
            *(
                text(*self.processor.tokenizer(part, add_special_tokens=False)["input_ids"])
                if isinstance(part, str)
                else image(encoded(part))
                for part in parts
            )
        )


async def check_tensors(served: Served, own: Own, size: tuple[int, int]) -> None:
    """Checks that ids and tensors of one image equal the processor's, except pixels that stay bytes."""
    made = own.process([picture(*size)])
    rendered = await served.client.render(own.chunks([picture(*size)]))
    (span,) = rendered.spans
    held = (await served.client.fetch_features([span.feature.digest]))[span.feature.digest]
    assert tensors.decode_tokens(rendered.tokens).tolist() == made["input_ids"][0].tolist()
    assert span.length == len(made["input_ids"][0])
    mask = np.frombuffer(span.feature.embedding_mask, np.uint8) if span.feature.embedding_mask else np.ones(span.length)
    placeholders = made["input_ids"][0].numpy() == served.family.image_token_id
    assert np.array_equal(mask.astype(bool), placeholders)
    for name, tensor in held.items():
        if tensor.dtype == np.uint8:
            normal = own.processor.image_processor
            channels = torch.from_numpy(tensor).view(len(tensor), 3, -1).float() / 255
            mean, std = (torch.tensor(values)[:, None] for values in (normal.image_mean, normal.image_std))
            expected = made[name].view(len(tensor), 3, -1)
            torch.testing.assert_close((channels - mean) / std, expected, atol=1e-5, rtol=1e-5)
        else:
            assert np.array_equal(tensor.reshape(-1), made[name].numpy().reshape(-1)), name


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_family(name: str, request: pytest.FixtureRequest) -> None:
    model = ensure_family(name)
    own = Own(model)
    one, two = picture(112, 60), picture(90, 140)
    inputs: list[list[str | Image.Image]] = [
        [one, " stands first."],
        ["And here it stands last: ", one],
        ["A picture ", one, " and another ", two, " of two."],
        ["No picture at all."],
    ]
    with sampler_of(name, request) as sampler:
        async with serving(model) as served, SamplerClient(sampler.address) as client:
            for size in SIZES:
                await check_tensors(served, own, size)
            told = set()
            for parts in inputs:
                rendered = await served.client.render(own.chunks(parts))
                made = own.process(parts)
                assert tensors.decode_tokens(rendered.tokens).tolist() == made["input_ids"][0].tolist()
                answer = await ask(client, request_for(rendered, prompt_logprobs=True, max_tokens=2))
                assert np.abs(answer.prompt_logprobs[1:] - own.prompt_logprobs(made)).max() < TOLERANCE
                told.add(hashlib.sha256(answer.prompt_logprobs[-3:].tobytes()).hexdigest())
            await check_refusals(served, client, own, [one, " again"])


async def test_an_adapter_that_vllm_would_not_apply_is_refused(request: pytest.FixtureRequest) -> None:
    """vLLM wraps the router in the layer, but its experts call the unwrapped one: such an adapter had no effect."""
    router = "model.language_model.layers.0.mlp.gate"
    own = Own(ensure_family(MIXTURE))
    rows, columns = own._model.get_submodule(router).weight.shape
    halves = {"lora_A": torch.zeros(4, columns), "lora_B": torch.zeros(rows, 4)}
    adapter = {f"base_model.model.{router}.{half}.weight": tensor for half, tensor in halves.items()}
    with sampler_of(MIXTURE, request) as sampler:
        async with SamplerClient(sampler.address) as client:
            sender = await Sender(client).join()
            with pytest.raises(InvalidInput, match=re.escape(f"the engine cannot adapt {router}")):
                await sender.push("router@1", adapter, 4)


@pytest.mark.long
async def test_adapters_of_a_tower_in_one_step(request: pytest.FixtureRequest) -> None:
    """Images of two adapters and of the base, in one batch, equal transformers' forward with merged weights.

    Llama 4's tower adds a token to the patches of each tile, and its connectors join patches.
    """
    model = ensure_family("llama4")
    parts = [picture(112, 60), " and ", picture(90, 140), " differ."]
    owns = {name: Own(model) for name in ("", "one@1", "two@1")}
    with sampler_of("llama4", request) as sampler:
        async with serving(model) as served, SamplerClient(sampler.address) as client:
            sender = await Sender(client).join()
            for seed, name in enumerate(owns):
                if name:
                    await sender.push(name, owns[name].adapt_tower(seed), 4)
            embedding = "base_model.model.vision_model.patch_embedding.linear.lora_"
            wrong = {f"{embedding}A.weight": torch.zeros(4, 588), f"{embedding}B.weight": torch.zeros(64, 4)}
            with pytest.raises(InvalidInput, match=r"cannot adapt vision_model\.patch_embedding\.linear"):
                await sender.push("wrong@1", wrong, 4)
            rendered = await served.client.render(owns[""].chunks(parts))
            asked = 3 * list(owns)
            answers = await asyncio.gather(
                *(ask(client, request_for(rendered, name, prompt_logprobs=True, max_tokens=2)) for name in asked)
            )
    expected = {name: own.prompt_logprobs(own.process(parts)) for name, own in owns.items()}
    assert min(np.abs(expected[name] - expected[""]).max() for name in ("one@1", "two@1")) > 50 * TOLERANCE
    for name, answer in zip(asked, answers, strict=True):
        assert np.abs(answer.prompt_logprobs[1:] - expected[name]).max() < TOLERANCE, name


async def check_refusals(served: Served, client: SamplerClient, own: Own, parts: list[str | Image.Image]) -> None:
    """Checks that ids which do not match the tensors are refused with a reason, and that the next request works."""
    good = await served.client.render(own.chunks(parts))
    bad = model_input_pb2.RenderedInput()
    bad.CopyFrom(good)
    feature = bad.spans[0].feature
    feature.embedding_mask = b"\1" + bytes(feature.token_count - 1)
    with pytest.raises(InvalidInput, match=r"prompt.spans"):
        await ask(client, request_for(bad, max_tokens=1))
    await ask(client, request_for(good, max_tokens=1))
