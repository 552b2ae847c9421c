"""Finds where sampler and trainer differ more after training: `python -m benchmarks.agreement_parts --base-url URL`.

Trains adapters on the model's own answers (`benchmarks.agreement --chats`): on all modules, without the head, on the
head, the MLPs or attention alone, at a tenth of the rate, and for three times as many steps. For each adapter the same
tokens are scored in three ways: `decode`, the log-probabilities that `sample` returned; `prefill`, the sampler's scores
of a prompt; and `trainer`. Each line compares two of them, for the answers of the trained model and for those of the
base.

Two ways that differ in any bit differ by rounding in every later layer, so `decode` against `prefill` shows how large a
difference within one engine is.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker

from benchmarks.agreement import API_KEY, Drawn, Logprobs, chat_prompts, draw, kl, score
from benchmarks.client import Bench, datum, take_step
from benchmarks.figure import emit


@dataclass(frozen=True)
class Adapter:
    """An adapter to train."""

    name: str
    rate: float = 3e-4
    steps: int = 20
    modules: dict[str, Any] = field(default_factory=dict)


ADAPTERS = (
    Adapter("all"),
    Adapter("no head", modules={"train_unembed": False}),
    Adapter("head only", modules={"train_mlp": False, "train_attn": False}),
    Adapter("mlp only", modules={"train_attn": False, "train_unembed": False}),
    Adapter("attn only", modules={"train_mlp": False, "train_unembed": False}),
    Adapter("slow", rate=3e-5),
    Adapter("long", steps=60),
)


def prefill(sampler: Any, drawn: Sequence[Drawn]) -> Logprobs:
    """Returns the sampler's log-probabilities of drawn tokens as parts of prompts."""
    futures = [
        sampler.compute_logprobs(tinker.ModelInput.from_ints([*one.prompt.to_ints(), *one.tokens])) for one in drawn
    ]
    return np.concatenate(
        [
            np.asarray(future.result(600)[-len(one.tokens) :], np.float64)
            for future, one in zip(futures, drawn, strict=True)
        ]
    )


def decode(drawn: Sequence[Drawn]) -> Logprobs:
    """Returns the log-probabilities of drawn tokens that `sample` returned."""
    return np.concatenate([one.logprobs for one in drawn])


def trained(training: tinker.TrainingClient, drawn: Sequence[Drawn], way: str = "packed") -> Logprobs:
    """Returns the trainer's log-probabilities of drawn tokens."""
    return score(training, list(drawn), (), [way])[0].trainer


def compare(adapter: Adapter, what: str, one: Logprobs, other: Logprobs) -> None:
    """Prints the KL of two ways, estimated as in `benchmarks.agreement`, and quantiles of their differences."""
    differences, sizes = other - one, np.abs(other - one)
    facts: dict[str, Any] = {
        "adapter": adapter.name,
        "compared": what,
        "tokens": len(sizes),
        "half_mean_square": float(np.mean(sizes**2)) / 2,
        "median": float(np.median(sizes)),
        "q99": float(np.quantile(sizes, 0.99)),
        "largest": float(sizes.max()),
    }
    emit("agreement.parts", [kl(differences)], "nat", **facts)


def measure(bench: Bench, adapter: Adapter, chats: Sequence[tinker.ModelInput], rank: int, seed: int) -> None:
    """Trains an adapter and prints its comparisons."""
    training = bench.service.create_lora_training_client(
        base_model=bench.model, rank=rank, seed=1, **adapter.modules
    ).result(600)
    sampler = training.save_weights_and_get_sampling_client().result(600)
    base = draw(sampler, chats, 1.0, seed)()
    if adapter is ADAPTERS[0]:
        before, own = prefill(sampler, base), trained(training, base)
        compare(adapter, "base text, base: decode/trainer", decode(base), own)
        compare(adapter, "base text, base: prefill/trainer", before, own)
        compare(adapter, "base text, base: decode/prefill", decode(base), before)
        compare(adapter, "base text, base: trainer packed/alone", own, trained(training, base, "alone"))
    data = [datum(one.prompt, one.tokens) for one in base]
    for _ in range(adapter.steps):
        take_step(training, data, adapter.rate)
    sampler = training.save_weights_and_get_sampling_client().result(600)
    text = draw(sampler, chats, 1.0, seed)()
    own, scored = trained(training, text), prefill(sampler, text)
    compare(adapter, "own text, trained: decode/trainer", decode(text), own)
    compare(adapter, "own text, trained: prefill/trainer", scored, own)
    compare(adapter, "own text, trained: decode/prefill", decode(text), scored)
    compare(adapter, "base text, trained: prefill/trainer", prefill(sampler, base), trained(training, base))


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--adapters", nargs="+", default=[one.name for one in ADAPTERS], help="names of adapters")
    options = parser.parse_args()
    with Bench.open(options.base_url, API_KEY) as bench:
        chats = chat_prompts(bench)[: options.prompts]
        for adapter in ADAPTERS:
            if adapter.name in options.adapters:
                measure(bench, adapter, chats, options.rank, options.seed)


if __name__ == "__main__":
    main()
