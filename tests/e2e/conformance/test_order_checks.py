"""Each check of futures and order fails on a server with that fault; test_all_checks verifies that
it passes otherwise.
"""

from collections.abc import Callable, Iterator

import pytest
from tinker.lib.internal_client_holder import InternalClientHolder, sessionless_holder_cache

from fovea_conformance.check import Status
from fovea_conformance.runner import Verdict
from tests.e2e.conformance import disorder, mistakes
from tests.e2e.conformance.corruption import Wrong, answer, request, without
from tests.e2e.conformance.judging import judged, judging
from tests.e2e.stack import API_KEY, Stack

_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_REST_CLIENTS: list[InternalClientHolder] = []
"""References to clients; without one, the SDK warns that a client was not closed."""

WRONG: dict[str, dict[str, Wrong]] = {
    "C1": {"no get_info": disorder.reply("get_info", 404, {"detail": "no such route"})},
    "C2": {"no steps": disorder.reply("optim_step", 404, {"detail": "no such route"})},
    "C3": {"takes any key": disorder.header("x-api-key", API_KEY)},
    "C4": {"no saves": disorder.reply("save_weights_for_sampler", 404, {"detail": "no such route"})},
    "C5": {
        "context as text": answer(
            "get_server_capabilities", lambda body: body["supported_models"][0].update(max_context_length="8192")
        )
    },
    "C6": {"beats for ever": disorder.reply("session_heartbeat", 200, {"type": "session_heartbeat"})},
    "C9": {"ignores the key": disorder.header("x-idempotency-key", None)},
    "C10": {"never ends": disorder.never_ends()},
    "C11": {"no telemetry": disorder.reply("telemetry", 404, {"detail": "no such route"})},
    "C13": {"waits to accept": disorder.slow("optim_step", 1.5)},
    "C14": {"does not hold": disorder.impatient()},
    "C16": {"looks now and then": disorder.final(200, disorder.late)},
    "C17": {"always JSON": disorder.header("accept", _JSON)},
    "C18": {"always protobuf": disorder.header("accept", _PROTOBUF)},
    "C19": {"all as protobuf": disorder.final(200, disorder.as_protobuf)},
    "C20": {
        "errors as 400": disorder.final(200, disorder.error_as_400),
        "another category": answer("retrieve_future", lambda body: body.update(category="server")),
    },
    "C21": {"blames itself": answer("retrieve_future", lambda body: body.update(category="server"))},
    "C22": {"all is gone": disorder.gone_for_unknown(), "keeps": without("retrieve_futures", "retrieved_request_ids")},
    "C23": {"the same ids": answer("asample", lambda body: body.update(sample_sequence_ids=["a", "b"]))},
    "C24": {"other bytes": disorder.final(200, disorder.Longer())},
    "C25": {"another size": disorder.final(200, disorder.one_byte_more)},
    "C26": {"always metadata": disorder.final(200, disorder.as_metadata)},
    "C27": {"no reason": disorder.silent_waiting()},
    "C28": {"takes 500 polls": disorder.few_polls(500)},
    "C29": {"broken gzip": disorder.final(200, disorder.wrong_gzip)},
    "C30": {"says nothing": disorder.empty_400()},
    "C31": {
        "one a poll": answer("retrieve_futures", disorder.first_only),
        "no cursor": answer("retrieve_futures", disorder.stuck_cursor),
        "one for all clones": request("retrieve_futures", lambda body: body["target"].update(cloned_sampler_id=0)),
    },
    "C32": {"tells once": answer("retrieve_futures", disorder.Forgets())},
    "C33": {"keeps all": without("retrieve_futures", "retrieved_request_ids")},
    "C34": {"all finished": answer("retrieve_futures", disorder.all_finished)},
    "C35": {"never cancels": disorder.reply("cancel_future", 200, {})},
    "C36": {"own ids": answer("retrieve_future", disorder.other_ids)},
    "C37": {"order of arrival": disorder.by_arrival()},
    "C38": {"order of arrival": disorder.by_arrival(), "waits to accept": disorder.slow("forward_backward", 1.2)},
    "C39": {"steps first": disorder.steps_first()},
    "C40": {"no memory": disorder.by_arrival()},
    "C41": {"no memory": disorder.by_arrival()},
    "C42": {"one failure for all": disorder.sticky_errors()},
    "C43": {"forgets what it refuses": disorder.swallow("optim_step")},
    "C44": {"steps on a part": disorder.Partial().wrong()},
    "C45": {"order of arrival": disorder.by_arrival()},
    "C46": {"new ids": answer("create_model", disorder.NewId())},
    "C47": {"no memory": request("asample", mistakes.NewSequence())},
    "C48": {"doubles": request("asample", disorder.as_double)},
    "C49": {"loses a datum": disorder.lost_datum()},
    "C50": {"never ends": disorder.never_ends()},
}


@pytest.fixture(scope="module")
def judge(stack: Stack) -> Iterator[Callable[[str, str], Verdict]]:
    """Runs a check on a faulty server."""
    with judging(stack, WRONG) as judge:
        yield judge


@pytest.mark.parametrize(("check_id", "wrong"), [(check_id, wrong) for check_id in WRONG for wrong in WRONG[check_id]])
def test_fails_on_a_wrong_server(judge: Callable[[str, str], Verdict], check_id: str, wrong: str) -> None:
    verdict = judge(check_id, wrong)
    assert verdict.status is Status.FAILED, verdict.detail


@pytest.fixture
def _fresh_rest_clients() -> Iterator[None]:
    """Makes later tests configure their REST clients anew.

    The SDK (0.38) caches a REST client per base URL and key for the life of the process. A later server at the port of
    the JWT-mode server would be asked for JWTs.
    """
    known = sessionless_holder_cache._holders
    before = dict(known)
    yield
    _REST_CLIENTS.extend(known.values())
    known.clear()
    known.update(before)


@pytest.mark.usefixtures("_fresh_rest_clients")
@pytest.mark.parametrize(("lifetime_s", "status"), [(3600.0, Status.PASSED), (-5.0, Status.FAILED)])
def test_jwt_mode(stack: Stack, lifetime_s: float, status: Status) -> None:
    verdict = judged(stack, "C12", disorder.Jwt(API_KEY, lifetime_s).wrong())
    assert verdict.status is status, verdict.detail
