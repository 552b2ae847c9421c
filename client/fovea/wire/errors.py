"""The error classes of Fovea. Each one travels as a gRPC status with one ErrorInfo and is raised again as its class.

    FoveaError
        InvalidInput             INVALID_ARGUMENT     400  user     a field is invalid; names the field and the fix
            ContextOverflow      INVALID_ARGUMENT     400  user     prompt plus new tokens exceed the context window
        NotFound                 NOT_FOUND            404  user     no such session, model, checkpoint or future
            FeatureEvicted       NOT_FOUND            404  server   vision tensors were evicted; render again
        AlreadyExists            ALREADY_EXISTS       400  user     a name is in use (409 would stall the SDK)
        FailedPrecondition       FAILED_PRECONDITION  400  user     valid request, but not in the current state
            SnapshotNotLoaded    FAILED_PRECONDITION  503  server   the sampler needs a weight push first
            NotFinite            FAILED_PRECONDITION  400  user     the weights overflow, so they cannot be sampled
            SessionEnded         FAILED_PRECONDITION  410  user     the session has ended
            EndsTrainer          FAILED_PRECONDITION  400  user     the command crashed the trainer more than once
        Expired                  FAILED_PRECONDITION  410  user     a result exceeded its retention time
        ResourceExhausted        RESOURCE_EXHAUSTED   429  user     a quota or a queue is full
            DiskFull             RESOURCE_EXHAUSTED   507  server   storage is full
            StorageBehind        RESOURCE_EXHAUSTED   503  server   storage is slow; retry shortly
        PayloadTooLarge          RESOURCE_EXHAUSTED   413  user     the body exceeds the limit
        Unauthenticated          UNAUTHENTICATED      401  user     the API key is missing or invalid
        PermissionDenied         PERMISSION_DENIED    403  user     the object belongs to another owner
        Unimplemented            UNIMPLEMENTED        400  user     Fovea does not support this field or call
        Cancelled                CANCELLED            400  user     the caller cancelled the request
        DeadlineExceeded         DEADLINE_EXCEEDED    504  server   the call took too long
            RequestTimeout       DEADLINE_EXCEEDED    408  user     the request body did not arrive in time
        Unavailable              UNAVAILABLE          503  server   a service is down; retry if a repeat is harmless
            BrokenOff            UNAVAILABLE          503  server   the call broke; it may or may not have run
            ModelLost            UNAVAILABLE          503  server   the trainer that held the model is gone
        Internal                 INTERNAL             500  server   a bug in Fovea; the log has the request id

To add an error, add a class with its own `reason` and list it in the tree above. The lookup tables below are built
from the classes.
"""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar, Literal

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "fovea"
STATUS_DETAILS = "grpc-status-details-bin"
"""Trailing metadata key under which gRPC carries a status with its details."""
Category = Literal["user", "server"]


class FoveaError(Exception):
    """Base of all errors that cross a process boundary.

    Args:
        message: Text for the user: the problem, the value seen, and the value expected.
        field: Path of the invalid field, such as `data[3].loss_inputs.weights`.
        metadata: Further facts for programs, as strings.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"

    def __init__(self, message: str, field: str | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.metadata = {name: str(value) for name, value in metadata.items()}

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.field, self.metadata)


class InvalidInput(FoveaError):
    """A field is invalid."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_INPUT"
    http_status = 400
    category: ClassVar[Category] = "user"


class ContextOverflow(InvalidInput):
    """The prompt plus the new tokens exceed the context window."""

    reason = "CONTEXT_OVERFLOW"


class NotFound(FoveaError):
    """The requested object does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"
    http_status = 404
    category: ClassVar[Category] = "user"


class FeatureEvicted(NotFound):
    """The vision tensors are no longer cached; rendering the image again restores them."""

    reason = "FEATURE_EVICTED"
    category: ClassVar[Category] = "server"


class AlreadyExists(FoveaError):
    """The name is already in use."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ALREADY_EXISTS"
    http_status = 400
    category: ClassVar[Category] = "user"


class FailedPrecondition(FoveaError):
    """The request is valid, but not in the current state."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"
    http_status = 400
    category: ClassVar[Category] = "user"


class SnapshotNotLoaded(FailedPrecondition):
    """The sampler does not hold the snapshot; a weight push loads it."""

    reason, http_status = "SNAPSHOT_NOT_LOADED", 503
    category: ClassVar[Category] = "server"


class NotFinite(FailedPrecondition):
    """Log-probabilities are NaN or infinite because the weights are too large for the model's arithmetic."""

    reason = "NOT_FINITE"


class SessionEnded(FailedPrecondition):
    """The session has ended."""

    reason, http_status = "SESSION_ENDED", 410

    @classmethod
    def of(cls, session_id: str, end_reason: str | None) -> "SessionEnded":
        """Returns the error of a use after the end, with `end_reason` in its metadata."""
        known = {"end_reason": end_reason} if end_reason else {}
        return cls(f"session {session_id} has ended ({end_reason or 'unknown reason'}): open a new one", **known)


class EndsTrainer(FailedPrecondition):
    """The trainer crashed more than once while it ran this command, so the command is not retried."""

    reason = "ENDS_TRAINER"


class Expired(FailedPrecondition):
    """A result exceeded its retention time and was deleted."""

    reason, http_status = "EXPIRED", 410


class ResourceExhausted(FoveaError):
    """A quota or a queue is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "RESOURCE_EXHAUSTED"
    http_status = 429
    category: ClassVar[Category] = "user"


class DiskFull(ResourceExhausted):
    """Storage is full. Nothing incomplete is left there."""

    reason, http_status = "DISK_FULL", 507
    category: ClassVar[Category] = "server"


class StorageBehind(ResourceExhausted):
    """Storage works, but its queue of pending writes is full. The same request succeeds a little later."""

    reason, http_status = "STORAGE_BEHIND", 503
    category: ClassVar[Category] = "server"


class PayloadTooLarge(ResourceExhausted):
    """A body exceeds the size limit."""

    reason, http_status = "PAYLOAD_TOO_LARGE", 413


class Unauthenticated(FoveaError):
    """The API key is missing or invalid."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"
    http_status = 401
    category: ClassVar[Category] = "user"


class PermissionDenied(FoveaError):
    """The object belongs to another owner."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"
    http_status = 403
    category: ClassVar[Category] = "user"


class Unimplemented(FoveaError):
    """Fovea does not support this field or call."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNIMPLEMENTED"
    http_status = 400
    category: ClassVar[Category] = "user"


class Cancelled(FoveaError):
    """The caller cancelled the request."""

    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"
    http_status = 400
    category: ClassVar[Category] = "user"


class DeadlineExceeded(FoveaError):
    """The call took too long."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"
    http_status = 504
    category: ClassVar[Category] = "server"


class RequestTimeout(DeadlineExceeded):
    """The request body did not arrive in time."""

    reason, http_status = "REQUEST_TIMEOUT", 408
    category: ClassVar[Category] = "user"


class Unavailable(FoveaError):
    """A service is down."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"
    http_status = 503
    category: ClassVar[Category] = "server"


class BrokenOff(Unavailable):
    """The connection broke or the service ended before it answered. The request may or may not have run."""

    reason = "BROKEN_OFF"


class ModelLost(Unavailable):
    """The trainer that held the model is gone."""

    reason = "MODEL_LOST"


class Internal(FoveaError):
    """A bug in Fovea."""


class ServerPaths:
    """A filter that removes the server's paths from errors before clients see them. Logs keep the full text.

    Args:
        roots: Folders and fsspec URLs under which checkpoints are stored.
    """

    def __init__(self, roots: Iterable[str]) -> None:
        forms = {form for root in roots for form in (root, os.path.realpath(root), root.partition("://")[2]) if form}
        listed = "|".join(re.escape(form.rstrip("/")) for form in sorted(forms, key=len, reverse=True))
        self._below = re.compile(rf"(?:file://)?(?:{listed})(?P<rest>/[\w.@+=/-]*)?(?![\w-])") if forms else _PATH

    def hide(self, error: FoveaError) -> FoveaError:
        """Returns the error with each path of the server replaced by the file's name or by a phrase."""
        message = self._hidden(error.message)
        metadata = {name: self._hidden(value) for name, value in error.metadata.items()}
        if message == error.message and metadata == error.metadata:
            return error
        return _rebuild(type(error), message, error.field, metadata)

    def _hidden(self, text: str) -> str:
        return _PATH.sub(_stand_in, self._below.sub(_stand_in, text))


_PATH = re.compile(r"(?:(?<!['\"])\bfile://|(?<![\w:/.~'\"-]))(?!\S*\bv1/)(?P<rest>(?:/[\w.@+=-]+){2,})/?")
"""A path without quotes around it. Paths in quotes are the client's own, and paths of the API contain v1."""
_FILE = re.compile(r"[\w.@+=-]+\.(?:json|safetensors|metadata|distcp|npy|db)")


def _stand_in(found: re.Match[str]) -> str:
    rest = found["rest"] or ""
    name = rest.rstrip("/").rpartition("/")[2]
    if _FILE.fullmatch(name):
        return name
    return "the checkpoint" if rest.strip("/") else "the checkpoints"


def _subclasses(cls: type[FoveaError]) -> list[type[FoveaError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


_BY_REASON = {cls.reason: cls for cls in _subclasses(FoveaError)}
_BY_CODE: dict[grpc.StatusCode, type[FoveaError]] = {}
for _cls in _subclasses(FoveaError):
    _BY_CODE.setdefault(_cls.code, _cls)
_BY_CODE[grpc.StatusCode.INTERNAL] = Internal
_BY_REASON["INTERNAL"] = Internal
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _rebuild(cls: type[FoveaError], message: str, field: str | None, metadata: dict[str, str]) -> FoveaError:
    return cls(message, field, **metadata)


def similar(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown name: the known ones that are like it, or empty."""
    found = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def forget_frames(error: BaseException | None) -> None:
    """Removes the tracebacks of a handled error and of its causes.

    A traceback holds the frames of the failed work, and thereby its request: as long as a stored error lives, or until
    the next garbage collection if a frame refers to the error.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def to_status(error: FoveaError) -> status_pb2.Status:
    """Converts an error to a google.rpc.Status with its code, its message and exactly one ErrorInfo."""
    metadata = dict(error.metadata)
    if error.field:
        metadata["field"] = error.field
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(code=error.code.value[0], message=error.message, details=[detail])


def from_status(status: status_pb2.Status) -> FoveaError:
    """Converts a status back to the error given to `to_status`. Without Fovea's ErrorInfo, only the code is used."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            metadata = dict(info.metadata)
            field = metadata.pop("field", None)
            cls = _BY_REASON.get(info.reason) or _class_of_code(status.code)
            return _rebuild(cls, status.message, field, metadata)
    return _class_of_code(status.code)(status.message)


def from_rpc_error(error: grpc.RpcError) -> FoveaError:
    """Returns the error of a failed call, as the server raised it."""
    trailing: Any = error.trailing_metadata() or ()  # type: ignore[attr-defined]
    for name, value in trailing:
        if name == STATUS_DETAILS:
            return from_status(status_pb2.Status.FromString(value))
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
    details: str = error.details() or code.name  # type: ignore[attr-defined]
    return _class_of_code(code.value[0])(details)


def _class_of_code(code: int) -> type[FoveaError]:
    return _BY_CODE.get(_CODES.get(code, grpc.StatusCode.INTERNAL), Internal)
