"""Checks that the suite reports every failed check of a server that implements almost nothing, without crashing or
hanging.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fovea_conformance.__main__ import load
from tests.certificates import one_certificate


async def config(request: Request) -> JSONResponse:
    return JSONResponse({})


async def session(request: Request) -> JSONResponse:
    return JSONResponse({"session_id": "bare"})


@pytest.fixture
async def bare_url() -> AsyncIterator[str]:
    """A server that answers configuration and sessions, and 404 to all other routes."""
    routes = [
        Route("/api/v1/client/config", config, methods=["POST"]),
        Route("/api/v1/client/dynamic_config", config, methods=["POST"]),
        Route("/api/v1/create_session", session, methods=["POST"]),
    ]
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="error", lifespan="off")
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


@pytest.fixture
def _certificates(tmp_path: Path) -> Iterator[None]:
    with one_certificate(tmp_path):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_certificates")
async def test_what_is_missing_fails(bare_url: str, tmp_path: Path) -> None:
    out = tmp_path / "verdicts.json"
    command = [sys.executable, "-m", "fovea_conformance", "--base-url", bare_url, "--model", "any", "--vlm"]
    process = await asyncio.create_subprocess_exec(*command, "--json", str(out), "--long-job-s", "1")
    assert await asyncio.wait_for(process.wait(), 280) == 1
    verdicts = {row["id"]: row for row in json.loads(out.read_text())}
    assert set(verdicts) == {one.check_id for one in load()}
    passed = [name for name, row in verdicts.items() if row["status"] == "passed"]
    assert set(passed) <= PASS_ON_A_BARE_SERVER
    assert all(row["detail"] for row in verdicts.values())


PASS_ON_A_BARE_SERVER = {"C2", "C30"}
"""Checks that this server passes: it returns an empty configuration and every answer has a body."""
