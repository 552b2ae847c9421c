"""The live page in a real browser, with fake services: names, held-out figures, a resumed run, groups of the queue,
keyboard focus and a lost gateway.

`FOVEA_PAGE_PICTURES=FOLDER` stores screenshots.
"""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from fovea_gateway.database.schema import models
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest
from tests.e2e.browser import Browser, see, why_no_browser

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")
_FOCUS = "return [document.activeElement.tagName, document.activeElement.title || document.activeElement.textContent]"
_RING = (
    "const one = document.activeElement, {outlineStyle, outlineWidth} = getComputedStyle(one);"
    "return [one.tagName, `${outlineStyle} ${outlineWidth}`]"
)
_TAB = "\ue004"
_SHOWN = (
    "return [...document.querySelectorAll('#models li:not([hidden]) .name')].map((one) => one.textContent)"
    ".filter((name) => name === 'birds')"
)
_TITLES = (
    "return [...document.querySelectorAll('#run .curve figcaption span:first-child')].map((one) => one.textContent)"
)

_CUT = (
    "return [...document.querySelectorAll('#models :is(.name, .what)')]"
    ".filter((one) => one.scrollHeight > one.clientHeight + 1 || one.scrollWidth > one.clientWidth + 1)"
    ".map((one) => one.textContent)"
)
_BELOW = (
    "return [...document.querySelectorAll('.pair > *')].map((one) => Math.round("
    "one.parentElement.getBoundingClientRect().bottom - one.lastElementChild.getBoundingClientRect().bottom))"
)
_MANY = 70
"""Runs: more than a frame moves in the list."""
_IN_ORDER = "return [...document.querySelectorAll('#models li')].map((one) => one.model).join() === arguments[0].join()"


async def _step(rest: Rest, model_id: str, number: int) -> None:
    await rest.result((await rest.forward_backward(model_id, 2 * number - 1)).json()["request_id"])
    await rest.result((await rest.optim_step(model_id, 2 * number, learning_rate=1e-3 / number))["request_id"])


async def _resumed(rest: Rest, number: int, path: str, **options: dict[str, str]) -> str:
    """Creates a model that continues from a checkpoint. Returns its id."""
    model_id = await rest.create_model(number, **options)
    loaded = await rest.ok("load_weights", model_id=model_id, seq_id=1, path=path, optimizer=True)
    await rest.result(loaded["request_id"])
    return model_id


async def _run(rest: Rest) -> tuple[str, str, str]:
    """Trains a named run with held-out figures and resumes it. Returns the ids of both models and the checkpoint."""
    first = await rest.create_model(user_metadata={"name": "birds"})
    for number in range(1, 9):
        await _step(rest, first, number)
        await rest.ok("live/reports", model_id=first, metrics={"held_out_loss": 2.0 / number, "accuracy": number / 9})
    saved = await rest.ok("save_weights", model_id=first, seq_id=17, path="kept")
    path = str((await rest.result(saved["request_id"]))["path"])
    resumed = await _resumed(rest, 1, path, user_metadata={"name": "birds"})
    for number in range(2, 5):
        backward = await rest.forward_backward(resumed, 2 * number - 2)
        await rest.result(backward.json()["request_id"])
        step = await rest.optim_step(resumed, 2 * number - 1, learning_rate=1e-4)
        await rest.result(step["request_id"])
    return first, resumed, path


async def test_the_form_that_asks_for_a_key_can_be_read_and_used_without_a_mouse(
    tmp_path: Path, browser: Browser
) -> None:
    def look() -> None:
        browser.show(1280, dark=False)
        browser.open(f"{stand.url}/")
        browser.wait_text("#link", "live")
        browser.click("#forget")
        browser.wait_text("#ask", "Your API key")
        browser.read_everywhere("#ask :is(h2, p, label, input, button, code), #link")
        if PICTURES:
            browser.pictures(Path(PICTURES), "key")
        assert browser.run(_RING) == ["INPUT", "solid 2px"]
        browser.press(_TAB)
        assert browser.run(_RING) == ["BUTTON", "solid 2px"]

    async with running(Stand(tmp_path)) as stand:
        await see(look)


async def test_a_run_that_a_late_name_makes_a_part_of_another_gives_up_its_entry(
    tmp_path: Path, browser: Browser
) -> None:
    def open_page() -> None:
        browser.show(1280, dark=False)
        browser.open(f"{stand.url}/")
        browser.wait_text("#models-count", "2 in training, 2 shown")

    async with running(Stand(tmp_path)) as stand, stand.http() as http:
        rest = Rest(http)
        first = await rest.create_model()
        await _step(rest, first, 1)
        saved = await rest.ok("save_weights", model_id=first, seq_id=3, path="kept")
        path = str((await rest.result(saved["request_id"]))["path"])
        resumed = await _resumed(rest, 1, path)
        await see(open_page)
        chosen = await see(browser.text, "#models [aria-current=true]")
        for model_id in (first, resumed):
            (await http.put(f"live/runs/{model_id}", json={"name": "birds"})).raise_for_status()
        await see(browser.wait_text, "#models-count", "2 in training, 1 shown")
        assert await see(browser.run, _SHOWN) == ["birds"]
        assert "step 1" in await see(browser.text, "#models [aria-current=true]"), chosen


async def test_the_page_shows_names_held_out_figures_and_a_resumed_run(tmp_path: Path, browser: Browser) -> None:
    def open_page() -> None:
        browser.show(1280, dark=False)
        browser.open(f"{stand.url}/")
        browser.wait_text("#link", "live")

    async with running(Stand(tmp_path)) as stand, stand.http() as http:
        rest = Rest(http)
        _, resumed, path = await _run(rest)
        nameless = await rest.create_model(2)
        await _resumed(rest, 3, path, user_metadata={"name": "birds"})
        await see(open_page)
        await see(browser.wait_text, "#models", "birds", "step 11", "resumed at 8")
        assert f"{MODEL.rpartition('/')[2]}, " in await see(
            browser.text, f"#models button[title='{nameless}'] .name"
        ), "its base model"
        await see(browser.wait_text, "#models-count", "4 in training, 2 shown")
        assert await see(browser.run, _SHOWN) == ["birds"], "one entry, not one for each part"
        assert await see(browser.text, "#caller") == "tml-local · train"

        await see(browser.click, f"#models button[title='{resumed}']")
        await see(browser.wait_text, "#run", "birds", "resumed at step 8 of birds", "11\nsteps")
        await see(browser.wait, "return document.querySelectorAll('#run .curve[data-held-out=\"1\"]').length === 1")
        await see(browser.wait, "return document.querySelectorAll('#run .curve[data-resumed=\"8\"]').length >= 3")
        assert await see(browser.run, _TITLES) == ["Loss, sum of the step", "Held-out accuracy", "Learning rate"]
        # A loop has several optimizer steps in one of its own; a fine-tuning names the checkpoint that it keeps.
        await rest.ok("live/reports", model_id=resumed, metrics={"loop_step": 3, "kept_step": 11})
        for number, name in enumerate(("step-10", "step-11")):
            kept = {"model_id": resumed, "seq_id": 8 + number, "path": name}
            await rest.result((await rest.ok("save_weights_for_sampler", **kept))["request_id"])
        await see(browser.wait_text, "#run", "3\nsteps of the loop", "11\noptimizer steps")
        await see(browser.wait_text, f"#models button[title='{resumed}']", "step 11 · loop 3")
        await see(browser.wait_text, "#checkpoints", "step-10", "step-11")
        best = "return [...document.querySelectorAll('#checkpoints .best')].map((one) => one.parentElement.innerText)"
        (marked,) = await see(browser.run, best)
        assert marked.startswith("step-11best")
        hover = (
            "const over = document.querySelector('#run .u-over'), box = over.getBoundingClientRect();"
            "const at = {bubbles: true, clientX: box.right - 1, clientY: box.top + 9};"
            "over.dispatchEvent(new PointerEvent('pointermove', at));"
            "return document.querySelector('#tip').innerText.includes(\"step 11, loop's step 3\")"
        )
        await see(browser.wait, hover)
        leave = "document.querySelector('#run .u-over').dispatchEvent(new PointerEvent('pointerleave'))"
        await see(browser.run, leave)
        assert await see(browser.run, _TITLES) == ["Loss, sum of the step", "Held-out accuracy", "Learning rate"]
        assert await see(browser.run, _CUT) == [], "names of runs that differ at their ends"
        assert await see(browser.run, _BELOW) == [0, 0], "a hole below a short section beside a tall one"
        if PICTURES:
            await see(browser.pictures, Path(PICTURES), "contract", 2400)
        await see(browser.show, 390, True)
        assert await see(browser.too_wide, ".scroll, .models") == []
        await see(browser.show, 1280, False)

        # The focus stays while the model's figures and its position in the list change.
        focused = f"document.querySelector(\"#models button[title='{nameless}']\").focus();"
        await see(browser.run, focused)
        assert await see(browser.run, _FOCUS) == ["BUTTON", nameless]
        await rest.ok("live/reports", model_id=nameless, metrics={"reward": 0.5})
        await see(browser.wait_text, f"#models button[title='{nameless}']", "reward", "0.5")
        assert await see(browser.run, _FOCUS) == ["BUTTON", nameless]
        await see(browser.click, f"[data-path='{path}'] button", "Delete")
        assert await see(browser.run, _FOCUS) == ["BUTTON", "Keep"]
        await rest.result((await rest.ok("save_weights", model_id=nameless, seq_id=1, path="more"))["request_id"])
        await see(browser.wait_text, "#checkpoints", "more", "Delete for good")
        assert await see(browser.run, _FOCUS) == ["BUTTON", "Keep"]

        # Requests of one kind and model share one row of the queue.
        stand.trainer.open.clear()
        for number in range(2, 22):
            await rest.forward_backward(nameless, number)
        await see(browser.wait_text, "#queue", "× forward backward")
        await see(browser.wait_text, "#queue-count", "20 unfinished")
        assert await see(browser.run, "return document.querySelectorAll('#queue tbody tr').length") <= 2
        stand.trainer.open.set()
        await see(browser.wait_text, "#queue", "Nothing waits")

        green = "return [...document.querySelectorAll('.dot')].map((one) => getComputedStyle(one).backgroundColor)"
        before = set(await see(browser.run, green))
        await stand.stop()
        await see(browser.wait_text, "#link", "the gateway does not answer", "data of", "ago")
        (dead,) = set(await see(browser.run, green))
        assert dead not in before, "all dots must be red"
        assert await see(browser.text, "#run .state") == "unknown"
        if PICTURES:
            await see(browser.pictures, Path(PICTURES), "contract-dead", 1500)
        await see(browser.show, 1280, False)
        await stand.start()
        await see(browser.wait_text, "#link", "live")
        await see(browser.wait_text, "#run .state", "ready")


def _use(model_ids: list[str], connection: sa.Connection) -> None:
    for number, model_id in enumerate(model_ids):
        used = sa.update(models).where(models.c.model_id == model_id)
        connection.execute(used.values(last_request_at=time.time() + number))


async def test_a_long_list_that_turns_round_is_in_order_and_keeps_the_focus(tmp_path: Path, browser: Browser) -> None:
    async with running(Stand(tmp_path)) as stand, stand.http() as http:
        assert stand.gateway is not None
        rest, database = Rest(http), stand.gateway.components.database
        model_ids = [await rest.create_model(number) for number in range(_MANY)]
        await database.write(partial(_use, model_ids))
        await see(browser.open, f"{stand.url}/")
        await see(browser.wait, _IN_ORDER, list(reversed(model_ids)))
        await see(browser.click, f"#models button[title='{model_ids[-1]}']")
        await database.write(partial(_use, list(reversed(model_ids))))
        await see(browser.wait, _IN_ORDER, model_ids)
        assert await see(browser.run, _FOCUS) == ["BUTTON", model_ids[-1]]
        # A press selects the run that was there, also if the list turns round before the release.
        button = "document.querySelector(\"#models button[title='%s']\")"
        press = "window.pressed = %s; window.pressed.dispatchEvent(new PointerEvent('pointerdown', {bubbles: true}))"
        await see(browser.run, press % (button % model_ids[1]))
        await database.write(partial(_use, model_ids))
        await see(browser.wait, _IN_ORDER, list(reversed(model_ids)))
        await see(browser.run, "window.pressed.dispatchEvent(new MouseEvent('click', {bubbles: true, detail: 1}))")
        await see(browser.wait, f"return decodeURIComponent(location.hash).includes('{model_ids[1]}')")
        # The focus leaves the list with its run.
        await see(browser.run, (button % model_ids[-1]) + ".focus()")
        assert await see(browser.run, _FOCUS) == ["BUTTON", model_ids[-1]]
        search = "const box = document.querySelector('#search'); box.value = 'no such run';"
        await see(browser.run, search + "box.dispatchEvent(new Event('input'))")
        await see(browser.wait, "return document.activeElement === document.body")
