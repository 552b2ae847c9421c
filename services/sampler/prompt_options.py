"""Checks what a request asks of its prompt's distributions: target tokens, how many to score, how much to send back."""

import numpy as np

from fovea.api.v1 import sampler_pb2
from fovea.wire import csr, tensors
from fovea.wire.errors import InvalidInput
from fovea.wire.limits import MESSAGE_BYTES
from services.sampler.engine_api import TargetRows

_MESSAGE_MARGIN_BYTES = 4096


def read_targets(request: sampler_pb2.SampleRequest, prompt_length: int, vocabulary_size: int) -> TargetRows | None:
    """The target tokens, or None. Raises InvalidInput naming the field that is malformed."""
    if not request.HasField("target_tokens"):
        return None
    field = "target_tokens.token_ids"
    ids = tensors.decode(request.target_tokens.token_ids, field)
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise InvalidInput(f"{field} is {ids.dtype.name} {list(ids.shape)}, must be int32 [M]", field=field)
    if not ids.size:
        raise InvalidInput(f"{field} is empty; list at least one token or leave target_tokens out", field=field)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary_size))
    if wrong.size:
        raise InvalidInput(
            f"{field}[{wrong[0]}] is {ids[wrong[0]]}; ids lie in 0 .. {vocabulary_size - 1}", field=field
        )
    field = "target_tokens.row_offsets"
    offsets = tensors.decode(request.target_tokens.row_offsets, field)
    if offsets.dtype != np.int64:
        raise InvalidInput(
            f"{field} is {offsets.dtype.name} {list(offsets.shape)}, must be int64 [{prompt_length}]", field=field
        )
    csr.check_offsets(offsets, ids.size, prompt_length - 1, field)
    return TargetRows(ids, offsets)


def check_last_n(request: sampler_pb2.SampleRequest, prompt_length: int) -> None:
    """Raises InvalidInput if `prompt_logprobs_last_n` is out of range or has nothing to apply to."""
    field, last_n = "prompt_logprobs_last_n", request.prompt_logprobs_last_n
    if not last_n:
        return
    if not 0 < last_n < prompt_length:
        raise InvalidInput(
            f"{field} is {last_n}, must be between 1 and {prompt_length - 1}, the scored positions of a prompt of "
            f"{prompt_length}",
            field=field,
        )
    if not request.prompt_logprobs:
        raise InvalidInput(f"{field} is {last_n}, but prompt_logprobs, which it applies to, is not set", field=field)


def check_result_size(request: sampler_pb2.SampleRequest, prompt_length: int, targets: TargetRows | None) -> None:
    """Raises InvalidInput if the prompt's facts, which travel as one message, would not fit into it."""
    room = MESSAGE_BYTES - _MESSAGE_MARGIN_BYTES - 4 * prompt_length
    if targets is not None:
        if 4 * targets.token_ids.size > room:
            raise InvalidInput(
                f"target_tokens has {targets.token_ids.size} tokens; with a prompt of {prompt_length} one message "
                f"carries the log-probabilities of at most {room // 4}",
                field="target_tokens",
            )
        room -= 4 * targets.token_ids.size
    # Both an int32 id and a float32 log-probability a cell.
    for field, k in (
        ("alt_token_count", request.alt_token_count),
        ("top_prompt_logprobs", request.top_prompt_logprobs),
    ):
        if 8 * k * prompt_length > room:
            raise InvalidInput(
                f"{field} is {k}; of {prompt_length} prompt tokens one message carries at most "
                f"{room // (8 * prompt_length)} beside what else is asked for",
                field=field,
            )
        room -= 8 * k * prompt_length
