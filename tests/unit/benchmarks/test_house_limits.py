"""House limits are in one file and may only fall: `python -m benchmarks.house --list` shows each figure's causes."""

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.house import Figure, House, figures

ROOT = Path(__file__).parents[3]
LIMITS = "tools/benchmarks/house_limits.json"
EARLIER = "benchmarks/house_limits.json"
"""The path of the limits before the tools moved to a folder of their own."""
MOST: dict[str, float] = json.loads((ROOT / LIMITS).read_text())


def risen(older: dict[str, float], newer: dict[str, float]) -> list[str]:
    """Returns the limits that the newer version raised or dropped."""
    return [name for name, limit in older.items() if newer.get(name, float("inf")) > limit]


@pytest.fixture(scope="module")
def found() -> dict[str, Figure]:
    return figures(House.of(None))


@pytest.mark.parametrize("name", [name for name in MOST if not name.startswith("prose_")])
def test_no_figure_exceeds_its_limit(found: dict[str, Figure], name: str) -> None:
    figure = found[name]
    assert figure.value <= MOST[name], "\n".join([f"{figure.value:g} {figure.unit}", *figure.behind])


def test_no_commit_raises_a_limit() -> None:
    """Compares every committed version of the limits, as far back as this clone's history goes, with the next one."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git history here")
    commits = _git("log", "--format=%H", "--diff-filter=AM", "--", LIMITS, EARLIER).split()
    versions = [_limits_of(commit) for commit in reversed(commits)]
    assert not [found for older, newer in pairwise([*versions, MOST]) for found in risen(older, newer)]


def test_a_raised_or_dropped_limit_is_found() -> None:
    assert risen({"circles": 0, "core_files": 287}, {"circles": 1}) == ["circles", "core_files"]
    assert risen({"circles": 1}, {"circles": 0, "gateway_rooms": 24}) == []


def _limits_of(commit: str) -> dict[str, float]:
    path = LIMITS if _git("ls-tree", "--name-only", commit, LIMITS) else EARLIER
    limits: dict[str, float] = json.loads(_git("show", f"{commit}:{path}"))
    return limits


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
