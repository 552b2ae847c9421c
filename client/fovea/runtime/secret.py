"""The secret that the services of one Fovea share; callers of renderer, sampler and trainer must send it.

It travels with every call. It keeps out other programs that can connect. It does not protect against readers of the
network; `fovea.runtime.tls` does.
"""

import os
from pathlib import Path

VARIABLE = "FOVEA_SERVICE_SECRET"
FILE_VARIABLE = "FOVEA_SERVICE_SECRET_FILE"
"""Variables with the secret, or with a file that contains it.

Unlike other settings, they have the same name for every service and client. There is no option, because other users can
read command lines.
"""

KEY = "fovea-service-secret"
"""Metadata key that carries the secret."""

_LEAST = 16


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
