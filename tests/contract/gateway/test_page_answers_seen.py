"""Answers to held-out rows by label on the live page, in a real browser.

`FOVEA_PAGE_PICTURES=FOLDER` stores screenshots.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import Rest
from tests.e2e.browser import Browser, see, why_no_browser
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")
DIGITS: dict[str, Any] = {
    "labels": [str(digit) for digit in range(10)],
    "counts": [[40 if at == row else (3 * row + at) % 5 // 4 for at in range(10)] + [row // 8] for row in range(10)],
}
WIDE: dict[str, Any] = {
    "labels": [f"class {number}" for number in range(20)],
    "counts": [[3 * (at == row) for at in range(21)] for row in range(20)],
}
BIRDS: dict[str, Any] = {"labels": ["Black-footed Albatross", "<b>wren</b>"], "counts": [[5, 1, 0], [0, 12, 0]]}
CELLS = """
    const cells = (row) => [...row.cells].map((one) => one.textContent);
    return [...document.querySelectorAll("#answers tr")].map(cells);
"""
RIGHT = "return [...document.querySelectorAll('#answers .hit')].map((one) => [one.parentNode.rowIndex, one.cellIndex])"
REACHED = """
    const box = document.querySelector("#answers-matrix");
    box.focus();
    return [document.activeElement === box, box.scrollWidth > box.clientWidth];
"""
FIRST_COLUMN = "return document.querySelector('#answers tbody th').getBoundingClientRect().left"
RIGHT_ARROW = "\ue014"


async def test_answers_are_a_matrix_of_labels(tmp_path: Path, browser: Browser) -> None:
    async with running(Stand(tmp_path)) as stand, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model(user_metadata={"name": "digits"})

        async def report(step: int, answers: Any, model: str = model_id) -> None:
            await rest.result((await rest.forward_backward(model, 2 * step - 1)).json()["request_id"])
            await rest.result((await rest.optim_step(model, 2 * step))["request_id"])
            await rest.ok("live/reports", model_id=model, metrics={"accuracy": 0.5}, answers=answers)

        await see(browser.show, 1280, False)
        await see(browser.open, f"{stand.url}/")
        await see(browser.wait_text, "#run-head", "digits")
        assert await see(browser.run, "return document.querySelector('#answers').hidden")

        await report(1, DIGITS)
        await see(browser.wait_text, "#answers-said", f"400 of {sum(map(sum, DIGITS['counts']))} rows right at step 1")
        cells = await see(browser.run, CELLS)
        assert cells[0][1:] == [*DIGITS["labels"], "other", "rows"]
        assert [row[1:-1] for row in cells[1:]] == [[str(count) for count in row] for row in DIGITS["counts"]]
        assert await see(browser.run, RIGHT) == [[at, at] for at in range(1, 11)]
        if PICTURES:
            await see(browser.pictures, Path(PICTURES), "answers", 2200)

        # On a phone the page is no wider than the screen: the matrix scrolls inside its box, also by keys.
        await see(browser.show, 390, True)
        await report(2, WIDE)
        await see(browser.wait_text, "#answers-said", "60 of 60 rows right at step 2")

        async def fits() -> bool:
            return await see(browser.too_wide, ".scroll, .models, svg") == []  # type: ignore[no-any-return]

        await eventually(fits, 60)  # Charts follow the width with a delay.
        assert await see(browser.run, REACHED) == [True, True]
        before = await see(browser.run, FIRST_COLUMN)
        await see(browser.press, RIGHT_ARROW)
        await see(browser.wait, "return document.querySelector('#answers-matrix').scrollLeft > 0")
        assert abs(await see(browser.run, FIRST_COLUMN) - before) < 2, "the labels must stay visible"

        # The next evaluation replaces it. Class names are never parsed as HTML.
        await report(3, BIRDS)
        await see(browser.wait_text, "#answers-said", "17 of 18 rows right at step 3")
        assert (await see(browser.run, CELLS))[1:] == [
            ["Black-footed Albatross", "5", "1", "6"],
            ["<b>wren</b>", "0", "12", "12"],
        ]
        assert await see(browser.run, "return document.querySelector('#answers .miss').title") == (
            "“Black-footed Albatross” answered “<b>wren</b>”: 1 of 6 rows"
        )
        assert await see(browser.run, "return document.activeElement.id") == "answers-matrix"
        if PICTURES:
            await see(browser.pictures, Path(PICTURES), "answers-names", 2200)

        # A run without such answers shows no matrix.
        other = await rest.create_model(1, user_metadata={"name": "fish"})
        await see(browser.wait_text, "#models", "fish")
        await see(browser.run, f"location.hash = 'run={other}'")
        await see(browser.wait, "return document.querySelector('#answers').hidden")
        assert await see(browser.complaints) == []
