"""A sampling session: one choice of weights to sample from."""

import time
from dataclasses import dataclass, field


@dataclass(eq=False)
class SamplingSession:
    """One choice of weights to sample from. An empty `snapshot_id` means the base model.

    Attributes:
        followed_model_id: The model whose `inflight` saves move this session forward; None if its weights are fixed.
        client_count: Clients that have joined besides the first one.
    """

    sampling_session_id: str
    session_id: str
    owner: str
    base_model: str
    request_seq_id: int | None = None
    model_path: str | None = None
    snapshot_id: str = ""
    followed_model_id: str | None = None
    client_count: int = 0
    created_at: float = field(default_factory=time.time)
