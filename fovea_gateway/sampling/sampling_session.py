"""A sampling session: the weights that a client samples from."""

import time
from dataclasses import dataclass, field


@dataclass(eq=False)
class SamplingSession:
    """A choice of weights to sample from. An empty `snapshot_id` means the base model.

    Attributes:
        followed_model_id: The model that this session follows: each `inflight` save moves the session to its new
            weights. None if the weights are fixed.
        client_count: Clients that have joined in addition to the first one.
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
