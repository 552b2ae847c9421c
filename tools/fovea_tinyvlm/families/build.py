"""Builds families into PARENT/NAME: `python -m fovea_tinyvlm.families.build PARENT SEED NAME...`."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from fovea_tinyvlm.families.registry import build_family

if __name__ == "__main__":
    disable_progress_bar()
    for name in sys.argv[3:]:
        build_family(name, Path(sys.argv[1], name), int(sys.argv[2]))
