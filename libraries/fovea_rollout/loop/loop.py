"""The loop of reinforcement learning over the Tinker API: rollouts, advantages, a training step, new weights."""

from __future__ import annotations

import asyncio
import inspect
import pathlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.records import Record, Source, environment_factory, fingerprint
from fovea_rollout.evaluation import Evaluation, evaluate
from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.group_pool import GroupPool
from fovea_rollout.loop.learning_rate import REINFORCING_RATE, StepSize, learning_rate_of
from fovea_rollout.loop.live_reports import LiveReports
from fovea_rollout.loop.loggers import Logger, LoggerName
from fovea_rollout.loop.loop_folder import LoopFolder, stop_line
from fovea_rollout.loop.loop_progress import LoopProgress
from fovea_rollout.loop.loop_settings import LoopSettings
from fovea_rollout.loop.step_report import StepReport, step_report
from fovea_rollout.loop.substeps import Outputs, Substeps
from fovea_rollout.loop.training_batch import (
    Groups,
    TrainingBatch,
    check_some_scored,
    fail_rollouts,
    penalised_batch,
    training_batch,
)
from fovea_rollout.policies.experts_client import ExpertSource
from fovea_rollout.policies.policy import Policy
from fovea_rollout.policies.resuming_policy import ResumingPolicy
from fovea_rollout.policies.tinker_policy import WeightPublisher
from fovea_rollout.rollout import run_rollout
from fovea_rollout.stopping import ending_with_a_line
from fovea_rollout.templates.template import ChatTemplate
from fovea_rollout.trajectory import Trajectory


async def train(
    training_client: tinker.TrainingClient,
    template: ChatTemplate,
    sources: Sequence[Source],
    settings: LoopSettings,
    on_step: Callable[[StepReport], Awaitable[None] | None],
    *,
    held_out: Sequence[Source] = (),
    out: str | pathlib.Path | None = None,
    loggers: Sequence[LoggerName | Logger] = (),
    base: tinker.SamplingClient | None = None,
    experts: ExpertSource | None = None,
    live: LiveReports | None = None,
    progress: bool | None = None,
) -> Policy:
    """Trains a model by reinforcement learning.

    Rollouts that fail are reported and left out; training stops if all of a step fail. Cancelling the task (Ctrl-C in
    `asyncio.run`) cancels running requests, on the server too, and closes the environments. A run that was killed
    resumes at its last evaluation: call `train` again with the same folder and the client from
    `resumed_training_client`.

    Args:
        training_client: Client of the model to train.
        template: The model's chat template.
        sources: Records or environment factories to play.
        settings: Settings of the loop.
        on_step: Called with each step's report; may be async. The next step waits for it.
        held_out: Sources to play once each, greedily, after every `evaluate_every` steps and after the last. Reports
            contain the results as `evaluation`.
        out: Folder of `state.json`, `metrics.jsonl` and the loggers' files. Its name becomes the run's on a live page.
            None writes no files.
        loggers: Names of installed packages, or own objects, to log to besides `metrics.jsonl`.
        base: Model from which the KL penalty is measured. None takes the model in training as it is at the beginning.
        experts: Source of the experts that computed each sample, for training to follow: an `expert_source`.
        live: Reporter to a live page of Fovea. None reports to the server of `training_client`.
        progress: Whether to show two lines of progress; see `ProgressLines` for None.

    Returns:
        A policy that samples with the last weights.

    Raises:
        InvalidInput: A setting is wrong, or `out` belongs to a run with other settings or data. The message names it.
        FailedPrecondition: All rollouts of a step failed, or a logger's package is not installed.
        Stopped: The user pressed Ctrl-C. It is a KeyboardInterrupt, and ends a program with one line, which names the
            step from which the run will resume.
        tinker.TinkerError: The server refuses a request, or the API key.
    """
    if not sources:
        raise InvalidInput("sources is empty; give at least one record or environment factory", field="sources")
    if loggers and out is None:
        raise InvalidInput("loggers need a folder: give out too", field="out")
    with ExitStack() as exits:
        exits.enter_context(ending_with_a_line(lambda: stop_line(out)))
        folder = None
        if out is not None:
            identity = _identity(training_client, sources, settings, held_out)
            folder = exits.enter_context(closing(LoopFolder(out, identity, loggers)))
            folder.check(training_client)
        if settings.kl_coefficient and base is None:
            if folder is not None:
                base = await folder.base(training_client)
            else:
                base = await training_client.save_weights_and_get_sampling_client()
        if settings.learning_rate is None:
            mean_rate = await learning_rate_of(training_client, REINFORCING_RATE)
            settings = replace(settings, learning_rate=settings.first_rate(mean_rate))
        taken = folder.state.step if folder is not None else 0
        rollouts = settings.groups_per_step * settings.group_size
        shown = exits.enter_context(LoopProgress(settings.steps, rollouts, progress, taken))
        loop = _Loop(training_client, template, sources, held_out, settings, base, experts, shown, folder)
        live = live or LiveReports.of(training_client)
        if folder is not None and not folder.state.state:
            await live.name_run(folder.name)
        try:
            await loop.begin(taken)
            for step in range(taken, settings.steps):
                report = await loop.step(step)
                shown.count_step(report)
                await live.send(report, loop.truths(report))
                done = on_step(report)
                if inspect.isawaitable(done):
                    await done
                sys.stdout.flush()  # so that a file has a line of `on_step=print` at once
                await loop.keep(report)
        finally:
            await loop.pool.close()
        return loop.policy


def _identity(
    training_client: tinker.TrainingClient,
    sources: Sequence[Source],
    settings: LoopSettings,
    held_out: Sequence[Source],
) -> dict[str, Any]:
    """Returns the properties that a resumed run must share. Factories cannot be distinguished."""
    model = training_client.get_info().model_data
    return {
        "model": model.model_name,
        **asdict(settings),
        "sources": fingerprint(sources),
        "held-out sources": fingerprint(held_out),
    }


class _Loop:
    """The state that the steps of one training run share."""

    policy: Policy

    def __init__(
        self,
        training_client: tinker.TrainingClient,
        template: ChatTemplate,
        sources: Sequence[Source],
        held_out: Sequence[Source],
        settings: LoopSettings,
        base: tinker.SamplingClient | None,
        experts: ExpertSource | None,
        shown: LoopProgress,
        folder: LoopFolder | None,
    ) -> None:
        self._client, self._template, self._sources, self._held_out = training_client, template, sources, held_out
        self._settings, self._base, self._shown, self._folder = settings, base, shown, folder
        self._publisher = WeightPublisher(
            training_client,
            experts=experts,
            is_recorded=settings.is_recorded,
            # A sampler holds many adapters, but one set of full parameters.
            moves_samples=settings.mode == "inflight" and training_client.get_info().is_lora is False,
        )
        self._places = asyncio.Semaphore(settings.concurrency)
        self._seconds: dict[str, float] = {}
        self._step_size = StepSize(settings.target_kl if settings.substeps > 1 else None)
        taken = 0
        if folder is not None and folder.state.state:
            self._step_size.share, taken = folder.state.rate_share, folder.state.step
        total, begun = (steps * settings.groups_per_step for steps in (settings.steps, taken))
        self._resuming: ResumingPolicy | None = None
        self.pool = GroupPool(self._play, total, begun, settings.replays if settings.mode == "inflight" else 0)

    async def begin(self, taken: int) -> None:
        """Publishes the current weights, of version `taken`. A new run with a folder saves them too."""
        await self._publish(taken)
        if self._folder is not None and not self._folder.state.state:
            await self._folder.save(self._client, 0, self._step_size.share)

    async def step(self, step: int) -> StepReport:
        """Waits for groups, trains on them, publishes the new weights, and evaluates them if an evaluation is due."""
        settings, self._seconds = self._settings, {}
        with self._timed("rollout"):
            ahead = 0 if settings.mode == "on_policy" else settings.groups_per_step
            playing = self._resuming or self.policy
            self.pool.fill(playing, step, settings.groups_per_step + ahead)
            cancelled = self.pool.cancelled
            groups = await self.pool.take(settings.groups_per_step, playing, step, step - settings.allowed_lag)
            cancelled = self.pool.cancelled - cancelled
        check_some_scored(groups, step)
        with self._timed("batch"):
            batch = await self._batch(groups)
        with self._timed("train"):
            batch, outputs = await self._train(groups, batch, step) if batch.data else (batch, [])
        with self._timed("publish"):
            await self._publish(step + 1)
        evaluation = None
        if self._held_out and settings.is_evaluated(step):
            with self._timed("evaluate"):
                evaluation = await self._evaluate(step + 1)
        share = self._step_size.share
        report = step_report(step, groups, batch, outputs, self._seconds, self.policy, share, evaluation, cancelled)
        self._step_size.observe(report.moved_kl)
        return report

    async def _publish(self, version: int) -> None:
        """Publishes the current weights. With `inflight`, running rollouts continue with them."""
        self.policy = await self._publisher.publish(version)
        if self._resuming is not None:
            self._resuming.move(self.policy)
        elif self._settings.mode == "inflight":
            self._resuming = ResumingPolicy(self.policy, self._settings.portion, self._template.decode)

    async def _batch(self, groups: Groups) -> TrainingBatch:
        settings = self._settings
        made = partial(
            training_batch,
            groups,
            settings.estimator,
            filter_groups=settings.filter_groups,
            policy=self.policy,
            discount=settings.discount,
        )
        if self._base is None or not settings.kl_coefficient:
            return await made()
        return await penalised_batch(groups, made, self._base, settings.kl_coefficient)

    async def keep(self, report: StepReport) -> None:
        """Logs a step, and saves its weights after an evaluation."""
        if self._folder is None:
            return
        self._folder.log(report)
        if self._settings.is_evaluated(report.step):
            await self._folder.save(self._client, report.step + 1, self._step_size.share)

    def truths(self, report: StepReport) -> dict[str, str]:
        """Returns the right answers by conversation, for records that contain one."""
        sources = {}
        for trajectory in (one for group in report.trajectories for one in group):
            index = trajectory.conversation.removeprefix("group-").partition("/")[0]
            sources[trajectory.conversation] = self._source(int(index))
        if report.evaluation is not None:
            held_out = zip(report.evaluation.trajectories, self._held_out, strict=True)
            sources |= {trajectory.conversation: source for trajectory, source in held_out}
        return {
            conversation: str(source.reward_spec["ground_truth"])
            for conversation, source in sources.items()
            if isinstance(source, Record) and "ground_truth" in source.reward_spec
        }

    async def _evaluate(self, taken: int) -> Evaluation:
        settings = self._settings
        return await evaluate(
            self.policy,
            self._template,
            self._held_out,
            settings.greedy,
            concurrency=settings.concurrency,
            name=f"held-out-{taken}",
        )

    async def _train(self, groups: Groups, batch: TrainingBatch, step: int) -> tuple[TrainingBatch, Outputs]:
        """Trains on a batch. Marks the rollouts that the server refuses as failed; returns what it trained on."""
        settings = self._settings
        adam = settings.adam_params(step, self._step_size.share)
        substeps = Substeps(self._client, settings.loss, settings.whole_loss_config, adam)
        outputs, refused = await substeps.run(batch.split(settings.substeps, (settings.seed, step)))
        if not refused:
            return batch, outputs
        fail_rollouts(groups, "train", refused)
        trained = {id(datum) for part, _ in outputs for datum in part.data}
        return replace(batch, data=[datum for datum in batch.data if id(datum) in trained]), outputs

    async def _play(self, policy: Policy, index: int) -> list[Trajectory]:
        factory = environment_factory(self._source(index))

        played: list[Trajectory] = []

        async def play_one(member: int) -> Trajectory:
            async with self._places:
                trajectory = await run_rollout(
                    policy, self._template, factory, self._settings.rollout, f"group-{index}/{member}"
                )
            self._shown.count_rollout(trajectory)
            played.append(trajectory)
            return trajectory

        try:
            async with asyncio.TaskGroup() as tasks:
                members = [tasks.create_task(play_one(member)) for member in range(self._settings.group_size)]
        except asyncio.CancelledError:
            self._shown.discount(played)
            raise
        return [member.result() for member in members]

    def _source(self, index: int) -> Source:
        """Returns the source of a group. Each epoch plays all sources, in its own order."""
        epoch, place = divmod(index, len(self._sources))
        return self._sources[_order(self._settings.seed, epoch, len(self._sources))[place]]

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._seconds[part] = time.monotonic() - start


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    return [int(place) for place in np.random.default_rng([seed, epoch]).permutation(count)]
