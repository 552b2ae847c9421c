"""Renders conversations as prompts: the model's chat template around exactly the tokens that were sampled."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from fovea.vision.vision_family import with_margins
from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import THINK_CLOSE, THINK_OPEN, Answer, read_answer
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policies.policy import Chunk, Sampled, Tokens, WeightVersions
from fovea_rollout.templates.marked_template import (
    MARK,
    TEXT_MARK,
    Entry,
    MarkedTemplate,
    MessageEntry,
    TurnEntry,
    read_mark,
    without_opening,
)


class Splice(NamedTuple):
    """The position of the sampled turn at `entry` of the history; without its thinking if `is_stripped`."""

    entry: int
    is_stripped: bool


Piece = Tokens | Splice | None
"""A part of a prompt: tokens that the template writes, a sampled turn, or None for the next picture."""


class _Known(NamedTuple):
    """An entry of a history in the form that rendering needs.

    Attributes:
        entry: The entry as the template sees it.
        text: Text of a sampled turn, without the token that ends the turn.
        whole: Tokens of a sampled turn.
        answer: Tokens of a sampled turn after its thinking.
        pictures: Pictures of a message.
    """

    entry: Entry
    text: str = ""
    whole: tuple[Tokens, ...] = ()
    answer: tuple[Tokens, ...] = ()
    pictures: tuple[Picture, ...] = ()


class ChatTemplate:
    """A tokenizer's chat template, which renders histories as prompts.

    The template runs on marks in place of the sampled turns. The sampled ids then replace the marks. So sampled text is
    never tokenized again, and the template's changes to earlier turns, such as stripping their thinking, apply.

    Attributes:
        stop_ids: Tokens that end a turn.
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), *, placeholder: str = "", **arguments: Any
    ) -> None:
        """
        Args:
            tokenizer: A Hugging Face tokenizer with a chat template.
            tools: Tools in OpenAI's format, as `apply_chat_template` accepts them.
            placeholder: The token that represents a picture. Needed only if it cannot be found by rendering a picture.
            arguments: Further arguments of `apply_chat_template`, such as `enable_thinking=False`.

        Raises:
            InvalidInput: The template cannot render a question and its answer.
        """
        self._tokenizer = tokenizer
        self._template = MarkedTemplate(tokenizer, tools, placeholder, arguments)
        named = tokenizer.special_tokens_map.values()
        ends = [self._template.end_id, tokenizer.eos_token_id]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(token for token in ends if token is not None))
        # Servers also stop at the end tokens of the checkpoint, which a tokenizer may know only as its padding token.
        self._ends = {
            *self.stop_ids,
            *(tokenizer.convert_tokens_to_ids(name) for name in named if isinstance(name, str)),
        }
        self._encode = lru_cache(maxsize=8192)(self._encode_run)
        # Rollouts of one environment often differ only in the sampled tokens, so their pieces are the same.
        self._pieces = lru_cache(maxsize=2048)(self._render_pieces)
        self._known: dict[int, tuple[weakref.ref[Message | Sampled], _Known]] = {}

    @cached_property
    def is_append_only(self) -> bool:
        """True if a later prompt begins with the earlier prompt and the whole sampled turn, its thinking included."""
        question = Message("user", ("question",))
        opening = "" if self._template.opening else f"{THINK_OPEN}\n"
        for text in (f"{opening}thinking\n{THINK_CLOSE}\n\nanswer", "answer"):
            ids = self._encode(text + self._template.end).ids
            sampled = Sampled(ids, (0.0,) * len(ids), "stop", WeightVersions(0, 0))
            before = (*_flat(self.render([question])), *ids)
            if _flat(self.render([question, sampled, question]))[: len(before)] != before:
                return False
        return True

    def render(self, history: Sequence[Message | Sampled]) -> tuple[Chunk, ...]:
        """Returns the model's next prompt: the history and the beginning of its turn.

        Calls share chunks: those of earlier turns are the same objects.

        Raises:
            InvalidInput: The template refuses, leaves out or repeats an entry of the history, which the error names.
        """
        known = [self._read_once(one) for one in history]
        pictures = (picture for one in known for picture in one.pictures)
        chunks: list[Chunk] = []
        for piece in self._pieces(tuple(one.entry for one in known)):
            if piece is None:
                chunks.append(next(pictures))
            elif isinstance(piece, Tokens):
                chunks.append(piece)
            else:
                turn = known[piece.entry]
                chunks += turn.answer if piece.is_stripped else turn.whole
        return tuple(chunks)

    def read(self, sampled: Sampled) -> Answer:
        """Returns the answer in a sampled turn."""
        text = self._template.opening + self._read_once(sampled).text
        return read_answer(text, is_cut=sampled.stop_reason == "length")

    def _read_once(self, one: Message | Sampled) -> _Known:
        # The key is the identity: hashing thousands of ids each time would cost more than all the rest.
        key = id(one)
        found = self._known.get(key)
        if found is not None and found[0]() is one:
            return found[1]
        known = self._read_turn(one.ids) if isinstance(one, Sampled) else _read_message(one)
        self._known[key] = (weakref.ref(one, lambda _: self._known.pop(key, None)), known)
        return known

    def _read_turn(self, ids: tuple[int, ...]) -> _Known:
        is_ended = bool(ids) and ids[-1] in self._ends
        text = self.decode(ids[:-1] if is_ended else ids)
        is_thinking = THINK_CLOSE in text
        whole = _tokens(ids)
        return _Known(TurnEntry(is_thinking, is_ended), text, whole, self._answer(ids) if is_thinking else whole)

    def _answer(self, ids: tuple[int, ...]) -> tuple[Tokens, ...]:
        """Returns the ids after the last `</think>` and the newlines that follow it.

        A token that contains both newlines and other text is kept whole. If one token contains the end of the tag and
        the beginning of the answer, that beginning is tokenized again.
        """
        total = self.decode(ids).count(THINK_CLOSE)
        border = bisect_left(range(len(ids)), total, key=lambda count: self.decode(ids[:count]).count(THINK_CLOSE))
        clipped = self.decode(ids[:border]).rpartition(THINK_CLOSE)[2].lstrip("\n")
        while not clipped and border < len(ids) and not self.decode(ids[border : border + 1]).strip("\n"):
            border += 1
        return (*_tokens(self._encode(clipped).ids), *_tokens(ids[border:]))

    def _render_pieces(self, entries: tuple[Entry, ...]) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        literal, thinking, is_ended = "", None, False
        for part in MARK.split(self._template.render(entries)):
            found = read_mark(part)
            if found is None:
                # The turn contains its own end, so the template's end is removed.
                literal = part.removeprefix(self._template.end) if is_ended else part
                is_ended = False
                continue
            kind, index = found
            turn = entries[index]
            assert isinstance(turn, TurnEntry)
            if kind == "thinking":
                # The sampled ids contain the tag, unless the generation prompt does.
                literal, thinking = without_opening(literal) + self._template.opening, index
                pieces += [*self._split_pictures(literal, pieces.count(None)), Splice(index, is_stripped=False)]
            elif thinking == index:
                thinking = None
            else:
                pieces += [
                    *self._split_pictures(literal, pieces.count(None)),
                    Splice(index, is_stripped=turn.is_thinking),
                ]
            literal, is_ended = "", kind == "answer" and turn.is_ended
        pieces += self._split_pictures(literal, pieces.count(None))
        _refuse_lost_turns(entries, pieces)
        return tuple(pieces)

    def _split_pictures(self, literal: str, index: int) -> list[Piece]:
        placeholder = self._template.placeholder
        runs = [literal]
        if placeholder:
            runs = with_margins(literal, placeholder, self._tokenizer, index).split(placeholder)
        pieces: list[Piece] = []
        for place, run in enumerate(runs):
            pieces += [None] if place else []
            pieces += [self._encode(run)] if run else []
        return pieces

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a text of the model, with its control tokens encoded as ordinary characters.

        Thinking and tool calls are the model's own, so `<think>` and `<tool_call>` become tokens.

        Raises InvalidInput if the tokenizer cannot encode a control token as ordinary characters.
        """
        return self._encode(self._template.guard(text, keeps_markup=True)).ids

    def _encode_run(self, text: str) -> Tokens:
        if TEXT_MARK not in text:
            return Tokens(tuple(self._tokenizer.encode(text, add_special_tokens=False)))
        pieces = text.split(TEXT_MARK)
        ids = tuple(token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False))
        if self.decode(ids) != "".join(pieces):
            raise InvalidInput(
                "the text of a message contains a control token of this model, which the tokenizer cannot write as text"
                f": remove it from {''.join(pieces)[-200:]!r}",
                field="messages",
            )
        return Tokens(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, control tokens included."""
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)


def _read_message(message: Message) -> _Known:
    parts = tuple(None if isinstance(part, Picture) else part for part in message.parts)
    entry = MessageEntry(message.role, parts, message.name, message.tool_call_id, message.has_markup)
    return _Known(entry, pictures=message.pictures)


def _tokens(ids: tuple[int, ...]) -> tuple[Tokens, ...]:
    return (Tokens(ids),) if ids else ()


def _flat(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks if isinstance(chunk, Tokens) for token in chunk.ids)


def _refuse_lost_turns(entries: Sequence[Entry], pieces: Sequence[Piece]) -> None:
    kept = [piece.entry for piece in pieces if isinstance(piece, Splice)]
    lost = [index for index, entry in enumerate(entries) if isinstance(entry, TurnEntry) and kept.count(index) != 1]
    if lost:
        where, count = f"history[{lost[0]}]", kept.count(lost[0])
        raise InvalidInput(
            f"{where}: the chat template writes this answer {count} times; it must do so once", field=where
        )
