"""Commands that keep weights: save_state, save_weights_for_sampler, save_weights_external."""

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fovea.api.v1 import gateway_pb2, weights_pb2
from fovea.wire.conventions import PLAIN_SUFFIX
from fovea.wire.errors import FoveaError, InvalidInput
from gateway.checkpoints.checkpoint import EXTERNAL, SAMPLER, TRAINING, Checkpoint
from gateway.checkpoints.checkpoint_registry import Checkpoints, check_ttl, put_row
from gateway.checkpoints.exports import complete_export, parse_recipients
from gateway.database.writer import Job
from gateway.futures.future import Done, Pending
from gateway.replicas import snapshot_pushes
from gateway.replicas.snapshot_pushes import KeptSnapshot, id_of_export, id_of_snapshot
from gateway.replicas.trainer_link import TrainerLink
from gateway.sampling.sampling_sessions import Sampling
from gateway.training.models import Model

logger = logging.getLogger(__name__)


class SaveCommands:
    """Runs save_state, save_weights_for_sampler and save_weights_external.

    Args:
        timeout_s: Deadline of one call to the trainer.
    """

    def __init__(self, checkpoints: Checkpoints, sampling: Sampling, trainer: TrainerLink, timeout_s: float) -> None:
        self._checkpoints, self._sampling, self._trainer, self._timeout_s = checkpoints, sampling, trainer, timeout_s

    async def save_state(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Writes a resumable checkpoint, then registers it; only then is one of the same name given up."""
        request = gateway_pb2.SubmitSaveStateRequest.FromString(blob)
        name = request.name or f"state-{pending.submission.seq_id:06d}"
        expires_at = check_ttl(request.ttl_s)
        checkpoint, old = await self._plan(model, TRAINING, name, request.overwrite)
        async with self._checkpoints.writing(checkpoint.uri):
            answer = await self._trainer.client.save_state(model.model_id, checkpoint.uri, self._timeout_s)
        checkpoint.step, checkpoint.size_bytes = answer.step, answer.size_bytes
        _describe(checkpoint, dict(request.user_metadata), expires_at)
        return self._saved(checkpoint, old)

    async def save_for_sampler(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Freezes the weights. Named: in storage too, under a path. Unnamed: in memory, with a sampling session."""
        request = gateway_pb2.SubmitSaveForSamplerRequest.FromString(blob)
        # The number was counted up, durably, before the command began: one that breaks off leaves a hole.
        own_id = id_of_snapshot(model.model_id, model.next_snapshot - 1)
        expires_at = check_ttl(request.ttl_s)
        if request.inflight and request.name:
            raise InvalidInput("kind 'inflight' keeps weights without a name; use 'snapshot' with a path", field="kind")
        checkpoint = None
        afterwards: list[Callable[[], Awaitable[None]]] = []
        if request.name:
            checkpoint, _ = await self._plan(model, SAMPLER, request.name)
        uri = checkpoint.uri if checkpoint else ""
        async with self._checkpoints.writing(*filter(None, [uri])):
            frozen = await self._trainer.client.take_snapshot(model.model_id, own_id, uri, self._timeout_s)
        kept = KeptSnapshot(frozen, uri, model.trainer_instance)
        saved = gateway_pb2.SnapshotSaved(snapshot=frozen)
        effects: list[Job[Any]] = [partial(snapshot_pushes.put_row, kept=kept)]
        if checkpoint:
            checkpoint.snapshot_id, checkpoint.step, checkpoint.size_bytes = own_id, frozen.step, frozen.size_bytes
            _describe(checkpoint, dict(request.user_metadata), expires_at)
            effects.append(partial(put_row, checkpoint=checkpoint))
            saved.path = checkpoint.path
        else:
            sampling, effect = self._sampling.open_on_snapshot(
                model.session_id, model.model_id, own_id, request.inflight
            )
            effects.append(effect)
            saved.sampling_session_id = sampling.sampling_session_id
            if frozen.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER:
                # The client will sample next: push while it asks, and before the commands that it queues behind.
                self._sampling.push_soon(kept)
            if request.inflight:
                afterwards.append(lambda: self._sampling.move_followers(model.model_id, own_id))
        return Done([gateway_pb2.WaitFutureResponse(snapshot_saved=saved)], effects, afterwards)

    async def save_external(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Writes a PEFT adapter, or a Hugging Face checkpoint for full parameters; encrypts and registers it."""
        request = gateway_pb2.SubmitSaveExternalRequest.FromString(blob)
        expires_at = check_ttl(request.ttl_s)
        recipients = parse_recipients(request.age_recipients)
        checkpoint, old = await self._plan(model, EXTERNAL, request.name)
        written = f"{checkpoint.uri}{PLAIN_SUFFIX}" if recipients else checkpoint.uri
        storage = self._checkpoints.storage
        async with self._checkpoints.writing(written, checkpoint.uri):
            checkpoint.step = await self._write_export(model, pending.submission.seq_id, written)
            checkpoint.size_bytes = await complete_export(storage, written, checkpoint.uri, recipients)
        checkpoint.created_at, checkpoint.expires_at = time.time(), expires_at
        return self._saved(checkpoint, old)

    async def _write_export(self, model: Model, seq_id: int, uri: str) -> int:
        """Has the trainer write the weights as they are now; returns the steps that they have taken."""
        client = self._trainer.client
        own_id = id_of_export(model.model_id, seq_id)
        snapshot = await client.take_snapshot(model.model_id, own_id, uri, self._timeout_s)
        try:
            await client.forget_snapshot(own_id)
        except FoveaError as error:
            # It is written; the trainer drops old snapshots by itself when its memory is full.
            logger.warning("the export snapshot %s could not be freed: %s", own_id, error)
        return snapshot.step

    def _saved(self, checkpoint: Checkpoint, old: Checkpoint | None) -> Done:
        """Registers a checkpoint that is written; one of the same name is given up afterwards."""
        saved = gateway_pb2.CheckpointSaved(path=checkpoint.path)
        afterwards: list[Callable[[], Awaitable[None]]] = []
        if old:
            afterwards.append(partial(self._checkpoints.remove_folder, old.uri))
        return Done(
            [gateway_pb2.WaitFutureResponse(checkpoint_saved=saved)],
            [partial(put_row, checkpoint=checkpoint)],
            afterwards,
        )

    async def _plan(
        self, model: Model, segment: str, name: str, overwrite: bool = False
    ) -> tuple[Checkpoint, Checkpoint | None]:
        return await self._checkpoints.plan(
            model.model_id, model.owner, model.base_model, model.lora, segment, name, overwrite
        )


def _describe(checkpoint: Checkpoint, user_metadata: dict[str, str], expires_at: float | None) -> None:
    checkpoint.user_metadata, checkpoint.expires_at = user_metadata, expires_at
    checkpoint.created_at = time.time()
