"""Builds of the clients, and their detection of wrong answers."""

import re
from pathlib import Path

import pytest

from examples.clients.answer import Answer
from examples.clients.toolchain import BuildFailed, Toolchain

RIGHT = Answer([5, 6], [-0.5, -1.25], "FINISH_REASON_LENGTH")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOVEA_CACHE", str(tmp_path))
    return tmp_path


def test_what_is_missing_is_named() -> None:
    assert Toolchain("go", ("sh", "no-such-compiler"), (), ()).missing == ["no-such-compiler"]


def test_a_failed_build_says_what_it_said() -> None:
    failing = Toolchain("go", (), (("sh", "-c", "echo no such proto >&2; exit 3"),), ())
    for _ in range(2):  # a failed build must not count as complete
        with pytest.raises(BuildFailed, match="no such proto"), failing.built():
            pass


def test_it_is_built_once_beside_the_protos(cache: Path) -> None:
    build = (("sh", "-c", "test -f ../../../protos/fovea/api/v1/gateway.proto && echo built >> log && touch sample"),)
    toolchain = Toolchain("go", (), build, ("sh", "./sample"))
    folder = cache / "clients" / "go" / "examples" / "clients" / "go"
    for _ in range(2):
        with toolchain.built() as command:
            assert command == ["sh", str(folder / "sample")]
    assert (folder / "log").read_text() == "built\n"


def test_changed_sources_are_built_anew(cache: Path) -> None:
    toolchain = Toolchain("go", (), (("sh", "-c", "test ! -e made && touch made"),), ())
    for _ in range(2):
        with toolchain.built():
            pass
        (cache / "clients" / "go" / "digest").write_text("of other sources")


def test_what_a_client_prints_is_read() -> None:
    assert Answer.parse("5 -0.500000\n6 -1.250000\n2 tokens, FINISH_REASON_LENGTH\n") == RIGHT


@pytest.mark.parametrize("printed", ["", "5 -0.5\n", "5 -0.5\n2 tokens, FINISH_REASON_STOP\n", "5\n1 tokens, X\n"])
def test_invalid_output_is_refused(printed: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  Python's own words
        Answer.parse(printed)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Answer([5, 7], [-0.5, -1.25], "FINISH_REASON_LENGTH"), r"\[5, 7\]"),
        (Answer([5], [-0.5], "FINISH_REASON_LENGTH"), r"\[5\]"),
        (Answer([5, 6], [-0.5, -1.25], "FINISH_REASON_STOP"), "STOP"),
        (Answer([5, 6], [-0.5, -1.2501], "FINISH_REASON_LENGTH"), "differ by 1.0e-04"),
    ],
)
def test_a_wrong_answer_differs(wrong: Answer, said: str) -> None:
    assert re.search(said, wrong.difference(RIGHT))
    assert RIGHT.difference(RIGHT) == ""
