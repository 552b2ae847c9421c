"""A tiny checkpoint is built, trained for some steps, written and read again; its packed questions do not leak."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from fovea_real.architecture import Tower, join, save
from fovea_real.asking import ask_transformers, questions, read_recipe, scores, write_sheet
from fovea_real.drawings import COLOURS
from fovea_real.pretraining import IGNORED, NAMES, Encoder, Learner, Recipe, train
from fovea_real.vlm import main
from tests.families import ensure_family

RECIPE = Recipe(
    steps=30, tower=Tower(64, 16, 2, 32, 1, 2), tasks=("shapes",), most_shapes=1, batch=4, micro_batch=2, length=96,
    tower_share=0.5, tower_rate=3e-3, language_rate=3e-3,
)  # fmt: skip


@pytest.fixture(scope="module")
def joined() -> tuple[Any, Any]:
    return join(ensure_family("llama"), RECIPE.tower, seed=0)


@pytest.mark.parametrize(("batch", "micro_batch"), [(64, None), (5, 2)])
def test_a_batch_of_no_whole_parts_is_refused(tmp_path: Path, batch: int, micro_batch: int | None) -> None:
    with pytest.raises(typer.BadParameter, match=f"--batch {batch} is no multiple of --micro-batch"):
        main(tmp_path, batch=batch, micro_batch=micro_batch)


def test_prompts_are_padded_although_the_language_model_has_no_padding_token(tmp_path: Path) -> None:
    language = shutil.copytree(ensure_family("llama"), tmp_path / "language")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (file := language / name).exists():
            file.write_text(
                json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "pad_token"})
            )
    assert AutoTokenizer.from_pretrained(language).pad_token is None
    model, processor = join(language, RECIPE.tower, seed=0)
    save(model, processor, tmp_path / "made", torch.float32, RECIPE)
    asked = questions(RECIPE, 2)
    ask_transformers(tmp_path / "made", asked, torch.device("cpu"), torch.float32, batch=len(asked))
    assert all(one.tokens is not None for one in asked)


def test_a_packed_question_is_answered_as_if_it_were_alone(joined: tuple[Any, Any]) -> None:
    model, processor = joined
    encoder = Encoder(processor.tokenizer, RECIPE.tower, 256)
    one = RECIPE.draw("train", 0)
    arrays, kinds = encoder.encode([one], 0)
    assert len(kinds[0]) == len(one.questions)
    learner = Learner(model, encoder, RECIPE, torch.device("cpu"))
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.no_grad():
        packed = learner._logits(learner._images(batch), batch)
    asked = {question.text: question for question in one.questions}
    parts, labels, begin = arrays["parts"][0], arrays["labels"][0], 0
    for number in range(1, len(kinds[0]) + 1):
        text = processor.tokenizer.decode(arrays["ids"][0][parts == number])
        (question,) = (found for found in asked.values() if text.startswith(found.text + "<|im_end|>"))
        chat = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.text}]},
            {"role": "assistant", "content": question.answer},
        ]
        whole = processor(
            text=processor.apply_chat_template(chat), images=[Image.fromarray(one.pixels)], return_tensors="pt"
        )
        learnt = labels[parts == number]
        learnt = learnt[learnt != IGNORED]
        ids = whole["input_ids"][0]
        # The chat ends with the answer, its end token, and a line break, in one or more tokens.
        after = len(processor.tokenizer("\n", add_special_tokens=False)["input_ids"])
        end = len(ids) - after
        assert ids[end - len(learnt) : end].tolist() == learnt.tolist()
        with torch.no_grad():
            alone = model(**whole).logits[0, end - len(learnt) - 1 : end - 1]
        torch.testing.assert_close(packed[begin : begin + len(learnt)], alone, atol=1e-4, rtol=1e-4)
        begin += len(learnt)
    assert begin == len(packed)


def test_each_thing_names_the_token_in_its_middle() -> None:
    _, processor = join(ensure_family("llama"), RECIPE.tower, seed=0)
    encoder = Encoder(processor.tokenizer, RECIPE.tower, 128)
    for index in range(20):
        one = RECIPE.draw("train", index)
        arrays, _ = encoder.encode([one], 0)
        (thing,) = one.things
        cells = RECIPE.tower.cells
        column, row = (int((low + high) / 2 / 256 * cells) for low, high in (thing.box[0::2], thing.box[1::2]))
        assert NAMES[arrays["names"][0, row, column]] == thing.word
        assert list(COLOURS)[arrays["colours"][0, row, column]] == thing.colour
        assert ((arrays["names"][0] == 0) == (arrays["colours"][0] == IGNORED)).all()


@pytest.mark.slow
def test_training_lowers_both_losses_and_the_folder_answers(tmp_path: Path) -> None:
    model, processor = join(ensure_family("llama"), RECIPE.tower, seed=0)
    lines: list[str] = []
    log = train(model, processor, RECIPE, torch.device("cpu"), lines.append, every_s=0.0, checked=4)
    assert log[-1]["pictures"] == RECIPE.steps * RECIPE.batch  # type: ignore[operator]
    assert log[-1]["word loss"] < 0.8 * log[0]["word loss"]
    told = [line["answer loss"] for line in log if "captions" in line]
    assert told[-1] < 0.9 * told[0]
    folder = tmp_path / "model"
    save(model, processor, folder, torch.float32, RECIPE)
    assert read_recipe(folder) == RECIPE
    again: Any = AutoModelForImageTextToText.from_pretrained(folder)
    assert again.lm_head.weight is again.get_input_embeddings().weight
    assert AutoProcessor.from_pretrained(folder).image_processor.do_image_splitting is False
    for name, weight in model.named_parameters():
        assert torch.equal(weight, again.get_parameter(name)), name
    asked = questions(RECIPE, 2)
    ask_transformers(folder, asked, torch.device("cpu"), torch.float32, 4)
    assert all(one.tokens for one in asked)
    assert set(scores(asked)) >= {"captions", "short answers", "whole caption"}
    write_sheet(tmp_path / "sheet.png", asked)
    assert (tmp_path / "sheet.png").stat().st_size > 1000
