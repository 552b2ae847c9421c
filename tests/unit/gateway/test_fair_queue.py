"""Owners share places by tokens and weights, whatever each of them queues."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

from benchmarks.flood_model import VirtualLoop
from fovea_gateway.access.fair_queue import FairQueue, Turn


class Line:
    """A queue with work that lasts until the test ends it, and the admitted turns in order."""

    def __init__(self, places: int = 1, alone: int = 0, beside: int = 0, **weights: float) -> None:
        self.queue = FairQueue(places, lambda owner: weights.get(owner, 1.0), alone, beside)
        self.inside: list[tuple[Turn, asyncio.Event]] = []
        self.begun: list[Turn] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.sent: list[Turn] = []
        self.steady = ""
        self.is_wanted: Callable[[str], bool] = lambda owner: True

    async def send(
        self, owner: str, count: int, cost: float = 1.0, used: float | None = None, size: int = 1
    ) -> list[Turn]:
        turns = [
            Turn(owner, cost, lambda: owner == self.steady, size, is_wanted=lambda: self.is_wanted(owner))
            for _ in range(count)
        ]
        self.sent += turns
        self.tasks += [asyncio.create_task(self._work(turn, used)) for turn in turns]
        await asyncio.sleep(0)
        return turns

    async def _work(self, turn: Turn, used: float | None) -> None:
        async with self.queue.place(turn):
            ended = asyncio.Event()
            self.begun.append(turn)
            self.inside.append((turn, ended))
            await ended.wait()
            if used is not None:
                turn.settle(used)

    async def end(self, count: int = 1) -> None:
        """Ends the oldest running work."""
        for _ in range(count):
            if self.inside:
                self.inside.pop(0)[1].set()
            for _ in range(4):
                await asyncio.sleep(0)

    def inside_of(self, owner: str) -> int:
        return sum(1 for turn, _ in self.inside if turn.owner == owner)

    async def end_of(self, owner: str) -> None:
        """Ends the oldest running work of one owner."""
        place = next(place for place, (turn, _) in enumerate(self.inside) if turn.owner == owner)
        self.inside.insert(0, self.inside.pop(place))
        await self.end()

    def owners(self) -> str:
        return "".join(turn.owner for turn in self.begun)

    def tokens(self, owner: str) -> float:
        return sum(turn.cost for turn in self.begun if turn.owner == owner)


async def test_ten_thousand_of_one_delay_one_of_another_by_a_round() -> None:
    line = Line(places=4)
    await line.send("a", 10_000, cost=100)
    await line.end(10)
    (turn,) = await line.send("b", 1)
    assert "at most number 1 of the 1" in line.queue.describe(turn)
    await line.end()
    assert line.begun[-1] is turn, "the next place must be its own"
    for task in line.tasks:
        task.cancel()


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75), (0.25, 0.2)])
async def test_tokens_are_shared_by_weight_whatever_the_requests_cost(weight: float, share: float) -> None:
    line = Line(places=2, a=weight)
    await line.send("a", 400, cost=100)
    await line.send("b", 4000, cost=10)
    await line.end(600)
    total = line.tokens("a") + line.tokens("b")
    assert line.tokens("a") / total == pytest.approx(share, abs=0.03)
    for task in line.tasks:
        task.cancel()


async def test_unused_cost_is_refunded() -> None:
    line = Line()
    await line.send("a", 500, cost=1000, used=10)
    await line.send("b", 500, cost=10, used=10)
    await line.end(400)
    assert line.owners().count("a") == pytest.approx(200, abs=2)
    for task in line.tasks:
        task.cancel()


async def test_an_absent_owner_neither_saves_a_share_nor_owes_one() -> None:
    line = Line()
    await line.send("a", 100)
    await line.end(50)
    await line.send("b", 100)
    await line.end(20)
    assert line.owners()[51:] == "ba" * 10
    while line.inside:
        await line.end()
    await line.send("a", 10)
    await line.send("b", 10)
    await line.end(10)
    assert line.owners()[-11:] in ("ab" * 5 + "a", "a" + "ba" * 5)
    for task in line.tasks:
        task.cancel()


async def test_requests_of_one_owner_run_in_order_and_cancelled_ones_keep_no_place() -> None:
    line = Line()
    first, second, third, fourth = await line.send("a", 4)
    line.tasks[1].cancel()  # while it waits
    await asyncio.sleep(0)
    line.inside[0][1].set()
    await asyncio.sleep(0)
    line.tasks[2].cancel()  # at the moment of its admission
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [turn for turn in line.begun if turn is not second] == [first, fourth]
    assert third not in line.begun
    line.inside[-1][1].set()
    await asyncio.gather(*line.tasks, return_exceptions=True)
    await line.send("b", 1)
    assert line.begun[-1].owner == "b"
    line.inside[-1][1].set()


def test_an_owner_of_short_work_has_its_share_of_the_seconds_beside_a_flood_of_long_work() -> None:
    async def work(queue: FairQueue, owner: str, seconds: float, counts: dict[str, int]) -> None:
        async with queue.place(Turn(owner, 1000 * seconds, is_timed=True)):
            await asyncio.sleep(seconds)
        counts[owner] += 1

    async def one_after_another(queue: FairQueue, counts: dict[str, int]) -> None:
        while True:
            await work(queue, "b", 0.1, counts)
            await asyncio.sleep(0.03)  # until its client has the answer and has sent the next request

    async def run() -> None:
        queue, counts = FairQueue(1, lambda owner: 1.0), {"a": 0, "b": 0}
        tasks = [asyncio.create_task(work(queue, "a", 5.0, counts)) for _ in range(100)]
        tasks.append(asyncio.create_task(one_after_another(queue, counts)))
        await asyncio.sleep(200.0)
        assert 15 <= counts["a"] <= 22
        assert counts["b"] > 600, "in strict turns it would have had one for each of the flood's"
        tasks[-1].cancel()
        done = counts["a"]
        await asyncio.sleep(50.0)
        assert counts["a"] - done >= 9, "an owner that does not return must keep no place"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


def test_work_that_no_client_waits_for_gives_way_and_loses_nothing() -> None:
    async def run() -> None:
        line = Line()
        wanted = {"g": True}
        line.is_wanted = lambda owner: wanted.get(owner, True)
        await line.send("g", 4)
        wanted["g"] = False
        await line.send("b", 2)
        assert line.owners() == "g", "running work must not be interrupted"
        await line.end()
        await asyncio.sleep(0.1)
        await line.end()
        await asyncio.sleep(0.1)
        assert line.owners() == "gbb"
        assert "gives way" in line.queue.describe(line.sent[1])
        await line.end()
        await asyncio.sleep(2.0)
        assert line.owners() == "gbbg", "no other request waits"
        await line.send("b", 1)
        await line.end()
        await asyncio.sleep(0.1)
        assert line.owners()[-1] == "b"
        wanted["g"] = True
        await asyncio.sleep(2.0)
        await line.end()
        await line.end()
        assert line.owners() == "gbbgbgg", "its client is back"
        for task in line.tasks:
            task.cancel()
        await asyncio.gather(*line.tasks, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


async def test_waiters_are_sent_away_and_told_why() -> None:
    line = Line()
    await line.send("a", 3)
    line.queue.dismiss(KeyError("gone"))
    ended = await asyncio.gather(*line.tasks[1:], return_exceptions=True)
    assert [repr(error) for error in ended] == ["KeyError('gone')"] * 2
    await line.end()
    assert line.tasks[0].done()


async def test_seconds_are_divided_by_tokens_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, now = asyncio.get_running_loop(), 100.0
    time: Callable[[], float] = lambda: now  # noqa: E731
    line = Line(places=2)
    monkeypatch.setattr(loop, "time", time)
    (large,) = await line.send("a", 1, cost=30)
    (small,) = await line.send("b", 1, cost=10)
    now += 4.0
    await line.end()
    now += 1.0
    await line.end()
    assert (large.seconds, small.seconds) == pytest.approx((3.0, 2.0))


async def test_one_owner_has_the_next_piece_of_work_sent_ahead_and_several_have_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, now = asyncio.get_running_loop(), 100.0
    time: Callable[[], float] = lambda: now  # noqa: E731
    line = Line(alone=2)
    monkeypatch.setattr(loop, "time", time)
    await line.send("a", 4)
    assert line.owners() == "aa"
    await line.send("b", 1)
    await line.end()
    assert line.owners() == "aa", "one request runs, and two owners are active"
    await line.end()
    assert line.owners() == "aab"
    await line.end()
    assert line.owners() == "aaba", "the other owner is expected to return"
    now += 31.0
    await line.send("a", 1)
    await asyncio.sleep(0)
    assert line.owners() == "aabaa"
    line.queue.resize(3)
    for task in line.tasks:
        task.cancel()


@pytest.mark.parametrize("size", [1, 16])
async def test_a_step_waits_for_one_batch_of_a_flood_however_many_were_taken_before(size: int) -> None:
    """This holds even if a batch uses all slots and a step one: the slot reserved for the step does not fit a batch."""
    line = Line(places=size, alone=2 * size)
    await line.send("b", 1)
    await line.end()
    await line.send("a", 300, cost=2048, size=size)
    for _ in range(100):
        line.steady = "b"
        await line.send("b", 1, cost=2048, size=size)
        while not line.sent[-1].admitted.done():
            await line.end()
        await line.end()
        await line.send("b", 1, cost=64)
        line.steady = ""
        while not line.sent[-1].admitted.done():
            await line.end()
        await line.end()
    assert line.owners() == "b" + "abb" * 100 + "a"
    for task in line.tasks:
        task.cancel()


async def test_an_owner_of_sequential_requests_has_half_beside_a_flood() -> None:
    line = Line()
    line.steady = "b"
    await line.send("a", 100)
    for _ in range(40):
        await asyncio.sleep(0.002)  # the duration of each request, and of the pause before b's next one
        await line.end()
        if not any(turn.owner == "b" and not turn.admitted.done() for turn in line.sent):
            await line.send("b", 1)
    assert line.owners().count("b") == pytest.approx(20, abs=2)
    for _ in range(3):
        await line.end()
    await asyncio.sleep(1.1)
    assert line.begun[-1].owner == "a", "a place must not be reserved for ever"
    assert line.inside
    for task in line.tasks:
        task.cancel()


async def test_a_flood_has_all_places_alone_and_few_beside_another_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, now = asyncio.get_running_loop(), 100.0
    time: Callable[[], float] = lambda: now  # noqa: E731
    line = Line(places=20, beside=8)
    monkeypatch.setattr(loop, "time", time)
    await line.send("a", 400)
    assert line.inside_of("a") == 20
    (turn,) = await line.send("b", 1)
    await line.end()
    assert line.begun[-1] is turn, "the next place must be its own, although more than 8 are in use"
    for _ in range(60):
        await line.end_of("a")
    assert (line.inside_of("a"), line.inside_of("b")) == (7, 1)
    await line.end_of("b")
    for _ in range(60):
        await line.end()
    assert line.inside_of("a") == 7, "one of eight must stay free for the owner that is expected to return"
    await line.send("b", 1)
    assert line.inside_of("b") == 1, "at once"
    await line.end_of("b")
    now += 31.0
    await line.end()
    assert line.inside_of("a") == 20, "no other owner was active lately"
    for task in line.tasks:
        task.cancel()


def test_a_flood_gets_all_places_if_no_owner_is_expected_back() -> None:
    async def flood() -> None:
        line = Line(places=20, beside=8)
        await line.send("b", 1)
        await line.end()
        await line.send("a", 400)
        assert line.inside_of("a") == 7
        await asyncio.sleep(29.0)
        assert line.inside_of("a") == 7
        await asyncio.sleep(2.0)
        assert line.inside_of("a") == 20
        for task in line.tasks:
            task.cancel()
        await asyncio.gather(*line.tasks, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(flood())


async def test_a_flood_is_judged_by_its_newest_price_also_what_was_sent_before_it_was_known() -> None:
    """Many models of one owner send requests at once. Each call takes 5 s, as the first one shows."""
    queue, known, begun, is_here = FairQueue(1, lambda owner: 1.0), 1.0, list[str](), asyncio.Event()

    async def flood() -> None:
        nonlocal known
        turn = Turn("flood", is_timed=True, estimate=lambda: known)
        async with queue.place(turn):
            begun.append("flood")
            await is_here.wait()
            turn.measured = 5.0
        known = 5000.0

    async def other() -> None:
        for _ in range(6):
            turn = Turn("other", is_timed=True)
            async with queue.place(turn):
                begun.append("other")
                turn.measured = 0.01

    floods = [asyncio.create_task(flood()) for _ in range(5)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(other())
    await asyncio.sleep(0)
    is_here.set()
    await asyncio.gather(waiting, *floods)
    assert begun == ["flood", *["other"] * 6, *["flood"] * 4]


async def test_a_long_call_of_all_slots_does_not_begin_beside_a_short_one_of_an_owner_that_is_due_first() -> None:
    queue, begun, is_here = FairQueue(8, lambda owner: 1.0), list[str](), asyncio.Event()

    async def flood() -> None:
        turn = Turn("flood", 5000.0, size=8, is_timed=True)
        async with queue.place(turn):
            begun.append("flood")
            await is_here.wait()
            turn.measured = 5.0

    async def other() -> None:
        for _ in range(6):
            turn = Turn("other", is_timed=True)
            async with queue.place(turn):
                await asyncio.sleep(0)
                begun.append("other")
                turn.measured = 0.01

    floods = [asyncio.create_task(flood()) for _ in range(4)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(other())
    await asyncio.sleep(0)
    is_here.set()
    await asyncio.gather(waiting, *floods)
    assert begun == ["flood", *["other"] * 6, *["flood"] * 3]


async def test_owners_with_enough_requests_get_all_places() -> None:
    line = Line(places=20, beside=8)
    await line.send("b", 1)
    await line.send("a", 400)
    assert line.inside_of("a") == 7
    await line.send("b", 400)
    await line.end(100)
    assert (line.inside_of("a"), line.inside_of("b")) == (10, 10)
    for task in line.tasks:
        task.cancel()


async def test_few_places_are_divided_equally_among_owners() -> None:
    line = Line(places=20, beside=9)
    await line.send("c", 1)
    await line.send("b", 12)
    assert line.inside_of("b") == 8
    await line.send("a", 400)
    assert line.inside_of("a") == 3, "a third of 9"
    for task in line.tasks:
        task.cancel()


async def test_at_most_one_of_eight_places_is_kept_free_however_many_are_expected_back() -> None:
    line = Line(places=16)
    for owner in "bcdefgh":
        await line.send(owner, 1)
    await line.end(7)
    await line.send("a", 100)
    assert line.inside_of("a") == 14
    for task in line.tasks:
        task.cancel()


async def test_work_of_many_places_begins_with_one_and_gives_them_back_one_by_one() -> None:
    line = Line(places=10)
    first, second, third = await line.send("a", 3, size=8)
    assert line.begun == [first, second]
    (turn,) = await line.send("b", 1)
    for _ in range(6):
        line.queue.free(first, 1)
    await asyncio.sleep(0)
    assert line.begun == [first, second], "ten places are in use"
    line.queue.free(first, 1)
    await asyncio.sleep(0)
    assert line.begun == [first, second, turn]
    line.queue.free(first, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert third not in line.begun, "the last place must stay reserved to the end"
    await line.end(2)
    await asyncio.sleep(0)
    assert third in line.begun
    await line.end(2)
    assert line.queue.describe(third) == "it is next"
    assert all(task.done() for task in line.tasks)


@pytest.mark.parametrize("is_measured", [True, False])
def test_work_of_the_server_beside_a_turn_is_no_owners(is_measured: bool) -> None:
    """Sixteen owners take equal steps. The server copies data during some of them, more often for some owners."""
    steps, chance = Counter[str](), random.Random(3)

    async def take_steps(name: str, share: float, queue: FairQueue) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < 2000.0:
            turn = Turn(name, 100.0, is_timed=True)
            async with queue.place(turn):
                await asyncio.sleep(0.1 + 0.1 * (chance.random() < share))
                turn.measured = 0.1 if is_measured else None
            steps[name] += 1

    async def main() -> None:
        queue = FairQueue(1, lambda owner: 1.0)
        await asyncio.gather(*(take_steps(f"o{number:02}", number / 32, queue) for number in range(16)))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    spread = max(steps.values()) / min(steps.values())
    print(f"slowest over fastest {spread:.3f}, measured: {is_measured}")
    assert (spread < 1.02) is is_measured
