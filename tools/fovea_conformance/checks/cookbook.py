"""Section H: recipes of the real tinker-cookbook, in separate client environments."""

import functools
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from fovea_conformance.check import Failed, NotApplicable, Refused, check, expect
from fovea_conformance.target import Options, Target

_TOOLS = Path(__file__).parents[2]
_RUN_S = 3600.0
_LEAST_STEPS = 3
_WANTED = {"sl_loop", "rl_loop", "rl_train", "dpo", "sdft_topk", "vlm_classifier"}
_one_at_a_time = threading.Lock()
Row = dict[str, Any]


@functools.lru_cache(maxsize=1)
def _results(options: Options) -> list[Row]:
    """Runs all recipes once for all checks; returns their results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        told = ["--base-url", options.base_url, "--api-key", options.api_key, "--model", options.model]
        told += ["--tokenizer", options.checkpoint] if options.checkpoint else []
        done = subprocess.run(
            [sys.executable, "-m", "cookbook", *told, "--json", str(file)],
            cwd=_TOOLS, capture_output=True, text=True, timeout=_RUN_S, check=False,
        )  # fmt: skip
        if not file.exists():
            raise Failed(f"`python -m cookbook` exits with {done.returncode}: {(done.stderr or done.stdout)[-400:]}")
        rows: list[Row] = json.loads(file.read_text())
        return rows


def rows_for(target: Target, check_id: str) -> list[Row]:
    """Returns the runs for a check. Raises Failed unless all of them succeeded."""
    if not target.options.cookbook:
        raise NotApplicable("runs recipes in environments of their own: pass --cookbook")
    if not (_TOOLS / "cookbook" / "__main__.py").exists():
        raise NotApplicable("needs the folder tools/cookbook of Fovea's repository")
    with _one_at_a_time:
        rows = [row for row in _results(target.options) if check_id in row["checks"]]
    if reasons := [row for row in rows if row["detail"].startswith("not applicable")]:
        raise NotApplicable(f"{reasons[0]['recipe']}: {reasons[0]['detail'].removeprefix('not applicable: ')}")
    bad = [f"{row['recipe']} with {row['version']}: {row['detail'][:200]}" for row in rows if not row["ok"]]
    expect(not bad, "; ".join(bad))
    expect(bool(rows), f"no recipe covers {check_id}")
    return rows


def _told(rows: list[Row]) -> str:
    return "; ".join(f"{row['recipe']} {row['version']}: {_figures(row)}" for row in rows)


def _figures(row: Row) -> str:
    return f"{row['first']:.3g} to {row['last']:.3g} in {row['steps']}" if row["first"] is not None else row["detail"]


@check(
    "C117", "sl_loop, rl_loop, train_dpo, sdft top-k, vlm_classifier run 3 steps with the real cookbook", timeout_s=3700
)
def c117_recipes(target: Target) -> str:
    """Runs each recipe with its own loss and sampling in each version of the cookbook; checks the metrics it logs.

    A run that replaces another setting than sizes and local data is shown but does not count.
    """
    rows = rows_for(target, "C117")
    missing = _WANTED - {row["recipe"] for row in rows}
    expect(not missing, f"no run of {sorted(missing)}")
    short = [f"{row['recipe']}: {row['steps']}" for row in rows if row["steps"] < _LEAST_STEPS]
    expect(not short, f"fewer than {_LEAST_STEPS} steps: {short}")
    if uncounted := without_own_settings(rows):
        raise Refused(
            f"{'; '.join(uncounted)}. With their own settings: {_told([r for r in rows if not r['replaced']])}"
        )
    return _told(rows)


def without_own_settings(rows: list[Row]) -> list[str]:
    """Returns the recipes and versions that passed only with replaced settings, and those settings."""
    own = {(row["recipe"], row["version"]) for row in rows if not row["replaced"]}
    return [
        f"{row['recipe']} {row['version']} passed only with {', '.join(row['replaced'])}"
        for row in rows
        if row["recipe"] in _WANTED and (row["recipe"], row["version"]) not in own
    ]


@check("C118", "rl train with pipelined substeps gives the same weights as sequential", timeout_s=3700)
def c118_pipelined(target: Target) -> str:
    """Compares two pairs of requests in flight with the same pairs one after another.

    The recipe with substeps must learn.
    """
    rows = rows_for(target, "C118")
    expect(any(row["recipe"] == "pipelined_substeps" for row in rows), "no run compared the weights")
    return _told(rows)


@check("C119", "compare_sampling_training_logprobs reports a mean squared error below tolerance", timeout_s=3700)
def c119_agreement(target: Target) -> str:
    """Runs the cookbook's comparison. The tolerance is the recipe's, in tools/cookbook/recipes.py."""
    rows = rows_for(target, "C119")
    expect(any(row["recipe"] == "sampling_training_logprobs" for row in rows), "no run compared the logprobs")
    return _told(rows)
