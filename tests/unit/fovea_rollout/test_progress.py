"""The two lines of progress output."""

import pytest

from fovea_data.fine_tune_progress import FineTuneProgress
from fovea_data.model_export import _Bars
from fovea_rollout import progress
from fovea_rollout.evaluation import Evaluation
from fovea_rollout.loop.loop_progress import LoopProgress
from fovea_rollout.loop.step_report import step_report
from fovea_rollout.loop.training_batch import TrainingBatch
from fovea_rollout.trajectory import Failure
from tests.unit.fovea_rollout.rollouts import FourTokenPictures, rollout, turn


def test_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    group = [rollout(turn([1], [2], [-1.0], 0.5)), rollout(conversation="b", failure=Failure("reset", "OSError: no"))]
    with LoopProgress(2, 2, True) as shown:
        for one in group:
            shown.count_rollout(one)
        shown.count_rollout(rollout(conversation="next", failure=Failure("reset", "OSError: no")))  # for the next step
        shown.count_rollout(rollout(conversation="d", failure=Failure("reset", "OSError: no")))
        shown.discount([rollout(conversation="d")])  # its group was cancelled
        shown.count_step(step_report(0, [group], TrainingBatch([]), [], {}, FourTokenPictures(), 1.0))
        capsys.readouterr()
        shown.count_rollout(rollout(conversation="e"))
    said = " ".join(capsys.readouterr().err.split())
    assert "1/2 reward 0.500, signal 0%, lag 0, nothing to train on, 1 failed" in said
    assert "2/2 1 failed" in said, "of the rollouts for the next step"


def test_a_rollout_that_fails_after_it_was_played_is_counted_with_its_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    group = [rollout(turn([1], [2], [-1.0], 0.5)) for _ in range(2)]
    with LoopProgress(2, 2, True) as shown:
        for one in group:
            shown.count_rollout(one)
        group[0].fail(Failure("train", "InvalidInput: refused"))
        shown.count_step(step_report(0, [group], TrainingBatch([]), [], {}, FourTokenPictures(), 1.0))
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing to train on, 1 failed" in said
    assert "0/2 0 failed" in said, "of the rollouts for the next step"


def test_a_resumed_loop_and_an_evaluation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    seen, group = Evaluation(0.75, {}, (), ()), [rollout(turn([1], [2], [-1.0], 0.5))]
    with LoopProgress(9, 2, True, taken=4) as shown:
        for evaluation in (seen, None):
            report = step_report(4, [group], TrainingBatch([]), [], {}, FourTokenPictures(), 1.0, evaluation)
            shown.count_step(report)
    said = capsys.readouterr().err
    assert "6/9 reward 0.500, held out 0.750, signal" in " ".join(said.split()), "until there is another one"


def test_without_a_terminal_plain_lines_come_regularly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PLAIN_S", 0.01)
    with FineTuneProgress(9, 4, None) as shown:
        said = ""
        while "resumed after step 4" not in said:  # it waits for the server and reports the resumption
            said += capsys.readouterr().err
        shown.count_step(5, 0.25)
        shown.count_evaluation({"held_out_loss": 0.5})
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("steps 5/9, loss 0.250, held out loss 0.500, ")


def test_a_short_run_without_a_terminal_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with LoopProgress(2, 2, None) as shown:
        shown.count_rollout(rollout())
    assert capsys.readouterr().err == ""


def test_an_export_without_a_terminal_tells_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with _Bars(None) as bars:
        update = bars.of("download")
        for done in range(0, 2_000_001, 10_000):
            update(done, 2_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["download ...", *(f"download {10 * tenth} % of 2.0 MB" for tenth in range(1, 11))]


def test_the_first_failure_of_a_run_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    failures = [
        Failure("deadline", "120 s"),
        Failure("step", "OSError: no", 'File "game.py", line 7'),
        Failure("a", "b", "c"),
    ]
    group = [rollout(conversation=str(number), failure=failure) for number, failure in enumerate(failures)]
    with LoopProgress(2, 3, None) as shown:
        for step in range(2):
            shown.count_step(step_report(step, [group], TrainingBatch([]), [], {}, FourTokenPictures(), 1.0))
    said = capsys.readouterr().err
    assert said.startswith("rollout 1 failed in step")
    assert said.splitlines()[1:] == ['File "game.py", line 7']
