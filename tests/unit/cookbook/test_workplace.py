"""The folders that replace Caltech-101 and DeepCoder."""

import json
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


def test_tasks_lie_by_set_and_split_and_every_set_differs(tmp_path: Path) -> None:
    lay_out(tmp_path / "work", "org/model", tokenizer=None)
    folder = tmp_path / "work/agentica-org/DeepCoder-Preview-Dataset"
    files = sorted(str(file.relative_to(folder)) for file in folder.glob("*/*.jsonl"))
    splits = "codeforces/test lcbv5/test lcbv5/train primeintellect/train taco/train".split()
    assert files == [f"{split}.jsonl" for split in splits]
    assert all(file in (folder / "README.md").read_text() for file in files)
    assert len({(folder / file).read_text() for file in files}) == len(files)
    row = json.loads((folder / files[0]).read_text().splitlines()[0])
    assert json.loads(row["tests"]) == [{"input": "", "output": "3"}]
