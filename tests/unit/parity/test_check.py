"""`fovea models check` on checkpoints that work, that fail, and that crash the process."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.utils import logging

from fovea_parity.__main__ import main
from fovea_parity.documents import DocumentMaker
from fovea_parity.finding import Finding, run_apart
from fovea_parity.learning_part import Lesson
from fovea_parity.mixed_batch import fullness
from fovea_parity.page import BEGIN, END, Row, with_table
from fovea_parity.shallow import cut, layers_needed
from tests.families import ensure_family


def test_as_few_layers_as_show_every_kind() -> None:
    assert layers_needed(AutoConfig.from_pretrained(ensure_family("llama")).get_text_config()) == 2
    assert layers_needed(AutoConfig.from_pretrained(ensure_family("qwen3_5")).get_text_config()) == 4
    assert layers_needed(AutoConfig.from_pretrained(ensure_family("gemma3")).get_text_config()) == 6


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_checkpoint_is_cut_with_its_tokenizer(tmp_path: Path, has_weights: bool) -> None:
    source = tmp_path / "source"
    shutil.copytree(ensure_family("llama"), source)
    if not has_weights:
        (source / "model.safetensors").unlink()
    assert cut(source, tmp_path / "cut") == 2
    names = {path.name for path in (tmp_path / "cut").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert AutoConfig.from_pretrained(tmp_path / "cut").num_hidden_layers == 2


def test_a_checkpoint_with_different_layers_is_truncated(tmp_path: Path) -> None:
    assert cut(ensure_family("gemma4_e2b"), tmp_path / "cut") == 3
    text = AutoConfig.from_pretrained(tmp_path / "cut").get_text_config()
    sizes = [text.per_layer_config[index].head_dim for index in range(3)]
    assert sizes[0] == sizes[1] < sizes[2]


def test_a_checkpoint_with_experts_is_cut_in_the_layout_that_was_published(tmp_path: Path) -> None:
    assert cut(ensure_family("qwen3_vl_moe"), tmp_path / "cut") == 2
    source, found = (load_file(one / "model.safetensors") for one in (ensure_family("qwen3_vl_moe"), tmp_path / "cut"))
    names = [name for name in found if ".experts." in name]
    assert len(names) == 2 * 2
    assert all(torch.equal(found[name], source[name]) for name in names)


def test_a_checkpoint_with_a_thinker_is_cut_as_a_whole(tmp_path: Path) -> None:
    assert cut(ensure_family("qwen3_omni_moe"), tmp_path / "cut") == 2
    config = AutoConfig.from_pretrained(tmp_path / "cut")
    assert (config.model_type, config.get_text_config().num_hidden_layers) == ("qwen3_omni_moe", 2)
    names = list(load_file(tmp_path / "cut" / "model.safetensors"))
    assert "thinker.model.layers.1.mlp.experts.7.down_proj.weight" in names
    assert not [name for name in names if ".layers.2." in name]


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(ValueError, match="needs custom code"):
        cut(tmp_path, tmp_path / "cut")


@pytest.mark.slow
def test_a_part_that_raises_is_a_finding_and_the_next_checkpoint_is_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kosmos-9"}')
    broken, works, pictured = run_apart("renderer", [tmp_path, ensure_family("llama"), ensure_family("gemma3")])
    assert not broken.works
    assert broken.says.startswith("ValueError: Unrecognized processing class")
    assert works == Finding("renderer", True, "text only: ids equal")
    said = "ids and tensors equal: 10 sizes, one and two images, first and last, between line feeds"
    assert pictured == Finding("renderer", True, said, {"sizes": 10})


def test_the_command_says_why_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kosmos-9"}')
    monkeypatch.setattr(sys, "argv", ["fovea_parity", str(tmp_path)])
    level = logging.get_verbosity()
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("transformers  does not work: ")
    assert "kosmos-9" in line


def test_the_page_keeps_what_stands_around_its_rows() -> None:
    finding = {"part": "renderer", "works": False, "says": "a | b", "figures": {}}
    rows: dict[str, Row] = {"llama": {"date": "2026-11-23", "findings": [finding]}}
    lesson = {"learning_start": 0.25, "learning_end": 1.0, "learning_blind": 0.3, "learning_seconds": 9.2}
    rows["qwen3"] = {
        "date": "2026-11-23",
        "findings": [
            {"part": "trainer", "works": True, "says": "equal", "figures": {"packed": 0.96, "padded": 0.5}},
            {"part": "served", "works": True, "says": "agrees", "figures": lesson},
        ],
    }
    page = with_table(f"before\n{BEGIN}old\n{END}after\n", rows)
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "**not yet**: a \\| b" in page
    assert "| agrees | 0.25 to 1.00 in 9 s; grey 0.30 | packed 0.96, padded 0.50 | 2026-11-23 |" in page
    with pytest.raises(ValueError, match="lacks the lines"):
        with_table("nothing", rows)


def test_a_model_that_is_blind_or_is_told_the_answer_learns_nothing_from_pixels() -> None:
    assert Lesson(start=0.25, end=1.0, blind=0.3, seconds=9.0).problem == ""
    assert "names only 0.50 of the colours after training" in Lesson(0.25, 0.5, 0.25, 9.0).problem
    assert "names 0.80 of the colours although all pictures are grey" in Lesson(0.25, 1.0, 0.8, 9.0).problem


def test_micro_batches_of_a_mixed_batch_are_fuller_packed_than_padded() -> None:
    found = fullness(DocumentMaker(ensure_family("internvl")))
    assert 0.9 < found["packed"] <= 1
    assert found["padded"] < 0.7
