"""Trains adapters of one kind of module at a time in a running Fovea, to detect a kind that the sampler ignores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker
from tinker.lib.public_interfaces.training_client import fetch_training_info

from fovea.api.v1 import weights_pb2
from fovea.client.gateway import GatewayClient
from fovea_parity.prompts import API_KEY, Prompt, scores, trained_scores

MOST_NAT = 1e-3
"""The largest accepted difference between sampler and trainer, at any token."""

LEAST_MOVED = 20 * MOST_NAT
"""The least change that an adapter must cause in the trainer's log-probabilities. A sampler that ignores the adapter
then differs from the trainer by that much, which `MOST_NAT` detects."""

_RANK, _RATE = 8, 1e-2
_LANGUAGE = {"train_attention": True, "train_mlp": True}
_KINDS = {
    "attention": {"train_attention": True},
    "mlp": {"train_mlp": True},
    "unembedding": {"train_unembedding": True},
    "tower": {**_LANGUAGE, "train_vision": True},
}
"""The adapted modules of each kind. The tower is only adapted together with the language layers."""

_WAIT_S = 300

Scores = list[npt.NDArray[np.float64]]
"""For each prompt, the log-probabilities [N-1] of its ids after the first."""


@dataclass(frozen=True, slots=True)
class AdapterEffect:
    """The measurements of one kind of adapter.

    Attributes:
        apart: The largest difference between sampler and trainer at any token, in nat.
        moved: The largest change that the adapter causes at any token, in nat, as the trainer computes it.
    """

    apart: float
    moved: float

    @property
    def problem(self) -> str:
        """The reason why this does not prove that the sampler applies the adapter, or an empty string."""
        if self.apart > MOST_NAT:
            return f"differs by {self.apart:.1e} nat between sampler and trainer; it changes {self.moved:.1e} nat"
        if self.moved < LEAST_MOVED:
            return f"changes only {self.moved:.1e} nat, too little to prove that the sampler applies it"
        return ""


def differ(one: Scores, other: Scores) -> float:
    """Returns the largest difference at any token, in nat."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def compare(
    service: tinker.ServiceClient, state: dict[str, Any], prompts: Sequence[Prompt], has_tower: bool
) -> dict[str, AdapterEffect]:
    """Measures the effect of one large optimizer step on an adapter of each kind.

    The tower's effect is measured against an adapter of only the language layers after the same step. That step is
    equal with and without the tower: B is zero before it, so no adapter changes the gradients of another.
    """
    base = service.create_sampling_client(base_model=str(state["model_name"])).result(_WAIT_S)
    unchanged = [scores(base, prompt) for prompt in prompts]
    found: dict[str, AdapterEffect] = {}
    for kind, trains in _KINDS.items():
        if kind == "tower" and not has_tower:
            continue
        training = _step(service, state, prompts, trains)
        sampling = training.save_weights_and_get_sampling_client().result(_WAIT_S)
        trained = trained_scores(training, prompts)
        before = unchanged if kind != "tower" else trained_scores(_step(service, state, prompts, _LANGUAGE), prompts)
        sampled = [scores(sampling, prompt) for prompt in prompts]
        found[kind] = AdapterEffect(differ(sampled, trained), differ(trained, before))
    return found


def _step(
    service: tinker.ServiceClient, state: dict[str, Any], prompts: Sequence[Prompt], trains: dict[str, bool]
) -> tinker.TrainingClient:
    training = _create(service, state, weights_pb2.LoraConfig(rank=_RANK, seed=1, **trains))
    training.forward_backward([prompt.datum() for prompt in prompts], "cross_entropy").result(_WAIT_S)
    training.optim_step(tinker.AdamParams(learning_rate=_RATE)).result(_WAIT_S)
    return training


def _create(
    service: tinker.ServiceClient, state: dict[str, Any], lora: weights_pb2.LoraConfig
) -> tinker.TrainingClient:
    """Creates a model in the SDK's session over gRPC; over REST the gateway's settings decide about the tower."""
    holder = service.holder
    number = holder.get_training_client_id()

    async def create() -> str:
        async with GatewayClient(state["services"]["gateway"]["address"], API_KEY) as gateway:
            return await gateway.create_model(holder.get_session_id(), number, str(state["model_name"]), lora)

    model_id = asyncio.run(create())
    info = holder.run_coroutine_threadsafe(fetch_training_info(holder, model_id)).result(_WAIT_S)
    return tinker.TrainingClient(holder, model_seq_id=number, model_id=model_id, info=info)
