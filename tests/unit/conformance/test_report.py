"""Selection of checks, their verdicts, and the report."""

import json
import time
from pathlib import Path

import pytest
import tinker
import typer
from tinker.types import RequestErrorCategory

from fovea_conformance import matrix
from fovea_conformance.__main__ import load, select
from fovea_conformance.check import Check, Failed, NotApplicable, Refused, Status, may_refuse, user_error
from fovea_conformance.report import summary, write_html, write_json
from fovea_conformance.runner import run_check, run_checks
from fovea_conformance.target import Options, Target

OPTIONS = Options("http://127.0.0.1:9", "tml-x", "a<b")


def make(function: object, check_id: str = "C1", timeout_s: float = 5.0, **more: bool) -> Check:
    given = {"background": False, "needs_images": False} | more
    return Check(check_id, "says | so", "A", function, timeout_s, **given)  # type: ignore[arg-type]


def test_every_check_of_the_contract_is_there_once_and_in_its_section() -> None:
    found = load()
    assert [one.number for one in found] == list(range(1, 132))
    assert "".join(dict.fromkeys(one.section for one in found)) == "ABCDEFGHIJK"


def test_checks_are_selected_by_id_range_and_section() -> None:
    numbers = [one.number for one in select(load(), ["C3", "C20-C22, h"])]
    assert numbers == [3, 20, 21, 22, 117, 118, 119]
    assert len(select(load(), [])) == 131
    with pytest.raises(typer.BadParameter, match="D4"):
        select(load(), ["D4"])


def raising(error: Exception) -> Check:
    def function(target: Target) -> str:
        raise error

    return make(function)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Failed("was 3"), Status.FAILED),
        (Refused("by name"), Status.REFUSED),
        (NotApplicable("needs more"), Status.NOT_APPLICABLE),
        (ZeroDivisionError("division"), Status.FAILED),
    ],
)
def test_an_exception_is_a_verdict(error: Exception, status: Status) -> None:
    verdict = run_check(raising(error), OPTIONS)
    assert verdict.status is status
    assert str(error) in verdict.detail


def test_a_check_that_hangs_is_failed() -> None:
    def function(target: Target) -> str:
        time.sleep(30)
        return ""

    verdict = run_check(make(function, timeout_s=0.2), OPTIONS)
    assert verdict.status is Status.FAILED
    assert "hangs" in verdict.detail


def test_image_checks_need_an_image_model() -> None:
    verdict = run_check(make(lambda target: "", needs_images=True), OPTIONS)
    assert verdict.status is Status.NOT_APPLICABLE


def failure(category: RequestErrorCategory, message: str) -> tinker.RequestFailedError:
    return tinker.RequestFailedError(message, "r", category)


def test_user_errors_must_be_of_category_user_and_name_the_field() -> None:
    with user_error("seed"):
        raise failure(RequestErrorCategory.User, "Seed is wrong")
    with pytest.raises(Failed, match="does not name"), user_error("seed"):
        raise failure(RequestErrorCategory.User, "wrong")
    with pytest.raises(Failed, match="category"), user_error():
        raise failure(RequestErrorCategory.Server, "wrong")
    with pytest.raises(Failed, match="accepted"), user_error():
        pass


def test_only_a_refusal_by_name_is_a_refusal() -> None:
    with pytest.raises(Refused), may_refuse():
        raise failure(RequestErrorCategory.User, "dimuon is not supported")
    with pytest.raises(tinker.RequestFailedError), may_refuse():
        raise failure(RequestErrorCategory.Server, "dimuon is not supported")
    with pytest.raises(tinker.RequestFailedError), may_refuse():
        raise failure(RequestErrorCategory.User, "boom")


def test_verdicts_keep_the_order_of_the_checks_and_are_written_whole(tmp_path: Path) -> None:
    seen: list[str] = []
    checks = [
        make(lambda target: time.sleep(0.3) or "slow", "C1", background=True),
        make(lambda target: "<quick>", "C2"),
    ]
    verdicts = run_checks(checks, OPTIONS, lambda verdict: seen.append(verdict.check.check_id), lambda one: None)
    assert seen == ["C2", "C1"]
    assert [verdict.check.check_id for verdict in verdicts] == ["C1", "C2"]
    assert summary(verdicts) == "2 passed"
    write_json(verdicts, tmp_path / "deep" / "c.json")
    listed = json.loads((tmp_path / "deep" / "c.json").read_text())
    assert [(row["id"], row["status"], row["detail"]) for row in listed] == [
        ("C1", "passed", "slow"),
        ("C2", "passed", "<quick>"),
    ]
    write_html(verdicts, OPTIONS, tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert "&lt;quick&gt;" in page
    assert "a&lt;b" in page


def test_the_matrix_is_put_between_its_marks() -> None:
    row = {"id": "C1", "section": "A", "title": "says | so", "status": "refused", "detail": "not\nhere"}
    page = matrix.with_matrix(f"before\n{matrix.BEGIN}old\n{matrix.END}after\n", [row])
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "| C1 | says \\| so | refused: not here |" in page
    assert "old" not in page
    with pytest.raises(ValueError, match="lacks"):
        matrix.with_matrix("nothing", [row])


def test_the_page_shows_the_kept_verdicts() -> None:
    page = matrix.PAGE.read_text()
    assert matrix.with_matrix(page, json.loads(matrix.VERDICTS.read_text())) == page
