"""Sign-in with a provider that may issue faulty tokens: accepted and refused tokens, and the end of a sign-in."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import jwt
import pytest
import tinker
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tinker.lib.credentials import JsonCredentialStore, ManualKey, default_credentials_path

from fovea.client.gateway import NotConnected
from fovea_data.served_limits import ask_limits
from fovea_gateway.access import oidc, sign_ins
from fovea_gateway.access.api_keys import Scope
from fovea_rollout import connect
from fovea_rollout.loop.live_reports import LiveReports
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.issuers import CLIENT, CLIENT_SECRET, Issuer, running_issuer

ROLES = {"admins": "admin", "ml-team": "train", "readers": "read"}
CALLBACK = "auth/callback"
PAGE = {"X-Fovea-Page": "1"}


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with running_issuer() as issuer:
        yield issuer


@pytest.fixture
async def stand(tmp_path: Path, database_url: str, issuer: Issuer) -> AsyncIterator[Stand]:
    async with running(
        Stand(tmp_path), database_url=database_url, api_key=["root=tml-root"], oidc_issuer=issuer.url,
        oidc_client_id=CLIENT, oidc_client_secret=CLIENT_SECRET, oidc_roles=ROLES,
    ) as stand:  # fmt: skip
        yield stand


def claims(issuer: Issuer, **others: Any) -> dict[str, Any]:
    now = int(time.time())
    found = {
        "iss": issuer.url, "aud": CLIENT, "sub": "1", "iat": now, "exp": now + 60, "email": "alice@example.com",
        "email_verified": True, "groups": ["ml-team"],
    } | others  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def signed(issuer: Issuer, key_id: str = "first", **others: Any) -> str:
    return jwt.encode(claims(issuer, **others), issuer.keys[key_id], "RS256", {"kid": key_id})


async def admin(stand: Stand) -> str:
    assert stand.gateway is not None
    await stand.gateway.components.audit.flush()
    return (await stand.gateway.components.keys.create("root", "", Scope.ADMIN, None))[0]


async def exchange(stand: Stand, credential: str) -> httpx.Response:
    async with stand.http(credential) as http:
        return await http.post("auth/token", json={})


async def test_an_id_token_is_exchanged_for_one_of_the_gateway(stand: Stand, issuer: Issuer) -> None:
    answer = await exchange(stand, signed(issuer))
    assert answer.status_code == 200, answer.text
    token = answer.json()["jwt"]
    told = jwt.decode(token, options={"verify_signature": False})
    assert (told["sub"], told["email"], told["exp"] - told["iat"]) == ("alice@example.com",) * 2 + (900,)
    async with stand.http(token) as http:
        assert (await http.get("auth/apikey/me")).json()["name"] == "alice@example.com"
        assert (await http.post("client/config", json={})).json()["pjwt_auth_enabled"] is True
        assert (await http.get("keys")).status_code == 403
        refused = await http.post("auth/token", json={})
        assert (refused.status_code, refused.json()["reason"]) == (401, "UNAUTHENTICATED")
        assert "cannot be exchanged" in refused.json()["detail"]
    async with stand.http("tml-root") as http:
        assert "pjwt_auth_enabled" not in (await http.post("client/config", json={})).json()
        own = (await http.post("auth/token", json={})).json()["jwt"]
    async with stand.http(own) as http:
        assert (await http.get("auth/apikey/me")).json()["name"] == "root"
    async with stand.http(signed(issuer)) as http:
        direct = await http.get("auth/apikey/me")
        assert direct.status_code == 401
        assert "auth/token" in direct.json()["detail"]


async def test_one_person_has_one_key(stand: Stand, issuer: Issuer) -> None:
    for _ in range(3):
        assert (await exchange(stand, signed(issuer))).status_code == 200
    assert stand.gateway is not None
    ring = stand.gateway.components.keys
    mine = [key for key in ring.listed() if key.owner == "alice@example.com"]
    assert [(key.scope, key.name) for key in mine] == [(Scope.TRAIN, "tokens of a sign-in")]
    token = (await exchange(stand, signed(issuer, groups=["ml-team", "admins"]))).json()["jwt"]
    async with stand.http(token) as http:
        assert (await http.get("keys")).status_code == 200, "the highest group must count"
        await exchange(stand, signed(issuer, groups=["readers"]))
        assert (await http.get("keys")).status_code == 403, "the newest groups must count, also for older tokens"
        await ring.revoke(mine[0].key_id)
        revoked = await http.get("auth/apikey/me")
        assert revoked.status_code == 401
        assert "revoked" in revoked.json()["detail"]
    refused = await exchange(stand, signed(issuer))
    assert refused.status_code == 403
    assert mine[0].key_id in refused.json()["detail"]


@pytest.mark.parametrize("way", ["command", "variable", "argument", "login"])
async def test_people_who_sign_in_connect(
    stand: Stand,
    issuer: Issuer,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    with pytest.raises(NotConnected, match="no API key is given: set TINKER_API_KEY"):
        await asyncio.to_thread(connect, stand.url)
    token, key = signed(issuer), None
    if way == "command":
        (tmp_path / "printed").write_text(token)
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"cat {tmp_path}/printed")
    elif way == "variable":
        monkeypatch.setenv("TINKER_API_KEY", token)
    elif way == "argument":
        key = token
    else:
        store = JsonCredentialStore(default_credentials_path())
        store.add_key("1", ManualKey(key="tml-root", name="mine"))
        store.set_default("1")

    def use() -> tuple[str, int | None]:
        with connect(stand.url, key) as service:
            training = service.create_lora_training_client(MODEL, rank=4).result()
            LiveReports.of(training).send_metrics({"accuracy": 0.5})
            model = training.get_info().model_data.model_name
        return str(model), ask_limits(stand.url, key)[MODEL].max_lora_rank

    model, most = await asyncio.to_thread(use)
    assert model == MODEL
    assert most is not None
    assert [record.getMessage() for record in caplog.records if "live page" in record.getMessage()] == []


async def test_a_refused_person_gets_the_error_of_the_sdk(stand: Stand, issuer: Issuer) -> None:
    token = signed(issuer, groups=["cooks"])
    assert await asyncio.to_thread(ask_limits, stand.url, token) == {}

    def use() -> None:
        with connect(stand.url, token) as service:
            service.create_lora_training_client(MODEL, rank=4).result()

    with pytest.raises(tinker.PermissionDeniedError, match="its groups are cooks"):
        await asyncio.to_thread(use)


def _unsigned(issuer: Issuer) -> str:
    return jwt.encode(claims(issuer), "", "none", {"kid": "first"})


def _by_public_key(issuer: Issuer) -> str:
    """Signs with HS256 and the provider's public key as the secret."""
    secret = issuer.keys["first"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head = {"alg": "HS256", "typ": "JWT", "kid": "first"}
    parts = [base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=") for one in (head, claims(issuer))]
    seal = base64.urlsafe_b64encode(hmac.new(secret, b".".join(parts), hashlib.sha256).digest()).rstrip(b"=")
    return b".".join([*parts, seal]).decode()


def _changed(issuer: Issuer) -> str:
    head, _, seal = signed(issuer).split(".")
    body = base64.urlsafe_b64encode(json.dumps(claims(issuer, groups=["admins"])).encode()).rstrip(b"=").decode()
    return f"{head}.{body}.{seal}"


def _of_another_key(issuer: Issuer) -> str:
    issuer.add_key("other", is_published=False)
    return jwt.encode(claims(issuer), issuer.keys["other"], "RS256", {"kid": "first"})


def _with_its_own_key(issuer: Issuer) -> str:
    """Signs with a key that the header contains, as in CVE-2018-0114."""
    issuer.add_key("other", is_published=False)
    return jwt.encode(claims(issuer), issuer.keys["other"], "RS256", {"kid": "other", "jwk": issuer.public("other")})


HOSTILE: dict[str, tuple[Callable[[Issuer], str], int, str]] = {
    "not a token": (lambda issuer: "eyJhbGciOi", 401, "cannot be read"),
    "no signature": (_unsigned, 401, "'none'"),
    "the public key as secret": (_by_public_key, 401, "not valid"),
    "changed": (_changed, 401, "Signature verification failed"),
    "another key under a known id": (_of_another_key, 401, "Signature verification failed"),
    "a key of its own": (_with_its_own_key, 401, "which http"),
    "expired": (lambda issuer: signed(issuer, exp=int(time.time()) - 100), 401, "expired"),
    "not yet": (lambda issuer: signed(issuer, nbf=int(time.time()) + 600), 401, "not yet valid"),
    "from the future": (lambda issuer: signed(issuer, iat=int(time.time()) + 600), 401, "not yet valid"),
    "for ever": (lambda issuer: signed(issuer, exp=None), 401, '"exp"'),
    "for another client": (lambda issuer: signed(issuer, aud="another"), 401, "Audience"),
    "for several clients": (lambda issuer: signed(issuer, aud=[CLIENT, "another"], azp="another"), 401, "azp"),
    "of another issuer": (lambda issuer: signed(issuer, iss="http://127.0.0.1:1"), 401, "issuer"),
    "of nobody": (lambda issuer: signed(issuer, sub=None), 401, '"sub"'),
    "unverified address": (lambda issuer: signed(issuer, email_verified=False), 403, "verified"),
    "no address": (lambda issuer: signed(issuer, email=None), 403, "oidc_owner_claim"),
    "an address like a key": (lambda issuer: signed(issuer, email="tml-root"), 403, "oidc_owner_claim"),
    "the owner of a key": (lambda issuer: signed(issuer, email="key-0123456789ab"), 403, "belongs to an API key"),
    "no group": (lambda issuer: signed(issuer, groups=None), 403, "its groups are none"),
    "an unknown group": (lambda issuer: signed(issuer, groups=["cooks"]), 403, "oidc_roles; its groups are cooks"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_wrong_id_token_is_refused(stand: Stand, issuer: Issuer, name: str) -> None:
    make, status, words = HOSTILE[name]
    answer = await exchange(stand, make(issuer))
    assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text
    assert stand.gateway is not None
    assert [key.owner for key in stand.gateway.components.keys.listed()] == ["root"]


async def test_the_provider_replaces_its_keys(stand: Stand, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await exchange(stand, signed(issuer))).status_code == 200
    issuer.add_key("second")
    issuer.published.remove("first")
    early = await exchange(stand, signed(issuer, "second"))
    assert early.status_code == 401, "the keys were read less than five seconds ago"
    asked = len(issuer.asked)
    for _ in range(20):
        await exchange(stand, signed(issuer, "second"))
    assert len(issuer.asked) == asked, "tokens with unknown keys must not cause a flood of requests"
    monkeypatch.setattr(oidc, "_AGAIN_S", 0)
    assert (await exchange(stand, signed(issuer, "second"))).status_code == 200
    assert (await exchange(stand, signed(issuer))).status_code == 401, "the old key must be gone"
    issuer.is_down = True
    assert (await exchange(stand, signed(issuer, "second"))).status_code == 200, "its keys must be known"


@pytest.mark.parametrize("fault", ["down", "another name", "an address without TLS"])
async def test_a_provider_that_does_not_work(stand: Stand, issuer: Issuer, fault: str) -> None:
    issuer.is_down = fault == "down"
    issuer.metadata = {"issuer": f"{issuer.url}/other"} if fault == "another name" else {}
    issuer.metadata |= {"jwks_uri": "ftp://127.0.0.1/keys"} if fault == "an address without TLS" else {}
    answer = await exchange(stand, signed(issuer))
    assert (answer.status_code, "API keys work" in answer.json()["detail"]) == (503, True)
    async with stand.http(None) as http:
        page = await http.get("auth/login")
        assert (page.status_code, "API keys work" in page.text) == (503, True)
    async with stand.http("tml-root") as http:
        assert (await http.get("auth/apikey/me")).status_code == 200


async def _begin(http: httpx.AsyncClient) -> dict[str, str]:
    """Starts a sign-in. Returns the parameters that the provider receives."""
    begun = await http.get("auth/login")
    assert begun.status_code == 303
    return {name: values[0] for name, values in parse_qs(urlsplit(begun.headers["location"]).query).items()}


@pytest.mark.parametrize("way", ["client_secret_post", "client_secret_basic"])
async def test_the_page_signs_in_and_out(stand: Stand, issuer: Issuer, way: str) -> None:
    issuer.metadata = {"token_endpoint_auth_methods_supported": [way]}
    async with stand.http(None) as http:
        sent = await _begin(http)
        assert (sent["response_type"], sent["client_id"], sent["code_challenge_method"]) == ("code", CLIENT, "S256")
        assert sent["scope"] == "openid email profile"
        assert sent["redirect_uri"] == f"{stand.url}/api/v1/{CALLBACK}"
        issuer.told = {"id_token": signed(issuer, nonce=sent["nonce"])}
        back = await http.get(CALLBACK, params={"code": "c", "state": sent["state"]})
        assert (back.status_code, back.headers["location"]) == (303, "/"), back.text
        cookie = next(one for one in back.headers.get_list("set-cookie") if one.startswith("fovea_session="))
        assert {"HttpOnly", "SameSite=strict", "Path=/", "Max-Age=28800"} <= set(cookie.split("; "))
        form = issuer.forms[-1]
        assert (form["code"], form.get("client_secret")) == ("c", CLIENT_SECRET if way.endswith("post") else None)
        basic = base64.b64encode(f"{CLIENT}:{quote(CLIENT_SECRET)}".encode()).decode()
        assert issuer.authorizations[-1] == ("" if way.endswith("post") else f"Basic {basic}")
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        assert challenge.decode() == sent["code_challenge"]
        assert form["code_verifier"] not in (sent["state"], sent["nonce"])

        assert (await http.get("auth/apikey/me", headers=PAGE)).json()["name"] == "alice@example.com"
        assert (await http.get("auth/apikey/me")).status_code == 401, (
            "a page of another site must not be able to use the cookie"
        )
        again = await http.get(CALLBACK, params={"code": "c", "state": sent["state"]})
        assert again.status_code == 401, "the state is valid once"
        kept = http.cookies["fovea_session"]
        assert (await http.post("auth/logout", headers=PAGE)).status_code == 200
        assert "fovea_session" not in http.cookies
        stolen = await http.get("auth/apikey/me", headers={**PAGE, "Cookie": f"fovea_session={kept}"})
        assert stolen.status_code == 401
        assert "expired" in stolen.json()["detail"]
    async with stand.http("tml-root") as http:
        assert (await http.post("auth/logout")).status_code == 400, "an API key is not a sign-in"
        assert (await http.get("auth/apikey/me")).status_code == 200
    async with stand.http(await admin(stand)) as http:
        entries = (await http.get("audit", params={"event_type": "organizations"})).json()["entries"]
    events = [(one["event"], one["event_details"]["owner"], one["event_details"]["outcome"]) for one in entries]
    assert events[:2] == [("sign_in", "alice@example.com", "ok"), ("sign_out", "alice@example.com", "ok")]


FORGED = ("no cookie", "another state", "changed state", "another nonce", "no nonce", "late", "refused", "no code")


@pytest.mark.parametrize("fault", FORGED)
async def test_a_forged_sign_in_is_refused(
    stand: Stand, issuer: Issuer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stand.http(None) as http:
        other = await _begin(http)
        if fault == "late":
            monkeypatch.setattr(sign_ins, "LOGIN_S", -1)
        sent = await _begin(http)
        state = {"another state": other["state"], "changed state": "9" + sent["state"]}.get(fault, sent["state"])
        if fault == "no cookie":
            http.cookies.clear()
        nonce = {"another nonce": other["nonce"], "no nonce": None}.get(fault, sent["nonce"])
        issuer.told = {"id_token": signed(issuer, nonce=nonce)}
        if fault == "no code":
            issuer.told = {"error": "invalid_grant", "error_description": "<b>unknown</b> code"}
        query = {"error": "access_denied"} if fault == "refused" else {"code": "c"}
        back = await http.get(CALLBACK, params={**query, "state": state})
        assert (back.status_code, "Not signed in" in back.text) == (401, True), back.text
        assert "<b>" not in back.text
        assert not [one for one in back.headers.get_list("set-cookie") if one.startswith("fovea_session")]
        redeems = fault in ("another nonce", "no nonce", "no code")
        assert len(issuer.forms) == redeems, "the provider is asked only for sign-ins that this browser started"


async def test_a_refused_person_is_in_the_audit_log(stand: Stand, issuer: Issuer) -> None:
    async with stand.http(None) as http:
        sent = await _begin(http)
        issuer.told = {"id_token": signed(issuer, nonce=sent["nonce"], groups=["cooks"])}
        back = await http.get(CALLBACK, params={"code": "c", "state": sent["state"]})
        assert (back.status_code, "its groups are cooks" in back.text) == (403, True)
    async with stand.http(await admin(stand)) as http:
        (entry,) = (await http.get("audit", params={"event": "sign_in"})).json()["entries"]
    assert entry["event_details"]["outcome"] == "PERMISSION_DENIED"


async def test_old_sign_ins_are_deleted_and_revoked_ones_kept(
    stand: Stand, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stand.gateway is not None
    ours, ring = stand.gateway.components.sign_ins, stand.gateway.components.keys
    monkeypatch.setattr(sign_ins, "_DORMANT_S", -1)
    monkeypatch.setattr(ours, "session_s", -1)
    for name in ("gone", "banned"):
        await ours.open_session(oidc.Identity(name, name, Scope.READ))
    banned = next(key for key in ring.listed() if key.owner == "banned" and key.name == "tokens of a sign-in")
    await ring.revoke(banned.key_id)
    monkeypatch.setattr(sign_ins, "_KEPT_S", 0)
    await ours.open_session(oidc.Identity("new", "new", Scope.READ))
    left = {key.owner for key in ring.listed()}
    assert "gone" not in left
    assert {"root", "banned"} <= left


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"oidc_issuer": "http://sso.example.com"}, "https"),
        ({"oidc_public_url": "http://fovea.example.com"}, "https"),
        ({"oidc_client_id": ""}, "oidc_client_id"),
        ({"oidc_roles": {}}, "oidc_roles"),
        ({"oidc_roles": {"a": "root"}}, "'root'; a scope is one of read"),
        ({"oidc_client_secret_file": "/nowhere"}, "/nowhere is not a file"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], words: str) -> None:
    right = {"oidc_issuer": "https://sso.example.com", "oidc_client_id": "a", "oidc_roles": {"*": "read"}}
    assert oidc.OidcSettings(**right).oidc_issuer
    with pytest.raises(ValueError, match=words):
        oidc.OidcSettings(**(right | wrong))
