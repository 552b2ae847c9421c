"""Router replay through the Tinker API: fetches the experts that computed a sequence, by the sequence's id."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable

import httpx
import numpy as np
import numpy.typing as npt

EXPERTS_HEADERS = {"X-Fovea-Routed-Experts": "1"}
"""Headers of a client that asks for the experts of its samples:
`tinker.ServiceClient(default_headers_overrides=EXPERTS_HEADERS)`."""

ExpertSource = Callable[[str], Awaitable[npt.NDArray[np.integer]]]
"""Returns the experts of a sequence by its id, [P + C - 1, layers, k], for P prompt tokens and C sampled ones."""

_TIMEOUT_S = 60.0


def expert_source(base_url: str, api_key: str) -> ExpertSource:
    """Returns a function that fetches experts from a Fovea server, and raises httpx.HTTPError if it cannot.

    The sequence must have been sampled by a client with `EXPERTS_HEADERS`.
    """

    async def fetch(sequence_id: str) -> npt.NDArray[np.integer]:
        async with httpx.AsyncClient(headers={"X-API-Key": api_key}, timeout=_TIMEOUT_S) as client:
            answer = await client.get(f"{base_url.rstrip('/')}/api/v1/routed_experts/{sequence_id}")
        answer.raise_for_status()
        found: npt.NDArray[np.integer] = np.load(io.BytesIO(answer.content))
        return found

    return fetch
