"""Many episodes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fovea.wire.errors import InvalidInput
from fovea_rollout.environment import Environment
from fovea_rollout.policy import Policy
from fovea_rollout.progress import Progress
from fovea_rollout.rollout import RolloutSettings, run_rollout
from fovea_rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from fovea_rollout.template import ChatTemplate


async def run_batch(
    policy: Policy,
    template: ChatTemplate,
    factories: Sequence[Callable[[], Environment]],
    settings: RolloutSettings,
    *,
    concurrency: int = 256,
    progress: bool | None = None,
    name: str = "rollout",
) -> list[Trajectory]:
    """Plays one episode a factory.

    Args:
        concurrency: Episodes at once.
        progress: Whether a line shows how far they are; None shows it on a terminal only.
        name: Conversations are called `<name>/<index>`, and seeds derive from that: name the batches of a run apart.

    Returns:
        One trajectory a factory, in the same order, failed ones included: see `run_rollout`.
    """
    if concurrency < 1:
        raise InvalidInput(f"concurrency is {concurrency}; it must be 1 or more", field="concurrency")
    places = asyncio.Semaphore(concurrency)

    with Progress(policy, len(factories), progress) as shown:

        async def play(index: int, factory: Callable[[], Environment]) -> Trajectory:
            async with places:
                trajectory = await run_rollout(shown, template, factory, settings, f"{name}/{index}")
            shown.count(trajectory)
            return trajectory

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(index, factory)) for index, factory in enumerate(factories)]
    return [task.result() for task in tasks]
