"""Caches built families on disk; each is built once."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from fovea_tinyvlm.cache import VERSIONS_THAT_MATTER, cache_directory, ensure, locked
from fovea_tinyvlm.recipe import KINDS

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]


def ensure_family(name: str, seed: int = 0) -> Path:
    """Returns the directory of a tiny family. `qwen3_vl`, `qwen2_5_vl` and `qwen3` come from `fovea_tinyvlm.ensure`.

    Several processes may call it at once: one builds, the others wait.

    Raises:
        RuntimeError: The build failed; its output is on standard error.
    """
    if name in KINDS:
        return ensure(name, seed)
    return ensure_families([name], seed)[name]


def ensure_families(names: Sequence[str], seed: int = 0) -> dict[str, Path]:
    """Returns the directories of several families of `FAMILIES`.

    One process builds missing ones in about ten seconds.
    """
    parent = cache_directory()
    print_of_sources = _fingerprint()
    directories = {name: parent / f"family-{name}-{seed}-{print_of_sources}" for name in names}
    if all(directory.exists() for directory in directories.values()):
        return directories
    parent.mkdir(parents=True, exist_ok=True)
    with locked(parent / f"families-{print_of_sources}.lock"):
        missing = {name: directory for name, directory in directories.items() if not directory.exists()}
        if missing:
            _build(missing, seed, parent)
    return directories


def _build(missing: dict[str, Path], seed: int, parent: Path) -> None:
    logger.info("building %s once, into %s", ", ".join(missing), parent)
    unfinished = Path(tempfile.mkdtemp(prefix=".families-", dir=parent))
    # Built in a separate process for the reasons in fovea_tinyvlm.cache.
    waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}
    python_path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "fovea_tinyvlm.families.build", str(unfinished), str(seed), *missing]
    try:
        completed = subprocess.run(command, env=os.environ | waiting | {"PYTHONPATH": python_path}, check=False)
        if completed.returncode != 0:
            raise RuntimeError(f"building {', '.join(missing)} failed with exit status {completed.returncode}")
        for name, directory in missing.items():
            (unfinished / name).rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fingerprint() -> str:
    """Returns 16 hexadecimal digits of a hash of the sources and the libraries' versions."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    sources = [*package.glob("*.py"), *(package.parent / name for name in ("curriculum.py", "prose.py", "words.txt"))]
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for name in VERSIONS_THAT_MATTER:
        digest.update(f"{name}=={version(name)}\n".encode())
    return digest.hexdigest()[:16]
