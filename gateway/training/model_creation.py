"""Commands that make a model or load one."""

import asyncio

from fovea.api.v1 import gateway_pb2, weights_pb2
from fovea.wire.errors import FoveaError, InvalidInput, Unavailable
from gateway.futures.future import Pending, QueueState
from gateway.identity import Caller
from gateway.training.command_context import Context, Done
from gateway.training.model_rows import Model, ModelState

_RETRY_S = 0.5


async def create_model(context: Context, model: Model, pending: Pending, blob: bytes) -> Done:
    """Makes a fresh model, or one from a checkpoint. Either way the model's state says how it went."""
    request = gateway_pb2.SubmitCreateModelRequest.FromString(blob)
    try:
        step = await _create_patiently(context, model, pending, request)
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
    context: Context, model: Model, pending: Pending, request: gateway_pb2.SubmitCreateModelRequest
) -> int:
    """Creating loses nothing and may be repeated, so it waits for a trainer that restarts."""
    # A client that closes one session and opens the next expects the room of the first one's models.
    await context.freed()
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + context.patience_s
    while True:
        pending.wait_on("waiting for the trainer", QueueState.PAUSED)
        info = await context.trainer.require(give_up_at - loop.time())
        context.models.check_share(model, info.instance_id)
        model.trainer_instance = info.instance_id
        pending.wait_on("creating, or waiting for the trainer")
        try:
            return await _create(context, model, request, info.max_lora_rank)
        except Unavailable:
            if loop.time() > give_up_at:
                raise
            await context.trainer.look_again()
            await asyncio.sleep(_RETRY_S)


async def _create(
    context: Context, model: Model, request: gateway_pb2.SubmitCreateModelRequest, max_lora_rank: int
) -> int:
    if not request.from_path:
        check_lora(model.lora, max_lora_rank)
        await context.trainer.client.create_model(model.model_id, _kind(model.lora), context.timeout_s)
        return 0
    checkpoint = await context.checkpoints.find_training(Caller(model.owner), request.from_path)
    if checkpoint.base_model != model.base_model:
        raise InvalidInput(
            f"{request.from_path} was trained on {checkpoint.base_model!r}, this is {model.base_model!r}", field="path"
        )
    model.lora = checkpoint.lora
    await context.trainer.client.create_model(model.model_id, _kind(model.lora), context.timeout_s)
    try:
        return await context.trainer.client.load_state(
            model.model_id, checkpoint.uri, request.optimizer, context.timeout_s
        )
    except FoveaError:
        await context.trainer.client.delete_model(model.model_id, context.timeout_s)
        raise


async def load_state(context: Context, model: Model, pending: Pending, blob: bytes) -> Done:
    """Loads a checkpoint of the same shape into a model."""
    request = gateway_pb2.SubmitLoadStateRequest.FromString(blob)
    checkpoint = await context.checkpoints.find_training(Caller(model.owner), request.path)
    if _shape(checkpoint.lora) != _shape(model.lora):
        raise InvalidInput(
            f"{request.path} has LoRA rank {checkpoint.lora.rank} and other settings than the model, whose rank is "
            f"{model.lora.rank}; use create_training_client_from_state, which takes the checkpoint's own",
            field="path",
        )
    client = context.trainer.client
    step = await context.trainer.settle(
        model.trainer_instance,
        lambda: client.load_state(
            model.model_id, checkpoint.uri, request.optimizer, timeout_s=None, seq_id=pending.seq_id
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
