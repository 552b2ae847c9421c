"""Do sampler and trainer agree? `python -m benchmarks.agreement --base-url URL --rank 32 --steps 20`.

Tokens are sampled at temperature 1 with their log-probabilities; the trainer then scores the same tokens. The figures
are the mean KL from sampler to trainer (the k3 estimate, mean of exp(d) - 1 - d with d = trainer - sampler, Schulman
2020), and the largest difference at any token, for prompts of text and for prompts with an image, before and after
training steps.
"""

import argparse
from typing import Any

import numpy as np
import tinker
from tinker import AdamParams, SamplingParams

from benchmarks.client import Bench, datum, scored_part
from benchmarks.figure import emit

_NEW_TOKENS = 128


def measure(bench: Bench, training: tinker.TrainingClient, count: int, image_side: int, seed: int) -> np.ndarray:
    """Trainer minus sampler, one a sampled token, float64."""
    rng = np.random.default_rng(seed)
    sampler: Any = training.save_weights_and_get_sampling_client().result(600)
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=1.0, seed=seed, stop=[])
    prompts = [bench.prompt(rng, int(rng.integers(64, 512)), image_side) for _ in range(count)]
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    sequences = [future.result(600).sequences[0] for future in futures]
    data = [datum(prompt, one.tokens) for prompt, one in zip(prompts, sequences, strict=True)]
    outputs = training.forward(data, "cross_entropy").result(600).loss_fn_outputs
    differences = [
        scored_part(output, len(one.tokens)) - np.asarray(one.logprobs, np.float64)
        for output, one in zip(outputs, sequences, strict=True)
    ]
    return np.concatenate(differences)


def train(bench: Bench, training: tinker.TrainingClient, steps: int, image_side: int) -> None:
    """Steps on random text and images, so that the weights move."""
    rng = np.random.default_rng(99)
    for _ in range(steps):
        data = [datum(bench.prompt(rng, 96, side), bench.tokens(rng, 64)) for side in (0, image_side) * 4]
        backward = training.forward_backward(data, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-4)).result(600)
        backward.result(600)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--rank", type=int, default=32, help="0 trains all parameters")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--image-side", type=int, default=448)
    options = parser.parse_args()
    bench = Bench.open(options.base_url)
    training = bench.training(options.rank)
    for when in ("before", "after"):
        for kind, side in (("text", 0), ("image", options.image_side)):
            found = measure(bench, training, options.prompts, side, seed=5)
            sizes = {"rank": options.rank, "tokens": len(found), "steps": options.steps if when == "after" else 0}
            emit(f"agreement.kl.{kind}.{when}", [float(np.mean(np.expm1(found) - found))], "nat", **sizes)
            emit(f"agreement.largest.{kind}.{when}", [float(np.abs(found).max())], "nat", **sizes)
            emit(f"agreement.mean.{kind}.{when}", [float(np.abs(found).mean())], "nat", **sizes)
        if when == "before":
            train(bench, training, options.steps, options.image_side)
    bench.service.close("success")


if __name__ == "__main__":
    main()
