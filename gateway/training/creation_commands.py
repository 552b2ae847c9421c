"""Commands that make a model or load one."""

from fovea.api.v1 import gateway_pb2, weights_pb2
from fovea.runtime.tasks import Backoff
from fovea.wire.errors import FoveaError, InvalidInput, Unavailable
from gateway.checkpoints.checkpoint_registry import Checkpoints
from gateway.futures.future import Done, Pending, QueueState
from gateway.replicas.trainer_link import TrainerLink
from gateway.sessions.sessions import Sessions
from gateway.training.models import Model, Models, ModelState

_LONGEST_PAUSE_S = 0.5


class CreationCommands:
    """Runs create_model and load_state.

    Args:
        timeout_s: Deadline of one call to the trainer that changes no model.
        patience_s: How long a creation, which loses nothing by it, waits for a trainer that restarts.
    """

    def __init__(
        self,
        models: Models,
        checkpoints: Checkpoints,
        sessions: Sessions,
        trainer: TrainerLink,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        self._models, self._checkpoints, self._sessions, self._trainer = models, checkpoints, sessions, trainer
        self._timeout_s, self._patience_s = timeout_s, patience_s

    async def create_model(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Makes a fresh model, or one from a checkpoint. Either way the model's state says how it went."""
        request = gateway_pb2.SubmitCreateModelRequest.FromString(blob)
        try:
            step = await self._create_patiently(model, pending, request)
        except FoveaError as error:
            model.state, model.state_reason = ModelState.FAILED, error.message
            raise
        model.state = ModelState.READY
        result = [gateway_pb2.WaitFutureResponse(model_created=gateway_pb2.ModelCreated(model_id=model.model_id))]
        if request.from_path:
            loaded = gateway_pb2.StateLoaded(step=step, path=request.from_path)
            result.append(gateway_pb2.WaitFutureResponse(state_loaded=loaded))
        return Done([*result])

    async def _create_patiently(
        self, model: Model, pending: Pending, request: gateway_pb2.SubmitCreateModelRequest
    ) -> int:
        """Creating loses nothing and may be repeated, so it waits for a trainer that restarts."""
        # A client that closes one session and opens the next expects the room of the first one's models.
        await self._sessions.wait_freed(but=model.session_id)
        backoff = Backoff(self._patience_s, longest_s=_LONGEST_PAUSE_S)
        while True:
            pending.progress.wait_on("waiting for the trainer", QueueState.PAUSED)
            info = await self._trainer.require(backoff.left_s)
            self._models.check_share(model, info.instance_id)
            model.trainer_instance = info.instance_id
            pending.progress.wait_on("creating, or waiting for the trainer")
            try:
                return await self._create(model, request, info.max_lora_rank)
            except Unavailable:
                if backoff.is_over:
                    raise
                await self._trainer.look_again()
                await backoff.pause()

    async def _create(self, model: Model, request: gateway_pb2.SubmitCreateModelRequest, max_lora_rank: int) -> int:
        if not request.from_path:
            check_lora(model.lora, max_lora_rank)
            await self._trainer.client.create_model(model.model_id, _kind(model.lora), self._timeout_s)
            return 0
        checkpoint = await self._checkpoints.find_training(model.owner, request.from_path)
        if checkpoint.base_model != model.base_model:
            raise InvalidInput(
                f"{request.from_path} was trained on {checkpoint.base_model!r}, this is {model.base_model!r}",
                field="path",
            )
        model.lora = checkpoint.lora
        await self._trainer.client.create_model(model.model_id, _kind(model.lora), self._timeout_s)
        try:
            return await self._trainer.client.load_state(
                model.model_id, checkpoint.uri, request.optimizer, self._timeout_s
            )
        except FoveaError:
            await self._trainer.client.delete_model(model.model_id, self._timeout_s)
            raise

    async def load_state(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Loads a checkpoint of the same shape into a model."""
        request = gateway_pb2.SubmitLoadStateRequest.FromString(blob)
        checkpoint = await self._checkpoints.find_training(model.owner, request.path)
        if _shape(checkpoint.lora) != _shape(model.lora):
            raise InvalidInput(
                f"{request.path} has LoRA rank {checkpoint.lora.rank} and other settings than the model, whose rank is "
                f"{model.lora.rank}; use create_training_client_from_state, which takes the checkpoint's own",
                field="path",
            )
        client = self._trainer.client
        step = await self._trainer.settle(
            model.trainer_instance,
            lambda: client.load_state(
                model.model_id, checkpoint.uri, request.optimizer, timeout_s=None, seq_id=pending.submission.seq_id
            ),
        )
        loaded = gateway_pb2.StateLoaded(step=step, path=request.path)
        return Done([gateway_pb2.WaitFutureResponse(state_loaded=loaded)])


def check_lora(lora: weights_pb2.LoraConfig, max_rank: int) -> None:
    """Raises InvalidInput for a shape that no trainer can make. Rank 0 means full parameters."""
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
