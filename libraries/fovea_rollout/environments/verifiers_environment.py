"""Plays environments of the `verifiers` library: single-turn, multi-turn and with tools, with or without pictures.

    env = vf.load_environment("wordle")
    policy = await train(training, template, verifiers_sources(env), settings, on_step=print)

The environment runs its own episode and its own rubric: its `run_rollout` receives a client that returns the answers
sampled by Fovea's rollout. This works with verifiers 0.1.14 and 0.3.1; version 0.4 has no such environments. An
environment with tools needs a template that describes them: `ChatTemplate(tokenizer, tools=verifiers_tools(env))`.
Source: https://github.com/PrimeIntellect-ai/verifiers. The library is imported when an episode begins.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.messages import Message, parse_messages

_MODEL = "fovea"
"""The model's name for environments."""


@dataclass(frozen=True)
class _Question:
    """A request of an environment to its model: all messages of the episode, and the future of the answer."""

    messages: Sequence[Mapping[str, Any]]
    answer: asyncio.Future[Answer]


class VerifiersEnvironment:
    """One episode of one row.

    The rubric's reward comes at the end of the episode. The metrics are the values of the rubric's reward functions.

    Args:
        env: A `verifiers` environment, which episodes share.
        row: A row of its dataset.

    Raises:
        InvalidInput: The rubric rewards whole groups, and so needs to run their episodes itself.
    """

    def __init__(self, env: Any, row: Mapping[str, Any]) -> None:
        if getattr(env, "requires_group_rollouts", False):
            raise InvalidInput("env rewards whole groups of rollouts, which is not supported", field="env")
        self._env, self._row = env, row
        self._questions: asyncio.Queue[_Question] = asyncio.Queue()
        self._episode: asyncio.Task[Any] | None = None
        self._asked: _Question | None = None

    async def reset(self) -> Sequence[Message]:
        """Returns the environment's first prompt. Raises InvalidInput if the environment ends before it."""
        client = _client_class()(self._questions)
        self._episode = asyncio.create_task(self._env.run_rollout(dict(self._row), client, _MODEL, {}))
        question = await self._next()
        if question is None:
            raise InvalidInput(f"env ended before its first prompt: {self._episode.result().get('error')}", field="env")
        return parse_messages([_plain(message) for message in question.messages], "prompt")

    async def step(self, answer: Answer) -> Step:
        """Hands the answer to the environment.

        Raises RuntimeError if the environment ends with an error, InvalidInput if it changes earlier messages.
        """
        assert self._asked is not None, "reset() comes first"
        assert self._episode is not None
        seen = self._asked.messages
        if not self._asked.answer.done():  # done if the environment no longer waits
            self._asked.answer.set_result(answer)
        question = await self._next()
        if question is None:
            output = self._episode.result()
            if output.get("error"):
                raise RuntimeError(f"the environment ended with an error: {output['error']}")
            metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
            return Step((), float(output["reward"]), True, metrics)
        head, new = question.messages[: len(seen)], question.messages[len(seen) + 1 :]
        if list(head) != list(seen):
            raise InvalidInput("env changes earlier messages, but its turns must only append messages", field="env")
        return Step([_plain(message) for message in new])

    async def close(self) -> None:
        """Ends the episode. The environment stays open for other episodes."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)

    async def _next(self) -> _Question | None:
        """Returns the environment's next request; None if the environment has ended."""
        assert self._episode is not None
        asking = asyncio.ensure_future(self._questions.get())
        try:
            await asyncio.wait({asking, self._episode}, return_when=asyncio.FIRST_COMPLETED)
            self._asked = asking.result() if asking.done() else None
        finally:
            asking.cancel()
        return self._asked


def verifiers_sources(
    env: Any, *, is_held_out: bool = False, count: int = -1, seed: int | None = None
) -> list[Callable[[], VerifiersEnvironment]]:
    """Returns one source of rollouts for each row of an environment's dataset.

    Args:
        env: A `verifiers` environment.
        is_held_out: Whether to use the dataset for evaluation. An environment without one returns its training dataset.
        count: Number of rows from the beginning; -1 for all.
        seed: Seed for shuffling the rows; None does not shuffle them.
    """
    rows = (env.get_eval_dataset if is_held_out else env.get_dataset)(n=count, seed=seed)
    return [partial(VerifiersEnvironment, env, row) for row in rows]


def verifiers_tools(env: Any) -> list[dict[str, Any]]:
    """Returns an environment's tools in OpenAI's format, for `ChatTemplate`."""
    tools = [tool.model_dump(exclude_none=True) for tool in getattr(env, "tool_defs", None) or ()]
    return [{"type": "function", "function": tool} for tool in tools]


@lru_cache(maxsize=1)
def _client_class() -> Any:
    """Returns a `verifiers` client that sends its requests to a queue. Raises FailedPrecondition without clients."""
    try:
        from openai.types.chat import ChatCompletion
        from verifiers.clients import OpenAIChatCompletionsClient  # type: ignore[import-not-found, import-untyped]
    except ImportError as error:
        raise FailedPrecondition(f"install verifiers, from version 0.1.14 to 0.3.1: {error}") from None

    class QueueClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
        """A client that returns the rollout's answers to the environment in OpenAI's format."""

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
            question = _Question(prompt, asyncio.get_running_loop().create_future())
            await self.client.put(question)
            return ChatCompletion.model_validate(_completion(await question.answer))

        async def raise_from_native_response(self, response: Any) -> None:
            """Does nothing: an empty answer of the model is not an error."""

    return QueueClient


def _completion(answer: Answer) -> dict[str, Any]:
    """Converts an answer to a chat completion. The content leaves out the text of parsed tool calls."""
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for index, call in enumerate(answer.tool_calls)
    ]
    message = {
        "role": "assistant",
        "content": answer.text.partition("<tool_call>")[0].rstrip() if calls else answer.text,
        "tool_calls": calls or None,
        "reasoning_content": answer.thinking or None,
    }
    reason = "length" if answer.is_cut else "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return {"id": "", "object": "chat.completion", "created": 0, "model": _MODEL, "choices": [choice]}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without nulls, and without the `detail` of pictures in OpenAI's format."""
    found = {name: value for name, value in message.items() if value is not None}
    if isinstance(found.get("content"), list):
        found["content"] = [_plain_part(part) for part in found["content"]]
    return found


def _plain_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image_url":
        url = part["image_url"]
        return {"type": "image_url", "image_url": {"url": url["url"] if isinstance(url, Mapping) else url}}
    return {name: value for name, value in part.items() if value is not None}
