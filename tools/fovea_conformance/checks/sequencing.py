"""Section C: the order of training requests, and the effect of a failure on the requests after it."""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2

from fovea_conformance.check import Failed, check, expect
from fovea_conformance.proxy import Proxy
from fovea_conformance.target import Target, loss_body

_ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)
_STEP = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
_SAME = 1e-4
_MOVED = 1e-2
_ACCEPT_S = 1.0
_HANG_S = 30.0
_TRIES = 3
_PLAIN = {"proto_compress_fwdbwd": False}


@check("C37", "Chunks arriving 2, 3, 4, 1 run in order 1, 2, 3, 4")
def c37_order(target: Target) -> str:
    """Sends loss, step, loss and forward as 2, 3, 4, 1.

    The model must end like one with the same seed that gets 1 to 4.
    """
    session_id = target.session()
    models = target.raw_model(session_id, 0), target.raw_model(session_id, 1)
    shuffled = _send(target, models[0], (2, 3, 4, 1))
    sorted_ids = _send(target, models[1], (1, 2, 3, 4))
    found, wanted = _losses(target, shuffled), _losses(target, sorted_ids)
    expect(_near(found, wanted), f"losses {found} in shuffled order, {wanted} in order")
    moved = abs(wanted[1] - wanted[0])
    expect(moved > _MOVED, f"the step between moved the loss by {moved:.2g} only, so the order cannot be seen")
    return f"losses {', '.join(f'{one:.4f}' for one in found)} either way"


@check("C38", "Submitting seq 5 before seq 1 returns at once and stays pending")
def c38_early(target: Target) -> str:
    """Measures a submission and a poll of half a second, which must stay open.

    Then 1 to 4 arrive, and the poll must end.
    """
    model_id = target.raw_model(target.session())
    seconds = []
    for _ in range(3):
        begun = time.monotonic()
        early = target.submit_loss(model_id, 5, forward_only=True)
        seconds.append(time.monotonic() - begun)
    expect(min(seconds) < _ACCEPT_S, f"accepting seq 5 before seq 1 took {min(seconds):.2f} s")
    expect(is_pending(target, early), "seq 5 ended before seq 1 to 4 had come")
    for seq_id in (4, 3, 2):
        target.submit_loss(model_id, seq_id, forward_only=True)
    expect(is_pending(target, early), "seq 5 ended before seq 1 had come")
    target.submit_loss(model_id, 1, forward_only=True)
    loss = target.output(early).metrics["loss:sum"]
    return f"accepted in {min(seconds) * 1e3:.0f} ms, pending until seq 1 came, then loss {loss:.3f}"


@check("C39", "optim_step queued right behind a forward_backward sees exactly its gradients")
def c39_pipeline(target: Target) -> str:
    """Submits loss and step twice without waiting. The weights must be those of the same requests one by one."""
    service = target.service()
    data = [target.datum(seed=seed) for seed in (1, 2, 3)]
    piped, stepped = target.training(service), target.training(service)
    futures: list[tinker.APIFuture[Any]] = []
    for datum in data[:2]:
        futures += [piped.forward_backward([datum], "cross_entropy"), piped.optim_step(_ADAM)]
    last = piped.forward(data, "cross_entropy")
    for future in futures:
        future.result(60)
    for datum in data[:2]:
        stepped.forward_backward([datum], "cross_entropy").result(60)
        stepped.optim_step(_ADAM).result(60)
    found, wanted = logprobs_of(last.result(60)), logprobs_of(stepped.forward(data, "cross_entropy").result(60))
    gap = float(np.abs(found - wanted).max())
    expect(gap < _SAME, f"after pipelined turns log-probabilities differ by {gap:.2g} from those of turns one by one")
    both = target.training(service)
    both.forward_backward(data[:2], "cross_entropy")
    both.optim_step(_ADAM)
    other = logprobs_of(both.forward(data, "cross_entropy").result(60))
    reach = float(np.abs(other - wanted).max())
    expect(reach > _MOVED, f"another order moves log-probabilities by {reach:.2g} only, so the order cannot be seen")
    return f"log-probabilities differ by {gap:.1g}; another grouping of gradients moves them by {reach:.2g}"


@check("C42", "A bad datum in chunk 3 of 4 fails its future, the SDK call raises, the next one works")
def c42_bad_chunk(target: Target) -> str:
    """Sends chunks of one datum in both modes, of which the third has weights that are too short."""
    short = types.TensorData.from_numpy(np.ones(3, np.float32))
    data = [target.datum(seed=1), target.datum(seed=2), target.datum(seed=3, weights=short), target.datum(seed=4)]
    said = []
    for parallel in (True, False):
        proxy = target.proxy({"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": parallel, **_PLAIN})
        category, training = _chunk_failure(target, proxy, data)
        loss = training.forward_backward(data[:2], "cross_entropy").result(_HANG_S).metrics["loss:sum"]
        expect(bool(np.isfinite(loss)), f"the next call's loss is {loss}")
        failed = _failed_chunks(target, proxy)
        expect(failed == [3], f"the failed chunks are {failed}, expected 3 alone")
        said.append(f"{'parallel' if parallel else 'serial'}: chunk 3 failed ({category}), next loss {loss:.2f}")
    return "; ".join(said)


@check("C43", "After an HTTP 4xx on seq n, seq n+1 does not hang")
def c43_rejected(target: Target) -> str:
    """Sends requests that have model and seq_id but are broken otherwise.

    Whatever the response, the next request must end.
    """
    model_id = target.raw_model(target.session())
    said = {}
    for number, (name, send) in enumerate(_broken(target, model_id).items()):
        answer = send(2 * number + 1)
        status = answer.status_code
        expect(status not in (408, 409, 429) and status < 500, f"{name} is answered {status}, which clients repeat")
        if status == 200:
            result = target.collect(answer.json()["request_id"], _HANG_S)
            expect("error" in result, f"{name} was carried out: {str(result)[:150]}")
        following = target.submit_loss(model_id, 2 * number + 2, forward_only=True)
        expect(_ends(target, following), f"after {name} was answered {status}, the next request hangs")
        said[name] = status
    return f"answered {said}; each next request ended within {_HANG_S:.0f} s"


@check("C44", "A failed forward_backward and a queued optim_step: no silent step on partial gradients")
def c44_no_partial_step(target: Target) -> str:
    """Sends a good chunk 1, a bad chunk 2 and a step.

    The step must fail or leave the weights unchanged, and later steps must work.
    """
    proxy = target.proxy({"fwdbwd_max_chunk_len": 1})
    training = target.training(target.service(proxy))
    short = types.TensorData.from_numpy(np.ones(3, np.float32))
    data = [target.datum(seed=1), target.datum(seed=2)]
    before = logprobs_of(training.forward(data, "cross_entropy").result(60))
    loss = training.forward_backward([data[0], target.datum(seed=2, weights=short)], "cross_entropy")
    step = training.optim_step(_ADAM)
    _failure(lambda: loss.result(_HANG_S))
    try:
        step.result(_HANG_S)
        how = "the step was accepted"
    except tinker.RequestFailedError as error:
        how = f"the step failed ({error.category.name}: {str(error)[:80]})"
    after = logprobs_of(training.forward(data, "cross_entropy").result(60))
    gap = float(np.abs(after - before).max())
    expect(gap < _SAME, f"{how}, and the weights moved: log-probabilities by {gap:.2g}")
    training.forward_backward(data, "cross_entropy")
    training.optim_step(_ADAM).result(60)
    moved = float(np.abs(logprobs_of(training.forward(data, "cross_entropy").result(60)) - before).max())
    expect(moved > _MOVED, f"the next good step moved log-probabilities by {moved:.2g} only")
    return f"{how}; weights as before; the next step moves log-probabilities by {moved:.2g}"


@check("C45", "Two models in one session progress independently")
def c45_two_models(target: Target) -> str:
    """Lets one model wait for a missing request, while the other trains, steps and saves."""
    session_id = target.session()
    stuck, free = target.raw_model(session_id, 0), target.raw_model(session_id, 1)
    waiting = target.submit_loss(stuck, 2, forward_only=True)
    target.submit_loss(free, 1)
    step = target.submit("optim_step", model_id=free, seq_id=2, adam_params=_STEP, type="optim_step")
    expect(_ends(target, step), "the second model waits for a request that is missing from the first")
    expect("error" not in target.collect(step), f"the second model's step failed: {target.collect(step)}")
    expect(is_pending(target, waiting), "the first model's request ended although the one before is missing")
    target.submit_loss(stuck, 1, forward_only=True)
    loss = target.output(waiting).metrics["loss:sum"]
    return f"the second stepped while the first waited; then the first's loss was {loss:.3f}"


@check("C49", "Parallel and serial chunk modes give the same loss, logprobs and weights after a step")
def c49_chunk_modes(target: Target) -> str:
    """Sends five datums in chunks of two, in both modes through a proxy, to two models with one seed.

    Parallel chunks must send chunk 1 last.
    """
    data = [target.datum(seed=seed) for seed in range(5)]
    found = []
    for parallel in (True, False):
        proxy = target.proxy({"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": parallel, **_PLAIN})
        training = target.training(target.service(proxy))
        result = training.forward_backward(data, "cross_entropy").result(60)
        order = [one.seq_id for one in _sent_losses(proxy)]
        wanted = [2, 3, 1] if parallel else [1, 2, 3]
        sent = [*sorted(order[:-1]), order[-1]] if parallel else order
        expect(sent == wanted, f"chunks were sent as {order} in {'parallel' if parallel else 'serial'} mode")
        training.optim_step(_ADAM).result(60)
        after = logprobs_of(training.forward(data, "cross_entropy").result(60))
        found.append((result.metrics["loss:sum"], logprobs_of(result), after))
    (loss, first, after), (other_loss, other_first, other_after) = found
    gaps = [abs(loss - other_loss) / abs(loss), np.abs(first - other_first).max(), np.abs(after - other_after).max()]
    expect(max(gaps) < _SAME, f"loss, log-probabilities before and after the step differ by {gaps}")
    moved = float(np.abs(after - first).max())
    expect(moved > _MOVED, f"the step moved log-probabilities by {moved:.2g} only: equality proves nothing")
    return f"loss {loss:.4f}; differences {', '.join(f'{gap:.1g}' for gap in gaps)}; the step moved {moved:.2g}"


@check("C50", "A gap in seq_id ends with its session; waiting commands fail rather than hang")
def c50_ended_gap(target: Target) -> str:
    """Lets two requests wait behind a gap with open polls, and finishes the session.

    Both polls must give an error at once.
    """
    session_id = target.session()
    model_id = target.raw_model(session_id)
    waiting = [target.submit_loss(model_id, seq_id) for seq_id in (2, 5)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        polls = [pool.submit(_error_of, target, request_id) for request_id in waiting]
        time.sleep(0.5)
        expect(not any(poll.done() for poll in polls), "requests behind a gap ended before their session did")
        begun = time.monotonic()
        target.post(f"sessions/{session_id}/finish", reason={"type": "interrupted"}, detail=None).raise_for_status()
        errors = [poll.result() for poll in polls]
        seconds = time.monotonic() - begun
    return f"2 waiters ended after {seconds:.2f} s: {errors[0][:120]}"


def logprobs_of(output: types.ForwardBackwardOutput) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the log-probabilities of all datums in one row."""
    parts = [np.asarray(one["logprobs"].data, np.float64).ravel() for one in output.loss_fn_outputs]
    return np.concatenate(parts)


def is_pending(target: Target, request_id: str, within_s: float = 0.5) -> bool:
    """Returns whether a poll is held for longer than this."""
    body = {"request_id": request_id, "allow_metadata_only": False}
    with target.raw(timeout_s=within_s) as http:
        try:
            answer = http.post("retrieve_future", json=body)
        except httpx.TimeoutException:
            return True
    return answer.status_code == 408 or answer.json().get("type") == "try_again"


def _send(target: Target, model_id: str, order: tuple[int, ...]) -> dict[int, str]:
    """Submits loss, step, loss and forward as seq 1 to 4 in an order; returns request_ids by seq_id."""
    first, second = target.datum(seed=1), target.datum(seed=2)
    submit: dict[int, Callable[[], str]] = {
        1: lambda: target.submit_loss(model_id, 1, [first]),
        2: lambda: target.submit("optim_step", model_id=model_id, seq_id=2, adam_params=_STEP, type="optim_step"),
        3: lambda: target.submit_loss(model_id, 3, [first]),
        4: lambda: target.submit_loss(model_id, 4, [second], forward_only=True),
    }
    return {seq_id: submit[seq_id]() for seq_id in order}


def _losses(target: Target, requests: dict[int, str]) -> list[float]:
    return [target.output(requests[seq_id]).metrics["loss:sum"] for seq_id in (1, 3, 4)]


def _near(found: list[float], wanted: list[float]) -> bool:
    return bool(np.allclose(found, wanted, rtol=_SAME, atol=_SAME))


def _failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except tinker.RequestFailedError as error:
        expect(error.category == types.RequestErrorCategory.User, f"the category is {error.category}: {error}")
        return f"category {error.category.name}"
    raise Failed("a loss with weights of another length than its targets succeeded")


def _chunk_failure(target: Target, proxy: Proxy, data: list[types.Datum]) -> tuple[str, tinker.TrainingClient]:
    """Returns the error of a call with a bad chunk, and the model of the call.

    In about one call of a hundred, SDK 0.38.0 never raises although it received the result of every chunk. That says
    nothing about the server, so the check tries another model.
    """
    for _ in range(_TRIES):
        proxy.exchanges.clear()
        training = target.training(target.service(proxy))
        try:
            return _failure(lambda: training.forward_backward(data, "cross_entropy").result(_HANG_S)), training  # noqa: B023
        except TimeoutError:
            given = {one.body for one in proxy.of("retrieve_future") if one.status == 200 and b":train:" in one.body}
            # One more: that the model was created.
            expect(len(given) == len(data) + 1, f"{len(given) - 1} of {len(data)} results came in {_HANG_S:.0f} s")
    raise Failed(f"the SDK was given every result and did not raise, {_TRIES} times")


def _sent_losses(proxy: Proxy) -> list[tinker_public_pb2.ForwardBackwardRequest]:
    bodies = [one.body for one in proxy.of("forward_backward")]
    sent = [tinker_public_pb2.ForwardBackwardRequest.FromString(body) for body in bodies]
    return [one for one in sent if not one.forward_only]


def _failed_chunks(target: Target, proxy: Proxy) -> list[int]:
    """Returns the seq_ids of those of the first four losses that failed."""
    sent = list(proxy.of("forward_backward"))[:4]
    ids = {
        tinker_public_pb2.ForwardBackwardRequest.FromString(one.body).seq_id: one.answer_json()["request_id"]
        for one in sent
    }
    return sorted(seq_id for seq_id, request_id in ids.items() if "error" in target.collect(request_id))


def _broken(target: Target, model_id: str) -> dict[str, Callable[[int], httpx.Response]]:
    """Returns requests with a seq_id, each wrong in one way."""

    def cut(seq_id: int) -> httpx.Response:
        return target.send_loss(loss_body(model_id, seq_id, [target.datum()])[:-7])

    def wrong(route: str, **body: Any) -> Callable[[int], httpx.Response]:
        return lambda seq_id: target.post(route, model_id=model_id, seq_id=seq_id, type=route, **body)

    return {
        "a loss cut short": cut,
        "a learning rate of text": wrong("optim_step", adam_params={"learning_rate": "fast"}),
        "an unknown optimizer": wrong("optim_step", optimizer_params={"type": "no_such_optimizer"}),
        "adam_params as a list": wrong("optim_step", adam_params=[1, 2]),
        "a save with a number as name": wrong("save_weights", path=5),
    }


def _ends(target: Target, request_id: str) -> bool:
    deadline = time.monotonic() + _HANG_S
    while (left_s := deadline - time.monotonic()) > 0:
        if not is_pending(target, request_id, left_s):
            return True
    return False


def _error_of(target: Target, request_id: str) -> str:
    """Returns the error of an open poll. Raises Failed if it gives a result or nothing."""
    with target.raw(timeout_s=_HANG_S) as http:
        try:
            answer = http.post("retrieve_future", json={"request_id": request_id, "allow_metadata_only": False})
        except httpx.TimeoutException:
            raise Failed(f"a request behind a gap still waits {_HANG_S:.0f} s after its session's end") from None
    if answer.status_code == 408 or answer.json().get("type") == "try_again":
        raise Failed("a request behind a gap still waits after its session's end")
    if answer.status_code == 200 and "error" not in answer.json():
        raise Failed(f"a request behind a gap was carried out: {answer.text[:200]}")
    return f"{answer.status_code} {answer.text}"
