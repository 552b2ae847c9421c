"""Commands that create, load and save weights.

These are create_model, load_state, save_state, save_weights_for_sampler and save_weights_external.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fovea.api.v1 import gateway_pb2, weights_pb2
from fovea.runtime.tasks import Backoff
from fovea.wire.conventions import PLAIN_SUFFIX
from fovea.wire.errors import FailedPrecondition, FoveaError, InvalidInput, NotFound, ResourceExhausted, Unavailable
from fovea_gateway.checkpoints.checkpoint import EXTERNAL, SAMPLER, TRAINING, Checkpoint
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, check_ttl, put_row
from fovea_gateway.checkpoints.exports import complete_export, parse_recipients
from fovea_gateway.database.database import Job
from fovea_gateway.replicas import snapshot_pushes
from fovea_gateway.replicas.replicas import TrainerInfo, TrainerLink
from fovea_gateway.replicas.samplers import Samplers
from fovea_gateway.replicas.snapshot_pushes import SnapshotRecord, id_of_export, id_of_snapshot
from fovea_gateway.sampling.sampling_sessions import Sampling
from fovea_gateway.sessions.future import Done, Pending, QueueState
from fovea_gateway.sessions.sessions import Sessions
from fovea_gateway.training.models import Model, Models, ModelState
from fovea_gateway.training.residency import HandedOver
from fovea_gateway.training.trainer_pool import TrainerPool
from fovea_gateway.training.trainer_queue import TrainerQueue

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 0.5
_SAVING = "saving, or waiting for the trainer"


class CreationCommands:
    """The commands create_model and load_state.

    Args:
        timeout_s: Deadline, in seconds, of a call to the trainer that changes no model.
        patience_s: Seconds that a creation waits for a trainer that restarts. Waiting loses nothing.
        make_room: Parks models of clients that are gone. Returns whether models have left the trainer since the call.
    """

    def __init__(
        self,
        models: Models,
        checkpoints: Checkpoints,
        sessions: Sessions,
        trainer: TrainerLink,
        trainer_queue: TrainerQueue,
        samplers: Samplers,
        timeout_s: float,
        patience_s: float,
        make_room: Callable[[], Awaitable[bool]],
        pool: TrainerPool,
    ) -> None:
        self._models, self._checkpoints, self._sessions, self._trainer = models, checkpoints, sessions, trainer
        self._trainer_queue, self._samplers, self._pool = trainer_queue, samplers, pool
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._make_room = make_room

    async def create_model(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Creates a fresh model, or one from a checkpoint. The model's state records success or failure."""
        request = gateway_pb2.SubmitCreateModelRequest.FromString(blob)
        try:
            step, uri = await self._create_patiently(model, pending, request)
        except FoveaError as error:
            model.state, model.state_reason = ModelState.FAILED, error.message
            raise
        model.state = ModelState.READY
        result = [gateway_pb2.WaitFutureResponse(model_created=gateway_pb2.ModelCreated(model_id=model.model_id))]
        if request.from_path:
            loaded = gateway_pb2.StateLoaded(step=step, path=request.from_path)
            result.append(gateway_pb2.WaitFutureResponse(state_loaded=loaded))
        return Done([*result], subject=uri)

    async def _create_patiently(
        self, model: Model, pending: Pending, request: gateway_pb2.SubmitCreateModelRequest
    ) -> tuple[int, str]:
        """Creates a model. Waits for a trainer that restarts, because a creation can be repeated without loss.

        Returns the number of optimizer steps in the model, and the folder from which it was loaded or "". Raises
        HandedOver if another trainer shall create it.
        """
        # A client that closes one session and opens the next expects that the first one's models have freed their room.
        await self._sessions.wait_freed(but=model.session_id)
        backoff = Backoff(self._patience_s, longest_s=_LONGEST_PAUSE_S)
        while True:
            pending.progress.wait_on("waiting for the trainer", QueueState.PAUSED)
            info = await self._present(model, backoff)
            self._models.check_share(model, self._pool.instances)
            model.trainer_instance, model.model_files = info.instance_id, dict(info.model_files)
            try:
                return await self._create(model, pending, request, info.max_lora_rank)
            except (Unavailable, NotFound) as error:
                is_same = await self._trainer.look_again() == info.instance_id
                # NotFound from a new instance is not final: that instance does not have the model that an earlier one
                # created.
                if backoff.is_over or (isinstance(error, NotFound) and is_same):
                    raise
                await backoff.pause()
            except (FailedPrecondition, ResourceExhausted) as error:
                if self._pool.is_plural and self._pool.try_elsewhere(model, self._pool.side_of(model)):
                    model.trainer_instance = ""
                    raise HandedOver from None
                pending.progress.wait_on(f"{error.message} Waiting for clients that seem to be gone", QueueState.PAUSED)
                if not await self._make_room():
                    raise
                if self._pool.is_plural:  # The room may be in another trainer.
                    model.trainer_instance = ""
                    self._pool.forget([model.model_id])
                    raise HandedOver from None

    async def _present(self, model: Model, backoff: Backoff) -> TrainerInfo:
        """Returns the info of the trainer once it answers. Raises HandedOver, or Unavailable when patience is over."""
        while True:
            if self._pool.leaves(model, self._trainer):
                model.trainer_instance = ""
                raise HandedOver
            try:
                return await self._trainer.require(min(backoff.left_s, 1.0) if self._pool.is_plural else backoff.left_s)
            except Unavailable:
                if backoff.is_over or not self._pool.is_plural:
                    raise

    async def _create(
        self, model: Model, pending: Pending, request: gateway_pb2.SubmitCreateModelRequest, max_lora_rank: int
    ) -> tuple[int, str]:
        if not request.from_path:
            check_lora(model.lora, max_lora_rank)
            await self._create_servable(model, pending)
            return 0, ""
        checkpoint = await self._checkpoints.find_training(model.owner, request.from_path, request.optimizer)
        if checkpoint.base_model != model.base_model:
            raise InvalidInput(
                f"{request.from_path} was trained on {checkpoint.base_model!r}, not on {model.base_model!r}",
                field="path",
            )
        model.lora = checkpoint.lora
        await self._create_servable(model, pending)
        try:
            async with self._trainer_queue.admit(pending, "loading, or waiting for the trainer"):
                step = await self._trainer.client.load_state(
                    model.model_id, checkpoint.uri, request.optimizer, self._timeout_s
                )
            return step, checkpoint.uri
        except FoveaError:
            await self._trainer.client.delete_model(model.model_id, self._timeout_s)
            raise

    async def _create_servable(self, model: Model, pending: Pending) -> None:
        """Makes the trainer create a model. Raises InvalidInput if the samplers do not support its adapter.

        All samplers are alike, so one that is up is asked. If none is up, the first push will report the problem.
        """
        client = self._trainer.client
        async with self._trainer_queue.admit(pending, "creating, or waiting for the trainer"):
            adapter = await client.create_model(model.model_id, _kind(model.lora), self._timeout_s)
        if adapter is None or not self._samplers.up:
            return
        try:
            await self._samplers.up[0].client.check_snapshot(adapter, self._timeout_s)
        except InvalidInput as error:
            await client.delete_model(model.model_id, self._timeout_s)
            raise InvalidInput(
                f"the samplers do not support this adapter: {error.message}; switch off train_attn, train_mlp or "
                "train_unembed accordingly",
                field="lora_config",
            ) from None
        except FoveaError as error:
            logger.warning("no sampler reported whether it supports model %s: %s", model.model_id, error)

    async def load_state(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Loads a checkpoint of the same shape into a model."""
        request = gateway_pb2.SubmitLoadStateRequest.FromString(blob)
        checkpoint = await self._checkpoints.find_training(model.owner, request.path, request.optimizer)
        if _shape(checkpoint.lora) != _shape(model.lora):
            raise InvalidInput(
                f"{request.path} has LoRA rank {checkpoint.lora.rank} and other settings than the model of rank "
                f"{model.lora.rank}; use create_training_client_from_state, which uses the checkpoint's settings",
                field="path",
            )
        async with self._trainer_queue.admit(pending, "loading, or waiting for the trainer"):
            client = self._models.client_of(model, self._trainer)
            step = await client.load_state(
                model.model_id, checkpoint.uri, request.optimizer, timeout_s=None, seq_id=pending.submission.seq_id
            )
        loaded = gateway_pb2.StateLoaded(step=step, path=request.path)
        return Done([gateway_pb2.WaitFutureResponse(state_loaded=loaded)], subject=checkpoint.uri)


class SaveCommands:
    """The commands save_state, save_weights_for_sampler and save_weights_external.

    Args:
        timeout_s: Deadline, in seconds, of one call to the trainer.
    """

    def __init__(
        self,
        models: Models,
        checkpoints: Checkpoints,
        sampling: Sampling,
        trainer: TrainerLink,
        trainer_queue: TrainerQueue,
        timeout_s: float,
    ) -> None:
        self._models, self._checkpoints, self._sampling, self._trainer = models, checkpoints, sampling, trainer
        self._trainer_queue, self._timeout_s = trainer_queue, timeout_s

    async def save_state(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Writes a resumable checkpoint, registers it, and only then removes an older one of the same name."""
        request = gateway_pb2.SubmitSaveStateRequest.FromString(blob)
        name = request.name or f"state-{pending.submission.seq_id:06d}"
        expires_at = check_ttl(request.ttl_s)
        checkpoint, old = await self._plan(model, TRAINING, name, dict(request.user_metadata), request.overwrite)
        async with self._checkpoints.writing(checkpoint.uri), self._trainer_queue.beside(pending, _SAVING):
            client = self._models.client_of(model, self._trainer)
            answer = await client.save_state(model.model_id, checkpoint.uri, self._timeout_s)
        checkpoint.step, checkpoint.size_bytes = answer.step, answer.size_bytes
        _describe(checkpoint, expires_at)
        return self._saved(checkpoint, old)

    async def save_for_sampler(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Freezes the weights. Named weights are also written to storage; unnamed ones remain in memory for a sampling
        session.
        """
        request = gateway_pb2.SubmitSaveForSamplerRequest.FromString(blob)
        # The number was incremented durably before the command began, so an interrupted command leaves a gap in the
        # numbers.
        own_id = id_of_snapshot(model.model_id, model.next_snapshot - 1)
        expires_at = check_ttl(request.ttl_s)
        if request.inflight and request.name:
            raise InvalidInput(
                "kind 'inflight' stores weights without a name; use 'snapshot' with a path", field="kind"
            )
        if not request.name:
            self._sampling.check_sampled(model.base_model)
        checkpoint = None
        afterwards: list[Callable[[], Awaitable[None]]] = []
        if request.name:
            checkpoint, _ = await self._plan(model, SAMPLER, request.name, dict(request.user_metadata))
        uri = checkpoint.uri if checkpoint else ""
        enter = self._trainer_queue.beside if uri else self._trainer_queue.admit
        async with self._checkpoints.writing(*filter(None, [uri])), enter(pending, _SAVING):
            client = self._models.client_of(model, self._trainer)
            frozen = await client.take_snapshot(model.model_id, own_id, uri, self._timeout_s)
        kept = SnapshotRecord(frozen, uri, model.trainer_instance)
        saved = gateway_pb2.SnapshotSaved(snapshot=frozen)
        effects: list[Job[Any]] = [partial(snapshot_pushes.put_row, kept=kept)]
        if checkpoint:
            checkpoint.snapshot_id, checkpoint.step, checkpoint.size_bytes = own_id, frozen.step, frozen.size_bytes
            _describe(checkpoint, expires_at)
            effects.append(partial(put_row, checkpoint=checkpoint))
            saved.path = checkpoint.path
        else:
            sampling, effect = self._sampling.open_on_snapshot(
                model.session_id, model.base_model, model.model_id, own_id, request.inflight
            )
            effects.append(effect)
            saved.sampling_session_id = sampling.sampling_session_id
            if frozen.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER:
                # The client will sample next: push while it waits, and before the commands that it queues later.
                self._sampling.push_soon(model.base_model, kept)
            if request.inflight:
                afterwards.append(lambda: self._sampling.move_followers(model.base_model, model.model_id, own_id))
        result = [gateway_pb2.WaitFutureResponse(snapshot_saved=saved)]
        return Done([*result], effects, afterwards, subject="" if checkpoint else own_id)

    async def save_external(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Writes a PEFT adapter or a Hugging Face checkpoint of all parameters, encrypts it on request, and registers
        it.
        """
        request = gateway_pb2.SubmitSaveExternalRequest.FromString(blob)
        expires_at = check_ttl(request.ttl_s)
        recipients = parse_recipients(request.age_recipients)
        checkpoint, old = await self._plan(model, EXTERNAL, request.name)
        written = f"{checkpoint.uri}{PLAIN_SUFFIX}" if recipients else checkpoint.uri
        storage = self._checkpoints.storage
        async with self._checkpoints.writing(written, checkpoint.uri):
            checkpoint.step = await self._write_export(model, pending, written)
            checkpoint.size_bytes = await complete_export(storage, written, checkpoint.uri, recipients)
        _describe(checkpoint, expires_at)
        return self._saved(checkpoint, old)

    async def _write_export(self, model: Model, pending: Pending, uri: str) -> int:
        """Makes the trainer write the current weights; returns their number of optimizer steps."""
        own_id = id_of_export(model.model_id, pending.submission.seq_id)
        async with self._trainer_queue.beside(pending, _SAVING):
            client = self._models.client_of(model, self._trainer)
            snapshot = await client.take_snapshot(model.model_id, own_id, uri, self._timeout_s, is_export=True)
        try:
            await client.forget_snapshot(own_id)
        except FoveaError as error:
            # The export is written, and the trainer drops old snapshots itself when its memory is full.
            logger.warning("could not free the export snapshot %s: %s", own_id, error)
        return snapshot.step

    def _saved(self, checkpoint: Checkpoint, old: Checkpoint | None) -> Done:
        """Registers a written checkpoint and schedules the removal of an older one of the same name."""
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
        self,
        model: Model,
        segment: str,
        name: str,
        user_metadata: dict[str, str] | None = None,
        overwrite: bool = False,
    ) -> tuple[Checkpoint, Checkpoint | None]:
        return await self._checkpoints.plan(
            model.model_id, model.owner, model.base_model, model.lora, segment, name, user_metadata or {}, overwrite
        )


def check_lora(lora: weights_pb2.LoraConfig, max_rank: int) -> None:
    """Raises InvalidInput for a shape that the trainer cannot create. Rank 0 means full parameters.

    Args:
        max_rank: The largest rank of the trainer; 0 if it cannot create adapters.
    """
    if lora.rank and not max_rank:
        raise InvalidInput(
            f"lora_config.rank is {lora.rank}, but vLLM has no LoRA for this model; 0 trains all parameters",
            field="lora_config.rank",
        )
    if not 0 <= lora.rank <= max_rank:
        raise InvalidInput(
            f"lora_config.rank is {lora.rank}; it must be 1 .. {max_rank}, or 0 to train all parameters",
            field="lora_config.rank",
        )
    if lora.rank and not (lora.train_attention or lora.train_mlp or lora.train_unembedding):
        raise InvalidInput("at least one of train_unembed, train_mlp and train_attn must be true", field="lora_config")


def _kind(lora: weights_pb2.LoraConfig) -> weights_pb2.LoraConfig | None:
    return lora if lora.rank else None


def _shape(lora: weights_pb2.LoraConfig) -> weights_pb2.LoraConfig:
    shape = weights_pb2.LoraConfig()
    shape.CopyFrom(lora)
    shape.ClearField("seed")
    return shape


def _describe(checkpoint: Checkpoint, expires_at: float | None) -> None:
    checkpoint.created_at, checkpoint.expires_at = time.time(), expires_at
