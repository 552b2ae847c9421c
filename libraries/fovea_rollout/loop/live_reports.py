"""Reports to the live page of a Fovea server what only the client knows: rewards, KL, right answers, accuracies."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx

from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.step_report import StepReport
from fovea_rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from tinker.lib.internal_client_holder import InternalClientHolder
    from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_MOST_SAMPLES = 1024
_MOST_CHARACTERS = 4096


class LiveReports:
    """A reporter of one model's steps. After a report fails, it logs the error and sends no more; training continues.

    Args:
        base_url: Address of a Fovea server.
        api_key: API key of the model's owner.
        model_id: Id of the model in training.
    """

    def __init__(self, base_url: str, api_key: str, model_id: str) -> None:
        self._base, self._api_key, self._model_id = f"{base_url.rstrip('/')}/api/v1", api_key, model_id
        self._holder: InternalClientHolder | None = None
        self._is_over = False

    @classmethod
    def of(cls, training_client: tinker.TrainingClient) -> LiveReports:
        """Reports to the server of a training client, with the client's own API key or sign-in."""
        holder = training_client.holder
        found = cls(holder.shadow_config.base_url, holder.shadow_config.api_key or "", training_client.model_id)
        found._holder = holder
        return found

    async def send(self, report: StepReport, truths: Mapping[str, str]) -> None:
        """Reports a step: its metrics, and the reward and right answer of each rollout, held-out ones included.

        The metrics are the loop's step, the mean reward, the held-out reward after an evaluation, the share of groups
        with a signal, the lag, and the KL. The KL is the distance to the base model if it is known, else that of
        sampler and trainer. Numbers that are not finite are left out.

        Args:
            truths: The known right answers, by conversation.
        """
        if self._is_over:
            return
        try:
            async with httpx.AsyncClient(headers=await self._headers(), timeout=_TIMEOUT_S) as client:
                for body in _bodies(self._model_id, report, truths):
                    (await client.post(f"{self._base}/live/reports", json=body)).raise_for_status()
        except (httpx.HTTPError, tinker.TinkerError) as error:
            self._stop(error)

    async def name_run(self, name: str) -> None:
        """Gives the run a name on the page, unless it has one there or its `user_metadata` names it."""
        label = {"name": name[:120], "only_if_none": True}
        try:
            async with httpx.AsyncClient(headers=await self._headers(), timeout=_TIMEOUT_S) as client:
                found = (await client.get(f"{self._base}/training_runs/{self._model_id}")).raise_for_status().json()
                if not {"name", "run_name"} & (found.get("user_metadata") or {}).keys():
                    given = await client.put(f"{self._base}/live/runs/{self._model_id}", json=label)
                    given.raise_for_status()
        except (httpx.HTTPError, tinker.TinkerError, ValueError) as error:  # ValueError: the answer is not JSON
            logger.info("the run has no name on the live page: %s", _line(error))

    def send_metrics(
        self,
        metrics: Mapping[str, float],
        answers: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Reports metrics of the model's last step. Blocks until the server has answered.

        Args:
            metrics: The metrics. Numbers that are not finite are left out.
            answers: Numbers of held-out rows by label and answer, as in `fovea_data.answer_counts`.
            samples: Judgements of samples, made by `judgement`. Only the first 1,024 are sent.
        """
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if self._is_over or not known:
            return
        body = {"model_id": self._model_id, "metrics": known, "samples": samples[:_MOST_SAMPLES]}
        body |= {"answers": answers} if answers else {}
        try:
            key = self._api_key if self._holder is None else (_token(self._holder).result() or self._api_key)
            answer = httpx.post(f"{self._base}/live/reports", json=body, headers={"X-API-Key": key}, timeout=_TIMEOUT_S)
            answer.raise_for_status()
        except (httpx.HTTPError, tinker.TinkerError) as error:
            self._stop(error)

    async def _headers(self) -> dict[str, str]:
        return {"X-API-Key": self._api_key if self._holder is None else (await _token(self._holder) or self._api_key)}

    def _stop(self, error: Exception) -> None:
        self._is_over = True
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 404:
            logger.info("the server has no live page for this run, so no metrics are reported: %s", _line(error))
        else:
            logger.warning("metrics are not reported to the live page from here on: %s", _line(error))


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _token(holder: InternalClientHolder) -> AwaitableConcurrentFuture[str | None]:
    """Returns the valid token of a person who signed in; None for an API key."""
    return holder.run_coroutine_threadsafe(holder.get_identity_jwt())


def judgement(sequence_id: str, reward: float | None, truth: str, held_out: bool) -> dict[str, Any]:
    """Returns what the page shows beside a sample. A reward that is not finite is left out."""
    known = reward if reward is not None and math.isfinite(reward) else None
    return {"sequence_id": sequence_id, "reward": known, "truth": truth[:_MOST_CHARACTERS], "held_out": held_out}


def _bodies(model_id: str, report: StepReport, truths: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the bodies of the requests that report a step, each with at most `_MOST_SAMPLES` samples."""
    kl = report.base_kl
    if kl is None and report.agreement is not None:
        kl = report.agreement.kl
    metrics = {"reward": report.reward_mean, "kl": kl, "signal_share": report.signal_share, "lag": float(report.lag)}
    metrics["loop_step"] = float(report.step + 1)
    samples = [one for group in report.trajectories for each in group for one in _judged(each, truths, False)]
    if report.evaluation is not None:
        metrics["held_out_reward"] = report.evaluation.reward_mean
        samples += [one for each in report.evaluation.trajectories for one in _judged(each, truths, True)]
    known = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
    portions = [samples[begin : begin + _MOST_SAMPLES] for begin in range(0, len(samples), _MOST_SAMPLES)] or [[]]
    bodies: list[dict[str, Any]] = [{"model_id": model_id, "samples": portion} for portion in portions]
    bodies[0]["metrics"] = known
    return bodies


def _judged(trajectory: Trajectory, truths: Mapping[str, str], held_out: bool) -> Iterator[dict[str, Any]]:
    """Yields the judgement of a rollout's last turn, and of a held-out one's earlier turns, which have no reward."""
    truth = truths.get(trajectory.conversation, "")
    for turn in () if trajectory.failure is not None else trajectory.turns if held_out else trajectory.turns[-1:]:
        if turn.sampled.sequence_id:
            reward = trajectory.reward if turn is trajectory.turns[-1] else None
            yield judgement(turn.sampled.sequence_id, reward, truth, held_out)
