"""Section B: many samples at once: retrieve_futures, acknowledgements, cancel_future."""

import asyncio
import time
from typing import Any

import httpx
import tinker
from starlette.responses import Response
from tinker import types

from fovea_conformance.check import Failed, check, expect
from fovea_conformance.checks.sequencing import is_pending
from fovea_conformance.proxy import Exchange, Proxy
from fovea_conformance.target import Target

_ACK_S = 1.0
_DROP_S = 5.0
_CANCEL_S = 10.0
_CLONE = 10**9


@check("C31", "retrieve_futures: 3 samples in one poll, the cursor advances, acks arrive, an ack-only poll is quick")
def c31_batched(target: Target) -> str:
    """Reads 3 finished samples with one raw poll of the right clone.

    Then checks that the SDK with the flag on uses these polls and acknowledgements only.
    """
    sampler_id, samples = _samples(target, 3)
    clone = str(target.submit_sample(sampler_id, 7 * _CLONE)["request_id"])
    target.poll(clone)
    page = _retrieve(target, sampler_id, 0)
    found = _states(page)
    expect(found == dict.fromkeys(samples, "finished"), f"one poll brought {found}, expected 3 finished: {samples}")
    expect(page["cursor"] > 0, f"the cursor did not advance: {page['cursor']}")
    sizes = [one.get("response_payload_uncompressed_size") for one in page["completions"]]
    expect(all(size is None or size > 0 for size in sizes), f"sizes of the payloads are {sizes}")
    other = _states(_retrieve(target, sampler_id, 0, clone=7))
    expect(other == {clone: "finished"}, f"the poll of clone 7 brought {other}, expected only {clone}")
    proxy = target.proxy({"sample_use_retrieve_futures": True})
    sampler = target.sampler(target.service(proxy)).result(60)
    params = types.SamplingParams(max_tokens=3, stop=[])
    futures = [sampler.sample(target.prompt(), 1, params) for _ in range(3)]
    counts = [len(one.result(60).sequences[0].tokens) for one in futures]
    expect(counts == [3, 3, 3], f"the SDK's samples have {counts} tokens")
    return f"3 in one poll, cursor {page['cursor']}; the SDK: {_check_polls(proxy)}"


@check("C32", "retrieve_futures with an old cursor replays completions not yet acked")
def c32_replay(target: Target) -> str:
    """Polls the same cursor twice, which must give the same results.

    Acknowledged results may be gone. A new cursor must give the others and the new ones.
    """
    sampler_id, samples = _samples(target, 3)
    first = _retrieve(target, sampler_id, 0)
    again = _retrieve(target, sampler_id, 0)
    expect(_states(again) == _states(first), f"cursor 0 brought {_states(first)}, then {_states(again)}")
    expect(set(_states(first)) == set(samples), f"3 samples ended, but {_states(first)} came")
    acked = set(_states(_retrieve(target, sampler_id, 0, retrieved=samples[:1])))
    expect(set(samples[1:]) <= acked, f"after one ack cursor 0 brings {sorted(acked)}, without ids not acked")
    late = str(target.submit_sample(sampler_id, 50)["request_id"])
    target.poll(late)
    following = _retrieve(target, sampler_id, first["cursor"])
    expect(late in _states(following), f"cursor {first['cursor']} does not bring the sample that ended after it")
    seen = set(_states(following)) & set(samples)
    expect(not seen, f"cursor {first['cursor']} brings again what came before it: {sorted(seen)}")
    expect(following["cursor"] > first["cursor"], f"the cursor went from {first['cursor']} to {following['cursor']}")
    return f"3 replayed at cursor 0; only the new one at cursor {first['cursor']}"


@check("C33", "retrieved_request_ids lets the server drop payloads; a later fetch gives 410")
def c33_acknowledged(target: Target) -> str:
    """Acknowledges one of two results. It must be gone, and the other must still be there, byte for byte."""
    sampler_id, (acked, kept) = _samples(target, 2)
    before = target.poll(kept, accept="application/x-protobuf").content
    _retrieve(target, sampler_id, 0, retrieved=[acked])
    deadline = time.monotonic() + _DROP_S
    while (gone := target.poll(acked)).status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.2)
    expect(gone.status_code == 410, f"an acknowledged result is answered {gone.status_code} {gone.text[:200]}")
    after = target.poll(kept, accept="application/x-protobuf")
    expect(after.content == before, f"the result not acknowledged is answered {after.status_code}, or is another")
    foreign, (other,) = _samples(target, 1)
    _retrieve(target, sampler_id, 0, retrieved=[other, "no-such-id"])
    status = target.poll(other).status_code
    expect(status == 200, f"an ack in another sampling session dropped a result of {foreign}: {status}")
    return f"410 {gone.text[:80]!r}; the other result stays"


@check("C34", "A failed sample appears with state failed and its retrieve_future has the error")
def c34_failed(target: Target) -> str:
    """Samples a prompt token outside every vocabulary between two good samples.

    The SDK with the flag on must raise its error.
    """
    sampler_id, _ = _samples(target, 1)
    bad = str(target.submit_sample(sampler_id, 40, tokens=[2**30])["request_id"])
    error = target.collect(bad)
    expect("error" in error, f"a prompt token of 2**30 was sampled from: {str(error)[:200]}")
    page = _retrieve(target, sampler_id, 0)
    state = _states(page).get(bad)
    expect(state == "failed", f"the failed sample's state is {state}: {str(page)[:200]}")
    expect("error" in target.collect(bad), "the error is gone after the poll")
    sampler = target.sampler(target.service(target.proxy({"sample_use_retrieve_futures": True}))).result(60)
    try:
        sampler.sample(types.ModelInput.from_ints([2**30]), 1, types.SamplingParams(max_tokens=2)).result(60)
    except tinker.RequestFailedError as failure:
        expect(failure.category == types.RequestErrorCategory.User, f"the SDK's error has {failure.category}")
        return f"failed; {str(error['error'])[:100]!r}, raised by the SDK as {type(failure).__name__}"
    raise Failed("the SDK's sample of a token outside the vocabulary succeeded")


@check("C35", "cancel_future stops generation quickly; repeat and late cancels return 2xx")
def c35_cancel(target: Target) -> str:
    """Cancels long samples while they run, which must end with an error within seconds.

    The SDK must cancel abandoned samples.
    """
    sampler_id = target.sampling_session(target.session())
    short = target.submit_sample(sampler_id, 0)["request_id"]
    target.poll(short)
    long = [str(target.submit_sample(sampler_id, 1 + n, _longest(target), num_samples=4)["request_id"]) for n in (0, 1)]
    time.sleep(0.5)
    begun = time.monotonic()
    statuses = [target.post("cancel_future", request_id=request_id).status_code for request_id in (*long, *long, short)]
    expect(all(200 <= status < 300 for status in statuses), f"cancels, repeats and a late one gave {statuses}")
    running = [request_id for request_id in long if is_pending(target, request_id, _CANCEL_S)]
    expect(not running, f"{len(running)} of 2 samples still run {_CANCEL_S:.0f} s after their cancel")
    results = [target.poll(request_id) for request_id in long]
    ended_s = time.monotonic() - begun
    done = [one.text[:100] for one in results if one.status_code == 200 and "error" not in one.json()]
    expect(not done, f"a cancelled sample ran to its end: {done}")
    late = target.post("cancel_future", request_id=long[0]).status_code
    expect(200 <= late < 300, f"a cancel of what was cancelled before is answered {late}")
    expect(target.poll(short).status_code == 200, "a late cancel took a finished result away")
    return f"ended {ended_s:.2f} s after cancel; repeats and late ones {set(statuses)}; the SDK {_abandon(target)}"


def _samples(target: Target, count: int) -> tuple[str, list[str]]:
    """Returns a new sampling session, and the request_ids of finished samples in it."""
    sampler_id = target.sampling_session(target.session())
    ids = [str(target.submit_sample(sampler_id, number)["request_id"]) for number in range(count)]
    for request_id in ids:
        result = target.collect(request_id)
        expect("error" not in result, f"a sample failed: {str(result)[:200]}")
    return sampler_id, ids


def _retrieve(
    target: Target, sampler_id: str, cursor: int, retrieved: list[str] | None = None, clone: int = 0
) -> dict[str, Any]:
    """Polls once. The server must respond at once."""
    begun = time.monotonic()
    of = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": clone}
    answer = target.post(
        "retrieve_futures", target=of, prev_cursor=cursor, timeout=0, retrieved_request_ids=retrieved or []
    )
    seconds = time.monotonic() - begun
    expect(answer.status_code == 200, f"retrieve_futures is answered {answer.status_code} {answer.text[:200]}")
    expect(seconds < 5 * _ACK_S, f"retrieve_futures with timeout 0 took {seconds:.1f} s; clients give up at 5")
    page: dict[str, Any] = answer.json()
    whole = isinstance(page.get("cursor"), int) and isinstance(page.get("completions"), list)
    expect(whole, f"retrieve_futures answered {str(page)[:200]}")
    return page


def _states(page: dict[str, Any]) -> dict[str, str]:
    return {str(one["request_id"]): str(one["state"]) for one in page["completions"]}


def _check_polls(proxy: Proxy) -> str:
    """Checks the requests of the SDK's poller after it has acknowledged everything."""
    ids = {one.answer_json()["request_id"] for one in proxy.of("asample")}
    deadline = time.monotonic() + 20
    while True:
        polls = [one for one in proxy.of("retrieve_futures") if one.status]
        acked = {name for one in polls for name in one.json().get("retrieved_request_ids", [])}
        if ids <= acked:
            break
        expect(time.monotonic() < deadline, f"the SDK acknowledged {sorted(acked)} of {sorted(ids)}")
        time.sleep(0.1)
    wrong = [one.status for one in polls if one.status != 200]
    expect(not wrong, f"the SDK's retrieve_futures were answered {wrong}")
    cursors = [one.answer_json()["cursor"] for one in polls]
    expect(cursors == sorted(cursors) and cursors[-1] > 0, f"the cursors the SDK was given are {cursors}")
    quick = [one.held_s for one in polls if one.json().get("timeout") == 0]
    expect(bool(quick) and min(quick) < _ACK_S, f"ack-only polls took {[round(one, 2) for one in quick]} s")
    single = sum(one.headers.get("x-tinker-request-type") == "Sample" for one in proxy.of("retrieve_future"))
    expect(single == len(ids), f"{single} retrieve_future calls for {len(ids)} samples; each needs one")
    return f"{len(polls)} polls, acks of {len(ids)}, ack-only in {min(quick) * 1e3:.0f} ms"


def _longest(target: Target) -> int:
    """Returns the number of tokens of the longest answer that fits after a short prompt."""
    models = target.http.get("get_server_capabilities").json()["supported_models"]
    return min(next(int(one["max_context_length"]) for one in models if one["model_name"] == target.model) - 64, 32_000)


def _abandon(target: Target) -> str:
    """Expects that the SDK cancels an abandoned sample on the server."""

    def allow_cancels(exchange: Exchange) -> Response | None:
        if exchange.route != "client/dynamic_config":
            return None
        return Response(
            httpx.Response(200, json={"sample_cancel_enabled": True}).content, media_type="application/json"
        )

    proxy = target.proxy(after=allow_cancels)
    sampler = target.sampler(target.service(proxy)).result(60)

    async def give_up() -> None:
        params = types.SamplingParams(max_tokens=_longest(target), stop=[])
        future = sampler.sample(target.prompt(), 1, params)
        try:
            await future.result_async(timeout=1.0)
        except (TimeoutError, asyncio.CancelledError):
            return
        raise Failed("the longest answer took less than a second: nothing was left to cancel")

    asyncio.run(give_up())
    deadline = time.monotonic() + 15
    while not any(one.status for one in proxy.of("cancel_future")):
        expect(time.monotonic() < deadline, "the SDK sent no cancel_future within 15 s of giving up")
        time.sleep(0.05)
    sent = list(proxy.of("cancel_future"))
    expect(
        all(200 <= one.status < 300 for one in sent), f"the SDK's cancels were answered {[one.status for one in sent]}"
    )
    result = target.collect(sent[0].json()["request_id"], 60)
    expect("error" in result, f"the abandoned sample ran to its end: {str(result)[:100]}")
    return f"sent {len(sent)}"
