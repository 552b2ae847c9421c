"""A recipe's run: its commands, its end, and its start state."""

import dataclasses
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cookbook import recipe as recipes
from cookbook.criterion import Falls
from cookbook.environments import Environment
from cookbook.page import PAGE, with_tables
from cookbook.recipe import Recipe, Replaced, Situation
from cookbook.recipes import RECIPES
from cookbook.running import Result, Run
from cookbook.suite import UnknownRecipe, select
from cookbook.workplace import lay_out
from fovea_conformance.checks.cookbook import without_own_settings

WRITES = """
import json, pathlib, sys
told = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(told["log-path"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "metrics.jsonl").write_text("".join(json.dumps({"loss": loss}) + chr(10) for loss in (3, 2, 1)))
"""


@dataclasses.dataclass(frozen=True)
class Here(Environment):
    """The tests' interpreter in place of a client environment's."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)


@pytest.fixture
def here(tmp_path: Path) -> Situation:
    return Situation("0.0.0", "http://127.0.0.1:1", "tiny", "renderer", tmp_path)


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Recipe:
    monkeypatch.setattr(recipes, "_PROGRAMS", "programs_of_tests")
    monkeypatch.setattr(recipes, "_HOME", tmp_path)
    (tmp_path / "programs_of_tests").mkdir(exist_ok=True)
    (tmp_path / "programs_of_tests/program.py").write_text(text)
    return Recipe("mine", ("C1",), None, {}, (Falls("loss", to=0.5),), program="program")


def execute(recipe: Recipe, here: Situation, timeout_s: float = 60.0, **more: Any) -> Result:
    stopped = more.get("stopped", threading.Event())
    return Run(recipe, here, Here("0.0.0", "3"), "tml-key", timeout_s, stopped).execute(lambda steps: None)


def test_a_run_is_judged_by_what_it_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Situation) -> None:
    result = execute(program(tmp_path, monkeypatch, WRITES), here)
    assert result.ok
    assert (result.steps, result.first, result.last) == (3, 3.0, 1.0)
    assert result.row()["checks"] == ["C1"]


def test_a_program_that_fails_shows_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Situation
) -> None:
    result = execute(program(tmp_path, monkeypatch, WRITES + "\nraise SystemExit('no such planet')"), here)
    assert not result.ok
    assert result.detail.startswith("ended with code 1; the end of ")
    assert result.detail.endswith("no such planet")


def test_a_program_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Situation) -> None:
    result = execute(program(tmp_path, monkeypatch, "import time; time.sleep(600)"), here, timeout_s=1.0)
    assert not result.ok
    assert result.detail.startswith("took longer than 1 s")
    stopped = threading.Event()
    stopped.set()
    result = execute(program(tmp_path, monkeypatch, "import time; time.sleep(600)"), here, stopped=stopped)
    assert result.detail.startswith("was stopped")


def test_a_program_sees_the_key_and_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Situation) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    seen = "TINKER_API_KEY", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "PYTHONPATH"
    text = f"import os, sys; sys.exit(repr([os.environ.get(name) for name in {seen}]))"
    detail = execute(program(tmp_path, monkeypatch, text), here).detail
    assert detail.endswith(f"['tml-key', '1', '1', {str(tmp_path)!r}]")


def test_loops_that_only_resume_find_the_checkpoint_of_the_recipe_before(here: Situation) -> None:
    loop = next(one for one in RECIPES if one.name == "rl_loop")
    result = execute(loop, here)
    assert result.detail == "sl_loop_start saved no checkpoint to start from"
    left = here.log_folder("sl_loop_start")
    left.mkdir(parents=True)
    saved = [{"name": "6", "state_path": "tinker://a"}, {"name": "final", "batch": 20, "state_path": "tinker://b"}]
    (left / "checkpoints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in saved))
    loop.prepare(here)
    record = json.loads((here.log_folder("rl_loop") / "checkpoints.jsonl").read_text())
    assert (record["batch"], record["state_path"]) == (0, "tinker://b")
    (command,) = loop.commands(here)
    assert command.module == "tinker_cookbook.recipes.rl_loop"
    assert f"log_path={here.log_folder('rl_loop')}" in command.arguments
    assert not any(word.startswith("loss_fn=") for word in command.arguments)
    (newer,) = loop.commands(dataclasses.replace(here, version="0.6.1"))
    assert newer.arguments == command.arguments


def test_a_setting_that_is_replaced_is_told_with_the_run(here: Situation) -> None:
    runs = {one.name: one for one in RECIPES}
    assert execute(runs["rl_loop"], dataclasses.replace(here, version="0.6.1")).replaced == []
    (told,) = execute(runs["rl_train_substeps"], dataclasses.replace(here, version="0.6.1")).replaced
    assert told == "num_substeps=2 instead of 1 (C118 is about substeps)"


@pytest.mark.parametrize("recipe", [one for one in RECIPES if one.program and not one.after], ids=lambda one: one.name)
def test_a_client_environment_finds_our_programs(recipe: Recipe, here: Situation) -> None:
    """It has no packages of Fovea, so it imports them from the command's path."""
    command = recipe.commands(here)[-1]
    assert command.path is not None
    assert (command.path / command.module.replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.parametrize("name", ["loss_fn", "temperature", "top_p"])
def test_no_recipe_runs_with_another_loss_or_sampling(name: str) -> None:
    """A changed loss would hide that Fovea refuses the script's own, as happened before."""
    with pytest.raises(ValueError, match=f"mine replaces .'{name}'.: recipes run with their own loss and sampling"):
        Recipe("mine", ("C1",), "a.module", {}, (), replaces={name: Replaced("ppo", {"0.6.1": "own"}, "why")})


def test_no_recipe_replaces_a_setting_without_saying_so() -> None:
    with pytest.raises(ValueError, match=r"mine replaces \['loss_fn'\] but"):
        Recipe("mine", ("C1",), "a.module", {"batch_size": 1, "loss_fn": "ppo"}, ())


def test_the_page_has_the_tables_of_recipes() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "python -m cookbook.page"


def test_c117_counts_runs_with_the_recipes_own_settings_alone() -> None:
    other = ["loss_fn=ppo in the place of own (why)"]
    rows: list[dict[str, Any]] = [
        {"recipe": "sl_loop", "version": "1", "replaced": []},
        {"recipe": "rl_loop", "version": "1", "replaced": []},
        {"recipe": "rl_loop", "version": "2", "replaced": other},
        {"recipe": "variant", "version": "2", "replaced": other},
    ]
    assert without_own_settings(rows) == ["rl_loop 2 passed only with loss_fn=ppo in the place of own (why)"]
    assert without_own_settings(rows[:2]) == []


def test_a_recipe_brings_the_one_it_starts_from() -> None:
    assert [one.name for one in select(["dpo", "rl_loop"])] == ["sl_loop_start", "rl_loop", "dpo"]
    assert select([]) == list(RECIPES)
    with pytest.raises(UnknownRecipe, match="unknown recipe sl_lop; choose from sl_loop, sl_loop_start, rl_loop"):
        select(["sl_lop"])


def test_the_folder_has_what_the_recipes_name(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    folder = tmp_path / "work"
    lay_out(folder, "Qwen/Tiny", tokenizer)
    assert (folder / "Qwen/Tiny").resolve() == tokenizer
    for name in ("HuggingFaceH4/no_robots", "Anthropic/hh-rlhf", "openai/gsm8k/main", "tangqiaoyu/ToolAlpaca"):
        assert json.loads((folder / name / "train.jsonl").read_text().splitlines()[0])
    assert any((folder / "dpdl-benchmark/caltech101/train").glob("*/*.jpg"))
    lay_out(folder, "Qwen/Tiny", None)
    assert not (folder / "Qwen").exists()
