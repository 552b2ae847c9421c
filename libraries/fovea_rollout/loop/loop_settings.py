"""The settings of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from fovea.wire.errors import InvalidInput
from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.advantages import Estimator
from fovea_rollout.policies.policy import Settings
from fovea_rollout.rollout import RolloutSettings

Mode = Literal["on_policy", "one_step_off", "inflight"]
Schedule = Literal["constant", "linear"]


@dataclass(frozen=True)
class LoopSettings(Settings):
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
            `inflight`: all the time. Rollouts that run while the weights change continue with the new weights, in the
            middle of a turn too. Each datum's `token_versions` are the weights that sampled each token. If all
            parameters are trained, they are bounds, because requests in flight continue with the new weights too.
        max_lag: For `inflight`: the most steps by which the weights of a sample may be older than the trained weights.
        portion: For `inflight`: the most tokens of one request. A longer turn continues with the newest weights.
        replays: For `inflight`: how often a group that would exceed `max_lag` is cancelled and played again. After that
            the step waits for it, so that long rollouts are not lost every time.
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
        loss: Name of the server's loss. `stable_reinforce` truncates importance weights that it forms from what the
            sampler recorded, top-p and top-k included.
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
    portion: int = 256
    replays: int = 1
    estimator: Estimator = "dr_grpo"
    discount: float | None = None
    substeps: int = 4
    target_kl: float | None = 0.003
    loss: Literal["importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"] = "ppo"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    filter_groups: bool = False
    kl_coefficient: float = 0.05
    adam: Mapping[str, float] = field(default_factory=lambda: {"eps": 1e-8, "grad_clip_norm": 1.0})
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    evaluate_every: int = 20
    concurrency: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step", "max_lag", "portion", "substeps", "evaluate_every", "concurrency"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be 1 or more", field=name)
        if self.replays < 0:
            raise InvalidInput(f"replays is {self.replays}; it must be 0 or more", field="replays")
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
    def is_recorded(self) -> bool:
        """True if the server records samples for the loss."""
        return self.loss == "stable_reinforce"

    @property
    def allowed_lag(self) -> int:
        """The most steps by which the sampling weights may be older than the trained weights."""
        return {"on_policy": 0, "one_step_off": 1, "inflight": self.max_lag}[self.mode]

    @property
    def whole_loss_config(self) -> dict[str, float]:
        """`loss_config`, with the sampling temperature if the loss does not know it from the sampler."""
        temperature = self.rollout.sampling.temperature
        is_implied = self.is_recorded or temperature in (0.0, 1.0)
        implied = {} if is_implied else {"temperature": temperature}
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
