"""Reports to the live page of a Fovea server what only the client knows: rewards, KL, right answers, accuracies."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx
import tinker

from fovea_rollout.loop.step_report import StepReport

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
        """Reports a step: its metrics, and the reward and right answer of each rollout.

        The metrics are the mean reward, the held-out reward after an evaluation, the share of groups with a signal, the
        lag, and the KL. The KL is the distance to the base model if it is known, else that of sampler and trainer.
        Numbers that are not finite are left out.

        Args:
            truths: The known right answers, by conversation.
        """
        if self._is_over:
            return
        try:
            async with httpx.AsyncClient(headers=await self._headers(), timeout=_TIMEOUT_S) as client:
                answer = await client.post(f"{self._base}/live/reports", json=_body(self._model_id, report, truths))
            answer.raise_for_status()
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

    def send_metrics(self, metrics: Mapping[str, float], answers: Mapping[str, Any] | None = None) -> None:
        """Reports metrics of the model's last step. Blocks until the server has answered.

        Args:
            metrics: The metrics. Numbers that are not finite are left out.
            answers: Numbers of held-out rows by label and answer, as in `fovea_data.answer_counts`.
        """
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if self._is_over or not known:
            return
        body = {"model_id": self._model_id, "metrics": known} | ({"answers": answers} if answers else {})
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


def _body(model_id: str, report: StepReport, truths: Mapping[str, str]) -> dict[str, Any]:
    kl = report.base_kl
    if kl is None and report.agreement is not None:
        kl = report.agreement.kl
    metrics = {"reward": report.reward_mean, "kl": kl, "signal_share": report.signal_share, "lag": float(report.lag)}
    if report.evaluation is not None:
        metrics["held_out_reward"] = report.evaluation.reward_mean
    samples = [
        {
            "sequence_id": turn.sampled.sequence_id,
            "reward": trajectory.reward if math.isfinite(trajectory.reward) else None,
            "truth": truths.get(trajectory.conversation, "")[:_MOST_CHARACTERS],
        }
        for group in report.trajectories
        for trajectory in group
        if trajectory.failure is None
        for turn in trajectory.turns[-1:]
        if turn.sampled.sequence_id
    ]
    known = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
    return {"model_id": model_id, "metrics": known, "samples": samples[:_MOST_SAMPLES]}
