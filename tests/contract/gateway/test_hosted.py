"""Features of the hosted service: those that Fovea lacks are refused with an explanation; a few work."""

import asyncio
import json
import pathlib
import sys
import time
from asyncio.subprocess import PIPE, STDOUT

import pytest

from fovea_gateway.access.api_keys import Scope
from tests.client_environment import client_environment
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "auth/token", "without gateway.oidc_issuer"),
        ("DELETE", "auth/apikey/me", "fovea keys revoke"),
        ("POST", "no_such_call", "POST /api/v1/no_such_call"),
    ],
)
async def test_what_is_missing_is_named(rest: Rest, method: str, path: str, words: str) -> None:
    response = await rest.http.request(method, path, json={} if method != "GET" else None)
    assert response.status_code == 404
    assert words in response.json()["detail"]
    assert response.json()["category"] == "user"


async def test_display_names_are_kept(stand: Stand, rest: Rest) -> None:
    metadata = {"display_name": "of the user", "run": "7"}
    opened = await rest.ok("create_session", tags=[], user_metadata=metadata, sdk_version="x", display_name="First try")
    await stand.stop()
    await stand.start()
    session = (await rest.http.get(f"sessions/{opened['session_id']}")).json()
    assert session == {
        "training_run_ids": [],
        "sampler_ids": [],
        "user_metadata": metadata,
        "display_name": "First try",
    }


async def test_the_command_line_exports_a_trace(stand: Stand, rest: Rest, tmp_path: pathlib.Path) -> None:
    model = await rest.create_model()
    for seq_id in (1, 2):
        await rest.result((await rest.ok("optim_step", model_id=model, seq_id=seq_id, adam_params={}))["request_id"])
    file = tmp_path / "trace.pftrace"
    environment = client_environment(TINKER_BASE_URL=stand.url, TINKER_API_KEY=KEY, HOME=str(tmp_path))
    command = [sys.executable, "-m", "tinker.cli", "session", "export-trace", rest.session_id, "--output", str(file)]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE, stderr=STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    events = json.loads(file.read_text())["traceEvents"]
    begun = {each["id"]: each for each in events if each["ph"] == "b"}
    ended = {each["id"]: each["ts"] for each in events if each["ph"] == "e"}
    assert [each["name"] for each in begun.values()] == ["create_model 0", "optim_step 1", "optim_step 2"]
    assert ended.keys() == begun.keys()
    assert all(ended[name] >= each["ts"] for name, each in begun.items())
    assert {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": model}} in events


async def test_a_link_to_a_trace_is_signed(stand: Stand, rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stand.gateway is not None
    other, _ = await stand.gateway.components.keys.create("other", "", Scope.TRAIN, None)
    async with stand.http(other) as http:
        assert (await http.get(f"sessions/{rest.session_id}/trace_export")).status_code == 404
    url = (await rest.http.get(f"sessions/{rest.session_id}/trace_export")).json()["url"]
    second = await rest.open_session()
    async with stand.http(None) as http:
        assert (await http.get(url)).json()["traceEvents"][1:] == []
        for wrong in (url.replace(url.split("/")[-2], second), url[:-1], url.replace("expires=", "expires=9")):
            assert (await http.get(wrong)).status_code == 403
        monkeypatch.setattr(time, "time", lambda: 2e9)
        assert "has expired" in (await http.get(url)).json()["detail"]


async def test_a_key_is_described(rest: Rest) -> None:
    answer = (await rest.http.get("auth/apikey/me")).json()
    assert isinstance(answer["key_id"], int)
    assert answer["details"] == {"org_details": {"name": "Fovea"}, "user_details": {"email": ""}}


async def test_the_command_line_sees_sessions_models_and_its_key(stand: Stand, tmp_path: pathlib.Path) -> None:
    environment = client_environment(TINKER_BASE_URL=stand.url, TINKER_API_KEY=KEY, HOME=str(tmp_path))
    # One process for all, because importing the SDK takes a second.
    calls = [["auth", "status"], ["model", "list"], ["auth", "login"]]
    code = f"from tinker.cli.__main__ import main_cli\nfor call in {calls}: main_cli(call, standalone_mode=False)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=environment, stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    output, _ = await process.communicate(f"{KEY}\n".encode())
    assert process.returncode == 0, output
    for words in ("Tinker accessible: yes", MODEL.split("/")[-1], "Logged in"):
        assert words in output.decode()
