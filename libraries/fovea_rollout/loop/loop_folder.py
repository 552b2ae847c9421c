"""The folder of a training loop: metrics of its steps, and the state from which a killed run resumes."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.wire.errors import InvalidInput
from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.loggers import JsonLinesLogger, Logger, LoggerName, open_loggers
from fovea_rollout.loop.run_state import RunState
from fovea_rollout.loop.step_report import StepReport

_STATE_FILE = "state.json"


@dataclass
class LoopState(RunState):
    """The state of a loop.

    Attributes:
        base: Checkpoint from which the KL penalty is measured. Empty without a penalty, or if the caller gave the base.
        rate_share: Share of the learning rate that the next step uses.
    """

    base: str = ""
    rate_share: float = 1.0


_made_from: dict[str, str] = {}
"""The saved state that a model in training was created from, by the model's id, until `check` uses it."""


async def resumed_training_client(
    service: tinker.ServiceClient, out: str | pathlib.Path
) -> tinker.TrainingClient | None:
    """Returns a client with the weights from which the run in a folder resumes; None if the folder has no run.

    Raises:
        tinker.TinkerError: The server refuses, for instance because the checkpoint was deleted.
    """
    file = pathlib.Path(out) / _STATE_FILE
    if not file.exists():
        return None
    state = LoopState.read(file).state
    client: tinker.TrainingClient = await service.create_training_client_from_state_with_optimizer(
        state, user_metadata={"name": file.parent.resolve().name}
    )
    _made_from[client.model_id] = state
    return client


def stop_line(out: str | pathlib.Path | None) -> str:
    """Returns the line after Ctrl-C. It names the step from which the run in a folder will resume."""
    if out is None:
        return "stopped: train has no folder, so the next run begins again; give out to resume there"
    file = pathlib.Path(out) / _STATE_FILE
    if not file.exists():
        return "stopped before anything was saved: call train again to begin"
    return (
        f"stopped: call train again with the same settings and sources, out={str(out)!r} and the client from"
        f" resumed_training_client to resume after step {LoopState.read(file).step}"
    )


class LoopFolder:
    """The folder of a loop: `state.json`, `metrics.jsonl`, and the loggers' files.

    Args:
        out: The folder.
        identity: What a resumed run must have in common with the run before.
        loggers: See `open_loggers`.

    Raises:
        InvalidInput: `out` belongs to a run with another identity, or a logger is unknown.
        FailedPrecondition: A logger's package is not installed.
    """

    def __init__(
        self, out: str | pathlib.Path, identity: Mapping[str, Any], loggers: Sequence[LoggerName | Logger]
    ) -> None:
        folder = pathlib.Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self._file = folder.resolve().name, folder / _STATE_FILE
        self.state = LoopState.begin_or_resume(self._file, identity)
        self._loggers: list[Logger] = open_loggers(loggers, folder)
        self._loggers.append(JsonLinesLogger(folder / "metrics.jsonl", self.state.step))

    def check(self, training_client: tinker.TrainingClient) -> None:
        """Raises InvalidInput if the folder has a run to resume, and the client does not have its weights."""
        made_from = _made_from.pop(training_client.model_id, "")
        if self.state.state and made_from != self.state.state:
            raise InvalidInput(
                f"{self._file} belongs to a run of {self.state.step} steps, and the training client does not have its"
                " weights: create the client with resumed_training_client(service, out), or give another folder",
                field="out",
            )

    async def base(self, training_client: tinker.TrainingClient) -> tinker.SamplingClient:
        """Returns a client of the weights at the beginning of the run. Raises what the SDK raises."""
        if not self.state.base:
            self.state.base = (await training_client.save_weights_for_sampler("base")).path
        client: tinker.SamplingClient = await training_client.create_sampling_client(self.state.base)
        return client

    async def save(self, training_client: tinker.TrainingClient, step: int, rate_share: float) -> None:
        """Saves the state after `step` steps, from which the run can resume. Raises what the SDK raises."""
        saved = await training_client.save_state(self.state.next_name, overwrite=True)
        self.state.state, self.state.step, self.state.rate_share = saved.path, step, rate_share
        self.state.save(self._file)

    def log(self, report: StepReport) -> None:
        """Logs a step under its number plus 1, which is the number of steps that the weights have taken."""
        figures = figures_of(report)
        for one in self._loggers:
            one.log(report.step + 1, figures)

    def close(self) -> None:
        for one in self._loggers:
            one.close()


def figures_of(report: StepReport) -> dict[str, float]:
    """Returns the numbers of a report. Unknown ones and NaN are left out."""
    figures: dict[str, float | None] = {
        **report.metrics,
        "reward": report.reward_mean,
        "signal_share": report.signal_share,
        "lag": report.lag,
        "sampled_tokens": report.sampled_tokens,
        "trained_tokens": report.trained_tokens,
        "failed_rollouts": len(report.failures),
        "cancelled_groups": report.cancelled_groups,
        "trainer_kl": report.agreement.kl if report.agreement else None,
        "base_kl": report.base_kl,
        "moved_kl": report.moved_kl,
        "rate_share": report.rate_share,
        **{f"seconds/{part}": seconds for part, seconds in report.seconds.items()},
    }
    if report.evaluation is not None:
        figures["held_out_reward"] = report.evaluation.reward_mean
        figures |= {f"held_out/{name}": value for name, value in report.evaluation.metrics.items()}
        figures["held_out/failed_rollouts"] = len(report.evaluation.failures)
    return {name: value for name, value in figures.items() if value is not None and value == value}
