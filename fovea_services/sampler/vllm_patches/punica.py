# ruff: noqa: N803, N806
"""LoRA: on a CPU by runs of rows with the same adapter; on a GPU by vLLM's own kernels.

Both know which request the rows of a scored prompt belong to.

Replaces: `vllm.platforms.cpu.CpuPlatform.get_punica_wrapper`, which names
    `vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU`, and
    `vllm.platforms.cuda.CudaPlatformBase.get_punica_wrapper`, which names
    `vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU`.
Why: the one for CPUs gathers a copy of the adapter per row (a 2,048-token prefill of rank 64 copies gigabytes), reads
    the last slot, another tenant's, for rows without an adapter, and breaks in `add_lora_logits` when the number of
    rows is not the number of requests, as with prompt scores. Ours multiplies each run of rows by the one adapter that
    it uses and leaves rows without an adapter alone. On a GPU `add_lora_logits` takes rows of logits for the batch's
    requests, one row each. The rows of a prompt all belong to one request: an adapter of `lm_head` is dropped from
    prompt scores, or another tenant's is taken.
Upstream: vllm-project/vllm pull requests 48421 and 49656 (rows without an adapter), issues 51594 and 16668 (logits),
    pull requests 51597 (V1 runner) and 53842 (V2); all open.
Delete when: on a CPU rows without an adapter are left alone and none is copied per row; on a GPU prompt scores with an
    adapter of `lm_head` are right without it; and `prompt_scorer` is gone.

Shape suffixes: N rows, I input width, O output width, R maximum rank, S adapter slots.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.platforms import current_platform

from fovea_services.sampler.vllm_patches.prompt_scorer import OneAdapterLogits

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping


class Run(NamedTuple):
    """Neighbouring rows with the same adapter: the first, the one after the last, its slot and its true rank."""

    start: int
    end: int
    slot: int
    rank: int | None


def apply() -> None:
    """Has vLLM take RunwisePunicaWrapper on a CPU and ScoringPunicaWrapper on a GPU; twice is no error."""
    wrapper = RunwisePunicaWrapper if current_platform.is_cpu() else ScoringPunicaWrapper
    platform: Any = type(current_platform)
    platform.get_punica_wrapper = classmethod(lambda _: f"{__name__}.{wrapper.__name__}")


class ScoringPunicaWrapper(OneAdapterLogits, PunicaWrapperGPU):  # type: ignore[misc]
    """PunicaWrapperGPU with `one_adapter_logits`; vLLM marks the parent final, yet offers no other place for it."""

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *arguments: Any, **options: Any) -> None:
        if self.logits_slot is None:
            super().add_lora_logits(y, x, *arguments, **options)
        elif self.logits_slot >= 0:
            row_count = x.view(-1, x.shape[-1]).shape[0]
            slots = torch.full((row_count,), self.logits_slot, dtype=torch.long, device=x.device)
            self.prompt_mapping_meta.prepare_tensors(slots)
            try:
                super().add_lora_logits(y, x, *arguments, **options)
            finally:
                self.prompt_mapping_meta.prepare_tensors(self.sampler_indices)


class RunwisePunicaWrapper(OneAdapterLogits, PunicaWrapperBase):  # type: ignore[misc]
    """Applies adapters to runs of rows; takes the place of vLLM's PunicaWrapperCPU.

    Attributes:
        token_runs: Those of the next step's tokens.
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **_: object) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self.token_runs: list[Run] = []
        self._logits_runs: list[Run] = []
        self._ranks: dict[int, int] = {}

    def set_rank(self, slot: int, rank: int) -> None:
        """Tells the true rank of the adapter in a slot; until then a slot is used whole, padded to the largest rank."""
        self._ranks[slot] = rank

    def update_metadata(
        self, mapping: "LoRAMapping", lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **_: object
    ) -> None:
        """Takes over which adapter each row of the next step uses."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        slots = {lora_id: slot for slot, lora_id in enumerate(lora_index_to_id) if lora_id is not None}
        self.token_runs = _runs(mapping.index_mapping, slots, self._ranks)
        self._logits_runs = _runs(mapping.prompt_mapping, slots, self._ranks)

    def add_shrink(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **_: object
    ) -> None:
        """y[i] += x @ A[i]^T * scale, for y of [slices, N, R] and x of [N, I]."""
        x_NI = x.view(-1, x.shape[-1])
        for y_NR, a_SxRI in zip(y, lora_a_stacked, strict=True):
            for start, end, slot, _rank in self.token_runs:
                y_NR[start:end] += (x_NI[start:end].to(y_NR.dtype) @ _matrix(a_SxRI, slot, y_NR.dtype).T) * scale

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **_: object,
    ) -> None:
        """y[:, slice i] += x[i] @ B[i]^T, for y of [N, O] and x of [slices, N, R]."""
        y_NO = y.view(-1, y.shape[-1])
        offset = offset_start
        for x_NR, b_SxOR, width in zip(x, lora_b_stacked, output_slices, strict=True):
            for start, end, slot, _rank in self.token_runs:
                delta = (x_NR[start:end] @ _matrix(b_SxOR, slot, x_NR.dtype).T).to(y_NO.dtype)
                target = y_NO[start:end, offset : offset + width]
                target.copy_(target + delta if add_inputs else delta)
            offset += width

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **_: object
    ) -> None:
        """Nothing: Fovea trains no embeddings, a manifest that names one is refused, so only zeros come here."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: object,
    ) -> None:
        """y += x @ A^T @ B^T * scale in float32, for each slice of a packed projection."""
        if not self.token_runs:
            return
        x_NI, y_NO = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        offset = 0
        for a_SxRI, b_SxOR, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            for run in self.token_runs:
                _apply(y_NO[:, offset : offset + width], x_NI, a_SxRI, b_SxOR, run, scale)
            offset += width

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_: object,
    ) -> None:
        """y += x @ A^T @ B^T * scale for logits: rows are requests, or prompt rows in `one_adapter_logits`.

        Raises RuntimeError if the rows are not the requests of this step: guessing would mix tenants.
        """
        x_NI, y_NO = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if self.logits_slot is not None:
            runs = [Run(0, x_NI.shape[0], self.logits_slot, None)] if self.logits_slot >= 0 else []
        else:
            runs = self._logits_runs
        if runs and runs[-1].end > x_NI.shape[0]:
            raise RuntimeError(f"{x_NI.shape[0]} rows of logits, but adapters are known for {runs[-1].end}")
        for run in runs:
            _apply(y_NO, x_NI, lora_a_stacked, lora_b_stacked, run, scale)

    def apply_lora_full_linear(self, *_: object, **__: object) -> None:
        """Raises NotImplementedError: Fovea serves no classification heads."""
        raise NotImplementedError("adapters of classification heads")


def _runs(lora_ids: tuple[int, ...], slots: dict[int, int], ranks: dict[int, int]) -> list[Run]:
    """Runs of neighbouring rows with the same adapter; rows without one (id 0) are left out."""
    runs: list[Run] = []
    for row, lora_id in enumerate(lora_ids):
        if lora_id <= 0:
            continue
        slot = slots[lora_id]
        if runs and runs[-1].end == row and runs[-1].slot == slot:
            runs[-1] = runs[-1]._replace(end=row + 1)
        else:
            runs.append(Run(row, row + 1, slot, ranks.get(slot)))
    return runs


def _matrix(stacked: torch.Tensor, slot: int, dtype: torch.dtype) -> torch.Tensor:
    """The adapter's matrix in a slot of [S, 1, rows, columns] or [S, rows, columns]."""
    matrix = stacked[slot]
    return (matrix[0] if matrix.dim() == 3 else matrix).to(dtype)


def _apply(
    y_NO: torch.Tensor, x_NI: torch.Tensor, a_SxRI: torch.Tensor, b_SxOR: torch.Tensor, run: Run, scale: float
) -> None:
    """y += x @ A^T @ B^T * scale in float32 for the rows of a run."""
    a_RI = _matrix(a_SxRI, run.slot, torch.float32)[: run.rank]
    b_OR = _matrix(b_SxOR, run.slot, torch.float32)[: y_NO.shape[-1], : run.rank]
    rows_NO = y_NO[run.start : run.end, : b_OR.shape[0]]  # the base layer may pad its output
    reduced_NR = x_NI[run.start : run.end].to(torch.float32) @ a_RI.T
    if rows_NO.dtype == torch.float32:
        rows_NO.addmm_(reduced_NR, b_OR.T, alpha=scale)
    else:
        rows_NO += (reduced_NR @ b_OR.T * scale).to(rows_NO.dtype)
