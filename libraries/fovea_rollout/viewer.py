"""Writes rollouts as one static page that contains everything it shows.

The page fetches nothing and executes only its own script. Output of models and environments is shown as text.
"""

from __future__ import annotations

import html
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fovea_rollout.line_chart import line_chart
from fovea_rollout.messages import Message, Part, Picture
from fovea_rollout.policies.policy import WeightVersions
from fovea_rollout.trajectory import Segment, Trajectory, Turn, failures_of, reward_mean

Decode = Callable[[Sequence[int]], str]
Row = list[Any]

_FOLDER = pathlib.Path(__file__).parent
_CHARACTER_BYTES = 4


def write_viewer(
    path: pathlib.Path,
    trajectories: Sequence[Trajectory],
    title: str,
    *,
    decode: Decode,
    curves: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Writes the page.

    Args:
        path: The file to write.
        trajectories: The trajectories to show. Each picture is stored once.
        title: Title of the page.
        decode: Decodes ids with the tokenizer, including special tokens.
        curves: One number per step for each named curve; NaN for steps without a number.
    """
    pictures: dict[str, str] = {}
    texts: dict[int, str] = {}
    data = {
        "trajectories": [_trajectory(one, _Tokens(decode, texts), pictures) for one in trajectories],
        "pictures": pictures,
    }
    parts = {
        "title": html.escape(title),
        "figures": _figures(trajectories),
        "curves": "".join(line_chart(name, values) for name, values in (curves or {}).items()),
        # A "</script>" that a model wrote must not end the element.
        "data": json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "script": (_FOLDER / "viewer.js").read_text(encoding="utf-8"),
    }
    page = (_FOLDER / "viewer.html").read_text(encoding="utf-8")
    path.write_text(re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page), encoding="utf-8", errors="replace")


def _figures(trajectories: Sequence[Trajectory]) -> str:
    turns = [turn for one in trajectories for turn in one.turns]
    mean = reward_mean(trajectories)
    figures = {
        "trajectories": f"{len(trajectories):,}",
        "mean reward": "–" if math.isnan(mean) else f"{mean:.3f}",
        "failures": f"{len(failures_of(trajectories)):,}",
        "turns": f"{len(turns):,}",
        "sampled tokens": f"{sum(len(turn.sampled.ids) for turn in turns):,}",
        "prefix breaks": f"{sum(one.prefix_breaks for one in trajectories):,}",
    }
    return "".join(f'<div class="figure"><b>{value}</b><span>{name}</span></div>' for name, value in figures.items())


class _Tokens:
    """The texts of tokens. Each id is decoded once."""

    def __init__(self, decode: Decode, known: dict[int, str]) -> None:
        self._decode, self._known = decode, known

    def rows(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> list[Row]:
        """Returns [id, text, logprob or null] per token. If tokens share a character, the last one has it as text."""
        scores = [None] * len(ids) if logprobs is None else [round(one, 5) for one in logprobs]
        return [[token, text, score] for token, text, score in zip(ids, self._texts(ids), scores, strict=True)]

    def _texts(self, ids: Sequence[int]) -> Iterator[str]:
        pending: list[int] = []
        for token in ids:
            pending.append(token)
            text = self._text(token) if len(pending) == 1 else self._decode(pending)
            if text.endswith("�") and len(pending) < _CHARACTER_BYTES:
                yield ""
            else:
                yield text
                pending = []

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]


def _trajectory(one: Trajectory, tokens: _Tokens, pictures: dict[str, str]) -> dict[str, Any]:
    return {
        "conversation": one.conversation,
        "reward": one.reward,
        "end": one.end,
        "seconds": one.seconds,
        "prefix_breaks": one.prefix_breaks,
        "rewrites": one.rewrites,
        "versions": None if one.versions is None else _versions(one.versions),
        "tokens": sum(len(turn.sampled.ids) for turn in one.turns),
        "failure": None if one.failure is None else vars(one.failure),
        "turns": [_turn(turn, tokens, pictures) for turn in one.turns],
        "segments": [_segment(segment, one.turns, tokens, pictures) for segment in one.segments],
    }


def _turn(turn: Turn, tokens: _Tokens, pictures: dict[str, str]) -> dict[str, Any]:
    answer, sampled = turn.answer, turn.sampled
    notes = [
        answer.malformed and f"malformed tool call: {answer.malformed}",
        answer.is_cut and "cut off by max_tokens",
        answer.tool_calls and "called " + ", ".join(call.name for call in answer.tool_calls),
    ]
    return {
        "messages": [_message(message, pictures) for message in turn.new_messages],
        "tokens": tokens.rows(sampled.ids, sampled.logprobs),
        "versions": _versions(sampled.versions),
        "text": f"{answer.thinking} {answer.text}",
        "note": "; ".join(note for note in notes if note),
        "reward": turn.reward,
        "metrics": dict(turn.metrics),
    }


def _segment(segment: Segment, turns: Sequence[Turn], tokens: _Tokens, pictures: dict[str, str]) -> dict[str, Any]:
    turn_of = dict(zip(segment.sampled, segment.turns, strict=True))
    pieces: list[dict[str, Any]] = []
    for index, chunk in enumerate(segment.chunks):
        if isinstance(chunk, Picture):
            pieces.append(_picture(chunk, pictures))
            continue
        piece: dict[str, Any] = {"tokens": tokens.rows(chunk.ids, segment.sampled.get(index))}
        if index in turn_of:
            piece["versions"] = _versions(turns[turn_of[index]].sampled.versions)
        pieces.append(piece)
    return {"pieces": pieces, "turns": list(segment.turns)}


def _message(message: Message, pictures: dict[str, str]) -> dict[str, Any]:
    def part_of(part: Part) -> str | dict[str, Any]:
        return part if isinstance(part, str) else _picture(part, pictures)

    return {"role": message.role, "parts": [part_of(part) for part in message.parts]}


def _picture(picture: Picture, pictures: dict[str, str]) -> dict[str, Any]:
    if picture.digest not in pictures:
        pictures[picture.digest] = picture.data_uri
    return {"picture": picture.digest}


def _versions(versions: WeightVersions) -> list[int]:
    return [versions.oldest, versions.newest]
