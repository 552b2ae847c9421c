"""podman as it must be told to run as root on a machine that is itself a container: its settings, and its commands."""

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
"""Most that was seen in use: an image of 7 GB is copied four times until it is stored."""


def missing() -> str:
    """What keeps images from being built or run here and what to do about it; empty where nothing does."""
    if os.geteuid():
        return "images are built as root"
    if absent := [command for command in _COMMANDS if not shutil.which(command)]:
        return f"{', '.join(absent)} missing: apt-get install --no-install-recommends {PACKAGES}"
    return ""


def no_room() -> str:
    """What is to be made free before images are built; empty where there is room."""
    free = shutil.disk_usage(_STORAGE).free
    if free >= _BUILD_BYTES:
        return ""
    return f"{free / 1e9:.0f} GB free under {_STORAGE}, building takes {_BUILD_BYTES / 1e9:.0f}: podman image prune"


def environment() -> dict[str, str]:
    """Variables under which podman and podman-compose run.

    podman asks for a million open files by default, which needs CAP_SYS_RESOURCE, and crun refuses a machine with both
    versions of cgroups, which runc takes.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = FOLDER / "containers.conf"
    limits = f'["nofile={files}:{files}", "nproc={_MOST_PROCESSES}:{_MOST_PROCESSES}"]'
    settings.write_text(f'[containers]\ndefault_ulimits = {limits}\n[engine]\nruntime = "runc"\n')
    return os.environ | {"CONTAINERS_CONF": str(settings)}


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs podman at low priority, its standard output captured.

    Raises:
        subprocess.CalledProcessError: it failed and `check`; its own words are on standard error.
    """
    command = [*NICE, "podman", *arguments]
    return subprocess.run(command, env=environment(), check=check, stdout=subprocess.PIPE, text=True)


def exists(image: str) -> bool:
    """Whether an image is in local storage."""
    return podman("image", "exists", image, check=False).returncode == 0


def compose(project: str, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs podman-compose on deploy/compose.yaml, its standard output captured; fetched at its first use.

    Raises:
        subprocess.CalledProcessError: it failed; its own words are on standard error.
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
