"""The outcome of a future's work."""

import gc
import weakref

from fovea.wire.errors import InvalidInput
from fovea_gateway.sessions.future import Done, Kind, Pending, Submission, run_to_outcome


async def test_a_failed_outcome_keeps_no_frame_of_its_work() -> None:
    """The frames hold the request, and outcomes stay in memory for their clients."""

    class Held:
        pass

    held = Held()
    kept = weakref.ref(held)

    async def work(blob: Held) -> Done:
        try:
            raise ValueError("first")
        except ValueError as error:
            raise InvalidInput("wrong") from error

    submission = Submission("model:1", Kind.FORWARD, "owner", "session", "model", 1)
    gc.disable()
    try:
        _, outcome = await run_to_outcome(Pending(submission, b""), work(held))
        del held
        assert outcome.error is not None
        assert kept() is None
    finally:
        gc.enable()
