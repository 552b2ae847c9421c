"""What a check finds, and how checks run by themselves: in a process whose end, however bad, is a finding too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_MOST_S = 300
"""Seconds for one part of one checkpoint."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        part: What was looked at: `renderer`, `trainer`, `sampler`, or all of them `served`.
        works: Whether it agrees with the checkpoint's own code.
        says: One line: what agreed, or why not.
        figures: What was measured, by name.
    """

    part: str
    works: bool
    says: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_line(self) -> str:
        """JSON without line feeds, for `run_apart`."""
        return _MARK + json.dumps(asdict(self))


_MARK = "finding: "


def run_apart(part: str, directories: Sequence[Path]) -> list[Finding]:
    """Runs one part's check on checkpoints, one after another in a process of its own.

    If that ends early, the checkpoint that it was at does not work, and another process goes on after it.
    """
    found: list[Finding] = []
    while len(found) < len(directories):
        found += _run_some(part, directories[len(found) :])
    return found


def _run_some(part: str, directories: Sequence[Path]) -> list[Finding]:
    waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", "fovea_parity.parts", part, *map(str, directories)]
    most_s = _MOST_S * len(directories)
    try:
        ended = subprocess.run(
            command, env=os.environ | waiting, capture_output=True, text=True, timeout=most_s, check=False
        )
    except subprocess.TimeoutExpired:
        return [Finding(part, False, f"took more than {most_s} s") for _ in directories]
    lines = [line.removeprefix(_MARK) for line in ended.stdout.splitlines() if line.startswith(_MARK)]
    found = [Finding(**json.loads(line)) for line in lines]
    if len(found) < len(directories):
        said = last_line(ended.stderr) or "nothing"
        found.append(Finding(part, False, f"the process ended with status {ended.returncode}; it said last: {said}"))
    return found


def reason(error: BaseException) -> str:
    """What an error says, on one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


def last_line(text: str) -> str:
    """The last line with words of what a process printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
