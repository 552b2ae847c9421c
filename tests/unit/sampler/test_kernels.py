"""Our kernels for vLLM's CPU engine against their formulas."""

# ruff: noqa: N806 -- shape suffixes

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from fovea_sampler.vllm_patches import kernels_cpu
from fovea_sampler.vllm_patches.lora_memory import RankPlace
from fovea_sampler.vllm_patches.punica import Run, _apply, _runs

SLOTS, MOST, WIDE, OUT = 3, 8, 12, 10


@pytest.mark.parametrize("rank", [2, 8, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_gets_its_adapter_and_no_other_row_changes(rank: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a_SxRI = torch.zeros(SLOTS, 1, MOST, WIDE, dtype=dtype)
    b_SxOR = torch.zeros(SLOTS, 1, OUT, MOST, dtype=dtype)
    true = rank or MOST
    a_SxRI[1, 0, :true] = torch.randn(true, WIDE)
    b_SxOR[1, 0, :, :true] = torch.randn(OUT, true)
    x_NI, y_NO = torch.randn(6, WIDE).to(dtype), torch.randn(6, 2 * OUT).to(dtype)
    expected = y_NO.clone().double()
    delta = x_NI[2:5].double() @ a_SxRI[1, 0].double().T @ b_SxOR[1, 0].double().T * 0.5
    expected[2:5, OUT : OUT + 7] += delta[:, :7]  # a base layer that is narrower than the adapter
    _apply(y_NO[:, OUT : OUT + 7], x_NI, a_SxRI, b_SxOR, Run(2, 5, 1, rank), 0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(y_NO.double(), expected, atol=tolerance, rtol=tolerance)


def test_neighbours_with_one_adapter_are_one_run() -> None:
    place = RankPlace(64, 16)
    runs = _runs((0, 7, 7, 9, 0, 9), {7: 2, 9: 0}, {2: (8, place)})
    assert runs == [Run(1, 3, 2, 8, place), Run(3, 4, 0, None), Run(5, 6, 0, None)]


@pytest.mark.parametrize("shape", [(5, 128), (3, 4, 32)])
def test_norms_are_those_of_vllm(shape: tuple[int, ...]) -> None:
    from vllm import ir

    torch.manual_seed(0)
    kernels_cpu.apply()
    kernels_cpu.apply()
    wide = torch.randn(*shape[:-1], 2 * shape[-1])
    x, weight = wide[..., : shape[-1]], torch.randn(shape[-1])
    native = ir.ops.rms_norm.impls["native"].impl_fn
    torch.testing.assert_close(kernels_cpu._rms_norm(x, weight, 1e-6), native(x, weight, 1e-6))
    x, residual = x.contiguous(), torch.randn(shape)
    native = ir.ops.fused_add_rms_norm.impls["native"].impl_fn
    expected = native(x.clone(), residual.clone(), weight, 1e-6)
    torch.testing.assert_close(kernels_cpu._fused_add_rms_norm(x, residual, weight, 1e-6), expected)


def test_what_the_kernels_cannot_do_is_left_to_vllm() -> None:
    x = torch.randn(2, 24)
    assert not kernels_cpu._takes(x, torch.ones(24), 1e-6), "not a multiple of 16"
    assert not kernels_cpu._takes(x[:, :16], torch.ones(16, dtype=torch.float64), 1e-6)
    assert not kernels_cpu._takes(x[:, :16], None, 1e-6)
    assert kernels_cpu._takes(x[:, :16], torch.ones(16), 1e-6)
    assert not kernels_cpu._takes_sum(x[:, :16], x[:, :16], torch.ones(16), 1e-6), "rows are not contiguous"


@pytest.mark.parametrize("steps", [[100], [64, 36], [1] * 5 + [95], [70] + [1] * 30], ids=str)
def test_a_delta_net_goes_on_where_it_was(steps: list[int]) -> None:
    """Two sequences with non-adjacent states, in parts of a prompt and token by token, against transformers' whole
    sequence.
    """
    torch.manual_seed(1)
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    net = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=24, linear_value_head_dim=12, **sizes), 0)
    net.requires_grad_(False)
    hidden = torch.randn(2, 100, 24)
    wanted = net(hidden)
    names = ("key_dim", "num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", "A_log", "dt_bias", "conv1d")
    # The old states of new sequences must not matter.
    caches = torch.full((5, 3, 2 * 16 + 48), 7.0), torch.full((5, 4, 12, 8), 7.0)
    layer = SimpleNamespace(tp_size=1, kv_cache=caches, **{name: getattr(net, name) for name in names})
    slots, parts = torch.tensor([3, 1]), []
    for count, part in enumerate(hidden.split(steps, dim=1)):
        given = (net.in_proj_qkv(part), net.in_proj_b(part), net.in_proj_a(part))
        parts.append(kernels_cpu._advance(layer, given, slots, count > 0))
    gate = net.in_proj_z(hidden)
    normed = net.norm(torch.cat(parts, dim=1).reshape(-1, 12), gate.reshape(-1, 12)).view_as(gate)
    torch.testing.assert_close(net.out_proj(normed), wanted, atol=1e-5, rtol=1e-4)
    assert (caches[1][[0, 2, 4]] == 7).all()
