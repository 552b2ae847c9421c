"""How long until new weights are sampled? `python -m benchmarks.push --base-url URL --ranks 8 32 128 0`.

From the call of save_weights_and_get_sampling_client to the first token made with the new weights, after an optimizer
step each time. Rank 0 means all parameters.
"""

import argparse
import time
from typing import Any

import numpy as np
import tinker
from tinker import AdamParams, SamplingParams

from benchmarks.client import Bench, datum
from benchmarks.figure import emit


def seconds_to_first_token(bench: Bench, training: tinker.TrainingClient, rng: np.random.Generator) -> float:
    """One step, then the measured push and sample."""
    data = [datum(bench.prompt(rng, 32), bench.tokens(rng, 32))]
    backward = training.forward_backward(data, "cross_entropy")
    training.optim_step(AdamParams(learning_rate=1e-4)).result(600)
    backward.result(600)
    prompt = bench.prompt(rng, 16)
    begun = time.perf_counter()
    sampler: Any = training.save_weights_and_get_sampling_client().result(600)
    sampler.sample(prompt, 1, SamplingParams(max_tokens=1)).result(600)
    return time.perf_counter() - begun


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rng = np.random.default_rng(3)
    for rank in options.ranks:
        bench = Bench.open(options.base_url)
        training = bench.training(rank)
        seconds_to_first_token(bench, training, rng)
        found = [seconds_to_first_token(bench, training, rng) for _ in range(options.repeats)]
        emit("push.first_token", found, "s", rank=rank, model=bench.model)
        bench.service.close("success")


if __name__ == "__main__":
    main()
