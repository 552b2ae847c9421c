"""Texts of OpenAI's messages as tokens: chat templates, control tokens that a user typed, and bytes of tokens."""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.inputs import tokens_input
from vllm.renderers import ChatParams

from fovea.vision.vision_family import image_margin
from fovea.wire.conventions import is_markup, replace_markup
from fovea.wire.errors import InvalidInput

PICTURE: dict[str, Any] = {"type": "image_url", "image_url": None, "uuid": "0"}
"""The part that stands for an image."""

_QUESTION = {"type": "text", "text": "question"}
_THOUGHTS = {"<think>", "</think>"}
_MARK = f"@@fovea-text-{secrets.token_hex(16)}@@"
"""Stands inside a control token that a message has as text while the template runs. Nobody can guess it."""

_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
_BYTES = {character: value for value, character in bytes_to_unicode().items()}


class TextRenderer:
    """vLLM's renderer, but that images stay the placeholders that the chat template writes: Fovea's own makes them.

    All else is vLLM's.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._image_id: int | None = None
        self._typed: re.Pattern[str] | None = None
        self._markup: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def render_chat_async(
        self, conversations: Sequence[Any], chat_params: ChatParams, tok_params: Any = None, **ignored: Any
    ) -> tuple[list[Any], list[Any]]:
        """See vLLM's; the engine's inputs are text alone, and texts of tools are guarded as those of messages."""
        if self._typed is not None:
            given = await asyncio.to_thread(self._guarded_arguments, self._typed, chat_params.chat_template_kwargs)
            chat_params = replace(chat_params, chat_template_kwargs=given)
        rendered = [await self._inner.render_messages_async(messages, chat_params) for messages in conversations]
        prompts = [
            await self._encode(_as_text(prompt), tok_params or self._inner.default_chat_tok_params)
            for _, prompt in rendered
        ]
        return [messages for messages, _ in rendered], [tokens_input(ids) for ids in prompts]

    async def _encode(self, prompt: dict[str, Any], tok_params: Any) -> list[int]:
        """The ids of a prompt; its pieces between marks are encoded apart, and images have their margins."""
        text = self._with_margins(str(prompt.get("prompt", "")))
        first, *others = text.split(_MARK)
        if "prompt" in prompt:
            prompt = {"prompt": first}
        (encoded,) = await self._inner.tokenize_prompts_async([prompt], tok_params)
        ids: list[int] = list(encoded["prompt_token_ids"])
        for piece in others:
            ids += self._inner.get_tokenizer().encode(piece, add_special_tokens=False)
        return ids

    def _with_margins(self, text: str) -> str:
        """The text with the whitespace of the model's own processor around images: see `image_margin`."""
        tokenizer = self._inner.get_tokenizer()
        margin = image_margin(tokenizer)
        if self._image_id is None or not margin:
            return text
        placeholder = tokenizer.convert_ids_to_tokens(self._image_id)
        return text.replace(placeholder, f"{margin}{placeholder}{margin}")

    async def guard(self, messages: Any) -> Any:
        """The messages with a mark inside each control token that stands in a text, so that it stays text.

        These are the tokenizer's special tokens, those that the template writes around turns, and those of an image. In
        messages that are not the assistant's they are also all other markup among the added tokens, such as `<think>`
        and `<tool_call>`: an assistant's message is what the model said.

        Raises InvalidInput naming the text, if the tokenizer cannot write such a token as text.
        """
        if self._typed is None:
            added = getattr(self._inner.get_tokenizer(), "added_tokens_decoder", {})
            self._markup = frozenset(token for token in map(str, added.values()) if is_markup(token))
            self._typed = _any_of(await self._controls())
        return await asyncio.to_thread(self._guarded_messages, self._typed, messages)

    def _guarded_messages(self, typed: re.Pattern[str], messages: Any) -> Any:
        if not isinstance(messages, list):
            return messages
        try:
            return [
                self._guarded(typed, one, f"messages.{place}", isinstance(one, dict) and one.get("role") == "assistant")
                for place, one in enumerate(messages)
            ]
        except RecursionError:
            raise InvalidInput("messages nest too deeply", field="messages") from None

    def _guarded_arguments(self, typed: re.Pattern[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the chat template: the tools, and what a request gives by itself."""
        try:
            return {
                name: self._guarded(typed, value, name if name == "tools" else f"chat_template_kwargs.{name}", False)
                for name, value in arguments.items()
            }
        except RecursionError:
            raise InvalidInput("tools or chat_template_kwargs nest too deeply", field="tools") from None

    def _guarded(self, typed: re.Pattern[str], value: Any, field: str, keeps_markup: bool) -> Any:
        if isinstance(value, dict):
            return {
                self._guarded(typed, name, field, keeps_markup): self._guarded(
                    typed, each, f"{field}.{name}", keeps_markup
                )
                for name, each in value.items()
            }
        if isinstance(value, list):
            return [self._guarded(typed, each, f"{field}.{place}", keeps_markup) for place, each in enumerate(value)]
        if not isinstance(value, str):
            return value
        while (again := typed.sub(lambda found: self._broken(found[0], field), value)) != value:
            value = again
        return value if keeps_markup else replace_markup(value, self._markup, lambda token: self._broken(token, field))

    async def _controls(self) -> set[str]:
        """The texts of control tokens. Mistral's own tokenizer, which has no such table, reads none in a text."""
        tokenizer = self._inner.get_tokenizer()
        added = getattr(tokenizer, "added_tokens_decoder", None)
        if added is None:
            return set()
        special = {str(token) for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        written = await self._added_ids([_QUESTION])
        with suppress(Exception):  # a template that takes no images raises an error of its own
            written += await self._added_ids([_QUESTION, PICTURE])
        return special | {str(one) for one in tokenizer.convert_ids_to_tokens(written)} - _THOUGHTS

    def _broken(self, token: str, field: str) -> str:
        """A control token with a mark inside. Raises InvalidInput if the tokenizer cannot write it so."""
        tokenizer = self._inner.get_tokenizer()
        ids = [one for part in (token[0], token[1:]) for one in tokenizer.encode(part, add_special_tokens=False)]
        if tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) != token:
            raise InvalidInput(
                f"{field} has {token!r}, a control token of this model, and the tokenizer cannot write it as text: "
                "take it out",
                field=field,
            )
        return f"{token[0]}{_MARK}{token[1:]}"

    async def image_id(self) -> int:
        """The token that stands for an image in what the chat template writes. Raises InvalidInput if there is none.

        It is the tokenizer's own, or the middle one of the added tokens that an image brings: between start and end.
        """
        if self._image_id is None:
            plain, pictured = [await self._added_ids(parts) for parts in ([_QUESTION], [_QUESTION, PICTURE])]
            brought = [token for token in pictured if token in Counter(pictured) - Counter(plain)]
            if not brought:
                raise InvalidInput("this model's chat template takes no images; send text alone", field="messages")
            named = self._inner.get_tokenizer().convert_tokens_to_ids(
                getattr(self._inner.get_tokenizer(), "image_token", None) or ""
            )
            self._image_id = named if named in brought else brought[len(brought) // 2]
        return self._image_id

    async def _added_ids(self, parts: list[dict[str, Any]]) -> list[int]:
        tokenizer = self._inner.get_tokenizer()
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
        _, (prompt,) = await self.render_chat_async([[{"role": "user", "content": parts}]], params)
        added = set(tokenizer.get_added_vocab().values())
        return [token for token in prompt["prompt_token_ids"] if token in added]


def _as_text(prompt: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in prompt.items() if name in ("prompt", "prompt_token_ids")}


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Matches each of the texts, the longest first, that a mark can stand inside of; nothing if there are none.

    White space is left out: Gemma has added tokens of several line feeds, which control nothing.
    """
    longest_first = sorted((text for text in texts if len(text.strip()) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """Returns the bytes of a token that is a part of a character; None if the tokenizer does not tell them.

    Tokenizers write bytes as `<0xE2>` (SentencePiece's fallback) or as one character each (byte-level BPE).
    """
    piece = str(tokenizer.convert_ids_to_tokens([token])[0])
    if fallback := _FALLBACK.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return None
