"""A checkpoint without bytes: trainer and sampler draw the same weights, and train and push them as any others."""

from pathlib import Path

import numpy as np

from benchmarks import random_checkpoint
from benchmarks.agreement import draw, score, train
from benchmarks.client import Bench
from tests.e2e.stack import running_stack
from tinyvlm.families import ensure_family


def test_sampler_and_trainer_agree_before_and_after_a_push(tmp_path: Path) -> None:
    base = ensure_family("qwen3_vl_moe")
    random_checkpoint.copy(base, tmp_path / "model", seed=7)
    (file,) = (tmp_path / "model").glob("*.safetensors")
    assert file.stat().st_blocks * 512 < file.stat().st_size / 2
    with running_stack(tmp_path / "model", "--ranks", "2") as stack, Bench.open(stack.base_url) as bench:
        training = bench.training(0)
        drawn = draw(bench, bench.sampler, 4, 64, 1.0, seed=1)()
        for found in score(training, drawn):
            assert np.abs(found.differences).max() <= 1e-3
        train(bench, training, 2, 64, 1e-2)
        assert np.abs(score(training, drawn)[0].differences).max() > 1e-2, "it learnt nothing: this shows nothing"
        pushed = training.save_weights_and_get_sampling_client().result(60)
        for found in score(training, draw(bench, pushed, 4, 64, 1.0, seed=1)()):
            assert np.abs(found.differences).max() <= 1e-3
