"""Commands that compute: forward, forward_backward and optim_step."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from cachetools import LRUCache
from google.protobuf.message import Message

from fovea.api.v1 import gateway_pb2, trainer_pb2
from fovea.client import ForwardBackwardResult
from fovea.wire.errors import EndsTrainer, FailedPrecondition, FeatureEvicted, Unavailable
from fovea_gateway.fair_queue import FairQueue, Turn
from fovea_gateway.futures.future import Done, Kind, Pending, QueueState, Submission, future_id
from fovea_gateway.futures.futures import Futures
from fovea_gateway.gateway_metrics import stage
from fovea_gateway.replicas.trainer_link import TrainerLink
from fovea_gateway.training.batches import Batch, Batches
from fovea_gateway.training.models import Model, Models

_FIRST_S, _FIRST_TOKEN_S = 0.05, 0.0005
"""Estimates of the first command of a kind, and of each token of it, until one has been measured."""
_NEWEST = 0.5
"""The part of an estimate that the newest measurement has."""
_KNOWN = 4096
_MOST_DEATHS, _MOST_DEATHS_AGAIN = 2, 5
"""How often the trainer may end at a command: at one that was never done, and at one that is run again to bring a model
back, which was done once: without it the model is lost.
"""

COMPUTING = (Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)


class TrainerTurns:
    """Lets commands to one trainer, by turns that owners share by the seconds that their commands take.

    A command is let in by an estimate, and settled with what it took, also if it failed. A command that has a turn must
    wait for nothing but the trainer. One at which the trainer ended again and again is let in no more: it would be sent
    to each new trainer, and end that too. Of several that were there, the trainer did the first.

    Args:
        queue: As many places as keep the trainer busy.
        is_wanted: Says whether a client may wait for what a session has queued.
    """

    def __init__(
        self, futures: Futures, trainer: TrainerLink, queue: FairQueue, is_wanted: Callable[[str], bool]
    ) -> None:
        self._futures, self._trainer, self._queue, self._is_wanted = futures, trainer, queue, is_wanted
        # Seconds by owner and kind: of a token of those that have tokens, else of a command.
        self._paces: LRUCache[tuple[str, Kind], float] = LRUCache(_KNOWN)
        self._inside: list[Turn] = []
        # By future and kind: the instance that may have ended at it, and how many have.
        self._suspects: LRUCache[tuple[str, Kind], str] = LRUCache(_KNOWN)
        self._deaths: LRUCache[tuple[str, Kind], int] = LRUCache(_KNOWN)
        self._blamed_for = ""

    @asynccontextmanager
    async def take(self, pending: Pending, doing: str, tokens: int = 0, is_again: bool = False) -> AsyncIterator[None]:
        """Waits until the command may go to the trainer, and is one of those there until the block ends.

        Args:
            tokens: Of its batch; 0 of a command that has none.
            is_again: Whether it was done before, and brings a model back.

        Raises EndsTrainer for a command at which the trainer ended too often.
        """
        submission = pending.submission
        self._check_deaths(submission, _MOST_DEATHS_AGAIN if is_again else _MOST_DEATHS)
        key, units = (submission.owner, submission.kind), max(tokens, 1)
        pace = self._paces.get(key, _FIRST_TOKEN_S if tokens else _FIRST_S)
        following = future_id(submission.scope, submission.seq_id + 1)
        turn = Turn(
            submission.owner, 1000 * pace * units, is_timed=True,
            is_followed=lambda: self._futures.unfinished_kind(following) is not None,
            is_wanted=lambda: is_again or self._is_wanted(submission.session_id),
        )  # fmt: skip
        kind = submission.kind.value
        pending.progress.queue(lambda: f"waiting for the trainer: {self._queue.describe(turn)}", QueueState.PAUSED)
        try:
            async with AsyncExitStack() as held:
                with stage("turn", kind):
                    await held.enter_async_context(self._queue.place(turn))
                pending.progress.wait_on(doing)
                with stage("train", kind):
                    async with self._watching(turn, submission):
                        yield
        finally:
            if turn.used is not None and turn.seconds:
                self._paces[key] = _NEWEST * turn.seconds / units + (1 - _NEWEST) * pace
            devices = self._trainer.info.world_size if self._trainer.info is not None else 1
            pending.usage.gpu_seconds += turn.seconds * max(devices, 1)

    @asynccontextmanager
    async def _watching(self, turn: Turn, submission: Submission) -> AsyncIterator[None]:
        """Notes whether the trainer may have ended at a command."""
        key, asked = (submission.future_id, submission.kind), self._trainer.instance_id
        self._inside.append(turn)
        try:
            yield
        except Unavailable:
            if self._inside[0] is turn and asked != self._blamed_for:
                self._suspects[key] = self._blamed_for = asked
                await self._trainer.look_again()
            raise
        else:
            self._suspects.pop(key, None)
            self._deaths.pop(key, None)
        finally:
            self._inside.remove(turn)

    def _check_deaths(self, submission: Submission, most: int) -> None:
        key = (submission.future_id, submission.kind)
        if self._suspects.get(key, self._trainer.instance_id) != self._trainer.instance_id:
            del self._suspects[key]
            self._deaths[key] = self._deaths.get(key, 0) + 1
        if (count := self._deaths.get(key, 0)) >= most:
            raise EndsTrainer(
                f"the trainer ended {count} times while it did request {submission.seq_id} ({submission.kind}) of "
                f"model {submission.scope}: it is not done again. The trainer's log may say why; send less at once"
            )


class StepCommands:
    """Runs forward, forward_backward and optim_step."""

    def __init__(
        self, futures: Futures, models: Models, batches: Batches, trainer: TrainerLink, turns: TrainerTurns
    ) -> None:
        self._futures, self._models, self._batches, self._trainer = futures, models, batches, trainer
        self._turns = turns

    async def forward_backward(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Renders the datums and has their loss computed, with gradients or without."""
        return Done(await self.compute(pending, not model.is_accumulating, model))

    async def compute(self, pending: Pending, drop_gradients: bool, model: Model | None = None) -> list[Message]:
        """The outputs of a forward or forward_backward, then its metrics.

        Args:
            model: It must be in the trainer as its last command left it; None for what brings it back there.
        """
        pending.progress.wait_on("rendering")
        batch = await self._batches.take(pending)
        again: list[int] = []
        portion = len(batch.datums)
        while True:
            try:
                answer = await self._send(batch, pending, drop_gradients, model)
                break
            except FeatureEvicted as error:  # the trainer fetches before it computes: nothing was added yet
                missing = _missing(error, len(batch.datums))
                came = len(set(again).difference(missing))
                if again and not came and portion == 1:
                    raise
                # As many as came the last time: more than renderers hold at once would push each other out.
                portion = max(1, came or portion // 4) if again else portion
                again = missing[:portion]
                pending.progress.wait_on("rendering again what the renderers no longer hold")
                batch = await self._batches.render_again(pending, batch, again)
        outputs = [gateway_pb2.WaitFutureResponse(output=output) for output in answer.outputs]
        metrics = trainer_pb2.Metrics(values=answer.metrics)
        return [*outputs, gateway_pb2.WaitFutureResponse(metrics=metrics)]

    async def _send(
        self, batch: Batch, pending: Pending, drop_gradients: bool, model: Model | None
    ) -> ForwardBackwardResult:
        batch.header.seq_id = pending.submission.seq_id
        batch.header.drop_gradients = drop_gradients
        tokens = sum(len(datum.input.tokens) // 4 for datum in batch.datums)
        async with self._turns.take(pending, "computing, or waiting for the trainer", tokens, is_again=model is None):
            client = self._trainer.client if model is None else self._models.client_of(model, self._trainer)
            answer = await client.forward_backward(batch.header, batch.datums, timeout_s=None)
        if pending.submission.kind is Kind.FORWARD_BACKWARD:
            pending.usage.trained_tokens += tokens
        else:
            pending.usage.scored_tokens += tokens
        return answer

    async def optim_step(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Takes a step, unless a forward_backward since the last one failed: then gradients are partial and dropped."""
        seq_id = pending.submission.seq_id
        if model.failed_seq_id is not None:
            failed, reason = model.failed_seq_id, model.failed_reason
            async with self._turns.take(pending, "dropping partial gradients, or waiting for the trainer"):
                client = self._models.client_of(model, self._trainer)
                await client.clear_gradients(model.model_id, timeout_s=None, seq_id=seq_id)
            model.failed_seq_id, model.failed_reason = None, ""
            raise FailedPrecondition(
                f"this optim_step (request {seq_id}) was not taken: forward_backward request {failed} before it "
                f"failed ({reason}), so the gradients were partial. They were dropped; send the forward_backward calls "
                "again, then optim_step"
            )
        request = gateway_pb2.SubmitOptimStepRequest.FromString(blob)
        async with self._turns.take(pending, "stepping, or waiting for the trainer"):
            client = self._models.client_of(model, self._trainer)
            answer = await client.optim_step(model.model_id, request.adam, timeout_s=None, seq_id=seq_id)
        return Done([gateway_pb2.WaitFutureResponse(metrics=answer.metrics)])


def _missing(error: FeatureEvicted, count: int) -> list[int]:
    """The datums that must be rendered again; all, if the trainer does not say."""
    named = error.metadata.get("datums", "")
    return [int(index) for index in named.split(",") if int(index) < count] if named else list(range(count))
