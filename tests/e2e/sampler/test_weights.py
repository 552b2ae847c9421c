"""Full weights replace the model's and are replaced by them again; a failed push changes nothing."""

import asyncio
import time
from contextlib import aclosing

import numpy as np
import pytest
import torch

from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidInput,
    SnapshotNotLoaded,
    Unavailable,
)
from tests.e2e.sampler.asking import Answer, ask, request_for
from tests.e2e.sampler.conftest import Prompt, PromptMaker, picture
from tests.e2e.sampler.process import SamplerProcess
from tests.e2e.sampler.reference import Reference, random_adapter
from tests.e2e.sampler.sender import Sender, manifest_of

TOLERANCE = 1e-3


def trained(reference: Reference, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns the model's parameters, all changed a little."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.02 * torch.randn(value.shape, generator=generator)
        for name, value in reference.parameters().items()
    }


async def scored(client: SamplerClient, prompt: Prompt, snapshot_id: str = "") -> Answer:
    """Returns the prompt's logprobs and a greedy continuation."""
    return await ask(client, request_for(prompt.wire, snapshot_id, prompt_logprobs=True, max_tokens=6, temperature=0.0))


async def test_a_full_push_and_back_to_the_base(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, model: object, sampler: SamplerProcess
) -> None:
    """Includes the tied unembedding, the vision tower and the caches. Adapters wait for the base
    and then work again.
    """
    prompt = prompts.make("Full weights ", picture(1), " change everything. " * 8)
    sender = await Sender(client).join()
    adapter = random_adapter(reference, 4, seed=1)
    pauses = sampler.metric("fovea_sampler_pause_seconds_count")
    await sender.push("tenant@1", adapter, 4)
    base, tenant = await scored(client, prompt), await scored(client, prompt, "tenant@1")
    state = trained(reference)
    loaded = await sender.push("full@1", state)
    assert loaded.digest == manifest_of("full@1", state).snapshot.digest
    assert loaded.pause_s > 0
    info = await client.info()
    assert info.resident_snapshot_id == "full@1"
    assert not info.adapter_snapshot_ids
    for gone in ("", "tenant@1"):
        with pytest.raises(SnapshotNotLoaded):
            await scored(client, prompt, gone)
    full = await scored(client, prompt, "full@1")
    expected = Reference(model, state).prompt_logprobs(prompt.tokens, prompt.images)  # type: ignore[arg-type]
    assert np.abs(full.prompt_logprobs - expected)[1:].max() < TOLERANCE
    assert np.abs(full.prompt_logprobs - base.prompt_logprobs)[1:].max() > 0.1
    assert full.sequences[0].snapshot_ids == {"full@1"}
    await sender.push("", reference.parameters())
    assert (await client.info()).resident_snapshot_id == ""
    for before, snapshot_id in ((base, ""), (tenant, "tenant@1")):
        after = await scored(client, prompt, snapshot_id)
        assert after.sequences[0].tokens == before.sequences[0].tokens
        assert np.abs(after.prompt_logprobs - before.prompt_logprobs)[1:].max() < 1e-5
    await client.drop_snapshot("tenant@1")
    assert sampler.metric("fovea_sampler_pause_seconds_count") == pauses + 2


async def test_a_full_push_waits_for_samples_in_flight(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    sender = await Sender(client).join()
    through = sampler_pb2.StopCondition(ignore_eos=True)
    request = request_for(prompts.make("In flight").wire, stop=through, max_tokens=300)
    state, order = reference.parameters(), []

    async def push() -> None:
        await sender.push("", state)
        order.append("pushed")

    async with aclosing(client.sample(request)) as events:
        async for event in events:
            if event.WhichOneof("event") == "prompt":
                pushing = asyncio.create_task(push())
    order.append("sampled")
    await pushing
    assert order == ["sampled", "pushed"]


async def test_a_full_push_that_has_no_time_to_wait(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    sender = await Sender(client).join()
    through = sampler_pb2.StopCondition(ignore_eos=True)
    request = request_for(prompts.make("Endless").wire, stop=through, sample_count=16)
    async with aclosing(client.sample(request)) as events:
        async for _ in events:
            with pytest.raises(DeadlineExceeded, match="requests in flight"):
                await sender.push("late@1", trained(reference), timeout_s=2)
            break
    assert (await client.info()).resident_snapshot_id == ""
    await scored(client, prompts.make("After"))


async def test_other_bytes_than_announced(client: SamplerClient, prompts: PromptMaker, reference: Reference) -> None:
    """For an adapter and for full weights: nothing changes, and the group continues."""
    prompt = prompts.make("Digest ", picture(2))
    before = await scored(client, prompt)
    sender = await Sender(client).join()
    for rank, tensors in ((4, random_adapter(reference, 4, seed=1)), (None, trained(reference))):
        manifest = manifest_of("wrong@1", tensors, rank)
        spoiled = {**tensors, manifest.tensors[3].name: tensors[manifest.tensors[3].name] + 1e-3}
        with pytest.raises(Internal, match="arrived with digest"):
            await sender.push("wrong@1", spoiled, rank, manifest)
        with pytest.raises(SnapshotNotLoaded):
            await scored(client, prompt, "wrong@1")
    after = await scored(client, prompt)
    assert after.sequences[0].logprobs == before.sequences[0].logprobs
    await sender.push("right@1", random_adapter(reference, 4, seed=1), 4)
    await client.drop_snapshot("right@1")


async def test_parameters_that_do_not_fit(client: SamplerClient, reference: Reference) -> None:
    sender = await Sender(client).join()
    state = trained(reference)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    spoiled = {
        "missing": {key: value for key, value in state.items() if key != name},
        "has shape": {**state, name: state[name][:-1]},
        "no parameter": {**state, "model.language_model.layers.9.mlp.up_proj.weight": state[name]},
    }
    for message, tensors in spoiled.items():
        with pytest.raises(InvalidInput, match=message):
            await sender.push("bad@1", tensors)


@pytest.mark.parametrize("rank", [4, None])
async def test_a_sender_that_vanishes(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, rank: int | None
) -> None:
    """Killed between two buckets: the push fails at once, samples continue, and a new group works."""
    prompt = prompts.make("Vanish ", picture(3))
    before = await scored(client, prompt)
    tensors = random_adapter(reference, 4, seed=1) if rank else trained(reference)
    sender = await Sender(client).join()
    manifest = manifest_of("lost@1", tensors, rank)
    manifest.bucket_bytes = 1 << 16
    request = sampler_pb2.ReceiveSnapshotRequest(group_id=sender.group_id, manifest=manifest, timeout_s=30)
    start = time.monotonic()
    with pytest.raises(Unavailable, match="did not arrive"):  # noqa: PT012 - it vanishes in the middle of the stream
        async for _ in client.receive_snapshot(request):
            await asyncio.to_thread(sender.broadcast, manifest, tensors, 2)
            assert (await scored(client, prompt)).sequences[0].tokens == before.sequences[0].tokens
            sender.vanish()
    assert time.monotonic() - start < 25
    with pytest.raises(FailedPrecondition, match="join it first"):
        await anext(client.receive_snapshot(request))
    assert (await scored(client, prompt)).sequences[0].logprobs == before.sequences[0].logprobs
    again = await Sender(client).join()
    await again.push("found@1", random_adapter(reference, 4, seed=1), 4)
    await client.drop_snapshot("found@1")


async def test_a_sender_that_stalls(client: SamplerClient, prompts: PromptMaker, reference: Reference) -> None:
    sender = await Sender(client).join()
    adapter = random_adapter(reference, 4, seed=1)
    request = sampler_pb2.ReceiveSnapshotRequest(
        group_id=sender.group_id, manifest=manifest_of("stalled@1", adapter, 4), timeout_s=1.5
    )
    with pytest.raises(Unavailable, match="did not arrive"):
        async for _ in client.receive_snapshot(request):
            pass
    await scored(client, prompts.make("After a stall"))


async def test_a_sender_that_cancels(client: SamplerClient, prompts: PromptMaker, reference: Reference) -> None:
    """The call is cancelled after "ready": the sampler leaves the group by itself."""
    sender = await Sender(client).join()
    adapter = random_adapter(reference, 4, seed=1)
    request = sampler_pb2.ReceiveSnapshotRequest(
        group_id=sender.group_id, manifest=manifest_of("given-up@1", adapter, 4), timeout_s=60
    )
    async with aclosing(client.receive_snapshot(request)) as phases:
        async for _ in phases:
            break
    deadline = time.monotonic() + 20
    while True:
        try:
            await anext(client.receive_snapshot(request))
            raise AssertionError("a group that was abandoned became ready")
        except FailedPrecondition:
            break
        except Exception:
            assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await scored(client, prompts.make("After a cancelled push"))


async def test_a_group_without_other_members(client: SamplerClient, prompts: PromptMaker) -> None:
    request = sampler_pb2.JoinTransferGroupRequest(
        group_id="lonely", master_address="127.0.0.1", master_port=9, rank_offset=1, world_size=2, timeout_s=1.5
    )
    with pytest.raises(Unavailable, match="did not meet"):
        await client.join_transfer_group(request)
    for field, value in (
        ("rank_offset", 0),
        ("rank_offset", 2),
        ("master_port", 0),
        ("timeout_s", 0.0),
        ("group_id", ""),
    ):
        bad = sampler_pb2.JoinTransferGroupRequest()
        bad.CopyFrom(request)
        setattr(bad, field, value)
        with pytest.raises(InvalidInput, match=field):
            await client.join_transfer_group(bad)
    await client.leave_transfer_group("never joined")
    await scored(client, prompts.make("After a lonely group"))
