"""Adapters of mixed ranks in one memory: vLLM's own manager and layers on a CPU, without an engine."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import parallel_state
from vllm.lora.layers import LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.interfaces import SupportsLoRA

from fovea.runtime.hosts import interface_of
from fovea_sampler import vllm_patches
from fovea_sampler.vllm_patches.lora_memory import RankPlaces, configure, request_of
from fovea_sampler.vllm_patches.lora_slots import LoraSlots, PlannedAdapter

HIDDEN, SLOT_RANKS, SLOTS, MOST = 32, 32, 3, 12
WIDTHS = {"q_proj": (HIDDEN, 32), "k_proj": (HIDDEN, 16), "v_proj": (HIDDEN, 16), "o_proj": (32, HIDDEN)}


class Attention(nn.Module, SupportsLoRA):
    """Projections q, k and v in one layer, and o."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    embedding_modules: ClassVar[dict[str, str]] = {}
    config = None
    is_3d_moe_weight = False
    is_non_gated_moe = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(HIDDEN, 8, 4, 2, bias=False)
        self.o_proj = RowParallelLinear(32, HIDDEN, bias=False)
        self.weights = []
        for layer in (self.qkv_proj, self.o_proj):
            nn.init.normal_(layer.weight)
            self.weights.append(layer.weight.detach().clone())
            layer.quant_method.process_weights_after_loading(layer)


class Adapted:
    """A model with slots, and the adapters that it can load."""

    def __init__(self, config: VllmConfig) -> None:
        lora = LoRAConfig(max_lora_rank=SLOT_RANKS, max_loras=MOST, max_cpu_loras=32, lora_dtype=torch.float32)
        configure(config, SLOTS)
        device = torch.device("cpu")
        self.model = Attention()
        manager = LRUCacheLoRAModelManager(self.model, 64, 64, 100, lora, device, config)
        worker = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
        worker._adapter_manager, worker.lora_config = manager, lora
        self.manager, self.worker = manager, worker
        self.slots = LoraSlots(worker, lambda name: self.adapters[name])
        self.adapters: dict[str, PlannedAdapter] = {}
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, rank: int, names: tuple[str, ...] = tuple(WIDTHS)) -> None:
        """Draws an adapter of these projections."""
        shapes = {}
        for each in names:
            inputs, outputs = WIDTHS[each]
            shapes |= {f"{each}.lora_A": (rank, inputs), f"{each}.lora_B": (outputs, rank)}
        flat = torch.randn(sum(a * b for a, b in shapes.values()))

        def cut(source: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = torch.split(source, [a * b for a, b in shapes.values()])
            return {each: part.view(shape) for (each, shape), part in zip(shapes.items(), parts, strict=True)}

        def build(source: torch.Tensor) -> LoRAModel:
            peft = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []})
            tensors = {f"base_model.model.{each}.weight": one for each, one in cut(source).items()}
            return LoRAModel.from_lora_tensors(1, tensors, peft, device=str(source.device))

        self.adapters[name] = PlannedAdapter(flat, rank, self.slots.plan(build, flat.numel(), rank))
        self.tensors[name] = cut(flat)

    def step(self, rows: list[str], x: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of qkv and o for rows with these adapters; an empty name means none."""
        ids = {name: 1 + [*self.adapters].index(name) for name in rows if name}
        mapping = tuple(ids.get(name, 0) for name in rows)
        self.worker.set_active_adapters(
            {request_of(name, lora_id) for name, lora_id in ids.items()}, LoRAMapping(mapping, mapping, True)
        )
        qkv, _ = self.model.qkv_proj(x)
        out, _ = self.model.o_proj(x)
        return torch.cat([qkv, out], dim=1)

    def expected(self, rows: list[str], x: torch.Tensor) -> torch.Tensor:
        """Returns the same outputs, computed from the adapters' own tensors."""
        base = torch.cat([x @ weight.T for weight in self.model.weights], dim=1)
        for row, name in enumerate(rows):
            start = 0
            for each, (_, outputs) in WIDTHS.items():
                tensors = self.tensors.get(name, {})
                if f"{each}.lora_A" in tensors:
                    reduced = tensors[f"{each}.lora_A"] @ x[row]
                    base[row, start : start + outputs] += tensors[f"{each}.lora_B"] @ reduced
                start += outputs
        return base


@pytest.fixture
def adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adapted]:
    """A model with memory for three adapters of rank 32, or twelve of rank 8."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1") or "lo")
    vllm_patches.before_model()
    config = VllmConfig()
    with set_current_vllm_config(config), torch.inference_mode():
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/meet", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        torch.manual_seed(0)
        yield Adapted(config)
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


RANKS = (32, 8, 8, 16, 4, 12, 8)  # 32 + 8 + 8 + 16 + 8 + 16 + 8 = 96 ranks, which is all


def test_adapters_of_mixed_ranks_share_the_memory_of_three(adapted: Adapted) -> None:
    """Seven adapters fill it to the last rank. Each row gets the same result as alone, to the bit."""
    for number, rank in enumerate(RANKS):
        adapted.add(f"a{number}", rank)
    assert adapted.model.qkv_proj.lora_a_stacked[0].shape == (SLOTS, 1, SLOT_RANKS, HIDDEN)
    rows = ["", *adapted.adapters, "a3", ""]
    x = torch.randn(len(rows), HIDDEN)
    together = adapted.step(rows, x)
    assert torch.allclose(together, adapted.expected(rows, x), rtol=1e-4, atol=1e-3)
    for row, name in enumerate(rows):
        alone = adapted.step([name], x[row : row + 1])
        assert torch.allclose(alone, together[row : row + 1], rtol=1e-5, atol=1e-5), name


def test_adapters_take_over_each_others_memory(adapted: Adapted) -> None:
    """Sets of adapters in turns, with other ranks and layers: no value of the previous set remains."""
    for number, (rank, names) in enumerate(itertools.product((32, 8, 16, 4), (tuple(WIDTHS), ("k_proj", "o_proj")))):
        adapted.add(f"a{number}", rank, names)
    sets = [["a0", "a1", "a2", "a3"], ["a4", "a5", "a6", "a7", "a2", "a0"], ["a1", "a6"], ["a3", "a5", "a0", "a7"]]
    for rows in sets * 3:
        x = torch.randn(len(rows), HIDDEN)
        assert torch.allclose(adapted.step(rows, x), adapted.expected(rows, x), rtol=1e-4, atol=1e-3), rows


def test_free_ranks_between_adapters_are_joined(adapted: Adapted) -> None:
    """After small adapters have ended, the remaining ones are not adjacent, and a large one needs the ranks between
    them.
    """
    for number in range(MOST):
        adapted.add(f"small{number}", 8)
    adapted.add("large0", 32)
    adapted.add("large1", 32)
    small = [f"small{number}" for number in range(MOST)]
    x = torch.randn(MOST, HIDDEN)
    adapted.step(small, x)
    rows = ["small0", "small5", "small10", "large0", "large1"]
    assert torch.allclose(adapted.step(rows, x[:5]), adapted.expected(rows, x[:5]), rtol=1e-4, atol=1e-3)


def test_a_push_takes_no_slot_from_requests_in_flight(adapted: Adapted) -> None:
    for number in range(4):
        adapted.add(f"a{number}", 32)
    rows = ["a0", "a1", "a2"]
    x = torch.randn(3, HIDDEN)
    adapted.step(rows, x)
    before = list(adapted.manager.lora_index_to_id)
    adapted.worker.add_adapter(request_of("a3", 4))  # as AdapterBank.keep does
    assert adapted.manager.lora_index_to_id == before
    adapted.step(["a0"], x[:1])
    adapted.worker.add_adapter(request_of("a3", 4))
    assert 4 in adapted.manager.lora_index_to_id, "it must get a slot of an idle adapter"
    assert torch.allclose(adapted.step(["a3"], x[:1]), adapted.expected(["a3"], x[:1]), rtol=1e-4, atol=1e-3)


def test_what_fits_in_total_fits() -> None:
    """All multisets of classes that fill two slots of 320; the classes are 8, 16, 32, 64 and 320."""
    for counts in itertools.product(range(0, 11), range(0, 3), range(0, 3), range(0, 2)):
        used = sum(count * width for count, width in zip(counts, (64, 32, 16, 320), strict=True))
        if used > 640:
            continue
        places = RankPlaces(2, 320, whole=False)
        widths = [width for count, width in zip(counts, (64, 32, 16, 320), strict=True) for _ in range(count)]
        widths += [8] * ((640 - used) // 8)
        assert all(places.take(width) for width in sorted(widths, reverse=True)), counts
        assert places.take(8) is None


def test_the_class_of_a_rank() -> None:
    places: Any = RankPlaces(1, 64, whole=False)
    assert [places.width_of(rank) for rank in (1, 8, 9, 16, 17, 33, 64)] == [8, 8, 16, 16, 32, 64, 64]
    assert RankPlaces(1, 64, whole=True).width_of(1) == 64
