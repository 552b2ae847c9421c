"""Parks the sessions of clients that have fallen silent, where the trainer can keep their models; else they end."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from fovea.runtime.cautious_clock import CautiousClock
from fovea.wire.errors import FoveaError
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.futures.futures import Futures
from fovea_gateway.replicas.base_models import BaseModels
from fovea_gateway.sessions.sessions import Session, Sessions
from fovea_gateway.training.models import Models, ModelState
from fovea_gateway.training.residence import Residence
from fovea_gateway.training.training import Training

logger = logging.getLogger(__name__)

_LATE_S = 15.0
_QUIET_S = 30.0
"""Without a heartbeat, of which the SDK sends one in ten seconds: a client may be gone; its models make room."""
_LOOK_S = 0.5


class Parking:
    """Frees the trainer of what nobody uses, for as long as there is room on its storage.

    Args:
        ttl_s: Seconds after which a parked session ends.
        most_bytes: Of all that is parked. Above, the oldest end of the owner that has most by its weight.
        weight_of: An owner's weight, above 0.
    """

    def __init__(
        self,
        futures: Futures,
        sessions: Sessions,
        models: Models,
        training: Training,
        residences: Mapping[str, Residence],
        base_models: BaseModels,
        ttl_s: float,
        most_bytes: int,
        weight_of: Callable[[str], float],
        clock: CautiousClock,
    ) -> None:
        self._futures, self._sessions, self._models, self._training = futures, sessions, models, training
        self._residences, self._base_models = residences, base_models
        self._ttl_s, self._most_bytes, self._weight_of, self._clock = ttl_s, most_bytes, weight_of, clock
        self._making_room: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._made_room: Counter[str] = Counter()

    async def sweep(self) -> None:
        """Parks or ends what is silent, then ends what was parked too long or takes too much."""
        infos = [trainer.info for trainer in self._base_models.trainers]
        for session in self._sessions.silent():
            if None in infos:
                continue  # whether they can keep them is not known yet
            if infos and not any(info.keeps_recovery for info in infos if info is not None):
                await self._sessions.expire(session)
            elif not self._is_busy(session):
                await self._park(session)
        await self._bound()

    async def make_room(self, base_model: str) -> bool:
        """Parks models of clients that seem to be gone, before their time, since a new model wants their room.

        Waits for clients whose last heartbeat is late. Of creations that come at once, one makes room for all. Returns
        whether the trainer has become emptier since the call.
        """
        before = self._made_room[base_model]
        async with self._making_room[base_model]:
            if self._made_room[base_model] == before:
                self._made_room[base_model] += await self._park_quiet(base_model)
            return self._made_room[base_model] > before

    async def _park_quiet(self, base_model: str) -> int:
        """Parks the sessions of clients that seem to be gone, once there are any; returns how many."""
        while True:
            holders = [session for session in self._holders(base_model) if self._sessions.is_silent(session, _LATE_S)]
            quiet = [session for session in holders if self._sessions.is_silent(session, _QUIET_S)]
            for session in quiet:
                await self._park(session, _QUIET_S)
            if quiet or not holders:
                return sum(1 for session in quiet if session.parked_at is not None)
            await asyncio.sleep(_LOOK_S)

    def _holders(self, base_model: str) -> list[Session]:
        """Sessions with models in the trainer, all of which it can keep, that wait for nothing."""
        held = [model for model in self._models.ready(base_model) if model.trainer_instance]
        fixed = {model.session_id for model in held if model.journaled_since is None}
        found = {model.session_id: self._sessions.cached(model.session_id) for model in held}
        return [session for session in found.values() if session.session_id not in fixed and not self._is_busy(session)]

    async def _park(self, session: Session, after_s: float | None = None) -> None:
        size_bytes = 0
        for model_id in await self._models.of_session(session.session_id):
            model = self._models.find(model_id)
            if model is None or model.state is not ModelState.READY or not model.trainer_instance:
                continue
            if model.base_model not in self._residences:  # not trained here any more: nobody can park it
                continue
            if model.journaled_since is None:  # of a trainer that kept no recovery: nothing can be parked
                await self._sessions.expire(session)
                return
            try:
                size_bytes += await self._residences[model.base_model].park(model)
            except FoveaError as error:
                logger.warning("session %s is not parked yet: %s", session.session_id, error)
                return
        if self._sessions.is_silent(session, after_s) and not self._is_busy(session):
            self._training.forget_idle(session.session_id)
            await self._sessions.park(session, size_bytes)

    def _is_busy(self, session: Session) -> bool:
        return any(pending.submission.session_id == session.session_id for pending in self._futures.unfinished())

    async def _bound(self) -> None:
        parked, now = await self._sessions.parked(), self._clock.now()
        held: Counter[str] = Counter()
        for session in parked:
            held[session.owner] += session.parked_bytes
        metrics.PARKED.set(len(parked))
        metrics.PARKED_BYTES.set(held.total())
        for session in [each for each in parked if now - (each.parked_at or now) > self._ttl_s]:
            await self._sessions.expire(session, f"parked for more than parked_ttl_s, {self._ttl_s:.0f} s")
            held[session.owner] -= session.parked_bytes
            parked.remove(session)
        while held.total() > self._most_bytes:
            owner = max(held, key=lambda name: held[name] / self._weight_of(name))
            oldest = next(session for session in parked if session.owner == owner and session.parked_bytes)
            await self._sessions.expire(
                oldest,
                f"all parked sessions took {held.total()} bytes of parked_bytes, {self._most_bytes}, and this owner's "
                "most of it: its oldest ended",
            )
            held[owner] -= oldest.parked_bytes
            parked.remove(oldest)
