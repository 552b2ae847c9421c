"""The benchmark of a layer's experts runs without a GPU and detects differences."""

import json
import sys

import pytest
import torch

from benchmarks import experts


def test_a_tiny_layer_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"tokens": 16, "experts": 4, "top-k": 2, "hidden": 24, "inner": 10, "rank": 3, "repeats": 1}
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    monkeypatch.setattr(sys, "argv", ["experts", *options, "--device", "cpu"])
    experts.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    parts = ("layer", "copies", "sums", "gate", "gate_and_gradients")
    assert [line["figure"] for line in lines] == [f"experts.{part}" for part in parts]
    assert all(line["value"] > 0 and line["sizes"]["tokens"] == 16 for line in lines)


def test_differences_are_relative_to_the_values() -> None:
    expected = {"output": torch.tensor([3.0, -4.0])}
    assert experts.differences({"output": torch.tensor([3.0, -2.0])}, expected) == {"output": (0.5, 0.4)}
