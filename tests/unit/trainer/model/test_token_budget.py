"""The size of a micro-batch."""

import torch
from transformers import Gemma4TextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3VLConfig

from services.trainer.model.linear_attention import kept_bytes
from services.trainer.model.memory_budget import (
    MOST_PATCHES,
    MOST_TOKENS,
    activation_bytes,
    budgets_within,
    least_bytes,
    patch_bytes,
)

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
    measured_bytes = 32.3 * GIB / 8192  # Qwen3-VL-4B's sizes, rank 32, one H200
    assert 1.1 < activation_bytes(CONFIG, torch.bfloat16) / measured_bytes < 1.4


def test_layers_of_other_sizes_are_counted_one_by_one() -> None:
    sizes = {**TEXT, "num_hidden_layers": 3, "layer_types": [*2 * ["sliding_attention"], "full_attention"]}
    more = {"num_kv_shared_layers": 1, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256}
    found = activation_bytes(Gemma4TextConfig(**sizes, global_head_dim=256, **more), torch.bfloat16)
    inner, heads = 3 * (9728 + 512), 4 * 40
    layers = [inner + heads * 128, inner + heads * 128, inner + 3 * 9728 + heads * 256]
    assert found == 2 * (3 * 8 * 2560 + sum(layers))


def test_delta_nets_are_counted_by_their_own_sizes() -> None:
    linear, full = (Qwen3_5TextConfig(**TEXT, layer_types=36 * [f"{kind}_attention"]) for kind in ("linear", "full"))
    one = (activation_bytes(linear, torch.bfloat16) - activation_bytes(full, torch.bfloat16)) // 36
    assert one == kept_bytes(linear, torch.bfloat16) - 2 * 4 * 128 * (32 + 8)


def test_what_is_kept_for_computing_holds_the_smallest_micro_batches() -> None:
    reserve_bytes = least_bytes(VL_CONFIG, torch.bfloat16, 512 * 2**20, True)
    found = budgets_within(0, VL_CONFIG, torch.bfloat16, True)
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
    assert (found.tokens, found.patches) == (MOST_TOKENS, MOST_PATCHES)
