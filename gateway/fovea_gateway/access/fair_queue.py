"""A queue that divides a few slots among many owners.

The algorithm is start-time fair queueing over tokens (Goyal, Vin and Cheng, "Start-Time Fair Queueing", IEEE/ACM
Transactions on Networking 5(5), 1997), with several slots at once (Jin, Chase and Kaur, "Interposed Proportional
Sharing for a Storage Service Utility", SIGMETRICS 2004).

In virtual time, a request starts where its owner's previous request finished, or when it arrives if that is later. It
finishes later by its cost in tokens, divided by the owner's weight. The queue admits the request with the earliest
start first, and virtual time is the start of the request that was admitted last. Three properties follow. Owners that
always have waiting requests get tokens in proportion to their weights, regardless of the number and size of their
requests. An owner that was absent keeps no unused share, and owes none. An owner's first request waits only for a
slot, not for the requests that others have queued.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_PATIENCE_S = 1.0
"""Seconds for which a slot is reserved for the owner's next request when that request is about to come: the gateway
only has to write it to the database.
"""
_BRIEF_S = 0.1
_LONG = 10.0
"""A slot is also reserved, for `_BRIEF_S` seconds, when no next request is announced, if the next request of the others
takes at least this many times as long. Otherwise a client that sends its next command after the answer to the last one
would wait that long for each command.
"""
_LEAD = 0.5
"""A slot is also reserved for an owner that leads by up to this fraction of its last request: steps are small."""
_EVEN = 0.125
"""An owner that returns within this fraction of its next request of the others is treated as level with them; otherwise
a tiny debt would cost it a whole turn.
"""
_LOOK_S = 1.0
"""Seconds between two checks whether a request that gave way may continue."""
_RECENT_S = 30.0
"""Seconds for which an owner that left is expected back; others do not fill the slots that it would need."""
_KEPT_FREE = 8
"""At most one in this many slots is kept free for owners that are expected back, one slot for each of them."""


@dataclass(eq=False)
class Turn:
    """One request in the queue, before, during and after it has a slot. It can be used for one slot only.

    Attributes:
        cost: The estimated tokens of the request; `settle` corrects the estimate. For a timed turn, milliseconds.
        is_timed: Whether the turn is settled with its `seconds`, in milliseconds, when it ends. This includes turns
            that fail.
        size: The number of slots that the request uses. One free slot is enough for it to begin.
        is_followed: Called when the turn ends. Returns whether the owner's next request is about to come and needs only
            a slot. The slot is then reserved for that request if it starts before all waiting ones (Iyer and Druschel,
            "Anticipatory scheduling", SOSP 2001). Without this, an owner that sends one request after another would get
            a third beside an owner that floods the queue, not a half.
        is_wanted: Returns whether a client waits for the request. A request without a waiting client gives way to those
            that have one.
        estimate: Returns the newest estimate of `cost` while the request waits, if that may change.
        gives_way: Whether the request is giving way now.
        seconds: The request's share, by tokens, of the time in which it shared the slots with others. The `seconds` of
            all turns add up to the time in which at least one slot was in use.
        measured: The seconds that the server reports for this request alone. If set, they replace that share, which
            also contains the server's other work.
    """

    owner: str
    cost: float = 1.0
    is_followed: Callable[[], bool] = lambda: False
    size: int = 1
    is_timed: bool = False
    is_wanted: Callable[[], bool] = lambda: True
    estimate: Callable[[], float] | None = None
    gives_way: bool = False
    seconds: float = 0.0
    measured: float | None = None
    used: float | None = None
    number: int = 0
    arrived: float = 0.0
    admitted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.cost = max(self.cost, 1.0)

    def price(self) -> float:
        """Returns the cost of a waiting turn by its newest estimate."""
        if self.estimate is not None:
            self.cost = max(self.estimate(), 1.0)
        return self.cost

    def settle(self, tokens: float) -> None:
        """Records the cost that the request really had."""
        self.used = tokens


@dataclass(eq=False)
class _Flow:
    """The state of one owner: its waiting turns in order, the number of slots that it holds, and the virtual time at
    which its last admitted turn finishes.
    """

    waiting: deque[Turn] = field(default_factory=deque)
    finish: float = 0.0
    inside: int = 0

    def start(self) -> tuple[float, int]:
        """Returns the virtual start time of the next turn, and its number, which orders turns with equal starts."""
        return max(self.waiting[0].arrived, self.finish), self.waiting[0].number

    def forget_gone(self) -> bool:
        """Drops cancelled turns at the head of the queue. Returns whether any was dropped."""
        count = len(self.waiting)
        while self.waiting and self.waiting[0].admitted.done():
            self.waiting.popleft()
        return len(self.waiting) < count


class FairQueue:
    """A number of slots, and the requests that wait for one.

    Args:
        places: The number of slots.
        weight_of: Returns the weight of an owner, which must be above 0.
        alone: The number of slots while all requests belong to one owner and no other owner was there lately; ignored
            unless it is above `places`. A server that does one thing at a time then has its next request when the last
            one ends, and no other owner has to wait for requests that were sent ahead.
        beside: The number of slots while some owner has no waiting request, but has a slot or was there lately; ignored
            unless it is below `places`. This is for a server that does each thing more slowly the more it does at once.
            Each owner may have an equal share of these slots, even if others hold more than theirs. While every owner
            has waiting requests, all slots are used, because that gives all of them the highest throughput.
    """

    def __init__(self, places: int, weight_of: Callable[[str], float], alone: int = 0, beside: int = 0) -> None:
        self._places, self._alone, self._weight_of = places, max(alone, places), weight_of
        self._beside = min(beside or places, places)
        self._inside = 0
        self._kept_for = ""
        self._flows: dict[str, _Flow] = {}
        # Owners with waiting or admitted turns, and the subset that has only admitted ones.
        self._present: set[str] = set()
        self._only_inside: set[str] = set()
        # When absent owners left, in seconds of the event loop's clock, the earliest first.
        self._left_at: dict[str, float] = {}
        # Heaps of the starts of waiting flows and the finishes of absent ones. Stale entries are dropped when popped.
        self._starts: list[tuple[float, int, str]] = []
        self._finishes: list[tuple[float, str]] = []
        self._now = 0.0  # virtual
        self._numbers = itertools.count()
        # Seconds of service per admitted token so far: the integral of 1 / (admitted tokens) over time.
        self._clock = self._clock_at = self._tokens_inside = 0.0

    @asynccontextmanager
    async def place(self, turn: Turn) -> AsyncIterator[None]:
        """Waits for a slot and holds it until the block ends. Raises the error that is passed to `dismiss`."""
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
            share = turn.cost * (self._clock - begun_at)
            turn.seconds += share if turn.measured is None else turn.measured
            if turn.is_timed:
                turn.settle(1000 * turn.seconds)
            self._leave(turn)

    def describe(self, turn: Turn) -> str:
        """Returns the position of a waiting turn, as a text for the client."""
        if turn.gives_way:
            return "its client has not been heard from for a while: it gives way to requests with waiting clients"
        flow = self._flows.get(turn.owner)
        if flow is None or not flow.waiting or turn.admitted.done():
            return "it is next"
        others = len(self._present) - len(self._only_inside) - 1
        position = max(turn.number - flow.waiting[0].number, 0) + 1
        beside = f", taking turns with {others} other owner{'s' if others > 1 else ''}" if others else ""
        return (
            f"it is at most number {position} of the {len(flow.waiting)} requests that this owner has waiting{beside}"
        )

    def resize(self, places: int, beside: int = 0) -> None:
        """Changes `places` and `beside`."""
        self._alone += places - self._places
        self._places, self._beside = places, min(beside or places, places)
        self._admit()

    def free(self, turn: Turn, places: int) -> None:
        """Returns some of a turn's slots before it ends; the turn keeps at least one until then."""
        places = min(places, turn.size - 1)
        turn.size -= places
        self._flows[turn.owner].inside -= places
        self._inside -= places
        self._admit()

    def dismiss(self, error: Exception) -> None:
        """Fails all waiting turns with an error."""
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
        """Returns the slot just acquired. Waits for another one once no request with a waiting client is queued."""
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
                turn.settle(0.0)  # admitted and cancelled at the same moment
                self._leave(turn)
            raise

    def _note(self, owner: str, flow: _Flow) -> None:
        """Updates the sets and heaps after a turn of an owner arrived, left, was admitted or was settled."""
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
        """Returns the heap entry of the waiting flow that starts first, without removing it."""
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
        """Admits the turns that start first while there are free slots."""
        while (entry := self._next_start()) is not None:
            owner = entry[2]
            whole, each = self._room()
            if self._inside >= whole:
                owner = self._first_below(each) if self._inside < self._places else ""
            if not owner:
                return
            if self._kept_for and self._flows[self._kept_for].waiting:
                owner, self._kept_for = self._kept_for, ""
            elif self._holds_up(owner) or (
                self._kept_for and self._inside + self._flows[owner].waiting[0].size >= whole
            ):
                return
            self._let_in(owner)

    def _holds_up(self, owner: str) -> bool:
        """Returns whether an owner's next turn is so long that it must not begin beside owners that are due first."""
        flow = self._flows[owner]
        turn, (start, _) = flow.waiting[0], flow.start()
        if not turn.is_timed or turn.size < self._places or turn.price() <= _LONG * 1000 * _BRIEF_S:
            return False
        others = (self._flows[other] for other in self._present if other != owner)
        return any(other.inside and other.finish <= start for other in others)

    def _first_below(self, most: int) -> str:
        """Returns the owner that starts first among those with fewer slots than `most`; empty if there is none."""
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
        """Returns how many slots may be in use in total, and how many each owner may have even if that exceeds the
        total.
        """
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
        return turn.price() / self._weight_of(turn.owner)

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
            loop.call_later(_RECENT_S + 0.1, self._admit)  # from then on no slot is kept free for this owner
        self._keep_place(turn, flow)
        self._admit()
        self._forget_absent()

    def _keep_place(self, turn: Turn, flow: _Flow) -> None:
        """Reserves the slot of an ending turn for its owner's next turn, if that would start before all waiting turns
        or hardly after the first of them.
        """
        if self._kept_for or flow.waiting or turn.gives_way or (first := self._next_start()) is None:
            return
        last = turn.cost if turn.used is None else turn.used
        if turn.is_followed():
            patience_s, lead = _PATIENCE_S, _LEAD * last
        elif turn.is_timed and self._flows[first[2]].waiting[0].price() > _LONG * 1000 * _BRIEF_S:
            patience_s, lead = _BRIEF_S, 0.0
        else:
            return
        if flow.finish <= first[0] + lead:
            self._kept_for = turn.owner
            asyncio.get_running_loop().call_later(patience_s, self._give_up, turn.owner)

    def _give_up(self, owner: str) -> None:
        """Releases a reserved slot to other owners."""
        if self._kept_for == owner:
            self._kept_for = ""
            self._note(owner, self._flows[owner])
            self._admit()
            self._forget_absent()

    def _forget_absent(self) -> None:
        """Drops absent owners that are level with the others, since their past no longer matters. If no owner is
        present, drops all.
        """
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
