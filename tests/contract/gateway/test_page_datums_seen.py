"""The datums with the largest loss on the live page, in a real browser.

`FOVEA_PAGE_PICTURES=FOLDER` stores screenshots.
"""

import os
from pathlib import Path

import pytest

from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import HARD
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_page_datums import example, learn
from tests.contract.gateway.test_page_samples import write_tokenizer
from tests.contract.gateway.test_page_samples_seen import ESCAPE, png
from tests.e2e.browser import Browser, see, why_no_browser
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")
HAS = """
    // Rows are fetched while they can be seen, and what comes above them moves them.
    document.querySelector("#datums").scrollIntoView();
    const text = document.querySelector("#datums").innerText;
    return arguments[0].every((one) => text.includes(one));
"""
FIRST = "return document.querySelector('#datums .group')?.innerText.includes(arguments[0])"


async def test_the_largest_losses_are_shown_with_their_pictures(tmp_path: Path, browser: Browser) -> None:
    write_tokenizer(tmp_path)
    async with running(Stand(tmp_path), tokenizer=str(tmp_path)) as stand, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model(user_metadata={"name": "birds"})
        await see(browser.show, 1280, False)
        await see(browser.open, f"{stand.url}/")
        await see(browser.wait_text, "#run-head", "birds")
        assert await see(browser.run, "return document.querySelector('#datums').hidden")

        pictures = [example([701 + number], [10 + number, 20], png(number)) for number in range(3)]
        await learn(rest, model_id, 1, [*pictures, example([799], [HARD + 1, 30], png(4)), example([5, 6], [7])])
        await see(browser.wait, HAS, ["loss 2.5", "w799", f"w{HARD + 1}", "step 1", "w701"])
        assert await see(browser.run, FIRST, "w799"), "the largest loss must be first"
        heat = "return getComputedStyle(document.querySelector('#datums .token')).getPropertyValue('--a')"
        assert await see(browser.run, heat) == "0.8"
        if PICTURES:
            await see(browser.pictures, Path(PICTURES), "datums", 2600)
            await see(browser.show, 1280, False)

        # A picture fills the window until Escape; then the focus returns to it.
        await see(browser.wait, "return [...document.querySelectorAll('#datums img')].some((one) => one.naturalWidth)")
        await see(browser.click, "#datums .picture")
        await see(browser.wait, "return document.querySelector('#viewer').open")
        await see(browser.press, ESCAPE)
        await see(browser.wait, "return !document.querySelector('#viewer').open")
        assert await see(browser.run, "return document.activeElement.closest('section').id") == "datums"

        # The next step replaces the list; older steps can be selected. The focus stays.
        await learn(rest, model_id, 3, [example([702], [HARD + 2], png(1)), example([5, 6], [7])])
        await see(browser.wait, HAS, ["step 2", "w702"])
        assert "w799" not in await see(browser.text, "#datums")
        choose = (
            "const one = document.querySelector('#datums-steps');"
            "one.focus(); one.value = '8'; one.dispatchEvent(new Event('change'))"
        )
        await see(browser.run, choose)
        await see(browser.wait, HAS, ["step 1", "step 2", "w799"])
        assert await see(browser.run, FIRST, "w799")
        assert await see(browser.run, "return document.activeElement.id") == "datums-steps"
        await see(browser.show, 390, True)

        async def fits() -> bool:
            return await see(browser.too_wide, ".scroll, .models, svg, .tokens") == []  # type: ignore[no-any-return]

        await eventually(fits, 60)  # Charts follow the width with a delay.

        # A run without such datums shows no list.
        other = await rest.create_model(1, user_metadata={"name": "fish"})
        await see(browser.wait_text, "#models", "fish")
        await see(browser.run, f"location.hash = 'run={other}'")
        await see(browser.wait, "return document.querySelector('#datums').hidden")
        assert await see(browser.complaints) == []
