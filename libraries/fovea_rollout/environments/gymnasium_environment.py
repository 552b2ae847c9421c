"""Plays any `gymnasium.Env` that renders itself: the model sees a new frame each turn, and answers with a word."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.messages import Message, Picture

if TYPE_CHECKING:
    import gymnasium

# The first frame imports and sets up the graphics library, which several threads must not do at the same time.
FIRST_FRAME = threading.Lock()


@dataclass(frozen=True)
class Rules:
    """The translation between an environment and words.

    Attributes:
        question: Text after every frame.
        actions: The action of each word that the model may say, as in `{"left": 0}`. The model's case and blanks do not
            matter.
        max_steps: The most frames that the model answers. 0 leaves the limit to the environment, which may truncate.
        discount: Factor of a reward for each answer before the one that earned it. A value below 1 rewards speed.
        invalid_reward: Reward of an answer that is not an action.
        invalid_feedback: Response to an answer that is not an action; the frame does not change. `{actions}` in the
            text is replaced by the words. None ends the episode instead.
        least_side: Smallest length of a frame's shorter side in pixels. Smaller frames are enlarged by the smallest
            sufficient integer factor, so that all rows and columns are repeated equally often.
    """

    question: str
    actions: Mapping[str, Any]
    max_steps: int = 0
    discount: float = 1.0
    invalid_reward: float = 0.0
    invalid_feedback: str | None = "Answer with one of: {actions}."
    least_side: int = 0

    def __post_init__(self) -> None:
        if not self.actions:
            raise InvalidInput("actions is empty; give at least one word", field="actions")
        for word in self.actions:
            if word != word.strip().lower():
                raise InvalidInput(f"actions has {word!r}; write it as {word.strip().lower()!r}", field="actions")
        if self.max_steps < 0:
            raise InvalidInput(f"max_steps is {self.max_steps}; it must be 0 or more", field="max_steps")


class GymnasiumEnvironment:
    """One episode of a `gymnasium.Env`.

    Metrics of each turn: `is_valid` (1 if the answer was an action), `steps`, and at the end of an episode `success`
    (1 if it terminated with a reward above 0).

    Args:
        env: An environment with `render_mode="rgb_array"`.
        rules: The words of the environment.
        seed: Seed of the reset, which the members of a group share.

    Raises:
        InvalidInput: The environment has another render mode.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], rules: Rules, seed: int | None = None) -> None:
        if env.render_mode != "rgb_array":
            raise InvalidInput(
                f"render_mode is {env.render_mode!r}: make the environment with render_mode='rgb_array'",
                field="render_mode",
            )
        self._env, self._rules, self._seed = env, rules, seed
        self._answers = 0

    def reset(self) -> list[Message]:
        """Returns the first frame."""
        self._env.reset(seed=self._seed)
        with FIRST_FRAME:
            return [self._frame()]

    def step(self, answer: Answer) -> Step:
        """Takes the action that the model named."""
        self._answers += 1
        is_over = self._answers == self._rules.max_steps
        word = answer.text.strip().lower()
        if word not in self._rules.actions:
            return self._refuse(is_over)
        _, reward, is_terminated, is_truncated, _ = self._env.step(self._rules.actions[word])
        earned = float(reward) * self._rules.discount ** (self._answers - 1)
        metrics = {"is_valid": 1.0, "steps": float(self._answers)}
        if is_terminated or is_truncated or is_over:
            metrics["success"] = float(is_terminated and float(reward) > 0)
            return Step((), earned, True, metrics)
        return Step([self._frame()], earned, False, metrics)

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _refuse(self, is_over: bool) -> Step:
        metrics = {"is_valid": 0.0, "steps": float(self._answers)}
        feedback = self._rules.invalid_feedback
        if feedback is None or is_over:
            return Step((), self._rules.invalid_reward, True, {**metrics, "success": 0.0})
        text = feedback.format(actions=", ".join(self._rules.actions))
        return Step([Message("user", (text,))], self._rules.invalid_reward, False, metrics)

    def _frame(self) -> Message:
        frame = self._env.render()
        return Message("user", (Picture.of_pixels(enlarged(frame, self._rules.least_side)), self._rules.question))


def enlarged(frame: Any, least_side: int) -> npt.NDArray[np.uint8]:
    """Returns a frame with each pixel repeated until the shorter side has at least `least_side` pixels.

    Args:
        frame: uint8 [height, width, 3].

    Raises:
        InvalidInput: The frame has another type or shape.
    """
    pixels = np.asarray(frame)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise InvalidInput(
            f"render() returned {pixels.dtype} {pixels.shape}; it must return uint8 [height, width, 3]",
            field="render()",
        )
    factor = max(1, -(-least_side // min(pixels.shape[:2])))
    return np.ascontiguousarray(pixels.repeat(factor, axis=0).repeat(factor, axis=1))
