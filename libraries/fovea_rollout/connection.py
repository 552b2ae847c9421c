"""A connection to a Tinker server, with an error at once if the address or the API key is wrong."""

from __future__ import annotations

import os
from typing import Any

import tinker

from fovea.client.gateway import check_server


def connect(base_url: str | None = None, api_key: str | None = None, **options: Any) -> tinker.ServiceClient:
    """Returns a client of a server. At a wrong address the SDK alone would retry for minutes.

    Without `except`, NotConnected ends the program with its line.

    Args:
        base_url: Address of a Tinker server; None reads TINKER_BASE_URL, or else takes the SDK's default.
        api_key: API key; None reads TINKER_API_KEY.
        options: Further arguments of `tinker.ServiceClient`.

    Raises:
        NotConnected: No Tinker server answers there, or it refuses the key. The message says what to change.
        tinker.TinkerError: The server refuses the request.
    """
    if url := base_url or os.environ.get("TINKER_BASE_URL"):
        check_server(url, api_key or os.environ.get("TINKER_API_KEY") or "")
    return tinker.ServiceClient(base_url=base_url, api_key=api_key, **options)
