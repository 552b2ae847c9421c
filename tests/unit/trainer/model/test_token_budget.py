"""The size of a micro-batch."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, Gemma4TextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3VLConfig

from fovea.runtime.model_files import EXPERT_TYPES
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import BatchLayout
from fovea_trainer.model.linear_attention import retained_bytes
from fovea_trainer.model.lora import LoraInjector
from fovea_trainer.model.memory_budget import (
    MAX_PATCHES,
    MAX_TOKENS,
    DeviceMemory,
    MemoryBudget,
    activation_bytes,
    budgets_within,
    pass_bytes,
    patch_bytes,
    recomputed_bytes,
)
from fovea_trainer.model.packed_model import PackedModel, load_model
from fovea_trainer.settings import TrainerSettings
from tests.families import ensure_family

CPU = torch.device("cpu")

TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
CONFIG = Qwen3Config(**TEXT)
VL_CONFIG = Qwen3VLConfig(text_config=TEXT, vision_config=TOWER)
GIB = 2**30


def test_activations_are_those_measured_and_a_quarter_more() -> None:
    streams_bytes = 36 * 2 * 2 * 2560  # the norms' inputs have become float32 since: two more bytes per number
    measured_bytes = 32.3 * GIB / 8192 + streams_bytes  # Qwen3-VL-4B's sizes, rank 32, one H200
    assert 1.1 < activation_bytes(CONFIG, torch.bfloat16) / measured_bytes < 1.4


@pytest.mark.parametrize("name", EXPERT_TYPES)
def test_a_mixture_with_transformers_defaults_is_counted(name: str) -> None:
    """Qwen3.5's mixture has no entry for a dense layer, and its trainer did not start."""
    config = CONFIG_MAPPING[name]()
    assert 0 < pass_bytes(config, torch.bfloat16, 2**20, 1, 0) < activation_bytes(config, torch.bfloat16) + 2**23
    assert 0 < recomputed_bytes(config, torch.bfloat16) < activation_bytes(config, torch.bfloat16)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_vl", "gemma3", "gemma4_31b", "qwen3_5", "glm4v", "lfm2_vl", "qwen3_moe", "qwen3_5_moe"),
        *("mixtral", "glm4_moe", "qwen3_next", "gemma4_26b", "llama4", "llama4_text"),
    ],
)
def test_no_family_keeps_more_than_is_counted(name: str) -> None:
    """Gemma 3 4B ran out of memory on an H200, because the float32 inputs of its norms were not counted."""
    directory = ensure_family(name)
    family, _, module = load_model(TrainerSettings(model=str(directory), dtype="bfloat16"), directory, CPU)
    LoraInjector(list(family.lora_targets(module.requires_grad_(False).hf)))
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    module.hf.get_decoder().register_forward_pre_hook(_want_gradients, with_kwargs=True)
    per_token = (_retained_bytes(module, own, 512) - _retained_bytes(module, own, 256)) / 256
    assert 1.0 < activation_bytes(module.hf.config, torch.bfloat16) / per_token < 1.7


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_layers_that_are_recomputed_keep_their_inputs_alone(name: str) -> None:
    """The gradients have the same bits."""
    directory = ensure_family(name)
    family, _, module = load_model(TrainerSettings(model=str(directory), dtype="bfloat16"), directory, CPU)
    LoraInjector(list(family.lora_targets(module.requires_grad_(False).hf)))
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    embeddings = module.hf.get_input_embeddings().requires_grad_(True).weight
    kept, gradients = [], []
    for share in (0.0, 0.25, 0.5, 1.0):
        kept.append((_retained_bytes(module, own, 512, share) - _retained_bytes(module, own, 256, share)) / 256)
        embeddings.grad = None
        _pass(module, 64, share).sum().backward()
        gradients.append(embeddings.grad)
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 2 * kept[-1]
    assert all(torch.equal(one, gradients[0]) for one in gradients)


def test_no_more_layers_are_recomputed_than_memory_needs() -> None:
    """Just above the limit one or two layers are recomputed instead of all."""
    memory = SimpleNamespace(is_known=True, free_bytes=lambda: 100 * GIB)
    control: Any = SimpleNamespace(minimum=lambda value: value)
    settings = TrainerSettings(model="m")
    budget = MemoryBudget(settings, VL_CONFIG, torch.bfloat16, cast(DeviceMemory, memory), control, lambda _: False)
    budgets = budget.budgets(0, False)
    assert MAX_TOKENS == budgets.tokens < budgets.retained < 20000
    room = budgets.retained * activation_bytes(VL_CONFIG, torch.bfloat16)
    shares = [
        budget.recomputed_share(tokens, budgets) for tokens in range(budgets.retained, 10 * budgets.retained, 500)
    ]
    assert shares[0] == 0.0
    assert 0.0 < budget.recomputed_share(budgets.retained + 1, budgets) < 3 / 36
    assert shares == sorted(shares)
    for tokens, share in zip(range(budgets.retained, 10 * budgets.retained, 500), shares, strict=True):
        assert share == 1.0 or tokens * recomputed_bytes(VL_CONFIG, torch.bfloat16, share) <= room + tokens
    for wanted, share in (("always", 1.0), ("never", 0.0)):
        one = settings.model_copy(update={"recompute": wanted})
        budget = MemoryBudget(one, VL_CONFIG, torch.bfloat16, cast(DeviceMemory, memory), control, lambda _: False)
        assert {budget.recomputed_share(tokens, budgets) for tokens in (1, 10**6)} == {share}


def _want_gradients(_: torch.nn.Module, __: tuple[()], given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Enables gradients as if an adapter preceded the first layer, so that all later activations are kept."""
    return (), given | {"inputs_embeds": given["inputs_embeds"].detach().requires_grad_()}


def _pass(module: PackedModel, length: int, share: float) -> torch.Tensor:
    tokens = np.random.default_rng(0).integers(10, 900, length)
    datum = Datum(0, tokens, None, (), 0, tokens[:, None], {}, True)
    found: torch.Tensor = module(BatchLayout(None, CPU).pack([datum], {}, False, None), None, None, share)
    return found


def _retained_bytes(module: PackedModel, own: set[int], length: int, share: float = 0.0) -> int:
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _pass(module, length, share)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


def test_layers_of_other_sizes_are_counted_one_by_one() -> None:
    sizes = {**TEXT, "num_hidden_layers": 3, "layer_types": [*2 * ["sliding_attention"], "full_attention"]}
    more = {"num_kv_shared_layers": 1, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256}
    found = activation_bytes(Gemma4TextConfig(**sizes, global_head_dim=256, **more), torch.bfloat16)
    inner, heads = 3 * (9728 + 512), 4 * 40
    layers = [inner + heads * 128, inner + heads * 128, inner + 3 * 9728 + heads * 256]
    norms = 4 * (3 * 4 * 2560 + 40 * (128 + 128 + 256))
    assert found == 2 * (3 * 8 * 2560 + sum(layers)) + norms


def test_delta_nets_are_counted_by_their_own_sizes() -> None:
    linear, full = (Qwen3_5TextConfig(**TEXT, layer_types=36 * [f"{kind}_attention"]) for kind in ("linear", "full"))
    one = (activation_bytes(linear, torch.bfloat16) - activation_bytes(full, torch.bfloat16)) // 36
    assert one == retained_bytes(linear, torch.bfloat16) - 2 * 4 * 128 * (32 + 8)


def test_the_reserve_for_computing_fits_the_smallest_micro_batches() -> None:
    found = budgets_within(0, VL_CONFIG, torch.bfloat16, True)
    reserve_bytes = pass_bytes(VL_CONFIG, torch.bfloat16, 512 * 2**20, found.tokens, found.patches)
    text = found.tokens * activation_bytes(VL_CONFIG, torch.bfloat16)
    tower = found.patches * patch_bytes(VL_CONFIG, torch.bfloat16)
    assert text + tower < reserve_bytes < 1.3 * (text + tower)


def test_both_budgets_fit_the_memory_together() -> None:
    size_bytes = 64 * GIB
    found = budgets_within(size_bytes, VL_CONFIG, torch.bfloat16, True)
    text, tower = (
        found.tokens * activation_bytes(VL_CONFIG, torch.bfloat16),
        found.patches * patch_bytes(VL_CONFIG, torch.bfloat16),
    )
    assert 0.9 * size_bytes < text + tower <= size_bytes


def test_a_frozen_tower_keeps_nothing() -> None:
    found = budgets_within(100 * GIB, VL_CONFIG, torch.bfloat16, False)
    assert (found.tokens, found.patches) == (MAX_TOKENS, MAX_PATCHES)
