"""One poll for all samples of a client, with sequence numbers for its copies (tinker-contract.md, sections 2 and 3)."""

import asyncio
import pickle
from typing import Any

import pytest
import tinker
from tinker import types

from fovea.wire.errors import Expired, InvalidInput
from fovea_gateway.sessions.future import Outcome, Pending
from fovea_gateway.sessions.future_rows import CLIENT_SPAN
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_samplers import base_session
from tests.waiting import eventually

PROMPT = types.ModelInput.from_ints([1, 2])
PARAMS = types.SamplingParams(max_tokens=4)


async def poll(rest: Rest, sampling_id: str, cursor: int = 0, client: int = 0, **more: Any) -> dict[str, Any]:
    """Sends one retrieve_futures request, which must succeed."""
    target = {"type": "sampling_session", "sampling_session_id": sampling_id, "cloned_sampler_id": client}
    return await rest.ok("retrieve_futures", target=target, prev_cursor=cursor, **more)


async def submit(rest: Rest, sampling_id: str, *seq_ids: int) -> list[str]:
    """Submits samples; returns their request ids."""
    return [(await rest.sample(sampling_id, seq_id)).json()["request_id"] for seq_id in seq_ids]


async def finished(rest: Rest, ids: list[str]) -> None:
    for request_id in ids:
        assert "sequences" in await rest.result(request_id)


def ids_of(answer: dict[str, Any]) -> list[str]:
    return [completion["request_id"] for completion in answer["completions"]]


async def test_completions_come_in_order_with_a_cursor_and_again_until_they_are_acknowledged(
    stand: Stand, rest: Rest
) -> None:
    sampling_id = await base_session(rest)
    ids = await submit(rest, sampling_id, 0, 1, 2)
    await finished(rest, ids)
    first = await poll(rest, sampling_id)
    assert sorted(ids_of(first)) == ids
    assert all(c["state"] == "finished" and c["response_payload_uncompressed_size"] > 0 for c in first["completions"])
    assert await poll(rest, sampling_id) == first, "an old cursor replays"
    assert await poll(rest, sampling_id, first["cursor"], timeout=0) == {"completions": [], "cursor": first["cursor"]}
    assert await poll(rest, sampling_id) == first, "also after a newer one was used"
    await stand.stop()
    await stand.start()
    assert await poll(rest, sampling_id) == first, "also by the next process"
    later = await submit(rest, sampling_id, 3)
    second = await poll(rest, sampling_id, first["cursor"])
    assert ids_of(second) == later
    assert second["cursor"] > first["cursor"]
    acknowledged = await poll(rest, sampling_id, second["cursor"], timeout=0, retrieved_request_ids=[ids[0], later[0]])
    assert acknowledged["completions"] == []
    assert sorted(ids_of(await poll(rest, sampling_id))) == ids[1:]
    assert (await rest.poll(ids[0])).status_code == (await rest.poll(later[0])).status_code == 410
    assert (await rest.poll(ids[1])).status_code == 200
    await stand.stop()
    await stand.start()
    assert sorted(ids_of(await poll(rest, sampling_id))) == ids[1:]
    assert (await rest.poll(ids[0])).status_code == 410


async def test_a_poll_is_held_until_something_ends_and_failures_are_told(stand: Stand, rest: Rest) -> None:
    sampling_id = await base_session(rest)
    assert (await poll(rest, sampling_id))["completions"] == [], "held for poll_hold_s, then empty"
    stand.sampler.open.clear()
    stand.sampler.failures["Sample"] = [InvalidInput("no")]
    failed, good = await submit(rest, sampling_id, 0, 1)
    answer = await poll(rest, sampling_id, timeout=20)
    assert answer["completions"] == [{"state": "failed", "request_id": failed}]
    assert (await rest.result(failed))["category"] == "user"
    held = asyncio.create_task(poll(rest, sampling_id, answer["cursor"], timeout=20))
    # An acknowledgement of an unfinished request, or of another client's, is ignored.
    mixed = [good, failed, "sess-x:sample:0:1"]
    assert (await poll(rest, sampling_id, answer["cursor"], timeout=0, retrieved_request_ids=mixed))[
        "completions"
    ] == []
    stand.sampler.open.set()
    assert ids_of(await held) == [good]
    assert (await rest.poll(good)).status_code == 200
    assert (await rest.poll(failed)).status_code == 410


async def test_clients_see_their_own_samples_only(stand: Stand, rest: Rest) -> None:
    sampling_id = await base_session(rest)
    joined = [(await rest.ok("join_sampling_session", sampling_session_id=sampling_id))["client_counter"] for _ in "ab"]
    assert joined == [1, 2]
    await stand.stop()
    await stand.start(api_key=["tml-local", "tml-other"])
    third = await rest.ok("join_sampling_session", sampling_session_id=sampling_id)
    assert third == {"type": "join_sampling_session", "client_counter": 3}
    biggest = 2**63 - 1
    ids = await submit(rest, sampling_id, 0, CLIENT_SPAN - 1, CLIENT_SPAN, biggest)
    assert ids == [f"{sampling_id}:{number}" for number in (0, CLIENT_SPAN - 1, CLIENT_SPAN, biggest)]
    await finished(rest, ids)
    assert sorted(ids_of(await poll(rest, sampling_id))) == ids[:2]
    assert ids_of(await poll(rest, sampling_id, client=1)) == [ids[2]]
    assert ids_of(await poll(rest, sampling_id, client=biggest // CLIENT_SPAN)) == [ids[3]]
    async with stand.http("tml-other") as http:
        other = Rest(http)
        for route, body in (
            ("retrieve_futures", {"target": {"sampling_session_id": sampling_id}}),
            ("join_sampling_session", {"sampling_session_id": sampling_id}),
        ):
            assert (await other.post(route, **body)).status_code == 404
    for unknown in ("sess-0:sample:0", ""):
        assert (await rest.post("retrieve_futures", target={"sampling_session_id": unknown})).status_code == 404


async def test_wrong_polls_are_refused_by_name(rest: Rest) -> None:
    sampling_id = await base_session(rest)
    target = {"sampling_session_id": sampling_id}
    for body, field in (
        ({"target": target, "prev_cursor": -1}, "prev_cursor"),
        ({"target": target, "prev_cursor": 2**64}, "prev_cursor"),
        ({"target": target, "timeout": -1}, "timeout"),
        ({"target": {**target, "cloned_sampler_id": 10**30}}, "cloned_sampler_id"),
        ({"target": {**target, "type": "model"}}, "target.type"),
        ({"target": target, "more": 1}, "more"),
    ):
        answer = await rest.post("retrieve_futures", **body)
        assert answer.status_code == 400
        assert field in answer.json()["detail"]


@pytest.mark.parametrize("uses_poller", [True, False])
@pytest.mark.parametrize("joins", [True, False])
async def test_sdk_and_its_pickled_copies_sample_side_by_side(stand: Stand, uses_poller: bool, joins: bool) -> None:
    await stand.stop()
    flags = {"sample_use_retrieve_futures": uses_poller, "sample_join_sampling_session": joins}
    await stand.start(sdk_flags=flags, poll_hold_s=20.0)

    def use(client: tinker.ServiceClient) -> list[types.SampleResponse]:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        copies = [sampling, pickle.loads(pickle.dumps(sampling)), pickle.loads(pickle.dumps(sampling))]
        futures = [copy.sample(PROMPT, 1, PARAMS) for _ in range(10) for copy in copies]
        return [future.result() for future in futures]

    responses = await stand.sdk(use)
    ids = [response.sequences[0].sequence_id for response in responses]
    assert len(set(ids)) == 30
    clients = {int(sequence_id.split(":")[-2]) // CLIENT_SPAN for sequence_id in ids}
    assert len(clients) == 3
    if joins:
        assert clients == {0, 1, 2}
    assert stand.gateway is not None
    if uses_poller:
        futures = stand.gateway.components.futures

        async def all_gone() -> bool:
            return not futures._recent

        await eventually(all_gone)  # fetched results are acknowledged and dropped


async def test_sdk_raises_what_a_sample_failed_with_and_the_next_one_works(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> str:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        with pytest.raises(tinker.RequestFailedError) as caught:
            sampling.sample(types.ModelInput.from_ints([1, 5000]), 1, PARAMS).result()
        assert len(sampling.sample(PROMPT, 1, PARAMS).result().sequences) == 1
        return str(caught.value)

    assert "token id 5000" in await stand.sdk(use)


async def test_sdk_goes_on_over_a_restart_of_the_gateway(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> list[types.SampleResponse]:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(20)]
        return [future.result() for future in futures]

    stand.sampler.open.clear()
    work = asyncio.create_task(stand.sdk(use))
    await eventually(lambda: stand.sampler.running == 20)
    await stand.stop()
    await stand.start()
    stand.sampler.open.set()
    assert len(await work) == 20


@pytest.mark.parametrize("uses_poller", [True, False])
async def test_an_expired_sample_is_sent_again_by_the_sdk(
    stand: Stand, uses_poller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stand.stop()
    await stand.start(sdk_flags={"sample_use_retrieve_futures": uses_poller})
    assert stand.gateway is not None
    futures = stand.gateway.components.futures
    fetch = futures.wait
    expired: list[str] = []

    async def wait(future_id: str, owner: str, timeout_s: float) -> Outcome | Pending:
        if ":sample:" in future_id and not expired:
            expired.append(future_id)
            raise Expired("gone")
        return await fetch(future_id, owner, timeout_s)

    monkeypatch.setattr(futures, "wait", wait)

    def use(client: tinker.ServiceClient) -> types.SampleResponse:
        return client.create_sampling_client(base_model=MODEL).result().sample(PROMPT, 1, PARAMS).result()

    response = await stand.sdk(use)
    first, second = (request.request_id for request in stand.sampler.of("Sample"))
    assert first == expired[0] != second
    assert response.sequences[0].sequence_id == f"{second}:0"


@pytest.mark.parametrize("route", ["retrieve_future", "retrieve_futures"])
async def test_a_result_that_comes_while_a_poll_is_held_ends_it(stand: Stand, rest: Rest, route: str) -> None:
    """The conformance check C16 measures the delay."""
    await stand.stop()
    await stand.start(poll_hold_s=30.0)
    sampling_id = await base_session(rest)
    cursor = 0
    for seq_id in range(3):
        stand.sampler.open.clear()
        (request_id,) = await submit(rest, sampling_id, seq_id)
        await eventually(lambda: stand.sampler.running == 1)
        waiting = rest.poll(request_id) if route == "retrieve_future" else poll(rest, sampling_id, cursor)
        held = asyncio.create_task(waiting)
        await asyncio.sleep(0.05)
        assert not held.done()
        stand.sampler.open.set()
        answer = await asyncio.wait_for(held, 15)  # long before the poll's own end
        cursor = answer["cursor"] if isinstance(answer, dict) else 0
