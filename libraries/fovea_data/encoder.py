"""Encodes conversations for training and sampling over the Tinker API, with the model's chat template."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from fovea.wire.errors import ContextOverflow, FoveaError, InvalidInput
from fovea_data.conversation import Conversation
from fovea_data.picture_tokens import PictureTokens
from fovea_rollout.environments.environment import THINK_CLOSE, THINK_OPEN
from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.training_batch import training_datums
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policies.policy import Chunk, Policy, Sampled, Tokens, WeightVersions
from fovea_rollout.templates.template import ChatTemplate
from fovea_rollout.trajectory import Trajectory, Turn

Result = TypeVar("Result")


class Encoder:
    """An encoder that turns conversations into datums with loss on their answers, and questions into prompts.

    Args:
        tokenizer: The model's tokenizer, with a chat template.
        picture_tokens: Counts the tokens of pictures in this model.
        vocabulary: Size of the model's vocabulary; None does not check token ids.
        max_tokens: The most tokens of a conversation; None does not check them.
        arguments: Further arguments of the chat template, such as `enable_thinking=False`.

    Attributes:
        stop_ids: Tokens that end an answer.
        picture_tokens: Counts the tokens of pictures.

    Raises:
        InvalidInput: The tokenizer has no chat template, or the template cannot render a question and its answer.
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
            raise InvalidInput(
                "neither the chat template nor the tokenizer has a token that ends an answer: set eos_token",
                field="tokenizer",
            )
        (*_, last) = self._template.render([Message("user", ("question",))])
        assert isinstance(last, Tokens)
        # If the generation prompt opens the thinking, an answer must close it.
        self._opens_thinking = str(tokenizer.decode(last.ids)).rstrip().endswith(THINK_OPEN)

    def datums(self, conversation: Conversation) -> list[tinker.Datum]:
        """Encodes a conversation as one datum, or several if the template rewrites earlier turns.

        A template may leave out earlier thinking, for instance. Each datum is then exactly what the model reads when it
        answers.

        `target_tokens` is int64 [N]. `weights` is float32 [N], 1 for the tokens of learnt answers, including the end of
        turn, and 0 for others. N is the number of input tokens, including the placeholders of pictures.

        Raises:
            InvalidInput: The template does not accept a picture, or a token is not in the vocabulary. The error names
                the row.
            ContextOverflow: The row has more than `max_tokens` tokens. The error names the row.
        """
        if not self._takes_pictures and any(message.pictures for message in conversation.messages):
            raise InvalidInput(
                f"{conversation.where}: the row has pictures, but the model's chat template accepts none: fine-tune a"
                " vision-language model, or leave the pictures out",
                field=conversation.where,
            )
        try:
            trajectory, weights = self._played(conversation)
            made = _at_once(
                training_datums(trajectory, weights, cast(Policy, self.picture_tokens))
            )  # awaits nothing: it only counts tokens
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
                f"{conversation.where}: the row has {longest} tokens; the limit is {self._max_tokens}: shorten it, or"
                " lower max_side for smaller pictures",
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
        """Returns the tokens of a conversation: the inputs of its longest datum, and one for its last target."""
        return max(datum.model_input.length for datum in self.datums(conversation)) + 1

    def prompt(self, question: Sequence[Message]) -> tinker.ModelInput:
        """Returns the prompt of a question. Raises InvalidInput, which names a message that the template refuses."""
        return tinker.ModelInput(chunks=[_chunk(chunk) for chunk in self._template.render(self._history(question))])

    def room(self, question: Sequence[Message]) -> int | None:
        """Returns the most tokens of an answer to a question, including its end; None without `max_tokens`."""
        if self._max_tokens is None:
            return None
        chunks = self._template.render(self._history(question))
        return self._max_tokens - sum(
            self.picture_tokens.of(chunk) if isinstance(chunk, Picture) else len(chunk.ids) for chunk in chunks
        )

    def answer_length(self, conversation: Conversation) -> int:
        """Returns the number of tokens of the last answer, including its end."""
        return len(self._sampled(conversation.messages[-1]).ids)

    def read(self, tokens: Sequence[int], *, is_cut: bool = False) -> str:
        """Returns the text of an answer, without thinking and end of turn.

        Args:
            tokens: The sampled tokens.
            is_cut: Whether `max_tokens` cut the answer off.
        """
        reason = "length" if is_cut else "stop"
        sampled = Sampled(tuple(tokens), (0.0,) * len(tokens), reason, WeightVersions(0, 0))  # type: ignore[arg-type]
        return self._template.read(sampled).text.strip()

    def _played(self, conversation: Conversation) -> tuple[Trajectory, list[float]]:
        """Returns the conversation as a trajectory, and a weight for each of its turns."""
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
                f"the answer has the token {name!r} with id {outside[0]}, but the model's vocabulary ends at"
                f" {self._vocabulary - 1}: use the tokenizer of the model"
            )
        return Sampled(ids, (0.0,) * len(ids), "stop", WeightVersions(0, 0))


def _chunk(chunk: Chunk) -> tinker.EncodedTextChunk | tinker.types.ImageChunk:
    if isinstance(chunk, Picture):
        return tinker.types.ImageChunk(data=chunk.data, format=chunk.format)
    return tinker.EncodedTextChunk(tokens=list(chunk.ids))


def _at_once(call: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine that awaits nothing. This also works inside a running event loop, as in notebooks."""
    try:
        call.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    call.close()
    raise RuntimeError("the coroutine did not return at once")
