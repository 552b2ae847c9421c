"""Section B: results of futures: encodings, errors, identity and sizes."""

import gzip
import itertools
import json
import uuid
from typing import Any

import numpy as np
import tinker
import zstandard
from starlette.responses import Response
from tinker import types
from tinker.proto import tinker_public_pb2 as public

from fovea_conformance.check import Failed, NotApplicable, check, expect, expect_close
from fovea_conformance.proxy import Exchange
from fovea_conformance.target import Target, loss_body, unique_name

_PROTOBUF = "application/x-protobuf"
_GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])


@check("C17", "Sample, forward and forward_backward results are protobuf when Accept asks for it")
def c17_protobuf(target: Target) -> str:
    """Parses the bytes as the public messages, which must contain tokens, log-probabilities and loss:sum."""
    sizes = {}
    for name, request_id in _results(target).items():
        answer = target.poll(request_id, accept=_PROTOBUF)
        kind = answer.headers.get("content-type", "")
        expect(_PROTOBUF in kind, f"the result of {name} is {kind}: {answer.text[:200]}")
        _check_message(name, answer.content)
        sizes[name] = len(answer.content)
    return ", ".join(f"{name} {size} bytes" for name, size in sizes.items())


@check("C18", "The same results requested without that Accept come as JSON")
def c18_json(target: Target) -> str:
    """Expects JSON with the fields of the message, and the same numbers as in the protobuf of the same future."""
    requests = _results(target)
    found = {name: _json_result(target, name, request_id) for name, request_id in requests.items()}
    sampled = public.SampleResponse.FromString(target.poll(requests["sample"], accept=_PROTOBUF).content)
    tokens = np.frombuffer(sampled.sequences[0].tokens, np.int32).tolist()
    expect(found["sample"]["sequences"][0]["tokens"] == tokens, f"JSON has other tokens than {tokens}")
    for name in ("forward", "forward_backward"):
        loss = target.output(requests[name]).metrics["loss:sum"]
        expect_close(found[name]["metrics"]["loss:sum"], loss, 1e-6, f"loss:sum of {name} in JSON")
        count = len(found[name]["loss_fn_outputs"])
        expect(count == 1, f"{name} has {count} loss_fn_outputs in JSON for one datum")
    return f"JSON of all {len(found)}, equal to their protobuf"


@check("C19", "optim, save, load and create results are JSON even if Accept says protobuf")
def c19_always_json(target: Target) -> str:
    """Submits one of each over raw HTTP, and collects them with Accept: application/x-protobuf.

    Each must have its required field.
    """
    session_id = target.session()
    model_id = target.raw_model(session_id)
    of_model = {"model_id": model_id}
    saved = target.submit("save_weights", **of_model, path=unique_name("c19"), seq_id=1, type="save_weights")
    path = str(_as_json(target, "save_weights", saved)["path"])
    named = {"kind": "snapshot", "path": unique_name("c19"), "seq_id": 2, "type": "save_weights_for_sampler"}
    lora = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}
    fields = {
        ("save_weights_for_sampler", "path"): target.submit("save_weights_for_sampler", **of_model, **named),
        ("optim_step", ""): target.submit("optim_step", **of_model, seq_id=3, adam_params={}, type="optim_step"),
        ("load_weights", "model_id"): target.submit(
            "load_weights", session_id=session_id, model_seq_id=1, path=path, optimizer=False, type="load_weights"
        ),
        ("create_model", "model_id"): target.submit(
            "create_model", session_id=session_id, model_seq_id=2, base_model=target.model, lora_config=lora,
            type="create_model",
        ),
    }  # fmt: skip
    for (route, field), request_id in fields.items():
        result = _as_json(target, route, request_id)
        expect(not field or isinstance(result.get(field), str), f"the result of {route} has no {field}: {result}")
    return f"{1 + len(fields)} kinds as JSON"


@check("C20", "A failed future returns 200 with error and category; the SDK raises RequestFailedError with it")
def c20_failed_future(target: Target) -> str:
    """Sends an unknown loss_fn over raw HTTP with either Accept, and through the SDK."""
    model_id = target.raw_model(target.session())
    request_id = target.submit_loss(model_id, 1, loss_fn="no_such_loss")
    for accept in ("application/json", _PROTOBUF):
        answer = target.poll(request_id, accept=accept)
        expect(answer.status_code == 200, f"a failed future is answered {answer.status_code} {answer.text[:200]}")
        kind = answer.headers.get("content-type", "")
        expect("json" in kind, f"a failed future is {kind} when Accept is {accept}")
        found = answer.json()
        expect(isinstance(found.get("error"), str) and bool(found["error"]), f"a failed future without error: {found}")
        expect(found.get("category") == "user", f"the category is {found.get('category')!r}: {found}")
    unknown: Any = "no_such_loss"
    try:
        target.training().forward_backward([target.datum()], unknown).result(60)
    except tinker.RequestFailedError as error:
        expect(error.category == types.RequestErrorCategory.User, f"the SDK's error has the category {error.category}")
        return f"200 {str(found)[:120]}; {type(error).__name__} of category {error.category.name}"
    raise Failed("the SDK's call with an unknown loss_fn succeeded")


@check("C21", "User mistakes carry category user")
def c21_categories(target: Target) -> str:
    """Makes seven different mistakes, each of which must give a failed future of category user.

    Internal errors cannot be caused from outside.
    """
    session_id = target.session()
    model_id = target.raw_model(session_id)
    seq_ids = itertools.count(1)

    def loss(*data: types.Datum, **more: Any) -> str:
        return target.submit_loss(model_id, next(seq_ids), list(data), **more)

    def of_model(route: str, **body: Any) -> str:
        return target.submit(route, model_id=model_id, seq_id=next(seq_ids), type=route, **body)

    short = types.TensorData.from_numpy(np.ones(5, np.float32))
    far = types.TensorData.from_numpy(np.full(12, 2**30, np.int64))
    lora = {"rank": 10**6, "train_unembed": True, "train_mlp": True, "train_attn": True}
    model = {"session_id": session_id, "model_seq_id": 5, "base_model": target.model, "type": "create_model"}
    mistakes = {
        "unknown loss_fn": loss(target.datum(), loss_fn="no_such_loss"),
        "no target_tokens": loss(target.datum(target_tokens=None)),
        "weights too short": loss(target.datum(weights=short)),
        "target outside the vocabulary": loss(target.datum(target_tokens=far)),
        "unknown loss_fn_config": loss(target.datum(), config={"no_such_key": 1.0}),
        "rank of a million": target.submit("create_model", lora_config=lora, **model),
        "load of nothing": of_model("load_weights", path=f"tinker://{model_id}/weights/nothing", optimizer=False),
    }
    wrong = {}
    for name, request_id in mistakes.items():
        found = target.collect(request_id)
        if "error" not in found or found.get("category") != "user":
            wrong[name] = str(found)[:120]
    expect(not wrong, f"no failed future of category user: {wrong}")
    return f"{len(mistakes)} mistakes, each of category user"


@check("C22", "An unknown request_id gives 404; an expired result gives 410")
def c22_unknown(target: Target) -> str:
    """Polls unknown ids of several forms.

    Then polls a sample with a result that retrieve_futures has acknowledged and so dropped.
    """
    sampler_id = target.sampling_session(target.session())
    sample = target.submit_sample(sampler_id, 0)["request_id"]
    target.poll(sample)
    head = sample.rpartition(":")[0]
    for name in (uuid.uuid4().hex, f"{head}:987654321", "", "x" * 500):
        status = _once(target, name).status_code
        expect(status == 404, f"request_id {name[:60]!r} is answered {status}, not 404")
    drop = target.post(
        "retrieve_futures", target={"type": "sampling_session", "sampling_session_id": sampler_id},
        prev_cursor=0, timeout=0, retrieved_request_ids=[sample],
    )  # fmt: skip
    if drop.status_code == 404:
        raise NotApplicable("unknown ids give 404; an expired result needs retrieve_futures, which is not served")
    expired = _once(target, sample)
    expect(expired.status_code == 410, f"a dropped result is answered {expired.status_code} {expired.text[:200]}")
    return "4 times 404; 410 once its result was acknowledged"


@check("C23", "After 410 a sample is resubmitted with a new seq_id and succeeds")
def c23_resubmission(target: Target) -> str:
    """Responds to the first poll of a sample with 410 in a proxy.

    The SDK's second submission must give other ids and tokens.
    """
    refused: list[str] = []

    def lose_first(exchange: Exchange) -> Response | None:
        if exchange.headers.get("x-tinker-request-type") != "Sample" or refused:
            return None
        refused.append(str(exchange.json()["request_id"]))
        return Response('{"detail": "expired"}', 410, media_type="application/json")

    proxy = target.proxy(before=lose_first)
    sampler = target.sampler(target.service(proxy)).result(60)
    answer = sampler.sample(target.prompt(), 2, _GREEDY).result(90)
    sent = list(proxy.of("asample"))
    expect(len(sent) == 2, f"after a 410 the SDK submitted {len(sent)} times in all, expected 2")
    seq_ids = [one.json()["seq_id"] for one in sent]
    expect(seq_ids[0] != seq_ids[1], f"the SDK resubmitted with the same seq_id {seq_ids[0]}")
    first, second = (one.answer_json() for one in sent)
    expect(first["request_id"] == refused[0] != second["request_id"], "the resubmission has the same request_id")
    fresh = not set(first["sample_sequence_ids"]) & set(second["sample_sequence_ids"])
    expect(fresh, f"the resubmission has sequence ids of the first: {second['sample_sequence_ids']}")
    carried = [one.sequence_id for one in answer.sequences]
    expect(carried == second["sample_sequence_ids"], f"the SDK's sequences carry {carried}")
    return f"seq ids {seq_ids}, 2 sequences with the second submission's ids"


@check("C24", "The same result can be retrieved twice, byte-identical")
def c24_twice(target: Target) -> str:
    """Retrieves each type of result three times in each encoding."""
    model_id = target.raw_model(target.session())
    step = target.submit("optim_step", model_id=model_id, seq_id=1, adam_params={}, type="optim_step")
    requests = {**_results(target), "optim_step": step}
    for name, request_id in requests.items():
        for accept in ("application/json", _PROTOBUF):
            bodies = {target.poll(request_id, accept=accept).content for _ in range(3)}
            expect(len(bodies) == 1, f"{name} came back as {len(bodies)} different bodies with Accept {accept}")
    return f"{len(requests)} results, 3 times in 2 encodings"


@check("C25", "A payload above the inline limit gives complete_metadata once, then the payload")
def c25_metadata(target: Target) -> str:
    """Retrieves a result of about 2 MB: first its size, and then its payload. The SDK must do both transparently."""
    request_id = _large_result(target)
    first = _once(target, request_id, metadata=True, accept=_PROTOBUF)
    if _PROTOBUF in first.headers.get("content-type", ""):
        size = len(first.content)
        raise NotApplicable(f"no inline limit below {size} bytes: that result came at once, which the contract allows")
    said = first.json()
    expect(said.get("status") == "complete_metadata", f"the first answer is {str(said)[:200]}")
    size = said.get("response_payload_size")
    payload = _once(target, request_id, accept=_PROTOBUF)
    expect(_PROTOBUF in payload.headers.get("content-type", ""), f"then {payload.status_code} {payload.text[:200]}")
    expect(size == len(payload.content), f"response_payload_size is {size}, the payload has {len(payload.content)}")
    proxy = target.proxy()
    target.training(target.service(proxy)).forward([_wide_datum(target)] * 5, "cross_entropy").result(60)
    polls = [one for one in proxy.of("retrieve_future") if one.headers.get("x-tinker-request-type") == "Forward"]
    metadata = sum(b"complete_metadata" in one.answer[:200] for one in polls)
    expect(metadata == 1, f"the SDK was given metadata {metadata} times for one result")
    return f"complete_metadata with {size} bytes, then {len(payload.content)} bytes; the SDK reads it too"


@check("C26", "allow_metadata_only false never gets metadata")
def c26_no_metadata(target: Target) -> str:
    """Retrieves results of a few bytes and of about 2 MB, with the flag false and without the flag."""
    sizes = []
    for request_id in (_results(target)["sample"], _large_result(target)):
        answer = target.poll(request_id, accept=_PROTOBUF)
        kind = answer.headers.get("content-type", "")
        expect(_PROTOBUF in kind, f"allow_metadata_only false was answered with {kind}: {answer.text[:200]}")
        sizes.append(len(answer.content))
    return f"payloads of {sizes[0]} and {sizes[1]} bytes at once"


@check("C29", "gzip or zstd compressed proto responses decode")
def c29_compression(target: Target) -> str:
    """Expects that the server's response under Accept-Encoding decodes to the plain bytes.

    The SDK must read gzip and zstd.
    """
    request_id = _results(target)["forward"]
    body = {"request_id": request_id, "allow_metadata_only": False}
    answers = {}
    for encoding in ("identity", "gzip", "zstd", "deflate"):
        headers = {"Accept": _PROTOBUF, "Accept-Encoding": encoding}
        answers[encoding] = target.http.post("retrieve_future", json=body, headers=headers)
    differ = [name for name, one in answers.items() if one.content != answers["identity"].content]
    expect(not differ, f"decoded to other bytes than the plain answer: {differ}")
    own = sorted({one.headers.get("content-encoding", "none") for one in answers.values()})
    compress = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}
    tokens = [_sample_through(target, encoding, compressor) for encoding, compressor in compress.items()]
    expect(tokens[0] == tokens[1], f"greedy tokens over gzip are {tokens[0]}, over zstd {tokens[1]}")
    return f"the SDK reads gzip and zstd; the server itself uses {', '.join(own)}"


@check("C30", "No answer is ever an empty-bodied 400")
def c30_no_empty_400(target: Target) -> str:
    """Sends eight types of broken bodies to every route.

    Each response of 400 and above must have a body, and none may be a crash.
    """
    bodies = [
        b"", b"null", b"[]", b"{", b"{}", b"\xff\xfe\x00", b'{"request_id": 5}', b'{"session_id": {}, "seq_id": "x"}',
    ]  # fmt: skip
    routes = [
        "create_session", "session_heartbeat", "create_model", "get_info", "optim_step", "save_weights", "load_weights",
        "save_weights_for_sampler", "create_sampling_session", "asample", "retrieve_future", "cancel_future",
        "weights_info", "telemetry", "client/config", "sessions/none/finish", "retrieve_futures", "no/such/route",
    ]  # fmt: skip
    answers = [
        (route, body, target.http.post(route, content=body, headers={"Content-Type": "application/json"}))
        for route, body in itertools.product(routes, bodies)
    ]
    broken = (b"", b"\xff" * 20, loss_body("none:train:0", 1, [target.datum()]))
    answers += [("forward_backward", body, target.send_loss(body)) for body in broken]
    answers.append(("forward_backward", b"zstd", target.send_loss(b"no zstd", **{"Content-Encoding": "zstd"})))
    empty = [f"{route} {body[:20]!r}" for route, body, one in answers if one.status_code >= 400 and not one.content]
    expect(not empty, f"answered without a body: {empty}")
    crashes = [f"{route} {body[:20]!r} {one.status_code}" for route, body, one in answers if one.status_code >= 500]
    expect(not crashes, f"broken bodies make the server fail, and clients repeat them for minutes: {crashes}")
    bad = sum(one.status_code == 400 for _, _, one in answers)
    return f"{len(answers)} broken requests: {bad} answered 400, all with a body"


def _results(target: Target) -> dict[str, str]:
    """Returns request_ids of one result of each type that has a protobuf form."""
    session_id = target.session()
    model_id, sampler_id = target.raw_model(session_id), target.sampling_session(session_id)
    return {
        "sample": str(target.submit_sample(sampler_id, 0, 5)["request_id"]),
        "forward": target.submit_loss(model_id, 1, forward_only=True),
        "forward_backward": target.submit_loss(model_id, 2),
    }


def _check_message(name: str, content: bytes) -> None:
    if name == "sample":
        sequence = public.SampleResponse.FromString(content).sequences[0]
        counts = len(sequence.tokens) // 4, len(sequence.logprobs) // 4
        expect(counts == (5, 5), f"a sample of 5 tokens has (tokens, logprobs) {counts}")
        return
    output = public.ForwardBackwardOutput.FromString(content)
    records = list(output.loss_fn_outputs)
    expect("loss:sum" in output.metrics, f"{name} has the metrics {sorted(output.metrics)}")
    expect(sum(one.num_datums for one in records) == 1, f"{name} counts {[one.num_datums for one in records]} datums")
    count = len(records[0].fields["logprobs"].data) // 4
    expect(count == 12, f"{name} of 12 positions has {count} logprobs")


def _json_result(target: Target, name: str, request_id: str) -> dict[str, Any]:
    answer = target.poll(request_id)
    kind = answer.headers.get("content-type", "")
    expect("json" in kind, f"without Accept: {_PROTOBUF} the result of {name} is {kind}")
    result: dict[str, Any] = answer.json()
    wanted = {"sequences"} if name == "sample" else {"metrics", "loss_fn_outputs"}
    expect(wanted <= result.keys(), f"the JSON of {name} has {sorted(result)}, expected {sorted(wanted)}")
    return result


def _as_json(target: Target, route: str, request_id: str) -> dict[str, Any]:
    answer = target.poll(request_id, accept=_PROTOBUF)
    kind = answer.headers.get("content-type", "")
    expect("json" in kind, f"the result of {route} is {kind}, and SDK clients read only JSON there")
    result = json.loads(answer.content)
    fine = isinstance(result, dict) and "error" not in result
    expect(fine, f"{route} ended with {str(result)[:200]}")
    return dict(result)


def _once(target: Target, request_id: str, metadata: bool = False, accept: str = "application/json") -> Any:
    """Polls with the flag as given, and again until the result is there."""
    while True:
        body = {"request_id": request_id, "allow_metadata_only": metadata}
        answer = target.http.post("retrieve_future", json=body, headers={"Accept": accept})
        if answer.status_code != 408 and b'"try_again"' not in answer.content[:2000]:
            return answer


def _large_result(target: Target) -> str:
    """Submits a forward with [N, K] log-probabilities of about 2 MB, which needs little computation."""
    model_id = target.raw_model(target.session())
    return target.submit_loss(model_id, 1, [_wide_datum(target)] * 5, forward_only=True)


def _wide_datum(target: Target) -> types.Datum:
    length, width = 500, 200
    tokens = target.tokens(length)
    targets = np.tile(np.asarray(tokens, np.int64)[:, None], (1, width))
    inputs = {
        "target_tokens": types.TensorData.from_numpy(targets),
        "weights": types.TensorData.from_numpy(np.zeros((length, width), np.float32)),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def _sample_through(target: Target, encoding: str, compress: Any) -> list[int]:
    """Returns greedy tokens that the SDK reads through a proxy that compresses the result."""
    compressed: list[int] = []

    def ask_plain(exchange: Exchange) -> Response | None:
        exchange.headers["accept-encoding"] = "identity"
        return None

    def squeeze(exchange: Exchange) -> Response | None:
        if exchange.headers.get("x-tinker-request-type") != "Sample" or exchange.status != 200:
            return None
        small = compress(exchange.answer)
        compressed.append(len(small))
        return Response(small, headers={"Content-Encoding": encoding}, media_type=_PROTOBUF)

    sampler = target.sampler(target.service(target.proxy(before=ask_plain, after=squeeze))).result(60)
    tokens = list(sampler.sample(target.prompt(), 1, _GREEDY).result(60).sequences[0].tokens)
    expect(bool(compressed), "no result passed the proxy that compresses")
    return tokens
