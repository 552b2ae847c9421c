"""Recorded samples: their owner, lifetime and cost, and that they survive a restart."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from tinker import types
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

from fovea.api.v1 import sampler_pb2
from fovea.wire import tensors
from fovea_gateway.access.kept_rows import row_bytes, stored_bytes
from fovea_gateway.access.owners import Owner
from fovea_gateway.database.schema import recorded_sequences, recordings
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL, FakeSampler
from tests.contract.gateway.requests import PNG, Rest, forward_backward_body, image_input
from tests.contract.gateway.test_recovery import RecoveringStand
from tests.waiting import eventually

PROMPT, COUNT = [1, 2, 3], 4
DAY_S = 24 * 3600


async def _base_session(rest: Rest, number: int = 0) -> str:
    body = {"session_id": rest.session_id, "sampling_session_seq_id": number, "base_model": MODEL}
    return str((await rest.ok("create_sampling_session", **body))["sampling_session_id"])


async def _sample(rest: Rest, sampling_id: str, seq_id: int = 0, **more: Any) -> tuple[str, list[int]]:
    """Records a sample; returns the id and the tokens of its sequence."""
    answer = (await rest.sample(sampling_id, seq_id, record_stability_info=True, **more)).json()
    result = await rest.result(answer["request_id"])
    assert "sequences" in result, result
    return answer["sample_sequence_ids"][0], result["sequences"][0]["tokens"]


def _datum(sequence_id: str, tokens: list[int], prompt: list[int] | None = None) -> types.Datum:
    ids = [*(prompt or PROMPT), *tokens]
    before = len(ids) - len(tokens)
    targets = [0] * (before - 1) + tokens
    advantages = [0.0] * (before - 1) + [1.0] * len(tokens)
    plain = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "logprobs": types.TensorData(data=[-9.0] * len(targets), dtype="float32", shape=[len(targets)]),
            "advantages": types.TensorData(data=advantages, dtype="float32", shape=[len(targets)]),
        },
    )
    return plain.with_provenance(
        [
            PromptProvenanceSpan(sequence_id=sequence_id, length=before),
            SampledProvenanceSpan(sequence_id=sequence_id, length=len(tokens) - 1),
        ],
        [
            PromptProvenanceSpan(sequence_id=sequence_id, offset=1, length=before - 1),
            SampledProvenanceSpan(sequence_id=sequence_id, length=len(tokens)),
        ],
    )


async def _train(rest: Rest, model_id: str, seq_id: int, datum: types.Datum) -> dict[str, Any]:
    body = forward_backward_body(model_id, seq_id, data=[datum], loss_fn="stable_reinforce")
    return await rest.result((await rest.send(body)).json()["request_id"])


async def _age(stand: Stand, seconds: float) -> None:
    assert stand.gateway is not None
    age = sa.update(recordings).values(used_at=recordings.c.used_at - seconds)
    await stand.gateway.components.database.write(lambda connection: connection.execute(age))


async def _count(stand: Stand) -> tuple[int, int]:
    assert stand.gateway is not None
    queries = [sa.select(sa.func.count()).select_from(table) for table in (recordings, recorded_sequences)]
    requests, sequences = await stand.gateway.components.database.read(
        lambda connection: [connection.scalar(query) for query in queries]
    )
    return int(requests or 0), int(sequences or 0)


async def test_the_trainer_gets_what_the_sampler_recorded_also_after_restarts(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    sampling_id = await _base_session(rest)
    sequence_id, tokens = await _sample(rest, sampling_id, sampling_params={"max_tokens": COUNT, "temperature": 0.5})
    await stand.stop()
    stand.sampler.restart()
    await stand.start()
    answer = await _train(rest, model_id, 1, _datum(sequence_id, tokens))
    assert "loss_fn_outputs" in answer, answer
    ((header, datums),) = stand.trainer.of("ForwardBackward")
    assert header.loss_function == "stable_reinforce"
    assert header.loss_config["temperature"] == 0.5
    inputs = {name: tensors.decode(tensor).tolist() for name, tensor in datums[0].loss_inputs.items()}
    assert inputs["logprobs"] == [0.0, 0.0] + [-0.25] * COUNT, "expected the recorded values, not the client's"
    assert inputs["sampled"] == [0.0, 0.0] + [1.0] * COUNT


async def test_records_last_a_day_from_their_last_use(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    sequence_id, tokens = await _sample(rest, await _base_session(rest))
    datum = _datum(sequence_id, tokens)
    await _age(stand, DAY_S - 600)
    assert "loss_fn_outputs" in await _train(rest, model_id, 1, datum)
    await _age(stand, DAY_S - 600)
    assert "loss_fn_outputs" in await _train(rest, model_id, 2, datum), "each use must restart the day"
    await _age(stand, DAY_S + 600)
    refused = await _train(rest, model_id, 3, datum)
    assert f"names sequence '{sequence_id}'" in refused["error"]
    assert "not recorded within the last day" in refused["error"]
    assert refused["category"] == "user"
    assert stand.gateway is not None
    assert await _count(stand) == (1, 1)
    await stand.gateway.components.recordings.sweep()
    assert await _count(stand) == (0, 0)


async def test_records_belong_to_their_session_and_end_with_it(stand: Stand, rest: Rest) -> None:
    sequence_id, tokens = await _sample(rest, await _base_session(rest), num_samples=2)
    assert await _count(stand) == (1, 2)
    first = rest.session_id
    await rest.open_session()
    model_id = await rest.create_model()
    foreign = await _train(rest, model_id, 1, _datum(sequence_id, tokens))
    assert f"which session {rest.session_id} has not recorded" in foreign["error"]
    assert not stand.trainer.of("ForwardBackward")
    await rest.ok(f"sessions/{first}/finish", reason={"type": "success"})

    async def is_gone() -> bool:
        return await _count(stand) == (0, 0)

    await eventually(is_gone)


async def test_a_refused_datum_reaches_no_trainer(stand: Stand, rest: Rest) -> None:
    """Each refusal is a user error that names the field, and the good datum beside it is not computed either."""
    model_id, sampling_id = await rest.create_model(), await _base_session(rest)
    good = _datum(*await _sample(rest, sampling_id))
    sequence_id, tokens = await _sample(rest, sampling_id, 1)
    plain = (await rest.sample(sampling_id, 2)).json()
    unrecorded = (await rest.result(plain["request_id"]))["sequences"][0]["tokens"]
    whole = _datum(sequence_id, tokens)
    assert whole.loss_fn_input_spans is not None
    prompt, sampled = whole.loss_fn_input_spans
    wrong = {
        "data[1] has no provenance spans": replace(whole, model_input_spans=None, loss_fn_input_spans=None),
        "data[1].model_input_spans[0] names sequence 'none'": _datum("none", tokens),
        f"names sequence '{plain['sample_sequence_ids'][0]}'": _datum(plain["sample_sequence_ids"][0], unrecorded),
        "data[1].model_input_spans[0] says that position 0": _datum(sequence_id, tokens, [9, 2, 3]),
        "data[1].model_input_spans[1] says that position 4": _datum(
            sequence_id, [tokens[0], tokens[1] + 1, *tokens[2:]]
        ),
        "data[1].loss_fn_input_spans covers 5 positions": replace(
            whole, loss_fn_input_spans=[prompt, replace(sampled, length=COUNT - 1)]
        ),
    }
    for seq_id, (words, datum) in enumerate(wrong.items(), 1):
        body = forward_backward_body(model_id, seq_id, data=[good, datum], loss_fn="stable_reinforce")
        refused = await rest.result((await rest.send(body)).json()["request_id"])
        assert (refused["category"], words in refused["error"]) == ("user", True), refused
    assert not stand.trainer.of("ForwardBackward")
    assert "loss_fn_outputs" in await _train(rest, model_id, len(wrong) + 1, good)


async def test_records_count_as_their_owners_bytes(stand: Stand, rest: Rest) -> None:
    """A record costs 8 bytes per sampled token, 4 per prompt token, and its rows. Without free bytes, sampling is
    refused.
    """
    assert stand.gateway is not None
    database = stand.gateway.components.database
    sampling_id = await _base_session(rest)
    (owner,) = await database.read(row_bytes)
    before = await database.read(lambda connection: stored_bytes(connection, owner))
    await _sample(rest, sampling_id, num_samples=3)
    after = await database.read(lambda connection: stored_bytes(connection, owner))
    assert after - before == 4 * len(PROMPT) + 3 * (8 * COUNT + 1024)
    await stand.gateway.components.owners.put(Owner(owner, max_stored_bytes=after + 2000))
    sampled = len(stand.sampler.of("Sample"))
    answer = await rest.sample(sampling_id, 1, record_stability_info=True)
    refused = await rest.result(answer.json()["request_id"])
    assert "max_stored_bytes" in refused["error"]
    assert len(stand.sampler.of("Sample")) == sampled


async def test_the_oldest_records_of_an_owner_make_room(stand: Stand, rest: Rest) -> None:
    """Sampling continues. A loss reports that an old record is gone, and reads the new ones."""
    await stand.stop()
    await stand.start(max_row_bytes=64 * 1024)
    model_id, sampling_id = await rest.create_model(), await _base_session(rest)
    made = [await _sample(rest, sampling_id, seq_id) for seq_id in range(40)]
    assert 8 <= (await _count(stand))[0] <= 16, "the records of one owner may take half of the 32 KiB"
    gone = await _train(rest, model_id, 1, _datum(*made[0]))
    assert "or newer samples took its room" in gone["error"]
    assert "loss_fn_outputs" in await _train(rest, model_id, 2, _datum(*made[-1]))


def _support(monkeypatch: Any, rows: list[bytes]) -> None:
    """Makes samplers answer with these support rows, two in each delta."""
    plain = FakeSampler._events

    def events(self: FakeSampler, request: sampler_pb2.SampleRequest) -> list[sampler_pb2.SampleResponse]:
        found = plain(self, request)
        if request.sampled_support:
            for number, event in enumerate(event for event in found if event.WhichOneof("event") == "delta"):
                event.delta.sampled_support = b"".join(rows[2 * number : 2 * number + 2])
        return found

    monkeypatch.setattr(FakeSampler, "_events", events)


async def test_a_sample_with_a_support_above_the_room_is_not_recorded(
    stand: Stand, rest: Rest, monkeypatch: Any
) -> None:
    """The size is known only after sampling. Without this limit, one request could fill the disk."""
    await stand.stop()
    await stand.start(max_row_bytes=16 * 1024)
    _support(monkeypatch, [tensors.pack_support(np.arange(0, 2**18, 256), np.array([0, 1024]))] * COUNT)
    sampling_id, params = await _base_session(rest), {"max_tokens": COUNT, "top_p": 0.9}
    answer = await rest.sample(sampling_id, 0, record_stability_info=True, sampling_params=params)
    refused = await rest.result(answer.json()["request_id"])
    assert "max_row_bytes" in refused["error"]
    assert (await _count(stand))[0] == 0
    await _sample(rest, sampling_id, 1)


async def test_the_support_of_truncated_samples_is_recorded_and_not_returned(
    stand: Stand, rest: Rest, monkeypatch: Any
) -> None:
    rows = [tensors.pack_support(np.array([1, 5]), np.array([0, 2])), tensors.FULL_ROW] * 2
    _support(monkeypatch, rows)
    model_id = await rest.create_model()
    params = {"max_tokens": COUNT, "top_p": 0.9}
    sequence_id, tokens = await _sample(rest, await _base_session(rest), sampling_params=params)
    assert stand.sampler.of("Sample")[-1].sampled_support
    assert "loss_fn_outputs" in await _train(rest, model_id, 1, _datum(sequence_id, tokens))
    ((_, datums),) = stand.trainer.of("ForwardBackward")
    assert tensors.decode(datums[0].loss_inputs[tensors.SUPPORT]).tobytes() == b"\0\0" + b"".join(rows)


async def test_positions_of_an_image_are_images_again(stand: Stand, rest: Rest) -> None:
    """Targets of an image are 0, because the cookbook pads them so. Text in the place of an image is a different
    prompt.
    """
    model_id = await rest.create_model()
    image = {"type": "image", "data": base64.b64encode(PNG).decode(), "format": "png"}
    chunks = [{"type": "encoded_text", "tokens": [1, 2]}, image, {"type": "encoded_text", "tokens": [3, 4]}]
    sequence_id, tokens = await _sample(rest, await _base_session(rest), prompt={"chunks": chunks})
    as_text = _datum(sequence_id, tokens, [1, 2, 0, 0, 0, 0, 3, 4])
    with_image = image_input().append(types.EncodedTextChunk(tokens=tokens[:-1]))
    assert "loss_fn_outputs" in await _train(rest, model_id, 1, replace(as_text, model_input=with_image))
    refused = await _train(rest, model_id, 2, as_text)
    assert "data[0].model_input_spans[0] says that position 2 is prompt token 2" in refused["error"]


async def test_a_restarted_trainer_runs_the_loss_again_on_records_that_have_expired_since(
    tmp_path: Path, database_url: str
) -> None:
    async with running(RecoveringStand(tmp_path), database_url=database_url) as stand, stand.http() as http:
        assert isinstance(stand, RecoveringStand)
        rest = Rest(http)
        model_id = await rest.create_model()
        datum = _datum(*await _sample(rest, await _base_session(rest)))
        assert "loss_fn_outputs" in await _train(rest, model_id, 1, datum)
        await _age(stand, DAY_S + 600)
        assert stand.gateway is not None
        await stand.gateway.components.recordings.sweep()
        await stand.kill_trainer()
        step = await rest.result((await rest.optim_step(model_id, 2))["request_id"])
        assert "error" not in step, step
        first, again = stand.trainer.of("ForwardBackward")[-2:]
        assert [each.SerializeToString() for each in first[1]] == [each.SerializeToString() for each in again[1]]
        assert "not recorded within the last day" in (await _train(rest, model_id, 3, datum))["error"]
