"""The README's measured numbers are those of the files of results, and every other number has a reason."""

import pytest

from benchmarks.readme import README, undeclared, written


def test_the_readmes_numbers_are_those_of_the_results() -> None:
    text = README.read_text()
    assert written(text) == text, "run: python -m benchmarks.readme --write"


def test_every_number_has_a_source() -> None:
    assert undeclared(README.read_text()) == []


def test_another_number_is_found_and_replaced() -> None:
    text = README.read_text()
    wrong = text.replace("runs 131 checks", "runs 132\nchecks")
    assert wrong != text
    assert "runs 131\nchecks" in written(wrong)
    assert undeclared(f"{text}\nIt serves 512 users.") == ["512"]
    others = "\nIt serves ten users.\n```\nmake up  # in 5 minutes\n```\n![4 runs](a.png)"
    assert undeclared(text + others) == ["ten", "5", "![4"]
    with pytest.raises(SystemExit, match=r"must have once: runs \{\} checks"):
        written(text.replace("runs 131 checks", "runs checks"))
    with pytest.raises(SystemExit, match="no longer has 'CUDA 13'"):
        undeclared(text.replace("CUDA 13", "CUDA"))
