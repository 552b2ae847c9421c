"""How fast is training? `python -m benchmarks.trainer --base-url URL --shape 4b --ranks 32 0`.

Datums have log-normal lengths, 64 to 4,096 tokens, half of them with one 448 x 448 image. The figures are tokens/s and
the model FLOPs utilisation of one forward_backward and optim_step through the SDK, submitted together, both awaited.

FLOPs a token, by weights touched (Kaplan et al. 2020): forward 2 N; backward 2 N for activations and, where weights are
trained, 2 N more. So 6 N for all parameters, 4 N with adapters (whose own FLOPs are not counted). N is the language
model without its embedding table, the unembedding included. Attention adds, a layer, 4 H S^2 / 2 (causal) forward and
twice that backward for a sequence of S. A frozen vision tower adds 2 N_v a patch, a trained one 6 N_v, with its own
attention 4 H S^2 over S patches of an image, not causal.
"""

import argparse
import time
from dataclasses import dataclass

import numpy as np
import tinker
from tinker import AdamParams

from benchmarks.client import Bench, datum
from benchmarks.figure import emit

_IMAGE_SIDE = 448
_PATCHES = (_IMAGE_SIDE // 16) ** 2
_VOCABULARY = 151936
_H200_BF16_FLOPS = 989e12


@dataclass(frozen=True)
class Size:
    """What decides the FLOPs of a shape; see benchmarks/shapes.py."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vision_hidden: int
    vision_intermediate: int
    vision_layers: int

    @property
    def language_parameters(self) -> float:
        """Without the embedding table, unembedding included."""
        attention = self.hidden * 128 * (2 * self.heads + 2 * 8)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * _VOCABULARY

    @property
    def vision_parameters(self) -> float:
        """The tower's blocks."""
        return self.vision_layers * (4 * self.vision_hidden**2 + 2 * self.vision_hidden * self.vision_intermediate)

    def flops(self, lengths: list[int], image_count: int, trains_all: bool) -> float:
        """Of one forward_backward on datums of these lengths."""
        per_weight = 6 if trains_all else 4
        matrices = per_weight * self.language_parameters * sum(lengths)
        attention = sum(3 * 4 * self.layers * self.heads * 128 * length**2 / 2 for length in lengths)
        passes = 3 if trains_all else 1
        tower = passes * image_count * 2 * self.vision_parameters * _PATCHES
        tower += passes * image_count * 4 * self.vision_layers * self.vision_hidden * _PATCHES**2
        return matrices + attention + tower


SIZES = {
    "2b": Size(2048, 6144, 28, 16, 1024, 4096, 24),
    "4b": Size(2560, 9728, 36, 32, 1024, 4096, 24),
    "8b": Size(4096, 12288, 36, 32, 1152, 4304, 27),
}


def lengths_of(rng: np.random.Generator, count: int) -> list[int]:
    """Log-normal with median 512, cut to 64 .. 4,096."""
    found: list[int] = np.clip(rng.lognormal(np.log(512), 1.0, count), 64, 4096).astype(int).tolist()
    return found


def batch(bench: Bench, rng: np.random.Generator, count: int) -> tuple[list[tinker.Datum], list[int], int]:
    """Datums, their lengths in tokens, and the number of images."""
    data, lengths = [], []
    for index, length in enumerate(lengths_of(rng, count)):
        side = _IMAGE_SIDE if index % 2 and length > 2 * _PATCHES // 4 else 0
        text = length - (_PATCHES // 4 + 2 if side else 0)
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
                shares.append(flops / seconds / (_H200_BF16_FLOPS * options.gpus))
        sizes = {"rank": rank, "datums": options.datums, "tokens": sum(lengths), "images": images}
        emit("trainer.tokens", speeds, "token/s", shape=options.shape, **sizes)
        emit("trainer.mfu", shares, "of 989 TFLOP/s a GPU", shape=options.shape, **sizes)
        bench.service.close("success")


if __name__ == "__main__":
    main()
