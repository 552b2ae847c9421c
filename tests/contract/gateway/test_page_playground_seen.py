"""The playground of the live page in a real browser: a chat with a checkpoint and a picture, through OpenAI's route.

`FOVEA_PAGE_PICTURES=FOLDER` stores screenshots.
"""

import base64
import json
import os
from pathlib import Path

import pytest

from fovea.wire.errors import InvalidInput
from fovea_gateway.access.api_keys import Scope
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_page_samples_seen import png
from tests.e2e.browser import Browser, see, why_no_browser

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")
_CHOOSE_PICTURE = """
    const bytes = Uint8Array.from(atob(arguments[0]), (one) => one.charCodeAt(0)), chosen = new DataTransfer();
    chosen.items.add(new File([bytes], "bird.png", { type: "image/png" }));
    document.querySelector("#chat-picture").files = chosen.files;
    document.querySelector("#chat-picture").dispatchEvent(new Event("change"));
"""


async def test_a_checkpoint_answers_in_the_playground(tmp_path: Path, browser: Browser) -> None:
    async with running(Stand(tmp_path)) as stand, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model(user_metadata={"name": "birds"})
        saved = await rest.ok("save_weights_for_sampler", model_id=model_id, seq_id=1, path="step-1")
        path = (await rest.result(saved["request_id"]))["path"]
        await see(browser.show, 1280, False)
        await see(browser.open, f"{stand.url}/")
        await see(browser.wait_text, "#chat-model", MODEL, "birds · step-1")

        # With the base model: the fake sampler answers with a list of ids, in two parts.
        await see(browser.type, "#chat-text", "What is this?")
        await see(browser.wait_text, "#chat", "you", "What is this?", MODEL, "]")
        await see(browser.wait_text, "#chat-note", "Answered in")
        body = json.loads(stand.sampler.of("AnswerOpenAI")[0].body)
        assert body["messages"] == [{"role": "user", "content": "What is this?"}]

        # With a checkpoint and a picture; the conversation continues.
        await see(browser.click, f"[data-path='{path}'] button", "Chat")
        await see(browser.wait, "return document.activeElement.id === 'chat-text'")
        assert await see(browser.run, "return document.querySelector('#chat-model').value") == path
        await see(browser.run, _CHOOSE_PICTURE, base64.b64encode(png(3)).decode())
        await see(browser.wait, "return document.querySelector('#chat-preview').naturalWidth > 0")
        await see(browser.type, "#chat-text", "And this bird?")
        await see(browser.wait_text, "#chat", "And this bird?", "birds · step-1", "]")
        await see(browser.wait, "return document.querySelector('#chat img').naturalWidth > 0")
        await see(browser.wait_text, "#chat-send", "Send")
        asked = stand.sampler.of("AnswerOpenAI")[1]
        assert (json.loads(asked.body)["model"], asked.image_count) == (path, 1)
        (sampled,) = stand.sampler.of("Sample")[1:]
        assert sampled.snapshot_id in stand.sampler.adapters
        if PICTURES:
            await see(browser.run, "document.querySelector('#chat-text').blur(); scrollTo(0, 0)")
            await see(browser.pictures, Path(PICTURES), "playground", 2000)
        await see(browser.show, 390, True)
        assert await see(browser.too_wide, ".scroll, .models, svg, .tokens") == []
        await see(browser.show, 1280, False)

        # A click stops an answer. A failed request keeps the text in its field.
        stand.sampler.open.clear()
        await see(browser.type, "#chat-text", "A long one")
        await see(browser.click, "#chat-send", "Stop")
        await see(browser.wait_text, "#chat-send", "Send")
        stand.sampler.open.set()
        stand.sampler.failures["AnswerOpenAI"] = [InvalidInput("max_tokens is 256; the most is 4", field="max_tokens")]
        await see(browser.run, "document.querySelector('#chat-text').value = ''")
        await see(browser.type, "#chat-text", "Too short")
        await see(browser.wait_text, "#chat-note", "max_tokens is 256")
        assert await see(browser.run, "return document.querySelector('#chat-text').value") == "Too short"
        assert [one for one in await see(browser.complaints) if "400" not in one] == []


async def test_a_key_that_may_not_sample_has_no_playground(tmp_path: Path, browser: Browser) -> None:
    async with running(Stand(tmp_path)) as stand:
        assert stand.gateway is not None
        reader, _ = await stand.gateway.components.keys.create("alice", "", Scope.READ, None)
        await see(browser.open, f"{stand.url}/")
        await see(browser.wait_text, "#chat-model", MODEL)
        await see(browser.click, "#forget")
        await see(browser.type, "#key", reader)
        await see(browser.wait_text, "#caller", "alice · read")
        await see(browser.wait, "return document.querySelector('#playground').hidden")
