"""The folder that replaces Caltech-101."""

from pathlib import Path

from cookbook.workplace import lay_out


def test_pictures_lie_by_split_and_class_and_no_picture_is_in_both(tmp_path: Path) -> None:
    lay_out(tmp_path / "work", "org/model", tokenizer=None)
    files = {
        split: set((tmp_path / "work/dpdl-benchmark/caltech101" / split).glob("*/*")) for split in ("train", "test")
    }
    classes = {split: {file.parent.name for file in found} for split, found in files.items()}
    assert len(classes["train"]) == 10
    assert classes["test"] == classes["train"]
    assert {split: len(found) for split, found in files.items()} == {"train": 400, "test": 100}
    assert len({file.read_bytes() for found in files.values() for file in found}) == 500
