"""Section A: start-up, authentication, capabilities, telemetry."""

import base64
import json
import time
import uuid

import tinker
from starlette.responses import Response
from tinker import types

from fovea_conformance.check import Failed, NotApplicable, Refused, check, expect
from fovea_conformance.proxy import Exchange, Proxy
from fovea_conformance.target import Target

_START = ["client/config", "client/dynamic_config", "create_session", "create_model", "retrieve_future", "get_info"]
_GUARDED = [
    ("POST", "client/config"),
    ("POST", "create_session"),
    ("POST", "session_heartbeat"),
    ("POST", "create_model"),
    ("POST", "forward_backward"),
    ("POST", "asample"),
    ("POST", "retrieve_future"),
    ("GET", "get_server_capabilities"),
    ("GET", "training_runs"),
    ("GET", "sessions"),
]
_HANG_S = 30.0


@check("C1", "A fresh client and create_lora_training_client ask the documented endpoints and succeed")
def c1_start(target: Target) -> str:
    """Checks the endpoints that the SDK calls, in the order of their first use."""
    proxy = target.proxy()
    training = target.training(target.service(proxy))
    asked = list(dict.fromkeys(exchange.route for exchange in proxy.exchanges))
    missing = [route for route in _START if route not in asked]
    expect(not missing, f"the SDK did not ask {missing}; it asked {asked}")
    failed = _failed(proxy)
    expect(not failed, f"answered with other than 200: {failed}")
    return f"{len(asked)} endpoints, model {training.model_id}"


@check("C2", "Both config endpoints returning {} give a working client")
def c2_empty_config(target: Target) -> str:
    """Responds to both endpoints with {} in a proxy. The SDK must fall back to its defaults, train and sample."""
    proxy = target.proxy({}, replace_config=True)
    asked = _train_and_sample(target, target.service(proxy))
    seen = {one.route: one.answer_json() for one in proxy.exchanges if one.route.startswith("client/")}
    expect(seen == {"client/config": {}, "client/dynamic_config": {}}, f"the SDK got other flags than {{}}: {seen}")
    return f"{asked} on the SDK's default flags"


@check("C3", "A missing or wrong X-API-Key gives 401 and AuthenticationError, not a hang")
def c3_authentication(target: Target) -> str:
    """Calls every guarded route without a key and with a wrong one. Then the SDK uses a wrong key, under a deadline."""
    for key in (None, f"tml-wrong-{uuid.uuid4().hex}"):
        with target.raw(key) as http:
            statuses = {route: http.request(method, route, json={}).status_code for method, route in _GUARDED}
        wrong = {route: status for route, status in statuses.items() if status != 401}
        expect(not wrong, f"{'no' if key is None else 'a wrong'} key is not answered with 401: {wrong}")
    begun = time.monotonic()
    try:
        client = tinker.ServiceClient(base_url=target.options.base_url, api_key="tml-wrong-key")
        client.create_lora_training_client(base_model=target.model, rank=8).result(_HANG_S)
    except tinker.AuthenticationError as error:
        seconds = time.monotonic() - begun
        expect(seconds < _HANG_S, f"AuthenticationError came after {seconds:.1f} s")
        return f"{2 * len(_GUARDED)} times 401; the SDK raised {type(error).__name__} after {seconds:.2f} s"
    except TimeoutError:
        raise Failed(f"the SDK still waits {_HANG_S:.0f} s after it was given a wrong key") from None
    raise Failed("the SDK made a training client with a wrong key")


@check("C4", "Works behind a base path such as http://host/x/y")
def c4_base_path(target: Target) -> str:
    """Serves only below /x/y in a proxy. Start, training, saving and sampling must all use that path."""
    proxy = target.proxy(prefix="/x/y")
    asked = _train_and_sample(target, target.service(proxy))
    failed = _failed(proxy)
    expect(not failed, f"answered with other than 200 behind /x/y: {failed}")
    return f"{asked} in {len(proxy.exchanges)} requests below /x/y"


@check("C5", "get_server_capabilities lists every model with max_context_length, trainable, sampleable")
def c5_capabilities(target: Target) -> str:
    """Checks the fields of the raw response, and the SDK's reading of them.

    The tested model must be listed, and must be usable.
    """
    models = target.http.get("get_server_capabilities").raise_for_status().json()["supported_models"]
    for one in models:
        name, context = one.get("model_name"), one.get("max_context_length")
        expect(isinstance(name, str) and bool(name), f"a model without model_name: {one}")
        expect(type(context) is int and context > 0, f"max_context_length of {name} is {context!r}")
        for flag in ("trainable", "sampleable"):
            expect(type(one.get(flag)) is bool, f"{flag} of {name} is {one.get(flag)!r}")
    by_name = {one["model_name"]: one for one in models}
    expect(len(by_name) == len(models), f"a model is listed twice: {[one['model_name'] for one in models]}")
    mine = by_name.get(target.model)
    if mine is None:
        raise Failed(f"{target.model} is not listed; listed are {sorted(by_name)}")
    read = target.rest().get_server_capabilities().result(30).supported_models
    expect([one.model_name for one in read] == list(by_name), f"the SDK reads {[one.model_name for one in read]}")
    expect(mine["trainable"] and mine["sampleable"], f"{target.model} can be used, but is listed as {mine}")
    return f"{len(models)} models; {target.model}: {mine['max_context_length']} tokens, trainable, sampleable"


@check("C9", "create_session repeated with the same X-Idempotency-Key returns the same session_id")
def c9_idempotent_session(target: Target) -> str:
    """Sends three requests with one key, one with another, and two without a key."""

    def create(key: str | None) -> str:
        headers = {"X-Idempotency-Key": key} if key else {}
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        answer = target.http.post("create_session", json=body, headers=headers)
        return str(answer.raise_for_status().json()["session_id"])

    key = uuid.uuid4().hex
    same = [create(key) for _ in range(3)]
    others = [create(uuid.uuid4().hex), create(None), create(None)]
    for session_id in {*same, *others}:
        target.post(f"sessions/{session_id}/finish", reason={"type": "success"}, detail=None)
    expect(len(set(same)) == 1, f"one key gave the sessions {same}")
    expect(len({same[0], *others}) == 4, f"other keys, and no key, must give new sessions: {[same[0], *others]}")
    return f"{same[0]} three times for one key; 3 other sessions for other keys and none"


@check("C11", "Telemetry batches for real and sessionless- ids return status accepted")
def c11_telemetry(target: Target) -> str:
    """Sends batches as the SDK does: the start of a session, and a generic event with data."""
    session_id = target.session()
    now = "2026-01-01T00:00:00Z"
    generic = {
        "event": "GENERIC_EVENT", "event_id": uuid.uuid4().hex, "event_name": "conformance", "event_session_index": 1,
        "severity": "INFO", "timestamp": now, "event_data": {"number": 1, "nested": {"text": "x"}},
    }  # fmt: skip
    start = {"event": "SESSION_START", "event_id": uuid.uuid4().hex, "event_session_index": 0, "severity": "INFO"}
    for name in (session_id, f"sessionless-{uuid.uuid4()}"):
        answer = target.post(
            "telemetry", events=[start | {"timestamp": now}, generic], platform="Linux", sdk_version="0.38.0",
            session_id=name, process_uuid=str(uuid.uuid4()),
        )  # fmt: skip
        accepted = answer.status_code == 200 and answer.json().get("status") == "accepted"
        expect(accepted, f"telemetry of {name} was answered {answer.status_code} {answer.text[:200]}")
    return "2 batches accepted"


@check("C12", "JWT mode: exchange, 401 invalid_token replay and whoami work (optional)")
def c12_jwt(target: Target) -> str:
    """Lets the SDK exchange its key.

    After a 401 with invalid_token it must exchange the key again and repeat the request; whoami reads the claims.
    """
    flags = target.post("client/config", sdk_version="0.38.0").raise_for_status().json()
    if not flags.get("pjwt_auth_enabled"):
        answer = target.post("auth/token")
        if answer.status_code == 404 and "auth/token" in answer.text:
            raise Refused(f"optional: {answer.json().get('detail', answer.text)[:200]}")
        raise NotApplicable("the server's client/config does not turn pjwt_auth_enabled on; keys are sent as they are")
    refused: list[str] = []

    def refuse_once(exchange: Exchange) -> Response | None:
        if exchange.route != "get_server_capabilities" or refused:
            return None
        refused.append(exchange.headers["x-api-key"])
        header = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
        return Response('{"detail": "expired"}', 401, header, "application/json")

    proxy = target.proxy(before=refuse_once)
    client = target.rest(proxy)
    client.get_server_capabilities().result(30)
    identity = client.whoami().result(30)
    sent = [one.headers["x-api-key"] for one in proxy.of("get_server_capabilities")]
    expect(len(sent) == 2, f"after invalid_token the request must be sent twice, was sent {len(sent)} times")
    exchanges = len(list(proxy.of("auth/token")))
    expect(exchanges >= 2, f"auth/token was asked {exchanges} times, expected again after invalid_token")
    claims = [_claims(token) for token in sent]
    expect(all(one["exp"] > one["iat"] for one in claims), f"the tokens' exp and iat are wrong: {claims}")
    return f"{exchanges} exchanges, 1 replay, whoami {identity.user_urn}"


def _failed(proxy: Proxy) -> list[str]:
    """Returns the requests with an error as response; status 0 means that a poll is still open."""
    return [f"{one.route} {one.status}" for one in proxy.exchanges if one.status not in (0, 200, 408)]


def _claims(token: str) -> dict[str, float]:
    payload = token.split(".")[1]
    claims: dict[str, float] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return claims


def _train_and_sample(target: Target, service: tinker.ServiceClient) -> str:
    """Runs each essential call once through the SDK."""
    training = target.training(service)
    loss = training.forward_backward([target.datum()], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-4))
    total = loss.result(60).metrics["loss:sum"]
    expect(total > 0, f"loss:sum of an untrained text is {total}")
    step.result(60)
    sampler = training.save_weights_and_get_sampling_client().result(60)
    answer = sampler.sample(target.prompt(), 1, types.SamplingParams(max_tokens=4, stop=[])).result(60)
    expect(len(answer.sequences[0].tokens) == 4, f"sampled {len(answer.sequences[0].tokens)} tokens, wanted 4")
    return f"loss {total:.2f}, a step, 4 tokens sampled"
