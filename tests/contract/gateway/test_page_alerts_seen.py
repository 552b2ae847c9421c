"""Alerts and figures of the services on the live page, in a real browser.

`FOVEA_PAGE_PICTURES=FOLDER` stores screenshots.
"""

import os
import time
from pathlib import Path

import pytest

from fovea_gateway.access.api_keys import Scope
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import Rest
from tests.e2e.browser import Browser, see, why_no_browser

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea_gateway.fronts.app.ALERTS_S", 0.1)
    monkeypatch.setattr("fovea_gateway.fronts.app.SYSTEM_S", 1.0)
    monkeypatch.setattr("fovea_gateway.live.alerts.CALM_S", 0.5)


def _seed(stand: Stand) -> None:
    """Fills the history with an hour of data."""
    assert stand.gateway is not None
    history, now = stand.gateway.components.live_view.history, time.time()
    for number in range(330):
        wave = abs(number % 60 - 30) / 30
        values = {
            "gpu_memory|trainer of fovea/fake-vl": 61e9 + 4e9 * wave,
            "gpu_memory|sampler 1 of fovea/fake-vl": 98e9,
            "gpu_utilization|trainer of fovea/fake-vl": 0.5 + 0.4 * wave,
            "busy|trainer of fovea/fake-vl": 0.3 + 0.5 * wave,
            "busy|samplers of fovea/fake-vl": 0.9 - 0.4 * wave,
            "queue|waiting": 40 * wave,
            "queue|running": 12.0,
            "tokens|trained": 9000 * wave,
            "tokens|sampled": 4200 - 2000 * wave,
            "lag|durable points": 3 + 2 * wave,
        } | ({"push|fovea/fake-vl": 0.4 + wave / 4} if number % 6 == 0 else {})
        history.add(now - 10 * (330 - number), values)


async def test_alerts_begin_on_the_page_and_leave_the_focus_where_it_is(tmp_path: Path, browser: Browser) -> None:
    def open_page(key: str) -> None:
        browser.show(1280, dark=False)
        browser.open(f"{stand.url}/")
        browser.wait_text("#link", "live")
        browser.click("#forget")
        browser.type("#key", key)
        browser.wait_text("#link", "live")

    async with running(Stand(tmp_path), alerts_gone_s=0.2, alerts_webhook="http://127.0.0.1:9/hook") as stand:
        assert stand.gateway is not None
        admin, _ = await stand.gateway.components.keys.create("root", "", Scope.ADMIN, None)
        _seed(stand)
        async with stand.http() as http:
            rest = Rest(http)
            model_id = await rest.create_model(user_metadata={"name": "birds"})
            await see(open_page, admin)
            await see(browser.wait, "return document.querySelectorAll('#system-charts canvas').length >= 6")
            assert await see(browser.run, "return document.querySelector('#alerts').hidden")
            await see(browser.wait_text, "#system-charts", "GPU memory", "Tokens per second", "Push of weights")
            await see(browser.run, "document.querySelector('#system-hours').focus()")

            await rest.ok("live/reports", model_id=model_id, metrics={"kl": 0.75})
            await stand.sampler.stop()
            await see(browser.wait_text, "#alerts", "KL above its bound", "birds", "Sampler gone", "does not answer")
            await see(browser.wait_text, "#alerts-webhook", "The webhook at 127.0.0.1 fails")
            assert await see(browser.run, "return [document.title, document.activeElement.id]") == [
                "(2) Fovea",
                "system-hours",
            ]
            if PICTURES:
                await see(browser.pictures, Path(PICTURES), "alerts", 3000)
            await see(browser.show, 390, True)
            await see(browser.wait, "return document.querySelector('#system-charts .uplot').offsetWidth < 390")
            assert await see(browser.too_wide, ".scroll, .models, svg") == []
            await see(browser.show, 1280, False)

            await stand.sampler.start()
            await rest.ok("live/reports", model_id=model_id, metrics={"kl": 0.01})
            await see(browser.wait_text, "#alerts", "None now", "2 that ended")
            await see(browser.run, "scrollTo(0, 0)")
            await see(browser.click, "#alerts-ended summary")
            await see(browser.wait_text, "#alerts-past", "Sampler gone", "birds")
            assert await see(browser.run, "return document.title") == "Fovea"

            # An owner without the admin scope sees only its own alerts, and no figures of the services.
            await rest.ok("live/reports", model_id=model_id, metrics={"kl": 0.75})
            await see(open_page, "tml-local")
            await see(browser.wait_text, "#alerts-open", "KL above its bound")
            assert "Sampler" not in await see(browser.text, "#alerts")
            assert await see(browser.run, "return document.querySelector('#system').hidden")
            assert [one for one in await see(browser.complaints) if "401" not in one] == []
