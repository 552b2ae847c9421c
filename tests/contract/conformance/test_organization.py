"""Checks of projects, search and the audit log pass on a gateway and fail on a faulty one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fovea_conformance.__main__ import load
from fovea_conformance.check import Status
from fovea_conformance.proxy import Proxy
from fovea_conformance.runner import run_check
from fovea_conformance.target import Options
from fovea_gateway.access.api_keys import Scope
from tests.certificates import one_certificate
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.keeping import KeepingTrainer
from tests.e2e.conformance import disorder, misreadings
from tests.e2e.conformance.corruption import Wrong, answer, without

CHECKS = {one.check_id: one for one in load()}
WRONG: dict[str, dict[str, Wrong]] = {
    "C129": {
        "ignores projects": without("create_session", "project_id"),
        "lists all runs": misreadings.without_query("training_runs"),
        "never moves": disorder.claims("PUT", "/project"),
    },
    "C130": {
        "ignores metadata": without("sessions/search", "user_metadata"),
        "ignores statuses": without("sessions/search", "statuses"),
        "the first page again": without("sessions/search", "cursor"),
        "oldest first": answer("sessions/search", lambda body: body["sessions"].reverse()),
    },
    "C131": {
        "keeps no log": answer("audit", lambda body: body.update(entries=[])),
        "any day": misreadings.without_query("audit"),
        "tells everyone": misreadings.open_log(),
        "no order": answer("audit", lambda body: body["entries"].reverse()),
    },
}


@pytest.fixture(scope="module")
async def stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway with fake services; its trainer writes files."""
    folder = tmp_path_factory.mktemp("organization")
    with one_certificate(folder):
        stand = Stand(Path(folder))
        stand.trainer = KeepingTrainer(lambda: stand.samplers)
        async with running(stand) as stand:
            yield stand


async def judged(stand: Stand, check_id: str, wrong: Wrong) -> tuple[Status, str]:
    """Returns the verdict of a check on the gateway behind a faulty proxy."""
    assert stand.gateway is not None
    admin, _ = await stand.gateway.components.keys.create("auditor", "", Scope.ADMIN, None)
    with Proxy(stand.url, before=wrong.before, after=wrong.after) as proxy:
        options = Options(proxy.url, KEY, MODEL, admin_key=admin)
        verdict = await asyncio.to_thread(run_check, CHECKS[check_id], options)
    return verdict.status, verdict.detail


@pytest.mark.parametrize(("check_id", "wrong"), [(check_id, wrong) for check_id in WRONG for wrong in WRONG[check_id]])
async def test_fails_on_a_wrong_server(stand: Stand, check_id: str, wrong: str) -> None:
    status, detail = await judged(stand, check_id, WRONG[check_id][wrong])
    assert status is Status.FAILED, detail


@pytest.mark.parametrize("check_id", WRONG)
async def test_passes_on_a_right_server(stand: Stand, check_id: str) -> None:
    status, detail = await judged(stand, check_id, Wrong())
    assert status is Status.PASSED, detail
