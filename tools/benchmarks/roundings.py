"""Measures which rounding to bfloat16 moves a model's log-probabilities: `python -m benchmarks.roundings MODEL`.

The model computes in float32, and one kind of value at a time is rounded to bfloat16: that kind's share of the distance
between two implementations that round differently. With `--layers`, also the residual stream after each single layer.
Runs on a GPU if there is one. It needs no Fovea, and does not measure what sampler and trainer really round.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.figure import emit

TEXTS = (
    "The sea is a vast and mysterious realm, teeming with life, and no ship has sailed all of it.",
    "To bake bread, mix flour, water, salt and yeast, wait for an hour, and put the dough into a hot oven.",
    "Gravity is the force by which a planet draws objects toward its centre.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
)


def rounded(value: Any) -> Any:
    """Returns tensors rounded to bfloat16, in their own type; of a tuple, each; anything else unchanged."""
    if isinstance(value, tuple):
        return tuple(map(rounded, value))
    return (
        value.to(torch.bfloat16).to(value.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
    )


@contextmanager
def rounding(model: nn.Module, kind: str) -> Iterator[None]:
    """Rounds the values of one kind while the context is open."""
    handles = []
    for name, module in model.named_modules():
        if kind == "attention" and name.endswith("o_proj"):
            handles.append(module.register_forward_pre_hook(lambda _, given: rounded(given)))
        elif _KINDS[kind](name, module):
            handles.append(module.register_forward_hook(lambda _, __, result: rounded(result)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_layer(name: str, _: nn.Module) -> bool:
    return name.rpartition(".")[2].isdigit() and ".layers." in f".{name}"


def _ends_with(end: str, name: str, _: nn.Module) -> bool:
    return name.endswith(end)


def _is_norm(_: str, module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


_KINDS: dict[str, Callable[[str, nn.Module], bool]] = {
    "embedding": lambda _, module: isinstance(module, nn.Embedding),
    "RMSNorm": _is_norm,
    "rotary": lambda name, _: name.endswith("rotary_emb"),
    "attention": lambda _, __: False,  # the input of o_proj: see `rounding`
    "linear layers": _is_linear,
    "residual stream": _is_layer,
    "logits": lambda name, _: name.endswith("lm_head"),
}


def main() -> None:
    """Prints a figure for each kind of value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint folder of a text-only model")
    parser.add_argument("--layers", action="store_true", help="also the residual stream after each single layer")
    given = parser.parse_args()
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device).eval()
    # The weights of both sides are the checkpoint's, so they are rounded for the reference too.
    model.load_state_dict({name: rounded(value) for name, value in model.state_dict().items()})
    prompts = [torch.tensor([tokenizer.encode(text)], device=device) for text in TEXTS]

    def scores() -> list[Tensor]:
        with torch.no_grad():
            return [model(prompt).logits[0].double().log_softmax(-1) for prompt in prompts]

    exact = scores()
    kinds = list(_KINDS)
    for index in range(model.config.num_hidden_layers if given.layers else 0):
        kinds.append(f"residual stream after layer {index}")
        _KINDS[kinds[-1]] = partial(_ends_with, f"layers.{index}")
    for kind in kinds:
        with rounding(model, kind):
            found = scores()
        pairs = list(zip(exact, found, strict=True))
        kl = [float((one.exp() * (one - other)).sum(-1).mean()) for one, other in pairs]
        most = max(float((one - other).gather(1, one.argmax(-1, keepdim=True)).abs().max()) for one, other in pairs)
        emit("KL by rounding", kl, "nat", model=given.model.name, rounded=kind, most=float(f"{most:.2e}"))


if __name__ == "__main__":
    main()
