"""The sampler's log-probabilities equal the model's."""

import asyncio

import numpy as np
import pytest

from fovea.client.inference import SamplerClient
from fovea.wire import tensors
from tests.e2e.sampler.asking import ask, request_for
from tests.e2e.sampler.conftest import Prompt, PromptMaker, picture
from tests.e2e.sampler.reference import Reference, random_adapter
from tests.e2e.sampler.sender import Sender

TOLERANCE = 1e-3
FILLER = -99999.0


def several(prompts: PromptMaker) -> list[Prompt]:
    """Returns prompts: text; an image inside text; two images, the first at the very start."""
    return [
        prompts.make("The sampler draws tokens from the model, one after another."),
        prompts.make("Look at this: ", picture(1), " What do you see?"),
        prompts.make(picture(2, 64, 64), " and ", picture(3, 128, 96), " differ in size."),
    ]


async def test_prompt_logprobs_of_the_base_model(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    for prompt in several(prompts):
        answer = await ask(client, request_for(prompt.wire, prompt_logprobs=True, max_tokens=1, temperature=0.5))
        expected = reference.prompt_logprobs(prompt.tokens, prompt.images)
        assert answer.prompt_logprobs is not None
        assert np.isnan(answer.prompt_logprobs[0])
        assert np.abs(answer.prompt_logprobs - expected)[1:].max() < TOLERANCE


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"temperature": 1.5},
        {"temperature": 0.7, "top_k": 3},
        {"top_p": 0.3},
        {"temperature": 0.0},
    ],
)
async def test_sampled_logprobs_follow_the_temperature_alone(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, params: dict[str, float]
) -> None:
    prompt = several(prompts)[1]
    answer = await ask(
        client, request_for(prompt.wire, max_tokens=24, top_sample_logprobs=5, sample_count=2, seed=7, **params)
    )
    for drawn in answer.sequences:
        tokens = np.concatenate([prompt.tokens, np.asarray(drawn.tokens, dtype=np.int32)])
        table = reference.table(tokens, prompt.images, params.get("temperature", 1.0) or 1.0)
        rows = table[len(prompt.tokens) - 1 : len(tokens) - 1]
        assert np.isfinite(drawn.logprobs).all()
        assert np.abs(rows[np.arange(len(rows)), drawn.tokens] - drawn.logprobs).max() < TOLERANCE
        best = np.sort(rows, axis=-1)[:, ::-1][:, :5]
        assert np.abs(best - np.asarray(drawn.top_logprobs)).max() < TOLERANCE
        if params.get("temperature") == 0.0:
            assert drawn.tokens == rows.argmax(-1).tolist()


async def test_top_prompt_logprobs(client: SamplerClient, prompts: PromptMaker, reference: Reference) -> None:
    prompt = several(prompts)[1]
    answer = await ask(client, request_for(prompt.wire, top_prompt_logprobs=20, max_tokens=1))
    assert answer.prompt_logprobs is not None
    assert not answer.prompt_logprobs.size
    assert answer.prompt_top is not None
    ids, logprobs = tensors.decode(answer.prompt_top.token_ids), tensors.decode(answer.prompt_top.logprobs)
    assert ids.shape == logprobs.shape == (len(prompt.tokens), 20)
    assert not ids[0].any()
    assert (logprobs[0] == FILLER).all()
    expected = np.sort(reference.table(prompt.tokens, prompt.images)[:-1], axis=-1)[:, ::-1][:, :20]
    assert np.abs(expected - logprobs[1:]).max() < TOLERANCE


async def test_adapters_and_base_mixed_in_one_batch(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, model: object
) -> None:
    """Adapts attention, MLP, vision tower and the tied unembedding, and scores all prompts in one batch."""
    adapters = {
        "mix-a@1": (random_adapter(reference, 8, seed=1), 8),
        "mix-b@1": (random_adapter(reference, 4, seed=2), 4),
    }
    sender = await Sender(client).join()
    for snapshot_id, (adapter, rank) in adapters.items():
        await sender.push(snapshot_id, adapter, rank)
    references = {"": reference}
    for snapshot_id, (adapter, rank) in adapters.items():
        references[snapshot_id] = Reference(model).merge(adapter, rank)  # type: ignore[arg-type]
    pairs = [(snapshot_id, prompt) for prompt in several(prompts) for snapshot_id in references]
    answers = await asyncio.gather(
        *(
            ask(client, request_for(prompt.wire, snapshot_id, prompt_logprobs=True, max_tokens=8, seed=3))
            for snapshot_id, prompt in pairs
        )
    )
    apart = []
    for (snapshot_id, prompt), answer in zip(pairs, answers, strict=True):
        expected = references[snapshot_id].prompt_logprobs(prompt.tokens, prompt.images)
        assert np.abs(answer.prompt_logprobs - expected)[1:].max() < TOLERANCE, snapshot_id
        tokens = np.concatenate([prompt.tokens, np.asarray(answer.sequences[0].tokens, dtype=np.int32)])
        table = references[snapshot_id].table(tokens, prompt.images)[len(prompt.tokens) - 1 : -1]
        sampled = table[np.arange(len(table)), answer.sequences[0].tokens]
        assert np.abs(sampled - answer.sequences[0].logprobs).max() < TOLERANCE, snapshot_id
        assert answer.sequences[0].snapshot_ids == {snapshot_id}
        apart.append(np.abs(reference.prompt_logprobs(prompt.tokens, prompt.images) - expected)[1:].max())
    assert min(d for (name, _), d in zip(pairs, apart, strict=True) if name) > 0.05, (
        "the adapters must change the scores"
    )
    for snapshot_id in adapters:
        await client.drop_snapshot(snapshot_id)
