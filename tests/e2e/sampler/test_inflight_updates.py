"""Full weights that arrive while answers are drawn: the version of each token, and its cache."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire import tensors
from fovea.wire.errors import DeadlineExceeded
from tests.e2e.sampler.asking import ask, request_for
from tests.e2e.sampler.conftest import Prompt, PromptMaker, picture
from tests.e2e.sampler.process import SamplerProcess, running_sampler
from tests.e2e.sampler.reference import Reference
from tests.e2e.sampler.sender import Sender
from tests.e2e.sampler.test_weights import TOLERANCE
from tests.waiting import eventually

ENDLESS = sampler_pb2.StopCondition(ignore_eos=True)
ENOUGH = 6


@dataclass
class Followed:
    """One sequence: its tokens, their log-probabilities, and the snapshot named by each event."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    makers: list[str] = field(default_factory=list)
    support: bytes = b""


class Stream:
    """A stream of sequences that the caller reads in steps."""

    def __init__(self, events: AsyncIterator[sampler_pb2.SampleResponse], count: int) -> None:
        self._events, self.sequences = events, [Followed() for _ in range(count)]
        self.prompt_logprobs: npt.NDArray[np.float32] | None = None

    async def until(self, is_enough: Callable[[Followed], bool]) -> None:
        """Reads until a condition holds for each sequence."""
        while not all(map(is_enough, self.sequences)):
            event = await anext(self._events)
            if event.WhichOneof("event") == "prompt":
                self.prompt_logprobs = tensors.decode_floats(event.prompt.logprobs)
                continue
            delta, sequence = event.delta, self.sequences[event.delta.index]
            ids = tensors.decode_tokens(delta.tokens).tolist()
            sequence.tokens += ids
            sequence.logprobs += tensors.decode_floats(delta.logprobs).tolist()
            sequence.makers += [delta.snapshot_id] * len(ids)
            sequence.support += delta.sampled_support

    async def until_made_by(self, snapshot_id: str) -> None:
        """Reads until each sequence has tokens of a snapshot."""
        await self.until(lambda sequence: sequence.makers.count(snapshot_id) >= ENOUGH)


@asynccontextmanager
async def following(client: SamplerClient, request: sampler_pb2.SampleRequest) -> AsyncIterator[Stream]:
    """A stream that follows its model."""
    request.follow_updates = True
    async with aclosing(client.sample(request, timeout_s=300)) as events:
        yield Stream(events, request.sample_count)


def trained(reference: Reference, seed: int) -> dict[str, torch.Tensor]:
    """Returns the model's parameters, changed so much that every log-probability identifies their version."""
    generator, state = torch.Generator().manual_seed(seed), reference.parameters()
    return {name: value + 0.06 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def moved(reference: Reference, model: object, seed: int) -> Reference:
    """The model with other weights."""
    return Reference(model, trained(reference, seed))  # type: ignore[arg-type]


def differences(versions: dict[str, Reference], prompt: Prompt, sequence: Followed) -> dict[str, npt.NDArray]:
    """Returns the differences of a sequence's log-probabilities from those of each version's
    weights, float32 [tokens].
    """
    whole = np.concatenate([prompt.tokens, np.asarray(sequence.tokens, np.int32)])
    found = {}
    for name, version in versions.items():
        scores = version.prompt_logprobs(whole, prompt.images)[len(prompt.tokens) :]
        found[name] = np.abs(scores - np.asarray(sequence.logprobs, np.float32))
    return found


def check_makers(versions: dict[str, Reference], prompt: Prompt, sequence: Followed) -> None:
    """Checks that each token's log-probability matches its own version and no other."""
    assert list(dict.fromkeys(sequence.makers)) == list(versions), "versions must follow the order of the pushes"
    assert sequence.makers == sorted(sequence.makers)
    found, makers = differences(versions, prompt, sequence), np.asarray(sequence.makers)
    for name in versions:
        assert found[name][makers == name].max() < TOLERANCE
        for other in set(versions) - {name}:
            assert found[other][makers == name].max() > 10 * TOLERANCE


async def test_answers_in_flight_continue_with_the_new_weights(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, model: object
) -> None:
    """Several sequences with an image and prompt scores; two pushes. Requests before and after a
    push share no cache.
    """
    versions = {f"run@{number}": moved(reference, model, number) for number in (1, 2, 3)}
    sender = await Sender(client).join()
    await sender.push("run@1", trained(reference, 1))
    prompt = prompts.make("What is to be seen ", picture(4), " on this picture? " * 4)
    request = request_for(prompt.wire, "run@1", 3, prompt_logprobs=True, stop=ENDLESS, max_tokens=6000, seed=5)
    async with following(client, request) as stream:
        await stream.until_made_by("run@1")
        for number in (2, 3):
            loaded = await sender.push(f"run@{number}", trained(reference, number))
            assert loaded.pause_s > 0
            await stream.until_made_by(f"run@{number}")
    for sequence in stream.sequences:
        check_makers(versions, prompt, sequence)
    assert len({tuple(sequence.tokens) for sequence in stream.sequences}) == 3
    assert stream.prompt_logprobs is not None
    scores = versions["run@1"].prompt_logprobs(prompt.tokens, prompt.images)
    assert np.abs(stream.prompt_logprobs - scores)[1:].max() < TOLERANCE
    after = await ask(client, request_for(prompt.wire, "run@3", max_tokens=4, seed=1))
    whole = np.concatenate([prompt.tokens, np.asarray(after.sequences[0].tokens, np.int32)])
    scores = versions["run@3"].prompt_logprobs(whole, prompt.images)[len(prompt.tokens) :]
    assert np.abs(scores - after.sequences[0].logprobs).max() < TOLERANCE
    assert after.sequences[0].snapshot_ids == {"run@3"}
    await sender.push("", reference.parameters())


async def test_supports_and_alternatives_belong_to_their_tokens(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    sender = await Sender(client).join()
    await sender.push("run@1", trained(reference, 1))
    prompt = prompts.make("Which tokens were left?")
    request = request_for(prompt.wire, "run@1", stop=ENDLESS, max_tokens=6000, top_k=4, seed=2)
    request.sampled_support = True
    async with following(client, request) as stream:
        await stream.until_made_by("run@1")
        await sender.push("run@2", trained(reference, 2))
        await stream.until_made_by("run@2")
    (sequence,) = stream.sequences
    rows = tensors.split_support(sequence.support)
    assert len(rows) == len(sequence.tokens) == len(sequence.makers)
    assert all(row != tensors.FULL_ROW for row in rows)
    await sender.push("", reference.parameters())


async def test_only_requests_that_follow_the_model_are_moved(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    """A push waits for requests that name an exact snapshot, and for all requests of other models."""
    sender = await Sender(client).join()
    await sender.push("run@1", trained(reference, 1))
    wire = prompts.make("Mine").wire
    async with following(client, request_for(wire, "run@1", stop=ENDLESS, max_tokens=6000)) as stream:
        await stream.until_made_by("run@1")
        exact = request_for(wire, "run@1", stop=ENDLESS, max_tokens=6000)
        async with aclosing(client.sample(exact)) as events:
            await anext(events)
            with pytest.raises(DeadlineExceeded, match="requests in flight"):
                await sender.push("run@2", trained(reference, 2), timeout_s=1.5)
        with pytest.raises(DeadlineExceeded, match="requests in flight"):
            await sender.push("other@1", trained(reference, 2), timeout_s=1.5)
        await sender.push("run@2", trained(reference, 2))
        await stream.until_made_by("run@2")
    await sender.push("", reference.parameters())


async def test_a_client_that_leaves_during_a_push(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, sampler: SamplerProcess
) -> None:
    """The push and its sequences end whenever the client disconnects."""
    sender = await Sender(client).join()
    await sender.push("run@1", trained(reference, 1))
    wire = prompts.make("Leaving").wire
    for number in range(2, 6):
        request = request_for(wire, f"run@{number - 1}", 4, stop=ENDLESS, max_tokens=6000)
        async with following(client, request) as stream:
            await stream.until_made_by(f"run@{number - 1}")
            pushing = asyncio.create_task(sender.push(f"run@{number}", trained(reference, number)))
            await asyncio.sleep(0.03 * number)
        await pushing
        assert (await client.info()).resident_snapshot_id == f"run@{number}"
    await eventually(lambda: sampler.metric("fovea_sampler_requests_in_flight") == 0)
    await ask(client, request_for(wire, "run@5", max_tokens=2))
    await sender.push("", reference.parameters())


@pytest.fixture(scope="module")
def keeping(model: Path) -> Iterator[SamplerProcess]:
    """A sampler that keeps the KV cache of running answers."""
    with running_sampler(model, "--inflight-cache", "keep", is_copy=True) as sampler:
        yield sampler


async def test_a_kept_cache_is_read_on_and_shared_with_no_later_request(
    keeping: SamplerProcess, prompts: PromptMaker, reference: Reference, model: object
) -> None:
    """Tokens after the push are computed by the new weights over keys and values of the old ones."""
    versions = {f"run@{number}": moved(reference, model, number) for number in (1, 2)}
    prompt = prompts.make("A long beginning, to fill some blocks of the cache. " * 6)
    async with SamplerClient(keeping.address) as client:
        sender = await Sender(client).join()
        await sender.push("run@1", trained(reference, 1))
        request = request_for(prompt.wire, "run@1", stop=ENDLESS, max_tokens=6000, seed=3)
        async with following(client, request) as stream:
            await stream.until_made_by("run@1")
            await sender.push("run@2", trained(reference, 2))
            await stream.until_made_by("run@2")
            scored = request_for(prompt.wire, "run@2", prompt_logprobs=True, max_tokens=1)
            plain = request_for(prompt.wire, "run@2", max_tokens=4, seed=1)
            answers = [await ask(client, one) for one in (plain, scored, plain)]
        (sequence,) = stream.sequences
        assert list(dict.fromkeys(sequence.makers)) == ["run@1", "run@2"]
        scores = versions["run@2"].prompt_logprobs(prompt.tokens)
        assert np.abs(answers[1].prompt_logprobs - scores)[1:].max() < TOLERANCE
        assert [answer.cached_token_count > 0 for answer in answers] == [False, False, True]
        assert answers[0].sequences[0].tokens == answers[2].sequences[0].tokens
        old, new = _over_kept(versions["run@1"], versions["run@2"], prompt, sequence)
        count = sequence.makers.count("run@1")
        logprobs = np.asarray(sequence.logprobs, np.float32)
        assert np.abs(old - logprobs[: len(old)]).max() < TOLERANCE
        assert np.abs(new - logprobs[count:]).max() < TOLERANCE
        assert differences(versions, prompt, sequence)["run@2"][count:].max() > 10 * TOLERANCE
        with suppress(DeadlineExceeded):
            async with following(client, scored) as stream:  # scores of a prompt never mix versions, so the push waits
                await anext(stream._events)


@torch.no_grad()
def _over_kept(
    old: Reference, new: Reference, prompt: Prompt, sequence: Followed
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Returns the log-probabilities of tokens from the old weights, and of those from the new weights over the old
    cache.
    """
    count = sequence.makers.count("run@1")
    ids = torch.tensor([[*prompt.tokens.tolist(), *sequence.tokens]])
    border = len(prompt.tokens) + count - 1  # the last old token was not yet an input when the weights changed
    first = old.module(input_ids=ids[:, :border], use_cache=True)
    rest = new.module(input_ids=ids[:, border:-1], past_key_values=first.past_key_values, use_cache=True)
    table = torch.cat([first.logits, rest.logits], dim=1)[0].log_softmax(-1)
    scores = table.gather(1, ids[0, 1:, None])[:, 0].numpy()[len(prompt.tokens) - 1 :]
    return scores[:count], scores[count:]
