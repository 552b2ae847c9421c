"""An exported adapter in PEFT on plain transformers equals the merged model; exceptions have a note.

`test_adapter_merge.py` compares the merged weights with the trainer's own factors.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from fovea.api.v1 import weights_pb2
from fovea.runtime.model_files import read_json
from fovea_data.adapter_merge import ADAPTER_CONFIG, UNTIE, merge_adapter, notes_of
from fovea_tinyvlm.families import FAMILIES
from fovea_tinyvlm.recipe import KINDS
from fovea_trainer.weights.snapshot_taker import ExportForm
from tests.families import ensure_family
from tests.unit.fovea_data.test_adapter_merge import loaded, trained

QUICK = ["qwen3_vl", "qwen3", "qwen3_moe", "qwen3_vl_moe"]
MORE = [name for name in [*KINDS, *FAMILIES] if name not in QUICK]
IDS = torch.arange(5, 37)[None]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignores PEFT's warnings of tied heads and unknown entries, which are intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def exported(directory: Path, folder: Path) -> Path:
    """Returns the trainer's export of an adapter of all modules."""
    weights = trained(directory)
    lora = weights_pb2.LoraConfig(rank=weights.settings.rank, alpha=weights.settings.alpha)
    form = ExportForm(read_json(directory / "config.json")["model_type"])
    folder.mkdir()
    for name, parts in form.files(dict(weights.named(weights.flat.detach())), lora, str(directory)).items():
        (folder / name).write_bytes(b"".join(bytes(part) for part in parts))
    return folder


def answers(model: Any) -> Tensor:
    """Returns log-probabilities, float32 [32, vocabulary]."""
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=IDS).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_peft_reads_an_export_as_the_merged_model_has_it_or_a_note_says_otherwise(name: str, tmp_path: Path) -> None:
    directory = ensure_family(name)
    adapter = exported(directory, tmp_path / "adapter")
    merged = tmp_path / "merged"
    merged.mkdir()
    merge_adapter(adapter, directory, merged)
    wanted = answers(loaded(merged))
    base = loaded(directory)
    notes = notes_of(adapter, directory)
    assert ("fovea_note" in read_json(adapter / ADAPTER_CONFIG)) == ("experts" in notes)
    found = answers(PeftModel.from_pretrained(base, str(adapter)))
    gap = (found - wanted).abs().max().item()
    if "experts" in notes:
        assert gap > 0.1, "PEFT now reads it: add the family to PEFT_READS_EXPERTS_OF"
        return
    assert gap < 1e-3
    is_tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    assert ("tied" in notes) == is_tied
    model = loaded(directory)
    if is_tied:
        exec(UNTIE, {"model": model, "torch": torch})
    whole = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    assert (answers(whole) - wanted).abs().max().item() < 1e-3
    whole.save_pretrained(tmp_path / "saved")
    assert (answers(loaded(tmp_path / "saved")) - wanted).abs().max().item() < 1e-3
