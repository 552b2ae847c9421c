"""Losses under a lag: samples come from old weights, and the page has the table of the figures."""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.stale_losses import TASKS, Policy, draw, run, table

ROOT = Path(__file__).parents[3]
FIGURES = ROOT / "tools/benchmarks/results/stale-losses-bf16-2cores-2026-11-30.jsonl"
OPTIONS = argparse.Namespace(model=None, device="cpu", rate=0.1, steps=3, dtype="bfloat16")


def test_samples_come_from_weights_of_so_many_steps_ago() -> None:
    policy = Policy(OPTIONS, seed=0)
    published = []
    for number in range(4):
        for weight in policy.model.parameters():
            torch.nn.init.constant_(weight, number / 3)
        published.append(torch.tensor(number / 3).bfloat16().float())
        policy.publish(lag=2)
        expected = published[max(0, number - 2)]
        assert all(torch.equal(weight, expected.expand_as(weight)) for weight in policy.sampler.parameters())


def test_sampler_and_trainer_compute_in_bfloat16() -> None:
    policy, prompts = Policy(OPTIONS, seed=0), torch.zeros(4, 3, dtype=torch.long)
    policy.publish(0)
    answers, recorded = policy.sample(prompts)
    own = policy.logprobs(prompts, answers)
    policy._dtype = torch.float32
    assert not torch.equal(own, policy.logprobs(prompts, answers))
    torch.testing.assert_close(own, recorded, atol=0.02, rtol=0)
    assert 0 <= run(OPTIONS, "stable_reinforce", 1, TASKS["recall"], seed=0) <= 1


def test_the_page_has_the_table_of_the_figures(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in FIGURES.read_text().splitlines()]
    assert table(rows) in (ROOT / "docs/lab/losses.md").read_text()
    assert {row["repeats"] for row in rows} == {3}
    draw(rows, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 10_000
