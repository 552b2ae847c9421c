"""One episode: the model and an environment take turns until one of them, or the clock, ends it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fovea.wire.errors import InvalidInput
from fovea_rollout.environment import Environment
from fovea_rollout.environment_host import EnvironmentHost
from fovea_rollout.messages import Message
from fovea_rollout.policy import Chunk, Policy, Sampled, SamplingSettings, Tokens
from fovea_rollout.progress import BatchProgress
from fovea_rollout.trajectory import End, Failure, Trajectory, Turn

if TYPE_CHECKING:
    from fovea_rollout.template import ChatTemplate

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""How long a rollout waits for its environment to close; closing itself goes on."""
_closing: set[asyncio.Task[Failure | None]] = set()


@dataclass(frozen=True)
class RolloutSettings:
    """How an episode runs.

    Attributes:
        sampling: How each turn is sampled.
        max_turns: The most turns of the model.
        max_context: Tokens that a prompt and its answer may have; an observation that would pass it is left out whole.
        deadline_s: Seconds for the whole episode.
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
        conversation: Its id. Seeds of its turns are derived from it and from `settings.sampling.seed`.

    Returns:
        What happened. What the environment, the template or the server raises, and a deadline that passes, is in
        `failure`; turns until then are kept. Only being cancelled from outside is raised.
    """
    trajectory = Trajectory(conversation)
    start = time.monotonic()
    try:
        host = EnvironmentHost(environment_factory)
    except RuntimeError as error:  # the machine has no further thread
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
        concurrency: The most episodes that run at once.
        progress: Whether a line shows how far they are; None shows it on a terminal only.
        name: Conversations are called `<name>/<index>`, and seeds derive from that: name the batches of a run apart.

    Returns:
        One trajectory per factory, in the same order, failed ones included: see `run_rollout`.
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
    """Plays to the end, the deadline or an error. Raises CancelledError if it is cancelled from outside."""
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
    except BaseException as error:  # extensions in Rust and time-out libraries raise classes of their own
        if task.cancelling() > cancellations:
            raise  # the whole batch is cancelled, not just something inside an environment
        if deadline.expired():
            seen = f"TimeoutError: not done after {deadline_s:g} s, in stage {episode.stage!r} of turn {episode.turn}"
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
    return Failure("close", f"TimeoutError: still closing after {_CLOSE_S:g} s")


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
    """Where an episode is.

    Attributes:
        stage: Who is being waited for, in the words of `Failure`.
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
        """Plays to the end; returns which one. Raises whatever is raised within."""
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
        """Hands an answer to the environment; returns what it says, None if it is done. The turn is kept either way."""
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
        return replace(self.settings.sampling, seed=turn_seed(seed, self.trajectory.conversation, self.turn))


def turn_seed(seed: int, conversation: str, turn: int) -> int:
    """The seed of one turn of one rollout, 31 bits, which every server takes."""
    digest = hashlib.sha256(f"{seed}/{conversation}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
