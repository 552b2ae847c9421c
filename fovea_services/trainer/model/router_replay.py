"""Router replay: layers with experts take those that a sampler took, instead of choosing anew.

Shapes: T packed tokens, L layers with experts, K experts of a token, E experts.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fovea.runtime.model_files import experts_of
from fovea_services.trainer.batches.datum_decoding import ExpertShape

ARGUMENT = "routed_experts"
"""What a decoder is called with, and hands on to its layers: int16 [T, L, K], -1 where a token's router chooses."""


def expert_shape(model: Any) -> ExpertShape | None:
    """How many experts compute a token of a model; None for one without."""
    layers = sum(1 for _ in _routed_layers(model.get_decoder()))
    if not layers:
        return None
    text = model.config.get_text_config()
    return ExpertShape(layers, text.num_experts_per_tok, getattr(text, experts_of(text.to_dict())))


def install(decoder: Any) -> None:
    """Has the layers with experts of a decoder follow `ARGUMENT`. To be called once, when layers are as they stay.

    It is an argument of layers, so that a block that is computed again in the backward pass follows the same experts.
    """
    for place, layer in enumerate(_routed_layers(decoder)):
        layer.forward = partial(_forward, layer.forward, place)


def _routed_layers(decoder: Any) -> Iterator[Any]:
    return (layer for layer in decoder.layers if hasattr(getattr(layer, "mlp", None), "experts"))


def _forward(
    forward: Callable[..., Any], place: int, *arguments: Any, routed_experts: Tensor | None = None, **options: Any
) -> Any:
    given = nullcontext() if routed_experts is None else _Given(routed_experts[:, place])
    with given:
        return forward(*arguments, **options)


class _Given(TorchFunctionMode):
    """Has `torch.topk`, by which every router chooses, find given places.

    The router's own code makes their weights, by softmax before or after and normalized or not, so that gradients flow
    as if it had chosen them.
    """

    def __init__(self, chosen_TK: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._chosen_TK = chosen_TK.long()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return found
        index_TK = torch.where(self._chosen_TK < 0, found.indices, self._chosen_TK)
        return torch.return_types.topk((args[0].gather(-1, index_TK), index_TK))
