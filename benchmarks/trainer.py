"""How fast is training? `python -m benchmarks.trainer --base-url URL --shape 4b --ranks 32 0`.

Datums have log-normal lengths, 64 to 4,096 tokens, half of them with one 448 x 448 image. The figures are tokens/s and
the model FLOPs utilisation of one forward_backward and optim_step through the SDK, submitted together, both awaited.

FLOPs are counted by benchmarks/flops.py.
"""

import argparse
import time

import numpy as np
import tinker
from tinker import AdamParams

from benchmarks.client import Bench, datum
from benchmarks.figure import emit
from benchmarks.flops import H200_BF16_FLOPS, IMAGE_SIDE, PATCHES, SIZES


def lengths_of(rng: np.random.Generator, count: int) -> list[int]:
    """Log-normal with median 512, cut to 64 .. 4,096."""
    found: list[int] = np.clip(rng.lognormal(np.log(512), 1.0, count), 64, 4096).astype(int).tolist()
    return found


def batch(bench: Bench, rng: np.random.Generator, count: int) -> tuple[list[tinker.Datum], list[int], int]:
    """Datums, their lengths in tokens, and the number of images."""
    data, lengths = [], []
    for index, length in enumerate(lengths_of(rng, count)):
        side = IMAGE_SIDE if index % 2 and length > 2 * PATCHES // 4 else 0
        text = length - (PATCHES // 4 + 2 if side else 0)
        prompt = bench.prompt(rng, text // 2, side)
        data.append(datum(prompt, bench.tokens(rng, text - text // 2)))
        lengths.append(data[-1].model_input.length)
    images = sum(any(isinstance(chunk, tinker.types.ImageChunk) for chunk in one.model_input.chunks) for one in data)
    return data, lengths, images


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--shape", choices=SIZES, default="4b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32])
    parser.add_argument("--datums", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=1, help="that the trainer has")
    options = parser.parse_args()
    for rank in options.ranks:
        rng = np.random.default_rng(11)
        bench = Bench.open(options.base_url)
        training = bench.training(rank)
        speeds, shares = [], []
        for repeat in range(options.repeats + 1):
            data, lengths, images = batch(bench, rng, options.datums)
            begun = time.perf_counter()
            backward = training.forward_backward(data, "cross_entropy")
            training.optim_step(AdamParams(learning_rate=1e-5)).result(600)
            backward.result(600)
            seconds = time.perf_counter() - begun
            if repeat:  # the first one warms up
                speeds.append(sum(lengths) / seconds)
                flops = SIZES[options.shape].flops(lengths, images, rank == 0)
                shares.append(flops / seconds / (H200_BF16_FLOPS * options.gpus))
        sizes = {"rank": rank, "datums": options.datums, "tokens": sum(lengths), "images": images}
        emit("trainer.tokens", speeds, "token/s", shape=options.shape, **sizes)
        emit("trainer.mfu", shares, "of 989 TFLOP/s a GPU", shape=options.shape, **sizes)
        bench.service.close("success")


if __name__ == "__main__":
    main()
