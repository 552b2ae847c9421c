"""A sampler of two workers gives the same results as one: base, adapters of every layer, full weights and draws."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire.errors import Internal, Unavailable
from tests.e2e.sampler.asking import Answer, ask, rendered, request_for
from tests.e2e.sampler.conftest import Prompt, PromptMaker, picture
from tests.e2e.sampler.process import SamplerProcess, running_sampler
from tests.e2e.sampler.reference import Reference, random_adapter
from tests.e2e.sampler.rows import own_bytes, received_bytes
from tests.e2e.sampler.sender import Sender, manifest_of
from tests.e2e.sampler.test_weights import trained
from tests.processes import survivors

TOLERANCE = 1e-4
"""In nats; sums over halves of a row are rounded in another order."""
RANKS = (4, 8)
THROUGH = sampler_pb2.StopCondition(ignore_eos=True)


@pytest.fixture(scope="module")
def wide(model: Path) -> Iterator[SamplerProcess]:
    """A sampler of two workers."""
    with running_sampler(model, "--tensor-parallel", "2", "--max-loras", "3") as sampler:
        yield sampler


@pytest.fixture
async def pair(client: SamplerClient, wide: SamplerProcess) -> AsyncIterator[tuple[SamplerClient, SamplerClient]]:
    """Clients of a sampler with one worker and of one with two."""
    async with SamplerClient(wide.address) as other:
        assert (await client.info()).transfer_worker_count == 1
        assert (await other.info()).transfer_worker_count == 2
        yield client, other


async def answers(pair: tuple[SamplerClient, SamplerClient], prompt: Prompt, snapshot_id: str) -> list[Answer]:
    """Returns all kinds of prompt scores, and seeded draws, of both samplers."""
    rows = [[token, 5, 7] for token in prompt.tokens[1:].tolist()]
    asked = {"prompt_logprobs": True, "top_prompt_logprobs": 3, "alt_token_count": 2, "target_rows": rows}
    request = request_for(
        prompt.wire, snapshot_id, sample_count=3, seed=9, max_tokens=24, stop=THROUGH, top_sample_logprobs=2, **asked
    )
    return [await ask(client, request) for client in pair]


def check_equal(one: Answer, two: Answer) -> None:
    """Checks that draws and numbers are equal."""
    for name in ("prompt_logprobs", "target_logprobs", "alt_logprobs"):
        found, expected = getattr(two, name), getattr(one, name)
        assert found.shape == expected.shape
        assert np.nanmax(np.abs(found - expected)) < TOLERANCE, name
    np.testing.assert_array_equal(two.alt_ids, one.alt_ids)
    for found, expected in zip(two.sequences, one.sequences, strict=True):
        assert found.tokens == expected.tokens
        assert np.abs(np.subtract(found.logprobs, expected.logprobs)).max() < TOLERANCE


async def test_two_workers_are_one(
    pair: tuple[SamplerClient, SamplerClient], prompts: PromptMaker, reference: Reference, model: Path
) -> None:
    """Adapters change every linear layer, including the unembedding and the vision tower. Then the base is restored."""
    prompt = prompts.make("Two halves ", picture(1), " make a whole, over several steps of the engine. " * 4)
    senders = [await Sender(client).join() for client in pair]
    before = await answers(pair, prompt, "")
    check_equal(*before)
    adapters = {f"tp-{rank}@1": random_adapter(reference, rank, seed=rank, scale=0.1) for rank in RANKS}
    for (name, adapter), rank in zip(adapters.items(), RANKS, strict=True):
        for sender in senders:
            loaded = await sender.push(name, adapter, rank)
            assert loaded.digest == manifest_of(name, adapter, rank).snapshot.digest
    for (name, adapter), rank in zip(adapters.items(), RANKS, strict=True):
        assert any("lm_head" in key for key in adapter)
        assert any("visual" in key for key in adapter)
        found = await answers(pair, prompt, name)
        check_equal(*found)
        expected = Reference(model).merge(adapter, rank).prompt_logprobs(prompt.tokens, prompt.images)
        assert np.nanmax(np.abs(found[1].prompt_logprobs - expected)) < 1e-3
        assert np.nanmax(np.abs(found[1].prompt_logprobs - before[1].prompt_logprobs)) > 0.1
    state = trained(reference)
    for sender in senders:
        assert (await sender.push("tp-full@1", state)).pause_s > 0
    found = await answers(pair, prompt, "tp-full@1")
    check_equal(*found)
    expected = Reference(model, state).prompt_logprobs(prompt.tokens, prompt.images)
    assert np.nanmax(np.abs(found[1].prompt_logprobs - expected)) < 1e-3
    for sender in senders:
        await sender.push("", reference.parameters())
    after = await answers(pair, prompt, "")
    check_equal(*after)
    check_equal(before[1], after[1])
    for client in pair:
        for name in adapters:
            await client.drop_snapshot(name)


async def test_draws_without_a_seed_are_the_same_on_both_workers(
    pair: tuple[SamplerClient, SamplerClient], prompts: PromptMaker
) -> None:
    """Each worker draws for itself. If the draws differed, the next token would follow a token that
    was not returned.
    """
    prompt = prompts.make("Anything may follow")
    request = request_for(prompt.wire, sample_count=4, max_tokens=40, stop=THROUGH, temperature=1.0)
    for drawn in (await ask(pair[1], request)).sequences:
        whole = rendered([[*prompt.tokens.tolist(), *drawn.tokens]])
        scored = await ask(pair[0], request_for(whole, prompt_logprobs=True, max_tokens=1))
        assert scored.prompt_logprobs is not None
        assert np.abs(scored.prompt_logprobs[-40:] - drawn.logprobs).max() < TOLERANCE


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("kind", ["whole", "divided"])
async def test_other_bytes_than_announced_reach_no_worker(
    pair: tuple[SamplerClient, SamplerClient], prompts: PromptMaker, reference: Reference, is_split: bool, kind: str
) -> None:
    prompt, state = prompts.make("Digest ", picture(2)), trained(reference)
    before = await answers(pair, prompt, "")
    ending = {"whole": "norm.weight", "divided": "down_proj.weight"}[kind]
    name = next(name for name in state if name.endswith(ending))
    manifest = manifest_of("wrong@1", state)
    spoiled = {**state, name: state[name].clone()}
    spoiled[name].view(-1)[-1] += 1e-3
    sender = await Sender(pair[1], is_split).join()
    with pytest.raises(Internal, match="arrived with digest"):
        await sender.push("wrong@1", spoiled, None, manifest)
    check_equal(before[1], (await answers(pair, prompt, ""))[1])


async def test_each_worker_receives_its_rows(
    pair: tuple[SamplerClient, SamplerClient], wide: SamplerProcess, prompts: PromptMaker, reference: Reference
) -> None:
    """Tokens and numbers after it equal those after a push of all tensors to both workers, to the bit."""
    prompt, state = prompts.make("Two halves ", picture(1), " of each matrix. " * 4), trained(reference, 2)
    found: list[Answer] = []
    for number, is_split in enumerate((False, True)):
        sender = await Sender(pair[1], is_split).join()
        before = received_bytes(wide.metrics_page())
        loaded = await sender.push(f"rows@{number}", state)
        assert loaded.digest == manifest_of(f"rows@{number}", state).snapshot.digest
        shapes = {name: tensor.shape for name, tensor in state.items()}
        whole_bytes = manifest_of("", state).snapshot.size_bytes
        expected = [own_bytes(shapes, worker) if is_split else whole_bytes for worker in range(2)]
        after = received_bytes(wide.metrics_page())
        assert [new - old for new, old in zip(after, before, strict=True)] == expected
        request = request_for(prompt.wire, f"rows@{number}", max_tokens=40, stop=THROUGH, prompt_logprobs=True, seed=3)
        found += [await ask(pair[1], request) for _ in range(2)]
        await sender.push("", reference.parameters())
    for two in found[1:]:  # two after each push, so that noise of the engine would show
        np.testing.assert_array_equal(two.prompt_logprobs, found[0].prompt_logprobs)
        assert two.sequences[0].tokens == found[0].sequences[0].tokens
        assert two.sequences[0].logprobs == found[0].sequences[0].logprobs


@pytest.mark.parametrize("is_split", [pytest.param(False, marks=pytest.mark.long), True])
async def test_a_worker_that_is_killed_in_the_middle_of_a_push_ends_the_sampler(
    model: Path, reference: Reference, is_split: bool
) -> None:
    """The sender learns of it, as it does if all workers receive everything; the platform starts another sampler."""
    with running_sampler(model, "--tensor-parallel", "2") as sampler:
        async with SamplerClient(sampler.address) as client:
            sender, state = await Sender(client, is_split).join(), trained(reference)
            processes = psutil.Process(sampler.process.pid).children(recursive=True)
            (second,) = (one for one in processes if any("Worker_TP1" in word for word in one.cmdline()))
            manifest = manifest_of("killed@1", state)
            request = sampler_pb2.ReceiveSnapshotRequest(group_id=sender.group_id, manifest=manifest, timeout_s=60)
            stream = client.receive_snapshot(request)
            sender.ready = (await anext(stream)).ready
            await asyncio.to_thread(sender.broadcast, manifest, state, 1)
            second.kill()
            with pytest.raises(Unavailable):
                await anext(stream)
        sampler.process.wait(60)


def test_all_its_processes_end_with_it(wide: SamplerProcess) -> None:
    """The last test of this file, because it ends the sampler."""
    children = psutil.Process(wide.process.pid).children(recursive=True)
    assert len(children) >= 3  # the engine and two workers
    wide.process.kill()
    assert survivors(children, 20) == []
