"""Paths and names of checkpoints."""

import pytest

from fovea.wire.errors import InvalidInput
from fovea_gateway.checkpoints.checkpoint import CheckpointPath, check_name, parse_path


def test_paths_come_apart_and_together() -> None:
    path = "tinker://sess-1:train:0/sampler_weights/final"
    assert parse_path(path, "path") == CheckpointPath("sess-1:train:0", "sampler_weights", "final")
    assert str(parse_path(path, "path")) == path


@pytest.mark.parametrize(
    "path", ["", "x", "tinker://", "tinker://a/b", "tinker://a/other/n", "tinker://a/weights/n/m", "s3://a/weights/n"]
)
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(InvalidInput, match="is not a checkpoint"):
        parse_path(path, "path")


@pytest.mark.parametrize("name", ["a", "000010", "step_1.final", "A-b+c=d@e"])
def test_names(name: str) -> None:
    assert check_name(name, "path") == name


@pytest.mark.parametrize("name", ["", ".", "..", "...", ".hidden", "a/b", "a\\b", "a b", "ä", "x" * 201, "a\n", "\0"])
def test_names_that_are_no_folders_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not a name"):
        check_name(name, "path")
