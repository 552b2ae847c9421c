"""Alerts: states of models and services that a person should know about, on the page and at a webhook.

An alert begins once its cause has lasted as long as its bound allows, and ends once the cause has been gone for
`CALM_S`. Alerts are only in memory: after a restart of the gateway, causes that persist begin new alerts with the same
id.
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import shutil
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fovea.runtime.tasks import Backoff
from fovea_gateway.http.endpoint import iso_time
from fovea_gateway.replicas.base_models import BaseModel, BaseModels
from fovea_gateway.replicas.replicas import Peer
from fovea_gateway.sessions.future import Ending, Kind
from fovea_gateway.training.models import Model, Models, ModelState

logger = logging.getLogger(__name__)

LOOK_S = 2.0
CALM_S = 30.0
START_S = 600.0
"""Seconds that a service may take to load and compile a model, unless the settings wait less for services."""
_MOST_OPEN = 64
_MOST_ENDED = 20
_OWNERS = 512
_CHANGES = 256
_SYSTEM = ""
"""The owner of alerts of services and disks, which only administrators see."""
_NOT_FINITE = re.compile(r"\b(nan|inf)\b|not finite")
_LEARNING = (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)
_CHANGING = (Kind.OPTIM_STEP, Kind.LOAD_STATE)


class Bounds(NamedTuple):
    """Bounds of the alerts; 0 turns one off. `start_s` bounds the start of a service that has never answered."""

    kl: float
    gone_s: float
    disk_share: float
    durable_lag_s: float
    slot_wait_s: float
    start_s: float


class Key(NamedTuple):
    """Identity of an alert: its kind, the owner that may see it, and the model, service or folder."""

    kind: str
    owner: str
    subject: str


class Cause(NamedTuple):
    """A present cause of an alert, and the seconds that it must last."""

    message: str
    patience_s: float = 0.0


@dataclass
class Alert:
    """An alert that has begun. `seen_at` is the monotonic time at which its cause was last seen."""

    key: Key
    message: str
    begun_at: float
    seen_at: float
    ended_at: float | None = None

    def shown(self) -> dict[str, Any]:
        """Returns the alert as the page reads it."""
        return {**self.key._asdict(), "message": self.message, "begun_at": self.begun_at, "ended_at": self.ended_at}


class Alerts:
    """The alerts of all owners. Call `tick` regularly, and run `webhook.run` in the background.

    Args:
        folders: Local folders that must not fill up.
        webhook: Receives the beginning and the end of each alert.
    """

    def __init__(
        self, models: Models, base_models: BaseModels, bounds: Bounds, folders: Sequence[Path], webhook: "Webhook"
    ) -> None:
        self.webhook = webhook
        self._models, self._base_models, self._bounds, self._folders = models, base_models, bounds, folders
        self._of_models: dict[Key, Cause] = {}
        self._changes: defaultdict[str, deque[tuple[int, float]]] = defaultdict(deque)
        self._since: dict[Key, float] = {}
        self._open: dict[Key, Alert] = {}
        self._ended: OrderedDict[str, deque[Alert]] = OrderedDict()

    def note_end(self, ending: Ending) -> None:
        """Records the end of a training command: a loss that is not finite, or a change that is not durable yet."""
        submission, error = ending.pending.submission, ending.outcome.error
        key = Key("loss_not_finite", submission.owner, submission.scope)
        if error is None:
            if submission.kind is Kind.OPTIM_STEP:
                self._of_models.pop(key, None)
            if submission.kind in _CHANGING:
                changes = self._changes[submission.scope]
                if len(changes) == _CHANGES:
                    changes.pop()
                changes.append((submission.seq_id, time.monotonic()))
        elif submission.kind in _LEARNING and _NOT_FINITE.search(error.message):
            # The trainer refuses such losses and steps with errors that have no class of their own.
            what = submission.kind.value.replace("_", " ")
            self._of_models[key] = Cause(f"a {what} was refused: its loss or gradient is not finite")

    def note_values(self, model: Model, values: Mapping[str, float]) -> None:
        """Records the newest values of a model's metrics, as trainer and client report them."""
        wrong = [f"{name} is {value}" for name, value in values.items() if "loss" in name and not math.isfinite(value)]
        kl, most = values.get("kl", 0.0), self._bounds.kl
        above = f"the KL is {kl:.4g} nats per token, above {most:g}" if most and not kl <= most else ""
        self._set(Key("loss_not_finite", model.owner, model.model_id), ", ".join(wrong))
        self._set(Key("kl_high", model.owner, model.model_id), above)

    def durable_lags(self) -> dict[str, float]:
        """Returns for each model with a change that is in no durable point the seconds since the oldest one."""
        now, lags = time.monotonic(), {}
        for model_id, changes in list(self._changes.items()):
            durable = self._durable_seq_id(model_id)
            while changes and (durable is None or changes[0][0] <= durable):
                changes.popleft()
            if changes:
                lags[model_id] = now - changes[0][1]
            else:
                del self._changes[model_id]
        return lags

    def shown(self, owner: str | None) -> dict[str, Any]:
        """Returns the open and the last ended alerts of one owner, newest first; None means all owners."""
        ended = self._ended.values() if owner is None else [self._ended.get(owner, deque())]
        found = sorted((alert for each in ended for alert in each), key=lambda alert: -(alert.ended_at or 0))
        open_ones = [alert for alert in self._open.values() if owner in (None, alert.key.owner)]
        section: dict[str, Any] = {
            "open": [alert.shown() for alert in reversed(open_ones)],
            "ended": [alert.shown() for alert in found[:_MOST_ENDED]],
        }
        return section | ({"webhook": self.webhook.shown()} if owner is None else {})

    async def tick(self) -> None:
        """Checks models, services and disks, and starts and ends alerts."""
        causes = {key: cause for key, cause in self._of_models.items() if self._is_trained(key.subject)}
        self._of_models = dict(causes)
        bound = self._bounds.durable_lag_s
        for model_id, lag in self.durable_lags().items():
            if bound and lag > bound and (model := self._models.find(model_id)):
                message = (
                    f"changes of the last {lag:.0f} s are in no durable point: a crash of the trainer repeats them"
                )
                causes[Key("durable_lag", model.owner, model_id)] = Cause(message)
        for base in self._base_models:
            causes |= self._of_services(base)
        causes |= await asyncio.to_thread(self._of_disks)
        self._update(causes)

    def _set(self, key: Key, message: str) -> None:
        if message:
            self._of_models[key] = Cause(message)
        else:
            self._of_models.pop(key, None)

    def _is_trained(self, model_id: str) -> bool:
        model = self._models.find(model_id)
        return model is not None and model.state is ModelState.READY and bool(model.trainer_instance)

    def _durable_seq_id(self, model_id: str) -> int | None:
        """Returns the last durable command of a model; None if the trainer does not write points of it."""
        model = self._models.find(model_id)
        if model is None or not self._is_trained(model_id):
            return None
        trainer = self._base_models.get(model.base_model).trainers.holder(model.trainer_instance)
        info = trainer.info if trainer is not None else None
        return info.durable_seq_ids.get(model_id, 0) if info is not None and info.keeps_recovery else None

    def _of_services(self, base: BaseModel) -> dict[Key, Cause]:
        bounds, found = self._bounds, dict[Key, Cause]()
        services: dict[str, Sequence[Peer] | None] = {
            "trainer": base.trainers.links or None,
            "sampler": base.samplers.members if base.is_sampled else None,
            "renderer": base.renderers.members,
        }
        for service, peers in services.items():
            if peers is None or not bounds.gone_s:
                continue
            kind = f"{service}_gone"
            for peer in peers:
                if not peer.up:
                    patience_s = bounds.gone_s if peer.has_been_up else bounds.start_s
                    words = (
                        "does not answer" if peer.has_been_up
                        else "answers but is not ready" if peer.answers
                        else "has not answered since the gateway started"
                    )  # fmt: skip
                    why = f": {peer.reason}" if peer.reason else ""
                    message = f"the {service} of {base.name} at {peer.address} {words}{why}"
                    found[Key(kind, _SYSTEM, peer.address)] = Cause(message, patience_s)
            if not peers:
                found[Key(kind, _SYSTEM, base.name)] = Cause(f"{base.name} has no {service}", bounds.start_s)
        for sampler in base.samplers.up if bounds.slot_wait_s else ():
            if sampler.info is not None and sampler.info.waiting_for_slot:
                count = sampler.info.waiting_for_slot
                message = f"{count} requests wait for an adapter's slot in the sampler at {sampler.address}"
                found[Key("slot_wait", _SYSTEM, sampler.address)] = Cause(message, bounds.slot_wait_s)
        return found

    def _of_disks(self) -> dict[Key, Cause]:
        """Returns the folders on volumes that are nearly full. Blocks."""
        found, share = dict[Key, Cause](), self._bounds.disk_share
        for folder in self._folders if share else ():
            usage = shutil.disk_usage(folder)
            used = 1 - usage.free / usage.total
            if used > share:
                free = f"{usage.free / 1e9:.1f} GB are free" if usage.free >= 1e8 else f"{usage.free} bytes are free"
                key = Key("disk_full", _SYSTEM, str(folder))
                found[key] = Cause(f"the volume of {folder} is {100 * used:.0f} % full: {free}")
        return found

    def _update(self, causes: Mapping[Key, Cause]) -> None:
        now = time.monotonic()
        self._since = {key: self._since.get(key, now) for key in causes}
        for key, cause in causes.items():
            if alert := self._open.get(key):
                alert.seen_at = now
            elif now - self._since[key] >= cause.patience_s and self._has_room(key.owner):
                self._open[key] = Alert(key, cause.message, time.time(), now)
                logger.warning("alert %s begins: %s", key.kind, cause.message)
                self.webhook.put(_told(self._open[key]))
        for key, alert in list(self._open.items()):
            if key not in causes and now - alert.seen_at >= CALM_S:
                del self._open[key]
                alert.ended_at = time.time()
                logger.info("alert %s of %s has ended", key.kind, key.subject)
                self._keep(alert)
                self.webhook.put(_told(alert))

    def _has_room(self, owner: str) -> bool:
        return owner == _SYSTEM or sum(key.owner == owner for key in self._open) < _MOST_OPEN

    def _keep(self, alert: Alert) -> None:
        owner = alert.key.owner
        self._ended.setdefault(owner, deque(maxlen=_MOST_ENDED)).append(alert)
        self._ended.move_to_end(owner)
        if len(self._ended) > _OWNERS:
            self._ended.popitem(last=False)


def _told(alert: Alert) -> dict[str, Any]:
    """Returns the webhook's body. It contains no key and no setting but folders and addresses of services."""
    key, ended_at = alert.key, alert.ended_at
    event, subject = ("end" if ended_at else "begin"), f" ({key.subject})" if key.owner else ""
    return {
        "text": f"Fovea: {'ended: ' if ended_at else ''}{key.kind.replace('_', ' ')}{subject}: {alert.message}",
        "id": hashlib.sha256("\0".join(key).encode()).hexdigest()[:24],
        "event": event,
        **key._asdict(),
        "message": alert.message,
        "begun_at": iso_time(alert.begun_at),
        "ended_at": ended_at and iso_time(ended_at),
    }


class Webhook:
    """A sender of events to a URL as JSON, one after the other.

    The path and the query of such URLs are often secrets, so only the host is logged and shown.

    Args:
        url: The URL; if empty, nothing is sent.
    """

    ATTEMPT_S = 10.0
    RETRY_S = 600.0
    _MOST_WAITING = 1000

    def __init__(self, url: str) -> None:
        self._url, self.host = url, urlsplit(url).hostname or ""
        self._waiting: deque[dict[str, Any]] = deque(maxlen=self._MOST_WAITING)
        self._there = asyncio.Event()
        self._failure, self._failed_at, self._sent, self._dropped = "", 0.0, 0, 0

    def put(self, event: dict[str, Any]) -> None:
        """Queues an event. If a thousand wait, the oldest is dropped."""
        if not self._url:
            return
        if len(self._waiting) == self._MOST_WAITING:
            self._drop("too many events wait")
        self._waiting.append(event)
        self._there.set()

    def shown(self) -> dict[str, Any] | None:
        """Returns the state for administrators; None without a URL."""
        if not self._url:
            return None
        failing = {"failure": self._failure, "failed_at": self._failed_at} if self._failure else {}
        return {"host": self.host, "sent": self._sent, "dropped": self._dropped, **failing}

    async def run(self) -> None:
        """Sends the queued events until cancelled."""
        while True:
            await self._there.wait()
            while self._waiting:
                await self._send(self._waiting.popleft())
            self._there.clear()

    async def _send(self, event: Mapping[str, Any]) -> None:
        """Sends an event, and retries temporary failures. Drops it after `RETRY_S` or if it is refused."""
        body, backoff = json.dumps(event).encode(), Backoff(self.RETRY_S, first_s=1.0, longest_s=60.0)
        while True:
            failure, may_pass = await self._attempt(body)
            if not failure:
                self._failure, self._sent = "", self._sent + 1
                return
            if not self._failure:
                logger.warning("the webhook at %s fails: %s", self.host, failure)
            self._failure, self._failed_at = failure, time.time()
            if not may_pass or backoff.is_over:
                return self._drop(failure)
            await backoff.pause()

    async def _attempt(self, body: bytes) -> tuple[str, bool]:
        """Posts a body. Returns the reason if that fails, and whether a later attempt may succeed."""
        import httpx  # Imported here because it takes a tenth of a second and most gateways have no webhook.

        try:
            async with asyncio.timeout(self.ATTEMPT_S), httpx.AsyncClient(timeout=self.ATTEMPT_S) as client:
                headers = {"Content-Type": "application/json"}
                # The status suffices; a body could be of any size.
                async with client.stream("POST", self._url, content=body, headers=headers) as answer:
                    status = answer.status_code
        except TimeoutError:
            return f"it has not answered within {self.ATTEMPT_S:g} s", True
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}".replace(self._url, self.host), True
        if status < 300:
            return "", False
        return f"it answered {status}", status in (408, 429) or status >= 500

    def _drop(self, reason: str) -> None:
        self._dropped += 1
        logger.error("an alert could not be sent to the webhook at %s and is dropped: %s", self.host, reason)
