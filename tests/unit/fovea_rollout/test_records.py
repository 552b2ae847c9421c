"""Datasets: parsed rows, and errors for invalid ones."""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from fovea.wire.errors import FailedPrecondition, InvalidInput, NotFound
from fovea_rollout.environments import environment
from fovea_rollout.environments.records import Record, environment_of, fingerprint, load_records, parse_record, shuffled
from fovea_rollout.messages import Message, Picture

PICTURE = Picture.of_pixels(np.zeros((4, 4, 3), np.uint8))
WIDE = Picture.of_pixels(np.zeros((4, 8, 3), np.uint8))


def row(**changes: Any) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": PICTURE.data_uri}},
        {"type": "text", "text": "How many?"},
    ]
    return {
        "prompt": [{"role": "user", "content": content}],
        "env_class": "count",
        "reward_spec": {"method": "rule", "ground_truth": 7},
        "level": 3,
    } | changes


def image_url(picture: Picture) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture.data_uri}}


def geometry(**changes: Any) -> dict[str, Any]:
    """Returns a row of Geometry-3K in its recipe's format, with two pictures."""
    problem = "<image><image>Find x in both triangles."
    return {
        "prompt": [
            {
                "role": "user",
                "content": [image_url(PICTURE), image_url(WIDE), {"type": "text", "text": problem}],
            }
        ],
        "env_class": "geometry3k",
        "reward_spec": {"method": "rule", "ground_truth": "3 \\sqrt { 2 }"},
        "extra_info": {"split": "train", "index": 7, "problem": problem, "answer": "3 \\sqrt { 2 }"},
    } | changes


def ticket(**changes: Any) -> dict[str, Any]:
    """Returns a row of VisGym's recipe; the environment makes prompt and reward."""
    return {
        "prompt": [{"role": "user", "content": "placeholder"}],
        "env_class": "visgym",
        "visgym_env_id": "maze_2d/easy",
    } | changes


def write_as(path: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    if path.suffix == ".jsonl":
        return write(path, *rows)
    # Columns come from the first row only.
    names = dict.fromkeys(name for one in rows for name in one)
    parquet.write_table(pyarrow.Table.from_pylist([{name: one.get(name) for name in names} for one in rows]), path)
    return path


def write(path: pathlib.Path, *rows: Any) -> pathlib.Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def test_json_lines(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "a.jsonl", row(), row(level=4))
    path.write_text(path.read_text() + "\n")
    first, second = load_records(path)
    assert first.prompt[0].parts == (PICTURE, "How many?")
    assert (first.env_class, first.reward_spec["ground_truth"]) == ("count", 7)
    assert (first.extra, second.extra) == ({"level": 3}, {"level": 4})


def test_parquet_fills_structs_with_nulls(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([row(), row(env_class=None)]), path)
    with pytest.raises(InvalidInput, match=r"a\.parquet:2: env_class is None"):
        load_records(path)
    parquet.write_table(pyarrow.Table.from_pylist([row(), row(level=None)]), path)
    write(tmp_path / "a.jsonl", row(), row(level=None))
    assert load_records(path) == load_records(tmp_path / "a.jsonl")
    path.write_bytes(b"not parquet at all")
    with pytest.raises(InvalidInput, match="is not a parquet file"):
        load_records(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_geometry3k(tmp_path: pathlib.Path, suffix: str) -> None:
    path = write_as(tmp_path / f"train{suffix}", [geometry(), geometry(extra_info={"split": "test", "index": 8})])
    first, second = load_records(path)
    assert first.prompt[0].parts == (PICTURE, WIDE, "<image><image>Find x in both triangles.")
    assert first.columns == geometry() | {"prompt": first.prompt}
    assert second.extra == {"extra_info": {"split": "test", "index": 8}}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tickets_of_visgym(tmp_path: pathlib.Path, suffix: str) -> None:
    options = {"visgym_kwargs": {"width": 5}, "max_turns": 10}
    other = {"visgym_kwargs": {"walls": True}, "visgym_env_id": "sliding_block/easy"}
    rows = [ticket(), ticket(seed=3), ticket(**options), ticket(**other)]
    records = load_records(write_as(tmp_path / f"train{suffix}", rows))
    assert [record.columns | {"prompt": rows[0]["prompt"]} for record in records] == rows
    assert {record.prompt[0].text for record in records} == {"placeholder"}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_broken_row_of_a_recipe_is_named(tmp_path: pathlib.Path, suffix: str) -> None:
    cut = PICTURE.data_uri.replace("image/png", "image/jpeg")[:40]
    broken = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": cut}}]}]
    path = write_as(tmp_path / f"train{suffix}", [geometry(), geometry(prompt=broken)])
    with pytest.raises(InvalidInput, match=rf"train\{suffix}:2: prompt\[0\]\.content\[0\]\.image_url\.url"):
        load_records(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_of_a_prompt_have_names(tmp_path: pathlib.Path, suffix: str) -> None:
    prompt = [
        {"role": "user", "content": "Look.", "name": "ann"},
        {"role": "tool", "content": "Nothing.", "name": "look", "tool_call_id": "call_1"},
    ]
    (record,) = load_records(write_as(tmp_path / f"a{suffix}", [ticket(prompt=prompt)]))
    assert record.prompt == (
        Message("user", ("Look.",), name="ann"),
        Message("tool", ("Nothing.",), name="look", tool_call_id="call_1"),
    )


def test_parquet_without_pyarrow_says_what_to_do(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.touch()
    with pytest.raises(FailedPrecondition, match="needs pyarrow: install it, or convert"):
        load_records(path)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([1], r"a\.jsonl:2: a record must be an object, not list"),
        ({"env_class": "count"}, r"a\.jsonl:2: prompt is missing"),
        (row(prompt=[]), r"a\.jsonl:2: prompt is \[\]; it must be a list of messages"),
        (row(prompt="How many?"), r"a\.jsonl:2: prompt is 'How many\?'; it must be a list of messages"),
        (row(env_class=3), r"a\.jsonl:2: env_class is 3; it must be a name"),
        (row(reward_spec={"method": "model"}), r"a\.jsonl:2: reward_spec is .*write \{'method': 'rule'"),
        (row(reward_spec="7"), r"a\.jsonl:2: reward_spec is '7'; write \{'method': 'rule'"),
        (ticket(env_class=None), r"a\.jsonl:2: env_class is None; it must be a name"),
        (row(prompt=[{"role": "user", "content": "x", "name": 3}]), r"a\.jsonl:2: prompt\[0\]\.name is 3"),
        (row(prompt=[{"role": "me", "content": "x"}]), r"a\.jsonl:2: prompt\[0\]\.role is 'me'"),
        (
            row(prompt=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]),
            r"a\.jsonl:2: prompt\[0\]\.content\[0\]\.image_url\.url must be a data URI",
        ),
    ],
)
def test_a_bad_record_is_named_by_file_line_and_field(tmp_path: pathlib.Path, bad: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        load_records(write(tmp_path / "a.jsonl", row(), bad))


def test_bad_files(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n{]\n")
    with pytest.raises(InvalidInput, match=r"a\.jsonl:2: the line is not JSON"):
        load_records(tmp_path / "a.jsonl")
    with pytest.raises(NotFound, match=r"b\.jsonl does not exist"):
        load_records(tmp_path / "b.jsonl")
    with pytest.raises(InvalidInput, match=r"a\.csv is not a \.jsonl or \.parquet file"):
        load_records(tmp_path / "a.csv")


class Count:
    """Stores the record that created it."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = record


@pytest.fixture
def registered() -> Iterator[None]:
    environment.register("count", Count)
    yield
    environment.unregister("count")


@pytest.mark.usefixtures("registered")
def test_an_environment_gets_all_columns() -> None:
    record = parse_record(row())
    made = environment_of(record)
    assert isinstance(made, Count)
    assert made.record == {
        "prompt": record.prompt,
        "env_class": "count",
        "reward_spec": {"method": "rule", "ground_truth": 7},
        "level": 3,
    }


def test_an_unknown_environment_is_named() -> None:
    with pytest.raises(InvalidInput, match="env_class 'nothing' is not registered"):
        environment_of(parse_record(row(env_class="nothing")))


def test_the_fingerprint_of_records_is_of_their_content() -> None:
    asked = row(prompt=[{"role": "user", "content": [image_url(Picture.of_pixels(np.zeros((4, 4, 3), np.uint8)))]}])
    other = row(prompt=[{"role": "user", "content": [image_url(Picture.of_pixels(np.ones((4, 4, 3), np.uint8)))]}])
    records = [
        [parse_record(one) for one in rows] for rows in ([row(), asked], [row(), other], [asked, row()], [row()])
    ]
    found = {fingerprint(one) for one in records}
    assert len(found) == 4
    assert fingerprint([parse_record(row()), parse_record(asked)]) == fingerprint(records[0])
    assert fingerprint([object, object]) == fingerprint([dict, dict])  # type: ignore[list-item]


def test_shuffling_follows_the_seed() -> None:
    records = [Record((), str(number), {}) for number in range(20)]
    assert shuffled(records, 1) == shuffled(records, 1)
    assert shuffled(records, 1) != shuffled(records, 2)
    assert sorted(shuffled(records, 1), key=lambda record: int(record.env_class)) == records


def _marked(*texts: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text} for text in texts], "env_class": "count", **columns}


def test_pictures_of_a_column_take_the_places_of_marks() -> None:
    """Rows of verl and EasyR1. Before this was supported, the picture was dropped and the model trained blind."""
    found = parse_record(
        _marked("<image>Find x in <image>.", images=[{"bytes": PICTURE.data, "path": None}, WIDE.data])
    )
    assert found.prompt[0].parts == (PICTURE, "Find x in ", WIDE, ".")
    assert parse_record(_marked("Find x.", image=PICTURE.data)).prompt[0].parts == (PICTURE, "Find x.")
    assert parse_record(_marked("Find x.", images=[], image=PICTURE.data)).prompt[0].pictures == (PICTURE,)
    assert parse_record(_marked("What is <image>?")).prompt[0].parts == ("What is <image>?",)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (_marked("<image><image>", images=[PICTURE.data]), "<image> has no picture: the column of the row has only 1"),
        (_marked("<image>", images=[PICTURE.data, WIDE.data]), "does not use 1 pictures of the row"),
        (_marked("<image>Find x.", images=[]), "<image> has no picture: the column of the row has only 0"),
        (_marked("<image>", images=[b"no picture"]), "picture 0 of the row cannot be read"),
        (_marked("x", images=[PICTURE.data], image=WIDE.data), "both images and image"),
    ],
)
def test_a_picture_without_a_place_is_refused_by_row(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=f"^rows.jsonl:3.*{words}"):
        parse_record(wrong, "rows.jsonl:3")
