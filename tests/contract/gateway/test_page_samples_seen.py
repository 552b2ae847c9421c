"""Samples on the live page in a real browser: search, full-window pictures and the trainer's values.

`FOVEA_PAGE_PICTURES=FOLDER` stores screenshots.
"""

import base64
import io
import os
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw
from tinker import types

from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_page_samples import datum, groups_of, step, write_tokenizer
from tests.e2e.browser import Browser, see, why_no_browser
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")
ESCAPE = "\ue00c"


def png(number: int) -> bytes:
    """Returns a picture of a disc, different for each number."""
    picture = Image.new("RGB", (48, 36), (235, 240, 248))
    ImageDraw.Draw(picture).ellipse((6 + 4 * number, 6, 26 + 4 * number, 26), fill=(40 * number, 110, 200))
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


async def _play(rest: Rest, steps: int) -> str:
    """Trains with two prompts of two samples per step, all with rewards."""
    chance = random.Random(0)
    model_id = await rest.create_model(user_metadata={"name": "birds"})
    seq_id = 1
    for number in range(1, steps + 1):
        sampling_id = await rest.snapshot(model_id, seq_id, number)
        judged, data = [], []
        for place in (0, 1):
            picture, tokens = png(number % 5 + place), [700 + number, 800 + place]
            image = {"type": "image", "data": base64.b64encode(picture).decode(), "format": "png", "expected_tokens": 4}
            prompt = {"chunks": [image, {"type": "encoded_text", "tokens": tokens}]}
            sample = (await rest.sample(sampling_id, place, prompt=prompt, num_samples=2)).json()["request_id"]
            for index, sequence in enumerate((await rest.result(sample))["sequences"]):
                chunks = [types.ImageChunk(data=picture, format="png", expected_tokens=4)]
                given = types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=tokens)])
                data.append(datum(sequence["tokens"], given))
                reward = float(chance.random() < 0.2 + 0.6 * number / steps) + 0.2 * index
                told = {"sequence_id": f"{sample}:{index}", "reward": reward, "truth": f"bird {place}"}
                judged.append(told | {"held_out": place == 0})

        async def is_kept(at: int = number - 1) -> bool:
            groups = await groups_of(rest.http, model_id, step=at)
            return sum(len(group["drawn"]) for group in groups) == 4

        await eventually(is_kept)
        await rest.ok("live/reports", model_id=model_id, samples=judged)
        await step(rest, model_id, seq_id + 1, data)
        seq_id += 3
    return model_id


async def test_samples_are_searched_and_enlarged_and_show_the_trainers_values(tmp_path: Path, browser: Browser) -> None:
    def active() -> Any:
        return browser.run("return document.activeElement.dataset.picture ?? document.activeElement.id")

    write_tokenizer(tmp_path)
    async with running(Stand(tmp_path), tokenizer=str(tmp_path)) as stand, stand.http() as http:
        await _play(Rest(http), 24 if PICTURES else 4)
        await see(browser.show, 1280, False)
        await see(browser.open, f"{stand.url}/")
        await see(browser.wait_text, "#samples", "held out, reward", "right answer: bird 1")
        await see(browser.wait, "return document.querySelectorAll('#rewards-chart .cell').length >= 4")
        marks = "return [...document.querySelectorAll('#rewards-chart .reward-mark')].map((mark) => mark.textContent)"
        assert await see(browser.run, marks) == ["0", "0.5", "1"]
        await see(browser.wait, "return document.querySelectorAll('#groups canvas.strip').length === 4")
        tip = (
            "document.querySelector('.strip').dispatchEvent(new PointerEvent('pointermove', {bubbles: true}));"
            "return document.querySelector('#tip').innerText"
        )
        assert "trainer − sampler" in await see(browser.run, tip)
        colour = "return getComputedStyle(document.querySelector('#groups .token')).backgroundColor"
        sampled = await see(browser.run, colour)
        choose = (
            "const one = document.querySelector('#colour');"
            "one.value = 'difference'; one.dispatchEvent(new Event('change'))"
        )
        await see(browser.run, choose)
        assert await see(browser.run, colour) != sampled

        # A picture fills the window until Escape; then the focus is where it was.
        await see(browser.wait, "return [...document.querySelectorAll('#groups img')].some((one) => one.naturalWidth)")
        picture = await see(browser.run, "return document.querySelector('#groups .picture').dataset.picture")
        await see(browser.click, f"#groups [data-picture='{picture}']")
        await see(browser.wait, "return document.querySelector('#viewer').open")
        wide = "return document.querySelector('#viewer-picture').getBoundingClientRect().height > innerHeight / 2"
        assert await see(browser.run, wide)
        if PICTURES:
            await see(os.makedirs, PICTURES, 0o777, True)
            await see(browser.screenshot, Path(PICTURES) / "viewer-1280-light.png", 900)
        await see(browser.press, ESCAPE)
        await see(browser.wait, "return !document.querySelector('#viewer').open")
        assert await see(active) == picture

        await see(browser.type, "#find-text", "w701")
        await see(browser.wait, "return document.querySelectorAll('#groups .group').length === 2")
        await see(browser.wait_text, "#find-said", "2 prompts")
        assert "step 0" in await see(browser.text, "#groups")
        assert await see(active) == "find-text", "a result must not move the focus"
        await see(browser.click, "#find-clear")
        await see(browser.type, "#find-least_reward", "0.1")
        await see(browser.wait, "return document.querySelectorAll('#groups .group').length > 2")
        await see(browser.type, "#find-last_step", "1")
        await see(browser.wait, "return document.querySelectorAll('#groups .group').length === 4")
        if PICTURES:
            await see(browser.pictures, Path(PICTURES), "samples", 2600)
        await see(browser.show, 390, True)
        assert await see(browser.too_wide, ".scroll, .models, svg, .tokens") == []
        await see(browser.show, 1280, False)
        await see(browser.click, "#find-clear")
        await see(browser.type, "#find-text", "nothing of this kind")
        await see(browser.wait_text, "#groups", "Nothing kept here matches.")
        assert await see(browser.complaints) == []
