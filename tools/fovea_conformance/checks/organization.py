"""Section K: projects, the search for sessions, and the audit log."""

import uuid
import warnings
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import tinker
from tinker import types

from fovea_conformance.check import NotApplicable, check, expect
from fovea_conformance.target import Target, unique_name

_REFUSED = (400, 403, 404, 422)


@check("C129", "Projects: a session's runs are listed in its project, also after it moves; an unknown one is an error")
def c129_projects(target: Target) -> str:
    """Trains in two projects, lists the runs of each, and moves the first session into the second project."""
    first, second = (f"conformance-{uuid.uuid4().hex[:8]}" for _ in range(2))
    rest, services = target.rest(), [target.service(project_id=name) for name in (first, second)]
    runs = [target.training(service).get_info().model_id for service in services]
    for project, run in zip((first, second), runs, strict=True):
        expect(_runs(rest, project) == {run}, f"the project of {run} lists {_runs(rest, project)}")
    expect(set(runs) <= _runs(rest, None), "runs in projects are not among all runs")
    rest.assign_session_project(services[0].holder.get_session_id(), second).result(60)
    expect(_runs(rest, second) == set(runs), f"after the move the project lists {_runs(rest, second)}")
    answers = {
        "an unknown project": target.http.get("training_runs", params={"project_id": f"no-{first}"}),
        "a session of no one": target.http.put("sessions/no-such-session/project", json={"project_id": second}),
        "a move to no project": target.http.put(f"sessions/{target.session()}/project", json={}),
    }
    for name, answer in answers.items():
        expect(answer.status_code in _REFUSED, f"{name} is answered {answer.status_code} {answer.text[:200]}")
    return f"two runs in two projects, then in one; refused: {', '.join(answers)}"


@check(
    "C130", "sessions/search by display name, metadata, project and status: pages without gap or repeat, newest first"
)
def c130_search(target: Target) -> str:
    """Opens three sessions with a mark, ends one, and searches them, two per page."""
    mark, project = f"mark-{uuid.uuid4().hex[:8]}", f"conformance-{uuid.uuid4().hex[:8]}"
    opened = [
        _open(target, display_name=f"Nightly {mark} {word}", user_metadata={"mark": mark, "index": str(index)})
        for index, word in enumerate(("one", "two", "three"))
    ]
    other = _open(target, display_name=f"other {mark}", user_metadata={"mark": "another"}, project_id=project)
    target.post(f"sessions/{opened[0]}/finish", reason={"type": "errored"}, detail="on purpose").raise_for_status()
    found = list(_found(target, user_metadata={"mark": mark}))
    expect([one.session_id for one in found] == opened[::-1], f"opened {opened}, found {found}")
    first = found[-1]
    expect(first.user_metadata == {"mark": mark, "index": "0"}, f"the metadata is {first.user_metadata}")
    status: Any = first.status
    expect(status is not None and status.type == "client_finished", f"the status of an ended session is {status}")
    expect(status.reason.type == "errored", f"it ended as errored, the status says {status.reason}")
    searches: dict[str, tuple[dict[str, Any], list[str]]] = {
        "words of the name": ({"display_name": f"{mark.upper()} nightly"}, opened[::-1]),
        "one pair too many": ({"user_metadata": {"mark": mark, "index": "1"}}, [opened[1]]),
        "id or name": ({"session_id": other, "display_name": f"{mark} three"}, [other, opened[2]]),
        "active": ({"display_name": mark, "statuses": [{"type": "active"}]}, [other, *opened[:0:-1]]),
        "errored": (
            {"display_name": mark, "statuses": [{"type": "client_finished", "reasons": ["errored"]}]},
            [opened[0]],
        ),
        "a project": ({"project_ids": [project]}, [other]),
        "nothing": ({"display_name": unique_name("nothing")}, []),
    }
    for name, (asked, wanted) in searches.items():
        ids = [one.session_id for one in _found(target, **asked)]
        expect(ids == wanted, f"{name}: expected {wanted}, found {ids}")
    for field, value in (("project_ids", [f"no-{project}"]), ("limit", 0), ("statuses", [{"type": "asleep"}])):
        answer = target.post("sessions/search", **{field: value})
        expect(answer.status_code in _REFUSED, f"{field}={value} is answered {answer.status_code}")
        expect(field.rstrip("s") in answer.text, f"the error does not name {field}: {answer.text[:200]}")
    return f"{len(found)} sessions on pages of two, {len(searches)} searches"


@check("C131", "Audit log: an administrator finds a deletion with its owner and key, on its day only, in order of time")
def c131_audit(target: Target) -> str:
    """Saves and deletes a checkpoint, and reads the log through AdminClient with an administrator's key."""
    if not target.options.admin_key:
        raise NotApplicable("needs --admin-key, a key that may read the audit log")
    training, rest = target.training(), target.rest()
    path = training.save_state(unique_name("audited")).result(60).path
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    admin = tinker.AdminClient(base_url=target.options.base_url, api_key=target.options.admin_key)
    today = datetime.now(UTC).date()
    run, _, name = path.removeprefix("tinker://").partition("/weights/")
    found = [each for each in _log(admin, "checkpoints", today) if _is_about(each, run, name)]
    deleted = [each for each in found if each.event == "checkpoint_delete"]
    expect(len(deleted) == 1, f"one deletion of {path}, the log has {[each.event for each in found]}")
    expect(bool(deleted[0].event_details), "the entry has no event_details")
    times = [each.timestamp for each in _log(admin, "all", today)]
    expect(times == sorted(times), "the entries are not in order of time")
    others = {each.event for each in _log(admin, "projects", today) if not each.event.startswith("project")}
    expect(not others, f"events of projects are {others}")
    earlier = [each for each in _log(admin, "all", today - timedelta(2)) if _is_about(each, run, name)]
    expect(not earlier, f"the day before yesterday has {earlier[:1]}")
    with target.raw(target.options.admin_key) as client:
        plain, wrong = target.http.get("audit"), client.get("audit", params={"day": "never"})
    expect(plain.status_code in (401, 403), f"a key without the role is answered {plain.status_code}")
    expect(wrong.status_code in _REFUSED and "day" in wrong.text, f"day=never: {wrong.status_code} {wrong.text[:200]}")
    return f"{deleted[0].event} at {deleted[0].timestamp:%H:%M:%S}, one of {len(times)} entries today"


def _runs(rest: tinker.RestClient, project_id: str | None) -> set[str]:
    page = rest.list_training_runs(limit=1000, project_id=project_id).result(60)
    return {run.training_run_id for run in page.training_runs}


def _open(target: Target, **more: Any) -> str:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"} | more
    return str(target.post("create_session", **body).raise_for_status().json()["session_id"])


def _found(target: Target, **asked: Any) -> Iterator[types.SessionSummary]:
    """Yields all results, two per page."""
    seen: set[str] = set()
    request = types.SessionSearchRequest(limit=2, **asked)
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tinker.ExperimentalWarning)
            page = target.rest().search_sessions(request).result(60)
        expect(len(page.sessions) <= 2, f"a page of 2 has {len(page.sessions)}")
        for one in page.sessions:
            expect(one.session_id not in seen, f"{one.session_id} is on two pages")
            seen.add(one.session_id)
        yield from page.sessions
        if page.next_cursor is None:
            return
        expect(bool(page.sessions), "a page is empty, and there is another one")
        request = request.model_copy(update={"cursor": page.next_cursor})


def _log(admin: tinker.AdminClient, event_type: Any, day: date) -> list[types.AuditLogEntry]:
    entries: list[types.AuditLogEntry] = admin.get_audit_log(event_type, day).result(60).entries
    return entries


def _is_about(entry: types.AuditLogEntry, *names: str) -> bool:
    return all(name in str(entry.event_details) for name in names)
