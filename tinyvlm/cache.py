"""Built models on disk: one directory a recipe, built once, by one process."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from tinyvlm.recipe import Kind, Recipe, default_recipe

logger = logging.getLogger(__name__)

_VERSIONS_THAT_MATTER = ("torch", "torchvision", "transformers", "tokenizers", "numpy")


def cache_directory() -> Path:
    """`$FOVEA_CACHE`, else `~/.cache/fovea`."""
    return Path(os.environ.get("FOVEA_CACHE") or Path.home() / ".cache" / "fovea")


def fingerprint(recipe: Recipe) -> str:
    """16 hexadecimal digits over the recipe, this package's sources and the libraries' versions."""
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    package = Path(__file__).parent
    for path in sorted([*package.glob("*.py"), *package.glob("chat_templates/*.jinja"), package / "words.txt"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for name in _VERSIONS_THAT_MATTER:
        digest.update(f"{name}=={version(name)}\n".encode())
    return digest.hexdigest()[:16]


def ensure(kind: Kind = "qwen3_vl", seed: int = 0) -> Path:
    """The directory of the tiny model of `kind`; builds it on the first call, which takes up to a minute.

    Safe to call from several processes at once: one builds, the others wait for it.
    """
    return ensure_recipe(default_recipe(kind, seed))


def ensure_recipe(recipe: Recipe) -> Path:
    """`ensure` for any recipe."""
    parent = cache_directory()
    directory = parent / f"tiny-{recipe.kind}-{fingerprint(recipe)}"
    # The name appears by an atomic rename, so a directory that exists is complete.
    if directory.exists():
        return directory
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent / f"{directory.name}.lock"):
        if not directory.exists():
            _build_into(recipe, directory)
    return directory


def _build_into(recipe: Recipe, directory: Path) -> None:
    # torch and transformers take seconds to import: a cache hit should not pay for them.
    from tinyvlm.build import build

    logger.info("building the tiny %s once, into %s", recipe.kind, directory)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        build(recipe, unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # Released by the kernel when the holder dies, unlike a file whose mere existence is the lock.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
