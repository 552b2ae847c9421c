"""The size of a micro-batch."""

import torch
from transformers import Qwen3Config

from services.trainer.token_budget import CPU_TOKENS, activation_bytes, token_budget

CONFIG = Qwen3Config(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)


def test_activations_are_those_measured_and_a_quarter_more() -> None:
    measured_bytes = 32.3 * 2**30 / 8192  # Qwen3-VL-4B's sizes, rank 32, one H200
    assert 1.1 < activation_bytes(CONFIG, torch.bfloat16) / measured_bytes < 1.4


def test_a_cpu_has_a_fixed_budget() -> None:
    assert token_budget(CONFIG, torch.float32, torch.device("cpu"), 10**15) == CPU_TOKENS
