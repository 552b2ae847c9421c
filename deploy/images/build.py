"""Builds the images of deploy/compose.yaml, and a stand-in for their base image if it cannot be pulled."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

from deploy.images.engine import FOLDER, NICE, ROOT, environment, exists, podman

COMPOSE = ROOT / "deploy/compose.yaml"
_BASE = Path(__file__).with_name("base.Dockerfile")
_UV = "/etc/uv/uv.toml"
_OF_THE_MACHINE = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf", _UV)
"""Files with which this machine reaches its package indexes. Builds see them; images contain empty files instead."""


def images() -> dict[str, list[str]]:
    """Returns the build options of each image in deploy/compose.yaml."""
    services = yaml.safe_load(COMPOSE.read_text())["services"].values()
    return {service["image"]: _options(service["build"]) for service in services if "build" in service}


def _options(build: dict[str, dict[str, str]]) -> list[str]:
    arguments = [f"--build-arg={name}={value}" for name, value in build.get("args", {}).items()]
    return [f"--file={ROOT / str(build['dockerfile'])}", *arguments]


def build(report: Callable[[str], None], only: str = "") -> None:
    """Builds all images with `only` in their name, one after another. Each takes minutes and gigabytes.

    Raises:
        subprocess.CalledProcessError: A build failed; the engine's output is on standard error.
    """
    for image, options in images().items():
        if only in image:
            _ensure_base(options[0].removeprefix("--file="), report)
            report(f"building {image}")
            _build(image, *options, *_machine(), str(ROOT))
            report(f"built {image}, {size(image) / 1e6:.0f} MB")


def size(image: str) -> int:
    """Returns the size of all layers of an image, in bytes."""
    return int(podman("image", "inspect", "--format={{.Size}}", image).stdout)


def _build(image: str, *options: str) -> None:
    command = [*NICE, "podman", "build", "--layers", "--tag", image, *options]
    subprocess.run(command, env=environment(), check=True)


def _machine() -> list[str]:
    trust = FOLDER / "uv.toml"
    trust.write_text("system-certs = true\n")
    mounted = {path: path for path in _OF_THE_MACHINE if Path(path).exists()}
    return [f"--volume={outside}:{inside}:ro" for inside, outside in ({_UV: trust} | mounted).items()]


def _ensure_base(dockerfile: str, report: Callable[[str], None]) -> None:
    """Builds a stand-in for a Dockerfile's base image, unless the image is present, for example from `podman pull`."""
    (base,) = re.findall(r"(?m)^ARG BASE=(\S+)", Path(dockerfile).read_text())
    if exists(base):
        return
    report(f"{base} is not present; building a stand-in from Debian packages")
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        system, suite = f"{folder}/root", base.rpartition("-")[2]
        subprocess.run([*NICE, "debootstrap", "--variant=minbase", suite, system], check=True, stdout=sys.stderr)
        subprocess.run(
            [*NICE, "tar", "--directory", system, "--create", "--file", f"{folder}/root.tar", "."], check=True
        )
        _build(base, f"--file={_BASE}", folder)
