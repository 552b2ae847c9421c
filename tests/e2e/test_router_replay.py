"""Router replay: sampler and trainer agree on tokens for which they would choose different experts.

In each router, groups of four experts have almost the same row, so their choice depends on the last bits, as it does
for any experts in bfloat16 on a GPU. The trainer's rows differ from the sampler's in those bits: with the same experts
its numbers agree, with its own choice they do not.
"""

import asyncio
import io
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tinker
import torch
from safetensors.torch import load_file, save_file
from tinker import types

from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.runtime.credentials import SECRET_VARIABLE
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput
from fovea.wire.tensors import tensors_sha256
from fovea_parity.documents import Content, DocumentMaker, picture
from fovea_parity.trainer_part import datum_of
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import BatchLayout
from fovea_trainer.model.lora import LoraInjector
from fovea_trainer.model.packed_model import PackedModel, load_model
from fovea_trainer.settings import TrainerSettings
from tests.e2e.sampler.asking import rendered, request_for
from tests.e2e.stack import API_KEY, Stack, running_stack
from tests.families import ensure_family

NEW_TOKENS = 40
LAYERS, TOP = 3, 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sampled:
    """One sequence: ids of prompt and completion, the completion's logprobs [C], and the experts [N, L, k]."""

    prompt: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    experts: npt.NDArray[np.uint8]

    def datum(self, index: int, replays: bool) -> Datum:
        """Returns the trainer's datum: each token predicts the next."""
        whole = np.concatenate([self.prompt, self.tokens])
        experts = self.experts.astype(np.int16) if replays else None
        return Datum(index, whole[:-1], None, (), 0, whole[1:, None], {}, True, experts)


def with_twins(model: Path, directory: Path, seed: int) -> Path:
    """Copies a model and makes the rows of its routers equal in groups of four, except for noise from this seed."""
    shutil.copytree(model, directory)
    generator = torch.Generator().manual_seed(seed)
    (file,) = directory.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            same = weight[[0, 0, 0, 0, 4, 4, 4, 4]]
            weights[name] = same + 1e-5 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, file, {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sampler's model and the trainer's."""
    folder, model = tmp_path_factory.mktemp("twins"), ensure_family("qwen3_moe")
    assert json.loads((model / "config.json").read_text())["num_experts_per_tok"] == TOP
    return with_twins(model, folder / "sampler", 1), with_twins(model, folder / "trainer", 2)


@pytest.fixture(scope="module")
def replaying(models: tuple[Path, Path]) -> Iterator[Stack]:
    """A Fovea with the sampler's model: prompts in several chunks, and changing requests in a batch."""
    variables = {"FOVEA_SAMPLER_MAX_BATCHED_TOKENS": "256", "FOVEA_SAMPLER_MAX_SEQUENCES": "6"}
    with mock.patch.dict(os.environ, variables), running_stack(models[0]) as stack:
        yield stack


@pytest.fixture
async def client(replaying: Stack) -> AsyncIterator[SamplerClient]:
    """A client of its sampler only."""
    with mock.patch.dict(os.environ, {SECRET_VARIABLE: replaying.secret}):
        client = SamplerClient(replaying.address("sampler"))
    async with client:
        yield client


def load(directory: Path) -> PackedModel:
    """Loads the trainer's model."""
    settings = TrainerSettings(model=str(directory), device="cpu", dtype="float32", checkpoints=["unused"])
    family, _, model = load_model(settings, directory, CPU)
    LoraInjector(family.lora_targets(model.hf))
    return model


@pytest.fixture(scope="module")
def trainer(models: tuple[Path, Path]) -> PackedModel:
    return load(models[1])


async def draw(client: SamplerClient, count: int) -> list[Sampled]:
    """Samples prompts of all lengths concurrently; every prompt twice."""
    lengths = np.random.default_rng(0).integers(1, 600, count)
    prompts = [np.random.default_rng(seed // 2).integers(0, 1000, lengths[seed // 2]) for seed in range(count)]
    return list(await asyncio.gather(*(draw_one(client, prompt) for prompt in prompts)))


async def draw_one(client: SamplerClient, prompt: npt.NDArray[np.int64]) -> Sampled:
    stop = sampler_pb2.StopCondition(ignore_eos=True)
    request = request_for(rendered([prompt.tolist()]), max_tokens=NEW_TOKENS, stop=stop)
    request.routed_experts = True
    deltas = [event.delta async for event in client.sample(request) if event.WhichOneof("event") == "delta"]
    assert not any(delta.HasField("routed_experts") for delta in deltas[:-1])
    tokens = np.concatenate([tensors.decode_tokens(delta.tokens) for delta in deltas])
    logprobs = np.concatenate([tensors.decode_floats(delta.logprobs) for delta in deltas])
    return Sampled(prompt, tokens.astype(np.int64), logprobs, tensors.decode(deltas[-1].routed_experts))


@torch.no_grad()
def gap(trainer: PackedModel, sampled: list[Sampled], replays: bool) -> float:
    """Returns the largest difference of a sampled token's logprob, with all sequences in one micro-batch."""
    datums = [one.datum(index, replays) for index, one in enumerate(sampled)]
    batch = BatchLayout(None, CPU).pack(datums, {}, False, None)
    parts = batch.split_logprobs(trainer(batch, None, None))
    return max(
        float((part[-len(one.tokens) :] - torch.from_numpy(one.logprobs)).abs().max())
        for part, one in zip(parts, sampled, strict=True)
    )


async def test_the_trainer_agrees_if_it_follows(client: SamplerClient, trainer: PackedModel) -> None:
    sampled = await draw(client, 10)
    for one in sampled:
        assert one.experts.shape == (len(one.prompt) + NEW_TOKENS - 1, LAYERS, TOP)
        assert (one.experts[..., 0] != one.experts[..., 1]).all()
    replayed, own = gap(trainer, sampled, True), gap(trainer, sampled, False)
    print(f"largest difference with replay {replayed:.1e} nat, without {own:.1e}")
    assert replayed <= 1e-3
    assert own > 0.1, "the routers agree without replay, so this test shows nothing"


async def test_gradients_are_those_of_the_experts_that_are_followed(
    client: SamplerClient, trainer: PackedModel
) -> None:
    """With a trainable router, which learns the weights of the given experts."""
    (one,) = await draw(client, 1)
    batch = BatchLayout(None, CPU).pack([one.datum(0, True)], {}, False, None)
    gate = trainer.hf.get_decoder().layers[1].mlp.gate.weight
    gate.requires_grad_(True)
    trainer(batch, None, None).sum().backward()
    taken = np.bincount(one.experts[:, 1].ravel(), minlength=8) > 0
    gate.requires_grad_(False)
    assert gate.grad is not None
    assert (gate.grad.abs().amax(-1) > 0).numpy()[taken].all()


async def test_what_does_not_fit_is_refused_and_the_next_request_works(client: SamplerClient) -> None:
    request = request_for(rendered([[1, 2, 3]]), max_tokens=2)
    (plain,) = [event.delta async for event in client.sample(request) if event.WhichOneof("event") == "delta"][-1:]
    assert not plain.HasField("routed_experts")
    request.routed_experts = True
    request.top_sample_logprobs = 64
    request.params.max_tokens = 8_000
    with pytest.raises(InvalidInput, match="routed_experts is set, and one message carries the experts of at most"):
        [event async for event in client.sample(request)]
    assert len((await draw_one(client, np.array([5, 6]))).experts) == 1 + NEW_TOKENS


def test_the_official_sdk_replays(replaying: Stack) -> None:
    """An adapter of experts, trained on two ranks, sampled, and scored with the experts of its samples."""
    headers = {"X-Fovea-Routed-Experts": "1"}
    with tinker.ServiceClient(
        base_url=replaying.base_url, api_key=API_KEY, default_headers_overrides=headers
    ) as service:
        training = service.create_lora_training_client(base_model=replaying.model_name, rank=8).result()
        text = types.ModelInput.from_ints(list(range(20, 60)))
        targets = {"target_tokens": types.TensorData.from_numpy(np.arange(21, 61))}
        for _ in range(2):
            training.forward_backward([types.Datum(text, targets)], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=NEW_TOKENS)
        sequences = sampling.sample(text, 6, params).result().sequences
        data, flipped = [], []
        for sequence in sequences:
            address = f"{replaying.base_url}/api/v1/routed_experts/{sequence.sequence_id}"
            found = httpx.get(address, headers={"X-API-Key": API_KEY}).content
            experts = np.load(io.BytesIO(found)).astype(np.int64)
            whole = np.array([*range(20, 60), *sequence.tokens])
            inputs = {
                "target_tokens": types.TensorData.from_numpy(whole[1:]),
                "logprobs": types.TensorData.from_numpy(np.array([0.0] * 39 + sequence.logprobs, np.float32)),
                "advantages": types.TensorData.from_numpy(
                    np.array([0.0] * 39 + [1.0] * len(sequence.tokens), np.float32)
                ),
            }
            tokens = types.ModelInput.from_ints(whole[:-1].tolist())
            data.append(types.Datum(tokens, inputs | {"routed_experts": types.TensorData.from_numpy(experts)}))
            other = np.sort((experts + 1) % 8, -1)
            flipped.append(types.Datum(tokens, inputs | {"routed_experts": types.TensorData.from_numpy(other)}))
        expected = [np.array(sequence.logprobs) for sequence in sequences]
        followed, led_astray = (
            max(
                float(np.abs(output["logprobs"].to_numpy()[39:] - values).max())
                for output, values in zip(answer.loss_fn_outputs, expected, strict=True)
            )
            for answer in (
                training.forward_backward(data, "importance_sampling").result(),
                training.forward(flipped, "importance_sampling").result(),
            )
        )
        assert followed <= 1e-3
        assert led_astray > 0.1
        refused = types.Datum(
            text, targets | {"routed_experts": types.TensorData.from_numpy(np.zeros((40, 3, 2), int))}
        )
        with pytest.raises(tinker.RequestFailedError, match=r"routed_experts names an expert twice at \[0, 0\]"):
            training.forward([refused], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def test_a_vision_model_follows_what_documents_with_images_were_given() -> None:
    """Packed with text and recomputed in the backward pass: replaying its own choice changes nothing."""
    directory = ensure_family("qwen3_vl_moe")
    model, maker = load(directory), DocumentMaker(directory)
    contents: list[list[Content]] = [
        ["Short."],
        [picture((60, 110), 1), "What is this?"],
        ["A third document of words."],
    ]
    documents = [maker.splice(some) for some in contents]
    images = {tensors_sha256(image.tensors): image.tensors for document in documents for image in document.images}
    datums = [datum_of(maker, index, document) for index, document in enumerate(documents)]
    taken: list[torch.Tensor] = []
    for layer in model.hf.get_decoder().layers:
        layer.mlp.gate.register_forward_hook(lambda _, inputs, outputs: taken.append(outputs[2]))

    def run(some: list[Datum], recompute: float = 0.0) -> torch.Tensor:
        taken.clear()
        return model(BatchLayout(maker.family, CPU).pack(some, images, True, None), None, None, recompute)

    free = run(datums).detach()
    bounds = np.cumsum([0, *(len(datum.tokens) for datum in datums)])
    experts = torch.stack(taken, 1).numpy().astype(np.int16)
    spans = list(pairwise(bounds))
    own = [replace(datum, experts=experts[start:end]) for datum, (start, end) in zip(datums, spans, strict=True)]
    assert torch.equal(run(own).detach(), free)
    others = [replace(datum, experts=np.sort((datum.experts + 1) % 8, -1)) for datum in own]
    # Only the second document gets other experts; the first and the third must not change.
    mixed = run([own[0], others[1], datums[2]], recompute=1.0)
    changed = (mixed.detach() - free).abs().amax(-1) > 1e-3
    assert changed[slice(*spans[1])].any()
    assert not changed[slice(*spans[0])].any()
    assert not changed[slice(*spans[2])].any()
    model.hf.get_decoder().layers[0].mlp.gate.weight.requires_grad_(True)
    again = run([own[0], others[1], datums[2]], recompute=1.0)
    first = [one.clone() for one in taken]
    again.sum().backward()
    assert len(taken) == 2 * len(first)
    assert {tuple(one.flatten().tolist()) for one in taken} == {tuple(one.flatten().tolist()) for one in first}
