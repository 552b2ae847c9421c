"""Adapters of one kind of module alone in a running Fovea: one that the sampler leaves out would be seen."""

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
"""Between sampler and trainer, at any token."""

LEAST_MOVED = 20 * MOST_NAT
"""By which an adapter must change what the trainer computes: a sampler that ignores it is then apart by as much."""

_RANK, _RATE = 8, 1e-2
_LANGUAGE = {"train_attention": True, "train_mlp": True}
_KINDS = {
    "attention": {"train_attention": True},
    "mlp": {"train_mlp": True},
    "unembedding": {"train_unembedding": True},
    "tower": {**_LANGUAGE, "train_vision": True},
}
"""What is adapted; nothing of the tower is without the language layers."""

_WAIT_S = 300

Scores = list[npt.NDArray[np.float64]]
"""Log-probabilities [N-1] of each prompt's ids after the first."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One kind of adapter.

    Attributes:
        apart: The most that sampler and trainer differ at any token, in nat.
        moved: The most that the adapter changes at any token, as the trainer computes it.
    """

    apart: float
    moved: float

    @property
    def problem(self) -> str:
        """Why this does not show that the sampler applies the adapter; empty if it does."""
        if self.apart > MOST_NAT:
            return f"is apart by {self.apart:.1e} nat, of {self.moved:.1e} that it changes"
        if self.moved < LEAST_MOVED:
            return f"changes {self.moved:.1e} nat alone: whether the sampler applies it would not be seen"
        return ""


def differ(one: Scores, other: Scores) -> float:
    """The most at any token."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def compare(
    service: tinker.ServiceClient, state: dict[str, Any], prompts: Sequence[Prompt], has_tower: bool
) -> dict[str, Moved]:
    """What one large step of an adapter of each kind does.

    The tower's own share is what it adds to the step of the language layers, which is the same with and without it: B
    is zero in that step, so that no adapter changes the gradients of another.
    """
    base = service.create_sampling_client(base_model=str(state["model_name"])).result(_WAIT_S)
    unchanged = [scores(base, prompt) for prompt in prompts]
    found: dict[str, Moved] = {}
    for kind, trains in _KINDS.items():
        if kind == "tower" and not has_tower:
            continue
        training = _step(service, state, prompts, trains)
        sampling = training.save_weights_and_get_sampling_client().result(_WAIT_S)
        trained = trained_scores(training, prompts)
        before = unchanged if kind != "tower" else trained_scores(_step(service, state, prompts, _LANGUAGE), prompts)
        sampled = [scores(sampling, prompt) for prompt in prompts]
        found[kind] = Moved(differ(sampled, trained), differ(trained, before))
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
    """A model of the SDK's session, made over gRPC: REST leaves the tower to the gateway's settings."""
    holder = service.holder
    number = holder.get_training_client_id()

    async def create() -> str:
        async with GatewayClient(state["services"]["gateway"]["address"], API_KEY) as gateway:
            return await gateway.create_model(holder.get_session_id(), number, str(state["model_name"]), lora)

    model_id = asyncio.run(create())
    info = holder.run_coroutine_threadsafe(fetch_training_info(holder, model_id)).result(_WAIT_S)
    return tinker.TrainingClient(holder, model_seq_id=number, model_id=model_id, info=info)
