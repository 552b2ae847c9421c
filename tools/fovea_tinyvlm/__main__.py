"""Builds a tiny model: `python -m fovea_tinyvlm [--kind NAME] [--out DIR] [--seed N] [--list]`."""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path

from fovea_tinyvlm.families import FAMILIES, ensure_family
from fovea_tinyvlm.recipe import KINDS


def main() -> None:
    """Builds a model, or finds it in the cache; with --out, copies its directory there."""
    parser = argparse.ArgumentParser(
        prog="python -m fovea_tinyvlm", description="Build a tiny model to develop against."
    )
    names = (*KINDS, *FAMILIES)
    parser.add_argument("--kind", choices=names, default="qwen3_vl", help="family (default: %(default)s)")
    parser.add_argument(
        "--list", action="store_true", help="list the families and the published checkpoints that they follow"
    )
    parser.add_argument("--out", type=Path, help="copy the model to this directory, which must be empty or new")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and pictures (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.list:
        for name in names:
            print(f"{name:16}{FAMILIES[name].published if name in FAMILIES else ''}".rstrip())
        return
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    out: Path | None = arguments.out
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"--out: {out} exists and is not an empty directory")
    directory = ensure_family(arguments.kind, arguments.seed)
    if out is not None:
        shutil.copytree(directory, out, dirs_exist_ok=True)
        directory = out
    print(directory)


if __name__ == "__main__":
    main()
