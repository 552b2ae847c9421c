"""Faults of a server with training requests and checkpoints: it computes another loss or returns another one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from starlette.responses import Response
from tinker.proto import tinker_public_pb2 as public

from fovea_conformance.proxy import Exchange
from tests.e2e.conformance.corruption import Change, Wrong, floats, request

_MOST_BYTES = 1 << 28


def reading(change: Change) -> Wrong:
    """A server that processes a different loss (protobuf ForwardBackwardRequest) from the one sent,
    compressed or not.
    """
    return Wrong(before=lambda one: _reread(one, change))


def _reread(one: Exchange, change: Change) -> None:
    if one.route == "forward_backward":
        message = public.ForwardBackwardRequest.FromString(_decompressed(one))
        change(message)
        one.body = message.SerializeToString()


def _decompressed(one: Exchange) -> bytes:
    """Decompresses a zstd body and drops its header, because the request is forwarded uncompressed."""
    if one.headers.pop("content-encoding", "") != "zstd":
        return one.body
    return bytes(zstandard.ZstdDecompressor().decompress(one.body, max_output_size=_MOST_BYTES))


def inputs(name: str, change: Callable[[NDArray[np.float32]], NDArray]) -> Wrong:
    """A server that reads other numbers in one dense float32 loss input of any shape."""

    def every(message: Any) -> None:
        for datum in message.data:
            if name in datum.loss_fn_inputs and datum.loss_fn_inputs[name].dense:
                tensor = datum.loss_fn_inputs[name]
                tensor.dense = change(floats(tensor.dense)).astype(np.float32).tobytes()

    return reading(every)


def adam(**changed: float) -> Wrong:
    """A server that steps with other Adam parameters."""
    return request("optim_step", lambda body: body["adam_params"].update(changed))


def lora(**changed: object) -> Wrong:
    """A server that creates adapters with a different configuration."""
    return request("create_model", lambda body: body["lora_config"].update(changed))


def normalised(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    size = np.float32(max(float(np.abs(weights).sum()), 1e-9))
    return weights / size


def renamed(old: str, new: str) -> Wrong:
    """A server that computes a different loss; importance_sampling has no configuration."""

    def change(message: Any) -> None:
        if message.loss_fn == old:
            message.loss_fn = new
            if new == "importance_sampling":
                message.loss_fn_config.clear()
                message.loss_fn_config_v2.clear()

    return reading(change)


def legacy_config(message: Any) -> None:
    """Prefers the older of two configurations."""
    if message.loss_fn_config:
        message.loss_fn_config_v2.clear()


def no_penalty(message: Any) -> None:
    """Accepts a numeric kl_coeff and ignores it."""
    config = message.loss_fn_config_v2
    if "kl_coeff" in config and config["kl_coeff"].WhichOneof("value") == "number":
        config["kl_coeff"].number = 0.0


def no_text(message: Any) -> None:
    """Drops settings with text values."""
    config = message.loss_fn_config_v2
    for name in [name for name in config if config[name].WhichOneof("value") == "text"]:
        del config[name]


class OneUse:
    """A server that forgets a recorded sequence after one loss has read it."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def __call__(self, message: Any) -> None:
        if message.loss_fn != "stable_reinforce":
            return
        named = set()
        for datum in message.data:
            for span in (*datum.model_input_spans, *datum.loss_fn_input_spans):
                run = span.sampled_tokens if span.WhichOneof("span") == "sampled_tokens" else span.prompt_tokens
                named.add(run.sequence_id)
                if run.sequence_id in self.used:
                    run.sequence_id = "gone"
        self.used |= named


def always_trains(message: Any) -> None:
    message.forward_only = False


def zero_weights(message: Any) -> None:
    """Reads missing weights as zeros."""
    for datum in message.data:
        given = datum.loss_fn_inputs
        if "weights" not in given and "target_tokens" in given:
            targets = given["target_tokens"]
            zeros = np.zeros(len(targets.dense) // 8, np.float32)
            given["weights"].CopyFrom(
                type(targets)(dtype=public.DTYPE_FLOAT32, shape=targets.shape, dense=zeros.tobytes())
            )


def no_token_zero(message: Any) -> None:
    """Drops the weights of unstored sparse cells, which are token 0; here, those of column 0."""
    for datum in message.data:
        weights = datum.loss_fn_inputs["weights"]
        if weights.WhichOneof("encoding") == "sparse_csr":
            values, columns = floats(weights.sparse_csr.values), np.frombuffer(weights.sparse_csr.col_indices, np.int64)
            weights.sparse_csr.values = np.where(columns == 0, np.float32(0), values).tobytes()


class OnlyFirst:
    """A server on which only the first loss of each step counts."""

    def __init__(self) -> None:
        self.begun: set[str] = set()

    def __call__(self, one: Exchange) -> None:
        if one.route == "optim_step":
            self.begun.discard(one.json()["model_id"])
        _reread(one, self._change)

    def _change(self, message: Any) -> None:
        if not message.forward_only:
            message.forward_only = message.model_id in self.begun
            self.begun.add(message.model_id)


class OtherSeeds:
    """A server that seeds each adapter differently."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, body: dict[str, Any]) -> None:
        self.made += 1
        body["lora_config"]["seed"] = self.made


def any_family(body: dict[str, Any]) -> None:
    """Reads the parameters of any optimizer as Adam's."""
    given = body.pop("optimizer_params", None)
    if given:
        body["adam_params"] = {"learning_rate": given["learning_rate"]}


def takes_bombs(one: Exchange) -> Response | None:
    """Accepts any long body with the encoding zstd."""
    long = one.headers.get("content-encoding") == "zstd" and len(one.body) > 100_000
    return Response('{"request_id": "0"}', media_type="application/json") if long else None


def short_bodies(limit: int) -> Wrong:
    """A server that refuses losses above a number of bytes."""
    given = Response('{"detail": "too large"}', 413, media_type="application/json")
    return Wrong(before=lambda one: given if one.route == "forward_backward" and len(one.body) > limit else None)


def blames_itself(one: Exchange) -> Response | None:
    """Reports all failures as server errors."""
    if b'"error"' not in one.answer[:20]:
        return None
    return Response(one.unpacked.replace(b'"user"', b'"server"'), media_type="application/json")


def keeps_deleted(one: Exchange) -> Response | None:
    """Confirms a deletion without deleting."""
    deletes = one.method == "DELETE" and not one.path.endswith("/publish")
    return Response("{}", media_type="application/json") if deletes else None


def mean_loss(message: Any) -> None:
    message.metrics["loss:sum"] /= sum(record.num_datums for record in message.loss_fn_outputs)


def no_loss(message: Any) -> None:
    message.metrics.pop("loss:sum")


def plain_key(message: Any) -> None:
    message.metrics["tokens_per_second"] = 1.0


def flat(message: Any) -> None:
    """Flattens [N, K] to [N * K] in answers."""
    for record in message.loss_fn_outputs:
        del record.fields["logprobs"].trailing_shape[:]


def count_page(body: dict[str, Any]) -> None:
    """Sets total_count to the length of the page."""
    if "cursor" in body:
        body["cursor"]["total_count"] = len(body["training_runs"])


def without_query(route: str) -> Wrong:
    """A server that ignores the query string of a route."""

    def before(one: Exchange) -> None:
        if one.route == route:
            one.query = ""

    return Wrong(before=before)


def open_log() -> Wrong:
    """A server that shows an audit log to every key."""

    def after(one: Exchange) -> Response | None:
        is_refused = one.route == "audit" and one.status in (401, 403)
        return Response('{"entries": []}', media_type="application/json") if is_refused else None

    return Wrong(after=after)
