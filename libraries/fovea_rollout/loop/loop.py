"""The loop of reinforcement learning over the Tinker API: rollouts, advantages, a training step, new weights."""

from __future__ import annotations

import asyncio
import inspect
import pathlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import numpy as np
import tinker

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.records import Record, Source, environment_factory, fingerprint
from fovea_rollout.evaluation import Evaluation, evaluate
from fovea_rollout.loop.advantages import Estimator
from fovea_rollout.loop.group_pool import GroupPool
from fovea_rollout.loop.learning_rate import REINFORCING_RATE, StepSize, learning_rate_of
from fovea_rollout.loop.live_reports import LiveReports
from fovea_rollout.loop.loggers import Logger, LoggerName
from fovea_rollout.loop.loop_folder import LoopFolder
from fovea_rollout.loop.loop_progress import LoopProgress
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
from fovea_rollout.policies.tinker_policy import WeightPublisher
from fovea_rollout.rollout import RolloutSettings, run_rollout
from fovea_rollout.templates.template import ChatTemplate
from fovea_rollout.trajectory import Trajectory

Mode = Literal["on_policy", "one_step_off", "inflight"]
Schedule = Literal["constant", "linear"]


@dataclass(frozen=True)
class LoopSettings:
    """Settings of the training loop. The examples learn with the defaults, and explain each setting that they change.

    Attributes:
        steps: Number of training steps.
        groups_per_step: Groups that a step trains on. Each group plays one source (a record or environment factory).
        group_size: Rollouts of one group.
        learning_rate: Rate of the first step. None computes it from the model's width, doubled for the `linear`
            schedule, so that both schedules have about the same rate on average.
        schedule: `linear` lowers the rate by the same amount each step, to 0 after the last step, so that no late step
            undoes what was learnt. `constant` keeps the rate.
        mode: When rollouts run.
            `on_policy`: before each step, with the weights that the step trains.
            `one_step_off`: the rollouts of the next step run while a step trains, with weights one step older.
            `inflight`: all the time. Rollouts that run while the weights change continue with the new weights. Each
            datum's `versions` are the bounds of the weights that sampled it.
        max_lag: For `inflight`: the most steps by which the weights of a sample may be older than the trained weights.
        estimator: How advantages are computed from the rewards of a group.
        discount: Factor of later rewards, 0 to 1. Each turn then gets the advantage of its own discounted return among
            the rollouts of its group at that turn. These rollouts have different histories, so rewards at each step
            are more informative. None gives all turns of a rollout the advantage of its total reward.
        substeps: Number of optimizer steps in one step, with one part of the step's datums each. All but the first are
            off-policy, so several substeps need a loss that clips, such as `ppo`. With 64 rollouts per step, four
            substeps learn faster than one (docs/lab/learning.md); with several hundred rollouts one is enough.
        target_kl: Target for how far a step of several substeps moves the model, in nats per token. After a step that
            moved it further, the next step has a lower rate, and never more than `learning_rate` (see `StepSize`). None
            leaves the rate alone.
        loss: Name of the server's loss.
        loss_config: Settings of the loss. A sampling temperature other than 1 is added unless it is given, because
            importance ratios refer to the distribution that was sampled from.
        filter_groups: Leaves out groups in which all rewards are the same. With a KL penalty such groups have a
            gradient too: the only one that corrects a model that is certain and wrong.
        kl_coefficient: Weight of the penalty for the distance to the base model, in reward per nat. Above 0 it needs a
            temperature of 1. It preserves behaviour that is not rewarded yet, such as looking before answering.
        adam: Other fields of `tinker.AdamParams`.
        rollout: Settings of the rollouts.
        evaluate_every: Steps between evaluations of the held-out sources. The run can resume at each evaluation and at
            the last step.
        concurrency: The most rollouts that run at once.
        seed: Seed of the order of the sources. Each epoch plays all sources once.
    """

    steps: int = 120
    groups_per_step: int = 8
    group_size: int = 8
    learning_rate: float | None = None
    schedule: Schedule = "linear"
    mode: Mode = "on_policy"
    max_lag: int = 2
    estimator: Estimator = "dr_grpo"
    discount: float | None = None
    substeps: int = 4
    target_kl: float | None = 0.003
    loss: Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"] = "ppo"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    filter_groups: bool = False
    kl_coefficient: float = 0.05
    adam: Mapping[str, float] = field(default_factory=lambda: {"eps": 1e-8, "grad_clip_norm": 1.0})
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    evaluate_every: int = 20
    concurrency: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step", "max_lag", "substeps", "evaluate_every", "concurrency"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be 1 or more", field=name)
        if self.group_size < 2:
            raise InvalidInput(
                f"group_size is {self.group_size}; advantages compare the rollouts of a group, so it must be 2 or more",
                field="group_size",
            )
        if self.discount is not None and not 0.0 <= self.discount <= 1.0:
            raise InvalidInput(f"discount is {self.discount:g}; it must be from 0 to 1", field="discount")
        if self.schedule not in get_args(Schedule):
            known = " or ".join(get_args(Schedule))
            raise InvalidInput(f"schedule is {self.schedule!r}; it must be {known}", field="schedule")
        if self.target_kl is not None and not self.target_kl > 0.0:
            raise InvalidInput(f"target_kl is {self.target_kl:g}; it must be above 0, or None", field="target_kl")
        if self.substeps > 1 and self.loss == "importance_sampling":
            raise InvalidInput(
                f"substeps is {self.substeps}, but loss importance_sampling does not clip: use substeps=1 or ppo",
                field="substeps",
            )
        if self.kl_coefficient and self.rollout.sampling.temperature != 1.0:
            raise InvalidInput(
                f"temperature is {self.rollout.sampling.temperature:g}, but kl_coefficient needs 1, at which the base "
                "model is scored: set temperature to 1 or kl_coefficient to 0",
                field="kl_coefficient",
            )

    @property
    def allowed_lag(self) -> int:
        """The most steps by which the sampling weights may be older than the trained weights."""
        return {"on_policy": 0, "one_step_off": 1, "inflight": self.max_lag}[self.mode]

    @property
    def whole_loss_config(self) -> dict[str, float]:
        """`loss_config`, with the sampling temperature if the loss needs it."""
        temperature = self.rollout.sampling.temperature
        implied = {} if temperature in (0.0, 1.0) else {"temperature": temperature}
        return {**implied, **self.loss_config}

    @property
    def greedy(self) -> RolloutSettings:
        """`rollout` at temperature 0, for held-out sources."""
        return replace(self.rollout, sampling=replace(self.rollout.sampling, temperature=0.0))

    def is_evaluated(self, step: int) -> bool:
        """Returns whether an evaluation follows a step. The run can resume there."""
        return (step + 1) % self.evaluate_every == 0 or step + 1 == self.steps

    def first_rate(self, mean_rate: float) -> float:
        """Returns the rate of the first step for an average of about `mean_rate` over all steps."""
        return 2.0 * mean_rate if self.schedule == "linear" else mean_rate

    def adam_params(self, step: int, share: float = 1.0) -> tinker.AdamParams:
        """Returns the optimizer's parameters of a step, with a share of its rate."""
        assert self.learning_rate is not None, "train() sets it"
        left = 1.0 - step / self.steps if self.schedule == "linear" else 1.0
        return tinker.AdamParams(learning_rate=self.learning_rate * left * share, **self.adam)


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
        out: Folder of `state.json`, `metrics.jsonl` and the loggers' files. None writes no files.
        loggers: Names of installed packages, or own objects, to log to besides `metrics.jsonl`.
        base: Model from which the KL penalty is measured. None takes the model in training as it is at the beginning.
        experts: Source of the experts that computed each sample, for training to follow: an `expert_source`.
        live: Reporter to a live page of Fovea. None uses the server that TINKER_BASE_URL names.
        progress: Whether to show two lines of progress; see `ProgressLines` for None.

    Returns:
        A policy that samples with the last weights.

    Raises:
        InvalidInput: A setting is wrong, or `out` belongs to a run with other settings or data. The message names it.
        FailedPrecondition: All rollouts of a step failed, or a logger's package is not installed.
        tinker.TinkerError: The server refuses a request.
    """
    if not sources:
        raise InvalidInput("sources is empty; give at least one record or environment factory", field="sources")
    if loggers and out is None:
        raise InvalidInput("loggers need a folder: give out too", field="out")
    with ExitStack() as exits:
        folder = None
        if out is not None:
            identity = _identity(training_client, sources, settings, held_out)
            folder = exits.enter_context(closing(LoopFolder(out, identity, loggers)))
            folder.check(training_client)
        if settings.kl_coefficient and base is None:
            if folder is not None:
                base = await folder.base(training_client)
            else:  # a client of its own: the weights of an in-flight sampling client change
                base = await training_client.save_weights_and_get_sampling_client()
        if settings.learning_rate is None:
            mean_rate = await learning_rate_of(training_client, REINFORCING_RATE)
            settings = replace(settings, learning_rate=settings.first_rate(mean_rate))
        taken = folder.state.step if folder is not None else 0
        rollouts = settings.groups_per_step * settings.group_size
        shown = exits.enter_context(LoopProgress(settings.steps, rollouts, progress, taken))
        loop = _Loop(training_client, template, sources, held_out, settings, base, experts, shown, folder)
        live = live or LiveReports.from_environment(training_client.model_id)
        try:
            await loop.begin(taken)
            for step in range(taken, settings.steps):
                report = await loop.step(step)
                shown.count_step(report)
                if live is not None:
                    await live.send(report, loop.truths(report))
                done = on_step(report)
                if inspect.isawaitable(done):
                    await done
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
    """Returns what a resumed run must have in common with the run before. Factories cannot be distinguished."""
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
        self._publisher = WeightPublisher(training_client, is_inflight=settings.mode == "inflight", experts=experts)
        self._places = asyncio.Semaphore(settings.concurrency)
        self._seconds: dict[str, float] = {}
        self._step_size = StepSize(settings.target_kl if settings.substeps > 1 else None)
        taken = 0
        if folder is not None and folder.state.state:
            self._step_size.share, taken = folder.state.rate_share, folder.state.step
        self.pool = GroupPool(self._play, settings.steps * settings.groups_per_step, taken * settings.groups_per_step)

    async def begin(self, taken: int) -> None:
        """Publishes the current weights, of version `taken`. A new run with a folder saves them too."""
        self.policy = await self._publisher.publish(taken)
        if self._folder is not None and not self._folder.state.state:
            await self._folder.save(self._client, 0, self._step_size.share)

    async def step(self, step: int) -> StepReport:
        """Waits for groups, trains on them, publishes the new weights, and evaluates them if an evaluation is due."""
        settings, self._seconds = self._settings, {}
        with self._timed("rollout"):
            ahead = 0 if settings.mode == "on_policy" else settings.groups_per_step
            self.pool.fill(self.policy, step, settings.groups_per_step + ahead)
            groups = await self.pool.take(settings.groups_per_step, step - settings.allowed_lag)
        check_some_scored(groups, step)
        with self._timed("batch"):
            batch = await self._batch(groups)
        with self._timed("train"):
            batch, outputs = await self._train(groups, batch, step) if batch.data else (batch, [])
        with self._timed("publish"):
            self.policy = await self._publisher.publish(step + 1)
        evaluation = None
        if self._held_out and settings.is_evaluated(step):
            with self._timed("evaluate"):
                evaluation = await self._evaluate(step + 1)
        share = self._step_size.share
        report = step_report(step, groups, batch, outputs, self._seconds, self.policy, share, evaluation)
        self._step_size.observe(report.moved_kl)
        return report

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
        found = {}
        for trajectory in (one for group in report.trajectories for one in group):
            index = trajectory.conversation.removeprefix("group-").partition("/")[0]
            source = self._source(int(index))
            if isinstance(source, Record) and "ground_truth" in source.reward_spec:
                found[trajectory.conversation] = str(source.reward_spec["ground_truth"])
        return found

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

        async def play_one(member: int) -> Trajectory:
            async with self._places:
                trajectory = await run_rollout(
                    policy, self._template, factory, self._settings.rollout, f"group-{index}/{member}"
                )
            self._shown.count_rollout(trajectory)
            return trajectory

        async with asyncio.TaskGroup() as tasks:
            members = [tasks.create_task(play_one(member)) for member in range(self._settings.group_size)]
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
