# ruff: noqa: N803, N806
"""Applies adapters: on a CPU to runs of rows with the same adapter, on a GPU with the kernels of `lora_kernels`.

Both apply the right adapter of `lm_head` to the rows of a scored prompt.

Replaces: `vllm.platforms.cpu.CpuPlatform.get_punica_wrapper`, which names
    `vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU`, and
    `vllm.platforms.cuda.CudaPlatformBase.get_punica_wrapper`, which names
    `vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU`.
Why: vLLM's CPU wrapper gathers a copy of the adapter for each row: a 2,048-token prefill of rank 64 copies gigabytes.
    For rows without an adapter it reads the last slot, which holds another tenant's adapter. Its `add_lora_logits`
    fails when the number of rows is not the number of requests, as with prompt scores. Fovea's wrapper multiplies each
    run of rows by its one adapter and does not touch rows without an adapter.
    On a GPU, `add_lora_logits` assumes that row i of the logits belongs to request i of the batch. All rows of a scored
    prompt belong to one request, so vLLM would ignore its adapter of `lm_head` or apply another tenant's. Fovea's
    wrapper maps all rows to the adapter that `one_adapter_logits` selects.
Upstream: vllm-project/vllm pull requests 48421 and 49656 (rows without an adapter; 0.33 leaves them unchanged), issues
    51594 and 16668 (logits), pull requests 51597 (V1 runner) and 53842 (V2), open.
Delete when: on a CPU, vLLM leaves rows without an adapter unchanged and copies no adapter per row; on a GPU, prompt
    scores with an adapter of `lm_head` are right without the patch; and `prompt_scorer` is deleted.

Shape suffixes: N rows, I input width, O output width, R maximum rank, S adapter slots.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.platforms import current_platform

from fovea_sampler.vllm_patches.lora_memory import RankPlace
from fovea_sampler.vllm_patches.prompt_scorer import OneAdapterLogits

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping


class Run(NamedTuple):
    """Consecutive rows with the same adapter.

    Attributes:
        start: The first row.
        end: The row after the last.
        slot: The slot of the adapter.
        rank: The true rank of the adapter; None to use the whole slot.
        place: The adapter's part of the memory; None for slots of the largest rank.
    """

    start: int
    end: int
    slot: int
    rank: int | None
    place: RankPlace | None = None


def apply() -> None:
    """Makes vLLM use RunwisePunicaWrapper on a CPU and ScoringPunicaWrapper on a GPU. It may be called twice."""
    wrapper = RunwisePunicaWrapper if current_platform.is_cpu() else ScoringPunicaWrapper
    platform: Any = type(current_platform)
    platform.get_punica_wrapper = classmethod(lambda _: f"{__name__}.{wrapper.__name__}")


class ScoringPunicaWrapper(OneAdapterLogits, PunicaWrapperGPU):  # type: ignore[misc]
    """PunicaWrapperGPU with `one_adapter_logits`, and with the kernels of `lora_kernels`.

    vLLM marks the parent class as final but has no other hook for this.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        from fovea_sampler import lora_kernels

        del lora_kernels  # its import registers the operators below
        slots, rank = self.lora_config.max_loras, self.lora_config.max_lora_rank
        # vLLM's trial adapters are zero and may all lie at the first rank.
        table = torch.tensor([[0] * slots, [rank] * slots, [rank] * slots], dtype=torch.int32)
        self._table = table.to(self.device)
        self._firsts, self._ranks, self._widths = self._table
        for meta in (self.token_mapping_meta, self.prompt_mapping_meta):
            meta.captured_lora_counts = []  # vLLM would round the number of a step's adapters up to the most

    def set_place(self, slot: int, place: RankPlace, rank: int) -> None:
        """Sets the memory and the true rank of the adapter in a slot."""
        self._table[:, slot] = torch.tensor([place.first, -(-rank // 8) * 8, place.width], dtype=torch.int32)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        *_: object,
        **__: object,
    ) -> None:
        """Adds x @ A^T @ B^T to y for the tokens of the step and each slice of a packed projection."""
        self._add(self.token_mapping_meta, y, x, lora_a_stacked, lora_b_stacked)

    def add_lora_embedding(self, *_: object, **__: object) -> None:
        """Does nothing. Fovea trains no embeddings and refuses manifests that contain one."""

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        *_: object,
        **__: object,
    ) -> None:
        """Adds adapters of `lm_head` to the logits y: each row's own, or one for all rows in `one_adapter_logits`."""
        meta = self.prompt_mapping_meta
        if self.logits_slot is None:
            self._add(meta, y, x, (lora_a_stacked,), (lora_b_stacked,))
        elif self.logits_slot >= 0:
            row_count = x.view(-1, x.shape[-1]).shape[0]
            meta.prepare_tensors(torch.full((row_count,), self.logits_slot, dtype=torch.long, device=x.device))
            try:
                self._add(meta, y, x, (lora_a_stacked,), (lora_b_stacked,))
            finally:
                meta.prepare_tensors(self.sampler_indices)

    def _add(
        self, meta: Any, y: torch.Tensor, x: torch.Tensor, a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]
    ) -> None:
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        step = _of_step(meta, x.shape[0])
        torch.ops.vllm.fovea_add_lora(x, list(a), list(b), y, *step, self._firsts, self._ranks, self._widths)


def _of_step(meta: Any, row_count: int) -> tuple[torch.Tensor, ...]:
    """Returns the arguments of `lora_kernels` that describe the step's rows."""
    return (
        meta.token_indices_sorted_by_lora_ids[:row_count],
        meta.num_tokens_per_lora,
        meta.lora_token_start_loc,
        meta.active_lora_ids,
        meta.no_lora_flag_cpu,
        meta.num_active_loras_cpu,
    )


class RunwisePunicaWrapper(OneAdapterLogits, PunicaWrapperBase):  # type: ignore[misc]
    """A wrapper that applies adapters to runs of rows, in place of vLLM's PunicaWrapperCPU.

    Attributes:
        token_runs: The runs among the tokens of the next step.
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **_: object) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self.token_runs: list[Run] = []
        self._logits_runs: list[Run] = []
        self._places: dict[int, tuple[int, RankPlace]] = {}

    def set_place(self, slot: int, place: RankPlace, rank: int) -> None:
        """Sets the memory and the true rank of the adapter in a slot.

        Without it, the slot is used whole, padded to the largest rank.
        """
        self._places[slot] = rank, place

    def update_metadata(
        self, mapping: "LoRAMapping", lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **_: object
    ) -> None:
        """Reads from vLLM's mapping which adapter each row of the next step uses."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        slots = {lora_id: slot for slot, lora_id in enumerate(lora_index_to_id) if lora_id is not None}
        self.token_runs = _runs(mapping.index_mapping, slots, self._places)
        self._logits_runs = _runs(mapping.prompt_mapping, slots, self._places)

    def add_shrink(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **_: object
    ) -> None:
        """Adds x @ A[i]^T * scale to y[i], for y of [slices, N, R] and x of [N, I]."""
        x_NI = x.view(-1, x.shape[-1])
        for y_NR, a_SxRI in zip(y, lora_a_stacked, strict=True):
            for run in self.token_runs:
                a_RI, rows = _factor_a(a_SxRI, run).to(y_NR.dtype), slice(run.start, run.end)
                y_NR[rows, : len(a_RI)] += (x_NI[rows].to(y_NR.dtype) @ a_RI.T) * scale

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
        """Adds x[i] @ B[i]^T to y[:, slice i], for y of [N, O] and x of [slices, N, R]."""
        y_NO = y.view(-1, y.shape[-1])
        offset = offset_start
        for x_NR, b_SxOR, width in zip(x, lora_b_stacked, output_slices, strict=True):
            for run in self.token_runs:
                b_OR, rows = _factor_b(b_SxOR, run).to(x_NR.dtype), slice(run.start, run.end)
                delta = (x_NR[rows, : b_OR.shape[1]] @ b_OR.T).to(y_NO.dtype)
                target = y_NO[rows, offset : offset + width]
                target.copy_(target + delta if add_inputs else delta)
            offset += width

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **_: object
    ) -> None:
        """Does nothing. Fovea trains no embeddings and refuses manifests that contain one, so the factors are zero."""

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
        """Adds x @ A^T @ B^T * scale to y, in float32, for each slice of a packed projection."""
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
        """Adds x @ A^T @ B^T * scale to the logits y.

        The rows are the requests of the step, or the rows of one prompt inside `one_adapter_logits`. Raises
        RuntimeError if there are fewer rows than requests with adapters, because guessing could mix up tenants.
        """
        x_NI, y_NO = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if self.logits_slot is not None:
            held = self._places.get(self.logits_slot, (None, None))
            runs = [Run(0, x_NI.shape[0], self.logits_slot, *held)] if self.logits_slot >= 0 else []
        else:
            runs = self._logits_runs
        if runs and runs[-1].end > x_NI.shape[0]:
            raise RuntimeError(f"there are {x_NI.shape[0]} rows of logits, but adapters for {runs[-1].end} rows")
        for run in runs:
            _apply(y_NO, x_NI, lora_a_stacked, lora_b_stacked, run, scale)

    def apply_lora_full_linear(self, *_: object, **__: object) -> None:
        """Raises NotImplementedError: Fovea does not serve models with classification heads."""
        raise NotImplementedError("adapters of classification heads are not supported")


def _runs(lora_ids: tuple[int, ...], slots: dict[int, int], places: dict[int, tuple[int, RankPlace]]) -> list[Run]:
    """Returns the runs of consecutive rows with the same adapter, without rows that have none (id 0)."""
    runs: list[Run] = []
    for row, lora_id in enumerate(lora_ids):
        if lora_id <= 0:
            continue
        slot = slots[lora_id]
        if runs and runs[-1].end == row and runs[-1].slot == slot:
            runs[-1] = runs[-1]._replace(end=row + 1)
        else:
            runs.append(Run(row, row + 1, slot, *places.get(slot, (None, None))))
    return runs


def _factor_a(stacked: torch.Tensor, run: Run) -> torch.Tensor:
    """Returns the adapter's A, [rank, I], in a memory [S, 1, R, I] or [S, R, I]."""
    most, input_width = stacked.shape[-2:]
    first, width = run.place or (run.slot * most, most)
    return stacked.view(-1, input_width)[first : first + (run.rank or width)]


def _factor_b(stacked: torch.Tensor, run: Run) -> torch.Tensor:
    """Returns the adapter's B, [O, rank], in a memory [S, 1, O, R] or [S, O, R]."""
    output_width, most = stacked.shape[-2:]
    first, width = run.place or (run.slot * most, most)
    return stacked.view(-1)[first * output_width :][: output_width * width].view(output_width, width)[:, : run.rank]


def _apply(
    y_NO: torch.Tensor, x_NI: torch.Tensor, a_SxRI: torch.Tensor, b_SxOR: torch.Tensor, run: Run, scale: float
) -> None:
    """Adds x @ A^T @ B^T * scale to the rows of a run, in float32."""
    a_RI = _factor_a(a_SxRI, run).to(torch.float32)
    b_OR = _factor_b(b_SxOR, run).to(torch.float32)[: y_NO.shape[-1]]
    rows_NO = y_NO[run.start : run.end, : b_OR.shape[0]]  # the base layer may pad its output
    reduced_NR = x_NI[run.start : run.end].to(torch.float32) @ a_RI.T
    if rows_NO.dtype == torch.float32:
        rows_NO.addmm_(reduced_NR, b_OR.T, alpha=scale)
    else:
        rows_NO += (reduced_NR @ b_OR.T * scale).to(rows_NO.dtype)
