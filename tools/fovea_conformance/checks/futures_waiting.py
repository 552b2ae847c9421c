"""Section B: waiting futures: polls are held, submissions stay quick, and results arrive at once."""

import asyncio
import concurrent.futures
import itertools
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import tinker
from starlette.responses import Response
from tinker import types
from tinker.proto import tinker_public_pb2

from fovea_conformance.check import Failed, check, expect
from fovea_conformance.checks.sequencing import is_pending
from fovea_conformance.proxy import Exchange, Proxy
from fovea_conformance.target import Target, unique_name

_SUBMIT_S = 1.0
_BUSY_S = (2.5, 7.5, 22.5)
_DELIVERY_S = 0.2
_POLLS = 2000
_HTTPX_GIVES_UP_S, _PYQWEST_GIVES_UP_S = 45.0, 90.0
_QUEUE_STATES = ("active", "paused_capacity", "paused_rate_limit")


@check("C13", "Every submit answers under 1 s while the engine is busy")
def c13_submit_while_busy(target: Target) -> str:
    """Keeps the trainer busy for 10 s with losses, next to long samples. Then makes two submissions of each type.

    If the trainer finishes too soon, this is repeated with more losses, because times beside an idle trainer mean
    nothing.
    """
    for busy_s in _BUSY_S:
        slowest, still_busy = _submit_while_busy(target, busy_s)
        slow = {name: round(seconds, 2) for name, seconds in slowest.items() if seconds > _SUBMIT_S}
        expect(not slow, f"the best of two submissions took longer than {_SUBMIT_S} s while the trainer worked: {slow}")
        if still_busy:
            worst = max(slowest, key=slowest.__getitem__)
            return f"{len(slowest)} kinds while busy, the slowest {worst} in {slowest[worst]:.3f} s"
    raise Failed(f"losses sized for {4 * _BUSY_S[-1]:.0f} s ended before the trainer could be seen busy")


def _submit_while_busy(target: Target, busy_s: float) -> tuple[dict[str, float], bool]:
    """Returns the seconds of each type's faster submission, and whether the trainer was busy until the end."""
    session_id = target.session()
    model_id, sampler_id = target.raw_model(session_id), target.sampling_session(session_id)
    busy = _keep_busy(target, model_id, busy_s)
    for number in range(2):
        target.submit_sample(sampler_id, 10 + number, 2000, num_samples=2)
    seq_ids = itertools.count(7)
    slowest: dict[str, float] = {}
    for name, submit in _submissions(target, session_id, model_id, sampler_id, seq_ids).items():
        slowest[name] = min(_timed(submit) for _ in range(2))
    still_busy = is_pending(target, busy, 0.05)
    _finish(target, session_id)
    return slowest, still_busy


@check("C14", "An unfinished future is held 20-40 s, then answered 408 or try_again; under 4 polls a minute",
       background=True)  # fmt: skip
def c14_held_polls(target: Target) -> str:
    """Raises the seq_id of an SDK loss in a proxy, so that the loss waits for a missing request.

    Measures the duration of its polls.
    """
    proxy, _, _ = _held_loss(target, pyqwest=False)
    polls = _finished_polls(proxy, 2, 100.0)
    window_s = polls[1].ended_s - polls[0].started_s
    for one in polls:
        expect(_is_held(one), f"an unfinished future was answered {one.status} {one.answer[:200]!r}")
        expect(20 <= one.held_s <= 40, f"a poll of an unfinished future was held {one.held_s:.1f} s, not 20 to 40")
    rate = len(polls) * 60 / window_s
    expect(rate < 4, f"{rate:.1f} polls a minute")
    return f"held {', '.join(f'{one.held_s:.1f}' for one in polls)} s, {rate:.1f} polls a minute"


@check("C15", "Neither transport (pyqwest, httpx) reports a client timeout on a job of 5 minutes", background=True)
def c15_long_job(target: Target) -> str:
    """Lets two SDK losses wait for a missing request for --long-job-s. No poll may outlive the client's limit."""
    held = {pyqwest: _held_loss(target, pyqwest) for pyqwest in (True, False)}
    begun = time.monotonic()
    time.sleep(target.options.long_job_s)
    said = []
    for pyqwest, (proxy, model_id, future) in held.items():
        name, limit_s = ("pyqwest", _PYQWEST_GIVES_UP_S) if pyqwest else ("httpx", _HTTPX_GIVES_UP_S)
        ended = [one.status for one in _loss_polls(proxy) if one.status not in (200, 408) or not _is_held(one)]
        expect(not ended, f"the loss over {name} ended with {ended} although the request before it never came")
        target.submit_loss(model_id, 1, forward_only=True)
        outputs = future.result(60).loss_fn_outputs
        expect(len(outputs) == 1, f"the loss over {name} has {len(outputs)} outputs")
        polls = _loss_polls(proxy)
        longest = max(one.held_s for one in polls)
        expect(longest < limit_s, f"a poll over {name} took {longest:.1f} s; the client gives up at {limit_s:.0f} s")
        counted = [int(one.headers["x-tinker-request-iteration"]) for one in polls]
        expect(counted == list(range(len(polls))), f"polls over {name} were repeated by the client: {counted}")
        said.append(f"{name}: {len(polls)} polls, the longest {longest:.1f} s")
    return f"{time.monotonic() - begun:.0f} s; {'; '.join(said)}"


@check("C16", "A result completing mid-poll is delivered within 200 ms")
def c16_delivery(target: Target) -> str:
    """Compares a poll that waits for a loss with frequent polls of the same loss, every few ms; best of five."""
    model_id = target.raw_model(target.session())
    seq_ids = itertools.count(1)

    def mid_poll() -> float:
        first, second = next(seq_ids), next(seq_ids)
        waiting = target.submit_loss(model_id, second, forward_only=True)
        with concurrent.futures.ThreadPoolExecutor(1) as pool, target.raw() as http:
            polling = pool.submit(_poll_once, http, waiting)
            time.sleep(0.3)
            begun = time.monotonic()
            target.submit_loss(model_id, first, forward_only=True)
            expect(polling.result(60).status_code == 200, "the poll did not bring the result")
            return time.monotonic() - begun

    def asked_anew() -> float:
        first, second = next(seq_ids), next(seq_ids)
        waiting = target.submit_loss(model_id, second, forward_only=True)
        begun = time.monotonic()
        target.submit_loss(model_id, first, forward_only=True)
        while is_pending(target, waiting, 0.02):
            expect(time.monotonic() - begun < 60, "two tiny losses took a minute")
        return time.monotonic() - begun

    compute_s = min(asked_anew() for _ in range(3))
    delivered_s = min(mid_poll() for _ in range(5))
    late_s = delivered_s - compute_s
    expect(late_s <= _DELIVERY_S, f"delivered {delivered_s:.3f} s after submission; done after {compute_s:.3f} s")
    return f"delivered {delivered_s * 1e3:.0f} ms after submission, ready after {compute_s * 1e3:.0f} ms"


@check("C27", "queue_state and reason reach the SDK's log when a request waits for capacity", background=True)
def c27_queue_state(target: Target) -> str:
    """Expects that the poll of a waiting request contains both fields.

    Responds to a sample with paused_capacity and a reason, which the SDK must log.
    """
    model_id = str(target.training().model_id)  # of a session that the SDK keeps alive for as long as a poll is held
    answer = _poll_once(target.http, target.submit_loss(model_id, 2))
    said = answer.json()
    state, why = said.get("queue_state"), said.get("queue_state_reason")
    expect(state in _QUEUE_STATES, f"a waiting request has the queue_state {state!r}, not one of {_QUEUE_STATES}")
    expect(isinstance(why, str) and bool(why), f"a waiting request has the queue_state_reason {why!r}")
    reason = unique_name("no room in the engine")
    paused = {**said, "type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": reason}
    repeats = itertools.count()

    def pause_twice(exchange: Exchange) -> Response | None:
        if exchange.headers.get("x-tinker-request-type") != "Sample" or next(repeats) > 1:
            return None
        return Response(httpx.Response(408, json=paused).content, 408, media_type="application/json")

    sampler = target.sampler(target.service(target.proxy(before=pause_twice))).result(60)
    with _sdk_log("tinker.lib.public_interfaces.sampling_client") as lines:
        sampler.sample(target.prompt(), 1, types.SamplingParams(max_tokens=2)).result(60)
    logged = [line for line in lines if reason in line]
    expect(bool(logged), f"the SDK did not log {reason!r}; it logged {lines}")
    return f"{state}: {why!r}; and the SDK logs {logged[0][:60]!r}"


@check("C28", "2000 simultaneous retrieve_future polls from one client stay responsive", timeout_s=240)
def c28_many_polls(target: Target) -> str:
    """Opens 2000 polls of 20 waiting losses.

    Other requests must stay quick. Then one submission must give all polls their results.
    """
    session_id = target.session()
    model_id = target.raw_model(session_id)
    waiting = [target.submit_loss(model_id, seq_id, forward_only=True) for seq_id in range(2, 22)]
    other = target.raw_model(session_id, 1)
    with _heartbeats(target, session_id):
        statuses, quick, released_s = asyncio.run(_poll_many(target, waiting, model_id, other))
    wrong = {status: statuses.count(status) for status in set(statuses) if status != 200}
    expect(not wrong, f"of {_POLLS} polls some were not answered 200 after their losses ended: {wrong}")
    middle, worst = statistics.median(quick), max(quick)
    expect(middle < _SUBMIT_S, f"beside {_POLLS} open polls a heartbeat takes {middle:.2f} s in the middle")
    return (
        f"other requests in {middle * 1e3:.0f} ms (worst {worst * 1e3:.0f}); all polls answered in {released_s:.1f} s"
    )


@contextmanager
def _heartbeats(target: Target, session_id: str) -> Iterator[None]:
    """Sends a heartbeat of the session every 5 s, as a client does; on a loaded machine the polls take long to open."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(5.0):
            target.beat(session_id)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def _poll_many(
    target: Target, waiting: list[str], model_id: str, other_id: str
) -> tuple[list[int], list[float], float]:
    base_url = f"{target.options.base_url.rstrip('/')}/api/v1/"
    headers = {"X-API-Key": target.options.api_key}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    quick = []
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=120, limits=limits) as http:

        async def poll(request_id: str) -> int:
            while True:
                body = {"request_id": request_id, "allow_metadata_only": False}
                answer = await http.post("retrieve_future", json=body)
                if answer.status_code != 408 and answer.json().get("type") != "try_again":
                    return answer.status_code

        polls = [asyncio.create_task(poll(waiting[number % len(waiting)])) for number in range(_POLLS)]
        await asyncio.sleep(3)
        expect(not any(one.done() for one in polls), "polls of unfinished losses were answered at once")
        for _ in range(5):
            begun = time.monotonic()
            (await http.post("get_info", json={"model_id": other_id, "type": "get_info"})).raise_for_status()
            quick.append(time.monotonic() - begun)
        other = await asyncio.to_thread(target.submit_loss, other_id, 1, forward_only=True)
        await asyncio.wait_for(poll(other), 30)
        begun = time.monotonic()
        await asyncio.to_thread(target.submit_loss, model_id, 1, forward_only=True)
        statuses = await asyncio.gather(*polls)
        return statuses, quick, time.monotonic() - begun


def _held_loss(target: Target, pyqwest: bool) -> tuple[Proxy, str, tinker.APIFuture[types.ForwardBackwardOutput]]:
    """Submits an SDK forward that the server must hold, because its seq_id is 2 and request 1 is missing."""

    def raise_seq_id(exchange: Exchange) -> Response | None:
        if exchange.route == "forward_backward":
            message = tinker_public_pb2.ForwardBackwardRequest.FromString(exchange.body)
            message.seq_id += 1
            exchange.body = message.SerializeToString()
        return None

    flags = {"proto_compress_fwdbwd": False, "use_pyqwest_transport": pyqwest}
    proxy = target.proxy(flags, before=raise_seq_id)
    training = target.training(target.service(proxy))
    return proxy, str(training.model_id), training.forward([target.datum()], "cross_entropy")


def _loss_polls(proxy: Proxy) -> list[Exchange]:
    """Returns the polls of the loss, without those of the model's creation."""
    polls = [one for one in proxy.of("retrieve_future") if one.headers.get("x-tinker-request-type") == "Forward"]
    return [one for one in polls if one.status]


def _is_held(poll: Exchange) -> bool:
    """Returns whether a poll was answered with try_again or 408."""
    return poll.status == 408 or (poll.status == 200 and b'"try_again"' in poll.answer)


def _finished_polls(proxy: Proxy, count: int, timeout_s: float) -> list[Exchange]:
    deadline = time.monotonic() + timeout_s
    while len(polls := _loss_polls(proxy)) < count:
        expect(time.monotonic() < deadline, f"only {len(polls)} polls were answered within {timeout_s:.0f} s")
        time.sleep(0.2)
    return polls[:count]


def _poll_once(http: httpx.Client, request_id: str) -> httpx.Response:
    return http.post("retrieve_future", json={"request_id": request_id, "allow_metadata_only": False})


def _keep_busy(target: Target, model_id: str, busy_s: float) -> str:
    """Submits four losses that each keep the trainer busy for `busy_s`.

    Their size is estimated from a small one. Returns the last request_id.
    """
    target.output(target.submit_loss(model_id, 1, [target.datum(256)] * 4))
    begun = time.monotonic()
    target.output(target.submit_loss(model_id, 2, [target.datum(256)] * 4))
    datums_per_s = 4 / (time.monotonic() - begun)
    data = [target.datum(256)] * min(max(int(datums_per_s * busy_s), 8), 1000)
    return [target.submit_loss(model_id, seq_id, data) for seq_id in (3, 4, 5, 6)][-1]


def _submissions(
    target: Target, session_id: str, model_id: str, sampler_id: str, seq_ids: Iterator[int]
) -> dict[str, Callable[[], Any]]:
    of_model = {"model_id": model_id}
    lora = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}

    def training(route: str, **body: Any) -> Callable[[], Any]:
        return lambda: target.submit(route, **of_model, seq_id=next(seq_ids), type=route, **body)

    return {
        "forward_backward": lambda: target.submit_loss(model_id, next(seq_ids), [target.datum(256)] * 16),
        "optim_step": training("optim_step", adam_params={"learning_rate": 1e-4}),
        "save_weights": training("save_weights", path=unique_name("c13")),
        "save_weights_for_sampler": training("save_weights_for_sampler", kind="snapshot", path=unique_name("c13")),
        "load_weights": training("load_weights", path=f"tinker://{model_id}/weights/none", optimizer=False),
        "create_model": lambda: target.submit(
            "create_model", session_id=session_id, model_seq_id=next(seq_ids), base_model=target.model,
            lora_config=lora, type="create_model",
        ),
        "asample": lambda: target.submit_sample(sampler_id, next(seq_ids)),
        "create_sampling_session": lambda: target.sampling_session(session_id, next(seq_ids)),
    }  # fmt: skip


def _timed(submit: Callable[[], Any]) -> float:
    begun = time.monotonic()
    submit()
    return time.monotonic() - begun


def _finish(target: Target, session_id: str) -> None:
    target.post(f"sessions/{session_id}/finish", reason={"type": "interrupted"}, detail=None)


@contextmanager
def _sdk_log(name: str) -> Iterator[list[str]]:
    """Yields the records of one logger of the SDK, at any level of the program."""
    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, keeper = logging.getLogger(name), Keeper()
    level, logger.propagate = logger.level, False
    logger.addHandler(keeper)
    logger.setLevel(logging.WARNING)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.propagate = True
        logger.removeHandler(keeper)
