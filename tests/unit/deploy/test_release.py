"""A release is traceable: pinned by hash and digest, audited, listed, signed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.audit import LOCKS, UNREACHABLE, VULNERABLE, lock, look_up

ROOT = Path(__file__).parents[3]
DIGEST = f"sha256:{'0a' * 32}"
PACKAGES = {
    "clean": ({"name": "a", "version": "1", "vulns": []}, 0, []),
    "vulnerable": (
        {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]},
        VULNERABLE,
        ["a 1: CVE-1, fixed in 2"],
    ),
    "left out": ({"name": "a", "skip_reason": "not found"}, UNREACHABLE, ["not looked up: a"]),
}


def test_every_pinned_package_has_a_hash() -> None:
    files = [lock(name) for name in (*LOCKS, "audit", "environments")]
    for file in files:
        pins = re.findall(r"(?m)^[a-z0-9._-]+==.*$", file.read_text())
        assert pins, file
        assert not [pin for pin in pins if not pin.endswith("\\")], f"{file} has a package without hashes"


def test_pip_installs_by_hash_alone() -> None:
    places = [ROOT / "Makefile", ROOT / "gateway/Dockerfile", *ROOT.glob("services/*/Dockerfile")]
    installs = [
        line for place in places for line in place.read_text().splitlines() if re.search(r"\bpip install", line)
    ]
    by_pip = [line for line in installs if "uv pip" not in line and "/uv pip" not in line]
    assert len(by_pip) == 5
    assert all("--require-hashes" in line for line in by_pip)


@pytest.mark.parametrize("case", PACKAGES)
def test_a_package_that_was_not_looked_up_does_not_pass(case: str) -> None:
    """pip-audit exits with 0 if it could look up nothing."""
    package, code, lines = PACKAGES[case]
    program = f"print({json.dumps(json.dumps({'dependencies': [package]}))})"
    assert look_up([sys.executable, "-c", program]) == (code, lines)


def test_advisories_that_cannot_be_reached_are_no_verdict() -> None:
    assert look_up([sys.executable, "-c", "raise ConnectionError('no route')"])[0] == UNREACHABLE
    assert look_up([sys.executable, "-c", "raise KeyError('a fault of the tool')"])[0] == VULNERABLE


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """Programs that replace make, docker and cosign and record their calls."""
    note = f'echo "$(basename "$0") $*" >> {tmp_path}/calls\n'
    metadata = (
        f'while [ "$1" != --metadata-file ]; do shift; done\necho \'{{"containerimage.digest": "{DIGEST}"}}\' > "$2"\n'
    )
    for name, does in (("make", "mkdir -p dist\n"), ("docker", metadata), ("cosign", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{note}{does}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "copy/.ci").mkdir(parents=True)
    (tmp_path / "copy/client/fovea").mkdir(parents=True)
    for file in (".ci/release", "client/fovea/__init__.py"):
        (tmp_path / "copy" / file).write_bytes((ROOT / file).read_bytes())
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REGISTRY": "registry.example/fovea"}


def release(folder: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = ["bash", str(folder / "copy/.ci/release")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("base", ["", "python:3.11.14-slim-bookworm", "python@sha256:short"])
def test_a_release_without_the_digest_of_its_base_is_refused(base: str, tools: dict[str, str], tmp_path: Path) -> None:
    done = release(tmp_path, tools | {"BASE": base})
    assert done.returncode == 2
    assert done.stderr.startswith("BASE: name the base image by its digest")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("key", "option"), [("", ""), ("my keys/cosign.key", " --key my keys/cosign.key --tlog-upload=false")]
)
def test_what_is_released_is_looked_up_listed_and_signed_by_digest(
    tools: dict[str, str], tmp_path: Path, key: str, option: str
) -> None:
    base = f"python:3.11.14-slim-bookworm@{DIGEST}"
    done = release(tmp_path, tools | {"BASE": base, "KEY": key})
    assert done.returncode == 0, done.stderr
    first, *calls = (tmp_path / "calls").read_text().splitlines()
    assert first == "make audit sbom"
    for folder in ("gateway", "services/renderer", "services/sampler", "services/trainer"):
        service = Path(folder).name
        build, sign, attest = calls[:3]
        del calls[:3]
        assert f"--build-arg BASE={base}" in build
        assert f"--file {folder}/Dockerfile " in build
        assert sign == f"cosign sign --yes{option} registry.example/fovea/{service}@{DIGEST}"
        assert attest.startswith(f"cosign attest --yes{option} --type cyclonedx --predicate dist/fovea")
        assert attest.endswith(f"fovea-{'gpu' if service == 'sampler' else 'cpu'}.cdx.json {sign.split()[-1]}")
    assert calls == []


def test_make_setup_says_what_takes_minutes(tmp_path: Path) -> None:
    dry_run = ["make", "--dry-run", "setup", f"VENV={tmp_path}"]
    recipe = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    said = "\n".join(line for line in recipe if line.startswith("echo "))
    lines = subprocess.run(["sh", "-c", said], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    count = len(re.findall(r"^[^ #].*==", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE))
    assert f"installing and compiling {count} packages; about 2 minutes" in lines
    assert (
        recipe.index(next(line for line in recipe if "packages;" in line))
        == recipe.index(next(line for line in recipe if "uv pip sync" in line)) - 1
    )
