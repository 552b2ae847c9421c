"""HTTP routes of training."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.api.v1 import gateway_pb2, trainer_pb2, weights_pb2
from fovea.tinker.v1 import tinker_pb2
from fovea.wire.custom_loss import MAX_GRAPH_BYTES
from fovea.wire.errors import FoveaError, InvalidInput, NotFound, PayloadTooLarge, SessionEnded, Unimplemented
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints
from fovea_gateway.http.endpoint import Endpoints, Json
from fovea_gateway.http.model_inputs import LoraConfig
from fovea_gateway.http.request_body import (
    PREFIX_BYTES,
    BodyTooLarge,
    parse_forward_backward,
    parse_json,
    parse_loosely,
    parse_start,
    peek_address,
    read,
)
from fovea_gateway.replicas.base_models import BaseModels
from fovea_gateway.sessions.future import Kind, ResultEncoder, in_order, split_messages
from fovea_gateway.training import training_wire as wire
from fovea_gateway.training.batches import BATCH_KINDS, CustomLosses, LossRequest, blob_of_body
from fovea_gateway.training.models import Models
from fovea_gateway.training.training import KINDS, CommandRequest, Training

B = TypeVar("B", bound=BaseModel)
C = TypeVar("C", bound=CommandRequest)
_ADAM, _DIMUON = "adamw", "dimuon"
_MOST_LOSS_BYTES = 2 * MAX_GRAPH_BYTES
"""The limit for the body of a custom loss: twice the stored graph, because a client may add white space."""
_SAMPLER_KINDS = ("snapshot", "inflight")


class TrainingRoutes:
    """Handlers of training. They accept invalid content and fail its future; see `Training`."""

    def __init__(
        self,
        training: Training,
        models: Models,
        custom_losses: CustomLosses,
        base_models: BaseModels,
        checkpoints: Checkpoints,
        lora_message: Callable[[LoraConfig], weights_pb2.LoraConfig],
        max_body_bytes: int,
    ) -> None:
        self._training, self._models, self._custom_losses = training, models, custom_losses
        self._base_models, self._checkpoints = base_models, checkpoints
        self._lora_message, self._max_body_bytes = lora_message, max_body_bytes

    def routes(self, endpoints: Endpoints) -> list[Route]:
        handlers = {
            "create_model": self.create_model,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "load_weights": self.load_weights,
            "save_weights_external": self.save_weights_external,
            "create_custom_loss": self.create_custom_loss,
        }
        return [
            endpoints.route("POST", "get_info", self.get_info, Scope.READ),
            *(endpoints.route("POST", path, handler, Scope.TRAIN) for path, handler in handlers.items()),
        ]

    async def create_model(self, request: Request, owner: str) -> Response:
        """Submits the creation of a fresh model."""
        body = await parse_json(request, wire.CreateModel, await read(request))
        message = gateway_pb2.SubmitCreateModelRequest(
            session_id=body.session_id,
            model_seq_id=body.model_seq_id,
            base_model=body.base_model,
            user_metadata=_texts(body.user_metadata),
        )
        rejection: FoveaError | None = _unsupported_optimizer(body.optimizer_config)
        if body.lora_config is not None:
            try:
                message.lora.CopyFrom(self._lora_message(body.lora_config))
            except InvalidInput as error:
                rejection = rejection or error
        future_id, model_id = await self._training.submit_create(owner, message, rejection)
        return Json({"request_id": future_id, "model_id": model_id})

    async def get_info(self, request: Request, owner: str) -> Response:
        body = await parse_json(request, wire.GetInfo, await read(request))
        model = await self._models.get(owner, body.model_id)
        name, tokenizer_id = model.base_model, self._base_models.get(model.base_model).tokenizer_id
        return Json(
            {
                "type": "get_info",
                "model_id": model.model_id,
                "model_data": {"arch": "vision-language model", "model_name": name, "tokenizer_id": tokenizer_id},
                "model_name": name,
                "is_lora": model.lora.rank > 0,
                "lora_rank": model.lora.rank or None,
                "optimizer_config": {"type": _ADAM},
            }
        )

    async def forward_backward(self, request: Request, owner: str) -> Response:
        """Submits a loss computation. A refused body still consumes its seq_id, so that later requests do not wait for
        it.
        """
        try:
            blob = await read(request, self._max_body_bytes)
        except BodyTooLarge as error:
            await self._use_up(owner, error.prefix, error)
            raise
        try:
            decoded, stored, rejection = await parse_forward_backward(request, blob, self._decode)
        except (InvalidInput, PayloadTooLarge) as error:
            await self._use_up(owner, blob[:PREFIX_BYTES], error)
            raise
        future_id = await self._training.submit_forward_backward(owner, decoded, rejection, stored)
        return Json({"request_id": future_id, "model_id": decoded.header.model_id})

    async def _use_up(self, owner: str, prefix: bytes, error: FoveaError) -> None:
        """Submits a refused body as a command that fails in its turn, if its start contains model_id and seq_id."""
        if address := peek_address(prefix):
            header = gateway_pb2.SubmitForwardBackwardHeader(model_id=address[0], seq_id=address[1], backward=True)
            with suppress(NotFound, InvalidInput, SessionEnded):
                await self._training.submit_forward_backward(owner, LossRequest(header, []), error)

    def _decode(
        self, body: tinker_pb2.ForwardBackwardRequest, blob: bytes
    ) -> tuple[LossRequest, bytes, FoveaError | None]:
        """Returns a decoded body, its stored form, and an error or None. Runs in a thread if the body is large."""
        header = wire.header_from_proto(body)
        try:
            wire.check_dense_size(body.data, self._max_body_bytes)
            return LossRequest(header, wire.data_from_proto(body, header)), blob_of_body(blob), None
        except FoveaError as error:
            return LossRequest(header, []), b"", error

    async def optim_step(self, request: Request, owner: str) -> Response:
        return await self._submit(request, owner, wire.OptimStep, gateway_pb2.SubmitOptimStepRequest, _optim_step)

    async def save_weights(self, request: Request, owner: str) -> Response:
        return await self._submit(request, owner, wire.SaveWeights, gateway_pb2.SubmitSaveStateRequest, _save_weights)

    async def save_weights_for_sampler(self, request: Request, owner: str) -> Response:
        return await self._submit(
            request, owner, wire.SaveWeightsForSampler, gateway_pb2.SubmitSaveForSamplerRequest, _save_for_sampler
        )

    async def load_weights(self, request: Request, owner: str) -> Response:
        """Submits a load, either into a new model (form A) or into an existing one (form B)."""
        kind = gateway_pb2.SubmitLoadStateRequest
        blob, fields = await self._read(request, owner, kind)
        if fields.get("session_id") is None:
            message = kind(**_address(fields))
            return await self._accept(request, owner, wire.LoadWeights, message, _load_weights, blob)
        body = await parse_json(request, wire.LoadWeights, blob)
        if body.model_seq_id is None or body.model_id is not None or body.seq_id is not None:
            raise InvalidInput("send session_id with model_seq_id, or model_id with seq_id", field="model_seq_id")
        creation = gateway_pb2.SubmitCreateModelRequest(
            session_id=body.session_id,
            model_seq_id=body.model_seq_id,
            base_model=body.base_model or await self._base_model_of(owner, body.path),
            user_metadata=_texts(body.user_metadata),
            from_path=body.path,
            optimizer=body.optimizer,
        )
        future_id, model_id = await self._training.submit_create(owner, creation, _unsupported_load(body))
        return Json({"request_id": future_id, "model_id": model_id})

    async def _base_model_of(self, owner: str, path: str) -> str:
        """Returns a checkpoint's base model. If that is not served, returns the default one, which fails the load."""
        default = self._base_models.default.name
        try:
            base_model = (await self._checkpoints.find_training(owner, path)).base_model
        except FoveaError:  # The same error will fail the future when the command runs.
            return default
        return base_model if self._base_models.find(base_model) else default

    async def save_weights_external(self, request: Request, owner: str) -> Response:
        return await self._submit(
            request, owner, wire.SaveWeightsExternal, gateway_pb2.SubmitSaveExternalRequest, _save_external
        )

    async def create_custom_loss(self, request: Request, owner: str) -> Response:
        """Submits a traced loss. An invalid loss fails the future."""
        body = await parse_json(request, wire.CreateCustomLoss, await read(request, _MOST_LOSS_BYTES))
        loss = trainer_pb2.CustomLoss(
            name=body.name,
            inputs=[trainer_pb2.CustomLossInput(name=given.name, rank=given.rank) for given in body.inputs],
            graph=json.dumps(body.graph, separators=(",", ":")).encode(),
        )
        message = gateway_pb2.CreateCustomLossRequest(
            session_id=body.session_id, custom_loss_seq_id=body.custom_loss_seq_id, loss=loss
        )
        return Json({"request_id": await self._custom_losses.submit(owner, message)})

    async def _submit(
        self,
        request: Request,
        owner: str,
        kind: type[B],
        message_kind: Callable[..., C],
        fill: Callable[[B, C], None],
    ) -> Response:
        """Decodes model_id and seq_id at once. Any other error in the body fails the future instead."""
        blob, fields = await self._read(request, owner, message_kind)
        return await self._accept(request, owner, kind, message_kind(**_address(fields)), fill, blob)

    async def _read(
        self, request: Request, owner: str, kind: Callable[..., CommandRequest]
    ) -> tuple[bytes, dict[str, Any]]:
        """Reads a command's body and its fields. A body that is too large still consumes its seq_id if its start has
        one.
        """
        prefix = b""
        try:
            blob = await read(request)
            prefix = blob[:PREFIX_BYTES]
            return blob, parse_loosely(blob)
        except PayloadTooLarge as error:
            start = parse_start(error.prefix if isinstance(error, BodyTooLarge) else prefix)
            with suppress(NotFound, InvalidInput, SessionEnded):
                await self._training.submit(owner, kind(**_address(start)), error)
            raise

    async def _accept(
        self,
        request: Request,
        owner: str,
        kind: type[B],
        message: C,
        fill: Callable[[B, C], None],
        blob: bytes,
    ) -> Response:
        rejection: FoveaError | None = None
        try:
            fill(await parse_json(request, kind, blob), message)
        except (InvalidInput, Unimplemented) as error:
            rejection = error
        future_id = await self._training.submit(owner, message, rejection)
        return Json({"request_id": future_id, "model_id": message.model_id})


def _address(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields model_id and seq_id. Raises InvalidInput."""
    model_id, seq_id = body.get("model_id"), body.get("seq_id")
    if not isinstance(model_id, str) or isinstance(seq_id, bool) or not isinstance(seq_id, int):
        raise InvalidInput("model_id (text) and seq_id (whole number) are required", field="model_id")
    if not 0 <= seq_id < 2**63:
        raise InvalidInput(f"seq_id is {seq_id}", field="seq_id")
    return {"model_id": model_id, "seq_id": seq_id}


def _optim_step(body: wire.OptimStep, message: gateway_pb2.SubmitOptimStepRequest) -> None:
    if body.optimizer_params is not None:
        raise _no_optimizer("optimizer_params", body.optimizer_params.get("type"))
    if body.adam_params is None:
        raise InvalidInput("adam_params is missing", field="adam_params")
    message.adam.CopyFrom(trainer_pb2.AdamParams(**body.adam_params))


def _save_weights(body: wire.SaveWeights, message: gateway_pb2.SubmitSaveStateRequest) -> None:
    message.name, message.overwrite, message.ttl_s = body.path or "", body.overwrite, _ttl(body.ttl_seconds)
    message.user_metadata.update(body.user_metadata or {})


def _save_external(body: wire.SaveWeightsExternal, message: gateway_pb2.SubmitSaveExternalRequest) -> None:
    if body.age_encryption_recipients == []:
        field = "age_encryption_recipients"
        raise InvalidInput(f"{field} is empty; leave it out for an export that is not encrypted", field=field)
    message.name, message.ttl_s = body.path, _ttl(body.ttl_seconds)
    message.age_recipients.extend(body.age_encryption_recipients or [])


def _save_for_sampler(body: wire.SaveWeightsForSampler, message: gateway_pb2.SubmitSaveForSamplerRequest) -> None:
    if body.kind not in _SAMPLER_KINDS:
        raise InvalidInput(f"kind is {body.kind!r}; it must be one of {', '.join(_SAMPLER_KINDS)}", field="kind")
    if (body.path is None) == (body.sampling_session_seq_id is None):
        raise InvalidInput("send either path or sampling_session_seq_id", field="path")
    if body.path == "":
        raise InvalidInput("path is empty", field="path")
    message.name, message.ttl_s = body.path or "", _ttl(body.ttl_seconds)
    message.inflight = body.kind == "inflight"
    message.user_metadata.update(body.user_metadata or {})


def _load_weights(body: wire.LoadWeights, message: gateway_pb2.SubmitLoadStateRequest) -> None:
    if rejection := _unsupported_load(body):
        raise rejection
    if body.model_seq_id is not None:
        raise InvalidInput("model_seq_id belongs with session_id, not with model_id", field="model_seq_id")
    message.path, message.optimizer = body.path, body.optimizer


def _unsupported_load(body: wire.LoadWeights) -> InvalidInput | Unimplemented | None:
    if body.weights_access_token is not None:
        return Unimplemented("weights_access_token is not supported", field="weights_access_token")
    return _unsupported_optimizer(body.optimizer_config)


def _unsupported_optimizer(config: dict[str, Any] | None) -> Unimplemented | None:
    if config is None or config == {"type": _ADAM}:
        return None
    return _no_optimizer("optimizer_config", config.get("type"))


def _no_optimizer(field: str, name: Any) -> Unimplemented:
    reason = ": Tinker has published its parameters, but not how it updates weights" if name == _DIMUON else ""
    return Unimplemented(f"{field}.type is {str(name)[:40]!r}, which Fovea lacks{reason}; use {_ADAM}", field=field)


def _ttl(ttl_seconds: int | None) -> int:
    """Converts a ttl to Fovea's protocol, in which 0 means forever. A client's 0 becomes -1, which is refused later."""
    return 0 if ttl_seconds is None else min(max(ttl_seconds, -1), 2**62) or -1


def _texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (metadata or {}).items()}


def _record_json(record: gateway_pb2.WaitFutureResponse) -> dict[str, Any]:
    match record.WhichOneof("record"):
        case "model_created":
            return {"type": "create_model", "model_id": record.model_created.model_id}
        case "state_loaded":
            return {"type": "load_weights", "path": record.state_loaded.path}
        case "metrics":
            return {"metrics": in_order(record.metrics.values)}
        case "custom_loss_created":
            return {"type": "create_custom_loss", "loss_id": record.custom_loss_created.custom_loss_id}
        case "checkpoint_saved":
            return {"type": "save_weights", "path": record.checkpoint_saved.path}
        case _:
            saved = record.snapshot_saved
            place = {"path": saved.path} if saved.path else {"sampling_session_id": saved.sampling_session_id}
            return {"type": "save_weights_for_sampler", **place}


def _command_json(blob: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for record in split_messages(gateway_pb2.WaitFutureResponse, blob):
        answer |= _record_json(record)
    return answer


def _external_json(blob: bytes) -> dict[str, Any]:
    return _command_json(blob) | {"type": "save_weights_external"}


ENCODERS: dict[Kind, ResultEncoder] = {
    **{kind: ResultEncoder(_command_json) for kind in (*KINDS, Kind.CREATE_CUSTOM_LOSS)},
    **{kind: wire.LOSSES for kind in BATCH_KINDS},
    Kind.SAVE_EXTERNAL: ResultEncoder(_external_json),
}
