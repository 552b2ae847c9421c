"""Manifests are checked against the checkpoint before tensors are sent."""

import json
import re
from pathlib import Path

import pytest
from torch import nn

from fovea.api.v1 import weights_pb2
from fovea_sampler.engine.manifest_check import ManifestChecker, check_biases, checkpoint_shapes, names_after

SHAPES = {"model.embed_tokens.weight": (10, 4), "model.up.weight": (6, 4), "model.norm.weight": (4,)}
PREFIX = "base_model.model."


def checker() -> ManifestChecker:
    """Returns a checker; vLLM prefixes every name with `vllm.` and can adapt two modules."""
    return ManifestChecker(SHAPES, lambda name: f"vllm.{name}", set(), {"vllm.model.up", "vllm.lm_head"}, max_rank=8)


def full(**changes: tuple[int, ...] | None) -> weights_pb2.SnapshotManifest:
    """Returns a manifest of all parameters, some changed or left out."""
    shapes = {name: shape for name, shape in (SHAPES | changes).items() if shape is not None}
    return manifest(weights_pb2.SNAPSHOT_KIND_FULL, shapes)


def adapter(shapes: dict[str, tuple[int, ...]], rank: int = 2, alpha: float = 32) -> weights_pb2.SnapshotManifest:
    """Returns an adapter's manifest."""
    result = manifest(weights_pb2.SNAPSHOT_KIND_ADAPTER, shapes)
    result.lora.rank, result.lora.alpha = rank, alpha
    return result


def manifest(kind: int, shapes: dict[str, tuple[int, ...]]) -> weights_pb2.SnapshotManifest:
    """Returns a manifest."""
    result = weights_pb2.SnapshotManifest(bucket_bytes=64)
    result.snapshot.kind = kind  # type: ignore[assignment]
    for name, shape in shapes.items():
        result.tensors.add(name=name, dtype="float32", shape=shape)
    return result


def pair(module: str, out_width: int, in_width: int, rank: int = 2) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of both factors of a module's adapter."""
    return {
        f"{PREFIX}{module}.lora_A.weight": (rank, in_width),
        f"{PREFIX}{module}.lora_B.weight": (out_width, rank),
    }


def test_what_fits() -> None:
    assert checker().problem(full()) == ""
    assert checker().problem(full(**{"lm_head.weight": (10, 4)})) == "", "a tied unembedding must be accepted"
    assert checker().problem(adapter(pair("model.up", 6, 4) | pair("lm_head", 10, 4))) == ""


def test_a_model_without_adapters_takes_full_parameters() -> None:
    without = ManifestChecker(SHAPES, str, set(), set(), max_rank=0)
    assert without.problem(full()) == ""
    assert without.problem(adapter(pair("model.up", 6, 4))).startswith("vLLM does not support LoRA for this model")


def test_what_vllm_leaves_out_need_not_be_sent() -> None:
    drafts = {"mtp.fc.weight": (4, 8)}
    checking = ManifestChecker(SHAPES | drafts, str, set(drafts), set(), max_rank=8)
    assert checking.problem(full()) == ""
    assert checking.problem(full(**drafts)) == ""
    assert "mtp.fc.weight" in ManifestChecker(SHAPES | drafts, str, set(), set(), max_rank=8).problem(full())


def experts(rank: int = 2, **changes: tuple[int, ...] | None) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an adapter of three experts of width 5 in a model of width 4, some changed or left out."""
    shapes: dict[str, tuple[int, ...] | None] = {
        "w1.lora_A": (1, rank, 4),
        "w1.lora_B": (3, 5, rank),
        "w2.lora_A": (3, rank, 5),
        "w2.lora_B": (1, 4, rank),
        "w3.lora_A": (1, rank, 4),
        "w3.lora_B": (3, 5, rank),
    }
    return {
        f"{PREFIX}model.experts.{name}.weight": shape for name, shape in (shapes | changes).items() if shape is not None
    }


def test_layers_after_the_last_are_left_out() -> None:
    names = [f"model.{prefix}layers.{number}.mlp.x" for prefix in ("", "language_model.") for number in (3, 4, 11)]
    assert names_after([*names, "model.norm.weight", "model.visual.layers.9.x"], 4) == {*names[1:3], *names[4:]}


def test_experts() -> None:
    parts = {f"vllm.model.experts.w{number}" for number in (1, 2, 3)}
    checking = ManifestChecker(
        SHAPES, lambda name: f"vllm.{name}", set(), parts, max_rank=8, experts={"vllm.model.experts": (3, 5, 4)}
    )
    assert checking.problem(adapter(experts())) == ""
    assert checking.problem(adapter(experts(rank=8), rank=8)) == ""
    for wrong, problem in (
        (experts(**{"w1.lora_A": (3, 2, 4)}), "w1.lora_A.weight has shape [3, 2, 4], must be [1, 2, 4]"),
        (experts(**{"w2.lora_B": (3, 4, 2)}), "w2.lora_B.weight has shape [3, 4, 2], must be [1, 4, 2]"),
        (experts(**{"w2.lora_A": (3, 2, 4)}), "must be [3, 2, 5]"),
        (experts(**{"w3.lora_B": (2, 5, 2)}), "must be [3, 5, 2]"),
        (experts(**{"w3.lora_A": None}), "the adapter of model.experts.w3 has only lora_B"),
        (experts(**{"w3.lora_A": None, "w3.lora_B": None}), "the adapter of model.experts lacks w3"),
        (pair("model.experts.0.gate_proj", 5, 4), "has no module model.experts.0.gate_proj"),
    ):
        assert problem in checking.problem(adapter(wrong))


def test_experts_that_cannot_be_adapted_are_refused_with_the_reason() -> None:
    reasons = {"vllm.model.experts": "the kernel is missing"}
    parts = {"vllm.model.up"}
    checking = ManifestChecker(SHAPES, lambda name: f"vllm.{name}", set(), parts, max_rank=8, experts=reasons)
    problem = checking.problem(adapter(experts()))
    assert problem == "the engine cannot adapt model.experts.w1: the kernel is missing"
    assert checking.problem(adapter(pair("model.up", 6, 4))) == "", "other modules stay adaptable"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (full(**{"model.up.weight": None}), "1 parameters of the model are missing, among them vllm.model.up.weight"),
        (full(**{"model.up.weight": (4, 6)}), "has shape [4, 6], the model's is [6, 4]"),
        (full(**{"model.down.weight": (4, 6)}), "has no parameter model.down.weight"),
        (adapter(pair("model.up", 6, 4), rank=9), "lora.rank is 9"),
        (adapter(pair("model.up", 6, 4), rank=0), "lora.rank is 0"),
        (adapter(pair("model.up", 6, 4), alpha=0), "lora.alpha"),
        (adapter(pair("model.up", 6, 4), alpha=float("inf")), "lora.alpha"),
        (adapter(pair("model.up", 6, 5)), "must be [2, 4]"),
        (adapter(pair("model.up", 5, 4)), "must be [6, 2]"),
        (adapter(pair("model.side", 6, 4)), "has no module model.side"),
        (adapter(pair("model.embed_tokens", 10, 4)), "cannot adapt model.embed_tokens"),
        (adapter({f"{PREFIX}model.up.lora_A.weight": (2, 4)}), "has only lora_A"),
        (adapter({"model.up.lora_A.weight": (2, 4)}), "no PEFT name"),
        (adapter({f"{PREFIX}model.up.weight": (6, 4)}), "no PEFT name"),
        (adapter({}), "lists no tensors"),
        (manifest(0, SHAPES), "kind 0"),
    ],
)
def test_what_does_not_fit(wrong: weights_pb2.SnapshotManifest, problem: str) -> None:
    assert problem in checker().problem(wrong)


def test_dtypes_buckets_and_repeats() -> None:
    wrong = full()
    wrong.tensors[0].dtype = "int64"
    assert "dtype 'int64'" in checker().problem(wrong)
    wrong = full()
    wrong.bucket_bytes = 0
    assert "bucket_bytes" in checker().problem(wrong)
    wrong = full()
    wrong.tensors.append(wrong.tensors[0])
    assert "listed twice" in checker().problem(wrong)


def test_shapes_come_from_the_files_headers(tmp_path: Path) -> None:
    for number, (name, shape) in enumerate(SHAPES.items()):
        header = json.dumps(
            {"__metadata__": {"format": "pt"}, name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        ).encode()
        (tmp_path / f"model-{number}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert checkpoint_shapes(tmp_path) == SHAPES
    with pytest.raises(FileNotFoundError, match="contains no"):
        checkpoint_shapes(tmp_path / "empty")


class Wrapped(nn.Module):
    """A layer as vLLM wraps it for adapters."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2, bias=bias)


def test_biases_that_vllm_would_drop_without_a_word_are_named() -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    names = (bias, "model.norm.weight", "visual.norm.bias")
    vllm_name = "vllm.model.layers.0.self_attn.q_proj"
    check_biases(names, lambda name: f"vllm.{name}", {vllm_name: Wrapped(bias=True)})
    with pytest.raises(ValueError, match=re.escape(f"vLLM would ignore {bias}") + ".*attention_bias"):
        check_biases(names, lambda name: f"vllm.{name}", {vllm_name: Wrapped(bias=False)})
