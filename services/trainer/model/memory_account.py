"""What of a rank's device is spoken for: counted before it is taken, and refused by name where it does not fit.

The same on all ranks: what counts is the rank that has least.
"""

import logging
import math
from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from fovea.wire.errors import ResourceExhausted
from services.trainer.model.device_memory import DeviceMemory, host_free_bytes, mib
from services.trainer.model.token_budget import CPU_BUDGETS, Budgets, budgets_within, least_bytes, recomputed_bytes
from services.trainer.ranks.control_group import ControlGroup
from services.trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

_WORKING_BYTES = 16 * 2**30
"""Less is too little to compute fast in: copies that wait for a push then leave the device."""
_HOST_RESERVE_BYTES = 128 * 2**20


class MemoryAccount:
    """Admits models and sizes micro-batches by what is free on the ranks' devices. Methods are collective.

    Args:
        memory: Of this rank's device.
        spill: Moves tensors that can wait elsewhere off this rank's device; returns whether there were any.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        config: PretrainedConfig,
        dtype: torch.dtype,
        memory: DeviceMemory,
        control: ControlGroup,
        spill: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._config = config
        self._dtype = dtype
        self._memory = memory
        self._control = control
        self._spill = spill
        self._has_vision = hasattr(config, "vision_config")
        self._said: Budgets | None = None

    def budgets(self, pending_bytes: int, trains_vision: bool) -> Budgets:
        """Of the micro-batches of one call, by what is free now and `pending_bytes` that the call takes besides."""
        settings = self._settings
        fitting = CPU_BUDGETS
        if self._memory.is_known:
            room_bytes = self._free(pending_bytes + _WORKING_BYTES) - pending_bytes
            fitting = budgets_within(room_bytes, self._config, self._dtype, trains_vision and self._has_vision)
        found = Budgets(
            self._control.least(settings.token_budget or fitting.tokens),
            self._control.least(settings.patch_budget or fitting.patches),
        )
        if found != self._said:
            self._said = found
            logger.info("micro-batches of up to %d tokens, %d patches", found.tokens, found.patches)
        return found

    def recompute_above(self, budgets: Budgets) -> float:
        """Tokens above which a micro-batch keeps no activations."""
        return {"auto": budgets.tokens, "always": 0, "never": math.inf}[self._settings.recompute]

    def admit(self, size_bytes: int, trains_vision: bool, what: str) -> None:
        """Raises ResourceExhausted, on all ranks, if `what` does not fit beside a reserve for computing."""
        logit_bytes = self._settings.logit_chunk_mib * 2**20
        reserve_bytes = least_bytes(self._config, self._dtype, logit_bytes, trains_vision and self._has_vision)
        room_bytes = self._control.least(self._free(size_bytes + reserve_bytes) - reserve_bytes)
        if size_bytes > room_bytes:
            raise ResourceExhausted(
                f"{what} needs {mib(size_bytes)} on each of the trainer's devices, {mib(room_bytes)} are free beside "
                f"{mib(reserve_bytes)} kept for computing: delete a model, or take a lower rank"
            )

    def check_fits(self, token_count: int, budgets: Budgets) -> None:
        """Raises ResourceExhausted for a micro-batch above the budget that may not fit this rank. Not collective."""
        if token_count <= budgets.tokens or not self._memory.is_known:
            return
        size_bytes = token_count * recomputed_bytes(self._config, self._dtype)
        if size_bytes > (free_bytes := self._memory.free_bytes()):
            raise ResourceExhausted(
                f"a datum of {token_count} tokens needs {mib(size_bytes)} of memory, {mib(free_bytes)} are free: send "
                "shorter datums, or delete models"
            )

    def place(self, size_bytes: int) -> torch.device:
        """Where a copy of that size waits for its use: on this rank's device while work has room. Not collective."""
        has_room = not self._memory.is_known or self._memory.free_bytes() > 2 * size_bytes + _WORKING_BYTES
        return self._memory.device if has_room else torch.device("cpu")

    def has_room(self, place: torch.device, size_bytes: int) -> bool:
        """Whether a copy of that size fits where `place` puts it. Not collective."""
        return size_bytes + _HOST_RESERVE_BYTES <= self._free_at(place)

    def check_copy(self, place: torch.device, size_bytes: int, what: str) -> None:
        """Raises ResourceExhausted if it does not. Not collective."""
        if not self.has_room(place, size_bytes):
            raise ResourceExhausted(
                f"{what} needs {mib(size_bytes)} of the trainer's memory beside {mib(_HOST_RESERVE_BYTES)} kept free, "
                f"{mib(self._free_at(place))} are free: delete a model, or take a lower rank"
            )

    def _free_at(self, place: torch.device) -> int:
        away = place.type == "cpu" and self._memory.device.type != "cpu"
        return host_free_bytes() if away else self._memory.free_bytes()

    def collect(self) -> None:
        """As `DeviceMemory.collect`. Not collective."""
        self._memory.collect()

    def _free(self, wanted_bytes: int) -> int:
        if self._memory.is_known and self._memory.free_bytes() < wanted_bytes and self._spill():
            self._memory.collect()
        return self._memory.free_bytes()
