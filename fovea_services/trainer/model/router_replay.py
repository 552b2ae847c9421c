"""Router replay: layers with experts use the experts that a sampler chose, instead of choosing themselves.

Shapes: T packed tokens, L layers with experts, K experts per token, E experts.
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
"""Keyword argument of a decoder, which it passes on to its layers: int16 [T, L, K], -1 where the model's own router
decides.
"""


def expert_shape(model: Any) -> ExpertShape | None:
    """Returns numbers of layers, experts per token and experts of a model; None for a model without experts."""
    layers = sum(1 for _ in _routed_layers(model.get_decoder()))
    if not layers:
        return None
    text = model.config.get_text_config()
    return ExpertShape(layers, text.num_experts_per_tok, getattr(text, experts_of(text.to_dict())))


def install(decoder: Any) -> None:
    """Makes the layers with experts of a decoder follow `ARGUMENT`. Call it once, after all other changes to layers.

    The experts are an argument of each layer, so a block that recomputes its activations in the backward pass uses the
    same experts.
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
    """Makes `torch.topk`, with which every router chooses, return given indices.

    The router's own code computes their weights, whether softmax comes before or after and normalized or not, so
    gradients flow as if the router had chosen them.
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
