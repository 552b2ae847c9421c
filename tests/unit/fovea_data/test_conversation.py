"""Conversion of each kind of row to a conversation."""

from typing import Any

import pytest

from fovea.wire.errors import InvalidInput
from fovea_data import Conversation, RowReader
from fovea_rollout.messages import Message, Picture
from tests.unit.fovea_data.pictures import encoded

RED, BLUE = encoded("PNG", 200), encoded("PNG", 10)
CAT = {"role": "assistant", "content": "a cat"}
ASK = {"type": "text", "text": "What is it?"}


def read(row: Any) -> Conversation:
    return RowReader().conversation(row, "chats.jsonl:17")


def parts(row: Any) -> tuple[str | bytes, ...]:
    (message, *_) = read(row).messages
    return tuple(part.data if isinstance(part, Picture) else part for part in message.parts)


def asked(*content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, CAT], **columns}


URL = {"type": "image_url", "image_url": {"url": Picture(RED, "png").data_uri}}


@pytest.mark.parametrize(
    "row",
    [
        asked(URL, ASK),
        asked({"type": "image", "image": RED}, ASK),
        asked({"type": "image"}, ASK, images=[{"bytes": RED, "path": None}]),
        asked({"type": "image", "text": None}, {**ASK, "image": None}, image=RED),
        {"messages": [{"role": "user", "content": "What is it?"}, CAT], "images": [RED]},
        {"messages": [{"role": "user", "content": "<image>What is it?"}, CAT], "images": [RED]},
        {"prompt": "What is it?", "completion": "a cat", "image": RED},
        {"prompt": asked(URL, ASK)["messages"][:1], "completion": [CAT], "label": 3},
    ],
)
def test_every_shape_is_the_same_conversation(row: Any) -> None:
    assert parts(row) == (RED, "What is it?")
    assert read(row).answer == "a cat"
    assert read(row).is_learnt == (False, True)


def test_pictures_of_a_column_take_their_places_in_order() -> None:
    row = {"messages": [{"role": "user", "content": "Is <image> redder than <image>?"}, CAT], "images": [RED, BLUE]}
    assert parts(row) == ("Is ", RED, " redder than ", BLUE, "?")


def test_a_mark_without_a_column_is_text() -> None:
    assert parts({"prompt": "What does <image> mean?", "completion": "a tag"}) == ("What does <image> mean?",)


def test_every_answer_is_learnt_but_those_of_weight_0() -> None:
    turns = [
        {"role": "user", "content": "?"},
        {**CAT, "weight": 0},
        {"role": "user", "content": "?"},
        {**CAT, "weight": 1},
    ]
    assert read({"messages": turns}).is_learnt == (False, False, False, True)
    plain = [{name: value for name, value in turn.items() if name != "weight"} for turn in turns]
    assert read({"messages": plain}).is_learnt == (False, True, False, True)


def test_reasoning_comes_before_the_answer() -> None:
    found = read({"messages": [{"role": "user", "content": "?"}, {**CAT, "reasoning_content": "It has whiskers."}]})
    assert found.messages[1] == Message("assistant", ("<think>\nIt has whiskers.\n</think>\n\na cat",))
    assert found.answer == "a cat"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "a row must be an object, not list"),
        ({"text": "a cat"}, r"neither messages nor prompt and completion; its columns are \['text'\]\. .* `convert`"),
        ({"messages": []}, "messages must be a list of messages"),
        (
            {"messages": [CAT, {"role": "user", "content": "?"}]},
            "the last message has role 'user'; it must have role 'assistant'",
        ),
        ({"messages": [{"role": "user", "content": "?"}, {**CAT, "weight": 0}]}, "all answers have weight 0"),
        ({"messages": [{"role": "user", "content": "?"}, {**CAT, "weight": 0.5}]}, "weight is 0.5; use 0 or 1"),
        ({"messages": [{"role": "human", "content": "?"}, CAT]}, r"messages\[0\].role is 'human'; use one of"),
        ({"messages": [{"role": "user", "value": "?"}, CAT]}, r"messages\[0\] has an unknown field 'value'"),
        ({"messages": [{"role": "user"}, CAT]}, r"messages\[0\].content must be a text or a list of parts"),
        ({"messages": ["hello", CAT]}, r"messages\[0\] must be an object, not str"),
        ({"messages": [{**CAT, "tool_calls": [{}]}]}, "'tool_calls'; write tool calls into content"),
        ({"messages": [{"role": "assistant", "content": [URL]}]}, "a message of the assistant has a picture"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "content is empty"),
        (asked({"type": "video_url"}), r"content\[0\].type is 'video_url'; use 'text' or 'image_url'"),
        (asked({"type": "image"}), r"content\[0\].image has no picture: the column of the row has only 0"),
        (asked({"type": "image"}, images=[RED, BLUE]), "does not use 1 pictures of the row"),
        (asked({"type": "image", "image": b"no"}), r"content\[0\].image cannot be read as a picture"),
        ({"messages": [CAT], "images": [RED]}, "has no user message for the pictures of the row"),
    ],
)
def test_a_broken_row_is_refused_by_name(row: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^chats\.jsonl:17: .*{message}"):
        read(row)
