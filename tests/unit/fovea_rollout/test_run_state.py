"""The file from which a killed run resumes, and its logged figures."""

import json
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_rollout.loop.loggers import JsonLinesLogger, open_loggers
from fovea_rollout.loop.run_state import RunState

IDENTITY = {"model": "tiny", "epochs": 3, "betas": (0.9, 0.95)}


def test_a_state_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    state = RunState.begin_or_resume(tmp_path / "state.json", IDENTITY)
    assert (state.step, state.state) == (0, "")
    state.step, state.state = 30, "tinker://a/weights/b"
    state.save(tmp_path / "state.json")
    assert RunState.begin_or_resume(tmp_path / "state.json", IDENTITY) == state
    assert RunState.read(tmp_path / "state.json") == state


def test_two_checkpoints_have_the_name_in_turn() -> None:
    state = RunState({})
    names = []
    for _ in range(3):
        names.append(state.next_name)
        state.state = f"tinker://a/weights/{state.next_name}"
    assert names == ["resume-odd", "resume-even", "resume-odd"]


def test_a_run_of_other_settings_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    RunState.begin_or_resume(tmp_path / "state.json", IDENTITY).save(tmp_path / "state.json")
    with pytest.raises(InvalidInput, match="to a run with epochs 3, not 4: give another folder"):
        RunState.begin_or_resume(tmp_path / "state.json", {**IDENTITY, "epochs": 4})


@pytest.mark.parametrize("text", ["", "\n", "{", "[]", '{"step": 3}', '{"identity": {}, "step": "3"}', '{"other": 1}'])
def test_a_file_that_no_run_wrote_is_refused_by_name(text: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    said = "cannot be read" if text.strip() else "is empty"
    with pytest.raises(InvalidInput, match=f"^{path} {said}.*: restore the file to resume the run, or give another"):
        RunState.begin_or_resume(path, IDENTITY)


def test_entries_that_are_known_later_are_confirmed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.json"
    state = RunState.begin_or_resume(path, IDENTITY, later=("rows",))
    state.confirm(path, {"rows": "3 rows, a"})
    state.save(path)
    resumed = RunState.begin_or_resume(path, IDENTITY, later=("rows",))
    resumed.confirm(path, {"rows": "3 rows, a"})
    with pytest.raises(InvalidInput, match="to a run with rows '3 rows, a', not '3 rows, b'"):
        resumed.confirm(path, {"rows": "3 rows, b"})


def test_figures_of_steps_that_are_taken_again_are_dropped(tmp_path: pathlib.Path) -> None:
    first = JsonLinesLogger(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        first.log(step, {"loss": 1 / step})
    first.close()
    with first.path.open("a") as file:
        file.write('{"step": 4, "lo')  # a kill during the write
    second = JsonLinesLogger(tmp_path / "metrics.jsonl", 2)
    second.log(3, {"loss": 0.25})
    assert [(row["step"], row["loss"]) for row in second.rows()] == [(1, 1.0), (2, 0.5), (3, 0.25)]
    second.close()


class Board:
    """Replaces TensorBoard's writer, which is not installed for tests."""

    def __init__(self, folder: str) -> None:
        self.folder, self.rows, self.is_closed = pathlib.Path(folder), list[tuple[str, float, int]](), False
        boards.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))

    def close(self) -> None:
        self.is_closed = True


boards: list[Board] = []


def test_tensorboard_gets_every_figure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = types.ModuleType("tensorboard.summary")
    board.Writer = Board  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", board)
    (logger,) = open_loggers(["tensorboard"], tmp_path)
    logger.log(3, {"loss": 0.5, "learning_rate": 1e-3})
    logger.close()
    assert boards[-1].rows == [("loss", 0.5, 3), ("learning_rate", 1e-3, 3)]
    assert boards[-1].is_closed
    assert boards[-1].folder == tmp_path / "tensorboard"


class Kept:
    """A custom logger."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def test_loggers_of_ones_own_are_taken(tmp_path: pathlib.Path) -> None:
    mine = Kept()
    assert open_loggers([mine], tmp_path) == [mine]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_refused(
    name: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FailedPrecondition, match=f"logger '{name}' needs its package: pip install {name}"):
        open_loggers([name], tmp_path)


def test_an_unknown_logger_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidInput, match=r"logger 'paper' is unknown; use \['mlflow', 'tensorboard', 'wandb'\]"):
        open_loggers(["paper"], tmp_path)  # type: ignore[list-item]


def test_a_state_is_plain_json(tmp_path: pathlib.Path) -> None:
    RunState.begin_or_resume(tmp_path / "state.json", IDENTITY).save(tmp_path / "state.json")
    assert json.loads((tmp_path / "state.json").read_text())["identity"]["betas"] == [0.9, 0.95]
