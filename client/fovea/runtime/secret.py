"""The secret that the services of one Fovea share; callers of renderer, sampler and trainer must send it.

It travels with every call. It keeps out other programs that can connect. It does not protect against readers of the
network; `fovea.runtime.tls` does.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_status import rpc_status

from fovea.runtime.interceptors import ERRORS
from fovea.wire.errors import Unauthenticated, to_status

VARIABLE = "FOVEA_SERVICE_SECRET"
FILE_VARIABLE = "FOVEA_SERVICE_SECRET_FILE"
"""Variables with the secret, or with a file that contains it.

Unlike other settings, they have the same name for every service and client. There is no option, because other users can
read command lines.
"""

KEY = "fovea-service-secret"
"""Metadata key that carries the secret."""

_LEAST = 16
_OPEN = "/grpc.health."  # a kubelet's probes send no secret


def service_secret() -> str:
    """Returns the secret of this process, from its environment or a file; empty if there is none.

    Raises ValueError if the secret is too short or not printable ASCII, or the file cannot be read.
    """
    name = VARIABLE if os.environ.get(VARIABLE) else FILE_VARIABLE
    found = os.environ.get(name, "")
    if found and name == FILE_VARIABLE:
        try:
            found = Path(found).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{FILE_VARIABLE}: {error}") from None
    if found and (len(found) < _LEAST or not found.isascii() or not found.isprintable()):
        raise ValueError(f"{name} must have at least {_LEAST} printable ASCII characters")
    return found


def metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that a client of a service sends with every call."""
    secret = service_secret()
    return ((KEY, secret),) if secret else ()


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that rejects calls without the secret, with UNAUTHENTICATED, before it reads their data.

    Health checks need no secret.

    Args:
        secret: The secret; not empty.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method: str = handler_call_details.method
        given = dict(handler_call_details.invocation_metadata or ()).get(KEY, "")
        if method.startswith(_OPEN) or hmac.compare_digest(str(given).encode(), self._secret):
            return await continuation(handler_call_details)
        ERRORS.labels("refused", Unauthenticated.reason).inc()
        return self._refusal


async def _refuse(_: object, context: Any) -> None:
    error = Unauthenticated(
        f"this service accepts only calls with its Fovea's secret; start the caller with the same {VARIABLE}"
    )
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
