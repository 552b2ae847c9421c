"""The command that exports weights: save_weights_external."""

import logging
import time
from typing import Any

from fovea.api.v1 import gateway_pb2
from fovea.wire.errors import FoveaError
from fovea.wire.names import PLAIN_SUFFIX
from gateway import identity
from gateway.checkpoints import checkpoint_rows as rows
from gateway.checkpoints import encryption, exports
from gateway.checkpoints.checkpoint_registry import check_ttl
from gateway.futures.future import Pending
from gateway.identity import EXTERNAL
from gateway.training.command_context import Context, Done
from gateway.training.model_rows import Model

logger = logging.getLogger(__name__)


async def save_external(context: Context, model: Model, pending: Pending, blob: bytes) -> Done:
    """Writes a PEFT adapter, or a Hugging Face checkpoint for full parameters; encrypts it if asked; registers it."""
    request = gateway_pb2.SubmitSaveExternalRequest.FromString(blob)
    expires_at = check_ttl(request.ttl_s)
    recipients = encryption.parse_recipients(request.age_recipients)
    checkpoint, old = await context.checkpoints.plan(model, EXTERNAL, request.name, overwrite=False)
    written = f"{checkpoint.uri}{PLAIN_SUFFIX}" if recipients else checkpoint.uri
    storage = context.checkpoints.storage
    async with context.checkpoints.writing(written, checkpoint.uri):
        checkpoint.step = await _write(context, model, pending.seq_id, written)
        checkpoint.size_bytes = await exports.complete(storage, written, checkpoint.uri, recipients)
    checkpoint.created_at, checkpoint.expires_at = time.time(), expires_at

    def put(connection: Any) -> None:
        rows.put(connection, checkpoint)

    saved = gateway_pb2.CheckpointSaved(path=checkpoint.path)
    cleaning = [lambda: context.checkpoints.remove_folder(old.uri)] if old else []
    return Done([gateway_pb2.WaitFutureResponse(checkpoint_saved=saved)], [put], [*cleaning])


async def _write(context: Context, model: Model, seq_id: int, uri: str) -> int:
    """Has the trainer write the weights as they are now; returns the steps that they have taken."""
    client = context.trainer.client
    snapshot_id = identity.export_snapshot_id(model.model_id, seq_id)
    snapshot = await client.take_snapshot(model.model_id, snapshot_id, uri, context.timeout_s)
    try:
        await client.forget_snapshot(snapshot_id)
    except FoveaError as error:
        # It is written; the trainer drops old snapshots by itself when its memory is full.
        logger.warning("the export snapshot %s could not be freed: %s", snapshot_id, error)
    return snapshot.step
