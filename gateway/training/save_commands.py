"""Commands that keep weights: save_state, save_weights_for_sampler."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fovea.api.v1 import gateway_pb2, weights_pb2
from fovea.wire.errors import InvalidInput
from gateway import identity
from gateway.checkpoints import checkpoint_rows as rows
from gateway.checkpoints.checkpoint_registry import check_ttl
from gateway.checkpoints.checkpoint_rows import Checkpoint, KeptSnapshot
from gateway.database.writer import Job
from gateway.futures.future import Pending
from gateway.identity import SAMPLER, TRAINING
from gateway.training.command_context import Context, Done
from gateway.training.model_rows import Model


async def save_state(context: Context, model: Model, pending: Pending, blob: bytes) -> Done:
    """Writes a resumable checkpoint, then registers it; only then is one of the same name given up."""
    request = gateway_pb2.SubmitSaveStateRequest.FromString(blob)
    name = request.name or f"state-{pending.seq_id:06d}"
    expires_at = check_ttl(request.ttl_s)
    checkpoint, old = await context.checkpoints.plan(model, TRAINING, name, request.overwrite)
    async with context.checkpoints.writing(checkpoint.uri):
        answer = await context.trainer.client.save_state(model.model_id, checkpoint.uri, context.timeout_s)
    checkpoint.step, checkpoint.size_bytes = answer.step, answer.size_bytes
    _describe(checkpoint, dict(request.user_metadata), expires_at)
    saved = gateway_pb2.CheckpointSaved(path=checkpoint.path)
    cleaning = [lambda: context.checkpoints.remove_folder(old.uri)] if old else []
    return Done([gateway_pb2.WaitFutureResponse(checkpoint_saved=saved)], [_putting(checkpoint)], [*cleaning])


async def save_for_sampler(context: Context, model: Model, pending: Pending, blob: bytes) -> Done:
    """Freezes the weights. Named: in storage too, under a path. Unnamed: in memory, with a sampling session on it."""
    request = gateway_pb2.SubmitSaveForSamplerRequest.FromString(blob)
    # The number was counted up, durably, before the command began: an interrupted one leaves a hole, never a twin.
    snapshot_id = identity.snapshot_id(model.model_id, model.next_snapshot - 1)
    expires_at = check_ttl(request.ttl_s)
    if request.inflight and request.name:
        raise InvalidInput("kind 'inflight' keeps weights without a name; use 'snapshot' with a path", field="kind")
    checkpoint = None
    afterwards: list[Callable[[], Awaitable[None]]] = []
    if request.name:
        checkpoint, _ = await context.checkpoints.plan(model, SAMPLER, request.name, overwrite=False)
    uri = checkpoint.uri if checkpoint else ""
    async with context.checkpoints.writing(*filter(None, [uri])):
        frozen = await context.trainer.client.take_snapshot(model.model_id, snapshot_id, uri, context.timeout_s)
    kept = KeptSnapshot(frozen, uri, model.trainer_instance)
    saved = gateway_pb2.SnapshotSaved(snapshot=frozen)
    effects: list[Job[Any]] = [_putting_snapshot(kept)]
    if checkpoint:
        checkpoint.snapshot_id, checkpoint.step, checkpoint.size_bytes = snapshot_id, frozen.step, frozen.size_bytes
        _describe(checkpoint, dict(request.user_metadata), expires_at)
        effects.append(_putting(checkpoint))
        saved.path = checkpoint.path
    else:
        sampling, effect = context.sampling.open_on_snapshot(model, snapshot_id, request.inflight)
        effects.append(effect)
        saved.sampling_session_id = sampling.sampling_session_id
        if frozen.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER:
            # The client will sample next: push while it asks, and before the training commands that it queues behind.
            context.sampling.push_soon(kept)
        if request.inflight:
            afterwards.append(lambda: context.sampling.move_followers(model.model_id, snapshot_id))
    return Done([gateway_pb2.WaitFutureResponse(snapshot_saved=saved)], effects, afterwards)


def _describe(checkpoint: Checkpoint, user_metadata: dict[str, str], expires_at: float | None) -> None:
    checkpoint.user_metadata, checkpoint.expires_at = user_metadata, expires_at
    checkpoint.created_at = time.time()


def _putting(checkpoint: Checkpoint) -> Job[None]:
    def job(connection: Any) -> None:
        rows.put(connection, checkpoint)

    return job


def _putting_snapshot(kept: KeptSnapshot) -> Job[None]:
    def job(connection: Any) -> None:
        rows.put_snapshot(connection, kept)

    return job
