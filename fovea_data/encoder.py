"""Conversations as what the Tinker API trains on and samples from, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import tinker
from tinker.types import ImageChunk

from fovea.wire.errors import ContextOverflow, FoveaError, InvalidInput
from fovea_data.conversation import Conversation
from fovea_data.picture_tokens import PictureTokens
from fovea_rollout.environment import THINK_CLOSE, THINK_OPEN
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policy import Chunk, Policy, Sampled, Tokens, WeightVersions
from fovea_rollout.template import ChatTemplate
from fovea_rollout.training_batch import training_datums
from fovea_rollout.trajectory import Trajectory, Turn

Result = TypeVar("Result")


class Encoder:
    """Turns conversations into datums with loss on their answers, and questions into prompts.

    Args:
        tokenizer: The model's, with a chat template.
        picture_tokens: How many tokens pictures take in this model.
        vocabulary: Token ids that the model has; None does not check them.
        max_tokens: Tokens that a conversation may have; None does not check it.
        arguments: For the chat template, as in `enable_thinking=False`.

    Attributes:
        stop_ids: Tokens that end an answer.
        picture_tokens: As given.

    Raises:
        InvalidInput: The tokenizer has no chat template, or one that cannot render a question and its answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        picture_tokens: PictureTokens,
        *,
        vocabulary: int | None = None,
        max_tokens: int | None = None,
        **arguments: Any,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidInput(
                "the tokenizer has no chat template: fine-tune an instruct model, or set tokenizer.chat_template",
                field="tokenizer",
            )
        self.picture_tokens = picture_tokens
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, **arguments)
        self._vocabulary, self._max_tokens = vocabulary, max_tokens
        self.stop_ids = self._template.stop_ids
        if not self.stop_ids:
            raise InvalidInput("neither chat template nor tokenizer ends an answer: set eos_token", field="tokenizer")
        (*_, last) = self._template.render([Message("user", ("question",))])
        assert isinstance(last, Tokens)
        # Whether the generation prompt opens the thinking, which an answer must close then.
        self._opens_thinking = str(tokenizer.decode(last.ids)).rstrip().endswith(THINK_OPEN)

    def datums(self, conversation: Conversation) -> list[tinker.Datum]:
        """One datum; more where the template rewrites earlier turns (leaves out their thinking), each then exactly what
        the model reads when it answers.

        `target_tokens` is int64 [N], `weights` float32 [N]: 1 for tokens of answers that are learnt, their end of turn
        included, else 0; N is the input's tokens, pictures counted by their placeholders.

        Raises:
            InvalidInput: Naming the row: the template takes no picture there, a token is not in the vocabulary.
            ContextOverflow: Naming the row, if it has more than `max_tokens`.
        """
        if not self._takes_pictures and any(message.pictures for message in conversation.messages):
            raise InvalidInput(
                f"{conversation.where}: has pictures, and the model's chat template takes none: fine-tune a"
                " vision-language model, or leave the pictures out",
                field=conversation.where,
            )
        try:
            trajectory, weights = self._played(conversation)
            made = _at_once(training_datums(trajectory, weights, cast(Policy, self.picture_tokens)))  # it counts only
        except FoveaError as error:
            raise type(error)(f"{conversation.where}: {error.message}", field=conversation.where) from error
        data = [
            tinker.Datum(
                model_input=one.datum.model_input,
                loss_fn_inputs={
                    "target_tokens": one.datum.loss_fn_inputs["target_tokens"],
                    "weights": one.datum.loss_fn_inputs["advantages"],
                },
            )
            for one in made
            if any(weights[turn] for turn in one.turns)
        ]
        longest = max(datum.model_input.length + 1 for datum in data)
        if self._max_tokens is not None and longest > self._max_tokens:
            raise ContextOverflow(
                f"{conversation.where}: has {longest} tokens, {self._max_tokens} are allowed: shorten it, or give its"
                " pictures fewer pixels (max_side)",
                field=conversation.where,
            )
        return data

    @cached_property
    def _takes_pictures(self) -> bool:
        picture = Picture.of_pixels(np.zeros((1, 1, 3), np.uint8))
        try:
            self._template.render([Message("user", ("question", picture))])
        except InvalidInput:
            return False
        return True

    def token_count(self, conversation: Conversation) -> int:
        """Tokens of a conversation, pictures and all answers included: of its longest datum, and its last target."""
        return max(datum.model_input.length for datum in self.datums(conversation)) + 1

    def prompt(self, question: Sequence[Message]) -> tinker.ModelInput:
        """What the model reads before it answers. Raises InvalidInput naming the message that the template refuses."""
        return tinker.ModelInput(chunks=[_chunk(chunk) for chunk in self._template.render(self._history(question))])

    def room(self, question: Sequence[Message]) -> int | None:
        """The most tokens that an answer to a question may have, its end included; None without `max_tokens`."""
        if self._max_tokens is None:
            return None
        chunks = self._template.render(self._history(question))
        return self._max_tokens - sum(
            self.picture_tokens.of(chunk) if isinstance(chunk, Picture) else len(chunk.ids) for chunk in chunks
        )

    def answer_length(self, conversation: Conversation) -> int:
        """Tokens of the last answer, its end included."""
        return len(self._sampled(conversation.messages[-1]).ids)

    def read(self, tokens: Sequence[int], *, is_cut: bool = False) -> str:
        """What an answer of these tokens says, thinking and end of turn left out.

        Args:
            is_cut: Whether max_tokens ended it.
        """
        reason = "length" if is_cut else "stop"
        sampled = Sampled(tuple(tokens), (0.0,) * len(tokens), reason, WeightVersions(0, 0))  # type: ignore[arg-type]
        return self._template.read(sampled).text.strip()

    def _played(self, conversation: Conversation) -> tuple[Trajectory, list[float]]:
        """The conversation as if the model had answered so, and a weight for each of its turns."""
        history = self._history(conversation.messages)
        trajectory, weights = Trajectory(conversation.where), list[float]()
        for index, (one, is_learnt) in enumerate(zip(history, conversation.is_learnt, strict=True)):
            if isinstance(one, Sampled):
                prompt = self._template.render(history[:index])
                turn = Turn(prompt, (), one, self._template.read(one), 0.0, {})
                trajectory.append(turn, self._template.is_append_only)
                weights.append(float(is_learnt))
        return trajectory, weights

    def _history(self, messages: Sequence[Message]) -> list[Message | Sampled]:
        return [self._sampled(one) if one.role == "assistant" else one for one in messages]

    def _sampled(self, message: Message) -> Sampled:
        text = message.text
        if self._opens_thinking:
            thought = text.lstrip().removeprefix(THINK_OPEN).lstrip("\n")
            text = thought if THINK_CLOSE in text else f"\n{THINK_CLOSE}\n\n{text}"
        ids = (*self._template.encode_text(text), self.stop_ids[0])
        if self._vocabulary is not None and (outside := [token for token in ids if token >= self._vocabulary]):
            name = self._tokenizer.convert_ids_to_tokens(outside[0])
            raise InvalidInput(
                f"the answer has the token {name!r}, id {outside[0]}; the model's vocabulary ends at"
                f" {self._vocabulary - 1}: take the tokenizer that belongs to the model"
            )
        return Sampled(ids, (0.0,) * len(ids), "stop", WeightVersions(0, 0))


def _chunk(chunk: Chunk) -> tinker.EncodedTextChunk | ImageChunk:
    if isinstance(chunk, Picture):
        return ImageChunk(data=chunk.data, format=chunk.format)
    return tinker.EncodedTextChunk(tokens=list(chunk.ids))


def _at_once(call: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine returns that waits for nothing, also where an event loop runs already, as in notebooks."""
    try:
        call.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    call.close()
    raise RuntimeError("the coroutine waits for something")
