"""Folders appear complete or not at all, on a disk and elsewhere."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fovea.wire.errors import InvalidInput, NotFound
from fovea_trainer.weights.checkpoint_folder import Folder, write_folder
from tests.syncs import Syncs


def _fail() -> Iterator[bytes]:
    yield b"part"
    raise OSError("disk full")


@pytest.fixture(params=["path", "file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty path or URL."""
    if request.param == "s3":
        return str(request.getfixturevalue("new_bucket")())
    return {"path": str(tmp_path), "file": f"file://{tmp_path}", "memory": f"memory://{uuid.uuid4().hex}"}[
        request.param
    ]


def test_written_replaced_and_read(root: str) -> None:
    uri = f"{root}/deep/folder"
    assert write_folder(uri, {"one": b"123", "two": b"45"}) == 5
    assert write_folder(uri, {"one": b"6789"}) == 4
    folder = Folder.at(uri)
    assert folder.read("one") == b"6789"
    assert not folder.exists("two")
    with pytest.raises(NotFound):
        folder.read("two")
    assert len(folder.files.ls(folder.path.rsplit("/", 1)[0])) == 1


def test_failure_leaves_what_was_there(root: str) -> None:
    uri = f"{root}/deep/folder"
    write_folder(uri, {"one": b"old"})
    with pytest.raises(OSError, match="disk full"):
        write_folder(uri, {"one": b"new", "two": _fail()})
    folder = Folder.at(uri)
    assert folder.read("one") == b"old"
    assert len(folder.files.ls(folder.path.rsplit("/", 1)[0])) == 1


def test_the_disk_has_all_of_a_folder_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "model" / "weights" / "name"
    syncs = Syncs(monkeypatch)
    write_folder(str(place), {"one": b"old", "two": b"x" * 2**20})
    assert syncs.moved == [(place, [])]
    assert not syncs.missing(place.parent.parent), "including its final name"
    write_folder(str(place), {"one": b"new"})
    assert syncs.moved[-1] == (place, [])


def test_no_bucket_is_made(new_bucket: Callable[[], str]) -> None:
    there = new_bucket()
    write_folder(f"{there}/folder", {"one": b"1"})
    with pytest.raises(NotFound, match="bucket fovea-none does not exist"):
        write_folder("s3://fovea-none/folder", {"one": b"1"})
    assert not Folder.at("s3://fovea-none").files.exists("fovea-none")


@pytest.mark.parametrize("uri", ["", "  ", "nosuch://x"])
def test_impossible_places_are_refused(uri: str) -> None:
    with pytest.raises(InvalidInput, match="uri"):
        Folder.at(uri)
