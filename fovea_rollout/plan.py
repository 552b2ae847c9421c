"""What prompts are put together from: runs of the template's own tokens, sampled turns, and pictures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fovea.wire.errors import InvalidInput
from fovea_rollout.policy import Tokens
from fovea_rollout.skeleton import MARK, Entry, Skeleton, Turn, read_mark, without_opening

_LONG = 12
"""Turns from which on a history is not rendered whole each time."""
_STRIDE = 4
_CHECK_EVERY = 32
_CACHED_PLANS = 2048


class Splice(NamedTuple):
    """Where the sampled turn at `entry` of the history goes: all of it, or what follows its thinking."""

    entry: int
    is_stripped: bool


Piece = Tokens | Splice | None
"""None is the next picture."""
Plan = tuple[Piece, ...]


class Planner:
    """Plans of prompts, by what the template can see of the history.

    A template takes time in proportion to the history, so a conversation of many turns would take time in proportion
    to their square. The plan of a long history is therefore made from the plan of the one before and from renderings
    of short windows, the beginning and the last few turns, if what these overlap agrees: with the plan before, and
    with each other, before and after the last turn was added. Otherwise, and every so often to be sure, it is rendered
    whole.
    """

    def __init__(self, skeleton: Skeleton, encode: Callable[[str], Tokens]) -> None:
        self._skeleton = skeleton
        self._encode = encode
        self._plans: OrderedDict[tuple[Entry, ...], Plan] = OrderedDict()
        self._trusts_windows = True

    def plan(self, entries: tuple[Entry, ...]) -> Plan:
        """Of the prompt for the next turn. Raises InvalidInput as `Skeleton.render` does."""
        known = self._plans.get(entries)
        if known is not None:
            self._plans.move_to_end(entries)
            return known
        starts = [index for index, entry in enumerate(entries) if isinstance(entry, Turn)]
        plan = self._grown(entries, starts) if self._trusts_windows and len(starts) >= _LONG else None
        if plan is None or len(starts) % _CHECK_EVERY == 0:
            whole = self._rendered(entries)
            self._trusts_windows &= plan is None or plan == whole
            plan = whole
        self._plans[entries] = plan
        if len(self._plans) > _CACHED_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _grown(self, entries: tuple[Entry, ...], starts: Sequence[int]) -> Plan | None:
        """The plan before the last turn, with what windows tell of the end; None if they do not agree."""
        before = self._plans.get(entries[: starts[-1]])
        if before is None:
            return None
        # Windows begin at the same turn for a while, so that the one before is mostly known.
        block = (len(starts) - 3) // _STRIDE * _STRIDE
        first, cut = starts[block], starts[block + 1]
        front = entries[: starts[0]]
        # Thinking that is still there somewhere earlier stands for all of it: is it stripped now?
        kept = _last_thinking(before, entries, first)
        if kept is not None:
            front += entries[kept : starts[starts.index(kept) + 1]]
        try:
            old, new = (self._window(front + entries[first:end]) for end in (starts[-1], len(entries)))
        except InvalidInput:  # To be named by its place in the whole.
            return None
        shift = first - len(front)
        tail = _shifted(old[_place(old, len(front)) :], shift)
        is_known = before[_place(before, first) :] == tail
        is_kept = kept is None or Splice(starts[0], is_stripped=False) in old
        border = _place(old, cut - shift)
        if not is_known or not is_kept or new[:border] != old[:border]:
            return None
        return before[: _place(before, cut)] + _shifted(new[border:], shift)

    def _window(self, entries: tuple[Entry, ...]) -> Plan:
        known = self._plans.get(entries)
        if known is None:
            known = self._plans[entries] = self._rendered(entries)
        return known

    def _rendered(self, entries: tuple[Entry, ...]) -> Plan:
        pieces: list[Piece] = []
        literal, thinking, is_ended = "", None, False
        for part in MARK.split(self._skeleton.render(entries)):
            found = read_mark(part)
            if found is None:
                # What a turn ended with itself is not written again.
                literal = part.removeprefix(self._skeleton.end) if is_ended else part
                is_ended = False
                continue
            kind, index = found
            turn = entries[index]
            assert isinstance(turn, Turn)
            if kind == "thinking":
                # The tag is in the sampled ids, unless the generation prompt gave it.
                literal, thinking = without_opening(literal) + self._skeleton.opening, index
                pieces += [*self._split_pictures(literal), Splice(index, is_stripped=False)]
            elif thinking == index:
                thinking = None
            else:
                pieces += [*self._split_pictures(literal), Splice(index, is_stripped=turn.is_thinking)]
            literal, is_ended = "", kind == "answer" and turn.is_ended
        pieces += self._split_pictures(literal)
        _refuse_lost_turns(entries, pieces)
        return tuple(pieces)

    def _split_pictures(self, literal: str) -> list[Piece]:
        placeholder = self._skeleton.placeholder
        pieces: list[Piece] = []
        for place, run in enumerate(literal.split(placeholder) if placeholder else [literal]):
            pieces += [None] if place else []
            pieces += [self._encode(run)] if run else []
        return pieces


def _place(plan: Plan, entry: int) -> int:
    """Where a turn is spliced in."""
    for place in range(len(plan) - 1, -1, -1):
        piece = plan[place]
        if isinstance(piece, Splice) and piece.entry == entry:
            return place
    raise AssertionError(f"the plan has no turn at {entry}")


def _shifted(plan: Plan, by: int) -> Plan:
    return tuple(Splice(piece.entry + by, piece.is_stripped) if isinstance(piece, Splice) else piece for piece in plan)


def _last_thinking(plan: Plan, entries: Sequence[Entry], until: int) -> int | None:
    """The last turn before `until` that is spliced in with its thinking."""
    for piece in reversed(plan):
        if isinstance(piece, Splice) and piece.entry < until and not piece.is_stripped:
            turn = entries[piece.entry]
            if isinstance(turn, Turn) and turn.is_thinking:
                return piece.entry
    return None


def _refuse_lost_turns(entries: Sequence[Entry], pieces: Sequence[Piece]) -> None:
    kept = [piece.entry for piece in pieces if isinstance(piece, Splice)]
    lost = [index for index, entry in enumerate(entries) if isinstance(entry, Turn) and kept.count(index) != 1]
    if lost:
        where, count = f"history[{lost[0]}]", kept.count(lost[0])
        raise InvalidInput(f"{where}: the chat template writes this answer {count} times, not once", field=where)
