"""A connection to a Tinker server, with an error at once if the address or the API key is wrong."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from fovea.client.gateway import check_server
from fovea.wire.conventions import is_token

if TYPE_CHECKING:
    import tinker


def connect(base_url: str | None = None, api_key: str | None = None, **options: Any) -> tinker.ServiceClient:
    """Returns a client of a server. At a wrong address the SDK alone would retry for minutes.

    Args:
        base_url: Address of a Tinker server; None reads TINKER_BASE_URL, or else takes the SDK's default.
        api_key: API key; None takes what the SDK would: TINKER_API_KEY, TINKER_CREDENTIAL_CMD or the stored login.
        options: Further arguments of `tinker.ServiceClient`.

    Raises:
        NotConnected: No Tinker server answers there, or it refuses the key. The message says what to change.
        tinker.TinkerError: The server refuses the request.
    """
    if url := base_url or os.environ.get("TINKER_BASE_URL"):
        checked_key(url, api_key)
    import tinker  # late, because it takes seconds and a wrong address should be reported at once

    return tinker.ServiceClient(base_url=base_url, api_key=api_key, **options)


def checked_key(url: str, api_key: str | None, progress: bool | None = None) -> str | None:
    """Checks that a server answers and accepts the API key; returns the key as `sdk_key` does.

    Args:
        progress: Whether to print, if the SDK is not loaded yet, that this comes next; False does not.

    Raises:
        NotConnected: No Tinker server answers there, or it refuses the key. The message says what to change.
    """
    if not (api_key or os.environ.get("TINKER_API_KEY") or os.environ.get("TINKER_CREDENTIAL_CMD")):
        check_server(url)  # first, because only the SDK finds a stored login
    key = sdk_key(api_key)
    check_server(url, key)
    if progress is not False and "tinker.lib" not in sys.modules:
        print(f"{url} answers; loading the Tinker SDK", file=sys.stderr, flush=True)
    return key


def sdk_key(api_key: str | None) -> str | None:
    """Returns the API key that the SDK would use; None if TINKER_CREDENTIAL_CMD prints it; empty if there is none."""
    key, command = api_key or os.environ.get("TINKER_API_KEY"), os.environ.get("TINKER_CREDENTIAL_CMD")
    if command and not (key and (key.startswith("tml-") or is_token(key))):
        return None
    if key:
        return key
    import tinker  # late, because it takes seconds

    return tinker.auth.get_tinker_token() or ""
