"""Builds a tiny model: `python -m fovea_tinyvlm [--kind NAME] [--out DIR] [--seed N] [--list]`.

The families are imported only if one is asked for: that takes ten seconds, which each `fovea up` without a model would
wait.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path

from fovea_tinyvlm.cache import ensure
from fovea_tinyvlm.recipe import KINDS


def main() -> None:
    """Builds a model, or finds it in the cache; with --out, copies its directory there."""
    parser = argparse.ArgumentParser(
        prog="python -m fovea_tinyvlm", description="Build a tiny model to develop against."
    )
    parser.add_argument("--kind", default="qwen3_vl", help="a family of --list (default: %(default)s)")
    parser.add_argument(
        "--list", action="store_true", help="list the families and the published checkpoints that they follow"
    )
    parser.add_argument("--out", type=Path, help="copy the model to this directory, which must be empty or new")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and pictures (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.list or arguments.kind not in KINDS:
        from fovea_tinyvlm.families import FAMILIES

        if arguments.list:
            print("\n".join([*KINDS, *(f"{name:16}{family.published}".rstrip() for name, family in FAMILIES.items())]))
            return
        if arguments.kind not in FAMILIES:
            parser.error(f"--kind: {arguments.kind!r} is not one of {', '.join((*KINDS, *FAMILIES))}")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    out: Path | None = arguments.out
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"--out: {out} exists and is not an empty directory")
    if arguments.kind in KINDS:
        directory = ensure(arguments.kind, arguments.seed)
    else:
        from fovea_tinyvlm.families import ensure_family

        directory = ensure_family(arguments.kind, arguments.seed)
    if out is not None:
        shutil.copytree(directory, out, dirs_exist_ok=True)
        directory = out
    print(directory)


if __name__ == "__main__":
    main()
