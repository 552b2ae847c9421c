"""A few places that many owners want: start-time fair queueing over tokens (Goyal, Vin and Cheng, "Start-Time Fair
Queueing", IEEE/ACM Transactions on Networking 5(5), 1997), with several places at once (Jin, Chase and Kaur,
"Interposed Proportional Sharing for a Storage Service Utility", SIGMETRICS 2004).

A piece of work starts, in virtual time, where its owner's last one finished, or at the time of its arrival if that is
later; it finishes as many tokens later as it costs, divided by the owner's weight. Whoever starts first is let in
first, and virtual time is the start of whoever was let in last. So owners who want more than there is get tokens in
proportion to their weights, whatever number of requests they send of whatever size; an owner who was away neither
saves up a share nor owes one; and somebody's first request waits for places alone, not for what others have queued.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_PATIENCE_S = 1.0
"""For which a place is kept: what comes next has only to be written down."""
_BRIEF_S = 0.1
_LONG = 10.0
"""A place is kept so briefly even for an owner of which nothing is about to come, if the next work of others takes so
many times as long: a client that sends its next command once it has the answer would wait for that each time.
"""
_LEAD = 0.5
"""A place is kept also for who is ahead of others by so much of its last piece: a step after a batch is small."""
_EVEN = 0.125
"""Who comes back, ahead of others by no more than this part of its next piece, is taken to be even: to collect so
little would let a whole further piece of theirs go first."""
_LOOK_S = 1.0
"""Between two looks whether work that gives way may go on."""
_RECENT_S = 30.0
"""Who has left no longer ago is expected back, and finds no more work before its own than while it was there."""
_KEPT_FREE = 8
"""At most one place of so many is kept free for those who are expected back: one for each of them."""


@dataclass(eq=False)
class Turn:
    """One piece of work, before, in and after its place; for one place only.

    Attributes:
        cost: Tokens that it is taken to need; `settle` corrects that. Of a timed turn, milliseconds.
        is_timed: The turn is settled with its `seconds` at its end, however it ends.
        size: Places that it takes, though one that is free is enough to begin.
        is_followed: Says at its end whether the owner's next work is about to come, and waits for nothing else. Then
            its place is kept for that, if that starts before all that waits (Iyer and Druschel, "Anticipatory
            scheduling", SOSP 2001): else whoever sends one thing after another would get a third beside a flood, not a
            half.
        is_wanted: Says whether a client waits for the work. Work that none waits for gives way to work that one does.
        gives_way: It gives way now.
        seconds: Of the time in which any place was taken, its part: by tokens, among all that were in a place with it.
            Those of all turns add up to the time in which the queue's places were not all empty.
    """

    owner: str
    cost: float = 1.0
    is_followed: Callable[[], bool] = lambda: False
    size: int = 1
    is_timed: bool = False
    is_wanted: Callable[[], bool] = lambda: True
    gives_way: bool = False
    seconds: float = 0.0
    used: float | None = None
    number: int = 0
    arrived: float = 0.0
    admitted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.cost = max(self.cost, 1.0)

    def settle(self, tokens: float) -> None:
        """Says what it really used."""
        self.used = tokens


@dataclass(eq=False)
class _Flow:
    """What one owner has: who waits, in order, how many places it has, and where in virtual time the last one who was
    let in finishes."""

    waiting: deque[Turn] = field(default_factory=deque)
    finish: float = 0.0
    inside: int = 0

    def start(self) -> tuple[float, int]:
        """Where the next one starts; of those that start together, who came first."""
        return max(self.waiting[0].arrived, self.finish), self.waiting[0].number

    def forget_gone(self) -> bool:
        """Drops those at the head that have given up; says whether there were any."""
        count = len(self.waiting)
        while self.waiting and self.waiting[0].admitted.done():
            self.waiting.popleft()
        return len(self.waiting) < count


class FairQueue:
    """Places, and those who wait for one.

    Args:
        places: How much work goes on at once.
        weight_of: An owner's weight, above 0.
        alone: How much goes on at once while it is all one owner's, and no other was there lately, if that is more: so
            that a server that does one thing at a time finds the next one when that ends, and yet nobody waits for what
            others have sent ahead.
        beside: How much goes on at once while somebody is there, or was lately, of whom nothing waits, if that is less:
            for a server that does each thing more slowly the more it does at once. An equal part of it is everybody's,
            whatever the others have. While something of everybody waits, each asks for as much as it can have, and all
            get most out of all places.
    """

    def __init__(self, places: int, weight_of: Callable[[str], float], alone: int = 0, beside: int = 0) -> None:
        self._places, self._alone, self._weight_of = places, max(alone, places), weight_of
        self._beside = min(beside or places, places)
        self._inside = 0
        self._kept_for = ""
        self._flows: dict[str, _Flow] = {}
        # Owners that wait or are inside, and those of them that do not wait.
        self._present: set[str] = set()
        self._only_inside: set[str] = set()
        # Absent owners by when they left, in seconds of the loop's time, the earliest first.
        self._left_at: dict[str, float] = {}
        # Where flows start, and where absent ones finish. An entry that no longer holds is dropped when it comes up.
        self._starts: list[tuple[float, int, str]] = []
        self._finishes: list[tuple[float, str]] = []
        self._now = 0.0  # virtual
        self._numbers = itertools.count()
        # Seconds that each token inside has had by now: the integral of 1 / (tokens inside).
        self._clock = self._clock_at = self._tokens_inside = 0.0

    @asynccontextmanager
    async def place(self, turn: Turn) -> AsyncIterator[None]:
        """Waits for a place, and holds it until the block ends. Raises what `dismiss` was given."""
        await self._wait(turn)
        while not turn.is_wanted() and self._has_wanted():
            await self._give_way(turn)
        self._count_time()
        self._tokens_inside += turn.cost
        begun_at = self._clock
        try:
            yield
        finally:
            self._count_time()
            self._tokens_inside -= turn.cost
            turn.seconds += turn.cost * (self._clock - begun_at)
            if turn.is_timed:
                turn.settle(1000 * turn.seconds)
            self._leave(turn)

    def describe(self, turn: Turn) -> str:
        """Where a turn stands that waits, for whoever asks why."""
        if turn.gives_way:
            return "its client was not heard of for a while: it gives way to work that others wait for"
        flow = self._flows.get(turn.owner)
        if flow is None or not flow.waiting or turn.admitted.done():
            return "it is next"
        others = len(self._present) - len(self._only_inside) - 1
        position = max(turn.number - flow.waiting[0].number, 0) + 1
        beside = f", by turns with {others} other owner{'s' if others > 1 else ''}" if others else ""
        return f"it is number {position} at most of the {len(flow.waiting)} that this owner has waiting{beside}"

    def resize(self, places: int, beside: int = 0) -> None:
        """Changes the number of places, and of those beside somebody of whom nothing waits."""
        self._alone += places - self._places
        self._places, self._beside = places, min(beside or places, places)
        self._admit()

    def free(self, turn: Turn, places: int) -> None:
        """Lets others have some of a turn's places before it ends; it keeps one until then."""
        places = min(places, turn.size - 1)
        turn.size -= places
        self._flows[turn.owner].inside -= places
        self._inside -= places
        self._admit()

    def dismiss(self, error: Exception) -> None:
        """Sends away all who wait."""
        for owner, flow in self._flows.items():
            flow.forget_gone()
            while flow.waiting:
                flow.waiting.popleft().admitted.set_exception(error)
                flow.forget_gone()
            self._note(owner, flow)

    def _has_wanted(self) -> bool:
        """Returns whether any queued work has a client that waits for it."""
        waiting = (turn for owner in self._present - self._only_inside for turn in self._flows[owner].waiting)
        return any(not turn.admitted.done() and turn.is_wanted() for turn in waiting)

    async def _give_way(self, turn: Turn) -> None:
        """Gives a place back that was just got, and waits for one again once that takes it from no client."""
        turn.settle(0.0)
        turn.gives_way = True
        self._leave(turn)
        while True:
            await asyncio.sleep(_LOOK_S)
            if turn.is_wanted() or not self._has_wanted():
                break
        turn.gives_way, turn.used = False, None
        turn.admitted = asyncio.get_running_loop().create_future()
        await self._wait(turn)

    async def _wait(self, turn: Turn) -> None:
        turn.number, turn.arrived = next(self._numbers), self._now
        flow = self._flows.setdefault(turn.owner, _Flow())
        if not flow.waiting and not flow.inside and flow.finish - self._now <= _EVEN * self._share(turn):
            flow.finish = min(flow.finish, self._now)
        flow.waiting.append(turn)
        self._left_at.pop(turn.owner, None)
        self._note(turn.owner, flow)
        self._admit()
        try:
            await turn.admitted
        except asyncio.CancelledError:
            flow.forget_gone()
            self._note(turn.owner, flow)
            if turn.admitted.done() and not turn.admitted.cancelled() and turn.admitted.exception() is None:
                turn.settle(0.0)  # let in and cancelled in the same moment
                self._leave(turn)
            raise

    def _note(self, owner: str, flow: _Flow) -> None:
        """Keeps what is counted of owners, after one of them has come, gone, been let in or been settled."""
        if flow.waiting:
            self._present.add(owner)
            self._only_inside.discard(owner)
            heapq.heappush(self._starts, (*flow.start(), owner))
        elif flow.inside:
            self._present.add(owner)
            self._only_inside.add(owner)
        else:
            self._present.discard(owner)
            self._only_inside.discard(owner)
            heapq.heappush(self._finishes, (flow.finish, owner))

    def _next_start(self) -> tuple[float, int, str] | None:
        """The entry of the flow that starts first, of those that wait; it stays in the heap."""
        while self._starts:
            start, number, owner = self._starts[0]
            flow = self._flows.get(owner)
            if flow is not None:
                if flow.forget_gone():
                    self._note(owner, flow)
                if flow.waiting and flow.start() == (start, number):
                    return self._starts[0]
            heapq.heappop(self._starts)
        return None

    def _admit(self) -> None:
        """Lets in whatever starts first, while there are places."""
        while (entry := self._next_start()) is not None:
            owner = entry[2]
            whole, each = self._room()
            if self._inside >= whole:
                owner = self._first_below(each) if self._inside < self._places else ""
            if not owner:
                return
            if self._kept_for:
                owner = self._kept_for
                if not self._flows[owner].waiting:
                    return
                self._kept_for = ""
            self._let_in(owner)

    def _first_below(self, most: int) -> str:
        """The owner that starts first of those with fewer than so many places; empty if there is none."""
        passed, found = [], ""
        while most and not found and (entry := self._next_start()) is not None:
            if self._flows[entry[2]].inside < most:
                found = entry[2]
            else:
                passed.append(heapq.heappop(self._starts))
        for entry in passed:
            heapq.heappush(self._starts, entry)
        return found

    def _room(self) -> tuple[int, int]:
        """How much may go on at once, and how much of each owner even above that."""
        now = asyncio.get_running_loop().time()
        while self._left_at and now - next(iter(self._left_at.values())) >= _RECENT_S:
            del self._left_at[next(iter(self._left_at))]
        expected = len(self._left_at)
        owners = len(self._present) + expected
        if owners == 1:
            return self._alone, 0
        if not expected and not self._only_inside:
            return self._places, 0
        whole = self._beside - min(expected, self._beside // _KEPT_FREE)
        return whole, max(whole // owners, 1)

    def _share(self, turn: Turn) -> float:
        return turn.cost / self._weight_of(turn.owner)

    def _let_in(self, owner: str) -> None:
        flow = self._flows[owner]
        self._now, _ = flow.start()
        turn = flow.waiting.popleft()
        flow.finish = self._now + self._share(turn)
        flow.inside += turn.size
        self._inside += turn.size
        turn.admitted.set_result(None)
        self._note(owner, flow)

    def _leave(self, turn: Turn) -> None:
        flow = self._flows[turn.owner]
        if turn.used is not None:
            flow.finish += (turn.used - turn.cost) / self._weight_of(turn.owner)
        flow.inside -= turn.size
        self._inside -= turn.size
        self._note(turn.owner, flow)
        if not flow.waiting and not flow.inside:
            loop = asyncio.get_running_loop()
            self._left_at[turn.owner] = loop.time()
            loop.call_later(_RECENT_S + 0.1, self._admit)  # what waits then waits for no owner that is expected
        self._keep_place(turn, flow)
        self._admit()
        self._forget_absent()

    def _keep_place(self, turn: Turn, flow: _Flow) -> None:
        """Keeps the place of an owner that leaves for its next work, if that would start before all that waits, or
        hardly after.
        """
        if self._kept_for or flow.waiting or turn.gives_way or (first := self._next_start()) is None:
            return
        last = turn.cost if turn.used is None else turn.used
        if turn.is_followed():
            patience_s, lead = _PATIENCE_S, _LEAD * last
        elif turn.is_timed and self._flows[first[2]].waiting[0].cost > _LONG * 1000 * _BRIEF_S:
            patience_s, lead = _BRIEF_S, 0.0
        else:
            return
        if flow.finish <= first[0] + lead:
            self._kept_for = turn.owner
            asyncio.get_running_loop().call_later(patience_s, self._give_up, turn.owner)

    def _give_up(self, owner: str) -> None:
        """Lets others have a place that was kept."""
        if self._kept_for == owner:
            self._kept_for = ""
            self._note(owner, self._flows[owner])
            self._admit()
            self._forget_absent()

    def _forget_absent(self) -> None:
        """Drops owners whose past no longer matters: those level with the others; if none is there, all."""
        if not self._present and not self._kept_for:
            self._now = max([self._now, *(flow.finish for flow in self._flows.values())])
            self._tokens_inside = 0.0
        while self._finishes and self._finishes[0][0] <= self._now:
            finish, owner = heapq.heappop(self._finishes)
            flow = self._flows.get(owner)
            if flow is not None and flow.finish == finish and owner not in self._present and owner != self._kept_for:
                del self._flows[owner]

    def _count_time(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._tokens_inside > 0:
            self._clock += (now - self._clock_at) / self._tokens_inside
        self._clock_at = now
