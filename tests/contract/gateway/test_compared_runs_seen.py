"""Comparison of several runs on the live page in a real browser: selection, smoothing, scale, zoom, values under the
pointer, export, links, labels, search and keyboard focus.

`FOVEA_PAGE_PICTURES=FOLDER` stores screenshots.
"""

import csv
import hashlib
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fovea_gateway.access.api_keys import Scope
from fovea_gateway.live import live_routes
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import Rest
from tests.e2e.browser import Browser, see, why_no_browser
from tests.waiting import eventually

seen_in_a_browser = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")
STEPS = 2000
_HASHES = {
    "uPlot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""The files `uPlot.iife.min.js` and `uPlot.min.css` of https://registry.npmjs.org/uplot/-/uplot-1.6.32.tgz."""
_CHART = "document.querySelector('.curve[data-metric=\"loss_per_token\"]')"
_PLACE = f"""
    const box = {_CHART}.querySelector('.u-over').getBoundingClientRect();
    return [box.left, box.top, box.width, box.height];
"""
_COLOURS = f"""
    const canvas = {_CHART}.querySelector('canvas');
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, found = new Set();
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) found.add(data.slice(at, at + 3).join());
    return [...found];
"""


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with running(Stand(tmp_path)) as stand:
        yield stand


async def _runs(stand: Stand, rest: Rest) -> list[str]:
    """Creates three runs with curves of STEPS steps and a held-out loss."""
    assert stand.gateway is not None
    model_ids = []
    for number, name in enumerate(["birds", "birds, half the rate", "flowers"]):
        model_id = await rest.create_model(number, user_metadata={"name": name})
        curves = await stand.gateway.components.live_state.curves(model_id)
        for step in range(1, STEPS + 1):
            loss = (1 + 0.3 * number) * math.exp(-step / 500) + 0.05 * math.sin(step) + 0.1
            metrics = {"loss_per_token": loss, "reward": 1 - math.exp(-step / 900), "learning_rate": 1e-4}
            if step % 100 == 0:
                metrics |= {"held_out_loss": loss + 0.2}
            curves.add(step, metrics)
        model_ids.append(model_id)
    return model_ids


def _data(browser: Browser, name: str) -> str:
    return str(browser.run(f"return {_CHART}?.dataset[arguments[0]] ?? ''", name))


def _until(browser: Browser, name: str, value: str) -> None:
    browser.wait(f"return {_CHART}?.dataset[arguments[0]] === arguments[1]", name, value)


def _mouse(browser: Browser, kind: str, x: float, y: float, buttons: int = 0) -> None:
    button = "left" if kind != "mouseMoved" else "none"
    browser.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1)


def _place(browser: Browser) -> list[float]:
    """Scrolls to the first chart. Returns its left, top, width and height once the layout is stable."""
    before: list[float] = []
    while (place := browser.run(f"{_CHART}.scrollIntoView({{block: 'center'}}); {_PLACE}")) != before:
        before = place
        browser.run("return new Promise((done) => setTimeout(() => done(true), 300))")
    return [float(value) for value in place]


def _drag(browser: Browser, begin: float, end: float) -> None:
    """Drags across the first chart between two fractions of its width."""
    left, top, width, height = _place(browser)
    y = top + height / 2
    _mouse(browser, "mouseMoved", left + begin * width, y)
    _mouse(browser, "mousePressed", left + begin * width, y, 1)
    for share in (0.5, 1.0):
        _mouse(browser, "mouseMoved", left + (begin + share * (end - begin)) * width, y, 1)
    _mouse(browser, "mouseReleased", left + end * width, y)


def _hover(browser: Browser, share: float) -> None:
    left, top, width, height = _place(browser)
    _mouse(browser, "mouseMoved", left + share * width - 3, top + height / 2)
    _mouse(browser, "mouseMoved", left + share * width, top + height / 2)


def _open(browser: Browser, url: str) -> None:
    browser.show(1280, dark=False)
    browser.open("about:blank")
    browser.open(url)
    browser.wait_text("#link", "live")


def _forget(browser: Browser) -> None:
    """Leaves the page of an earlier test and discards its errors."""
    browser.open("about:blank")
    browser.complaints()


def test_the_chart_library_is_the_one_that_was_released() -> None:
    kept = {name: hashlib.sha256(data).hexdigest() for name, (data, _) in live_routes.page_files().items()}
    assert {name: kept[name] for name in _HASHES} == _HASHES
    licence = Path(live_routes.__file__).parent / "page" / "uPlot.LICENSE"
    assert "The MIT License" in licence.read_text()


@seen_in_a_browser
async def test_runs_are_compared_zoomed_exported_and_shared(stand: Stand, browser: Browser, tmp_path: Path) -> None:
    async with stand.http() as http:
        await see(_forget, browser)
        first, second, third = await _runs(stand, Rest(http))
        await see(_open, browser, f"{stand.url}/#{first}")
        await see(_until, browser, "runs", "1")
        assert await see(_data, browser, "heldOut") == "1"
        assert 100 < int(await see(_data, browser, "points")) <= 300, "thinned by the server"
        one_run = len(await see(browser.run, _COLOURS))

        for other in (second, third):
            await see(browser.click, f"#models li:has(button[title='{other}']) input")
        await see(_until, browser, "runs", "3")
        assert await see(_data, browser, "heldOut") == "3"
        await see(browser.wait_text, "#charts .chips", "birds, half the rate", "flowers")
        assert len(await see(browser.run, _COLOURS)) > one_run, "each run needs its own colour"

        await see(_hover, browser, 0.5)
        await see(browser.wait_text, "#tip", "step 1,0", "birds, half the rate", "flowers, held out", "0.")

        await see(_drag, browser, 0.25, 0.5)
        await see(browser.wait, "return location.hash.includes('zoom=')")
        low, high = (int(part) for part in (await see(_data, browser, "span")).split("-"))
        assert 450 < low < 550 < 950 < high < 1050
        # The page fetches again and gets more points of these steps.
        await see(browser.wait, f"return {_CHART}.dataset.points > 200")
        field = "const f = document.querySelector('#smooth'); f.value = 0.9; f.dispatchEvent(new Event('input'))"
        await see(browser.run, field)
        await see(browser.click, "#log")
        await see(_until, browser, "scale", "log")

        folder = tmp_path / "saved"
        folder.mkdir()
        await see(lambda: browser.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder)))
        for kind in ("CSV", "PNG"):
            await see(browser.click, f".curve[data-metric='loss_per_token'] .export button[title$='{kind}']")
        table, picture = folder / "loss_per_token.csv", folder / "loss_per_token.png"
        await eventually(lambda: table.exists() and picture.exists())
        rows = list(csv.DictReader(table.read_text().splitlines()))
        assert {row["run_id"] for row in rows} == {first, second, third}
        assert {row["metric"] for row in rows} == {"loss_per_token", "held_out_loss"}
        assert all(low <= float(row["step"]) <= high for row in rows)
        assert {"birds", "birds, half the rate", "flowers"} == {row["run"] for row in rows}
        with Image.open(picture) as image:
            assert image.width > 300
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10

        # The link shows the same state in another window.
        link = await see(browser.run, "return location.href")
        told = [await see(_data, browser, name) for name in ("runs", "span", "scale", "heldOut")]
        await see(_open, browser, link)
        await see(_until, browser, "runs", "3")
        assert [await see(_data, browser, name) for name in ("runs", "span", "scale", "heldOut")] == told
        assert await see(browser.run, "return document.querySelector('#smooth').value") == "0.9"
        if PICTURES:
            await see(browser.pictures, Path(PICTURES), "compared", 1500)
        await see(browser.show, 390, True)
        assert await see(browser.too_wide, ".scroll, .models") == []
        await see(browser.show, 1280, False)

        await see(browser.click, "#whole")
        await see(_until, browser, "span", f"1-{STEPS}")
        await see(browser.click, f"#charts .chips button[data-run='{third}']")
        await see(_until, browser, "runs", "2")
        assert third not in await see(browser.run, "return location.hash")
        assert await see(browser.complaints) == []


@seen_in_a_browser
async def test_runs_get_names_notes_and_tags_and_are_found_by_them(stand: Stand, browser: Browser) -> None:
    hostile = "<img src=x onerror=window.hacked=1>"
    async with stand.http() as http:
        await see(_forget, browser)
        first, _, third = await _runs(stand, Rest(http))
        await see(_open, browser, f"{stand.url}/#{third}")
        await see(browser.click, "#label button", "Add name, tags and notes")
        await see(browser.run, f"document.querySelector('#label-notes').value = {hostile!r}")
        await see(browser.run, "document.querySelector('#label-tags').value = 'kept paper-2'")
        await see(browser.run, "document.querySelector('#label-name').focus()")
        # New steps redraw the page without closing the form or moving the focus.
        await http.post("live/reports", json={"model_id": third, "metrics": {"kl": 0.125}})
        await see(browser.wait_text, "#run .figures", "0.125")
        assert await see(browser.run, "return document.activeElement.id") == "label-name"
        await see(browser.type, "#label-name", "orchids")
        await see(browser.wait_text, "#run-head h2", "orchids")
        await see(browser.wait_text, "#label", "paper-2", hostile)
        await see(browser.wait_text, f"#models button[title='{third}'] .name", "orchids")

        await see(browser.click, "#label .tag", "paper-2")
        await see(browser.wait_text, "#models-count", "1 of 3 found")
        shown = "return [...document.querySelectorAll('#models li')].filter((one) => one.checkVisibility()).length"
        assert await see(browser.run, shown) == 1
        assert "search=%23paper-2" in await see(browser.run, "return location.hash")
        await see(_open, browser, f"{stand.url}/#run={first}&search=onerror")
        await see(browser.wait_text, "#models-count", "1 of 3 found")
        await see(browser.wait_text, "#run-head h2", "birds")
        assert await see(browser.run, "return window.hacked ?? null") is None
        await see(_open, browser, f"{stand.url}/#search=nothing+like+it")
        await see(browser.wait_text, "#models-none", "No run matches.")
        assert await see(browser.complaints) == []


async def test_a_label_outlives_the_gateway_and_replaces_an_earlier_one(stand: Stand) -> None:
    async with stand.http() as http:
        model_id = await Rest(http).create_model()
        for name, tags in (("a", ["x"]), (" b ", ["y", "y"])):
            answer = await http.put(f"live/runs/{model_id}", json={"name": name, "notes": "n\nn", "tags": tags})
        assert answer.json() == {"model_id": model_id, "name": "b", "notes": "n\nn", "tags": ["y"]}
        await stand.stop()
        await stand.start()
        assert stand.gateway is not None
        sections = await stand.gateway.components.live_view.sections(None)
        assert sections["labels"] == {"labels": {model_id: {"name": "b", "notes": "n\nn", "tags": ["y"]}}}
        (await http.put(f"live/runs/{model_id}", json={})).raise_for_status()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"name": "x" * 121}, "name"),
        ({"name": "two\nlines"}, "name"),
        ({"notes": "x" * 2001}, "notes"),
        ({"notes": "\0"}, "notes"),
        ({"tags": ["two words"]}, "tags"),
        ({"tags": [""]}, "tags"),
        ({"tags": [str(number) for number in range(17)]}, "tags"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_a_wrong_label_is_refused_and_names_its_field(stand: Stand, wrong: dict[str, Any], field: str) -> None:
    async with stand.http() as http:
        model_id = await Rest(http).create_model()
        answer = await http.put(f"live/runs/{model_id}", json=wrong)
        assert answer.status_code == 400
        assert field in answer.json()["detail"]


async def test_an_administrator_sees_labels_of_all_and_sets_only_its_own(stand: Stand) -> None:
    assert stand.gateway is not None
    admin, _ = await stand.gateway.components.keys.create("root", "", Scope.ADMIN, None)
    async with stand.http() as http, stand.http(admin) as root:
        model_id = await Rest(http).create_model()
        (await http.put(f"live/runs/{model_id}", json={"name": "mine"})).raise_for_status()
        assert (await root.put(f"live/runs/{model_id}", json={"name": "yours"})).status_code == 404
        assert (await root.get("audit", params={"event": "run_label_set"})).status_code == 200
    view = stand.gateway.components.live_view
    assert (await view.sections(None))["labels"]["labels"][model_id]["name"] == "mine"
    assert (await view.sections("root"))["labels"] == {"labels": {}}


async def test_curves_are_limited_to_names_and_steps(stand: Stand) -> None:
    async with stand.http() as http:
        model_id, *_ = await _runs(stand, Rest(http))
        params: dict[str, Any] = {"name": ["reward"], "first": 1000, "last": 1099, "points": 300}
        found = (await http.get(f"live/curves/{model_id}", params=params)).json()["curves"]
        assert list(found) == ["reward"]
        steps = found["reward"]["step"]
        assert 49 <= len(steps) <= 52, "a bucket has two of 2,000 steps"
        assert 998 <= steps[0] < steps[-1] <= 1101
        none = (await http.get(f"live/curves/{model_id}", params={"first": 5000})).json()["curves"]["reward"]
        assert none == {"step": [], "mean": []}
