"""Router replay through the Tinker API: which experts computed a sequence, fetched by its id."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable

import httpx
import numpy as np
import numpy.typing as npt

EXPERTS_HEADERS = {"X-Fovea-Routed-Experts": "1"}
"""`tinker.ServiceClient(default_headers_overrides=EXPERTS_HEADERS)`: whose samples know their experts."""

ExpertSource = Callable[[str], Awaitable[npt.NDArray[np.integer]]]
"""Of a sequence by its id: [P + C - 1, layers, k]."""

_TIMEOUT_S = 60.0


def expert_source(base_url: str, api_key: str) -> ExpertSource:
    """Asks a Fovea for what its client, made with `EXPERTS_HEADERS`, has sampled. It raises httpx.HTTPError."""

    async def fetch(sequence_id: str) -> npt.NDArray[np.integer]:
        async with httpx.AsyncClient(headers={"X-API-Key": api_key}, timeout=_TIMEOUT_S) as client:
            answer = await client.get(f"{base_url.rstrip('/')}/api/v1/routed_experts/{sequence_id}")
        answer.raise_for_status()
        found: npt.NDArray[np.integer] = np.load(io.BytesIO(answer.content))
        return found

    return fetch
