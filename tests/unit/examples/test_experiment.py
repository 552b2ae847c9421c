"""The command line of the examples."""

import sys

import pytest

from examples.experiment import read_arguments


def test_too_few_steps_for_the_stages_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "1"])
    assert read_arguments("One.", steps=9, groups=4, warm_up=3).steps == 1
    with pytest.raises(SystemExit):
        read_arguments("Two.", steps=9, groups=4, warm_up=3, stages=2)
    assert "--steps is 1; it must be 2 or more, one for each stage" in capsys.readouterr().err
