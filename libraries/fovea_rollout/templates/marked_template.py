"""Runs a chat template on text with marks in place of the sampled turns, and probes how the template behaves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fovea.wire.conventions import is_markup, replace_markup
from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import THINK_CLOSE, THINK_OPEN
from fovea_rollout.messages import Role

_MARK = "⟦fovea:"
MARK = re.compile(r"(⟦fovea:(?:thinking|answer):\d+⟧)")
"""Has a group, so that `split` returns the marks too."""
TEXT_MARK = f"{_MARK}text⟧"
"""Inserted into a control token that a message contains as text, so that the tokenizer does not read the token."""
_PART = re.compile(r"""["']type["']""")
_OPENING = re.compile(re.escape(THINK_OPEN) + r"\s*\Z")


class TurnEntry(NamedTuple):
    """The properties of a sampled turn that affect the output of a template.

    Attributes:
        is_thinking: Whether the turn contains a `</think>`.
        is_ended: Whether its last token ends a turn.
    """

    is_thinking: bool
    is_ended: bool


class MessageEntry(NamedTuple):
    """A message as the template sees it. A picture is None; a missing name is empty."""

    role: Role
    parts: tuple[str | None, ...]
    name: str = ""
    tool_call_id: str = ""
    has_markup: bool = False

    @property
    def names(self) -> dict[str, str]:
        """The names that are not empty, by key."""
        both = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {key: value for key, value in both.items() if value}

    @property
    def texts(self) -> dict[str, str]:
        """All texts of the message, by field."""
        return {f"parts[{place}]": part for place, part in enumerate(self.parts) if part is not None} | self.names


Entry = TurnEntry | MessageEntry

_QUESTION = MessageEntry("user", ("question",))


class MarkedTemplate:
    """A chat template that renders text, with a mark for each sampled turn.

    Attributes:
        placeholder: The token that represents a picture, as text; empty if the template accepts no pictures.
        opening: The beginning of the thinking that the generation prompt contains: `<think>` and newlines, or nothing.
        end: The text that the template writes after an answer, up to the token that ends the turn.
        end_id: The token that ends the turn; None if there is none.
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], placeholder: str, arguments: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = {**arguments, "tools": [dict(tool) for tool in tools] or None}
        self._controls = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
        self._kept_roles: set[Role] = {"user"}
        self._typed: re.Pattern[str] | None = None
        self._markup: frozenset[str] = frozenset()
        self._takes_texts = self._keeps_texts()
        self.placeholder = placeholder
        self.opening = ""
        prompt, plain = self._apply([_QUESTION]), self._apply([_QUESTION], is_prompt=False)
        if prompt.startswith(plain) and (opening := _OPENING.search(prompt, len(plain))):
            self.opening = opening[0]
        answered = self._apply([_QUESTION, TurnEntry(is_thinking=False, is_ended=False)], is_prompt=False)
        self.end, self.end_id = self._first_control(answered.partition(mark("answer", 1))[2])
        self.placeholder = placeholder or self._find_placeholder()
        # Tools are left out here: a description of tools contains the <tool_call> that an answer may have.
        self._arguments["tools"], told_tools = None, self._arguments["tools"]
        around = self._apply([_QUESTION, TurnEntry(is_thinking=False, is_ended=False)])
        said = ("question", mark("answer", 1), THINK_OPEN, THINK_CLOSE)
        written = [one for one in self._added_tokens(around) if not any(one in text for text in said)]
        self._typed = _any_of({*self._special_tokens(), *written, self.placeholder})
        self._markup = frozenset(filter(is_markup, tokenizer.get_added_vocab()))
        self._arguments["tools"] = self._guarded(told_tools)

    def guard(self, text: str, keeps_markup: bool = False) -> str:
        """Returns a text with `TEXT_MARK` inside each control token, so that the tokenizer does not read the token.

        Control tokens are the tokenizer's special tokens, the tokens that the template writes around turns, the
        placeholder, and all other markup among the added tokens, such as `<think>`, `<tool_call>` and `<|fim_prefix|>`.

        Args:
            text: The text.
            keeps_markup: Whether to leave that other markup alone, as in an answer of the model with tool calls.
        """
        guarded = text
        while (
            self._typed is not None and (again := self._typed.sub(lambda found: _broken(found[0]), guarded)) != guarded
        ):
            guarded = again
        return guarded if keeps_markup else replace_markup(guarded, self._markup, _broken)

    def _guarded(self, value: Any) -> Any:
        """Returns a JSON value with each of its texts guarded."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self._guarded(name): self._guarded(each) for name, each in value.items()}
        return [self._guarded(each) for each in value] if isinstance(value, (list, tuple)) else value

    def render(self, entries: Sequence[Entry]) -> str:
        """Returns the prompt as text, with a mark for each sampled turn, placeholders, and the generation prompt.

        Raises:
            InvalidInput: The template refuses or leaves out an entry of the history, which the error names, or the
                entry contains a mark.
        """
        self._refuse_marks(entries)
        text = self._apply(entries)
        self._refuse_lost_pictures(entries, text)
        self._refuse_lost_messages(entries)
        return text

    def _apply(self, entries: Sequence[Entry], is_prompt: bool = True) -> str:
        try:
            return self._run(entries, is_prompt)
        except Exception as error:  # a template is a program, and refuses an input by raising any error
            index = self._first_refused(entries, is_prompt)
            role = _role(entries[index])
            raise InvalidInput(
                f"history[{index}].role {role!r}: the chat template refuses this message at this position: {error}",
                field=f"history[{index}].role",
            ) from error

    def _run(self, entries: Sequence[Entry], is_prompt: bool) -> str:
        messages: list[dict[str, Any]] = []
        for index, entry in enumerate(entries):
            names = entry.names if isinstance(entry, MessageEntry) else {}
            names = {key: self.guard(name) for key, name in names.items()}
            messages.append({"role": _role(entry), "content": self._content(index, entry), **names})
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=is_prompt, **self._arguments
        )
        return str(rendered)

    def _content(self, index: int, entry: Entry) -> str | list[dict[str, str]]:
        if isinstance(entry, TurnEntry):
            answer = mark("answer", index)
            thinking = f"{THINK_OPEN}\n{mark('thinking', index)}\n{THINK_CLOSE}\n\n"
            parts: tuple[str | None, ...] = ((thinking if entry.is_thinking else self.opening) + answer,)
        else:
            keeps_markup = entry.has_markup or entry.role == "assistant"
            parts = tuple(part if part is None else self.guard(part, keeps_markup) for part in entry.parts)
        if self._takes_texts and None not in parts:
            return "".join(part for part in parts if part is not None)
        return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]

    def _first_refused(self, entries: Sequence[Entry], is_prompt: bool) -> int:
        """Returns the index of the entry after the longest history that the template accepts."""
        for count in range(len(entries) - 1, 0, -1):
            try:
                self._run(entries[:count], is_prompt)
            except Exception:  # of any class; the caller already has the error of the whole history
                continue
            return count
        return 0

    def _keeps_texts(self) -> bool:
        """Returns whether `content` may be a text. Some templates accept only parts, and lose a text or fail."""
        self._takes_texts = True
        try:
            return "question" in self._run([_QUESTION], True)
        except Exception:  # the template may need parts; if those fail too, the next call raises the error
            return False

    def _first_control(self, text: str) -> tuple[str, int | None]:
        """Returns the text up to the end of its first control token, and that token."""
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            if token in self._controls:
                name = self._tokenizer.convert_ids_to_tokens(token)
                return text[: text.index(name) + len(name)], token
        return "", self._tokenizer.eos_token_id

    def _find_placeholder(self) -> str:
        """Finds the token that represents a picture: the middle one of the control tokens that a picture adds.

        The others mark the start and the end of the picture. Returns an empty text for a template without pictures.
        """
        try:
            pictured = self._run([MessageEntry("user", ("question", None))], True)
        except Exception:  # the template accepts texts only
            return ""
        plain = self._run([_QUESTION], True)
        if len(_PART.findall(pictured)) > len(
            _PART.findall(plain)
        ):  # the template accepts texts only, and wrote the part as text
            return ""
        if (named := getattr(self._tokenizer, "image_token", None)) and named in pictured:
            return str(named)
        added = Counter(self._added_tokens(pictured)) - Counter(self._added_tokens(plain))
        brought = [token for token in self._added_tokens(pictured) if token in added]
        if not brought:
            return ""
        if len(brought) % 2 == 0:
            raise InvalidInput(
                f"the chat template writes a picture as {brought}: give the token that represents it as placeholder=",
                field="placeholder",
            )
        return brought[len(brought) // 2]

    def _added_tokens(self, text: str) -> list[str]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return [self._tokenizer.convert_ids_to_tokens(token) for token in ids if token in self._controls]

    def _special_tokens(self) -> set[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {str(token) for token in added.values() if token.special} | set(self._tokenizer.all_special_tokens)

    def _refuse_marks(self, entries: Sequence[Entry]) -> None:
        for index, entry in enumerate(entries):
            for place, part in (entry.texts if isinstance(entry, MessageEntry) else {}).items():
                if _MARK in part:
                    where = f"history[{index}].{place}"
                    raise InvalidInput(f"{where} contains {_MARK!r}, which is reserved: remove it", field=where)

    def _refuse_lost_pictures(self, entries: Sequence[Entry], text: str) -> None:
        # A template without a placeholder writes no pictures, and no text contains a mark with this name.
        placeholder = self.placeholder or f"{_MARK}picture"
        if text.count(placeholder) == _picture_count(entries):
            return
        for count in range(1, len(entries) + 1):
            plain = self._apply(entries[:count], is_prompt=False)
            if plain.count(placeholder) != _picture_count(entries[:count]):
                break
        where = f"history[{count - 1}]"
        raise InvalidInput(
            f"{where}: the chat template writes no picture in a {_role(entries[count - 1])!r} message", field=where
        )

    def _refuse_lost_messages(self, entries: Sequence[Entry]) -> None:
        """Refuses messages that the template leaves out. Some ignore a second system message, for instance."""
        for index, entry in enumerate(entries):
            if index == 0 or isinstance(entry, TurnEntry) or entry.role in self._kept_roles:
                continue
            before, after = (self._apply(entries[:count], is_prompt=False) for count in (index, index + 1))
            if before == after:
                where = f"history[{index}].role"
                raise InvalidInput(f"{where} {entry.role!r}: the chat template leaves this message out", field=where)
            self._kept_roles.add(entry.role)


def mark(kind: str, index: int) -> str:
    """Returns the mark of the thinking or the answer of the sampled turn at `index`."""
    return f"{_MARK}{kind}:{index}⟧"


def read_mark(text: str) -> tuple[str, int] | None:
    """Returns kind and index of a mark; None for other texts."""
    if not text.startswith(_MARK):
        return None
    _, kind, index = text[:-1].split(":")
    return kind, int(index)


def _any_of(texts: set[str]) -> re.Pattern[str] | None:
    """Returns a pattern of the texts of two or more characters, the longest first; None if there are none.

    White space is left out: Gemma has added tokens of several line feeds, which are not control tokens.
    """
    longest_first = sorted((text for text in texts if len(text.strip()) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _broken(token: str) -> str:
    return f"{token[0]}{TEXT_MARK}{token[1:]}"


def without_opening(text: str) -> str:
    """Returns a text without the `<think>` and newlines at its end."""
    return _OPENING.sub("", text)


def _role(entry: Entry) -> Role:
    return "assistant" if isinstance(entry, TurnEntry) else entry.role


def _picture_count(entries: Sequence[Entry]) -> int:
    return sum(entry.parts.count(None) for entry in entries if isinstance(entry, MessageEntry))
