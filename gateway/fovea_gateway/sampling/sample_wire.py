"""Conversion of samples: from a sampler's events, to and from Tinker's protobuf and JSON, and tables of target tokens.

A table has P - 1 rows for a prompt of P tokens; row i scores position i + 1. The id -1 means that a cell is not scored.
A sparse table may list such cells; their result is 0.0.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import gateway_pb2, sampler_pb2, tensor_pb2
from fovea.tinker.v1 import tinker_pb2
from fovea.wire import tensors
from fovea.wire.conventions import MESSAGE_BYTES
from fovea.wire.errors import Internal, InvalidInput
from fovea_gateway.http.request_body import Body, LongList
from fovea_gateway.sessions.future import Kind, ResultEncoder, split_messages

FIELD = "target_prompt_logprobs"
NOTHING = -1
_INT32 = np.iinfo(np.int32)
_MOST_IDS = MESSAGE_BYTES // 16
"""The ids travel in one message, and so do their scores, beside the prompt."""
_STOP_REASONS = {
    sampler_pb2.FINISH_REASON_STOP: tinker_pb2.STOP_REASON_STOP,
    sampler_pb2.FINISH_REASON_LENGTH: tinker_pb2.STOP_REASON_LENGTH,
}


class TensorData(Body):
    """A tensor of numbers: dense, or sparse (CSR) if it has indices."""

    data: LongList[int] | LongList[float]
    dtype: Literal["int64", "float32"]
    shape: LongList[int] | None = None
    sparse_crow_indices: LongList[int] | None = None
    sparse_col_indices: LongList[int] | None = None


class Cells(NamedTuple):
    """The listed cells of a table, row by row: ids int64 [M], columns int64 [M], offsets int64 [P] from 0 to M."""

    ids: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def read_table(table: gateway_pb2.TargetTable) -> Cells:
    """Returns the cells of a table. Raises InvalidInput if its fields are inconsistent."""
    ids = _flat(table.tokens.token_ids, "tokens.token_ids")
    columns = _flat(table.column_indices, "column_indices")
    offsets = _flat(table.tokens.row_offsets, "tokens.row_offsets")
    tensors.check_row_offsets(offsets, ids.size, None, f"{FIELD}.tokens.row_offsets")
    tensors.check_column_indices(columns, ids.size, table.column_count, f"{FIELD}.column_indices")
    return Cells(ids, columns, offsets)


def check_table(cells: Cells, token_count: int, vocabulary_size: int) -> None:
    """Raises InvalidInput for a table that does not fit a prompt of `token_count` tokens, or that scores nothing."""
    row_count = cells.offsets.size - 1
    if row_count != token_count - 1:
        raise _wrong(
            f"it has {row_count} rows; a prompt of {token_count} tokens needs {token_count - 1}, one for each token "
            "except the first"
        )
    wrong = np.flatnonzero((cells.ids < NOTHING) | (cells.ids >= vocabulary_size))
    if wrong.size:
        raise _wrong(
            f"it asks for token id {cells.ids[wrong[0]]}; ids are 0 .. {vocabulary_size - 1}, or -1 for no token"
        )
    if not (cells.ids != NOTHING).any():
        raise _wrong("it contains no token id; add at least one, or leave the table out")
    if cells.ids.size > _MOST_IDS:
        raise _wrong(f"it lists {cells.ids.size} cells; at most {_MOST_IDS} fit in one request")


def to_score(cells: Cells) -> sampler_pb2.TargetTokens:
    """Returns the request to the sampler: the ids, without the cells that are not scored."""
    is_asked = cells.ids != NOTHING
    before = np.concatenate(([0], np.cumsum(is_asked)))
    return sampler_pb2.TargetTokens(
        token_ids=tensors.encode(cells.ids[is_asked].astype("<i4")),
        row_offsets=tensors.encode(before[cells.offsets].astype("<i8")),
    )


def spread(cells: Cells, logprobs: bytes) -> npt.NDArray[np.float32]:
    """Returns float32 [M]: the sampler's scores, with 0.0 in the cells that are not scored. Raises Internal if they
    differ in number.
    """
    values = np.zeros(cells.ids.size, np.float32)
    is_asked = cells.ids != NOTHING
    answer = tensors.decode_floats(logprobs)
    if answer.size != is_asked.sum():
        raise Internal(f"the sampler scored {answer.size} of {is_asked.sum()} target tokens")
    values[is_asked] = answer
    return values


def table_from_json(tensor: TensorData) -> gateway_pb2.TargetTable:
    """Returns the table of a JSON tensor, int64 [P - 1, K], dense or CSR. Raises InvalidInput that names the
    problem.
    """
    if tensor.dtype != "int64":
        raise _wrong(f"dtype is {tensor.dtype}; it must be int64")
    shape = tensor.shape
    # With no columns, or with too many, the number of cells would not limit the number of rows.
    if shape is None or len(shape) != 2 or shape[0] < 0 or not 0 < shape[1] <= _INT32.max:
        raise _wrong(f"shape is {shape}; it must be [prompt tokens - 1, K], K from 1")
    values = np.asarray(tensor.data)
    if values.size and values.dtype.kind != "i":
        raise _wrong("data must be whole numbers within 64 bits")
    values = values.astype(np.int64)
    outside = values[(values < NOTHING) | (values > _INT32.max)]
    if outside.size:
        raise _wrong(f"data holds {outside[0]}; a cell is a token id, or -1 for no token")
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return _dense(values, shape)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        raise _wrong("sparse_crow_indices and sparse_col_indices must be given together")
    return _sparse(values, shape, tensor.sparse_crow_indices, tensor.sparse_col_indices)


def _dense(values: npt.NDArray[np.int64], shape: list[int]) -> gateway_pb2.TargetTable:
    if math.prod(shape) != values.size:
        raise _wrong(f"data has {values.size} values, but shape is {shape}")
    rows, columns = np.nonzero(values.reshape(shape) != NOTHING)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=shape[0]))))
    return _table(values[values != NOTHING], columns, offsets, shape[1], is_sparse=False)


def _sparse(
    values: npt.NDArray[np.int64], shape: list[int], crow_indices: list[int], col_indices: list[int]
) -> gateway_pb2.TargetTable:
    offsets, columns = np.asarray(crow_indices), np.asarray(col_indices)
    tensors.check_row_offsets(offsets, values.size, shape[0], f"{FIELD}.sparse_crow_indices")
    tensors.check_column_indices(columns, values.size, shape[1], f"{FIELD}.sparse_col_indices")
    return _table(values, columns.astype(np.int64), offsets, shape[1], is_sparse=True)


def _table(
    ids: npt.NDArray, columns: npt.NDArray, offsets: npt.NDArray, column_count: int, is_sparse: bool
) -> gateway_pb2.TargetTable:
    return gateway_pb2.TargetTable(
        tokens=sampler_pb2.TargetTokens(
            token_ids=tensors.encode(ids.astype("<i4")), row_offsets=tensors.encode(offsets.astype("<i8"))
        ),
        column_count=column_count,
        column_indices=tensors.encode(columns.astype("<i4")),
        sparse=is_sparse,
    )


def fill_targets(table: gateway_pb2.TargetTable, logprobs: bytes, message: tinker_pb2.Tensor) -> None:
    """Writes the scores of a table, float32, in the table's own shape and layout; 0.0 in cells that are not scored."""
    cells = read_table(table)
    values = spread(cells, logprobs)
    row_count = cells.offsets.size - 1
    message.dtype = tinker_pb2.DTYPE_FLOAT32
    message.shape.extend([row_count, table.column_count])
    if table.sparse:
        message.sparse_csr.values = tensors.encode_floats(values)
        message.sparse_csr.crow_indices = cells.offsets.astype("<i8").tobytes()
        message.sparse_csr.col_indices = cells.columns.astype("<i8").tobytes()
        return
    dense = np.zeros((row_count, table.column_count), np.float32)
    dense[np.repeat(np.arange(row_count), np.diff(cells.offsets)), cells.columns] = values
    message.dense = tensors.encode_floats(dense)


def fill_alt_tokens(alt: sampler_pb2.AltTokens, message: tinker_pb2.PromptAltTokens) -> None:
    """Writes drawn tokens, int32, and their log-probabilities, float32, each [P - 1, k]."""
    for source, target, dtype in (
        (alt.token_ids, message.tokens, tinker_pb2.DTYPE_INT32),
        (alt.logprobs, message.logprobs, tinker_pb2.DTYPE_FLOAT32),
    ):
        target.dense, target.dtype = source.data, dtype
        target.shape.extend(source.shape)


def tensor_json(tensor: tinker_pb2.Tensor) -> dict[str, object]:
    """Returns a tensor as JSON values. An int32 tensor becomes int64, the only integer type of JSON tensors."""
    is_sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    data = tensor.sparse_csr.values if is_sparse else tensor.dense
    is_float = tensor.dtype == tinker_pb2.DTYPE_FLOAT32
    values = tensors.decode_floats(data) if is_float else tensors.decode_tokens(data)
    answer: dict[str, object] = {
        "data": values.tolist(),
        "dtype": "float32" if is_float else "int64",
        "shape": list(tensor.shape),
    }
    if is_sparse:
        answer["sparse_crow_indices"] = np.frombuffer(tensor.sparse_csr.crow_indices, "<i8").tolist()
        answer["sparse_col_indices"] = np.frombuffer(tensor.sparse_csr.col_indices, "<i8").tolist()
    return answer


def _flat(tensor: tensor_pb2.Tensor, name: str) -> npt.NDArray[np.int64]:
    array = tensors.decode(tensor, f"{FIELD}.{name}")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _wrong(f"{name} must be a list of whole numbers")
    return array.astype(np.int64)


def _wrong(message: str) -> InvalidInput:
    return InvalidInput(f"{FIELD}: {message}", field=FIELD)


def sequence_ids(request_id: str, count: int) -> list[str]:
    """Returns the ids of the sequences that a sample request will return."""
    return [f"{request_id}:{index}" for index in range(count)]


def delta_of_sequence(blob: bytes, index: str) -> sampler_pb2.SequenceDelta | None:
    """Returns the whole sequence with this number from a result; None if there is none."""
    for record in split_messages(gateway_pb2.SampleTokensResponse, blob):
        if record.WhichOneof("event") == "delta" and str(record.delta.index) == index:
            return record.delta
    return None


def gather(
    events: Sequence[sampler_pb2.SampleResponse], request: gateway_pb2.SampleTokensRequest, cells: Cells | None
) -> list[gateway_pb2.SampleTokensResponse]:
    """Returns the target table if the request has one, the prompt, and each sequence, joined from its deltas.

    Leaves out the sequences that the sampler wrote into an answer.
    Raises Internal if the sampler left out requested data, so that an incomplete answer is never returned as complete.
    """
    sample_count = request.sample_count
    prompt: sampler_pb2.PromptResult | None = None
    written = {event.written.index for event in events if event.written.is_last}
    deltas: dict[int, list[sampler_pb2.SequenceDelta]] = {i: [] for i in range(sample_count) if i not in written}
    for event in events:
        if event.WhichOneof("event") == "prompt":
            prompt = event.prompt
        elif event.WhichOneof("event") == "written":
            continue
        elif event.delta.index in deltas:
            deltas[event.delta.index].append(event.delta)
        else:
            raise Internal(f"the sampler returned sequence {event.delta.index} for a sample_count of {sample_count}")
    records = [gateway_pb2.SampleTokensResponse(prompt=_checked_prompt(prompt, request, cells))]
    if cells is not None:
        records.insert(0, gateway_pb2.SampleTokensResponse(target_table=request.target_table))
    for index, parts in deltas.items():
        records.append(gateway_pb2.SampleTokensResponse(delta=_join(index, parts)))
        whole = records[-1].delta
        if request.routed_experts and not whole.HasField("routed_experts"):
            raise Internal(f"the sampler returned no experts of sequence {index}")
        if request.sampled_support and 4 * whole.sampled_support.count(0) != len(whole.tokens):
            raise Internal(f"the sampler returned no support of a token of sequence {index}")
    return records


def _checked_prompt(
    prompt: sampler_pb2.PromptResult | None, request: gateway_pb2.SampleTokensRequest, cells: Cells | None
) -> sampler_pb2.PromptResult:
    prompt = prompt or sampler_pb2.PromptResult()
    if cells is not None:
        spread(cells, prompt.target_logprobs)
    for asked, name in ((request.top_prompt_logprobs, "top_logprobs"), (request.alt_token_count, "alt_tokens")):
        if asked and not prompt.HasField(name):
            raise Internal(f"the sampler returned no {name} for the prompt")
    if request.prompt_logprobs and not prompt.logprobs:
        raise Internal("the sampler returned no logprobs for the prompt")
    return prompt


Makers = list[tuple[str, int]]
"""The snapshots that made the tokens of a sequence, in order, each with the number of its tokens."""


def makers_of(whole: sampler_pb2.SequenceDelta) -> Makers:
    made = [(one.snapshot_id, one.token_count) for one in whole.snapshots]
    return made or [(whole.snapshot_id, len(whole.tokens) // 4)]


def _join(index: int, parts: list[sampler_pb2.SequenceDelta]) -> sampler_pb2.SequenceDelta:
    if not parts or parts[-1].finish_reason == sampler_pb2.FINISH_REASON_UNSPECIFIED:
        raise Internal(f"the sampler's stream ended before sequence {index} was complete")
    whole = sampler_pb2.SequenceDelta(
        index=index,
        tokens=b"".join(part.tokens for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        finish_reason=parts[-1].finish_reason,
        snapshot_id=parts[-1].snapshot_id,
        sampled_support=b"".join(part.sampled_support for part in parts),
    )
    makers = [
        (name, sum(len(one.tokens) // 4 for one in of)) for name, of in groupby(parts, lambda one: one.snapshot_id)
    ]
    if len(makers) > 1:
        whole.snapshots.extend(
            sampler_pb2.SnapshotTokens(snapshot_id=name, token_count=count) for name, count in makers
        )
    if parts[-1].HasField("routed_experts"):
        whole.routed_experts.CopyFrom(parts[-1].routed_experts)
    tops = [part.top_logprobs for part in parts if part.HasField("top_logprobs")]
    for name in ("token_ids", "logprobs") if tops else ():
        rows = [tensors.decode(getattr(top, name)) for top in tops]
        getattr(whole.top_logprobs, name).CopyFrom(tensors.encode(np.concatenate(rows)))
    return whole


def _sample(blob: bytes) -> tinker_pb2.SampleResponse:
    response = tinker_pb2.SampleResponse()
    table: gateway_pb2.TargetTable | None = None
    for record in split_messages(gateway_pb2.SampleTokensResponse, blob):
        match record.WhichOneof("event"):
            case "target_table":
                table = record.target_table
            case "prompt":
                _prompt(record.prompt, table, response)
            case _:
                _sequence(record.delta, response.sequences.add())
    return response


def _prompt(
    prompt: sampler_pb2.PromptResult, table: gateway_pb2.TargetTable | None, response: tinker_pb2.SampleResponse
) -> None:
    response.prompt_cache_hit_tokens = prompt.cached_token_count
    if prompt.logprobs:
        response.prompt_logprobs = prompt.logprobs
    if prompt.HasField("top_logprobs"):
        _top(prompt.top_logprobs, response.topk_prompt_logprobs)
    if table is not None:
        fill_targets(table, prompt.target_logprobs, response.target_prompt_logprobs)
    if prompt.HasField("alt_tokens"):
        fill_alt_tokens(prompt.alt_tokens, response.prompt_alt_tokens)


def _sequence(delta: sampler_pb2.SequenceDelta, sequence: tinker_pb2.SampledSequence) -> None:
    sequence.stop_reason = _STOP_REASONS[delta.finish_reason]
    sequence.tokens = delta.tokens
    sequence.logprobs = delta.logprobs
    if delta.HasField("top_logprobs"):
        _top(delta.top_logprobs, sequence.topk_sampled_logprobs)


def _top(top: sampler_pb2.TopLogprobs, message: tinker_pb2.TopkLogprobs) -> None:
    message.token_ids, message.logprobs = top.token_ids.data, top.logprobs.data
    message.length, message.k = top.token_ids.shape


def _sample_json(blob: bytes) -> dict[str, Any]:
    response = _sample(blob)
    sequences = [_sequence_json(sequence) for sequence in response.sequences]
    answer: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if response.HasField("prompt_logprobs"):
        answer["prompt_logprobs"] = _numbers(response.prompt_logprobs)
    if response.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _top_json(response.topk_prompt_logprobs)
    if response.HasField("target_prompt_logprobs"):
        answer["target_prompt_logprobs"] = tensor_json(response.target_prompt_logprobs)
    if response.HasField("prompt_alt_tokens"):
        alt = response.prompt_alt_tokens
        tokens, logprobs = tensor_json(alt.tokens), tensor_json(alt.logprobs)
        answer["prompt_alt_tokens"] = {"tokens": tokens, "logprobs": logprobs}
    return answer | {"prompt_cache_hit_tokens": response.prompt_cache_hit_tokens}


def _sequence_json(sequence: tinker_pb2.SampledSequence) -> dict[str, Any]:
    answer = {
        "stop_reason": "stop" if sequence.stop_reason == tinker_pb2.STOP_REASON_STOP else "length",
        "tokens": tensors.decode_tokens(sequence.tokens).tolist(),
        "logprobs": _numbers(sequence.logprobs),
    }
    if sequence.HasField("topk_sampled_logprobs"):
        answer["topk_logprobs"] = _top_json(sequence.topk_sampled_logprobs)
    return answer


def _top_json(top: tinker_pb2.TopkLogprobs) -> list[list[list[float]] | None]:
    ids = tensors.decode_tokens(top.token_ids).reshape(top.length, top.k)
    logprobs = tensors.decode_floats(top.logprobs).reshape(top.length, top.k)
    rows = zip(ids, logprobs, strict=True)
    pairs = [[[int(i), float(p)] for i, p in zip(*row, strict=True) if p > -99999.0] for row in rows]
    return [row or None for row in pairs]


def _numbers(data: bytes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in _floats(data)]


def _floats(data: bytes) -> Iterable[float]:
    values: list[float] = tensors.decode_floats(data).tolist()
    return values


def _sample_proto(blob: bytes) -> bytes:
    return _sample(blob).SerializeToString(deterministic=True)


ENCODERS = {Kind.SAMPLE: ResultEncoder(_sample_json, _sample_proto)}
