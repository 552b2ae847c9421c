"""Reads rows of a dataset as conversations to learn from."""

from __future__ import annotations

import pathlib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

from fovea.wire import conventions
from fovea.wire.errors import FoveaError, InvalidInput, Unavailable
from fovea_rollout.environments.environment import THINK_CLOSE, THINK_OPEN, read_answer
from fovea_rollout.messages import Message, Part, Picture, Role
from fovea_rollout.pictures import PictureColumn, read_picture

_MESSAGE_FIELDS = {"role", "content", "name", "tool_call_id", "reasoning_content", "weight"}
_NO_TURNS: list[list[str]] = [[], ["system"]]
_MOST_CHARACTERS = 4000
"""The longest texts that are worth a place in each checkpoint's metadata."""
_PICTURE_FIELDS = {"image": "image", "image_url": "image_url", "input_image": "image_url"}
"""The field of the picture, by type of part."""


@dataclass(frozen=True)
class Asking:
    """The texts that ask about one picture, which comes first in the user's message.

    Attributes:
        question: The user's text.
        system_prompt: Text of a system message before it; empty for none.
    """

    question: str
    system_prompt: str = ""

    @classmethod
    def recorded(cls, metadata: Mapping[str, str]) -> Asking | None:
        """Returns the texts in a checkpoint's user metadata; None if it has no question."""
        question = metadata.get(conventions.QUESTION)
        return cls(question, metadata.get(conventions.SYSTEM_PROMPT, "")) if question else None

    @property
    def metadata(self) -> dict[str, str]:
        """The entries of a checkpoint's user metadata."""
        system = {conventions.SYSTEM_PROMPT: self.system_prompt} if self.system_prompt else {}
        return {conventions.QUESTION: self.question, **system}

    def messages(self, picture: Any) -> list[dict[str, Any]]:
        """Returns the messages that ask about a picture, in the format of `RowReader`."""
        content = [{"type": "image", "image": picture}, {"type": "text", "text": self.question}]
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": content}]


@dataclass(frozen=True)
class Conversation:
    """A conversation that ends with an answer.

    Attributes:
        messages: The messages in order. Messages of the assistant are text, with thinking in `<think>` tags first.
        is_learnt: For each message, whether it is an answer with a loss.
        where: Name of the row in errors, such as `chats.jsonl:17`.
    """

    messages: tuple[Message, ...]
    is_learnt: tuple[bool, ...]
    where: str

    @property
    def question(self) -> tuple[Message, ...]:
        """The messages before the last answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """The last answer without its thinking."""
        return read_answer(self.messages[-1].text, is_cut=False).text

    @property
    def asking(self) -> Asking | None:
        """The texts of a question about one picture; None for a question of another form."""
        if not self.question:
            return None
        *before, last = self.question
        match last.parts:
            case (Picture(), str(text)) if last.role == "user" and text and [one.role for one in before] in _NO_TURNS:
                system = before[0].text if before else ""
                return Asking(text, system) if len(text) + len(system) <= _MOST_CHARACTERS else None
        return None


@dataclass(frozen=True)
class RowReader:
    """A reader of dataset rows.

    Attributes:
        folder: Folder of relative paths of pictures; None is the working directory.
        max_side: The most pixels of a picture's longer side. Larger pictures are shrunk. None does not limit the size.
    """

    folder: pathlib.Path | None = None
    max_side: int | None = None

    def conversation(self, row: Any, where: str) -> Conversation:
        """Reads a row `{"messages": [...]}` or `{"prompt": ..., "completion": ...}` (texts or lists of messages).

        Messages have OpenAI's format (parts `text` and `image_url`) or Hugging Face's (parts `image`). The pictures of
        a column `images` or `image` fill parts `{"type": "image"}` without a picture, and replace `<image>` in texts.
        If the messages have neither, the pictures come first in the first user message. An answer with `"weight": 0`
        is part of the conversation but has no loss. Other columns are ignored.

        Raises:
            InvalidInput: The row is wrong. The error names `where` and the field.
        """
        if not isinstance(row, Mapping):
            raise InvalidInput(f"{where}: a row must be an object, not {type(row).__name__}", field=where)
        if row.get("messages") is not None:
            messages = self.messages(row["messages"], f"{where}: messages", row)
            weights: list[Any] = [one.get("weight") if isinstance(one, Mapping) else None for one in row["messages"]]
        elif row.get("prompt") is not None and row.get("completion") is not None:
            prompt = as_messages(row["prompt"], "user", f"{where}: prompt")
            completion = as_messages(row["completion"], "assistant", f"{where}: completion")
            messages = self.messages([*prompt, *completion], f"{where}: prompt and completion", row)
            weights = [0] * len(prompt) + [1] * len(completion)
        else:
            raise InvalidInput(
                f"{where}: the row has neither messages nor prompt and completion; its columns are {sorted(row)}. Give"
                " load_chats a `convert` that returns a row with either",
                field=where,
            )
        return learnt(messages, weights, where)

    def messages(self, messages: Any, where: str, row: Mapping[str, Any] | None = None) -> tuple[Message, ...]:
        """Reads messages and the pictures in columns of `row`. Raises InvalidInput, which names `where`."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidInput(f"{where} must be a list of messages", field=where)
        pictures = PictureColumn(row or {}, where, self._picture)
        read = [self._message(one, f"{where}[{index}]", pictures) for index, one in enumerate(messages)]
        read = pictures.placed(read)
        return tuple(_normalised(one) for one in read)

    def _picture(self, value: Any, where: str) -> Picture:
        return read_picture(value, where, folder=self.folder, max_side=self.max_side)

    def _message(self, message: Any, where: str, pictures: PictureColumn) -> Message:
        if isinstance(message, Message):
            return message
        if not isinstance(message, Mapping):
            raise InvalidInput(f"{where} must be an object, not {type(message).__name__}", field=where)
        # Parquet gives all objects of a column the same fields, and sets missing ones to null.
        if unknown := sorted(
            name for name, value in message.items() if value is not None and name not in _MESSAGE_FIELDS
        ):
            fix = "; write tool calls into content, as the model writes them" if unknown[0] == "tool_calls" else ""
            raise InvalidInput(f"{where} has an unknown field {unknown[0]!r}{fix}", field=where)
        role: Any = message.get("role")
        if role not in get_args(Role):
            raise InvalidInput(f"{where}.role is {role!r}; use one of {get_args(Role)}", field=f"{where}.role")
        parts = tuple(self._parts(message.get("content"), f"{where}.content", pictures))
        if role == "assistant":
            parts = (_answer_text(parts, message.get("reasoning_content"), where),)
        names = {name: str(message[name]) for name in ("name", "tool_call_id") if message.get(name) is not None}
        return Message(role, parts, names.get("name", ""), names.get("tool_call_id", ""))

    def _parts(self, content: Any, where: str, pictures: PictureColumn) -> Iterator[Part]:
        if isinstance(content, str):
            yield from pictures.spliced(content)
            return
        if not isinstance(content, Sequence) or not content:
            raise InvalidInput(f"{where} must be a text or a list of parts", field=where)
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" and isinstance(part.get("text"), str):
                yield from pictures.spliced(part["text"])
            elif kind in _PICTURE_FIELDS:
                value = part.get(_PICTURE_FIELDS[kind])
                here = f"{where}[{index}].{_PICTURE_FIELDS[kind]}"
                yield pictures.take(here) if value is None else self._picture(value, here)
            else:
                raise InvalidInput(f"{where}[{index}].type is {kind!r}; use 'text' or 'image_url'", field=where)


def as_messages(said: Any, role: Role, where: str) -> list[Any]:
    """Returns messages unchanged, and a text as a message of `role`. Raises InvalidInput for other types."""
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    if not isinstance(said, Sequence) or isinstance(said, (bytes, bytearray)):
        raise InvalidInput(
            f"{where} is {said!r:.60}, of type {type(said).__name__}; it must be a text or a list of messages (put a"
            " number in quotes, or write the name of a class)",
            field=where,
        )
    return list(said)


@contextmanager
def naming_row(where: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[str]:
    """Converts errors of reading or encoding a row to InvalidInput with the name of the row; yields the name.

    Args:
        where: Name of the row.
        passing: Errors that the row does not cause, which are raised unchanged.
    """
    try:
        yield where
    except Exception as error:  # converters, decoders, templates and tokenizers raise errors of many classes
        if isinstance(error, (Unavailable, MemoryError, *passing)):
            raise
        if isinstance(error, FoveaError):
            message = error.message if error.message.startswith(where) else f"{where}: {error.message}"
            kind = type(error) if isinstance(error, InvalidInput) else InvalidInput
            raise kind(message, field=error.field or where) from error
        raise InvalidInput(f"{where}: {type(error).__name__}: {error}", field=where) from error


def check_positive(**values: float) -> None:
    """Raises InvalidInput, which names the first value that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise InvalidInput(f"{name} is {value}; it must be above 0", field=name)


def normalised(text: str) -> str:
    """Returns a text in Unicode's composed form (NFC), which tokenizers return when they decode.

    File systems and keyboards may produce the decomposed form, which would never equal a decoded answer.
    """
    return unicodedata.normalize("NFC", text)


def learnt(messages: Sequence[Message], weights: Sequence[Any], where: str) -> Conversation:
    """Returns a conversation in which answers of weight 0 have no loss. Raises InvalidInput, which names `where`."""
    if messages[-1].role != "assistant":
        raise InvalidInput(
            f"{where}: the last message has role {messages[-1].role!r}; it must have role 'assistant'",
            field=where,
        )
    if odd := [weight for weight in weights if weight not in (None, 0, 1)]:
        raise InvalidInput(f"{where}: weight is {odd[0]!r}; use 0 or 1", field=where)
    is_learnt = tuple(
        message.role == "assistant" and weight != 0 for message, weight in zip(messages, weights, strict=True)
    )
    if not any(is_learnt):
        raise InvalidInput(f"{where}: all answers have weight 0, so there is nothing to learn", field=where)
    return Conversation(tuple(messages), is_learnt, where)


def _normalised(message: Message) -> Message:
    parts = tuple(normalised(part) if isinstance(part, str) else part for part in message.parts)
    return message if parts == message.parts else replace(message, parts=parts)


def _answer_text(parts: Sequence[Part], reasoning: Any, where: str) -> str:
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) != len(parts):
        raise InvalidInput(f"{where}: a message of the assistant has a picture, but models answer in text", field=where)
    if not (text := "".join(texts)):
        raise InvalidInput(f"{where}.content is empty", field=where)
    return f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{text}" if reasoning else text


def exact_match(answer: str, conversation: Conversation) -> float:
    """Returns 1 if an answer equals the row's answer, apart from surrounding blanks and Unicode composition."""
    return float(normalised(answer).strip() == normalised(conversation.answer).strip())
