"""What a rank and the process that evaluates its traced losses tell each other, as bytes.

A request has a head, the graph, a row of numbers for each tensor, and the elements, those of one type together. An
answer has a head and either what was asked for, whose size the asker knows beforehand, or what went wrong. Nothing in
an answer is more than numbers and a line of text: it comes from where a tenant's graph has run.

Shapes: D datums, I inputs of each, M metrics, L log-probabilities of all datums together.
"""

import math
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HELLO = struct.Struct("<q")
"""What a worker says first: its process id."""

PROGRESS = struct.Struct("<qq")
"""Where a worker is, in memory that its rank sees: place of the datum, index of the node."""

_REQUEST = struct.Struct("<QQQQQ")
"""Bytes of the graph, D, I, M, and whether gradients are wanted."""

_ANSWER = struct.Struct("<qQ")
"""The place of the datum that failed, -1 if none did; bytes of the message."""

_DTYPES = (torch.int64, torch.int32, torch.float32)
"""In the order in which their elements are sent, so that all of them are aligned."""

_MAX_MESSAGE = 4000
_ROW = 4
"""Numbers of a tensor: its type, its rank, and two extents."""

Read = Callable[[int], bytearray]
"""Reads so many bytes, and waits for them."""


class FrameError(Exception):
    """Bytes that are no answer to what was asked."""


@dataclass(frozen=True)
class Request:
    """Datums to evaluate.

    Args:
        graph: A serialized `CustomLoss`.
        datums: For each datum, its inputs in the graph's order, log-probabilities first; int64, int32 or float32.
        metric_count: M.
        backward: Whether gradients are wanted.
    """

    graph: bytes
    datums: Sequence[Sequence[Tensor]]
    metric_count: int
    backward: bool

    @property
    def logprob_count(self) -> int:
        """L: log-probabilities of all datums together."""
        return sum(inputs[0].numel() for inputs in self.datums)


@dataclass(frozen=True)
class Answer:
    """What came of all datums.

    Args:
        losses: float32 [D].
        metrics: float64 [D, M].
        gradients: float32 [L], of each loss to its log-probabilities; empty without backward.
    """

    losses: npt.NDArray[np.float32]
    metrics: npt.NDArray[np.float64]
    gradients: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Failure:
    """Why the datum at `place` has no loss; those after it were not evaluated."""

    place: int
    message: str


def reader(link: socket.socket, deadline: float | None = None) -> Read:
    """Reads from a link until a deadline of `time.monotonic`, or for ever.

    Raises TimeoutError after the deadline, EOFError if the other side is gone, OSError.
    """

    def read(size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            link.settimeout(None if deadline is None else time_left(deadline))
            if not (count := link.recv_into(view)):
                raise EOFError
            view = view[count:]
        return data

    return read


def time_left(deadline: float) -> float:
    """Seconds until a deadline of `time.monotonic`. Raises TimeoutError after it."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def write_request(request: Request) -> list[bytes | memoryview]:
    """The bytes of a request, to be sent one after another. Tensors may be on any device."""
    tensors = [tensor.detach() for inputs in request.datums for tensor in inputs]
    rows = np.array(
        [(_DTYPES.index(one.dtype), one.ndim, *one.shape, *(0,) * (2 - one.ndim)) for one in tensors], np.int64
    )
    inputs = len(request.datums[0])
    head = _REQUEST.pack(len(request.graph), len(request.datums), inputs, request.metric_count, int(request.backward))
    parts: list[bytes | memoryview] = [head, request.graph, rows.tobytes()]
    filled = [tensor.reshape(-1) for tensor in tensors if tensor.numel()]
    of_type = ([tensor for tensor in filled if tensor.dtype == dtype] for dtype in _DTYPES)
    return parts + [torch.cat(own).cpu().numpy().data.cast("B") for own in of_type if own]


def read_request(read: Read) -> Request:
    """What `write_request` was given; each tensor in memory of its own."""
    graph_bytes, datum_count, inputs, metric_count, backward = _REQUEST.unpack(read(_REQUEST.size))
    graph = bytes(read(graph_bytes))
    count = datum_count * inputs
    rows = np.frombuffer(read(count * _ROW * 8), np.int64).reshape(count, _ROW).tolist()
    shapes = [tuple(row[2 : 2 + row[1]]) for row in rows]
    tensors: list[Tensor] = [torch.empty(0)] * count
    for code, dtype in enumerate(_DTYPES):
        places = [place for place, row in enumerate(rows) if row[0] == code]
        sizes = [math.prod(shapes[place]) for place in places]
        if not sum(sizes):
            flat = torch.empty(0, dtype=dtype)
        else:
            flat = torch.frombuffer(read(sum(sizes) * dtype.itemsize), dtype=dtype)
        for place, part in zip(places, torch.split(flat, sizes), strict=True):
            tensors[place] = part.view(shapes[place]).clone()
    datums = [tensors[first : first + inputs] for first in range(0, count, inputs)]
    return Request(graph, datums, metric_count, bool(backward))


def write_answer(answer: Answer | Failure) -> Iterator[bytes]:
    """The bytes of an answer, to be sent one after another."""
    if isinstance(answer, Failure):
        message = answer.message.encode("utf-8", "replace")[:_MAX_MESSAGE]
        yield _ANSWER.pack(answer.place, len(message)) + message
        return
    yield _ANSWER.pack(-1, 0)
    yield answer.metrics.tobytes()
    yield answer.losses.tobytes()
    yield answer.gradients.tobytes()


def read_answer(read: Read, request: Request) -> Answer | Failure:
    """The answer to a request. Raises FrameError for one that cannot be it."""
    place, message_bytes = _ANSWER.unpack(read(_ANSWER.size))
    datum_count = len(request.datums)
    if not -1 <= place < datum_count or message_bytes > _MAX_MESSAGE:
        raise FrameError(f"an answer about datum {place} of {datum_count} with {message_bytes} bytes of text")
    if place >= 0:
        text = read(message_bytes).decode("utf-8", "replace")
        return Failure(place, "".join(letter if letter.isprintable() else "?" for letter in text))
    metrics = np.frombuffer(read(datum_count * request.metric_count * 8), np.float64)
    losses = np.frombuffer(read(datum_count * 4), np.float32)
    gradients = np.frombuffer(read(request.logprob_count * 4 if request.backward else 0), np.float32)
    if not np.isfinite(gradients).all():
        raise FrameError("a gradient that is not finite")
    return Answer(losses, metrics.reshape(datum_count, request.metric_count), gradients)
