"""Chunks, temperatures and routers of Llama 4, against dense masks and transformers' own modules."""

from copy import deepcopy
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from fovea_trainer.batches.datum_groups import Share
from fovea_trainer.model.document_masks import DocumentRule, Packing
from fovea_trainer.model.expert_routing import _GivenRouting
from fovea_trainer.model.experts import use_experts
from fovea_trainer.model.lora import LoraInjector
from fovea_trainer.model.model_family import LoraTarget, Role
from fovea_trainer.model.packed_attention import Scores, flex, packed_attention
from tests.unit.trainer.model.test_attention import check_equal

CHUNK = 4
LENGTHS = [[3], [4], [9], [4, 8], [1, 4, 11, 5, 4], [6, 6, 6]]
"""Documents shorter than a chunk, as long as one or two, and longer."""


def _inputs(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, count, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


def _layer(rule: DocumentRule) -> nn.Module:
    layer: Any = nn.Module()
    layer.document_rule = rule
    return layer


def _one_by_one(given: list[Tensor], bounds: list[int], rule: DocumentRule) -> Tensor:
    """Computes the attention of each document as transformers does: with a mask, and positions from its start."""
    found = []
    for start, end in pairwise(bounds):
        query, key, value = (tensor[:, :, start:end] for tensor in given)
        places = torch.arange(end - start)
        sees = places[:, None] >= places
        if rule.chunk_size is not None:
            sees &= places[:, None] // rule.chunk_size == places // rule.chunk_size
        if rule.floor_scale is not None:
            steps = torch.floor((places.float() + 1.0) / rule.floor_scale)
            query = query * (torch.log1p(steps) * rule.scale + 1.0)[:, None]
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        found.append(functional.scaled_dot_product_attention(query, key, value, sees, scale=0.3))
    return torch.cat(found, 2).transpose(1, 2)


def test_a_datum_with_chunks_is_not_shared_between_ranks() -> None:
    """The refusal precedes the rule, for which this rank has too few queries."""
    given = _inputs(4)
    bounds, shared = torch.tensor([0, 8], dtype=torch.int32), Share(cast(Any, None), 8)
    layer = _layer(DocumentRule(CHUNK, 3, 0.5))
    with pytest.raises(ValueError, match="ranks cannot share a datum of Module, which has sinks or chunks"):
        packed_attention(layer, *given, cu_seq_lens_q=bounds, max_length_q=8, share=shared)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "rule", [DocumentRule(CHUNK, None, 0.0), DocumentRule(None, 3, 0.5), DocumentRule(CHUNK, 3, 0.5)]
)
@pytest.mark.parametrize("shares_masks", [True, False])
def test_documents_are_cut_and_tempered_by_their_own_positions(
    lengths: list[int], rule: DocumentRule, shares_masks: bool
) -> None:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    given, copies = _inputs(bounds[-1]), _inputs(bounds[-1])
    limits = torch.tensor(bounds, dtype=torch.int32)
    packing = Packing(limits, bounds[-1]) if shares_masks else None
    how: dict[str, Any] = {"cu_seq_lens_q": limits, "max_length_q": max(lengths), "packing": packing}
    expected = _one_by_one(copies, bounds, rule)
    for _ in range(2):  # the second time with the packing's own memory
        found, _ = packed_attention(_layer(rule), *given, scaling=0.3, **how)
        torch.testing.assert_close(found, expected)
    check_equal(found, expected, given, copies)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_are_the_documents_bounds_and_the_multiples_of_their_positions(lengths: list[int]) -> None:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    cuts = {start + cut for start, end in pairwise(bounds) for cut in range(0, end - start, CHUNK)} | {bounds[-1]}
    packing = Packing(torch.tensor(bounds, dtype=torch.int32), bounds[-1])
    chunks = packing.chunks(CHUNK)
    assert sorted(set(chunks.bounds.tolist())) == sorted(cuts)
    assert chunks.bounds.dtype == torch.int32  # as flash attention requires
    assert chunks.bounds.diff().min() >= 0
    assert chunks.bounds.diff().max() <= CHUNK
    assert packing.chunks(CHUNK) is chunks


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_reads_chunks_too() -> None:
    lengths = [1, 4, 11, 5, 4]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    given = [tensor.detach() for tensor in _inputs(sum(lengths))]
    chunks = Packing(bounds, sum(lengths)).chunks(CHUNK)
    expected = _one_by_one(given, bounds.tolist(), DocumentRule(CHUNK, None, 0.0))
    torch.testing.assert_close(flex(*given, Scores(0.3, True), chunks), expected, atol=1e-5, rtol=1e-5)


class _Decoder(nn.Module):
    def __init__(self, mixture: Any, config: Any) -> None:
        super().__init__()
        self.feed_forward, self.config = mixture, config


@pytest.fixture(params=[1, 2])
def mixtures(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Returns transformers' module, and one with the trainer's products and the same weights.

    Published models use one expert for each token; the module can use several.
    """
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_local_experts": 6, "num_hidden_layers": 1}
    config = Llama4TextConfig(**sizes, num_attention_heads=2, num_experts_per_tok=request.param)
    torch.manual_seed(1)
    own: Any = Llama4TextMoe(config)
    for parameter in own.parameters():
        nn.init.normal_(parameter, std=0.4)
    changed = deepcopy(own)
    use_experts(_Decoder(changed, config))
    LoraInjector([LoraTarget("experts", changed.experts, Role.MLP, False)])
    return own, changed


def _gradients(mixture: Any, hidden: Tensor, output: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of input and parameters, with matrices of experts as transformers has them."""
    torch.manual_seed(3)
    output.backward(torch.randn_like(output))
    found = {name: one.grad for name, one in mixture.named_parameters()}
    is_transposed = mixture.experts.gate_up_proj.shape[1] != 24
    found = {name: one.mT if is_transposed and one.dim() == 3 else one for name, one in found.items()}
    return found | {"input": hidden.grad}


def test_each_expert_reads_the_weighted_input(mixtures: tuple[Any, Any]) -> None:
    found = []
    for mixture in mixtures:
        hidden = torch.randn(1, 11, 24, generator=torch.Generator().manual_seed(2)).requires_grad_()
        output, logits = mixture(hidden)
        found.append((output.view(11, 24), logits, _gradients(mixture, hidden, output)))
    (expected, own_logits, own), (output, logits, gradients) = found
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(logits, own_logits)
    assert gradients.keys() == own.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(gradients[name], gradient, msg=name)
    assert gradients["router.weight"].abs().max() > 1e-3


def test_given_experts_are_used_with_the_routers_weights(mixtures: tuple[Any, Any]) -> None:
    _, mixture = mixtures
    hidden = torch.randn(1, 11, 24, generator=torch.Generator().manual_seed(2))
    free, logits = mixture(hidden)
    own = logits.topk(mixture.top_k).indices
    with _GivenRouting(own, 6):
        assert torch.equal(mixture(hidden)[0], free)
    other = (own + 1) % 6
    with _GivenRouting(other, 6):
        given, _ = mixture(hidden)
    expected = mixture.shared_expert(hidden[0])
    for copy in range(mixture.top_k):
        weight = torch.sigmoid(logits.gather(1, other[:, copy : copy + 1]))
        gate_up = mixture.experts.gate_up_proj[other[:, copy]] @ (hidden[0] * weight)[..., None]
        gate, up = gate_up[..., 0].chunk(2, -1)
        expected = (
            expected + (mixture.experts.down_proj[other[:, copy]] @ (functional.silu(gate) * up)[..., None])[..., 0]
        )
    torch.testing.assert_close(given, expected)
    assert (given - free).abs().max() > 0.1
