"""The header of an adapter file is compared with the model before any tensor is read."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import save_file
from transformers import AutoConfig

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import InvalidInput, NotFound
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.model_family import LoraTarget, Role, family_of
from fovea_trainer.weights import weight_files
from fovea_trainer.weights.checkpoint_folder import Folder
from fovea_trainer.weights.training_state import check_upload
from tests.families import ensure_family

WEIGHTS = "adapter_model.safetensors"
LAYER = "base_model.model.layers.0"
TARGETS = {
    f"{LAYER}.q_proj.lora_A.weight": torch.empty(4, 8, device="meta"),
    f"{LAYER}.q_proj.lora_B.weight": torch.empty(8, 4, device="meta"),
    f"{LAYER}.experts.w1.lora_A.weight": torch.empty(1, 4, 8, device="meta"),
    f"{LAYER}.experts.w1.lora_B.weight": torch.empty(3, 6, 4, device="meta"),
}


class CountingFiles(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Local files, with a count of the bytes read."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def cat_file(self, *args: Any, **kwargs: Any) -> bytes:
        found = bytes(super().cat_file(*args, **kwargs))
        self.read_bytes += len(found)
        return found


def sparse(folder: Path, shapes: dict[str, list[int]], surplus: int = 0) -> Folder:
    """Writes a sparse file with float32 tensors in its header; all bytes are zero and use no disk space."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(folder / WEIGHTS, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end + surplus)
    return Folder(CountingFiles(), str(folder))


def apart(**changes: list[int]) -> dict[str, list[int]]:
    """Returns the shapes of an adapter of these targets as PEFT stores it, with separate tensors per expert."""
    shapes = {name: list(target.shape) for name, target in TARGETS.items() if target.dim() == 2}
    for index in range(3):
        shapes[f"{LAYER}.experts.{index}.gate_proj.lora_A.weight"] = [4, 8]
        shapes[f"{LAYER}.experts.{index}.gate_proj.lora_B.weight"] = [6, 4]
    return shapes | {f"{LAYER}.{name}.weight": shape for name, shape in changes.items()}


def test_four_gibibytes_that_do_not_fit_are_refused_by_their_header_alone(tmp_path: Path) -> None:
    size = 2**29
    folder = sparse(tmp_path, apart() | {f"{LAYER}.q_proj.lora_A.weight": [4, size // 4], "x": [size // 4, 4]})
    assert (tmp_path / WEIGHTS).stat().st_size > 4 * 2**30
    shapes = weight_files.read_shapes(folder, WEIGHTS)
    with pytest.raises(
        InvalidInput, match=r"q_proj.lora_A.weight with shape \[4, 134217728\], but the model needs \[4, 8\]"
    ):
        weight_files.check_shapes(shapes, TARGETS, "u", is_foreign=True)
    assert folder.files.read_bytes < 2**14


def test_fitting_adapters_are_accepted_stacked_or_separate_whole_or_partial(tmp_path: Path) -> None:
    for shapes in (apart(), {name: list(target.shape) for name, target in TARGETS.items()}):
        weight_files.check_shapes(shapes, TARGETS, "u", is_foreign=True)
    some = {name: shape for name, shape in apart().items() if "experts" not in name}
    weight_files.check_shapes(some, TARGETS, "u", is_foreign=True)
    with pytest.raises(InvalidInput, match=r"u has no .*experts.w1.lora_A.weight"):
        weight_files.check_shapes(some, TARGETS, "u", is_foreign=False)
    save_file({name: torch.zeros(shape) for name, shape in apart().items()}, tmp_path / WEIGHTS, {"format": "pt"})
    assert weight_files.read_shapes(Folder(CountingFiles(), str(tmp_path)), WEIGHTS) == apart()


def test_names_of_hosted_tinker_are_accepted_in_files_from_elsewhere() -> None:
    parent = "base_model.model"
    own = {f"{parent}.model.language_model.layers.0.q_proj", f"{parent}.lm_head", f"{parent}.model.visual.proj"}
    targets = {f"{name}.lora_{half}.weight": torch.rand(4, 4) for name in own for half in "AB"}
    hosted = {
        name.replace(".language_model.", ".").replace(".lm_head.", ".model.unembed_tokens."): tensor
        for name, tensor in targets.items()
    }
    assert hosted.keys() != targets.keys()
    shapes = {name: list(tensor.shape) for name, tensor in hosted.items()}
    weight_files.check_shapes(shapes, targets, "u", is_foreign=True)
    assert weight_files.of_experts(hosted, targets) == targets
    with pytest.raises(InvalidInput, match="it was saved from a differently shaped model"):
        weight_files.check_shapes(shapes, targets, "u", is_foreign=False)
    both = shapes | {f"{parent}.lm_head.lora_A.weight": [4, 4]}
    with pytest.raises(InvalidInput, match=r"lm_head.lora_A.weight' under two names"):
        weight_files.check_shapes(both, targets, "u", is_foreign=True)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({name: shape for name, shape in apart().items() if "q_proj.lora_B" not in name}, r"has no .*q_proj.lora_B"),
        (
            {name: shape for name, shape in apart().items() if "experts.1." not in name},
            r"w1.lora_B.weight with shape \[1, 6, 4\]",
        ),
        (apart(**{"experts.3.gate_proj.lora_B": [6, 4]}), r"\[4, 6, 4\], but the model needs \[3, 6, 4\]"),
        (apart(**{"experts.2.gate_proj.lora_B": [6, 9]}), r"\[3, 6, 9\], but the model needs \[3, 6, 4\]"),
        (apart(**{"k_proj.lora_A": [4, 8]}), r"has .*k_proj.lora_A.weight, which the model does not train"),
    ],
)
def test_the_first_thing_that_does_not_fit_is_named(shapes: dict[str, list[int]], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        weight_files.check_shapes(shapes, TARGETS, "u", is_foreign=True)


def test_a_file_that_is_not_what_its_header_says_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="its tensors need 928 bytes, but the file has 1928 bytes of data"):
        weight_files.read_shapes(sparse(tmp_path, apart(), surplus=1000), WEIGHTS)
    folder = Folder(CountingFiles(), str(tmp_path))
    for content in (b"", b"x", struct.pack("<Q", 2**40), struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b"{}"):
        (tmp_path / WEIGHTS).write_bytes(content)
        with pytest.raises(InvalidInput, match="is damaged"):
            weight_files.read_shapes(folder, WEIGHTS)
    with pytest.raises(NotFound):
        weight_files.read_shapes(folder, "other")


def test_an_upload_is_compared_with_a_model_that_does_not_exist(tmp_path: Path) -> None:
    targets = [LoraTarget("layers.0.q_proj", torch.nn.Linear(8, 6, device="meta"), Role.ATTENTION, vision=False)]
    lora = LoraSettings.of(weights_pb2.LoraConfig(rank=4, alpha=8, train_attention=True))
    fits = {f"{LAYER}.q_proj.lora_A.weight": [4, 8], f"{LAYER}.q_proj.lora_B.weight": [6, 4]}
    sparse(tmp_path, fits)
    check_upload(lora, targets, str(tmp_path))
    sparse(tmp_path, fits | {f"{LAYER}.q_proj.lora_B.weight": [7, 4]})
    with pytest.raises(InvalidInput, match=r"q_proj.lora_B.weight with shape \[7, 4\], but the model needs \[6, 4\]"):
        check_upload(lora, targets, str(tmp_path))
    with pytest.raises(NotFound):
        check_upload(lora, targets, str(tmp_path / "gone"))


def test_a_module_that_the_trainer_does_not_adapt_is_refused_by_name(tmp_path: Path) -> None:
    """vLLM computes adapters of the patch embedding of Llama 4's tower wrongly, so the trainer does not adapt it."""
    model = family_of("llama4").build(AutoConfig.from_pretrained(ensure_family("llama4")), torch.float32)
    targets = list(family_of("llama4").lora_targets(model))
    flags = {"train_attention": True, "train_mlp": True, "train_unembedding": True, "train_vision": True}
    lora = LoraSettings.of(weights_pb2.LoraConfig(rank=4, alpha=8, **flags))
    tower = "base_model.model.vision_model"
    for module, is_adapted in (("model.layers.0.mlp.fc1", True), ("patch_embedding.linear", False)):
        weight = model.get_submodule(f"vision_model.{module}").weight
        shapes = {"lora_A": [4, weight.shape[1]], "lora_B": [len(weight), 4]}
        sparse(tmp_path, {f"{tower}.{module}.{half}.weight": shape for half, shape in shapes.items()})
        if is_adapted:
            check_upload(lora, targets, str(tmp_path))
        else:
            with pytest.raises(InvalidInput, match=rf"{tower}.{module}.lora_A.weight, which the model does not train"):
                check_upload(lora, targets, str(tmp_path))
