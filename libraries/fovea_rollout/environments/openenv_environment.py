"""Plays OpenEnv environments through their client, with one session of the server for each episode.

    from openenv.core import GenericEnvClient

    def source() -> OpenEnvEnvironment:
        client = GenericEnvClient(base_url="http://127.0.0.1:8000")
        return OpenEnvEnvironment(client, lambda answer: {"message": answer.text}, reset={"seed": 7})

This module does not import OpenEnv, and accepts any client with these three methods. Source:
https://github.com/meta-pytorch/OpenEnv.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.messages import Message, MessageLike, Part, Picture, parse_message

_PICTURE_URI = "data:image/"


class OpenEnvResult(Protocol):
    """OpenEnv's `StepResult`."""

    observation: Any
    reward: float | None
    done: bool


class OpenEnvClient(Protocol):
    """OpenEnv's async `EnvClient`, not the client that its `sync()` returns."""

    def reset(self, **options: Any) -> Awaitable[OpenEnvResult]: ...

    def step(self, action: Any) -> Awaitable[OpenEnvResult]: ...

    def close(self) -> Awaitable[None]: ...


class OpenEnvEnvironment:
    """One episode of an OpenEnv server. It ends when the server sets `done`.

    Metrics of each turn: `steps`.

    Args:
        client: A client for this episode only. It is closed at the end.
        to_action: Makes an action from an answer: a mapping for `GenericEnvClient`, else the client's own action type.
        to_message: Makes a message from an observation; `observation_message` by default.
        reset: Options of `reset`, such as a seed, which the members of a group share.

    Raises:
        InvalidInput: The client is not async.
    """

    def __init__(
        self,
        client: OpenEnvClient,
        to_action: Callable[[Answer], Any],
        to_message: Callable[[Any], MessageLike] | None = None,
        *,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        if not inspect.iscoroutinefunction(client.step):
            raise InvalidInput(
                "client is not async: give the client itself, not the result of its sync()", field="client"
            )
        self._client, self._to_action, self._options = client, to_action, dict(reset or {})
        self._to_message = observation_message if to_message is None else to_message
        self._steps = 0

    async def reset(self) -> list[Message]:
        """Returns the first observation. Raises InvalidInput if the episode is already over."""
        result = await self._client.reset(**self._options)
        if result.done:
            raise InvalidInput("the environment is done after reset(), so there is nothing to answer", field="reset()")
        return [parse_message(self._to_message(result.observation))]

    async def step(self, answer: Answer) -> Step:
        """Takes the action of the model's answer."""
        self._steps += 1
        result = await self._client.step(self._to_action(answer))
        messages = () if result.done else (self._to_message(result.observation),)
        return Step(messages, float(result.reward or 0.0), bool(result.done), {"steps": float(self._steps)})

    async def close(self) -> None:
        """Ends the session."""
        await self._client.close()


def observation_message(observation: Any) -> Message:
    """Makes a message from an observation: its fields in order, as pictures or texts, without empty fields.

    A single text is not changed. Several texts are named: `name: value`. A picture is a data URI, the bytes of a file,
    or pixels as uint8 [height, width, 3], also as nested lists.

    Raises:
        InvalidInput: The observation is empty, or a picture cannot be read.
    """
    if hasattr(observation, "model_dump"):  # a pydantic model, from a client with its own types
        observation = observation.model_dump(exclude={"done", "reward", "metadata"})
    fields = observation if isinstance(observation, Mapping) else {"observation": observation}
    found = {
        name: _read(value, str(name))
        for name, value in fields.items()
        if value is not None and not (isinstance(value, str | bytes | Sequence | Mapping) and not value)
    }
    texts = [name for name, part in found.items() if isinstance(part, str)]
    parts: list[Part] = []
    for name, part in found.items():
        if isinstance(part, Picture) or len(texts) == 1:
            parts.append(part)
        else:
            parts.append(f"{name}: {part}" + ("" if name == texts[-1] else "\n"))
    if not parts:
        raise InvalidInput(
            f"the observation {observation!r} has no text or picture: give to_message", field="observation"
        )
    return Message("user", tuple(parts))


def _read(value: Any, where: str) -> Part:
    if isinstance(value, bytes):
        return Picture.of_bytes(value, where)
    if isinstance(value, str):
        if not value.startswith(_PICTURE_URI):
            return value
        shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": value}}]}
        return parse_message(shown, where).parts[0]
    if isinstance(value, np.ndarray) or (isinstance(value, list) and _is_nested(value)):
        pixels = np.asarray(value)
        if pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.min() >= 0 and pixels.max() <= 255:
            return Picture.of_pixels(pixels.astype(np.uint8))
    return str(value)


def _is_nested(value: list[Any]) -> bool:
    """Returns whether a list may be pixels: [[[r, g, b], ...], ...]."""
    row = value[0]
    return isinstance(row, list) and bool(row) and isinstance(row[0], list) and len(row[0]) == 3
