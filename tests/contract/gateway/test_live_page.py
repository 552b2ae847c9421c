"""Routes of the live page: files are served strictly, the stream is private to an owner and ends with its key, and
curves survive a restart.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea_gateway.access.api_keys import Scope
from fovea_gateway.live import live_routes
from fovea_gateway.live.live_state import read_curves
from fovea_gateway.live.step_curves import StepCurves
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest

Told = tuple[str, dict[str, Any]]
_NAMES = re.compile(r"http://www\.w3\.org|https://github\.com/leeoniya/uPlot")
"""URLs that identify something and load nothing: the SVG namespace and the origin of the chart library."""


async def _events(http: httpx.AsyncClient) -> AsyncIterator[Told]:
    async with http.stream("GET", "live/events") as response:
        assert response.status_code == 200
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


async def _until(http: httpx.AsyncClient, wanted: str, is_right: Any) -> dict[str, Any]:
    """Returns the first event with a name that meets a condition."""
    async for name, told in _events(http):
        if name == wanted and is_right(told):
            return told
    raise AssertionError(f"the stream ended without {wanted}")


async def _step(rest: Rest, model_id: str, number: int) -> None:
    await rest.result((await rest.forward_backward(model_id, 2 * number - 1)).json()["request_id"])
    await rest.result((await rest.optim_step(model_id, 2 * number, learning_rate=0.5))["request_id"])


async def test_the_page_is_served_by_itself_and_lets_nothing_in(stand: Stand) -> None:
    async with httpx.AsyncClient(base_url=stand.url, timeout=60) as http:
        page = await http.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        names = sorted(live_routes.page_files())
        assert {"main.js", "page.css", "index.html"} <= set(names)
        for name in names:
            file = await http.get(f"/page/{name}")
            assert file.headers["content-security-policy"] == policy
            assert file.headers["x-content-type-options"] == "nosniff"
            # The page loads nothing from other hosts, and contains nothing inline that the policy would block.
            elsewhere = re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]+", _NAMES.sub("", file.text))
            assert elsewhere == [], name
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(| on[a-z]+=| style=", file.text)
            again = await http.get(f"/page/{name}", headers={"If-None-Match": file.headers["etag"]})
            assert again.status_code == 304
        for wrong in ("none.js", "..%2Flive_routes.py", "%2e%2e%2flive_routes.py"):
            assert (await http.get(f"/page/{wrong}")).status_code == 404


async def test_a_bearer_token_opens_the_stream_too(stand: Stand) -> None:
    async with httpx.AsyncClient(
        timeout=60, base_url=f"{stand.url}/api/v1/", headers={"Authorization": f"Bearer {KEY}"}
    ) as http:
        names = []
        async for name, _ in _events(http):
            names.append(name)
            if len(names) == 3:
                break
    assert len(names) == 3, f"the stream ended after {names}"


async def test_behind_a_path_the_page_is_found_with_and_without_a_slash(stand: Stand) -> None:
    await stand.stop()
    await stand.start(base_path="/fovea")
    async with httpx.AsyncClient(follow_redirects=True, timeout=60) as http:
        for url in (stand.url, f"{stand.url}/"):
            page = await http.get(url)
            assert (page.status_code, str(page.url)) == (200, f"{stand.url}/")


async def test_a_step_a_sample_and_an_error_come_down_the_stream(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await _step(rest, model_id, 1)
    await _step(rest, model_id, 2)
    sampling_id = await rest.snapshot(model_id, 5)
    sample = (await rest.sample(sampling_id, 0)).json()["request_id"]
    await rest.result(sample)
    await rest.post("asample", sampling_session_id=sampling_id, seq_id=1, nonsense=1)

    def has_two_steps(told: dict[str, Any]) -> bool:
        return any(model["id"] == model_id and model["step"] == 2 for model in told["changed"])

    async with asyncio.timeout(60):
        models = await _until(rest.http, "models", has_two_steps)
        await _until(rest.http, "samples", lambda told: any(one["source"] == model_id for one in told["sources"]))
        errors = await _until(rest.http, "errors", lambda told: told["errors"])
    (model,) = (one for one in models["changed"] if one["id"] == model_id)
    assert model["last"]["learning_rate"] == 0.5
    assert model["spark"]["name"] == "loss_sum"
    assert "nonsense" in errors["errors"][0]["message"]
    curves = (await rest.http.get(f"live/curves/{model_id}")).json()
    assert curves["curves"]["learning_rate"] == {"step": [1, 2], "mean": [0.5, 0.5]}
    (group,) = (await rest.http.get("live/samples", params={"source": model_id})).json()["groups"]
    assert (group["step"], group["pieces"][0]["ids"], group["drawn"][0]["sequence_id"]) == (2, [1, 2, 3], f"{sample}:0")
    assert group["drawn"][0]["logprobs"] == [-0.25] * 4


async def test_reports_of_a_client_are_shown_beside_their_samples(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await _step(rest, model_id, 1)
    sampling_id = await rest.snapshot(model_id, 3)
    sample = (await rest.sample(sampling_id, 0)).json()["request_id"]
    await rest.result(sample)
    told = {
        "model_id": model_id,
        "metrics": {"reward": 0.25, "kl": 1e-3},
        "samples": [
            {"sequence_id": f"{sample}:0", "reward": 1.0, "truth": "<script>7</script>"},
            {"sequence_id": "sess-of-somebody:sample:0:0:0", "reward": 1.0},
        ],
    }
    assert (await rest.post("live/reports", **told)).json() == {"step": 1, "samples_kept": 1}
    curves = (await rest.http.get(f"live/curves/{model_id}")).json()["curves"]
    assert (curves["reward"], curves["kl"]["mean"]) == ({"step": [1], "mean": [0.25]}, [0.001])
    (group,) = (await rest.http.get("live/samples", params={"source": model_id})).json()["groups"]
    assert (group["truth"], group["drawn"][0]["reward"]) == ("<script>7</script>", 1.0)


async def test_the_last_answers_to_held_out_rows_are_beside_the_curves(rest: Rest) -> None:
    model_id = await rest.create_model()
    for number, wrong in ((1, 3), (2, 1)):
        await _step(rest, model_id, number)
        answers = {"labels": ["cat", "dog"], "counts": [[4 - wrong, wrong, 0], [0, 3, 1]]}
        await rest.ok("live/reports", model_id=model_id, metrics={"accuracy": 0.5}, answers=answers)
    await rest.ok("live/reports", model_id=model_id, metrics={"kl": 0.5})
    found = (await rest.http.get(f"live/curves/{model_id}")).json()
    assert found["answers"] == {"step": 2, "labels": ["cat", "dog"], "counts": [[3, 1, 0], [0, 3, 1]]}
    other = await rest.create_model(1)
    assert "answers" not in (await rest.http.get(f"live/curves/{other}")).json()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"step": 9}, "step"),
        ({"metrics": {"<b>": 1.0}}, "metrics"),
        ({"metrics": {f"m{number}": 1.0 for number in range(17)}}, "metrics"),
        ({"samples": [{"sequence_id": "a", "reward": "high"}]}, "samples"),
        ({"metrics": {"reward": 1e308}}, "metrics"),
        ({"samples": [{"sequence_id": "a", "reward": -1e300}]}, "samples"),
        ({"answers": {"labels": ["a", "b"], "counts": [[1, 0, 0]]}}, "answers"),
        ({"answers": {"labels": ["a"], "counts": [[1]]}}, "answers"),
        ({"answers": {"labels": ["a"], "counts": [[1, -1]]}}, "answers"),
        ({"answers": {"labels": ["a" * 65], "counts": [[1, 0]]}}, "answers"),
        ({"answers": {"labels": [], "counts": []}}, "answers"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_a_wrong_report_is_refused_by_name(rest: Rest, wrong: dict[str, Any], field: str) -> None:
    answer = await rest.post("live/reports", model_id=await rest.create_model(), **wrong)
    assert answer.status_code == 400
    assert field in answer.json()["detail"]


async def test_curves_outlive_the_gateway_and_an_open_page_does_not_hold_it_up(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await _step(rest, model_id, 1)
    before = (await rest.post("live/reports", model_id=model_id, metrics={"reward": 0.5})).json()
    assert before["step"] == 1
    events = _events(rest.http)
    await anext(events)
    async with asyncio.timeout(30):
        await stand.stop()
    await events.aclose()
    await stand.start()
    curves = (await rest.http.get(f"live/curves/{model_id}")).json()["curves"]
    assert curves["reward"] == {"step": [1], "mean": [0.5]}
    assert curves["learning_rate"]["mean"] == [0.5]


async def test_a_resumed_run_continues_its_curve_and_is_known_as_resumed(stand: Stand, rest: Rest) -> None:
    first = await rest.create_model()
    for number in (1, 2):
        await _step(rest, first, number)
    saved = await rest.ok("save_weights", model_id=first, seq_id=5, path="kept")
    path = (await rest.result(saved["request_id"]))["path"]
    # A step after the checkpoint, which the resumed run repeats.
    await rest.result((await rest.forward_backward(first, 6)).json()["request_id"])
    await rest.result((await rest.optim_step(first, 7, learning_rate=0.125))["request_id"])
    resumed = await rest.create_model(1)
    loaded = await rest.ok("load_weights", model_id=resumed, seq_id=1, path=path, optimizer=True)
    await rest.result(loaded["request_id"])
    await rest.result((await rest.forward_backward(resumed, 2)).json()["request_id"])
    await rest.result((await rest.optim_step(resumed, 3, learning_rate=0.25))["request_id"])
    assert (await rest.post("live/reports", model_id=resumed, metrics={"accuracy": 0.5})).json()["step"] == 3
    for _ in range(2):  # before and after a restart of the gateway
        curves = (await rest.http.get(f"live/curves/{resumed}")).json()
        assert curves["last_step"] == 3
        assert curves["curves"]["learning_rate"] == {"step": [1, 2, 3], "mean": [0.5, 0.5, 0.25]}
        told = await _until(rest.http, "models", lambda told: told["changed"])
        known = {model["id"]: model["resumed"] for model in told["changed"]}
        assert known == {first: None, resumed: {"path": path, "step": 2}}
        await stand.stop()
        await stand.start()


async def test_weights_without_their_optimizer_begin_a_new_curve(rest: Rest) -> None:
    first = await rest.create_model()
    await _step(rest, first, 1)
    saved = await rest.ok("save_weights", model_id=first, seq_id=3, path="kept")
    path = (await rest.result(saved["request_id"]))["path"]
    fresh = await rest.create_model(1)
    loaded = await rest.ok("load_weights", model_id=fresh, seq_id=1, path=path, optimizer=False)
    await rest.result(loaded["request_id"])
    assert (await rest.post("live/reports", model_id=fresh, metrics={"reward": 0.5})).json()["step"] == 0


async def test_a_model_has_its_curves_in_the_database_from_its_first_step_on(stand: Stand, rest: Rest) -> None:
    assert stand.gateway is not None
    parts = stand.gateway.components
    model_id = await rest.create_model()
    for number in (1, 2):
        await _step(rest, model_id, number)
        await parts.live_state.tick()
    blob = await parts.database.read(lambda connection: read_curves(connection, model_id))
    assert blob is not None
    assert StepCurves.from_blob(blob).last_step == 1, "later ones are written together half a minute after that"


async def test_a_stream_ends_with_its_key(stand: Stand) -> None:
    assert stand.gateway is not None
    ring = stand.gateway.components.keys
    text, key = await ring.create("alice", "", Scope.READ, None)
    async with stand.http(text) as http, asyncio.timeout(60):
        events = _events(http)
        assert await anext(events) == ("caller", {"owner": "alice", "key_id": key.key_id, "scope": "read"})
        await ring.revoke(key.key_id)
        *_, (last, told) = [event async for event in events]
    assert last == "refused"
    assert "revoked" in told["detail"]


async def test_administrators_see_everybodys_and_others_their_own(stand: Stand, rest: Rest) -> None:
    assert stand.gateway is not None
    ring = stand.gateway.components.keys
    model_id = await rest.create_model()
    saved = await rest.ok("save_weights", model_id=model_id, seq_id=1, path="kept")
    await rest.result(saved["request_id"])
    admin, _ = await ring.create("root", "", Scope.ADMIN, None)
    other, _ = await ring.create("bob", "", Scope.TRAIN, None)
    async with stand.http(admin) as http, asyncio.timeout(60):
        told = await _until(http, "models", lambda told: told["changed"])
        assert [model["id"] for model in told["changed"]] == [model_id]
        services = await _until(http, "services", lambda told: True)
        assert services["base_models"][0]["trainers"][0]["address"] == stand.trainer.address
        (listed,) = (await http.get("checkpoints", params={"owner": "*"})).json()["checkpoints"]
        assert listed["owner"] not in ("", "root", "bob")
    async with stand.http(other) as http, asyncio.timeout(60):
        told = await _until(http, "models", lambda told: True)
        assert told == {"changed": [], "order": []}
        services = await _until(http, "services", lambda told: True)
        assert "address" not in services["base_models"][0]["trainers"][0]
        assert (await http.get("checkpoints", params={"owner": "*"})).status_code == 403
        assert (await http.get("live/samples", params={"owner": "root"})).status_code == 403


async def test_the_page_says_how_many_requests_wait_for_a_slot_of_an_adapter(stand: Stand) -> None:
    stand.sampler.waiting_for_slot = 3
    async with stand.http() as http, asyncio.timeout(30):
        await _until(http, "services", lambda told: told["base_models"][0]["samplers"][0]["waiting_for_slot"] == 3)


async def test_a_part_that_never_answered_is_starting_and_one_that_left_is_not(stand: Stand) -> None:
    async def state(wanted: tuple[bool, bool]) -> None:
        def is_right(told: dict[str, Any]) -> bool:
            trainer = told["base_models"][0]["trainers"][0]
            return (trainer["up"], trainer["starting"]) == wanted

        async with stand.http() as http, asyncio.timeout(30):
            await _until(http, "services", is_right)

    await state((True, False))
    await stand.trainer.stop()
    await state((False, False))
    await stand.stop()
    await stand.start()
    await state((False, True))
    await stand.trainer.start()
    await state((True, False))


async def test_administrators_get_the_figures_of_the_services_over_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea_gateway.fronts.app.SYSTEM_S", 0.1)
    async with running(Stand(tmp_path)) as stand, stand.http() as http, asyncio.timeout(60):
        assert stand.gateway is not None
        admin, _ = await stand.gateway.components.keys.create("root", "", Scope.ADMIN, None)
        rest = Rest(http)
        model_id = await rest.create_model()
        await _step(rest, model_id, 1)
        sampling_id = await rest.snapshot(model_id, 3)
        await rest.result((await rest.sample(sampling_id, 0)).json()["request_id"])
        stand.trainer.open.clear()
        await rest.forward_backward(model_id, 4)
        async with stand.http(admin) as asking:
            told = await _until(asking, "system", lambda told: told["values"].get("queue|running") == 1)
            assert told["values"].keys() >= {"queue|waiting", "lag|durable points", "tokens|trained", "tokens|sampled"}
            assert told["values"][f"busy|trainer of {MODEL}"] >= 0
            found: dict[str, Any] = {"series": {}}
            while f"push|{MODEL}" not in found["series"]:  # The running command may be the sample before its push.
                found = (await asking.get("live/system", params={"hours": 1, "points": 60})).json()
                await asyncio.sleep(0.05)
            assert (found["period_s"], len(found["at"])) == (60.0, 60)
            assert "queue|running" in found["series"]
            assert 1.0 in found["series"]["queue|running"]["high"]
        stand.trainer.open.set()
        assert (await http.get("live/system")).status_code == 403
        async for name, _ in _events(http):
            assert name != "system"
            if name == "checkpoints":
                break


async def test_a_day_of_the_services_has_the_use_of_gpus_where_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea_gateway.fronts.app.SYSTEM_S", 0.1)
    stand = Stand(tmp_path)
    stand.trainer.devices = {
        "memory_used_bytes": 60, "memory_total_bytes": 80, "memory_kind": "gpu", "gpu_utilization": 0.75,
    }  # fmt: skip
    async with running(stand), asyncio.timeout(60):
        assert stand.gateway is not None
        admin, _ = await stand.gateway.components.keys.create("root", "", Scope.ADMIN, None)
        async with stand.http(admin) as asking:
            name = f"gpu_utilization|trainer of {MODEL}"
            told = await _until(asking, "system", lambda told: name in told["values"])
            assert (told["values"][name], told["values"][f"gpu_memory|trainer of {MODEL}"]) == (0.75, 60)
            assert [one for one in told["values"] if one.startswith("gpu_utilization|sampler")] == []


async def test_a_session_that_its_client_ends_is_no_error_and_one_that_expires_is(stand: Stand, rest: Rest) -> None:
    await rest.create_model()
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
    assert (await rest.post("session_heartbeat", session_id=rest.session_id)).status_code == 410
    expired = await rest.open_session()
    sessions = stand.gateway.components.sessions
    await sessions.expire(await sessions.load(expired))
    assert (await rest.post("session_heartbeat", session_id=expired)).status_code == 410
    async with asyncio.timeout(60):
        told = await _until(rest.http, "errors", lambda told: told["errors"])
    assert [error["message"] for error in told["errors"]] == [f"session {expired} has ended (expired): open a new one"]


async def test_the_model_of_a_silent_client_is_not_in_training(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()

    def has_state(state: str) -> Callable[[dict[str, Any]], bool]:
        return lambda told: any((model["id"], model["state"]) == (model_id, state) for model in told["changed"])

    async with asyncio.timeout(60):
        await _until(rest.http, "models", has_state("ready"))
        stand.silence(rest.session_id, 60)
        await _until(rest.http, "models", has_state("client gone"))
        await rest.ok("session_heartbeat", session_id=rest.session_id)
        await _until(rest.http, "models", has_state("ready"))
