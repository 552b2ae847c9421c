"""OpenID Connect providers for tests: Dex, which is real, and a fake that can issue any faulty token."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import jwt
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa

from deploy.cluster.tools import BIN
from fovea.runtime.hosts import free_ports

CLIENT, CLIENT_SECRET = "fovea", "a secret of the client"
PASSWORD = "password"
_BCRYPT = "$2a$10$2b2cU8CPhOTaGrs1HRQuAueS7JTT5ZHsHSzYiFPm1leZck7Mc8T4W"
DEX = BIN / "dex"


def why_no_dex() -> str:
    """Returns why tests with Dex cannot run here; empty if they can."""
    return "" if DEX.exists() else f"no {DEX}: python -m deploy.cluster build dex makes it, with Go"


@contextmanager
def running_dex(folder: Path, redirect_uri: str) -> Iterator[str]:
    """Runs Dex with a few users with the password `PASSWORD`. Yields its issuer."""
    (port,) = free_ports(1)
    issuer = f"http://127.0.0.1:{port}/dex"
    people = [("alice", ["ml-team"]), ("boss", ["ml-team", "admins"]), ("guest", ["visitors"])]
    settings = {
        "issuer": issuer,
        "storage": {"type": "memory"},
        "web": {"http": f"127.0.0.1:{port}"},
        "oauth2": {"skipApprovalScreen": True, "passwordConnector": "local"},
        "staticClients": [{"id": CLIENT, "name": "Fovea", "secret": CLIENT_SECRET, "redirectURIs": [redirect_uri]}],
        "enablePasswordDB": True,
        "staticPasswords": [
            {
                "email": f"{name}@example.com", "hash": _BCRYPT, "username": name, "userID": name, "groups": groups,
                "emailVerified": True,
            }
            for name, groups in people
        ],
    }  # fmt: skip
    (folder / "dex.yaml").write_text(yaml.safe_dump(settings))
    with (folder / "dex.log").open("w") as log:
        process = subprocess.Popen([DEX, "serve", folder / "dex.yaml"], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not _answers(issuer):
                assert process.poll() is None, (folder / "dex.log").read_text()
                assert time.monotonic() < deadline, "Dex does not answer"
                time.sleep(0.05)
            yield issuer
        finally:
            process.terminate()
            process.wait()


def id_token(issuer: str, name: str) -> str:
    """Returns a user's ID token by Dex's password grant."""
    form = {
        "grant_type": "password", "username": f"{name}@example.com", "password": PASSWORD,
        "scope": "openid email profile groups",
    }  # fmt: skip
    answer = httpx.post(f"{issuer}/token", data=form, auth=(CLIENT, CLIENT_SECRET))
    return str(answer.raise_for_status().json()["id_token"])


def _answers(issuer: str) -> bool:
    try:
        return httpx.get(f"{issuer}/.well-known/openid-configuration").status_code == 200
    except httpx.TransportError:
        return False


@dataclass
class Issuer:
    """A provider in this process. Tests change its keys and answers."""

    url: str = ""
    keys: dict[str, rsa.RSAPrivateKey] = field(default_factory=dict)
    published: list[str] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    forms: list[dict[str, str]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    is_down: bool = False

    def add_key(self, key_id: str, is_published: bool = True) -> None:
        self.keys[key_id] = rsa.generate_private_key(65537, 2048)
        self.published += [key_id] if is_published else []

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        if self.is_down:
            return 500, {}
        if path == "/.well-known/openid-configuration":
            places = {name: f"{self.url}/{name}" for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")}
            return 200, {"issuer": self.url, **places, **self.metadata}
        if path == "/jwks_uri":
            return 200, {"keys": [self.public(key_id) for key_id in self.published]}
        self.forms.append(form)
        return (400 if "error" in self.told else 200), self.told

    def public(self, key_id: str) -> dict[str, Any]:
        found = jwt.algorithms.RSAAlgorithm.to_jwk(self.keys[key_id].public_key(), as_dict=True)
        return {**found, "kid": key_id, "use": "sig", "alg": "RS256"}


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    """Runs a provider with one key, `first`."""
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            issuer.authorizations.append(self.headers.get("Authorization", ""))
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._answer({name: values[0] for name, values in parse_qs(body).items()})

        def _answer(self, form: dict[str, str]) -> None:
            status, told = issuer.answer(self.path, form)
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_port}"
    issuer.add_key("first")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
