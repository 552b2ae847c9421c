"""Section A: the life of a session: heartbeats, restarts, silence and end."""

import subprocess
import time
from typing import Any

import httpx
import tinker
from starlette.responses import Response
from tinker import types

from fovea_conformance.check import Failed, NotApplicable, check, expect
from fovea_conformance.checks.sequencing import is_pending
from fovea_conformance.proxy import Exchange, Proxy
from fovea_conformance.target import Target

_BEAT_S = 10.0
_RESTART_S = 300.0
_SWEEP_S = 60.0


@check("C6", "Heartbeat: a known session 200, a finished one 410; the client's loop stops", background=True)
def c6_heartbeat(target: Target) -> str:
    """Sends raw heartbeats before and after the end.

    An SDK with a finished session must send one more heartbeat, see 410, and stop.
    """
    proxy = target.proxy()
    service = target.service(proxy)
    session_id = service.holder.get_session_id()
    alive = target.beat(session_id)
    expect(alive.status_code == 200, f"the heartbeat of a known session was answered {alive.status_code}")
    expect(alive.json().get("type") == "session_heartbeat", f"the answer's type is not session_heartbeat: {alive.text}")
    _finish(target, session_id)
    over = target.beat(session_id)
    expect(over.status_code == 410, f"the heartbeat of a finished session was answered {over.status_code}, not 410")
    unknown = target.beat("no-such-session").status_code
    expect(400 <= unknown < 500, f"the heartbeat of an unknown session was answered {unknown}")
    deadline = time.monotonic() + 4 * _BEAT_S
    while not any(one.status for one in proxy.of("session_heartbeat")):
        expect(time.monotonic() < deadline, f"the SDK did not beat within {4 * _BEAT_S:.0f} s")
        time.sleep(0.2)
    time.sleep(1.5 * _BEAT_S)
    beats = [one.status for one in proxy.of("session_heartbeat")]
    expect(beats == [410], f"the SDK's beats after the end were answered {beats}, expected one 410 and no other")
    return f"200, then 410 (unknown: {unknown}); the SDK's loop stopped after one 410"


@check("C7", "Sessions, models and pending futures survive a server restart", timeout_s=2 * _RESTART_S, alone=True)
def c7_restart(target: Target) -> str:
    """Kills the server with one finished and two waiting losses.

    The results must be the same bytes, still waiting, and then right. An SDK must continue too.
    """
    if not target.options.restart_command:
        raise NotApplicable("needs --restart-command, which kills the server with SIGKILL and brings it back")
    session_id = target.session()
    model_id = target.raw_model(session_id)
    first = target.submit_loss(model_id, 1)
    before = target.poll(first, accept="application/x-protobuf").content
    waiting = [target.submit_loss(model_id, seq_id, forward_only=True) for seq_id in (3, 4)]
    is_back = [False]
    proxy, future = _loss_over_the_restart(target, is_back)
    downtime_s = _restart(target)
    restarted = time.monotonic()
    beat = target.beat(session_id)
    expect(
        beat.status_code == 200, f"after the restart the heartbeat was answered {beat.status_code} {beat.text[:200]}"
    )
    info = target.post("get_info", model_id=model_id, type="get_info")
    expect(info.status_code == 200, f"after the restart get_info was answered {info.status_code} {info.text[:200]}")
    after = target.poll(first, accept="application/x-protobuf").content
    expect(after == before, f"a result of {len(before)} bytes came back as {len(after)} other bytes after the restart")
    again = target.submit_loss(model_id, 4, forward_only=True)
    expect(again == waiting[1], f"a repeated request got the id {again} after the restart, not {waiting[1]}")
    target.submit_loss(model_id, 2, forward_only=True)
    losses = [target.output(request_id).metrics["loss:sum"] for request_id in waiting]
    is_back[0] = True
    result = future.result(120)
    expect(len(result.loss_fn_outputs) == 3, f"the SDK's loss returned {len(result.loss_fn_outputs)} of 3 outputs")
    _wait_for_beat(proxy, restarted)
    return (
        f"down {downtime_s:.1f} s; result identical, waiting losses {losses[0]:.3f}, the SDK's loss and beats went on"
    )


@check(
    "C8",
    "No heartbeat for the expiry period cancels a session's sampling and frees its models",
    timeout_s=300,
    background=True,
)
def c8_silence(target: Target) -> str:
    """Leaves a session with a model, a waiting loss and a long sample without heartbeats.

    After the period all must have ended.
    """
    period_s = target.options.session_ttl_s
    if not period_s:
        raise NotApplicable("needs --session-ttl-s, the seconds of silence after which the server ends a session")
    session_id = target.session()
    model_id = target.raw_model(session_id)
    sampler_id = target.sampling_session(session_id)
    sample = _long_sample(target, sampler_id)
    waiting = target.submit_loss(model_id, 2)
    begun = time.monotonic()
    ended_in_time = _ends_while_open(target, session_id, sample, begun + period_s + _SWEEP_S)
    time.sleep(max(0.0, begun + period_s + _SWEEP_S - time.monotonic()))
    over = target.beat(session_id).status_code
    silent_s = time.monotonic() - begun
    expect(over == 410, f"after {silent_s:.0f} s of silence (period {period_s:.0f} s) the heartbeat is answered {over}")
    for route, body in _work(target, model_id, sampler_id).items():
        _expect_refused(target, route, body)
    ended = _ended_with_error(target, waiting)
    expect(ended, "a loss that waited in the silent session neither failed nor vanished")
    if ended_in_time:
        return f"410 after {silent_s:.0f} s, work refused; the longest sample possible had ended before"
    expect(_ended_with_error(target, sample), "the silent session's sample was not cancelled")
    return f"410 after {silent_s:.0f} s: the sample was cancelled, the waiting loss failed, new work is refused"


@check("C10", "close() ends the session; later training on it is refused; the first reason stays")
def c10_close(target: Target) -> str:
    """Closes a session with success.

    Raw requests must then be refused, and a second finish with errored must change nothing.
    """
    service = target.service()
    training = target.training(service)
    session_id, model_id = service.holder.get_session_id(), training.model_id
    sampler_id = target.sampling_session(session_id, 7)
    service.close("success", detail="done").result(30)
    first, shown = target.beat(session_id), _status(target, session_id)
    expect(first.status_code == 410, f"after close() the heartbeat is answered {first.status_code}, not 410")
    for route, body in _work(target, model_id, sampler_id).items():
        _expect_refused(target, route, body)
    again = _finish(target, session_id, "errored")
    expect(again.is_success, f"a second finish was answered {again.status_code} {again.text[:200]}")
    second, shown_again = target.beat(session_id), _status(target, session_id)
    expect(second.status_code == 410, f"after a second finish the heartbeat is answered {second.status_code}")
    expect(shown_again == shown, f"the second finish changed the status from {shown} to {shown_again}")
    finished = {"type": "client_finished", "reason": {"type": "success"}, "detail": "done"}
    expect(shown in (finished, None), f"after close('success') the session's status is {shown}")
    if "success" in first.text:
        kept = "success" in second.text and "errored" not in second.text
        expect(kept, f"the second finish changed the reason: {second.text[:200]}")
    status = shown["type"] if shown else "not served"
    return f"refused with 410 {first.text[:90]!r}, the same after a second finish; status {status}"


def _finish(target: Target, session_id: str, reason: str = "success") -> httpx.Response:
    return target.post(f"sessions/{session_id}/finish", reason={"type": reason}, detail=None)


def _status(target: Target, session_id: str) -> dict[str, Any] | None:
    """Returns the session's status from sessions/search; None if that is not supported."""
    answer = target.post("sessions/search", session_id=session_id, user_metadata={}, owner={"type": "own"}, limit=5)
    if not answer.is_success:
        return None
    found = [one for one in answer.json()["sessions"] if one["session_id"] == session_id]
    status: dict[str, Any] | None = found[0]["status"] if found else None
    return status


def _ends_while_open(target: Target, session_id: str, sample: str, deadline: float) -> bool:
    """Waits for the end of a sample or of its session; returns whether the sample ended first.

    `deadline` is a `time.monotonic` value.
    """
    status = _status(target, session_id)
    while time.monotonic() < deadline:
        is_open = _status(target, session_id) == status
        if not is_pending(target, sample):
            return is_open and not _ended_with_error(target, sample)
        if not is_open:
            return False
        time.sleep(0.5)
    return False


def _work(target: Target, model_id: str, sampler_id: str) -> dict[str, dict[str, object]]:
    """Returns requests that a finished session must refuse."""
    return {
        "optim_step": {"model_id": model_id, "seq_id": 9, "adam_params": {"learning_rate": 1e-4}, "type": "optim_step"},
        "asample": target.sample_body(sampler_id, 1),
    }


def _expect_refused(target: Target, route: str, body: dict[str, object]) -> None:
    answer = target.post(route, **body)
    if answer.status_code == 200:
        result = target.collect(answer.json()["request_id"], 30)
        expect("error" in result, f"{route} was carried out in a session that is over: {str(result)[:200]}")
        return
    final = 400 <= answer.status_code < 500 and answer.status_code not in (408, 409, 429)
    expect(final, f"{route} in a session that is over is answered {answer.status_code}, which clients repeat")


def _ended_with_error(target: Target, request_id: str) -> bool:
    answer = target.poll(request_id, 40)
    return "error" in answer.json() if answer.status_code == 200 else 400 <= answer.status_code < 500


def _long_sample(target: Target, sampler_id: str) -> str:
    """Submits sixteen samples with the most tokens of one sample, which no engine finishes within the period."""
    models = target.http.get("get_server_capabilities").json()["supported_models"]
    context = next(int(one["max_context_length"]) for one in models if one["model_name"] == target.model)
    sample = target.submit_sample(sampler_id, 1, context - 64, num_samples=16)
    return str(sample["request_id"])


def _loss_over_the_restart(
    target: Target, is_back: list[bool]
) -> tuple[Proxy, tinker.APIFuture[types.ForwardBackwardOutput]]:
    """Submits an SDK loss of three chunks, and holds back the first, so that the others wait while the server dies."""
    seen: list[int] = []

    def hold_first(exchange: Exchange) -> Response | None:
        if exchange.route != "forward_backward":
            return None
        seen.append(len(exchange.body))
        return Response("held back", 503) if len(seen) > 2 and not is_back[0] else None

    proxy = target.proxy({"fwdbwd_max_chunk_len": 1, "use_pyqwest_transport": False}, before=hold_first)
    training = target.training(target.service(proxy))
    future = training.forward_backward([target.datum(seed=seed) for seed in range(3)], "cross_entropy")
    deadline = time.monotonic() + 30
    while len(seen) < 3:
        expect(time.monotonic() < deadline, f"the SDK sent {len(seen)} of 3 chunks within 30 s")
        time.sleep(0.05)
    return proxy, future


def _restart(target: Target) -> float:
    begun = time.monotonic()
    done = subprocess.run(
        target.options.restart_command, shell=True, capture_output=True, text=True, timeout=_RESTART_S, check=False
    )
    if done.returncode:
        raise Failed(f"the restart command ended with {done.returncode}: {(done.stderr or done.stdout)[-300:]}")
    while time.monotonic() - begun < _RESTART_S:
        try:
            if target.http.get("get_server_capabilities").status_code == 200:
                return time.monotonic() - begun
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise Failed(f"the server did not come back within {_RESTART_S:.0f} s")


def _wait_for_beat(proxy: Proxy, since_s: float) -> None:
    deadline = time.monotonic() + 4 * _BEAT_S
    while True:
        beats = [one.status for one in proxy.of("session_heartbeat") if one.started_s > since_s and one.status]
        if 200 in beats:
            return
        expect(time.monotonic() < deadline, f"no good heartbeat of the SDK after the restart, only {beats}")
        time.sleep(0.2)
