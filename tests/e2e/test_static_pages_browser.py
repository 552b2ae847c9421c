"""Static pages in a real browser: the demo's report, the viewer of rollouts, the conformance suite's verdicts.

Each is read at phone width and in dark mode; it loads nothing and logs no errors. No Fovea runs.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea_conformance.check import Check, Status
from fovea_conformance.report import write_html
from fovea_conformance.runner import Verdict
from fovea_conformance.target import Options
from fovea_demo.digits import load_scans
from fovea_demo.job import History
from fovea_demo.report import write_report
from tests.e2e.browser import Browser, running_browser, why_no_browser
from tests.unit.fovea_rollout.test_viewer import write as write_rollouts

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

VERDICTS = Path(__file__).parents[2] / "docs" / "reference" / "conformance.json"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


def read_everywhere(browser: Browser, page: Path, texts: str) -> None:
    """Opens a page; checks at phone width that nothing is cut off, and that texts have contrast in light and dark."""
    browser.open(page.as_uri())
    browser.read_everywhere(texts)
    colour = "return getComputedStyle(document.body).backgroundColor"
    browser.show(390, dark=True)
    dark_ground = browser.run(colour)
    browser.show(1280, dark=False)
    assert browser.run(colour) != dark_ground
    assert (
        browser.run("return performance.getEntriesByType('resource').filter((one) => !/^data:/.test(one.name)).length")
        == 0
    )
    assert browser.complaints() == []


def test_the_demos_report_shows_the_right_digit_beside_a_wrong_one(browser: Browser, tmp_path: Path) -> None:
    held_out = load_scans()[1][:80]
    right = [str(scan.digit) for scan in held_out]
    said = ["<b>", "", *right[2:]]
    history = History([2.0, 1.0, 0.1], [(0, 0.1), (2, 0.5), (3, 0.975)], said, ["fu"] * 80)
    figures = {"accuracy_before": 0.0, "accuracy_after": 0.975, "ready_s": 30.0, "total_s": 120.0}
    write_report(tmp_path / "report.html", history, held_out, figures)
    read_everywhere(browser, tmp_path / "report.html", "h1, h2, p, b, span")
    wrong = browser.run("return [...document.querySelectorAll('.wrong')].map((one) => one.innerText.trim())")
    assert wrong == [f"<b> is {right[0]} fu", f"∅ is {right[1]} fu"]
    assert browser.run("return document.querySelectorAll('.scan').length") == 60
    assert browser.run("return [...document.images].every((one) => one.naturalWidth > 0)")
    drawn = "return [...document.querySelectorAll('.path')].map((one) => one.getAttribute('d').split('L').length)"
    assert browser.run(drawn) == [3, 3]


def test_the_viewer_shows_turns_and_tokens_and_moves_by_keys(browser: Browser, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "run.html")
    read_everywhere(browser, tmp_path / "run.html", "h1, h2, h3, #count, .what, .facts span, .role, .legend > span")
    browser.click("#list li", "")
    assert browser.run("return document.querySelectorAll('.card.turn .token').length") == 5
    browser.click("button", "tokens")
    assert browser.run("return [...document.querySelectorAll('.stream img')].every((one) => one.naturalWidth > 0)")
    assert browser.run("return location.hash") == "#0/tokens"
    browser.run("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown' }))")
    browser.wait_text("#shown", "failed at reset", "no <display>")
    assert browser.complaints() == []


def test_the_verdicts_of_the_conformance_suite_are_read_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    rows = json.loads(VERDICTS.read_text())
    verdicts = [
        Verdict(
            Check(row["id"], row["title"], row["section"], lambda _: "", 1.0, False, False),
            Status(row["status"]), row["detail"], row["seconds"],
        )
        for row in rows
    ]  # fmt: skip
    write_html(verdicts, Options("http://127.0.0.1:8000", "tml-local", "tiny"), tmp_path / "conformance.html")
    read_everywhere(browser, tmp_path / "conformance.html", "h1, p, td")
    assert browser.run("return document.querySelectorAll('td:first-child').length") == len(rows)
