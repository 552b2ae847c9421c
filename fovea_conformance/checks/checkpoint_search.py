"""Section I: the calls that SDK 0.39 adds, by raw HTTP, since 0.38 does not make them."""

from typing import Any

from fovea_conformance.check import Failed, Refused, check, expect
from fovea_conformance.target import Target, unique_name

Row = dict[str, Any]


@check("C122", "checkpoints/search: by metadata, kind and base model; pages without gap or repeat, newest first")
def c122_search(target: Target) -> str:
    """Three training checkpoints and one to sample from, found by a mark that no other has, two on a page."""
    mark, training = {"mark": unique_name("mark")}, target.training()
    saved = [training.save_state(f"s-{index}", user_metadata=mark).result(60).path for index in range(3)]
    saved.append(training.save_weights_for_sampler("s", user_metadata=mark).result(60).path)
    answer = target.http.get("checkpoints", params={"limit": 200}).raise_for_status()
    listed = set(_paths(answer.json()["checkpoints"]))
    expect(set(saved) <= listed, f"the listing lacks {sorted(set(saved) - listed)}")
    mine = _pages(target, {"user_metadata": mark})
    expect(_paths(mine) == saved[::-1], f"saved {saved}, found {_paths(mine)}")
    wrong = [row for row in mine if row.get("base_model") != target.model]
    expect(not wrong, f"base_model is not {target.model}: {wrong[:1]}")
    of_kind = _pages(target, {"user_metadata": mark, "checkpoint_type": "sampler", "base_models": [target.model]})
    expect(_paths(of_kind) == saved[-1:], f"to sample from is {saved[-1]}, found {_paths(of_kind)}")
    expect(not _pages(target, {"base_models": ["nobody/nothing"]}), "checkpoints of a base model that is not there")
    return f"{len(mine)} of one run, on pages of two"


@check("C123", "external_weights_upload_start and _finish take weights, or are refused by name")
def c123_upload(target: Target) -> str:
    """An upload of nothing: accepted, or answered with an error that says what is not there."""
    refusals = []
    for route in ("external_weights_upload_start", "external_weights_upload_finish"):
        answer = target.post(route)
        if answer.status_code == 404:
            detail = str(answer.json().get("detail", "")) if "json" in answer.headers.get("content-type", "") else ""
            expect("upload" in detail, f"{route} answered 404 without saying that uploads are not there: {answer.text}")
            refusals.append(detail)
        expect(answer.status_code < 500, f"{route} answered {answer.status_code} {answer.text[:200]}")
    if refusals:
        raise Refused(refusals[0])
    return "uploads are known"


def _pages(target: Target, asked: Row) -> list[Row]:
    """All that is found, two on a page. Raises Failed if a page repeats what another had."""
    found: list[Row] = []
    cursor = None
    while True:
        answer = target.post("checkpoints/search", **asked, limit=2, cursor=cursor)
        expect(answer.status_code == 200, f"checkpoints/search answered {answer.status_code} {answer.text[:200]}")
        page = answer.json()
        expect(len(page["checkpoints"]) <= 2, f"a page of 2 has {len(page['checkpoints'])}")
        found += page["checkpoints"]
        paths = _paths(found)
        expect(len(set(paths)) == len(paths), "a checkpoint is on two pages")
        cursor = page.get("next_cursor")
        if cursor is None:
            return found
        if not page["checkpoints"]:
            raise Failed("a page is empty, and there is another one")


def _paths(rows: list[Row]) -> list[str]:
    return [str(row["tinker_path"]) for row in rows]
