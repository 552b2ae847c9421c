"""Recovery data is found again complete or not at all, on a disk and in a bucket."""

import dataclasses
import time
from pathlib import Path

import pytest

from fovea.wire.conventions import REPLACED_SUFFIX
from fovea_trainer.recovery.recovery_folder import Point, RecoveryFolder
from fovea_trainer.weights.checkpoint_folder import Folder, write_folder

NAMES = ["plain", "a/b:train:0", "..", "100%@*"]


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty path or URL."""
    return str(request.getfixturevalue("new_bucket")() if request.param == "s3" else tmp_path) + "/recovery"


def _write(folder: RecoveryFolder, model_id: str, seq_id: int, age_s: float = 0.0) -> Point:
    point = Point(seq_id, seq_id // 2, [{"loss": 0.1}, 3], None, "base", time.time() - age_s, {})
    written: list[Point] = []

    def describe(staging: Folder, checksums: dict[str, int]) -> None:
        written.append(dataclasses.replace(point, files=staging.sizes(), checksums=checksums))
        written[0].write_to(staging)

    write_folder(folder.point_url(model_id, seq_id), {"weights": b"123", "more": b"4"}, describe)
    return written[0]


def test_the_newest_whole_point_counts(place: str) -> None:
    folder = RecoveryFolder(place)
    for name in NAMES:
        assert folder.newest(name) is None
        points = [_write(folder, name, seq_id) for seq_id in (9, 10)]
        assert folder.newest(name) == (folder.point_url(name, 10), points[1])
        newest = Folder.at(folder.point_url(name, 10))
        newest.write("weights", b"12")
        assert folder.newest(name) == (folder.point_url(name, 9), points[0])
        newest.discard()
        folder.drop_older(name, 9)
        assert folder.newest(name) is not None
        folder.drop_older(name, 11)
        assert folder.newest(name) is None


def test_a_flipped_bit_is_seen(place: str) -> None:
    folder = RecoveryFolder(place)
    older, newer = (_write(folder, "m", seq_id) for seq_id in (9, 10))
    found = Folder.at(folder.point_url("m", 10))
    assert {name: found.checksum(name) for name in newer.checksums} == newer.checksums
    assert newer.checksums.keys() == newer.files.keys()
    found.write("weights", b"122")
    assert found.checksum("weights") != newer.checksums["weights"]
    assert found.checksum("gone") is None
    assert [point for _, point in folder.whole("m")] == [newer, older], "both must have all their bytes"


def test_models_and_snapshots_are_kept_apart(place: str) -> None:
    folder = RecoveryFolder(place)
    for name in NAMES:
        _write(folder, name, 1)
        write_folder(folder.snapshot_url(name, f"{name}@1"), {"adapter": b"12345"})
    for name in NAMES:
        assert folder.find_snapshot(f"{name}@1") == folder.snapshot_url(name, f"{name}@1")
        before = folder.size_bytes(name)
        folder.remove_snapshot(f"{name}@1")
        assert folder.size_bytes(name) == before - 5
        assert folder.find_snapshot(f"{name}@1") is None
        folder.remove_model(name)
        folder.remove_model(name)
        assert folder.size_bytes(name) == 0
    folder.remove_snapshot("unknown")


def test_a_restore_removes_what_was_being_written_and_nothing_by_its_age(place: str) -> None:
    folder = RecoveryFolder(place)
    folder.sweep("old")
    points = {name: _write(folder, name, 4, age_s) for name, age_s in (("old", 1e9), ("of a clock set ahead", -1e9))}
    staging = Folder.at(folder.point_url("old", 5)).stage()
    staging.write("part", b"1")
    folder.sweep("of a clock set ahead")
    assert staging.exists("part"), "another trainer may be writing it"
    folder.sweep("old")
    for name, point in points.items():
        assert folder.newest(name) == (folder.point_url(name, 4), point)
    assert not staging.exists("part")


def test_a_point_that_was_being_replaced_at_a_power_cut_is_found(tmp_path: Path) -> None:
    folder = RecoveryFolder(str(tmp_path))
    point = _write(folder, "m", 4)
    place = tmp_path / "m" / "4"
    place.rename(f"{place}{REPLACED_SUFFIX}12345678")  # the first of the two renames
    Folder.at(str(place)).stage().write("part", b"1")
    folder.sweep("m")
    assert folder.newest("m") == (folder.point_url("m", 4), point)
    assert [one.name for one in place.parent.iterdir()] == ["4"]
    older = place.with_name(f"4{REPLACED_SUFFIX}87654321")
    older.mkdir()  # the last step, removing the replaced folder, is missing
    folder.sweep("m")
    assert folder.newest("m") == (folder.point_url("m", 4), point)
    assert not older.exists()


def test_a_folder_on_a_disk_is_for_this_user_alone(tmp_path: Path) -> None:
    made, found = tmp_path / "made", tmp_path / "found"
    found.mkdir(mode=0o755)
    for folder in (made, found):
        RecoveryFolder(str(folder))
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_trainer_that_lost_a_model_removes_no_point_of_its_successor(place: str) -> None:
    late, successor = RecoveryFolder(place), RecoveryFolder(place)
    points = [_write(folder, "m", seq_id) for folder, seq_id in ((late, 4), (successor, 9), (late, 6))]
    late.drop_older("m", 6)
    assert [point for _, point in late.whole("m")] == [points[1], points[2]]
    successor.drop_older("m", 9)
    assert [point for _, point in successor.whole("m")] == [points[1]]


def test_trainers_of_one_store_find_its_id_and_no_others(place: str) -> None:
    folders = [RecoveryFolder(place), RecoveryFolder(place), RecoveryFolder(f"{place}2")]
    ids = [_known(folder) for folder in folders]
    assert ids[0] == ids[1] != ids[2]
    assert folders[0].model_ids() == []
    assert _known(RecoveryFolder(place)) == ids[0]


def _known(folder: RecoveryFolder) -> str:
    while not (found := folder.known_id()):
        time.sleep(0.01)
    return found
