"""Spans that say which sampled sequence the positions of a training example came from.

Only the loss stable_reinforce reads them, and it is refused by name. The cookbook (from 0.6.1 on) attaches them to the
examples of every loss, so they are taken, once they are what the SDK's Datum.with_provenance promises.
"""

from collections.abc import Iterable

from fovea.tinker.v1 import tinker_pb2
from fovea.wire.errors import InvalidInput

_TOKEN_BYTES, _TARGET_BYTES = 4, 8
_LISTS = ("model_input_spans", "loss_fn_input_spans")


def check_spans(datum: tinker_pb2.Datum, field: str) -> None:
    """Raises InvalidInput naming the list unless both are absent or both tile what they describe."""
    here = [name for name in _LISTS if getattr(datum, name)]
    if len(here) == 1:
        raise InvalidInput(
            f"{field} has {here[0]} only; set both lists of spans or neither", field=f"{field}.{here[0]}"
        )
    if not here:
        return
    model_input = _length(datum.model_input_spans, f"{field}.model_input_spans")
    loss_inputs = _length(datum.loss_fn_input_spans, f"{field}.loss_fn_input_spans")
    _tile(model_input, _input_length(datum.model_input), f"{field}.model_input_spans", "the input")
    _tile(loss_inputs, _target_length(datum), f"{field}.loss_fn_input_spans", "target_tokens")


def _length(spans: Iterable[tinker_pb2.ProvenanceSpan], field: str) -> int:
    total = 0
    for index, one in enumerate(spans):
        kind = one.WhichOneof("span")
        if kind is None:
            raise InvalidInput(f"{field}[{index}] is neither of a prompt nor of sampled tokens", field=field)
        span = one.prompt_tokens if kind == "prompt_tokens" else one.sampled_tokens
        if not span.sequence_id or span.offset < 0 or span.length < 0:
            seen = f"sequence_id {span.sequence_id!r}, offset {span.offset}, length {span.length}"
            raise InvalidInput(f"{field}[{index}] has {seen}; it needs an id and no negative number", field=field)
        total += span.length
    return total


def _tile(covered: int, length: int | None, field: str, what: str) -> None:
    if length is not None and covered != length:
        raise InvalidInput(f"{field} cover {covered} positions, but {what} has {length}", field=field)


def _input_length(chunks: Iterable[tinker_pb2.Chunk]) -> int | None:
    """Positions of an input; None if an image does not say how many it takes."""
    total = 0
    for chunk in chunks:
        if chunk.WhichOneof("chunk") == "encoded_text":
            total += len(chunk.encoded_text.tokens) // _TOKEN_BYTES
        elif chunk.image.HasField("expected_tokens"):
            total += chunk.image.expected_tokens
        else:
            return None
    return total


def _target_length(datum: tinker_pb2.Datum) -> int | None:
    """Length of target_tokens [N]; None for others, whose tiling the SDK does not check either."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None or targets.dtype != tinker_pb2.DTYPE_INT64:
        return None
    if targets.WhichOneof("encoding") != "dense" or len(targets.shape) > 1:
        return None
    return len(targets.dense) // _TARGET_BYTES
