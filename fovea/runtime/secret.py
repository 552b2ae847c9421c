"""The secret that the services of one Fovea share: who calls renderer, sampler or trainer proves with it who it is.

It travels with every call: it keeps out who can connect; who reads the network is kept out by `fovea.runtime.tls`.
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
"""The same for every service and every client, unlike other settings. No argument: others may read a command line."""

KEY = "fovea-service-secret"
"""Name of the metadata that carries it."""

_LEAST = 16
_OPEN = "/grpc.health."  # a kubelet's probes bring nothing


def service_secret() -> str:
    """The secret of this process, from its environment or the file that it names; empty if there is none.

    Raises ValueError for one that is short or cannot be sent, and for a file that cannot be read.
    """
    name = VARIABLE if os.environ.get(VARIABLE) else FILE_VARIABLE
    found = os.environ.get(name, "")
    if found and name == FILE_VARIABLE:
        try:
            found = Path(found).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{FILE_VARIABLE}: {error}") from None
    if found and (len(found) < _LEAST or not found.isascii() or not found.isprintable()):
        raise ValueError(f"{name} must give at least {_LEAST} printable ASCII characters")
    return found


def metadata() -> tuple[tuple[str, str], ...]:
    """What a client of a service sends with every call."""
    secret = service_secret()
    return ((KEY, secret),) if secret else ()


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Refuses with UNAUTHENTICATED whatever comes without the secret, before anything of it is read; not health checks.

    Args:
        secret: Not empty.
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
        f"this service takes calls with the secret of its Fovea alone: give the caller the same {VARIABLE}"
    )
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
