"""Conversations as datums: exactly the model's input, with loss on its answers only."""

import asyncio
from typing import Any

import pytest
import tinker

from fovea.wire.errors import ContextOverflow, InvalidInput
from fovea_data import Conversation, Encoder, PictureTokens, RowReader
from tests.unit.fovea_data.pictures import TOKENS, encoded, encoder
from tests.unit.fovea_rollout.chat_templates import TEXT_ONLY, tokenizer

PICTURE = {"type": "image", "image": encoded("PNG")}


def conversation(*messages: tuple[str, Any]) -> Conversation:
    rows = [{"role": role, "content": content} for role, content in messages]
    return RowReader().conversation({"messages": rows}, "chats.jsonl:17")


def text(template: str, datum: tinker.Datum) -> str:
    """Returns a datum's input with its last target, decoded; a picture is #."""
    ids: list[int] = []
    for chunk in datum.model_input.chunks:
        ids += chunk.tokens if isinstance(chunk, tinker.EncodedTextChunk) else tokenizer(template).encode("#")
    return str(tokenizer(template).decode([*ids, datum.loss_fn_inputs["target_tokens"].to_numpy()[-1]]))


def learnt(template: str, datum: tinker.Datum) -> str:
    targets, weights = (datum.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "weights"))
    assert len(targets) == len(weights) == datum.model_input.length
    return str(tokenizer(template).decode(targets[weights == 1.0]))


TWO_TURNS = conversation(
    ("system", "Be brief."),
    ("user", [PICTURE, {"type": "text", "text": "What is it?"}]),
    ("assistant", "a red field"),
    ("user", "Is it large?"),
    ("assistant", "no"),
)


@pytest.mark.parametrize("template", ["tiny/qwen3_vl", "released/qwen3_vl_instruct", "released/qwen2_5_vl"])
def test_a_datum_is_what_the_template_writes_and_learns_the_answers(template: str) -> None:
    (datum,) = encoder(template).datums(TWO_TURNS)
    said = [
        {
            "role": one.role,
            "content": [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in one.parts
            ],
        }
        for one in TWO_TURNS.messages
    ]
    written = tokenizer(template).apply_chat_template(said, tokenize=False).replace("<|image_pad|>", "#")
    assert text(template, datum) == written.rstrip("\n")
    assert learnt(template, datum) == "a red field<|im_end|>no<|im_end|>"


def test_a_picture_counts_by_its_tokens() -> None:
    (datum,) = encoder().datums(TWO_TURNS)
    (image,) = (chunk for chunk in datum.model_input.chunks if not isinstance(chunk, tinker.EncodedTextChunk))
    assert image.length == TOKENS
    assert encoder().token_count(TWO_TURNS) == datum.model_input.length + 1


def test_an_answer_of_weight_0_is_read_and_not_learnt() -> None:
    rows: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first", "weight": 0},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "second"},
    ]
    (datum,) = encoder().datums(RowReader().conversation({"messages": rows}, "row"))
    assert "first" in text("tiny/qwen3_vl", datum)
    assert learnt("tiny/qwen3_vl", datum) == "second<|im_end|>"


def test_where_the_template_leaves_out_thinking_each_answer_is_learnt_as_it_is_read() -> None:
    thought = "<think>\nhm\n</think>\n\n"
    two = conversation(
        ("user", "one"), ("assistant", f"{thought}first"), ("user", "two"), ("assistant", f"{thought}second")
    )
    first, second = encoder("released/qwen3").datums(two)
    assert learnt("released/qwen3", first) == f"{thought}first<|im_end|>"
    assert learnt("released/qwen3", second) == f"{thought}second<|im_end|>"
    assert "hm" not in text("released/qwen3", second).partition("two")[0]


@pytest.mark.parametrize(
    ("answer", "target"),
    [("a cat", "\n</think>\n\na cat<|im_end|>"), ("<think>\nhm\n</think>\n\na cat", "hm\n</think>\n\na cat<|im_end|>")],
)
def test_thinking_that_the_prompt_opens_is_closed(answer: str, target: str) -> None:
    template = "released/qwen3_vl_thinking"
    (datum,) = encoder(template).datums(conversation(("user", "one"), ("assistant", answer)))
    assert learnt(template, datum) == target


def test_a_prompt_is_what_the_answer_follows() -> None:
    found = encoder().prompt(TWO_TURNS.question)
    (datum,) = encoder().datums(TWO_TURNS)
    said = [chunk.tokens for chunk in found.chunks if isinstance(chunk, tinker.EncodedTextChunk)]
    trained = [chunk.tokens for chunk in datum.model_input.chunks if isinstance(chunk, tinker.EncodedTextChunk)]
    flat = [token for run in trained for token in run]
    assert flat[: sum(map(len, said))] == [token for run in said for token in run]


def test_an_answer_is_read_without_its_end() -> None:
    ids = tokenizer("tiny/qwen3_vl").encode("a cat<|im_end|>")
    assert encoder().read(ids) == "a cat"


async def test_datums_are_made_where_an_event_loop_runs() -> None:
    await asyncio.sleep(0)
    assert encoder().datums(TWO_TURNS)


@pytest.mark.parametrize("template", sorted(TEXT_ONLY))
def test_a_template_without_pictures_refuses_them_by_row(template: str) -> None:
    with pytest.raises(InvalidInput, match=r"chats\.jsonl:17: the row has pictures, but .* chat template accepts none"):
        encoder(template).datums(conversation(("user", [PICTURE]), ("assistant", "a cat")))


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    class Plain:
        chat_template = None

    with pytest.raises(InvalidInput, match="no chat template: fine-tune an instruct model"):
        Encoder(Plain(), PictureTokens(None))


def test_a_target_outside_the_vocabulary_is_refused_by_row() -> None:
    end = tokenizer("tiny/qwen3_vl").convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(InvalidInput, match=rf"chats\.jsonl:17: .*'<\|im_end\|>' with id {end}, .* ends at {end - 1}"):
        encoder(vocabulary=end).datums(TWO_TURNS)


def test_a_row_that_is_too_long_is_refused_by_name() -> None:
    count = encoder().token_count(TWO_TURNS)
    encoder(max_tokens=count).datums(TWO_TURNS)
    with pytest.raises(
        ContextOverflow, match=rf"chats\.jsonl:17: the row has {count} tokens; the limit is {count - 1}"
    ):
        encoder(max_tokens=count - 1).datums(TWO_TURNS)
