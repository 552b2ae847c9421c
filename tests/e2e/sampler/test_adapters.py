"""Adapters are added, shared, evicted and dropped, while requests that use one never lose it."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.client.inference import SamplerClient
from fovea.wire.errors import AlreadyExists, FailedPrecondition, InvalidInput, SnapshotNotLoaded
from tests.e2e.sampler.asking import Answer, ask, request_for
from tests.e2e.sampler.conftest import PromptMaker, picture
from tests.e2e.sampler.reference import Reference, random_adapter
from tests.e2e.sampler.sender import Sender, manifest_of

RANK = 4


def attention_adapter(reference: Reference, seed: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    """Returns a small adapter."""
    adapter = random_adapter(reference, rank, seed, scale=0.2)
    return {name: tensor for name, tensor in adapter.items() if "self_attn" in name}


async def test_more_adapters_than_the_engine_keeps_built(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    """Four adapters are held, of which vLLM keeps three. It reloads the fourth from the worker's memory, with the same
    numbers.
    """
    sender = await Sender(client).join()
    names = [f"lru-{number}@1" for number in range(4)]
    request = {
        name: request_for(
            prompts.make("Adapters ", picture(1)).wire, name, max_tokens=6, temperature=0.0, prompt_logprobs=True
        )
        for name in names
    }
    first = {}
    for number, name in enumerate(names):
        await sender.push(name, attention_adapter(reference, number), RANK)
        first[name] = await ask(client, request[name])
    for _ in range(2):
        answers = await asyncio.gather(*(ask(client, request[name]) for name in names))
        for name, answer in zip(names, answers, strict=True):
            assert answer.sequences[0].tokens == first[name].sequences[0].tokens
            assert np.nanmax(np.abs(answer.prompt_logprobs - first[name].prompt_logprobs)) < 1e-5
    assert sorted((await client.info()).adapter_snapshot_ids) == names
    await sender.push("lru-4@1", attention_adapter(reference, 4), RANK)
    assert "lru-0@1" not in (await client.info()).adapter_snapshot_ids
    with pytest.raises(SnapshotNotLoaded):
        await ask(client, request["lru-0@1"])
    await sender.push("lru-0@1", attention_adapter(reference, 0), RANK)
    assert (await ask(client, request["lru-0@1"])).sequences[0].tokens == first["lru-0@1"].sequences[0].tokens
    for name in (await client.info()).adapter_snapshot_ids:
        await client.drop_snapshot(name)
    assert not (await client.info()).adapter_snapshot_ids


async def test_adapters_of_other_shapes_take_over_each_others_slots(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, model: Path
) -> None:
    """Six adapters of two shapes and mixed types take turns in three slots. No value of the previous adapter remains in
    a slot.
    """
    sender = await Sender(client).join()
    prompt = prompts.make("Slots ", picture(1))
    expected = {}
    for number in range(6):
        name, rank = f"shape-{number}@1", (8, RANK)[number % 2]
        adapter = random_adapter(reference, rank, number, scale=0.1) if number % 2 else {}
        adapter = adapter or attention_adapter(reference, number, rank)
        if number > 3:
            adapter = {n: t.bfloat16() if "layers.1." in n else t for n, t in adapter.items()}
        await sender.push(name, adapter, rank)
        merged = Reference(model).merge({n: t.float() for n, t in adapter.items()}, rank)
        expected[name] = merged.prompt_logprobs(prompt.tokens, prompt.images)[1:]
        for held in [*expected][-4:]:
            answer = await ask(client, request_for(prompt.wire, held, max_tokens=1, prompt_logprobs=True))
            assert answer.prompt_logprobs is not None
            assert np.abs(answer.prompt_logprobs[1:] - expected[held]).max() < 1e-3
    for name in (await client.info()).adapter_snapshot_ids:
        await client.drop_snapshot(name)


async def test_an_overflowing_adapter_fails_alone_and_leaves_no_trace(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    """Its requests fill blocks with NaN. Then the base model gets those blocks, and a valid adapter its slot."""

    async def neighbours() -> list[list[int]]:
        """Returns greedy tokens of the base model for prompts that end in the middle of a block."""
        asked = [request_for(prompts.make("Neighbour " * n).wire, max_tokens=40, temperature=0.0) for n in range(1, 25)]
        return [answer.sequences[0].tokens for answer in await asyncio.gather(*(ask(client, one) for one in asked))]

    async def offend(number: int, **scores: bool) -> Answer:
        wire = prompts.make(f"Offender {number} " * 20, picture(number)).wire
        through = sampler_pb2.StopCondition(ignore_eos=True)
        return await ask(client, request_for(wire, "large@1", 2, max_tokens=60, stop=through, **scores))

    before = await neighbours()
    sender = await Sender(client).join()
    large = {name: torch.full_like(tensor, 1e30) for name, tensor in attention_adapter(reference, 1).items()}
    await sender.push("large@1", large, RANK)
    offenders = [offend(number, prompt_logprobs=number % 2 == 0) for number in range(30)]
    beside, *outcomes = await asyncio.gather(neighbours(), *offenders, return_exceptions=True)
    assert await neighbours() == before
    assert beside == before
    await sender.push("right@1", attention_adapter(reference, 1), RANK)
    request = request_for(prompts.make("After ", picture(1)).wire, "right@1", max_tokens=1, prompt_logprobs=True)
    right = await ask(client, request)
    assert right.prompt_logprobs is not None
    assert np.isfinite(right.prompt_logprobs[1:]).all()
    for outcome in outcomes:
        assert isinstance(outcome, FailedPrecondition), outcome
        assert "snapshot 'large@1' cannot be sampled" in outcome.message
        assert outcome.metadata["snapshot_id"] == "large@1"
    with pytest.raises(FailedPrecondition, match="refuses it from now on"):
        await offend(30)
    for name in (await client.info()).adapter_snapshot_ids:
        await client.drop_snapshot(name)


async def test_dropping_waits_for_the_requests_in_flight(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    sender = await Sender(client).join()
    await sender.push("busy@1", attention_adapter(reference, 1), RANK)
    through = sampler_pb2.StopCondition(ignore_eos=True)
    request = request_for(prompts.make("Busy").wire, "busy@1", stop=through, max_tokens=200)
    token_count = 0
    async with aclosing(client.sample(request)) as events:
        async for event in events:
            if not token_count:
                dropping = asyncio.create_task(client.drop_snapshot("busy@1"))
            token_count += len(event.delta.tokens) // 4
            if token_count < 200:
                assert not dropping.done() or not dropping.exception()
    assert token_count == 200
    await dropping
    with pytest.raises(SnapshotNotLoaded):
        await ask(client, request)
    await client.drop_snapshot("busy@1")


async def test_pushing_the_same_snapshot_again_is_no_harm(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    sender = await Sender(client).join()
    adapter = attention_adapter(reference, 1)
    await sender.push("again@1", adapter, RANK)
    loaded = await sender.push("again@1", adapter, RANK)
    assert loaded.digest == manifest_of("again@1", adapter, RANK).snapshot.digest
    with pytest.raises(AlreadyExists, match="never change"):
        await sender.push("again@1", attention_adapter(reference, 2), RANK)
    await ask(client, request_for(prompts.make("Again").wire, "again@1", max_tokens=2))
    await client.drop_snapshot("again@1")


def renamed(old: str, new: str) -> dict[str, str]:
    """Returns the adapter with one tensor renamed."""
    return {old: new}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_proj": "z_proj"}, "has no module"),
        ({"base_model.model.": ""}, "no PEFT name"),
        ({"layers.0.self_attn.q_proj.lora_B": "layers.1.self_attn.q_proj.lora_B"}, "listed twice"),
    ],
)
async def test_names_that_do_not_fit(
    client: SamplerClient, reference: Reference, change: dict[str, str], message: str
) -> None:
    sender = await Sender(client).join()
    adapter = attention_adapter(reference, 1)
    manifest = manifest_of("bad@1", adapter, RANK)
    for spec in manifest.tensors:
        for old, new in change.items():
            spec.name = spec.name.replace(old, new)
    with pytest.raises(InvalidInput, match=message):
        await sender.push("bad@1", adapter, RANK, manifest)


async def test_shapes_and_modules_that_do_not_fit(client: SamplerClient, reference: Reference) -> None:
    sender = await Sender(client).join()
    adapter = attention_adapter(reference, 1)
    for rank, message in ((RANK + 1, "must be"), (4096, "lora.rank"), (0, "lora.rank")):
        manifest = manifest_of("bad@1", adapter, RANK)
        manifest.lora.rank = rank
        with pytest.raises(InvalidInput, match=message):
            await sender.push("bad@1", adapter, RANK, manifest)
    half = {name: tensor for name, tensor in adapter.items() if not name.endswith("q_proj.lora_B.weight")}
    with pytest.raises(InvalidInput, match="has only lora_A"):
        await sender.push("bad@1", half, RANK)
    embedding = {
        "base_model.model.model.language_model.embed_tokens.lora_A.weight": torch.zeros(RANK, 128),
        "base_model.model.model.language_model.embed_tokens.lora_B.weight": torch.zeros(1280, RANK),
    }
    with pytest.raises(InvalidInput, match="cannot adapt"):
        await sender.push("bad@1", embedding, RANK)
    empty = weights_pb2.SnapshotManifest()
    with pytest.raises(InvalidInput, match="bucket_bytes"):
        await sender.push("bad@1", {}, RANK, empty)
    # The group has not broadcast anything, so it still exists.
    await sender.push("good@1", adapter, RANK)
    await client.drop_snapshot("good@1")


async def test_a_group_that_was_not_joined(client: SamplerClient, reference: Reference) -> None:
    with pytest.raises(FailedPrecondition, match="join it first"):
        await Sender(client).push("bad@1", attention_adapter(reference, 1), RANK)


async def test_a_layout_is_checked_before_there_is_a_snapshot(client: SamplerClient, reference: Reference) -> None:
    manifest = manifest_of("", random_adapter(reference, RANK, 1), RANK)
    manifest.snapshot.ClearField("digest")
    await client.check_snapshot(manifest)
    norm = "model.language_model.layers.0.self_attn.q_norm"
    manifest.tensors.add(name=f"base_model.model.{norm}.lora_A.weight", dtype="float32", shape=[RANK, 32])
    with pytest.raises(InvalidInput, match=f"the engine cannot adapt {norm}"):
        await client.check_snapshot(manifest)
    assert not (await client.info()).adapter_snapshot_ids
