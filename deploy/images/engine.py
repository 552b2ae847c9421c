"""Runs podman as root on a machine that is itself a container, with the settings that this needs."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from fovea_tinyvlm.cache import cache_directory

ROOT = Path(__file__).parents[2]
FOLDER = cache_directory() / "images"
PACKAGES = "podman runc netavark aardvark-dns catatonit debootstrap"
NICE = ("nice", "-n", "19")
_COMMANDS = ("podman", "runc", "debootstrap")
_COMPOSE_VERSION = "1.6.0"
_MOST_PROCESSES = 16_384
_STORAGE = Path("/var/lib")
_BUILD_BYTES = 40 * 10**9
"""Largest disk use seen in a build: an image of 7 GB is copied four times before it is stored."""


def missing() -> str:
    """Returns why images cannot be built or run here, and the fix; empty if they can."""
    if os.geteuid():
        return "building images needs root"
    if absent := [command for command in _COMMANDS if not shutil.which(command)]:
        return f"{', '.join(absent)} missing: apt-get install --no-install-recommends {PACKAGES}"
    return ""


def no_room() -> str:
    """Returns how much disk space must be freed before a build; empty if there is enough."""
    free = shutil.disk_usage(_STORAGE).free
    if free >= _BUILD_BYTES:
        return ""
    return (
        f"only {free / 1e9:.0f} GB are free under {_STORAGE}, a build needs {_BUILD_BYTES / 1e9:.0f} GB; run: "
        "podman image prune"
    )


def environment() -> dict[str, str]:
    """Returns the environment of podman and podman-compose.

    podman's default limit of a million open files needs CAP_SYS_RESOURCE. crun rejects a machine with both cgroup
    versions; runc accepts it.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = FOLDER / "containers.conf"
    limits = f'["nofile={files}:{files}", "nproc={_MOST_PROCESSES}:{_MOST_PROCESSES}"]'
    settings.write_text(f'[containers]\ndefault_ulimits = {limits}\n[engine]\nruntime = "runc"\n')
    return os.environ | {"CONTAINERS_CONF": str(settings)}


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs podman at low priority and captures its standard output.

    Raises:
        subprocess.CalledProcessError: It failed and `check` is true; its error output is on standard error.
    """
    command = [*NICE, "podman", *arguments]
    return subprocess.run(command, env=environment(), check=check, stdout=subprocess.PIPE, text=True)


def exists(image: str) -> bool:
    """Returns whether an image is in local storage."""
    return podman("image", "exists", image, check=False).returncode == 0


def compose(project: str, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs podman-compose on deploy/compose.yaml and captures its standard output. Downloads the tool on first use.

    Raises:
        subprocess.CalledProcessError: It failed; its error output is on standard error.
    """
    tool = [
        str(Path(sys.executable).with_name("uv")),
        "tool",
        "run",
        "--quiet",
        "--from",
        f"podman-compose=={_COMPOSE_VERSION}",
        "podman-compose",
    ]
    command = [*NICE, *tool, "--file", str(ROOT / "deploy/compose.yaml"), "--project-name", project]
    return subprocess.run(
        [*command, *arguments], env=environment() | variables, check=True, stdout=subprocess.PIPE, text=True
    )
