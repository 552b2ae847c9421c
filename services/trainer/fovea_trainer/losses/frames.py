"""The protocol between a rank and the process that evaluates its traced losses.

A request consists of a header, the graph, one row of numbers per tensor, and the elements, grouped by dtype. An answer
consists of a header and either results or an error. The size of the results follows from the request. An answer
contains only numbers and one line of text, because the process has run a tenant's graph and cannot be trusted.

Shapes: D datums, I inputs per datum, M metrics, L log-probabilities of all datums together.
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
"""The first message of a worker: its process id."""

PROGRESS = struct.Struct("<qq")
"""The progress of a worker, in memory shared with its rank: index of the datum in the request, index of the node."""

_REQUEST = struct.Struct("<QQQQQ")
"""Header of a request: bytes of the graph, D, I, M, and 1 if gradients are wanted."""

_ANSWER = struct.Struct("<qQ")
"""Header of an answer: index of the datum that failed or -1, and bytes of the message."""

_DTYPES = (torch.int64, torch.int32, torch.float32)
"""Dtypes in the order of sending. Larger ones come first, so that all elements are aligned."""

_MAX_MESSAGE = 4000
_ROW = 4
"""Numbers per tensor in a request: dtype, number of dimensions, and two extents."""

Read = Callable[[int], bytearray]
"""Reads exactly so many bytes, waiting for them."""


class FrameError(Exception):
    """The error for received bytes that are not an answer to the request."""


@dataclass(frozen=True)
class Request:
    """A request to evaluate datums.

    Args:
        graph: A serialized `CustomLoss`.
        datums: The inputs of each datum in the graph's order, log-probabilities first; int64, int32 or float32.
        metric_count: M.
        backward: True if gradients are wanted.
    """

    graph: bytes
    datums: Sequence[Sequence[Tensor]]
    metric_count: int
    backward: bool

    @property
    def logprob_count(self) -> int:
        """L, the number of log-probabilities of all datums together."""
        return sum(inputs[0].numel() for inputs in self.datums)


@dataclass(frozen=True)
class Answer:
    """The results of all datums.

    Args:
        losses: float32 [D].
        metrics: float64 [D, M].
        gradients: float32 [L], the gradient of each loss with respect to its log-probabilities; empty without backward.
    """

    losses: npt.NDArray[np.float32]
    metrics: npt.NDArray[np.float64]
    gradients: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Failure:
    """The error of the first datum without a loss. Later datums were not evaluated.

    Args:
        position: Index of the datum in the request.
        message: The reason.
    """

    position: int
    message: str


def reader(link: socket.socket, deadline: float | None = None) -> Read:
    """Returns a function that reads from a socket.

    That function raises TimeoutError after the deadline, EOFError if the peer has closed the connection, and other
    OSErrors of the socket.

    Args:
        link: The socket.
        deadline: A reading of `time.monotonic`; None waits forever.
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
    """Returns the seconds until a deadline, a reading of `time.monotonic`.

    Raises:
        TimeoutError: The deadline has passed.
    """
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def write_request(request: Request) -> list[bytes | memoryview]:
    """Returns the bytes of a request as consecutive buffers. Tensors may be on any device."""
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
    """Reads a request that `write_request` wrote. Each tensor gets its own memory."""
    graph_bytes, datum_count, inputs, metric_count, backward = _REQUEST.unpack(read(_REQUEST.size))
    graph = bytes(read(graph_bytes))
    count = datum_count * inputs
    rows = np.frombuffer(read(count * _ROW * 8), np.int64).reshape(count, _ROW).tolist()
    shapes = [tuple(row[2 : 2 + row[1]]) for row in rows]
    tensors: list[Tensor] = [torch.empty(0)] * count
    for code, dtype in enumerate(_DTYPES):
        positions = [position for position, row in enumerate(rows) if row[0] == code]
        sizes = [math.prod(shapes[position]) for position in positions]
        if not sum(sizes):
            flat = torch.empty(0, dtype=dtype)
        else:
            flat = torch.frombuffer(read(sum(sizes) * dtype.itemsize), dtype=dtype)
        for position, part in zip(positions, torch.split(flat, sizes), strict=True):
            tensors[position] = part.view(shapes[position]).clone()
    datums = [tensors[first : first + inputs] for first in range(0, count, inputs)]
    return Request(graph, datums, metric_count, bool(backward))


def write_answer(answer: Answer | Failure) -> Iterator[bytes]:
    """Yields the bytes of an answer in consecutive buffers."""
    if isinstance(answer, Failure):
        message = answer.message.encode("utf-8", "replace")[:_MAX_MESSAGE]
        yield _ANSWER.pack(answer.position, len(message)) + message
        return
    yield _ANSWER.pack(-1, 0)
    yield answer.metrics.tobytes()
    yield answer.losses.tobytes()
    yield answer.gradients.tobytes()


def read_answer(read: Read, request: Request) -> Answer | Failure:
    """Reads the answer to a request.

    Raises:
        FrameError: The bytes cannot be an answer to this request.
    """
    position, message_bytes = _ANSWER.unpack(read(_ANSWER.size))
    datum_count = len(request.datums)
    if not -1 <= position < datum_count or message_bytes > _MAX_MESSAGE:
        raise FrameError(f"an answer about datum {position} of {datum_count} with {message_bytes} bytes of text")
    if position >= 0:
        text = read(message_bytes).decode("utf-8", "replace")
        return Failure(position, "".join(letter if letter.isprintable() else "?" for letter in text))
    metrics = np.frombuffer(read(datum_count * request.metric_count * 8), np.float64)
    losses = np.frombuffer(read(datum_count * 4), np.float32)
    gradients = np.frombuffer(read(request.logprob_count * 4 if request.backward else 0), np.float32)
    if not np.isfinite(gradients).all():
        raise FrameError("a gradient that is not finite")
    return Answer(losses, metrics.reshape(datum_count, request.metric_count), gradients)
