"""Layers with experts use the given experts, and gradients flow as if the router had chosen them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GptOssConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig

from fovea_trainer.batches.datum_decoding import ExpertShape
from fovea_trainer.model.expert_routing import ROUTED_EXPERTS, expert_shape, replay_routing

COUNT, TOP, LENGTH = 8, 2, 12
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": TOP,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=COUNT, mlp_only_layers=[1], norm_topk_prob=True),
    "not_normalized": Qwen3MoeConfig(**SIZES, num_experts=COUNT, norm_topk_prob=False),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **SIZES, num_experts=COUNT, shared_expert_intermediate_size=48, layer_types=3 * ["full_attention"]
    ),
    "glm4_moe": Glm4MoeConfig(**SIZES, n_routed_experts=COUNT, n_group=2, topk_group=1, first_k_dense_replace=1),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=COUNT),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[request.param]).float()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        parameter.requires_grad_("router" in name or "gate.weight" in name)
    replay_routing(model.get_decoder())
    return model.train()


def run(model: Any, experts: Tensor | None = None, chosen: list[Tensor] | None = None) -> Tensor:
    """Runs hidden states [T, D]; appends each router's choice, [T, k], to `chosen`."""
    torch.manual_seed(6)
    inputs = torch.randn(1, LENGTH, model.config.get_text_config().hidden_size)
    routers = [m for name, m in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    hooks = [] if chosen is None else [r.register_forward_hook(lambda *got: chosen.append(got[2][2])) for r in routers]
    more = {} if experts is None else {ROUTED_EXPERTS: experts}
    found = model.get_decoder()(inputs_embeds=inputs, use_cache=False, **more).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return found


def test_its_own_choice_changes_nothing(model: Any) -> None:
    chosen: list[Tensor] = []
    free = run(model, chosen=chosen)
    experts = torch.stack(chosen, 1).short()
    assert expert_shape(model) == ExpertShape(experts.shape[1], TOP, COUNT)
    assert torch.equal(run(model, experts), free)
    assert torch.equal(run(model, torch.full_like(experts, -1)), free)
    assert torch.allclose(run(model, experts.flip(-1)), free, atol=1e-5)


def test_a_perturbed_router_follows_and_learns_its_weights(model: Any) -> None:
    chosen: list[Tensor] = []
    run(model, chosen=chosen)
    experts = torch.stack(chosen, 1).short()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    own: list[Tensor] = []
    run(model, chosen=own)
    assert not torch.equal(torch.stack(own, 1).short(), experts)
    followed: list[Tensor] = []
    run(model, experts, followed).square().sum().backward()
    assert torch.equal(torch.stack(followed, 1).short(), experts)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len([name for name in gradients if name.endswith("weight")]) >= experts.shape[1]
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    # Recomputed in the backward pass, after another pass without given experts: the same result.
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = run(model, experts).square().sum()
    run(model)
    loss.backward()
    for name, gradient in gradients.items():
        assert torch.allclose(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-5), name


def test_some_tokens_are_given_and_others_choose(model: Any) -> None:
    chosen: list[Tensor] = []
    run(model, chosen=chosen)
    free = torch.stack(chosen, 1).short()
    experts = ((free + 1) % COUNT).sort(-1).values
    experts[:7] = -1
    mixed: list[Tensor] = []
    run(model, experts, mixed)
    assert torch.equal(torch.stack(mixed, 1).short()[7:], experts[7:])
    assert torch.equal(mixed[0].short()[:7], free[:7, 0])


def test_a_dense_model_has_no_experts() -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=COUNT, mlp_only_layers=[0, 1, 2])
    assert expert_shape(AutoModelForCausalLM.from_config(config)) is None
