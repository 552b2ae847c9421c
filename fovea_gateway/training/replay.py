"""Brings a model back to a trainer that restarted: its newest durable point, then the commands after it once more."""

import logging
from collections.abc import Callable, Sequence

from google.protobuf.message import Message

from fovea.api.v1 import gateway_pb2
from fovea.wire.errors import EndsTrainer, InvalidInput, ModelLost, NotFound
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints
from fovea_gateway.database.database import Database
from fovea_gateway.futures.future import Kind, Pending, Submission, future_id
from fovea_gateway.replicas import snapshot_pushes
from fovea_gateway.replicas.trainer_link import TrainerLink
from fovea_gateway.training.journal import Entry, Journal, TrainerTurns, digest_of
from fovea_gateway.training.models import Model
from fovea_gateway.training.step_commands import StepCommands

logger = logging.getLogger(__name__)


class Replay:
    """Runs the journal's commands again, with their numbers: what the trainer has done already it only answers again.

    So a replay that broke off begins anew from wherever the trainer stands. An answer that differs from the first one,
    which its client has, is logged as an error and counted; by a trainer of other numerics, such as another number of
    ranks, it is only counted.

    Args:
        timeout_s: Deadline of one call to the trainer that changes no weights.
    """

    def __init__(
        self,
        journal: Journal,
        steps: StepCommands,
        checkpoints: Checkpoints,
        database: Database,
        trainer: TrainerLink,
        turns: TrainerTurns,
        timeout_s: float,
    ) -> None:
        self._journal, self._steps, self._checkpoints, self._database = journal, steps, checkpoints, database
        self._trainer, self._turns, self._timeout_s = trainer, turns, timeout_s

    async def bring_back(self, model: Model, tell: Callable[[str], None]) -> int:
        """Returns how many commands were run again. Raises ModelLost, which says why, if it cannot be brought back.

        Args:
            tell: Called with what is being done, for whoever waits.
        """
        tell("the trainer restarted and reads this model back")
        entries = await self._remaining(model, *await self._restore(model))
        if unlike := next(filter(None, map(self._other_numerics, entries)), ""):
            logger.warning(
                "model %s comes back to a trainer with other numerics (%s): what is run again, and what follows, may "
                "differ in the last bits",
                model.model_id,
                unlike,
            )
        for number, entry in enumerate(entries, 1):
            tell(f"the trainer restarted: command {number} of {len(entries)} of this model is run again")
            try:
                await self._run(model, entry)
            except (EndsTrainer, InvalidInput, NotFound) as error:
                raise ModelLost(
                    f"the trainer at {self._trainer.address} restarted, and request {entry.seq_id} ({entry.kind}) of "
                    f"model {model.model_id}, which is in no durable point, could not be run again: {error.message}"
                ) from None
        return len(entries)

    async def _restore(self, model: Model) -> tuple[int | None, str]:
        """The last command that is in the model as the trainer restored it; or None, and why it has nothing of it."""
        lora = model.lora if model.lora.rank else None
        try:
            async with self._turns.take(_pending(model, Kind.LOAD_STATE, 0), "reading this model back", is_again=True):
                restored = await self._trainer.client.restore_model(model.model_id, lora, self._timeout_s)
        except NotFound as error:
            return None, error.message
        except EndsTrainer as error:
            raise ModelLost(f"model {model.model_id} cannot be read back: {error.message}") from None
        # Now it says what is durable of the model: 0 may be a checkpoint that it was made from, or nothing yet.
        await self._trainer.look_again()
        await self._journal.trim(self._trainer)
        return restored.seq_id, ""

    async def _remaining(self, model: Model, restored: int | None, problem: str) -> list[Entry]:
        entries = await self._journal.entries(model.model_id)
        if restored is None:
            if not entries or entries[0].kind is not Kind.CREATE_MODEL:
                raise ModelLost(
                    f"the trainer at {self._trainer.address} that held model {model.model_id} restarted, and has no "
                    f"durable point of it ({problem})"
                )
            # What it may have answered for a model that it did not know is no answer.
            await self._trainer.client.delete_model(model.model_id, self._timeout_s)
            return entries
        if model.journaled_since is None or model.journaled_since > restored + 1:
            raise ModelLost(
                f"the trainer at {self._trainer.address} restarted, its durable point of model {model.model_id} is "
                f"that of request {restored}, and what came then is not in the journal: a newer point was there and "
                "is damaged, or the journal was full"
            )
        # A model that stands at 0 may have been made without what it was to load.
        return [entry for entry in entries if entry.seq_id > restored or entry.seq_id == restored == 0]

    async def _run(self, model: Model, entry: Entry) -> None:
        request = await self._journal.request_of(entry)
        pending = _pending(model, entry.kind, entry.seq_id, request)
        if entry.kind is Kind.FORWARD_BACKWARD:  # it takes its turn once it is rendered
            self._compare(entry, await self._steps.compute(pending, entry.drops_gradients))
            return
        async with self._turns.take(pending, "running again, or waiting for the trainer", is_again=True):
            await self._run_in_turn(model, entry, request)

    async def _run_in_turn(self, model: Model, entry: Entry, request: bytes) -> None:
        client, model_id, seq_id = self._trainer.client, model.model_id, entry.seq_id
        match entry.kind:
            case Kind.CREATE_MODEL:
                await client.create_model(model_id, model.lora if model.lora.rank else None, self._timeout_s)
                creation = gateway_pb2.SubmitCreateModelRequest.FromString(request)
                if creation.from_path:
                    await self._load(model, creation.from_path, creation.optimizer, entry)
            case Kind.LOAD_STATE:
                load = gateway_pb2.SubmitLoadStateRequest.FromString(request)
                await self._load(model, load.path, load.optimizer, entry)
            case Kind.OPTIM_STEP if entry.drops_gradients:
                await client.clear_gradients(model_id, None, seq_id)
            case Kind.OPTIM_STEP:
                step = gateway_pb2.SubmitOptimStepRequest.FromString(request)
                answer = await client.optim_step(model_id, step.adam, None, seq_id)
                self._compare(entry, [gateway_pb2.WaitFutureResponse(metrics=answer.metrics)])
            case Kind.SAVE_FOR_SAMPLER:
                await self._freeze(model_id, entry)

    async def _load(self, model: Model, path: str, optimizer: bool, entry: Entry) -> None:
        checkpoint = await self._checkpoints.find_training(model.owner, path)
        if checkpoint.uri != entry.subject:
            raise NotFound(f"{path} was saved anew since then")
        # A creation's has no number: the model is not in use yet.
        await self._trainer.client.load_state(model.model_id, checkpoint.uri, optimizer, None, entry.seq_id)

    async def _freeze(self, model_id: str, entry: Entry) -> None:
        """Takes an unnamed snapshot again, unless nobody can name it any more."""
        kept = await self._database.read(lambda connection: snapshot_pushes.get_row(connection, entry.subject))
        if kept is None:
            return
        frozen = await self._trainer.client.take_snapshot(model_id, entry.subject, "", self._timeout_s)
        self._note(entry, frozen.digest == kept.identity.digest)

    def _compare(self, entry: Entry, result: Sequence[Message]) -> None:
        self._note(entry, digest_of(result) == entry.digest)

    def _note(self, entry: Entry, is_equal: bool) -> None:
        is_expected = is_equal or bool(self._other_numerics(entry))
        metrics.REPLAYED.labels("equal" if is_equal else "rounded" if is_expected else "different").inc()
        if not is_expected:
            logger.error(
                "request %d (%s) of model %s was run again and came to another answer than its client was given, by a "
                "trainer that is alike: does a kernel of it round by chance?",
                entry.seq_id,
                entry.kind,
                entry.model_id,
            )

    def _other_numerics(self, entry: Entry) -> str:
        """In what the trainer is unlike the one that did a command, in words; empty if in nothing that is known."""
        now = self._trainer.info.numerics if self._trainer.info is not None else {}
        unlike = [name for name, value in entry.numerics.items() if now.get(name, value) != value]
        return ", ".join(f"{name} {now[name]} instead of {entry.numerics[name]}" for name in sorted(unlike))


def _pending(model: Model, kind: Kind, seq_id: int, request: bytes = b"") -> Pending:
    """Work on a model that no client waits for."""
    own_id = future_id(model.model_id, seq_id)
    submission = Submission(own_id, kind, model.owner, model.session_id, model.model_id, seq_id, traceparent="")
    return Pending(submission, request)
