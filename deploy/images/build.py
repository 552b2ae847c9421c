"""Builds the images that deploy/compose.yaml names, and the base that they stand on where it cannot be had."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from deploy.images.engine import FOLDER, ROOT, environment, exists, podman

COMPOSE = ROOT / "deploy/compose.yaml"
_BASE = Path(__file__).with_name("base.Dockerfile")
_OF_THE_MACHINE = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf", "/etc/uv/uv.toml")
"""How this machine reaches its package indexes; a build sees them, an image does not keep them."""


def images() -> dict[str, list[str]]:
    """Image to the options that it is built with, as deploy/compose.yaml says."""
    services = yaml.safe_load(COMPOSE.read_text())["services"].values()
    return {service["image"]: _options(service["build"]) for service in services if "build" in service}


def _options(build: dict[str, dict[str, str]]) -> list[str]:
    arguments = [f"--build-arg={name}={value}" for name, value in build.get("args", {}).items()]
    return [f"--file={ROOT / str(build['dockerfile'])}", *arguments]


def build(report: Callable[[str], None], only: str = "") -> None:
    """Builds every image whose name contains `only`, one after another: minutes and gigabytes each.

    Raises:
        subprocess.CalledProcessError: a build failed; the engine's own words are on standard error.
    """
    for image, options in images().items():
        if only in image:
            _ensure_base(options[0].removeprefix("--file="), report)
            report(f"building {image}")
            _build(image, *options, *_machine(), str(ROOT))
            report(f"built {image}, {size(image) / 1e6:.0f} MB")


def size(image: str) -> int:
    """Bytes of all layers of an image."""
    return int(podman("image", "inspect", "--format={{.Size}}", image).stdout)


def _build(image: str, *options: str) -> None:
    command = ["nice", "-n", "19", "podman", "build", "--layers", "--tag", image, *options]
    subprocess.run(command, env=environment(), check=True)


def _machine() -> list[str]:
    if not Path("/etc/uv/uv.toml").exists():
        (FOLDER / "uv.toml").write_text("system-certs = true\n")
        certificates = [f"--volume={FOLDER}/uv.toml:/etc/uv/uv.toml:ro"]
    else:
        certificates = []
    return certificates + [f"--volume={path}:{path}:ro" for path in _OF_THE_MACHINE if Path(path).exists()]


def _ensure_base(dockerfile: str, report: Callable[[str], None]) -> None:
    """Makes a stand-in for the image that a Dockerfile stands on, unless it is there: `podman pull` gets it."""
    (base,) = set(re.findall(r"(?m)^FROM (\S+)", Path(dockerfile).read_text()))
    if exists(base):
        return
    report(f"no {base} here: making a stand-in from Debian's packages")
    folder = FOLDER / "base"
    folder.mkdir(parents=True, exist_ok=True)
    suite = base.rpartition("-")[2]
    command = ["nice", "-n", "19", "debootstrap", "--variant=minbase", suite, str(folder / "root.tar")]
    subprocess.run([*command[:-1], str(folder / "root")], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["tar", "-C", folder / "root", "-cf", folder / "root.tar", "."], check=True)
    subprocess.run(["rm", "-r", folder / "root"], check=True)
    _build(base, f"--file={_BASE}", str(folder))
