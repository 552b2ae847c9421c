"""Recorded samples: the sampler's own account of sequences on which `stable_reinforce` trains.

A record costs 4 bytes for each token of a request's prompt, and 8 bytes for each sampled token plus its support. It
belongs to the session that sampled it, and is deleted with the session or one day after its last use.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2, trainer_pb2
from fovea.runtime.durable import ExpiryClock
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput, ResourceExhausted
from fovea_gateway.access.kept_rows import ROW_BYTES, recorded_bytes
from fovea_gateway.access.owners import Quota
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints
from fovea_gateway.database.database import Database, Job
from fovea_gateway.database.schema import journal, recorded_sequences, recordings
from fovea_gateway.http.request_body import off_loop_by_size
from fovea_gateway.sampling.sample_runner import SampleRunner, SampleWork
from fovea_gateway.sessions.future import Done, Submission

STABLE_REINFORCE = "stable_reinforce"
"""The only loss that reads records."""

_KEPT_S = 24 * 3600.0
_SLACK_S = 60.0
"""Uses within this time after an earlier one are not written."""
_MOST_BYTES = 128 * 2**20
"""The limit on the records that one call may name. The records of one call of the SDK have a few MiB."""
_SAMPLED_TOKEN_BYTES = 8
_ROWS_PER_JOB, _IMAGE = 500, -1

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RecordedSequence:
    """A sampled sequence with the prompt of its request.

    Attributes:
        temperature: Temperature of `logprobs`, greater than 0.
        prompt: int64 [P], the rendered prompt with -1 in place of the ids that replace images.
        tokens: int64 [C], the sampled tokens.
        logprobs: float32 [C], the sampler's log-probability of each.
        support: The packed sets of tokens that could have been drawn; None without truncation.
    """

    temperature: float
    prompt: IntArray
    tokens: IntArray
    logprobs: npt.NDArray[np.float32]
    support: bytes | None

    def support_of(self, own: slice) -> bytes:
        """Returns the packed support of some tokens. The time depends on these only: a datum may have many spans."""
        if self.support is None:
            return tensors.FULL_ROW * int(own.stop - own.start)
        return self.support[self._rows[own.start] : self._rows[own.stop]]

    @cached_property
    def _rows(self) -> IntArray:
        """The offset of each token's support, then the end, int64 [C + 1]."""
        return np.append(0, np.flatnonzero(np.frombuffer(self.support or b"", np.uint8) == tensors.FULL_ROW[0]) + 1)


class Recordings:
    """The recorded samples of all sessions.

    Args:
        capacity_bytes: The limit for all records. One owner may have as many bytes as are free; then its least recently
            used records make room for new ones.
    """

    def __init__(self, database: Database, checkpoints: Checkpoints, clock: ExpiryClock, capacity_bytes: int) -> None:
        self._database, self._checkpoints, self._clock = database, checkpoints, clock
        self._quota = Quota("max_row_bytes", capacity_bytes, "bytes of recorded samples")
        self._is_counted = False

    async def sample(self, work: SampleWork, runner: SampleRunner) -> Done:
        """Samples to the end; the record is stored in the transaction of the result.

        Raises ResourceExhausted if the owner has no room: before sampling, for the greatest length without support;
        after it, for the sample with its support, which may be a hundred times larger.
        """
        submission, request = work.pending.submission, work.request
        size_bytes = _SAMPLED_TOKEN_BYTES * submission.token_count + ROW_BYTES * (1 + request.sample_count)
        await self._make_room(submission.owner, size_bytes)
        if await self._checkpoints.room(submission.owner) < size_bytes:
            raise self._checkpoints.no_room(submission.owner)
        is_asked = request.sampled_support
        request.sampled_support |= _truncates(request.params)
        records = await runner.collect(work)
        job = await self._storing(work, records)
        if not is_asked:  # The client sees the result without the support, which is larger.
            for record in records:
                if record.WhichOneof("event") == "delta":
                    record.delta.ClearField("sampled_support")
        return Done([*records], [job])

    async def _make_room(self, owner: str, size_bytes: int) -> None:
        """Raises ResourceExhausted if the owner has no room, even without its older records."""
        if not self._is_counted:
            await self._count()
        own = recordings.c.owner == owner
        while True:
            try:
                self._quota.check(owner, size_bytes)
                return
            except ResourceExhausted:
                if not await self._database.write(partial(_delete_oldest, where=own, least_bytes=size_bytes)):
                    raise
                await self._count()

    async def _count(self) -> None:
        self._quota.reset(await self._database.read(recorded_bytes))
        self._is_counted = True

    async def _storing(self, work: SampleWork, records: Iterable[gateway_pb2.SampleTokensResponse]) -> Job[Any]:
        """Returns the job that stores the sequences of a finished sample."""
        assert work.rendered is not None, "a sample finished without a prompt"
        submission, params = work.pending.submission, work.request.params
        deltas = [record.delta for record in records if record.WhichOneof("event") == "delta"]
        sequences: list[dict[str, Any]] = [
            {
                "sequence_id": f"{submission.future_id}:{delta.index}",
                "future_id": submission.future_id,
                "tokens": delta.tokens,
                "logprobs": delta.logprobs,
                "support": delta.sampled_support if delta.sampled_support.strip(tensors.FULL_ROW) else None,
            }
            for delta in deltas
        ]
        prompt_ids = _without_images(work.rendered).astype("<i4").tobytes()
        size_bytes = len(prompt_ids) + ROW_BYTES * len(sequences)
        size_bytes += sum(len(one["tokens"]) + len(one["logprobs"]) + len(one["support"] or b"") for one in sequences)
        row = {
            "future_id": submission.future_id,
            "session_id": submission.session_id,
            "owner": submission.owner,
            # At temperature 0 the sampler's log-probabilities are those of temperature 1.
            "temperature": (params.temperature or 1.0) if params.HasField("temperature") else 1.0,
            "used_at": time.time(),
            "size_bytes": size_bytes,
            "prompt": prompt_ids,
        }
        await self._make_room(submission.owner, size_bytes)
        self._quota.take(submission.owner, size_bytes)
        return partial(_put, row=row, sequences=sequences)

    async def fill(
        self,
        submission: Submission,
        header: trainer_pb2.ForwardBackwardHeader,
        data: Sequence[gateway_pb2.InputDatum],
        rendered: Sequence[model_input_pb2.RenderedInput],
        is_again: bool,
    ) -> None:
        """Writes what the sampler recorded into the inputs of `stable_reinforce`, in place of what the client claims.

        Args:
            header: Receives the temperature of the samples.
            is_again: Whether the command ran before, within the records' day. They then count as not expired.

        Raises InvalidInput that names the first datum with a missing, expired or foreign sequence, with spans that do
        not tile, or with tokens that differ from the recorded ones.
        """
        for index, datum in enumerate(data):
            if not datum.target_spans:
                raise _wrong(f"data[{index}]", "has no provenance spans: stable_reinforce needs Datum.with_provenance")
        now = self._clock.now()
        before = 0.0 if is_again else now - _KEPT_S - _SLACK_S
        named = _named(data)
        found, stale = await self._database.read(
            partial(_read, named=list(named), session_id=submission.session_id, before=before, stale=now - _SLACK_S)
        )
        words = (
            f"which session {submission.session_id} has not recorded within the last day, or newer samples took its "
            "room: sample with record_stability_info=True and train in the same session"
        )
        for sequence_id, field in named.items():
            if sequence_id not in found:
                raise _wrong(field, f"names sequence {sequence_id[:200]!r}, {words}")
        spans = [span for datum in data for span in datum.target_spans]
        _set_temperature(header, {found[span.sequence_id].temperature for span in spans if span.sampled})
        for index, datum in enumerate(data):
            own = datum, _without_images(rendered[index]), found, f"data[{index}]"
            await off_loop_by_size(datum.ByteSize(), _fill_datum, *own)
        if stale and not is_again:
            await self._database.write(partial(_renew, future_ids=stale, now=now))

    async def forget(self, session_id: str) -> None:
        """Deletes the records of a session that has ended."""
        await self._delete_all(recordings.c.session_id == session_id)

    async def sweep(self) -> None:
        """Deletes expired records. Those of a session with journaled commands remain for another day of replays."""
        before = self._clock.now() - _KEPT_S - 2 * _SLACK_S
        is_replayable = sa.exists().where(journal.c.session_id == recordings.c.session_id)
        is_old = (recordings.c.used_at < before) & (~is_replayable | (recordings.c.used_at < before - _KEPT_S))
        await self._delete_all(is_old)
        await self._count()

    async def _delete_all(self, where: sa.ColumnElement[bool]) -> None:
        while await self._database.write(partial(_delete_oldest, where=where)) == _ROWS_PER_JOB:
            pass


def _truncates(params: sampler_pb2.SamplingParams) -> bool:
    """Returns whether a sampler may draw from fewer tokens than all."""
    is_below_one = params.HasField("top_p") and params.top_p < 1
    return is_below_one or params.top_k > 0 or params.min_p > 0 or bool(params.structured_outputs)


def _without_images(rendered: model_input_pb2.RenderedInput) -> IntArray:
    """Returns the ids of an input, int64 [N], with -1 in place of the ids that replace images."""
    tokens = tensors.decode_tokens(rendered.tokens).astype(np.int64)
    for span in rendered.spans:
        tokens[span.offset : span.offset + span.length] = _IMAGE
    return tokens


def _named(data: Sequence[gateway_pb2.InputDatum]) -> dict[str, str]:
    """Returns the ids of all sequences that spans name, each with the field that names it first."""
    named: dict[str, str] = {}
    for index, datum in enumerate(data):
        for name, spans in (("model_input_spans", datum.input_spans), ("loss_fn_input_spans", datum.target_spans)):
            for place, span in enumerate(spans):
                named.setdefault(span.sequence_id, f"data[{index}].{name}[{place}]")
    return named


def _set_temperature(header: trainer_pb2.ForwardBackwardHeader, temperatures: set[float]) -> None:
    if len(temperatures) > 1:
        raise _wrong("data", f"has sequences sampled at temperatures {sorted(temperatures)}; send one call for each")
    for temperature in temperatures:
        given = header.loss_config.get("temperature", temperature)
        if abs(given - temperature) > 1e-6:
            raise _wrong(
                "loss_fn_config.temperature",
                f"is {given:g}, but the sequences of data were sampled at {temperature:g}; leave it out",
            )
        header.loss_config["temperature"] = temperature


def _fill_datum(
    datum: gateway_pb2.InputDatum, tokens: IntArray, found: dict[str, RecordedSequence], field: str
) -> None:
    targets = _values(datum, "target_tokens", len(tokens), field)
    if targets is None:
        raise _wrong(f"{field}.loss_fn_inputs.target_tokens", f"must be int64 [{len(tokens)}] for {STABLE_REINFORCE}")
    _check_runs(datum.input_spans, tokens, found, f"{field}.model_input_spans", is_target=False)
    _check_runs(datum.target_spans, targets, found, f"{field}.loss_fn_input_spans", is_target=True)
    logprobs, sampled = np.zeros(len(tokens), "<f4"), np.zeros(len(tokens), "<f4")
    rows: list[bytes] = []
    start = 0
    for span in datum.target_spans:
        recorded = found[span.sequence_id]
        own = slice(span.offset, span.offset + span.length)
        if span.sampled:
            sampled[start : start + span.length] = 1.0
            logprobs[start : start + span.length] = recorded.logprobs[own]
        rows.append(recorded.support_of(own) if span.sampled else tensors.FULL_ROW * span.length)
        start += span.length
    advantages = _values(datum, "advantages", len(tokens), field)
    if advantages is not None and (places := np.flatnonzero((advantages != 0) & (sampled == 0))).size:
        at = int(places[0])
        raise _wrong(
            f"{field}.loss_fn_inputs.advantages",
            f"is {advantages[at]:g} at [{at}], but that target was not sampled: set advantages of prompt tokens to 0",
        )
    datum.loss_inputs["logprobs"].CopyFrom(tensors.encode(logprobs))
    datum.loss_inputs["sampled"].CopyFrom(tensors.encode(sampled))
    datum.loss_inputs.pop(tensors.SUPPORT, None)
    if (support := b"".join(rows)).strip(tensors.FULL_ROW):
        datum.loss_inputs[tensors.SUPPORT].CopyFrom(tensors.encode(np.frombuffer(support, np.uint8)))


def _values(datum: gateway_pb2.InputDatum, name: str, length: int, field: str) -> npt.NDArray | None:
    """Returns an input of the loss if it is present and one-dimensional; the trainer refuses other forms."""
    if name not in datum.loss_inputs:
        return None
    values = tensors.decode(datum.loss_inputs[name], f"{field}.loss_fn_inputs.{name}")
    return values if values.shape == (length,) else None


def _check_runs(
    spans: Sequence[gateway_pb2.SequenceSpan],
    tokens: IntArray,
    found: dict[str, RecordedSequence],
    field: str,
    is_target: bool,
) -> None:
    """Raises InvalidInput unless the runs tile the tokens and agree with the records.

    A prompt's targets may be 0: they are not trained on, and the cookbook pads with 0.
    """
    start = 0
    for place, span in enumerate(spans):
        recorded = found[span.sequence_id]
        own = recorded.tokens if span.sampled else recorded.prompt
        what = "sampled" if span.sampled else "prompt"
        end = span.offset + span.length
        if span.offset < 0 or span.length < 0 or end > own.size:
            raise _wrong(
                f"{field}[{place}]",
                f"covers {what} tokens {span.offset} .. {end}, but sequence {span.sequence_id!r} has {own.size}",
            )
        given, expected = tokens[start : start + span.length], own[span.offset : end]
        if given.size == span.length:
            differs = given != expected
            if is_target and not span.sampled:
                differs &= given != 0
            if differs.any():
                at = int(np.flatnonzero(differs)[0])
                raise _wrong(
                    f"{field}[{place}]",
                    f"says that position {start + at} is {what} token {span.offset + at} of {span.sequence_id!r}, "
                    f"which is {expected[at]}, but the datum has {given[at]}",
                )
        start += span.length
    if start != tokens.size:
        raise _wrong(field, f"covers {start} positions, but the datum has {tokens.size}")


def _wrong(field: str, problem: str) -> InvalidInput:
    return InvalidInput(f"{field} {problem}", field=field)


def _put(connection: sa.Connection, row: dict[str, Any], sequences: list[dict[str, Any]]) -> None:
    """Stores the record of a request, in place of one from an expired request with the same id."""
    _delete(connection, [row["future_id"]])
    connection.execute(sa.insert(recordings), row)
    connection.execute(sa.insert(recorded_sequences), sequences)


def _read(
    connection: sa.Connection, named: list[str], session_id: str, before: float, stale: float
) -> tuple[dict[str, RecordedSequence], list[str]]:
    """Returns the named sequences that the session recorded and used at `before` or later.

    Also returns the futures of records last used before `stale`. Raises InvalidInput if the records are too
    large to read for one call.
    """
    rows, total = dict[str, Any](), 0
    for part in _parts(list({sequence_id.rpartition(":")[0] for sequence_id in named})):
        where = recordings.c.future_id.in_(part) & (recordings.c.session_id == session_id)
        where &= recordings.c.used_at >= before
        total += int(connection.scalar(sa.select(sa.func.sum(recordings.c.size_bytes)).where(where)) or 0)
        if total > _MOST_BYTES:
            raise _wrong("data", f"names sequences with {total} bytes of records; a call may name {_MOST_BYTES}")
        rows |= {row.future_id: row for row in connection.execute(sa.select(recordings).where(where))}
    prompts = {future_id: tensors.decode_tokens(row.prompt).astype(np.int64) for future_id, row in rows.items()}
    found: dict[str, RecordedSequence] = {}
    for part in _parts(named):
        query = sa.select(recorded_sequences).where(recorded_sequences.c.sequence_id.in_(part))
        for row in connection.execute(query):
            if request := rows.get(row.future_id):
                prompt, tokens = prompts[row.future_id], tensors.decode_tokens(row.tokens).astype(np.int64)
                logprobs = tensors.decode_floats(row.logprobs)
                found[row.sequence_id] = RecordedSequence(request.temperature, prompt, tokens, logprobs, row.support)
    return found, [future_id for future_id, row in rows.items() if row.used_at < stale]


def _renew(connection: sa.Connection, future_ids: list[str], now: float) -> None:
    for part in _parts(future_ids):
        connection.execute(sa.update(recordings).where(recordings.c.future_id.in_(part)).values(used_at=now))


def _parts(ids: list[str]) -> Iterator[list[str]]:
    return (ids[start : start + _ROWS_PER_JOB] for start in range(0, len(ids), _ROWS_PER_JOB))


def _delete(connection: sa.Connection, future_ids: list[str]) -> None:
    connection.execute(sa.delete(recorded_sequences).where(recorded_sequences.c.future_id.in_(future_ids)))
    connection.execute(sa.delete(recordings).where(recordings.c.future_id.in_(future_ids)))


def _delete_oldest(connection: sa.Connection, where: sa.ColumnElement[bool], least_bytes: float = math.inf) -> int:
    """Deletes the least recently used records until `least_bytes` are free or a batch is deleted.

    Returns how many requests' records were deleted.
    """
    oldest = sa.select(recordings.c.future_id, recordings.c.size_bytes).where(where).order_by(recordings.c.used_at)
    future_ids = []
    for future_id, size_bytes in connection.execute(oldest.limit(_ROWS_PER_JOB)):
        if least_bytes <= 0:
            break
        future_ids.append(future_id)
        least_bytes -= size_bytes
    _delete(connection, future_ids)
    return len(future_ids)
