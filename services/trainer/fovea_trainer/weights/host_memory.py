"""Copies of the state of models in host memory: for writing it to storage, and for models that leave the device."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.runtime.machine_memory import host_free_bytes
from fovea.wire.errors import FoveaError, ResourceExhausted
from fovea_trainer import trainer_metrics
from fovea_trainer.model.trained_model import AdapterModel, TrainedModel
from fovea_trainer.ranks.control_group import error_of_rank, is_out_of_memory

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_CHUNK = 2**24
"""Elements of one host tensor. Torch rounds the size of pinned memory up to a power of two, so large tensors would
waste up to half of it.
"""
AHEAD_BYTES = 2**30
"""The largest state that is copied while another is written."""
_HOST_RESERVE_BYTES = 2**30
_ROOM_AHEAD_BYTES = 8 * 2**30
"""Memory to free beyond what is missing, so that not every command of many active models must move others."""
_STEP_BYTES = 2**28
"""Memory that stays free beside the models in use, for the temporary tensors of an optimizer step."""


class HostCopies:
    """Copies of tensors on the host, in a reused buffer. On a GPU they are made while the device continues to compute.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._owner = ""
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def size_bytes(self) -> int:
        """Size of the buffer."""
        return self._memory.numel()

    def release(self) -> None:
        """Frees the buffer."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, tensors: Sequence[Tensor], owner: str) -> list[Tensor]:
        """Copies tensors as they are after all device work queued so far. The copies are valid until the next call.

        On a GPU the copies are asynchronous: call `wait` before reading them.

        Args:
            tensors: Tensors on the device.
            owner: Id of the model to which they belong, for `before_writing`.

        Returns:
            One host tensor per input, with the same shape and dtype.
        """
        sizes = [-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for t in tensors]
        if self._memory.numel() < sum(sizes):
            self.release()  # before the new one is allocated
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._stream is not None)
        parts = torch.split(self._memory[: sum(sizes)], sizes)
        copies = [
            part[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for part, t in zip(parts, tensors, strict=True)
        ]
        if self._stream is None:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            return copies
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
        self._copied, self._owner = self._stream.record_event(), owner
        return copies

    def before_writing(self, owner: str) -> None:
        """Waits until the copies of one model are made. Call it before you change or free the copied tensors.

        Commands of other models do not wait.
        """
        if self._copied is not None and self._owner == owner:
            self._copied.synchronize()

    def fetched(self, tensor: Tensor) -> Tensor:
        """Returns one tensor on the host. Waits for this copy without delaying others. Callable from any thread."""
        if self._stream is None:
            return tensor
        with torch.cuda.stream(self._stream):
            return tensor.cpu()

    def wait(self) -> None:
        """Waits until the copies are complete. Callable from any thread."""
        if self._copied is not None:
            self._copied.synchronize()


class CopiesAhead:
    """Two `HostCopies` in turn: one state is copied while the one before it is written.

    Together they take at most two times `AHEAD_BYTES`; a larger state has a buffer alone, and waits for the one before.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._turns = [_Turn(HostCopies(device)), _Turn(HostCopies(device))]

    def of(self, tensors: Sequence[Tensor], owner: str) -> list[Tensor]:
        """Does the same as `HostCopies.of`. The copies are valid until the write of `read_by` is over."""
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        oldest, newest = self._turns
        oldest.finish()
        if max(size_bytes, newest.copies.size_bytes) > AHEAD_BYTES:
            newest.finish()
            if size_bytes > AHEAD_BYTES and newest.copies.size_bytes > oldest.copies.size_bytes:
                oldest, newest = newest, oldest
            newest.copies.release()
        copies = oldest.copies.of(tensors, owner)
        self._turns = [newest, oldest]
        return copies

    def read_by(self, write: Callable[[HostCopies], "Future[int]"]) -> "Future[int]":
        """Submits the write of the newest copies, for which the function must `wait`."""
        newest = self._turns[1]
        newest.written = write(newest.copies)
        return newest.written

    def before_writing(self, owner: str) -> None:
        """Does the same as `HostCopies.before_writing`."""
        for turn in self._turns:
            turn.copies.before_writing(owner)


@dataclass
class _Turn:
    """A buffer, and the write that reads it."""

    copies: HostCopies
    written: "Future[int] | None" = None

    def finish(self) -> None:
        """Waits until nothing reads the buffer. A failure of the write is reported where it is awaited."""
        if self.written is not None:
            wait([self.written])
            self.written = None


class SaveThread:
    """The thread of rank 0 that writes saved states and snapshots, while commands run.

    Args:
        device: Device of rank 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.copies = HostCopies(device)
        """The buffer of the state that is being saved."""
        self._thread = ThreadPoolExecutor(1, "saves")

    def submit(self, write: Callable[[], int]) -> "Future[int]":
        """Runs `write` after all writes that were submitted before it. The future has only FoveaErrors."""
        return self._thread.submit(_without_foreign_errors, write)

    def close(self) -> None:
        """Waits for pending writes and stops the thread."""
        self._thread.shutdown()


def _without_foreign_errors(write: Callable[[], int]) -> int:
    try:
        return write()
    except FoveaError:
        raise
    except Exception as failure:
        logger.exception("a save failed")
        raise error_of_rank(0, failure) from failure


@dataclass(frozen=True)
class _Away:
    """The state of a model on the host: each tensor with its elements in chunks."""

    chunks: list[tuple[Tensor, list[Tensor]]]


class ModelResidence:
    """The models of this rank, on the device or on the host.

    When room is needed, the adapters that were used least recently leave the device. They return with their next
    command, with equal bits. A tensor that is away has an empty storage, so its views stay valid. Weights, moments and
    accumulated gradients are copied; the weights in the model's dtype are made again from the float32 weights.

    Args:
        device: Device of this rank.
        limit_bytes: Most bytes of adapters on the device; 0 for as many as fit.
        free_bytes: Returns the free memory of the device.
    """

    def __init__(self, device: torch.device, limit_bytes: int, free_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._free_bytes = free_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._used: dict[str, AdapterModel] = {}
        """All adapters, the least recently used one first."""
        self._busy: set[str] = set()
        self._is_host_full = False
        self._away: dict[str, _Away] = {}
        self._returned: dict[str, torch.cuda.Event | None] = {}

    def use(self, models: Iterable[TrainedModel]) -> None:
        """Brings the models of the next command to the device. They stay there until the next call.

        Raises ResourceExhausted if one does not fit beside the others. It then stays on the host, unchanged.
        """
        adapters = {model.model_id: model for model in models if isinstance(model, AdapterModel)}
        self._busy = set(adapters)
        for model_id, model in adapters.items():
            self._used.pop(model_id, None)
            self._used[model_id] = model
            if model_id in self._away:
                self._bring(model_id, model)
            if (event := self._returned.pop(model_id, None)) is not None:
                torch.cuda.current_stream().wait_event(event)
        if self._limit_bytes:
            self.leave(sum(map(_bytes_of, self._here())) - self._limit_bytes)

    def fit(self, models: Iterable[TrainedModel]) -> bool:
        """Returns True if models can be on the device at the same time, with as much room for computing."""
        sizes = {model.model_id: _bytes_of(model) for model in models if isinstance(model, AdapterModel)}
        if self._limit_bytes:
            return sum(sizes.values()) <= self._limit_bytes
        if not (missing_bytes := sum(sizes[name] for name in sizes if name in self._away)):
            return True
        others = [] if self._is_host_full else [model for model in self._here() if model.model_id not in sizes]
        return 2 * missing_bytes <= self._free_bytes() + sum(map(_bytes_of, others))

    def expect(self, models: Iterable[TrainedModel]) -> None:
        """Starts to bring models of waiting commands, as far as there is room, while the device computes."""
        for model_id in [] if self._limit_bytes else [model.model_id for model in models]:
            size_bytes = _bytes_of(self._used[model_id]) if model_id in self._away else 0
            if size_bytes and self._free_bytes() > size_bytes + max(size_bytes, _STEP_BYTES):
                try:
                    self._bring(model_id, self._used[model_id])
                except ResourceExhausted:
                    return  # The command brings its models itself, and may move others away for them.

    def leave(self, wanted_bytes: int) -> bool:
        """Moves adapters that the current command does not use to the host, until enough memory is free.

        Returns:
            True if a model was moved.
        """
        count = len(self._away)
        if wanted_bytes > 0 and self._stream is not None and not self._limit_bytes:
            wanted_bytes += _ROOM_AHEAD_BYTES
        for model_id in [name for name in self._used if name not in self._busy and name not in self._away]:
            size_bytes = _bytes_of(self._used[model_id])
            if wanted_bytes <= 0:
                break
            if self._stream is not None and host_free_bytes() < size_bytes + _HOST_RESERVE_BYTES:
                if not self._is_host_full:
                    logger.warning("idle adapters stay on the device, because the host has no room for more of them")
                self._is_host_full = True
                break
            try:
                self._away[model_id] = self._take_away(self._used[model_id])
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if not self._is_host_full:
                    logger.warning(
                        "idle adapters stay on the device, because the driver pins no more memory: %s", error
                    )
                self._is_host_full = True
                break
            self._is_host_full = False
            wanted_bytes -= size_bytes
        trainer_metrics.AWAY.set(len(self._away))
        return len(self._away) > count

    def forget(self, model_id: str) -> None:
        """Forgets a model that is freed."""
        for known in (self._used, self._away, self._returned):
            known.pop(model_id, None)
        trainer_metrics.AWAY.set(len(self._away))

    def _here(self) -> Iterator[AdapterModel]:
        return (model for model_id, model in self._used.items() if model_id not in self._away)

    def _take_away(self, model: AdapterModel) -> _Away:
        found = _Away([(tensor, self._copied(tensor)) for tensor in _state_of(model)])
        self._returned.pop(model.model_id, None)
        for tensor in _tensors_of(model):
            if self._stream is not None:
                tensor.record_stream(self._stream)
            tensor.untyped_storage().resize_(0)
        return found

    def _copied(self, tensor: Tensor) -> list[Tensor]:
        if self._stream is None:
            return [tensor.detach().clone()]
        parts = torch.split(tensor.detach(), _CHUNK)
        chunks = [torch.empty(len(part), dtype=part.dtype, pin_memory=True) for part in parts]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for part, chunk in zip(parts, chunks, strict=True):
                chunk.copy_(part, non_blocking=True)
        return chunks

    def _bring(self, model_id: str, model: AdapterModel) -> None:
        self.leave(_bytes_of(model) + _STEP_BYTES - self._free_bytes())
        try:
            for tensor in _tensors_of(model):
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        except torch.OutOfMemoryError as error:
            for tensor in _tensors_of(model):
                tensor.untyped_storage().resize_(0)
            raise ResourceExhausted(
                f"model {model_id!r} does not fit on the trainer's device beside the others in use: delete a model, or "
                "use a lower rank"
            ) from error
        model.weights.flat_grad.zero_()
        away = self._away.pop(model_id)
        trainer_metrics.AWAY.set(len(self._away))
        if self._stream is None:
            for tensor, chunks in away.chunks:
                tensor.detach().copy_(chunks[0])
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for tensor, chunks in away.chunks:
                tensor.record_stream(self._stream)
                for part, chunk in zip(torch.split(tensor.detach(), _CHUNK), chunks, strict=True):
                    part.copy_(chunk, non_blocking=True)
        self._returned[model_id] = self._stream.record_event()


def _tensors_of(model: AdapterModel) -> list[Tensor]:
    """Returns the tensors of a model on the device, each of which has a storage of its own."""
    weights = model.weights
    moments = [tensor for values in model.optimizer.moments() for tensor in values.values()]
    cast = [] if weights.cast_weights is weights.flat else [weights.cast_weights]
    return [weights.flat, weights.flat_grad, *cast, *moments]


def _state_of(model: AdapterModel) -> list[Tensor]:
    """Returns the tensors that must be copied when the model leaves the device."""
    moments = [tensor for values in model.optimizer.moments() for tensor in values.values()]
    return [model.weights.flat, *moments, *([model.weights.flat_grad] if model.has_gradients else [])]


def _bytes_of(model: AdapterModel) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_of(model))
