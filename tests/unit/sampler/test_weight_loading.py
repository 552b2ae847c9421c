"""Expert kernels that accept full weights: those with their own packed format only pack once, when vLLM starts."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.config import LoadConfig
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from fovea_sampler.engine import base_sharing, weight_loading


class Method:
    """vLLM's description of an expert kernel."""

    def __init__(self, backend: UnquantizedMoeBackend) -> None:
        self.unquantized_backend = backend


def model(method: Any, adapted: bool) -> nn.Module:
    """Returns a model with one layer of experts."""
    experts = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(experts)
    experts.quant_method = method
    if adapted:
        experts.quant_method = FusedMoEModularMethod.__new__(FusedMoEModularMethod)
        nn.Module.__init__(experts.quant_method)
        experts.quant_method.old_quant_method = method
    return nn.ModuleList([experts, nn.Linear(1, 1)])


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("backend", ["TRITON", "BATCHED_TRITON", "CPU"])
def test_experts_that_are_read_as_they_come(backend: str, adapted: bool) -> None:
    assert weight_loading.problem(model(Method(UnquantizedMoeBackend[backend]), adapted)) == ""


def test_experts_in_a_form_of_their_own() -> None:
    """Without adapters vLLM packs later weights, too; nothing is known of a quantized method."""
    packing = Method(UnquantizedMoeBackend.FLASHINFER_TRTLLM)
    assert weight_loading.problem(model(packing, adapted=False)) == ""
    for method in (packing, SimpleNamespace()):
        assert "a form of its own" in weight_loading.problem(model(method, adapted=True))
    assert weight_loading.problem(nn.Linear(1, 1)) == ""


@pytest.mark.parametrize(
    ("method", "kernels"),
    [(Method(UnquantizedMoeBackend.FLASHINFER_TRTLLM), "FlashInfer TRTLLM"), (SimpleNamespace(), "SimpleNamespace")],
)
def test_a_shared_base_refuses_them_before_it_reads_weights(method: Any, kernels: str) -> None:
    loader = base_sharing.SharedModelLoader(LoadConfig())
    said = rf"^--shared-base: .* for its kernels \({kernels}\) in a form that the trainer cannot read: start both"
    with pytest.raises(ValueError, match=said):
        loader.load_weights(model(method, adapted=False), None)
