"""The measurement of recipes keeps the recipes' own settings."""

import json
from pathlib import Path

import pytest

from benchmarks.recipes import VERSION, RunFailed, curve_of, measured_by, planned
from cookbook.recipe import Situation
from cookbook.recipes import RECIPES
from cookbook.running import Result


def result(steps: int, detail: str = "") -> Result:
    return Result("rl_loop", VERSION, "3.12", [], steps, None, None, 1.0, False, detail)


def test_a_run_keeps_the_recipes_own_sizes() -> None:
    start, loop, run = planned({"rl_loop": 5, "rl_train_async": 7}, {"learning_rate": "1e-3"})
    assert (start.name, start.options["max_steps"]) == ("sl_loop_start", 12)
    assert loop.options == {"max_steps": 5, "learning_rate": "1e-3"}
    assert run.options["env"] == "gsm8k"
    assert run.options.keys().isdisjoint({"group_size", "groups_per_batch", "max_tokens"})
    assert run.replaces["max_steps_off_policy"].value == 4


def test_no_run_has_another_loss() -> None:
    with pytest.raises(ValueError, match=r"rl_loop replaces \['loss_fn'\]"):
        planned({"rl_loop": 5}, {"loss_fn": "ppo"})


def test_the_curve_is_the_reward_of_each_step(tmp_path: Path) -> None:
    (run,) = (one for one in planned({"rl_loop": 3}, {}) if one.name == "rl_loop")
    logs = Situation(VERSION, "", "", "", tmp_path).log_folder("rl_loop")
    logs.mkdir(parents=True)
    rows = [{"reward/total": 0.1}, {"test/reward": 1.0}, {"reward/total": 0.2}]
    (logs / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert curve_of(run, result(2), tmp_path) == [0.1, 0.2]
    with pytest.raises(RunFailed, match="rl_loop: ended with code 1"):
        curve_of(run, result(0, "ended with code 1"), tmp_path)


def test_a_listed_run_keeps_the_small_sizes_and_selects_its_data_by_seed() -> None:
    (run,) = planned({}, {}, ["vlm_classifier"], seed=2)
    listed = next(one for one in RECIPES if one.name == "vlm_classifier")
    assert run.options == listed.options | {"subset_seed": 2}
    assert measured_by(run).metric == "accuracy"
    start, distilled = planned({}, {"learning_rate": "1e-3"}, ["sdft_reverse_kl"])
    assert (start.name, start.options["learning_rate"]) == ("prompt_distillation", 3e-3)
    assert (distilled.options["learning_rate"], distilled.options["groups_per_batch"]) == ("1e-3", 9)


def test_a_run_with_rewards_is_measured_by_them() -> None:
    assert measured_by(planned({"rl_train": 3}, {})[-1]).metric == "env/all/correct"
