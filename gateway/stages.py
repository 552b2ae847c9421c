"""The stages of a request: how long each takes, for Prometheus, and its span, for whoever follows one request.

queue     until its turn comes: earlier commands of its model, or a place in a sampler
render    images into tokens and tensors; a batch is rendered while it is still in the queue
weights   a sample waits until its snapshot is in the sampler
sample    in the sampler
train     in the trainer, its own queue included
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fovea.runtime import tracing
from gateway import instruments as metrics


@contextmanager
def stage(name: str, kind: str) -> Iterator[None]:
    """One stage of a request of a kind, well ended or not."""
    started = time.perf_counter()
    try:
        with tracing.span(name):
            yield
    finally:
        metrics.STAGE_SECONDS.labels(name, kind).observe(time.perf_counter() - started)


def waited(kind: str, since: float) -> None:
    """The queue stage, which ends now and began at `since`, seconds of `time.time`."""
    metrics.STAGE_SECONDS.labels("queue", kind).observe(max(time.time() - since, 0.0))
    tracing.record("queue", since)
