"""Projects of sessions and the search for sessions, through the SDK."""

import asyncio
from typing import Any

import pytest
import tinker
from tinker import types

from fovea_gateway.access.api_keys import Scope
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_checkpoints import save

pytestmark = pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")


def train(stand: Stand, project: str | None) -> tuple[str, str]:
    """Returns the ids of a session in a project and of its model."""
    with tinker.ServiceClient(base_url=stand.url, api_key=KEY, project_id=project) as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=8).result()
        return service.holder.get_session_id(), training.get_info().model_id


def runs(stand: Stand, project: str | None) -> set[str]:
    rest = tinker.RestClient(base_url=stand.url, api_key=KEY)
    page = rest.list_training_runs(project_id=project).result()
    assert page.cursor.total_count == len(page.training_runs)
    return {run.training_run_id for run in page.training_runs}


async def test_runs_are_listed_in_their_project(stand: Stand) -> None:
    session, first = await asyncio.to_thread(train, stand, "vision")
    _, second = await asyncio.to_thread(train, stand, "text")
    _, third = await asyncio.to_thread(train, stand, None)
    assert await asyncio.to_thread(runs, stand, "vision") == {first}
    assert await asyncio.to_thread(runs, stand, "default") == {third}
    assert await asyncio.to_thread(runs, stand, None) == {first, second, third}
    rest = await asyncio.to_thread(tinker.RestClient, base_url=stand.url, api_key=KEY)
    await rest.assign_session_project(session, "text")
    await stand.stop()
    await stand.start()
    assert await asyncio.to_thread(runs, stand, "text") == {first, second}
    with pytest.raises(tinker.NotFoundError, match="no project 'vision'"):
        await rest.list_training_runs(project_id="vision")
    await rest.assign_session_project(session, "default")
    assert await asyncio.to_thread(runs, stand, "default") == {first, third}


async def test_a_project_belongs_to_its_owner(stand: Stand, rest: Rest) -> None:
    assert stand.gateway is not None
    await rest.ok("create_session", project_id="mine")
    other, _ = await stand.gateway.components.keys.create("other", "", Scope.TRAIN, None)
    async with stand.http(other) as http:
        for answer in (
            await http.get("training_runs", params={"project_id": "mine"}),
            await http.post("sessions/search", json={"project_ids": ["mine"]}),
            await http.post("checkpoints/search", json={"project_ids": ["mine"]}),
            await http.put(f"sessions/{rest.session_id}/project", json={"project_id": "mine"}),
        ):
            assert (answer.status_code, answer.json()["reason"]) == (404, "NOT_FOUND"), answer.text
        assert (await http.post("sessions/search", json={"owner": {"type": "accessible"}})).json()["sessions"] == []
        refused = await http.post("sessions/search", json={"owner": {"type": "user", "owner_urns": ["key-1"]}})
        assert (refused.status_code, refused.json()["reason"]) == (403, "PERMISSION_DENIED")


@pytest.mark.parametrize("name", ["", "a b", "x" * 101, "ä", "-a", 1])
async def test_a_wrong_name_is_refused_with_its_field(rest: Rest, name: Any) -> None:
    for answer in (
        await rest.post("create_session", project_id=name),
        await rest.http.put(f"sessions/{rest.session_id}/project", json={"project_id": name}),
    ):
        assert (answer.status_code, "project_id" in answer.json()["detail"]) == (400, True)


async def test_a_key_moves_only_what_it_could_have_made(stand: Stand, rest: Rest) -> None:
    assert stand.gateway is not None
    keys = stand.gateway.components.keys
    (own,) = keys.listed()
    reader, _ = await keys.create(own.owner, "", Scope.READ, None)
    async with stand.http(reader) as http:
        url, body = f"sessions/{rest.session_id}/project", {"project_id": "p"}
        assert (await http.put(url, json=body)).status_code == 200
        await rest.create_model()
        refused = await http.put(url, json=body)
    assert (refused.status_code, "moving a session with models" in refused.json()["detail"]) == (403, True)


def pages(stand: Stand, **asked: Any) -> list[types.SessionSummary]:
    """Returns all results, two per page."""
    rest = tinker.RestClient(base_url=stand.url, api_key=KEY)
    found: list[types.SessionSummary] = []
    request = types.SessionSearchRequest(limit=2, **asked)
    while True:
        page = rest.search_sessions(request).result()
        assert len(page.sessions) <= 2
        found += page.sessions
        if page.next_cursor is None:
            return found
        request = request.model_copy(update={"cursor": page.next_cursor})


async def search(stand: Stand, **asked: Any) -> list[str]:
    return [one.session_id for one in await asyncio.to_thread(pages, stand, **asked)]


async def test_sessions_are_found(stand: Stand, rest: Rest) -> None:
    async def opened(name: str | None, project: str | None = None, **metadata: Any) -> str:
        body = {"display_name": name, "user_metadata": metadata, "project_id": project}
        return str((await rest.ok("create_session", **body))["session_id"])

    first = rest.session_id
    named = await opened("Nächtlicher Lauf 100% EINS", run="1", kind="a")
    second = await opened("nächtlicher lauf zwei", run="2", kind="a")
    third = await opened(None, "p", run="3", **{'a"b': 'c"d'})
    await rest.ok(f"sessions/{second}/finish", reason={"type": "interrupted"}, detail="by hand")
    assert await search(stand) == [third, second, named, first]
    assert await search(stand, display_name="LAUF NÄCHTLICHER") == [second, named]
    assert await search(stand, display_name="100%") == [named]
    assert await search(stand, display_name="100_") == []
    assert await search(stand, display_name="zwei", session_id=first) == [second, first]
    assert await search(stand, user_metadata={"kind": "a"}) == [second, named]
    assert await search(stand, user_metadata={"kind": "a", "run": "1"}) == [named]
    assert await search(stand, user_metadata={'a"b': 'c"d'}) == [third]
    assert await search(stand, user_metadata={"run": "4"}) == []
    assert await search(stand, project_ids=["p"]) == [third]
    assert await search(stand, project_ids=["default", "p"]) == [third, second, named, first]
    assert await search(stand, statuses=[{"type": "active"}]) == [third, named, first]
    finished = {"type": "client_finished"}
    assert await search(stand, statuses=[finished]) == [second]
    assert await search(stand, statuses=[finished | {"reasons": ["success"]}, {"type": "failed"}]) == []
    (summary,) = await asyncio.to_thread(pages, stand, session_id=second)
    assert (summary.project_id, summary.display_name) == ("default", "nächtlicher lauf zwei")
    assert summary.user_metadata == {"run": "2", "kind": "a"}
    status: Any = summary.status
    assert (status.reason.type, status.detail) == ("interrupted", "by hand")


async def test_checkpoints_of_a_session_are_counted(stand: Stand, rest: Rest) -> None:
    model = await rest.create_model()
    await save(rest, model, 1, "a")
    await save(rest, model, 2, "b")
    (session,) = (await rest.ok("sessions/search"))["sessions"]
    listed = (await rest.http.get("checkpoints")).json()["checkpoints"]
    assert session["checkpoints_count"] == 2
    assert session["checkpoint_storage_bytes"] == sum(each["size_bytes"] for each in listed) > 0


async def test_an_administrator_sees_what_is_stored(stand: Stand, rest: Rest) -> None:
    assert stand.gateway is not None
    text, _ = await stand.gateway.components.keys.create("admin", "", Scope.ADMIN, None)
    await save(rest, await rest.create_model(), 1, "state")
    await rest.ok("create_session", project_id="empty")
    admin = await asyncio.to_thread(tinker.AdminClient, base_url=stand.url, api_key=text)
    (row,) = (await admin.get_current_checkpoint_storage_usage()).data
    (listed,) = (await rest.http.get("checkpoints")).json()["checkpoints"]
    assert (row.project_id, row.checkpoint_count, row.size_bytes) == ("default", 1, listed["size_bytes"])
    assert (await admin.get_current_checkpoint_storage_usage("empty")).data == []
    with pytest.raises(tinker.NotFoundError, match="no project 'none'"):
        await admin.get_current_checkpoint_storage_usage("none")
    assert (await rest.http.get("billing/usage/checkpoints/current")).status_code == 403


async def test_an_administrator_finds_sessions_of_all(stand: Stand, rest: Rest) -> None:
    assert stand.gateway is not None
    admin, _ = await stand.gateway.components.keys.create("admin", "", Scope.ADMIN, None)
    own = (await rest.ok("sessions/search"))["sessions"][0]["owner"]
    async with stand.http(admin) as http:
        for owner in ({"type": "accessible"}, {"type": "user", "owner_urns": [own]}):
            found = (await http.post("sessions/search", json={"owner": owner})).json()["sessions"]
            assert [(each["session_id"], each["owner"]) for each in found] == [(rest.session_id, own)]
        assert (await http.post("sessions/search", json={})).json()["sessions"] == []


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"limit": 201}, "limit"),
        ({"display_name": " "}, "display_name"),
        ({"display_name": "a " * 17}, "display_name"),
        ({"user_metadata": {str(number): "a" for number in range(17)}}, "user_metadata"),
        ({"project_ids": ["p"] * 101}, "project_ids"),
        ({"project_ids": ["a b"]}, "project_ids"),
        ({"statuses": [{"type": "active", "reasons": ["success"]}]}, "statuses"),
        ({"owner": {"type": "user"}}, "owner_urns"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "a"}}, "last_created_at"),
        ({"order": "oldest"}, "order"),
    ],
)
async def test_a_wrong_search_is_refused_with_its_field(rest: Rest, given: dict[str, Any], field: str) -> None:
    refused = await rest.post("sessions/search", **given)
    assert (refused.status_code, field in refused.json()["detail"]) == (400, True), refused.text
