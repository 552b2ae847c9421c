"""Runs one check on each checkpoint: `python -m fovea_parity.parts PART DIR...`. Prints findings as lines of JSON."""

from __future__ import annotations

import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path

from fovea.runtime.processes import importing
from fovea_parity.finding import Finding, reason

PARTS = ("renderer", "trainer", "sampler")


def run_part(part: str, directory: Path) -> Finding:
    """Runs one check. If it raises an error, the finding is that the component does not work."""
    try:
        with importing("sklearn"):  # transformers imports it for generation, which takes a second
            module = import_module(f"fovea_parity.{part}_part")
        finding: Finding = module.check(directory)
    except Exception as error:
        traceback.print_exc()
        return Finding(part, False, reason(error))
    return finding


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _, part, *folders = sys.argv
    del sys.argv[1:]  # the services' settings read the command line
    for folder in folders:
        print(run_part(part, Path(folder)).to_line(), flush=True)
