"""The number of adapter slots in the engine, unless the settings give one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import fovea_tinyvlm
from fovea_sampler.engine.manifest_check import checkpoint_shapes
from fovea_sampler.engine.vllm_launch import capacity_for, cpu_room, measure_adapter_capacity
from fovea_sampler.settings import SamplerSettings
from tests.e2e.sampler.reference import Reference, random_adapter

GIB = 2**30
# One layer with 3 inputs and 5 outputs, tied embeddings of 4 by 3, and parameters without adapters: 8 + 7 per rank.
SHAPES = {
    "model.up.weight": (5, 3),
    "model.up.bias": (5,),
    "model.norm.weight": (3,),
    "model.embed_tokens.weight": (4, 3),
    "model.pos_embed.weight": (9, 3),
    "model.conv.weight": (8, 3, 2, 4, 4),
}
RANK = 64
ADAPTER_BYTES = 2 * RANK * 15


def room(shapes: dict[str, Any] = SHAPES, slot_bytes: int = GIB, host_bytes: int = GIB, **settings: Any) -> Any:
    """Returns the room for bfloat16 adapters."""
    return capacity_for(SamplerSettings(model="m", **settings), shapes, 2, slot_bytes, host_bytes)


def test_memory_decides() -> None:
    assert room().adapter_bytes == ADAPTER_BYTES
    assert room(slot_bytes=10 * ADAPTER_BYTES).slots == 10
    assert room(host_bytes=4 * 10 * ADAPTER_BYTES).held_bytes == 10 * ADAPTER_BYTES
    said = str(room(slot_bytes=10 * ADAPTER_BYTES, host_bytes=4 * 20 * ADAPTER_BYTES))
    assert "64 in one batch, 10 of the largest rank" in said
    assert "20 of the largest rank" in said
    assert str(room({})) == "adapters: 4 in one batch, 4 of the largest rank, up to 256 MiB held"


def test_never_more_than_can_be_held_or_run_at_once_nor_fewer_than_a_few() -> None:
    assert room().batched == 64
    assert room().held_bytes == 1024 * ADAPTER_BYTES
    assert room(max_sequences=7).batched == 7
    assert room(max_adapters=3).batched == 3
    assert room(slot_bytes=1).slots == 4


def test_settings_go_first() -> None:
    said = room(max_loras=2, max_adapter_mib=5, slot_bytes=1)
    assert (said.batched, said.slots, said.held_bytes) == (16, 2, 5 << 20)


def test_without_shapes() -> None:
    assert (room({}).slots, room({}).held_bytes) == (4, GIB // 4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_experts_share_their_outer_factors(together: bool, transposed: bool) -> None:
    """Two layers of 4 experts of width 5 in a model of width 3; vLLM also adapts the router."""
    both, down = ((3, 10), (5, 3)) if transposed else ((10, 3), (3, 5))
    apart = {"gate_proj.weight": (5, 3), "up_proj.weight": (5, 3), "down_proj.weight": (3, 5)}
    one = {"gate_up_proj": (4, *both), "down_proj": (4, *down)}
    each = {f"{expert}.{name}": shape for name, shape in apart.items() for expert in range(4)}
    shapes: dict[str, Any] = {"model.embed_tokens.weight": (4, 3), "lm_head.weight": (4, 3)}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        shapes |= {f"{prefix}.experts.{name}": shape for name, shape in (one if together else each).items()}
        shapes |= {f"{prefix}.gate.weight": (4, 3), f"{prefix}.shared_expert.up_proj.weight": (6, 3)}
    assert room(shapes, slot_bytes=10 * room(shapes).adapter_bytes).batched == 10, "each must have a whole slot"
    per_layer = 3 * (4 * 5 + 3) + (4 + 3) + (6 + 3)
    assert room(shapes).adapter_bytes == 2 * RANK * (2 * per_layer + 7)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3"])
def test_the_largest_adapter_of_a_model_is_what_it_takes(kind: str) -> None:
    model = fovea_tinyvlm.ensure(kind)
    whole = random_adapter(Reference(model), RANK, seed=0)
    found = capacity_for(SamplerSettings(model="m"), checkpoint_shapes(model), 4, GIB, GIB)
    assert found.adapter_bytes == sum(tensor.numel() * 4 for tensor in whole.values())


def test_on_a_cpu_slots_take_no_more_than_the_weights() -> None:
    """SmolLM2 135M on a machine with 17 GiB free: a slot takes 87 MiB, and 17 of them would take
    1.5 GiB of the 24 GiB.
    """
    weights, slot, least = 513 << 20, 87 << 20, 256 << 20
    assert cpu_room(least, weights, 17 * GIB) == weights
    assert room(slot_bytes=weights // slot * ADAPTER_BYTES).slots == 5
    assert cpu_room(least, weights, 6 * GIB) == 384 << 20, "a sixteenth of the free memory"
    assert cpu_room(least, 4 << 20, 17 * GIB) == cpu_room(least, 0, 0) == least


def test_the_slots_of_models_on_a_cpu(tmp_path: Path) -> None:
    """The weights are a header and a hole in a file."""
    small = measure_adapter_capacity(SamplerSettings(model=str(fovea_tinyvlm.ensure()), device="cpu"))
    assert small.batched == 64, "small models must have slots for a whole batch"
    layer = {
        "q": (576, 576),
        "k": (192, 576),
        "v": (192, 576),
        "o": (576, 576),
        "gate": (1536, 576),
        "down": (576, 1536),
    }
    shapes = {
        f"model.layers.{number}.{name}_proj.weight": shape for number in range(30) for name, shape in layer.items()
    }
    end, header = 0, {}
    for name, shape in {"model.embed_tokens.weight": (49152, 576), **shapes}.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = measure_adapter_capacity(SamplerSettings(model=str(tmp_path), device="cpu"))
    assert found.slots >= 4
    assert found.slots * found.adapter_bytes <= end, "slots must not take more than the weights"
