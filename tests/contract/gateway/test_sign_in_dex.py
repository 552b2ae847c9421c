"""Sign-in through Dex, a real provider: in a real browser, and by the SDK with a command that prints ID tokens.

`FOVEA_PAGE_PICTURES=FOLDER` stores screenshots.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from fovea.runtime.hosts import free_ports
from fovea_gateway.access import sign_ins
from fovea_gateway.access.owners import Usage, Used, add_usage
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest
from tests.e2e.browser import Browser, running_browser, why_no_browser
from tests.issuers import CLIENT, CLIENT_SECRET, PASSWORD, id_token, running_dex, why_no_dex

pytestmark = pytest.mark.skipif(bool(why_no_dex()), reason=why_no_dex())


PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")


class SignedIn(Stand):
    """A gateway with sign-in through Dex."""

    issuer = ""


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[SignedIn]:
    stand = SignedIn(tmp_path / "state")
    (stand.port,) = free_ports(1)
    (tmp_path / "secret").write_text(CLIENT_SECRET)
    with running_dex(tmp_path, f"{stand.url}/api/v1/auth/callback") as stand.issuer:
        async with running(
            stand, api_key=["root=tml-root"], oidc_issuer=stand.issuer, oidc_client_id=CLIENT,
            oidc_client_secret_file=tmp_path / "secret", oidc_roles={"admins": "admin", "ml-team": "train"},
            gpu_hour_price_usd=2.0,
        ):  # fmt: skip
            yield stand


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if why_no_browser():
        pytest.skip(why_no_browser())
    with running_browser() as browser:
        yield browser


async def _see(look: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(look, *arguments)


async def _sign_in(browser: Browser, name: str) -> None:
    await _see(browser.click, "#sign-in a")
    await _see(browser.wait, "return document.querySelector('input[name=login]')")
    await _see(browser.run, "document.querySelector('input[name=login]').value = arguments[0]", f"{name}@example.com")
    await _see(browser.type, "input[name=password]", PASSWORD)


async def _look(browser: Browser, name: str, texts: str) -> None:
    await _see(browser.read_everywhere, texts, ".scroll, .models")
    if PICTURES:
        await _see(browser.pictures, Path(PICTURES), name)
    await _see(browser.show, 1280, False)


async def test_a_browser_signs_in_sees_its_own_and_signs_out(stand: SignedIn, browser: Browser) -> None:
    async with stand.http("tml-root") as http:
        rest = Rest(http)
        await rest.open_session()
        await rest.create_model(user_metadata={"name": "of the root"})
    assert stand.gateway is not None
    used = [Used("root", "k", Usage(sampled_tokens=9, gpu_seconds=5400.0))]
    await stand.gateway.components.database.write(lambda connection: add_usage(connection, used, time.time()))
    await _see(browser.open, f"{stand.url}/")
    await _see(browser.wait_text, "#ask", "Your API key", "Sign in without a key")
    await _see(browser.type, "#key", "tml-unknown")
    await _see(browser.wait_text, "#wrong", "this API key is unknown")
    await _look(browser, "key-sign-in", "#ask :is(h2, p, label, input, a, button, code), #link")
    await _sign_in(browser, "alice")
    await _see(browser.wait_text, "#link", "live")
    assert await _see(browser.text, "#caller") == "alice@example.com · train"
    await _see(browser.show, 390, False)
    cut = "const one = document.querySelector('#caller'); return one.scrollWidth > one.clientWidth"
    assert not await _see(browser.run, cut), "the name and the role of a person are cut on a phone"
    await _look(browser, "signed-in", "#caller, #link, #forget, h2, .empty, textarea, #search")
    assert "of the root" not in await _see(browser.text, "body")
    assert await _see(browser.run, "return document.cookie") == "", "scripts must not be able to read the cookie"
    assert await _see(browser.run, "return Object.keys(sessionStorage).length") == 0
    await _see(browser.run, "location.reload()")
    await _see(browser.wait_text, "#link", "live")

    await _see(browser.click, "#forget", "Sign out")
    await _see(browser.wait_text, "#ask", "Sign in without a key")
    await _see(browser.run, "location.reload()")
    await _see(browser.wait_text, "#ask", "Sign in without a key")
    await _sign_in(browser, "guest")
    await _see(browser.wait_text, "body", "Not signed in", "gateway.oidc_roles; its groups are visitors")
    await _look(browser, "not-signed-in", "h1, p, a")
    await _see(browser.click, "a", "Back to the page")
    await _sign_in(browser, "boss")
    await _see(browser.wait_text, "#models", "of the root")
    assert await _see(browser.text, "#caller") == "boss@example.com · admin"
    await _see(browser.wait_text, "#usage", "root", "$3.00")


async def test_the_sdk_exchanges_what_its_command_prints(
    stand: SignedIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = tmp_path / "token"
    printed.write_text(id_token(stand.issuer, "alice"))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"cat {printed}")
    monkeypatch.setattr(sign_ins, "TOKEN_S", 61)  # the SDK replaces tokens that are valid for less than a minute

    def use() -> tuple[Any, ...]:
        with tinker.ServiceClient(base_url=stand.url) as client:
            trainer = client.create_lora_training_client(MODEL, rank=4).result()
            steps = [trainer.optim_step(tinker.AdamParams()).result() for _ in range(2)]
            who = tinker.RestClient(base_url=stand.url).whoami().result()
            return who, steps, trainer.get_info().model_id

    who, _, model_id = await asyncio.to_thread(use)
    assert (who.email, who.user_urn) == ("alice@example.com", "alice@example.com")
    assert stand.gateway is not None
    assert (await stand.gateway.components.models.get("alice@example.com", model_id)).model_id == model_id
    token_keys = {key.name for key in stand.gateway.components.keys.listed() if key.owner == "alice@example.com"}
    assert token_keys == {"tokens of a sign-in"}


async def test_the_sdk_replaces_a_token_that_the_gateway_refuses(
    stand: SignedIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway loses the secret that signs tokens; the SDK exchanges its key again and repeats its request."""
    monkeypatch.setenv("TINKER_API_KEY", id_token(stand.issuer, "alice"))
    assert stand.gateway is not None
    ours = stand.gateway.components.sign_ins

    def use() -> int:
        client = tinker.RestClient(base_url=stand.url)
        before = len(client.get_server_capabilities().result().supported_models)
        ours._secret = b"another secret of thirty-two bytes"
        return before + len(client.get_server_capabilities().result().supported_models)

    assert await asyncio.to_thread(use) == 2


async def test_the_sdk_says_why_a_person_is_refused(stand: SignedIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", id_token(stand.issuer, "guest"))

    def use() -> None:
        tinker.RestClient(base_url=stand.url).get_server_capabilities().result()

    with pytest.raises(tinker.PermissionDeniedError, match="its groups are visitors"):
        await asyncio.to_thread(use)
