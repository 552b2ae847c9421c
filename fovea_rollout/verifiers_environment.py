"""Environments of the `verifiers` library, single-turn, multi-turn and with tools, pictures included.

    env = vf.load_environment("wordle")
    policy = await train(training, template, verifiers_sources(env), settings, on_step=print)

The environment runs its own episode, rubric included: `run_rollout` is given a client whose answers are what Fovea's
rollout sampled. Known to work with verifiers 0.1.14 and 0.3.1; 0.4 has no such environments any more. An environment
with tools needs a template that tells of them: `ChatTemplate(tokenizer, tools=verifiers_tools(env))`.
Source: https://github.com/PrimeIntellect-ai/verifiers. It is imported when an episode begins.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_rollout.environment import Answer, Step
from fovea_rollout.messages import Message, parse_messages

_MODEL = "fovea"
"""What environments hear as the model's name."""


@dataclass(frozen=True)
class _Question:
    """A prompt that an environment sent to its model, all messages of the episode, and who waits for the answer."""

    messages: Sequence[Mapping[str, Any]]
    answer: asyncio.Future[Answer]


class VerifiersEnvironment:
    """One episode of one row.

    The reward is the rubric's, at the end; so are the metrics: each reward function's own value.

    Args:
        env: A `verifiers` environment; episodes share it.
        row: Of its dataset.

    Raises:
        InvalidInput: Its rubric judges groups, whose episodes it wants to run by itself.
    """

    def __init__(self, env: Any, row: Mapping[str, Any]) -> None:
        if getattr(env, "requires_group_rollouts", False):
            raise InvalidInput("env rewards groups of rollouts, not each by itself: that is not supported", field="env")
        self._env, self._row = env, row
        self._questions: asyncio.Queue[_Question] = asyncio.Queue()
        self._episode: asyncio.Task[Any] | None = None
        self._asked: _Question | None = None

    async def reset(self) -> Sequence[Message]:
        """The row's prompt, as the environment sends it. Raises what ends the environment before it asks anything."""
        client = _client_class()(self._questions)
        self._episode = asyncio.create_task(self._env.run_rollout(dict(self._row), client, _MODEL, {}))
        question = await self._next()
        if question is None:
            raise InvalidInput(f"env ended before it asked: {self._episode.result().get('error')}", field="env")
        return parse_messages([_plain(message) for message in question.messages], "prompt")

    async def step(self, answer: Answer) -> Step:
        """Hands the answer to the environment. Raises RuntimeError if it ends with an error."""
        assert self._asked is not None, "reset() comes first"
        assert self._episode is not None
        seen = self._asked.messages
        if not self._asked.answer.done():  # else the environment gave up waiting
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
            raise InvalidInput("env rewrites what was said before: its turns must only append", field="env")
        return Step([_plain(message) for message in new])

    async def close(self) -> None:
        """Ends the episode; the environment itself stays open for others."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)

    async def _next(self) -> _Question | None:
        """What the environment asks next; None if it has ended."""
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
    """The rows of an environment's dataset; each is one source of rollouts.

    Args:
        is_held_out: Whether those for evaluation, which are the others if the environment has none.
        count: The first so many; -1 for all.
        seed: Shuffles them.
    """
    rows = (env.get_eval_dataset if is_held_out else env.get_dataset)(n=count, seed=seed)
    return [partial(VerifiersEnvironment, env, row) for row in rows]


def verifiers_tools(env: Any) -> list[dict[str, Any]]:
    """An environment's tools in OpenAI's shape, as `ChatTemplate` takes them."""
    tools = [tool.model_dump(exclude_none=True) for tool in getattr(env, "tool_defs", None) or ()]
    return [{"type": "function", "function": tool} for tool in tools]


@lru_cache(maxsize=1)
def _client_class() -> Any:
    """A client of `verifiers` that asks a queue. Raises FailedPrecondition without a `verifiers` that has clients."""
    try:
        from openai.types.chat import ChatCompletion
        from verifiers.clients import OpenAIChatCompletionsClient  # type: ignore[import-not-found, import-untyped]
    except ImportError as error:
        raise FailedPrecondition(f"this needs verifiers from 0.1.14 to 0.3.1: {error}") from None

    class QueueClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
        """Speaks OpenAI's shape to the environment, and asks the rollout instead of a server."""

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
            question = _Question(prompt, asyncio.get_running_loop().create_future())
            await self.client.put(question)
            return ChatCompletion.model_validate(_completion(await question.answer))

        async def raise_from_native_response(self, response: Any) -> None:
            """An empty answer is the model's, and no error."""

    return QueueClient


def _completion(answer: Answer) -> dict[str, Any]:
    """An answer as a chat completion; the text of a call that was read is left out of the content."""
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
    """A message without nulls, and its pictures without the detail that OpenAI's shape may name."""
    found = {name: value for name, value in message.items() if value is not None}
    if isinstance(found.get("content"), list):
        found["content"] = [_plain_part(part) for part in found["content"]]
    return found


def _plain_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image_url":
        url = part["image_url"]
        return {"type": "image_url", "image_url": {"url": url["url"] if isinstance(url, Mapping) else url}}
    return {name: value for name, value in part.items() if value is not None}
