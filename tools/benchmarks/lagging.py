"""Trains a run with samples that lag beside one on policy: `python -m benchmarks.lagging --out curves.jsonl`.

The task needs no data: a reward is the share of vowels in two answers. Some groups are slow, as with a long tool call:
between their answers they wait for further training steps. `inflight` trains on other groups meanwhile; slow groups
straddle several weights or are cancelled beyond `--max-lag`. `on_policy` plays the same prompts without waiting. Each
line of the curves is one step of one run; the figures are the mean rewards of the last quarter of the steps, by seed.
`--draw PNG --out curves.jsonl` draws existing curves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tinker

from benchmarks.figure import emit
from fovea_demo.up import running_fovea
from fovea_rollout import (
    Answer,
    ChatTemplate,
    LoopSettings,
    Message,
    RolloutSettings,
    SamplingSettings,
    Step,
    StepReport,
    train,
)
from fovea_rollout.loop.loop_settings import Mode

VOWELS = frozenset("aeiouAEIOU")
DELAYS = (0, 0, 0, 2, 0, 0, 0, 12)
"""The steps for which a group waits between its answers, by its prompt's number."""


class Clock:
    """The steps of a run, for which environments wait.

    Args:
        most: The most groups that wait at once. Others do not wait, so that a step always finds enough groups.
        last: Number of the run's last step, which needs all groups: none waits in it.
    """

    def __init__(self, most: int, last: int) -> None:
        self._most, self._last, self._steps = most, last, 0
        self._changed = asyncio.Condition()
        self._begun: dict[int, int] = {}
        self._waited: dict[int, int] = {}

    def begin(self, group: int) -> None:
        """Notes the step in which a group is first played."""
        self._begun.setdefault(group, self._steps)

    async def advance(self) -> None:
        """Counts a step."""
        async with self._changed:
            self._steps += 1
            self._changed.notify_all()

    async def wait(self, group: int) -> None:
        """Waits for the delay of a group: the first time it is played, unless too many groups wait.

        The loop waits for a group that it has cancelled too often, so a group that is played again never waits.
        """
        is_late = [until for other, until in self._waited.items() if other != group and until > self._steps]
        delay = DELAYS[group % len(DELAYS)] if self._steps <= self._begun[group] + 1 else 0
        if group not in self._waited and delay and len(is_late) < self._most:
            self._waited[group] = min(self._steps + delay, self._last)
        until = self._waited.get(group, 0)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._steps >= until)
        except asyncio.CancelledError:
            self._waited[group] = 0
            raise


class Speaking:
    """Two answers; the reward of each is half its share of vowels.

    Args:
        number: Number of the prompt.
        clock: The clock of a lagging run; None for a run without delays.
    """

    def __init__(self, number: int, clock: Clock | None) -> None:
        self._number, self._clock, self._answers = number, clock, 0

    async def reset(self) -> list[Message]:
        """Returns the question."""
        if self._clock is not None:
            self._clock.begin(self._number)
        return [Message("user", (f"Say something about the number {self._number}.",))]

    async def step(self, answer: Answer) -> Step:
        """Scores an answer; waits after the first one."""
        self._answers += 1
        share = sum(letter in VOWELS for letter in answer.text) / max(1, len(answer.text))
        if self._answers == 1 and self._clock is not None:
            await self._clock.wait(self._number)
        return Step([Message("user", ("And more.",))], share / 2, is_done=self._answers == 2)

    async def close(self) -> None:
        """Does nothing: the environment has no resources."""


def row_of(report: StepReport) -> dict[str, Any]:
    """Returns the figures of a step. Lags are in steps."""
    token_lags = [report.step - one.token_versions[one.mask][:, 0] for one in report.data]
    rollouts = [one for group in report.trajectories for one in group]
    bounds = [one.versions for one in rollouts if one.versions is not None]
    turns = [turn.sampled.versions for one in rollouts for turn in one.turns]
    return {
        "step": report.step,
        "reward": report.reward_mean,
        "lag": report.lag,
        "token_lag": float(np.concatenate(token_lags).mean()) if token_lags else 0.0,
        "straddling_rollouts": sum(each.oldest < each.newest for each in bounds),
        "straddling_turns": sum(each.oldest < each.newest for each in turns),
        "cancelled_groups": report.cancelled_groups,
        "failed_rollouts": len(report.failures),
        "kl": report.agreement.kl if report.agreement else None,
        "ratio_max": report.metrics.get("trainer/ratio:max"),
        "clipped_tokens": report.metrics.get("trainer/clipped_tokens:sum"),
        "trained_tokens": report.trained_tokens,
        "seconds": sum(report.seconds.values()),
    }


def settings_of(options: argparse.Namespace, mode: Mode, loss: str, seed: int) -> LoopSettings:
    """Returns the settings of one run. Both modes have the same."""
    sampling = SamplingSettings(options.max_tokens, seed=seed)
    return LoopSettings(
        steps=options.steps,
        groups_per_step=options.groups,
        group_size=options.group_size,
        learning_rate=options.rate,
        schedule="constant",
        mode=mode,
        max_lag=options.max_lag,
        portion=options.portion,
        substeps=1,
        loss=loss,  # type: ignore[arg-type]  # from the command line; the server names an unknown one
        kl_coefficient=0.0,
        rollout=RolloutSettings(sampling, max_turns=2),
        seed=seed,
    )


async def run(
    service: tinker.ServiceClient, model: str, settings: LoopSettings, write: Callable[[dict[str, Any]], None]
) -> list[float]:
    """Trains one model; returns the reward of each step."""
    training = await service.create_lora_training_client(base_model=model, rank=16, seed=settings.seed)
    clock = Clock(settings.groups_per_step // 2, settings.steps - 1) if settings.mode == "inflight" else None
    rewards: list[float] = []
    started = time.monotonic()

    async def note(report: StepReport) -> None:
        rewards.append(report.reward_mean)
        write({**row_of(report), "elapsed_s": time.monotonic() - started})
        if clock is not None:
            await clock.advance()

    sources = [partial(Speaking, number, clock) for number in range(settings.steps * settings.groups_per_step)]
    await train(training, ChatTemplate(training.get_tokenizer()), sources, settings, note, progress=False)
    return rewards


async def measure(options: argparse.Namespace, base_url: str) -> None:
    """Runs both modes with each loss and seed, writes the curves and prints the figures."""
    with tinker.ServiceClient(base_url=base_url, api_key=options.api_key) as service, options.out.open("w") as lines:
        rest = tinker.RestClient(base_url=base_url, api_key=options.api_key)
        model = options.model or (await rest.get_server_capabilities()).supported_models[0].model_name
        assert model is not None
        for loss in options.losses.split(","):
            found: dict[Mode, list[float]] = {mode: [] for mode in ("on_policy", "inflight")}
            for seed in range(options.seeds):
                for mode, ends in found.items():
                    own = {"figure": "lagging.step", "mode": mode, "loss": loss, "seed": seed}

                    def write(row: dict[str, Any], own: dict[str, Any] = own) -> None:
                        lines.write(json.dumps({**own, **row}) + "\n")
                        lines.flush()

                    rewards = await run(service, model, settings_of(options, mode, loss, seed), write)
                    ends.append(last_quarter(rewards))
            sizes = {name: getattr(options, name) for name in ("steps", "groups", "group_size", "max_lag", "portion")}
            emit("lagging.reward", found["inflight"], "reward", found["on_policy"], loss=loss, model=model, **sizes)


def last_quarter(rewards: Sequence[float]) -> float:
    """Returns the mean reward of the last quarter of the steps."""
    return float(np.mean(rewards[-max(1, len(rewards) // 4) :]))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the rewards over steps, a panel for each loss: thin lines for seeds, a thick one for their mean.

    Args:
        rows: Lines of the curves.
        path: The PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    losses = list(dict.fromkeys(row["loss"] for row in rows))
    figure, panels = plt.subplots(
        1, len(losses), figsize=(4.5 * len(losses), 2.8), layout="constrained", squeeze=False, sharey=True
    )
    for panel, loss in zip(panels.flat, losses, strict=True):
        for mode, color in (("on_policy", "tab:blue"), ("inflight", "tab:orange")):
            own = [row for row in rows if (row["loss"], row["mode"]) == (loss, mode)]
            curves = np.array(
                [[row["reward"] for row in own if row["seed"] == seed] for seed in {r["seed"] for r in own}]
            )
            panel.plot(curves.T, color=color, alpha=0.25, linewidth=0.8)
            lag = np.mean([row["token_lag"] for row in own])
            panel.plot(curves.mean(0), color=color, label=f"{mode}: tokens {lag:.1f} steps old")
        panel.set_title(loss, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8, frameon=False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.savefig(path, dpi=90)
    plt.close(figure)


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """Yields the address of a server: the given one, or that of a new Fovea with the tiny model."""
    if options.base_url:
        yield options.base_url
        return
    with (
        tempfile.TemporaryDirectory(prefix="fovea-lagging-") as state,
        running_fovea(Path(state), None, "--port", "0", "--grpc-port", "0") as up,
    ):
        yield up["base_url"]


def main() -> None:
    """Writes the curves and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="", help="a running server; default: a new Fovea with the tiny model")
    parser.add_argument("--api-key", default="tml-local")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--out", type=Path, default=Path("lagging.jsonl"), help="file of the curves")
    parser.add_argument("--losses", default="ppo,stable_reinforce")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups", type=int, default=8, help="groups of a step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate")
    parser.add_argument("--max-tokens", type=int, default=12, help="tokens of an answer")
    parser.add_argument("--portion", type=int, default=4, help="tokens of a request of the lagging run")
    parser.add_argument("--max-lag", type=int, default=4)
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draws the curves of --out instead of measuring")
    options = parser.parse_args()
    if options.draw:
        draw([json.loads(line) for line in options.out.read_text().splitlines()], options.draw)
        return
    with server(options) as base_url:
        asyncio.run(measure(options, base_url))


if __name__ == "__main__":
    main()
