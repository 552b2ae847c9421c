"""Datasets of every source: lengths, order, splits, and errors that name the broken row."""

import io
import json
import pathlib
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fovea.wire.errors import InvalidInput, NotFound
from fovea_data import Dataset, image_folder, load_chats
from fovea_data.conversation import exact_match
from fovea_data.rows import BLOCKS_IN_MEMORY
from tests.unit.fovea_data.pictures import encoded, encoder, write


def chat(number: int, **columns: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}!"}],
        **columns,
    }


def jsonl(path: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: pathlib.Path, rows: list[dict[str, Any]], group: int = 4) -> pathlib.Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def answers(dataset: Dataset) -> list[str]:
    return [one.answer for one in dataset]


SOURCES: Mapping[str, Callable[[pathlib.Path], Dataset]] = {
    "jsonl": lambda folder: load_chats(jsonl(folder / "a.jsonl", [chat(i) for i in range(20)])),
    "parquet": lambda folder: load_chats(parquet(folder / "a.parquet", [chat(i) for i in range(20)])),
    "list": lambda folder: load_chats([chat(i) for i in range(20)]),
    "three together": lambda folder: load_chats(
        jsonl(folder / "a.jsonl", [chat(i) for i in range(6)]),
        parquet(folder / "b.parquet", [chat(i) for i in range(6, 15)]),
        [chat(i) for i in range(15, 20)],
    ),
}


@pytest.fixture(params=SOURCES)
def dataset(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Dataset:
    return SOURCES[request.param](tmp_path)


def test_every_source_has_its_rows_in_order(dataset: Dataset) -> None:
    assert answers(dataset) == [f"{number}!" for number in range(20)]
    assert dataset[7].question[0].text == "7?"


def test_an_order_has_every_row_once_and_follows_from_seed_and_epoch(dataset: Dataset) -> None:
    first = dataset.order(3, 0)
    assert sorted(first) == list(range(20))
    np.testing.assert_array_equal(first, dataset.order(3, 0))
    assert not np.array_equal(first, dataset.order(3, 1))
    assert not np.array_equal(first, dataset.order(4, 0))


def test_a_split_shares_the_rows_out(dataset: Dataset) -> None:
    train, held_out = dataset.split(0.25, seed=1)
    assert (len(train), len(held_out)) == (15, 5)
    assert sorted(answers(train) + answers(held_out)) == sorted(answers(dataset))
    assert answers(dataset.split(0.25, seed=1)[1]) == answers(held_out) != answers(dataset.split(0.25, seed=2)[1])
    assert sorted(held_out.order(0, 0)) == list(range(5))


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_a_split_without_rows_is_refused(share: float, dataset: Dataset) -> None:
    with pytest.raises(InvalidInput, match=f"held_out is {share}, which holds out .* of 20 rows"):
        dataset.split(share)


def test_pictures_of_a_file_are_found_beside_it(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "pictures" / "a.png", encoded("PNG"))
    rows = [{"prompt": "?", "completion": "red", "image": "pictures/a.png"}]
    for source in (jsonl(tmp_path / "a.jsonl", rows), parquet(tmp_path / "a.parquet", rows)):
        (one,) = load_chats(source)
        assert one.messages[0].pictures[0].data == encoded("PNG")


def test_parquet_has_pictures_and_fields_that_are_null(tmp_path: pathlib.Path) -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "?"}]
    said = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": [parts[1]], "name": "ada"},
    ]
    (one,) = load_chats(
        parquet(tmp_path / "a.parquet", [{"messages": said, "images": [{"bytes": encoded("WEBP"), "path": None}]}])
    )
    assert one.messages[0].pictures[0].format == "png"


def test_rows_of_a_shape_of_ones_own_are_converted() -> None:
    (one,) = load_chats(
        [{"q": "2 + 2?", "a": 4}], convert=lambda row: {"prompt": row["q"], "completion": str(row["a"])}
    )
    assert one.answer == "4"


def test_a_folder_per_class(tmp_path: pathlib.Path) -> None:
    for name, kind in (
        ("red_kite/a.webp", "WEBP"),
        ("red_kite/b.jpg", "JPEG"),
        ("owl/c.png", "PNG"),
        (".cache/d.png", "PNG"),
    ):
        write(tmp_path / name, encoded(kind, size=(64, 32)))
    found = image_folder(tmp_path, "Which bird?", max_side=16)
    assert answers(found) == ["owl", "red kite", "red kite"]
    assert {one.messages[0].text for one in found} == {"Which bird?"}
    assert {one.messages[0].pictures[0].size for one in found} == {(16, 8)}


def test_broken_rows_are_named_by_line_and_all_at_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(chat(0)) + '\n\n{"messages": \n' + json.dumps(chat(1, images=["lost.png"])) + "\n[1]\n")
    dataset = load_chats(path)
    assert len(dataset) == 4
    with pytest.raises(InvalidInput, match=rf"^{path}:3: the line is not JSON"):
        dataset[1]
    problems = dataset.problems()
    assert [problem.split(": ")[0] for problem in problems] == [f"{path}:3", f"{path}:4", f"{path}:5"]
    assert "No such file" in problems[1]
    assert len(dataset.problems(limit=2)) == 2


def test_broken_rows_of_other_sources_are_named(tmp_path: pathlib.Path) -> None:
    broken = {"messages": [{"role": "user", "content": "?"}]}
    assert load_chats([chat(0), broken]).problems()[0].startswith("rows[1]: the last message has role 'user'")
    path = parquet(tmp_path / "a.parquet", [chat(0), chat(1), broken], group=2)
    assert load_chats(path).problems()[0].startswith(f"{path}:3: the last message has role")
    bad = write(tmp_path / "classes" / "owl" / "a.png", encoded("PNG")[:50])
    assert image_folder(tmp_path / "classes").problems()[0].startswith(f"{bad}: ")


def test_sources_that_cannot_be_read_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotFound, match=r"missing\.jsonl does not exist"):
        load_chats(tmp_path / "missing.jsonl")
    with pytest.raises(InvalidInput, match=r"a\.csv is not a \.jsonl or \.parquet file"):
        load_chats(tmp_path / "a.csv")
    with pytest.raises(InvalidInput, match=r"a\.parquet is not a Parquet file"):
        load_chats(write(tmp_path / "a.parquet", b"PK"))
    with pytest.raises(InvalidInput, match="the dataset has no rows"):
        load_chats([])
    with pytest.raises(NotFound, match=r"the folder .* does not exist"):
        image_folder(tmp_path / "missing")
    with pytest.raises(InvalidInput, match="has no folders with pictures"):
        image_folder(tmp_path)
    notes = write(tmp_path / "owl" / "notes.txt", b"hoo")
    with pytest.raises(InvalidInput, match=f"{notes} is not a picture"):
        image_folder(tmp_path)


def test_pictures_without_a_class_and_folders_of_folders_are_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a" / "owl" / "1.png", encoded("PNG"))
    beside = write(tmp_path / "a" / "2.jpg", encoded("JPEG"))
    with pytest.raises(
        InvalidInput,
        match=f"1 pictures have no class, because they are outside the folders of the classes.* {beside}: move each",
    ):
        image_folder(tmp_path / "a")
    deep = write(tmp_path / "b" / "train" / "owl" / "1.png", encoded("PNG")).parent
    with pytest.raises(InvalidInput, match=f"{deep} is a folder inside the folder of a class.*: give {deep.parent} if"):
        image_folder(tmp_path / "b")


def test_a_class_in_decomposed_letters_is_the_answer_that_a_tokenizer_decodes(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "cafe\u0301" / "1.png", encoded("PNG"))
    (row,) = image_folder(tmp_path, "ou\u0300?")
    assert (row.question[0].text, row.answer) == ("o\u00f9?", "caf\u00e9")
    assert exact_match("cafe\u0301 ", row) == exact_match("caf\u00e9", row) == 1.0


def test_a_picture_that_an_object_loads_later_is_named_by_row() -> None:
    whole = Image.open(io.BytesIO(encoded("PNG")))
    cut = Image.open(io.BytesIO(encoded("JPEG", size=(300, 300))[:900]))
    rows = [{"prompt": "?", "completion": "a", "image": image} for image in (whole, cut)]
    (problem,) = load_chats(rows).problems()
    assert problem.startswith("rows[1]: ")
    assert "truncated" in problem


class Undecodable:
    """A list that raises an error when a row is read, like a column of Hugging Face `datasets`."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        raise OSError("cannot identify image file")


def test_whatever_reading_a_row_raises_names_it() -> None:
    assert load_chats(Undecodable()).problems() == ["rows[0]: OSError: cannot identify image file"]  # type: ignore[arg-type]
    (converted,) = load_chats([chat(0)], convert=lambda row: row["missing"]).problems()
    assert converted == "rows[0]: KeyError: 'missing'"
    (number,) = load_chats([{"prompt": "q", "completion": 7}]).problems()
    assert number.startswith("rows[0]: completion is 7, of type int; it must be a text")


def test_problems_are_those_of_encoding_too() -> None:
    rows = load_chats([chat(0), {"prompt": "long " * 100, "completion": "a"}, {"prompt": "\ud800", "completion": "a"}])
    assert rows.problems() == []
    found = rows.problems(check=encoder(max_tokens=64).datums)
    assert [one.split(": ")[0] for one in found] == ["rows[1]", "rows[2]"]


def test_files_and_folders_have_pictures_of_one_size(tmp_path: pathlib.Path) -> None:
    large = encoded("PNG", size=(1024, 512))
    write(tmp_path / "owl" / "1.png", large)
    listed = load_chats([{"prompt": "?", "completion": "owl", "image": large}])
    sizes = {rows[0].question[0].pictures[0].size for rows in (listed, image_folder(tmp_path))}
    assert sizes == {(512, 256)}
    with pytest.raises(InvalidInput, match="max_side is 0; it must be above 0"):
        load_chats([chat(0)], max_side=0)


def test_rows_that_come_in_one_order_only_are_refused() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield chat(0)

    with pytest.raises(InvalidInput, match="rows is a generator, which can only be read in order: write it to"):
        load_chats(rows())  # type: ignore[arg-type]


def test_lines_larger_than_memory_are_read_one_by_one(tmp_path: pathlib.Path) -> None:
    filler = "x" * 100_000
    path = jsonl(tmp_path / "a.jsonl", [chat(number, filler=filler) for number in range(300)])
    tracemalloc.start()
    dataset = load_chats(path)
    for row in dataset.order(0, 0).tolist():
        assert dataset[row].answer == f"{row}!"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 30_000_000 > 10 * peak


def test_row_groups_larger_than_memory_are_read_a_few_at_a_time(tmp_path: pathlib.Path) -> None:
    groups, size = 10 * BLOCKS_IN_MEMORY, 5
    rng = np.random.default_rng(0)
    rows = [chat(number, filler=rng.bytes(50_000)) for number in range(groups * size)]
    path = parquet(tmp_path / "a.parquet", rows, group=size)
    del rows
    dataset = load_chats(path)
    before, peak = pyarrow.total_allocated_bytes(), 0
    for row in dataset.order(0, 0).tolist():
        assert dataset[row].answer == f"{row}!"
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    assert path.stat().st_size > 20_000_000 > 4 * peak
