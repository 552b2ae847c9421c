"""A snapshot: the weights of a model after some step, frozen, as the gateway remembers them."""

import time
from dataclasses import dataclass, field

from fovea.api.v1 import weights_pb2


@dataclass(eq=False)
class KeptSnapshot:
    """Frozen weights: in the memory of one trainer, and in storage if `uri` is set."""

    identity: weights_pb2.Snapshot
    uri: str
    trainer_instance: str
    created_at: float = field(default_factory=time.time)
