"""The results of checks, and their execution in separate processes, so that a crash is a result too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_MOST_S = 300
"""The most seconds for checking one component with one checkpoint."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        part: The checked component: `renderer`, `trainer`, `sampler`, or `served` for all of them together.
        works: True if it agrees with the checkpoint's own code.
        says: One line that states what agrees, or the problem.
        figures: The measured values, by their names.
    """

    part: str
    works: bool
    says: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_line(self) -> str:
        """Returns the finding as one line of JSON with a mark, for `run_apart`."""
        return _MARK + json.dumps(asdict(self))


_MARK = "finding: "


def run_apart(part: str, directories: Sequence[Path]) -> list[Finding]:
    """Runs the check of one component on several checkpoints, in order, in a separate process.

    If the process ends early, the current checkpoint does not work, and a new process continues with the next one.
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
        found.append(Finding(part, False, f"the process ended with status {ended.returncode}; its last line: {said}"))
    return found


def reason(error: BaseException) -> str:
    """Returns the type and the message of an error, on one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


def last_line(text: str) -> str:
    """Returns the last line that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
