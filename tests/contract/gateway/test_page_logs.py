"""Log lines of all services, for administrators only: over REST and on the page in a real browser."""

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea.api.v1 import logs_pb2_grpc
from fovea.runtime.credentials import Redactor
from fovea.runtime.processes import RECENT, LogRing
from fovea.runtime.server import LogServicer
from fovea_gateway.access.api_keys import Scope
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import Fake
from tests.e2e.browser import Browser, see, why_no_browser
from tests.waiting import eventually

PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")


class Logged:
    """A stand with the logs of its services, and keys of an administrator and a user."""

    def __init__(self, stand: Stand, logs: dict[str, logging.Logger], admin: str, user: str) -> None:
        self.stand, self.logs, self.admin, self.user = stand, logs, admin, user


def _keep_log(fake: Fake) -> logging.Logger:
    """Gives a fake service a log route like the real one's."""
    ring, logger, register = LogRing(), logging.Logger(type(fake).__name__), fake.register
    logger.addHandler(ring)

    def with_log(server: Any) -> None:
        register(server)
        logs_pb2_grpc.add_LogServiceServicer_to_server(LogServicer(Redactor([]), ring), server)

    fake.register = with_log  # type: ignore[method-assign]
    return logger


@pytest.fixture
async def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Logged]:
    stand = Stand(tmp_path, sampler_count=2)
    trainer, samplers = _keep_log(stand.trainer), [_keep_log(one) for one in stand.samplers]
    own = logging.Logger("own")
    ring = LogRing()
    own.addHandler(ring)
    monkeypatch.setattr(RECENT, "_lines", ring._lines)
    async with running(stand):
        assert stand.gateway is not None
        ring_of_keys = stand.gateway.components.keys
        admin, _ = await ring_of_keys.create("root", "", Scope.ADMIN, None)
        user, _ = await ring_of_keys.create("alice", "", Scope.TRAIN, None)
        in_order = sorted(zip((one.address for one in stand.samplers), samplers, strict=True))
        yield Logged(stand, {"trainer": trainer, "sampler 1": in_order[0][1], "gateway": own}, admin, user)


async def _read(http: httpx.AsyncClient, **query: Any) -> dict[str, Any]:
    answer = await http.get("live/logs", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_an_administrator_reads_the_lines_of_all_services(logged: Logged) -> None:
    logged.logs["gateway"].info("begins")
    logged.logs["trainer"].error("rank 3 died with key tml-abcdefgh")
    logged.logs["sampler 1"].warning("slow")
    async with logged.stand.http(logged.admin) as http, logged.stand.http(logged.user) as other:
        found = await _read(http)
        assert found["services"] == ["gateway", "renderer", "sampler 1", "sampler 2", "trainer"]
        assert [(one["service"], one["level"], one["text"]) for one in found["lines"]] == [
            ("gateway", 20, "begins"),
            ("trainer", 40, "rank 3 died with key [removed]"),
            ("sampler 1", 30, "slow"),
        ]
        assert list(found["failures"]) == ["renderer"], "a fake without a log"
        assert [one["service"] for one in (await _read(http, level=30))["lines"]] == ["trainer", "sampler 1"]
        assert [one["text"] for one in (await _read(http, text="RANK"))["lines"]] == ["rank 3 died with key [removed]"]
        only = await _read(http, service="sampler 1")
        assert ([one["text"] for one in only["lines"]], only["failures"]) == (["slow"], {})
        assert (await _read(http, service="none", level=2**40))["lines"] == []
        assert (await other.get("live/logs")).status_code == 403


@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
async def test_the_page_shows_logs_to_administrators(logged: Logged, browser: Browser) -> None:
    logged.logs["gateway"].info("begins")
    logged.logs["trainer"].error("rank 3 died\n  Traceback")

    def open_page(key: str) -> None:
        browser.open(f"{logged.stand.url}/")
        browser.run("sessionStorage.setItem('fovea-key', arguments[0])", key)
        browser.open("about:blank")
        browser.open(f"{logged.stand.url}/")

    # Lines are fetched while the section is visible, and content that arrives above moves it.
    scroll = "const card = document.querySelector('#logs'); card.scrollIntoView(); return !card.hidden"
    has = (
        "document.querySelector('#logs').scrollIntoView();"
        "const text = document.querySelector('#logs-lines').innerText;"
        "return arguments[0].every((one) => text.includes(one)) && arguments[1].every((one) => !text.includes(one))"
    )
    await see(browser.show, 1280, False)
    await see(open_page, logged.admin)
    await see(browser.wait, scroll)
    await see(browser.wait, has, ["begins", "rank 3 died", "Traceback"], [])
    assert await see(browser.run, "return document.querySelectorAll('#logs-lines .error').length") == 1
    logged.logs["sampler 1"].warning("slow")
    await see(browser.wait, has, ["slow"], [])
    if PICTURES:
        await see(browser.pictures, Path(PICTURES), "logs", 3000)
        await see(browser.show, 1280, False)
        await see(browser.wait, scroll)
    choose = (
        "const one = document.querySelector(`#logs-${arguments[0]}`); one.focus(); one.value = arguments[1];"
        "one.dispatchEvent(new Event('change'))"
    )
    await see(browser.run, choose, "level", "30")
    await see(browser.wait, has, ["slow", "rank 3 died"], ["begins"])
    await see(browser.run, choose, "service", "trainer")
    await see(browser.wait, has, ["rank 3 died"], ["slow"])
    assert await see(browser.run, "return document.activeElement.id") == "logs-service"
    await see(browser.run, choose, "service", "")
    await see(browser.type, "#logs-text", "slow")
    await see(browser.wait, has, ["slow"], ["rank 3 died"])
    await see(browser.show, 390, True)

    async def fits() -> bool:
        return await see(browser.too_wide, ".scroll, .models, svg, .tokens") == []  # type: ignore[no-any-return]

    await eventually(fits, 60)  # Charts follow the width with a delay.

    await see(open_page, logged.user)
    await see(browser.wait_text, "#caller", "alice")
    assert await see(browser.run, "return document.querySelector('#logs').hidden")
    assert await see(browser.complaints) == []
