"""A trainer reads and writes only below its roots."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fovea.wire.errors import InvalidInput
from fovea_trainer.weights.checkpoint_folder import CheckpointRoots


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "kept"
    root.mkdir()
    (tmp_path / "other").mkdir()
    (root / "link").symlink_to(tmp_path / "other")
    (root / "inner").mkdir()
    (root / "near").symlink_to(root / "inner")
    return root


@pytest.mark.parametrize("place", ["{root}/a", "{root}/a/b", "file://{root}/a", "local://{root}/a", "{root}/near/a"])
def test_below_it_is_fine(root: Path, place: str) -> None:
    for given in (str(root), f"{root}/", f"file://{root}"):
        CheckpointRoots([given]).check(place.format(root=root))


@pytest.mark.parametrize(
    "place",
    [
        "{root}",
        "{root}/",
        "{root}x/a",
        "{root}/../kept-not/a",
        "{root}/a/../../other",
        "{root}/../kept/a",
        "{root}/link/a",
        "{root}/link",
        "/etc/passwd",
        "/",
        "relative",
        "http://127.0.0.1:1/a",
        "https://127.0.0.1:1{root}/a",
        "s3://bucket/a",
        "memory://a",
        "simplecache::file://{root}/a",
        "filecache::http://127.0.0.1:1/a",
        "nosuch://{root}/a",
        "",
        " ",
    ],
)
def test_anywhere_else_is_refused_by_name(root: Path, place: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        CheckpointRoots([str(root)]).check(place.format(root=root))
    assert refused.value.field == "uri"
    assert "uri" in refused.value.message


def test_another_protocol_is_named_and_not_opened(root: Path) -> None:
    with pytest.raises(InvalidInput, match=rf"has the protocol http: this trainer reads and writes only below {root}"):
        CheckpointRoots([str(root)]).check("http://127.0.0.1:1/a")


def test_a_root_may_itself_be_a_link(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "root-link"
    link.symlink_to(root)
    CheckpointRoots([str(link)]).check(f"{link}/a")
    CheckpointRoots([str(link)]).check(f"{root}/a")


def test_several_roots_and_buckets(root: Path) -> None:
    roots = CheckpointRoots([str(root), "s3://bucket/folder"])
    for place in (f"{root}/a", "s3://bucket/folder/a", "s3a://bucket/folder/a"):
        roots.check(place)
    for place in ("s3://bucket/a", "s3://bucket/folder", "s3://bucket/folder/../a", "s3://other/folder/a"):
        with pytest.raises(InvalidInput, match="only below"):
            roots.check(place)
    CheckpointRoots(["s3://"]).check("s3://any/a")


def test_a_relative_root_is_where_the_trainer_started(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    CheckpointRoots(["inner"]).check(os.fspath(root / "inner" / "a"))


def test_any_thread_may_ask(tmp_path: Path) -> None:
    """fsspec creates a separate file system for each thread."""
    roots = CheckpointRoots([str(tmp_path)])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(roots.check, str(tmp_path / "uploads" / "one")).result()
