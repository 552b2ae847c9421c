"""Plays episodes: the model and an environment alternate until one of them, or a deadline, ends the episode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Environment
from fovea_rollout.environments.environment_host import EnvironmentHost
from fovea_rollout.messages import Message
from fovea_rollout.policies.policy import Chunk, Policy, Sampled, SamplingSettings, Settings, Tokens, derived_seed
from fovea_rollout.progress import BatchProgress
from fovea_rollout.trajectory import End, Failure, Trajectory, Turn

if TYPE_CHECKING:
    from fovea_rollout.templates.template import ChatTemplate

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Seconds that a rollout waits for its environment to close. After that, closing continues in the background."""
_closing: set[asyncio.Task[Failure | None]] = set()


@dataclass(frozen=True)
class RolloutSettings(Settings):
    """Settings of an episode.

    Attributes:
        sampling: Settings of sampling each turn.
        max_turns: The most turns of the model.
        max_context: The most tokens of a prompt and its answer. An observation that does not fit ends the episode, and
            is left out whole.
        deadline_s: Limit of the whole episode in seconds.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    max_turns: int = 8
    max_context: int = 4096
    deadline_s: float = 600.0


async def run_rollout(
    policy: Policy,
    template: ChatTemplate,
    environment_factory: Callable[[], Environment],
    settings: RolloutSettings,
    conversation: str,
) -> Trajectory:
    """Plays one episode.

    Args:
        policy: The policy that samples the turns.
        template: The model's chat template.
        environment_factory: Makes the environment.
        settings: Settings of the episode.
        conversation: Id of the rollout. The seeds of its turns are derived from it and from `settings.sampling.seed`.

    Returns:
        The trajectory. If the environment, the template or the server raises an error, or the deadline passes, its
        `failure` describes that, and the turns until then are kept. Only a cancellation from outside is raised.
    """
    trajectory = Trajectory(conversation)
    start = time.monotonic()
    try:
        host = EnvironmentHost(environment_factory)
    except RuntimeError as error:  # the machine cannot start another thread
        trajectory.finish("failed", Failure.of("make", error), time.monotonic() - start)
        return trajectory
    try:
        end, failure = await _play(_Episode(policy, template, host, settings, trajectory))
    finally:
        close_failure = await _close(host, conversation)
    trajectory.finish(end, failure or close_failure, time.monotonic() - start)
    return trajectory


async def run_rollouts(
    policy: Policy,
    template: ChatTemplate,
    factories: Sequence[Callable[[], Environment]],
    settings: RolloutSettings,
    *,
    concurrency: int = 256,
    progress: bool | None = None,
    name: str = "rollout",
) -> list[Trajectory]:
    """Plays one episode per factory.

    Args:
        policy: The policy that samples the turns.
        template: The model's chat template.
        factories: Each makes the environment of one episode.
        settings: Settings of the episodes.
        concurrency: The most episodes that run at once.
        progress: Whether to show a line of progress; see `ProgressLines` for None.
        name: Prefix of the ids, `<name>/<index>`. Seeds are derived from ids, so name each batch of a run differently.

    Returns:
        One trajectory per factory, in the same order, including failed ones (see `run_rollout`).
    """
    if concurrency < 1:
        raise InvalidInput(f"concurrency is {concurrency}; it must be 1 or more", field="concurrency")
    places = asyncio.Semaphore(concurrency)

    with BatchProgress(policy, len(factories), progress) as shown:

        async def play(index: int, factory: Callable[[], Environment]) -> Trajectory:
            async with places:
                trajectory = await run_rollout(shown, template, factory, settings, f"{name}/{index}")
            shown.count(trajectory)
            return trajectory

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(index, factory)) for index, factory in enumerate(factories)]
    return [task.result() for task in tasks]


async def _play(episode: _Episode) -> tuple[End, Failure | None]:
    """Plays until the end, the deadline or an error. Raises CancelledError if the task is cancelled from outside."""
    deadline_s = episode.settings.deadline_s
    deadline = asyncio.timeout(deadline_s)
    task = asyncio.current_task()
    assert task is not None
    cancellations = task.cancelling()
    try:
        async with deadline:
            return await episode.play(), None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # Rust extensions and timeout libraries raise their own classes
        if task.cancelling() > cancellations:
            raise  # the whole task is cancelled, not only a call inside the environment
        if deadline.expired():
            seen = f"TimeoutError: {deadline_s:g} s have passed in stage {episode.stage!r} of turn {episode.turn}"
            failure = Failure("deadline", seen)
        else:
            failure = Failure.of(episode.stage, error)
        logger.info("rollout %s failed: %s: %s", episode.trajectory.conversation, failure.stage, failure.error)
        return "failed", failure


async def _close(host: EnvironmentHost, conversation: str) -> Failure | None:
    closing = asyncio.create_task(_closed(host), name=f"close {conversation}")
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
    await asyncio.wait({closing}, timeout=_CLOSE_S)
    if closing.done():
        return closing.result()
    closing.add_done_callback(_log_late)
    return Failure("close", f"TimeoutError: close() has not returned after {_CLOSE_S:g} s")


async def _closed(host: EnvironmentHost) -> Failure | None:
    try:
        await host.close()
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return Failure.of("close", error)
    return None


def _log_late(closing: asyncio.Task[Failure | None]) -> None:
    if failure := closing.result():
        logger.warning("%s: %s", closing.get_name(), failure.error)


@dataclass
class _Episode:
    """An episode that runs.

    Attributes:
        stage: The current stage, as in `Failure`.
        turn: Index of the model's turn.
    """

    policy: Policy
    template: ChatTemplate
    host: EnvironmentHost
    settings: RolloutSettings
    trajectory: Trajectory
    stage: str = "make"
    turn: int = 0

    async def play(self) -> End:
        """Plays the episode; returns how it ended. Raises what the environment, the template or the policy raises."""
        await self.host.make()
        self.stage = "reset"
        messages = await self.host.reset()
        history: list[Message | Sampled] = []
        for turn in range(self.settings.max_turns):
            self.turn = turn
            history += messages
            self.stage = "render"
            prompt = self.template.render(history)
            self.stage = "sample"
            if await self._length(prompt) + self.settings.sampling.max_tokens > self.settings.max_context:
                return "context"
            sampled = await self.policy.sample(
                prompt, self._sampling(), self.template.stop_ids, self.trajectory.conversation
            )
            step_messages = await self._step(prompt, messages, sampled)
            if step_messages is None:
                return "done"
            history.append(sampled)
            messages = step_messages
        return "max_turns"

    async def _step(
        self, prompt: tuple[Chunk, ...], messages: tuple[Message, ...], sampled: Sampled
    ) -> tuple[Message, ...] | None:
        """Hands an answer to the environment; returns its messages, or None if it is done. Always keeps the turn."""
        self.stage = "render"
        turn = Turn(prompt, messages, sampled, self.template.read(sampled), 0.0, {})
        self.stage = "step"
        try:
            step, new_messages = await self.host.step(turn.answer)
            turn = replace(turn, reward=float(step.reward), metrics=dict(step.metrics))
        finally:
            self.trajectory.append(turn, self.template.is_append_only)
        return None if step.is_done else new_messages

    async def _length(self, prompt: Sequence[Chunk]) -> int:
        length = 0
        for chunk in prompt:
            length += len(chunk.ids) if isinstance(chunk, Tokens) else await self.policy.token_count(chunk)
        return length

    def _sampling(self) -> SamplingSettings:
        seed = self.settings.sampling.seed
        if seed is None:
            return self.settings.sampling
        return replace(self.settings.sampling, seed=derived_seed(seed, self.trajectory.conversation, self.turn))
