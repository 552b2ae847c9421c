"""A conversation returns to the sampler that cached its prefix, if that sampler is up and not much busier."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import FakeSampler
from tests.contract.gateway.requests import Rest
from tests.waiting import eventually

BLOCK = 32


class Talk:
    """Conversations on one adapter that two samplers hold. No two conversations share tokens."""

    def __init__(self, stand: Stand, rest: Rest, sampling_id: str) -> None:
        self.stand, self.rest, self._sampling_id, self._next = stand, rest, sampling_id, 0

    async def begin(self, conversation: int, turn: int) -> str:
        """Submits the prompt of a turn; returns the request's id."""
        tokens = [(conversation * 37 + i) % 900 for i in range(turn * BLOCK + 8)]
        self._next += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        return str((await self.rest.sample(self._sampling_id, self._next, prompt=prompt)).json()["request_id"])

    async def say(self, conversation: int, turn: int) -> FakeSampler:
        """Samples a turn; returns the sampler that served it."""
        request_id = await self.begin(conversation, turn)
        await self.finish([request_id])
        (served,) = [sampler for sampler in self.stand.samplers if request_id in sampler.completed]
        return served

    async def finish(self, request_ids: Sequence[str]) -> None:
        """Waits for all requests."""
        for request_id in request_ids:
            assert "sequences" in await self.rest.result(request_id)


@pytest.fixture
async def talk(tmp_path: Path) -> AsyncIterator[Talk]:
    """Two samplers. Conversation 0 has started on the first and conversation 1 on the second."""
    async with running(Stand(tmp_path, sampler_count=2)) as stand, stand.http() as http:
        rest = Rest(http)
        talk = Talk(stand, rest, await rest.snapshot(await rest.create_model(), 1))
        hold(stand)
        ids = [await talk.begin(0, 1)]
        await eventually(lambda: sum(sampler.running for sampler in stand.samplers) == 1)
        stand.samplers.sort(key=lambda sampler: -sampler.running)  # either may come first
        ids.append(await talk.begin(1, 1))
        await eventually(lambda: [sampler.running for sampler in stand.samplers] == [1, 1])
        release(stand)
        await talk.finish(ids)
        yield talk


def hold(stand: Stand) -> None:
    """Holds all samples."""
    for sampler in stand.samplers:
        sampler.open.clear()


def release(stand: Stand) -> None:
    """Lets samples end."""
    for sampler in stand.samplers:
        sampler.open.set()


async def test_conversations_return(talk: Talk) -> None:
    for turn in range(2, 6):
        for conversation in (1, 0):
            assert await talk.say(conversation, turn) is talk.stand.samplers[conversation]


async def test_a_conversation_returns_past_a_less_busy_sampler(talk: Talk) -> None:
    hold(talk.stand)
    ids = [await talk.begin(1, turn) for turn in range(2, 6)]
    await eventually(lambda: [sampler.running for sampler in talk.stand.samplers] == [0, 4])
    release(talk.stand)
    await talk.finish(ids)


async def test_a_much_busier_sampler_is_passed_over(talk: Talk) -> None:
    hold(talk.stand)
    ids = [await talk.begin(1, 2) for _ in range(40)]
    await eventually(lambda: sum(sampler.running for sampler in talk.stand.samplers) == 40)
    first, second = [sampler.running for sampler in talk.stand.samplers]
    assert abs(first - second) <= 0.25 * min(first, second) + 5
    release(talk.stand)
    await talk.finish(ids)


async def test_a_conversation_moves_when_its_sampler_is_down_and_stays(talk: Talk) -> None:
    first, second = talk.stand.samplers
    await second.stop()
    assert await talk.say(1, 2) is first
    second.restart()
    await second.start()
    assert talk.stand.gateway is not None
    samplers = talk.stand.gateway.components.base_models.default.samplers
    await eventually(lambda: len(samplers.up) == 2)
    assert await talk.say(1, 3) is first, "the new engine's cache is empty"


async def test_the_beginning_of_one_conversation_says_nothing_of_another(talk: Talk) -> None:
    hold(talk.stand)
    ids = [await talk.begin(conversation, 2) for conversation in range(2, 12)]
    await eventually(lambda: [sampler.running for sampler in talk.stand.samplers] == [5, 5])
    release(talk.stand)
    await talk.finish(ids)
