"""One run of a reinforcement-learning example: connect, warm up, measure, learn, measure again, write the results.

It works with any Tinker server.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence

from fovea_rollout import (
    ChatTemplate,
    Chunk,
    Environment,
    LoopSettings,
    Policy,
    RolloutSettings,
    SamplingSettings,
    ScriptedPlayer,
    StepReport,
    TinkerPolicy,
    Trajectory,
    WarmUpSettings,
    connect,
    evaluate,
    train,
    warm_up,
    write_viewer,
)
from fovea_rollout.late_sdk import tinker
from fovea_rollout.stopping import exiting_with_a_line

Sources = Sequence[Callable[[], Environment]]
SHOWN = 32
"""Number of episodes of each evaluation on the page."""


def read_arguments(
    about: str,
    *,
    steps: int = LoopSettings.steps,
    groups: int = LoopSettings.groups_per_step,
    warm_up: int = WarmUpSettings.steps,
    stages: int = 1,
    answers: Sequence[str] = (),
) -> argparse.Namespace:
    """Parses the command line.

    Args:
        about: Description of the example.
        steps: Default number of training steps.
        groups: Default number of groups of a step.
        warm_up: Default number of steps of the warm-up.
        stages: Number of stages of training, each of which needs a step.
        answers: Formats of answers, for an example with several; the first is the default.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--base-url", help="address of a Tinker server; default: TINKER_BASE_URL")
    parser.add_argument("--api-key", help="default: TINKER_API_KEY")
    parser.add_argument("--model", help="name of the model; default: the first one of the server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=steps, help="steps of reinforcement learning (default: %(default)s)"
    )
    parser.add_argument(
        "--groups", type=int, default=groups, help="groups of episodes of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=warm_up,
        help="steps of the warm-up, which teaches the format of answers (default: %(default)s)",
    )
    parser.add_argument("--held-out", type=int, default=200, help="episodes of each evaluation (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("examples/out"))
    if answers:
        parser.add_argument("--answers", choices=answers, default=answers[0], help="(default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < stages:
        parser.error(f"--steps is {arguments.steps}; it must be {stages} or more, one for each stage")
    return arguments


class Experiment:
    """A run of an example. Call `begin` to create one.

    Attributes:
        policy: A policy with the newest weights.
        result: Names and values of the measurements.
    """

    def __init__(
        self, name: str, arguments: argparse.Namespace, rollout: RolloutSettings, training: tinker.TrainingClient
    ) -> None:
        self._name, self._arguments, self._rollout, self._training = name, arguments, rollout, training
        self._tokenizer = training.get_tokenizer()
        self._template = ChatTemplate(self._tokenizer)
        self._rewards: list[float] = []
        self._trajectories: list[Trajectory] = []
        self._start = time.monotonic()
        self.policy: Policy
        self.result: dict[str, float | str] = {
            "example": name,
            "seed": arguments.seed,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{_cores()} cores, {platform.machine()}",
            **{one: getattr(arguments, one) for one in ("steps", "groups", "warm_up", "held_out")},
        }

    @classmethod
    async def begin(cls, name: str, arguments: argparse.Namespace, rollout: RolloutSettings) -> Experiment:
        """Connects to the server, and creates a LoRA to train."""
        with exiting_with_a_line():
            service = connect(arguments.base_url, arguments.api_key)
        model = arguments.model or await first_model(arguments.base_url, arguments.api_key)
        training = await service.create_lora_training_client(base_model=model, rank=32, seed=arguments.seed)
        experiment = cls(name, arguments, rollout, training)
        await experiment._publish()
        return experiment

    async def warm_up(
        self,
        sources: Sources,
        answer: Callable[[Sequence[Chunk]], str] | tinker.SamplingClient,
        learning_rate: float | None = None,
    ) -> None:
        """Clones a player, and puts its mean reward into the result as `cloned`.

        A player that answers at random teaches the form of an answer, but nothing about pictures.

        Args:
            sources: Environments to play.
            answer: A function that writes the player's answers, or a client that samples them.
            learning_rate: Rate of the warm-up; None takes a rate by the model's width.
        """
        player: Policy
        if isinstance(answer, tinker.SamplingClient):
            player = TinkerPolicy(answer)
        else:
            player = ScriptedPlayer(self.policy, self._tokenizer, answer)
        arguments = self._arguments
        settings = WarmUpSettings(
            arguments.warm_up, learning_rate=learning_rate, rollout=self._rollout, seed=arguments.seed
        )
        self.result["cloned"] = await warm_up(self._training, self._template, sources, player, settings)
        await self._publish()
        self._say(f"warm-up done; the cloned player's reward is {self.result['cloned']:.3f}")

    async def measure(self, moment: str, sources: Sources, other: tinker.SamplingClient | None = None) -> None:
        """Plays one greedy episode per source, and puts their mean reward and metrics into the result as `moment`.

        Rollouts that fail are left out. Their number becomes `<moment>_failed`.

        Args:
            moment: Name of the measurement.
            sources: Environments to play.
            other: A client that plays instead of the model in training.
        """
        policy = TinkerPolicy(other) if other else self.policy
        sampling = SamplingSettings(self._rollout.sampling.max_tokens, temperature=0.0)
        settings = RolloutSettings(sampling, self._rollout.max_turns, self._rollout.max_context)
        found = await evaluate(policy, self._template, sources, settings, name=moment)
        failed = sum(not one.is_scored for one in found.trajectories)
        if failed:
            self._say(f"{moment}: {failed} of {len(sources)} rollouts failed, the first: {found.failures[:1]}")
            if failed == len(sources):
                raise RuntimeError(f"all {failed} rollouts failed, the first: {found.failures[:1]}")
        self.result[moment] = found.reward_mean
        self.result[f"{moment}_failed"] = failed
        self.result |= {f"{moment}_{name}": value for name, value in found.metrics.items()}
        self._trajectories += found.trajectories[:SHOWN]
        self._say(f"{moment}: reward {found.reward_mean:.3f}, {_shown(found.metrics)}")

    async def learn(self, sources: Sources, settings: LoopSettings, base: tinker.SamplingClient | None = None) -> None:
        """Trains with rewards. The KL penalty is measured from `base`, or else from the model after the warm-up."""
        base = base or self._sampling
        self.policy = await train(
            self._training, self._template, sources, settings, self._take, base=base, progress=False
        )
        self.result["prefix_breaks"] = self._breaks
        self.result["largest_log_ratio"] = self._log_ratio
        self._say(f"learnt: {self._breaks} prefix breaks, trainer - sampler {self._log_ratio:.0e} at most")

    async def run(
        self,
        train_sources: Sources,
        held_out: Sources,
        answer: Callable[[Sequence[Chunk]], str],
        settings: LoopSettings,
        bar: float,
    ) -> None:
        """Runs all parts: clones the player, trains with rewards, measures before and after, and writes the results."""
        await self.warm_up(train_sources, answer)
        await self.measure("before", held_out)
        await self.learn(train_sources, settings)
        await self.measure("after", held_out)
        self.write(bar)

    def write(self, bar: float) -> None:
        """Writes the result, the curve and the page of rollouts to the folder of `--out`.

        Args:
            bar: The reward that the model should reach at the end.
        """
        self.result["bar"] = bar
        # The load of the machine: the mean number of running or runnable processes in the last 15 minutes.
        self.result["load"] = round(os.getloadavg()[2], 1)
        self.result["seconds"] = round(time.monotonic() - self._start, 1)
        folder: pathlib.Path = self._arguments.out
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self._name}-{self._arguments.seed}"
        curve = {"rewards": self._rewards}
        (folder / f"{stem}.json").write_text(json.dumps(self.result | curve, indent=1))
        write_viewer(
            folder / f"{stem}.html",
            self._trajectories,
            f"{self._name}, seed {self._arguments.seed}",
            decode=lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=False)),
            curves={"mean reward per turn": self._rewards},
        )
        self._say(f"written: {folder / stem}.json and .html")

    _breaks, _log_ratio = 0, 0.0

    def _take(self, report: StepReport) -> None:
        played = [one for group in report.trajectories for one in group]
        # The reward per turn makes single tries comparable with whole episodes.
        self._rewards.append(sum(one.reward for one in played) / max(sum(len(one.turns) for one in played), 1))
        self._breaks += sum(one.prefix_breaks for one in played)
        if report.agreement is not None:
            self._log_ratio = max(self._log_ratio, report.agreement.largest_log_ratio)
        own = {name: value for name, value in report.metrics.items() if not name.startswith("trainer/")}
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in report.seconds.items())
        self._say(
            f"step {report.step + 1}: reward {report.reward_mean:.3f}, signal {report.signal_share:.2f}, "
            f"KL {report.base_kl or 0.0:.3f}, moved {report.moved_kl or 0.0:.4f} at {report.rate_share:.2f}, "
            f"{_shown(own)}; {seconds}"
        )

    async def _publish(self) -> None:
        self._sampling = await self._training.save_weights_and_get_sampling_client()
        self.policy = TinkerPolicy(self._sampling)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._start:5.0f} s  {text}", flush=True)


async def first_model(base_url: str | None, api_key: str | None) -> str:
    """Returns the first model that the server trains."""
    models = (await tinker.RestClient(base_url=base_url, api_key=api_key).get_server_capabilities()).supported_models
    return next(str(one.model_name) for one in models if one.trainable is not False)


def _cores() -> int | None:
    """Returns the number of cores that the process may use, or else of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _shown(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
