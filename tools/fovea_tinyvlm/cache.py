"""Caches built models on disk: one directory per recipe, which one process builds once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from fovea_tinyvlm.recipe import Kind, Recipe, default_recipe

logger = logging.getLogger(__name__)

VERSIONS_THAT_MATTER = ("torch", "torchvision", "transformers", "tokenizers", "numpy")


def cache_directory() -> Path:
    """Returns `$FOVEA_CACHE`, or `~/.cache/fovea` if it is not set."""
    return Path(os.environ.get("FOVEA_CACHE") or Path.home() / ".cache" / "fovea")


def fingerprint(recipe: Recipe) -> str:
    """Returns 16 hexadecimal digits of a hash of the recipe, this package's sources and the libraries' versions."""
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    package = Path(__file__).parent
    for path in sorted([*package.glob("*.py"), *package.glob("chat_templates/*.jinja"), package / "words.txt"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for name in VERSIONS_THAT_MATTER:
        digest.update(f"{name}=={version(name)}\n".encode())
    return digest.hexdigest()[:16]


def ensure(kind: Kind = "qwen3_vl", seed: int = 0) -> Path:
    """Returns the directory of the tiny model of `kind`. The first call builds it, which takes up to a minute.

    Several processes may call it at once: one builds, the others wait for it.

    Raises:
        RuntimeError: The build failed; its output is on standard error.
    """
    return ensure_recipe(default_recipe(kind, seed))


def ensure_recipe(recipe: Recipe) -> Path:
    """Returns the directory of the model of any recipe, like `ensure`."""
    parent = cache_directory()
    directory = parent / f"tiny-{recipe.kind}-{fingerprint(recipe)}"
    # A build ends with an atomic rename to this name, so a directory that exists is complete.
    if directory.exists():
        return directory
    parent.mkdir(parents=True, exist_ok=True)
    with locked(parent / f"{directory.name}.lock"):
        if not directory.exists():
            _build_into(recipe, directory)
    return directory


def _build_into(recipe: Recipe, directory: Path) -> None:
    logger.info("building the tiny %s once, into %s", recipe.kind, directory)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    # The build runs in a separate process for three reasons. Threads that spin while they wait take minutes if other
    # processes need the same cores, and only environment variables at start-up prevent that. The thread count and the
    # random state of the caller stay unchanged. And a caller that has never used OpenMP can still fork an engine.
    waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": str(recipe.thread_count)}
    source_root = str(Path(__file__).parent.parent)
    python_path = os.pathsep.join([source_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "fovea_tinyvlm.build", json.dumps(asdict(recipe)), str(unfinished)]
    try:
        completed = subprocess.run(command, env=os.environ | waiting | {"PYTHONPATH": python_path}, check=False)
        if completed.returncode != 0:
            raise RuntimeError(f"building the tiny {recipe.kind} failed with exit status {completed.returncode}")
        unfinished.chmod(0o755)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # The kernel releases this lock when its holder dies. A lock that consists of a file's existence would remain.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
