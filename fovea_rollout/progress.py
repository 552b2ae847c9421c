"""One line that says how far a batch of rollouts is."""

from __future__ import annotations

from collections.abc import Sequence

from fovea_rollout.display import Display
from fovea_rollout.messages import Picture
from fovea_rollout.policy import Chunk, Policy, Sampled, SamplingSettings
from fovea_rollout.trajectory import Trajectory


class Progress(Display):
    """A policy that counts what it samples, and shows it. Use as `with`.

    Args:
        policy: Samples.
        total: Rollouts.
        is_shown: None for on a terminal only.
    """

    def __init__(self, policy: Policy, total: int, is_shown: bool | None) -> None:
        super().__init__(is_shown)
        self._policy, self._failed, self._turns, self._tokens = policy, 0, 0, 0
        self._task = self._bar.add_task("rollouts", total=total, words="")

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """As the policy does."""
        sampled = await self._policy.sample(prompt, settings, stop_ids, conversation)
        self._turns += 1
        self._tokens += len(sampled.ids)
        self._show()
        return sampled

    async def token_count(self, picture: Picture) -> int:
        """As the policy does."""
        return await self._policy.token_count(picture)

    def count(self, trajectory: Trajectory) -> None:
        """Counts a rollout that has ended."""
        self._failed += trajectory.end == "failed"
        self._bar.advance(self._task)
        self._show()

    def _show(self) -> None:
        seconds = self._bar.tasks[0].elapsed or 0.0
        rate = self._tokens / seconds if seconds else 0.0
        words = f"{self._failed} failed, {self._turns} turns, {rate:.0f} tokens/s"
        self._bar.update(self._task, words=words)
