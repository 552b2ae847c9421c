"""Counts the memory of a trainer's rank, with the trainer's own functions, on GPUs that need not exist.

The base is built and sharded on the meta device. Its ranks are those of torch's fake process group, which sends
nothing. Rank 0 is counted, because its shards are the largest.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fovea.cli.gpu_layout import LEAST_BYTES
from fovea.runtime.model_files import context_length
from fovea_trainer.forward_backward import group_sizes
from fovea_trainer.model.expert_routing import is_experts
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.memory_budget import (
    Budgets,
    DeviceMemory,
    MemoryBudget,
    pass_bytes,
    recomputed_bytes,
)
from fovea_trainer.model.packed_model import build_model
from fovea_trainer.model.sharding import local_of, sharded_model
from fovea_trainer.model.trained_model import AdapterModel, FullModel
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights import weight_files
from fovea_trainer.weights.snapshot_store import size_of, specs_of

MIB = 2**20


class PlannedMemory(DeviceMemory):
    """The memory of a GPU of which a part is in use.

    Args:
        total_bytes: Memory of the GPU.
        limit_bytes: The trainer's limit, without what the process needs beside torch's tensors; 0 for none.
    """

    def __init__(self, total_bytes: int, limit_bytes: int) -> None:
        super().__init__(torch.device("cuda"), limit_bytes)
        self._total_bytes = total_bytes
        self.used_bytes = 0

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def free_bytes(self) -> int:
        free_bytes = self._total_bytes - LEAST_BYTES - self.used_bytes
        return min(free_bytes, self._limit_bytes - self.used_bytes) if self._limit_bytes else free_bytes

    def collect(self) -> None:
        """Does nothing: nothing was dropped."""


class _OneRank:
    """The control group of a rank. All other ranks have as much memory."""

    def minimum(self, value: int) -> int:
        return value


@dataclass(frozen=True)
class Training:
    """A kind of training that fits.

    Attributes:
        size_bytes: Memory of the model on a rank beside the base, with gradients and moments.
        budgets: The largest micro-batches.
        peak_bytes: Memory of a rank in a step of full micro-batches.
        datums: The most tokens of a datum, by the number of ranks that compute it together.
        snapshot_bytes: Size of a snapshot.
    """

    size_bytes: int
    budgets: Budgets
    peak_bytes: int
    datums: dict[int, int]
    snapshot_bytes: int


class TrainerPlan:
    """The memory of a trainer.

    Args:
        settings: Settings of the trainer.
        model_dir: Folder of the checkpoint's small files.
        gpu_bytes: Memory of each GPU.

    Raises:
        ValueError: The trainer refuses the settings or the model.
    """

    def __init__(self, settings: TrainerSettings, model_dir: Path, gpu_bytes: int) -> None:
        self.settings = settings
        self.world_size = settings.ranks * settings.nodes
        settings.check_replicas(self.world_size)
        self._gpu_bytes = gpu_bytes
        wanted = settings.model_copy(update={"dtype": "bfloat16"}) if settings.dtype == "auto" else settings
        self.family, self.dtype, module = build_model(wanted, model_dir, torch.device("cpu"))
        self._module = module
        self.config: Any = module.hf.config
        self.targets = list(self.family.lora_targets(module.hf))
        self.parameter_count = sum(parameter.numel() for parameter in module.parameters())
        text = self.config.get_text_config()
        most = context_length(self.config.to_dict()) or text.max_position_embeddings
        self.context = min(settings.max_context_length or most, most)
        with _fake_ranks(self.world_size):
            self.sharded = sharded_model(module, settings, "cpu", self.world_size, gpu_bytes)
            shards = dict(self.sharded.named_shards())
            self.base_bytes = 0 if settings.shared_base else _bytes_of(map(local_of, shards.values()))
            self.full_bytes = FullModel.size_bytes(self.sharded)
            self.group_sizes = group_sizes(settings, module)
            stacked = weight_files.in_files(shards, {})  # how files hold experts is known only once they are read
            self.files = {name: tuple(part.shape) for name, part in stacked.items()}
            self.full_snapshot_bytes = size_of(specs_of(stacked))
            self.gathered_bytes = self._gathered_bytes()

    def _gathered_bytes(self) -> int:
        """Returns the bytes of gathered parameters beside the shards: all of them, or the root and two blocks."""
        if self.sharded.mesh.size() == 1:
            return 0
        if self.sharded.keeps_gathered:
            return self._gathered_of(self._module)
        blocks = sorted(self._gathered_of(block) for block in self.family.blocks(self._module.hf))
        return self._gathered_of(self._module) - sum(blocks) + sum(blocks[-2:])

    def _gathered_of(self, module: Any) -> int:
        expert_bytes = sum(_bytes_of(layer.parameters()) for layer in filter(is_experts, module.modules()))
        return _bytes_of(module.parameters()) - expert_bytes + expert_bytes // self.settings.expert_parallel

    def adapter(self, lora: LoraSettings) -> Training:
        """Returns the memory plan of one adapter on the device.

        Raises:
            InvalidInput: The trainer refuses the settings of the adapter.
            ResourceExhausted: It does not fit.
        """
        vision = self._module.vision
        most_rank = self.settings.max_lora_rank if vision is None or vision.takes_adapters else 0
        lora.check(most_rank, bool(self.family.tower_roles))
        size_bytes = AdapterModel.size_bytes(lora, self.targets, self.dtype, self.settings.expert_parallel)
        memory, budget = self._account()
        budget.admit(size_bytes, lora.train_vision, f"an adapter of rank {lora.rank}")
        count = sum(math.prod(shape) for shape in lora.shapes(self.targets).values())
        return self._training(memory, budget, size_bytes, lora.train_vision, count * self.dtype.itemsize)

    def full(self) -> Training:
        """Returns the memory plan of training all parameters.

        Raises:
            InvalidInput: The trainer uses the base of a sampler.
            ResourceExhausted: They do not fit.
        """
        self.settings.check_kind(is_full=True)
        memory, budget = self._account()
        budget.admit(self.full_bytes, True, "training all parameters")
        return self._training(memory, budget, self.full_bytes, True, self.full_snapshot_bytes)

    def adapters_on_device(self, lora: LoraSettings, token_count: int) -> int:
        """Returns the number of adapters that stay on a device beside a call of this many tokens.

        Others wait on the host, and return with their next command.
        """
        size_bytes = AdapterModel.size_bytes(lora, self.targets, self.dtype, self.settings.expert_parallel)
        memory, budget = self._account()
        room_bytes = memory.free_bytes() - budget.wanted_bytes(token_count)
        fitting = (self.settings.model_memory_mib * MIB or room_bytes) // size_bytes
        return min(max(1, fitting), self.settings.max_models)

    def check_datum(self, training: Training, token_count: int) -> None:
        """Checks that a datum fits with the ranks that may compute it together.

        Raises:
            ResourceExhausted: It does not fit.
        """
        ranks = max(training.datums)
        memory, budget = self._account()
        memory.used_bytes += training.size_bytes
        budget.check_fits(-(-token_count // ranks), training.budgets, ranks)

    def peak_bytes(self, training: Training, tokens: int, patches: int) -> int:
        """Returns the memory of a rank in a step, at most.

        Args:
            training: The model.
            tokens: Tokens of the largest micro-batch.
            patches: Patches of its images, if a tower is trained; else 0.
        """
        chunk_bytes = self.settings.logit_chunk_mib * MIB
        working_bytes = pass_bytes(self.config, self.dtype, chunk_bytes, tokens, patches)
        return self.base_bytes + self.gathered_bytes + training.size_bytes + working_bytes

    def _account(self) -> tuple[PlannedMemory, MemoryBudget]:
        memory = PlannedMemory(self._gpu_bytes, self.settings.memory_limit_mib * MIB)
        memory.used_bytes = self.base_bytes + (self.gathered_bytes if self.sharded.keeps_gathered else 0)
        control = cast(Any, _OneRank())
        return memory, MemoryBudget(self.settings, self.config, self.dtype, memory, control, lambda _: False)

    def _training(
        self, memory: PlannedMemory, budget: MemoryBudget, size_bytes: int, trains_vision: bool, snapshot_bytes: int
    ) -> Training:
        memory.used_bytes += size_bytes
        budgets = budget.budgets(0, trains_vision)
        longest = max(memory.free_bytes() // recomputed_bytes(self.config, self.dtype), budgets.tokens)
        datums = {ranks: min(ranks * longest, self.context) for ranks in (1, *self.group_sizes)}
        found = Training(size_bytes, budgets, 0, datums, snapshot_bytes)
        patches = budgets.patches if trains_vision and self._module.vision else 0
        peak_bytes = self.peak_bytes(found, budgets.tokens, patches)
        return Training(size_bytes, budgets, min(peak_bytes, self._gpu_bytes), datums, snapshot_bytes)


def count_parameters(model_dir: Path) -> int:
    """Returns the number of parameters of a checkpoint. Raises ValueError for a model that the trainer refuses."""
    _, _, module = build_model(TrainerSettings(model=str(model_dir)), model_dir, torch.device("cpu"))
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    """Makes this process rank 0 of ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
