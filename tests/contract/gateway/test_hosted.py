"""What only the hosted service has: refused by name. And the little of it that is served."""

import asyncio
import os
import pathlib
import sys
from asyncio.subprocess import PIPE, STDOUT

import pytest

from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "sessions/sess-1/trace_export", "traces"),
        ("POST", "auth/token", "JWTs"),
        ("DELETE", "auth/apikey/me", "fovea keys revoke"),
        ("GET", "billing/usage/events", "billing"),
        ("GET", "billing/usage/checkpoints/current", "billing"),
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


async def test_a_key_is_described(rest: Rest) -> None:
    answer = (await rest.http.get("auth/apikey/me")).json()
    assert isinstance(answer["key_id"], int)
    assert answer["details"] == {"org_details": {"name": "Fovea"}, "user_details": {"email": ""}}


async def test_the_command_line_sees_sessions_models_and_its_key(stand: Stand, tmp_path: pathlib.Path) -> None:
    environment = os.environ | {"TINKER_BASE_URL": stand.url, "TINKER_API_KEY": KEY, "HOME": str(tmp_path)}
    # In one process: the SDK imports torch.
    calls = [["auth", "status"], ["model", "list"], ["auth", "login"]]
    code = f"from tinker.cli.__main__ import main_cli\nfor call in {calls}: main_cli(call, standalone_mode=False)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=environment, stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    output, _ = await process.communicate(f"{KEY}\n".encode())
    assert process.returncode == 0, output
    for words in ("Tinker accessible: yes", MODEL.split("/")[-1], "Logged in"):
        assert words in output.decode()
