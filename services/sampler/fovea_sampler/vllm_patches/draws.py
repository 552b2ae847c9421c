"""Keeps seeded draws on a CPU reproducible; reports log-probabilities before top-k and top-p, supports and versions.

Replaces: `vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states` on a CPU, wraps its `sample_tokens` and
    `vllm.v1.sample.sampler.Sampler.topk_topp_sampler`, an instance of
    `vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler`, and moves the call of `MinPLogitsProcessor.apply` there.
    Wraps `vllm.v1.engine.output_processor.RequestState._new_completion_output`.
Why: vLLM also draws a token in the steps that compute only a part of a prompt, and undoes the draw by resetting the
    generator's offset (`_bookkeeping_sync`). CPU generators have no offset, so the engine dies at the first seeded
    request with a prompt that spans two steps. The patch gives seeded requests generators that save their state
    before each draw and restore it when vLLM resets the offset.
    With `logprobs_mode="processed_logprobs"`, vLLM reports log-probabilities after top-k and top-p. Alternatives then
    contain -inf, and the trainer, which computes the whole distribution, cannot reproduce the values.
    "raw_logprobs" ignore the temperature. The patch reports the values after the temperature, before top-k and top-p.
    For requests that ask for it, the patch reports the values after all of them, and records the support: the tokens
    that were left. vLLM's `return_sampling_mask` does that for the V2 model runner only, for all requests, and requires
    top-k. Its scheduler and front-end process pass supports on with V1 too; the patch sends packed rows that way.
    vLLM labels the tokens of each step with the version of the weights, but passes the labels on only in a sequence's
    last output. A stream must state them for tokens that are sent before.
Upstream: none filed with vLLM; RBLN-SW/vllm-rbln pull request 1025 describes the same crash, and vllm-project/vime
    issue 64 the same gap; vllm-project/vllm pull request 49577 added `return_sampling_mask`.
Delete when: torch's CPU generators have offsets, or the CPU runner no longer moves them; and vLLM has a mode that
    reports log-probabilities after the temperature alone; and it returns supports per request, without top-k, and
    `weight_versions` in every output.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

from fovea.wire.tensors import FULL_ROW, MOST_SUPPORT, pack_support, split_support

SUPPORT_KEY = "fovea_sampled_support"
"""The key in vLLM's `extra_args` that is true for a request that asks for its supports."""


def state_versions() -> None:
    """Makes each output of a sequence state which weights sampled its tokens so far. It may be called twice.

    Call it in the front-end process.
    """
    if getattr(RequestState._new_completion_output, "states_versions", False):
        return
    make: Any = RequestState._new_completion_output

    @wraps(make)
    def make_with_versions(state: Any, *arguments: Any) -> Any:
        output = make(state, *arguments)
        output.weight_versions = state._weight_version_spans()
        return output

    make_with_versions.states_versions = True  # type: ignore[attr-defined]
    RequestState._new_completion_output = make_with_versions


class RewindableGenerator(torch.Generator):
    """A CPU generator that undoes its last draw when vLLM sets its offset."""

    _before_draw: torch.Tensor | None = None

    def remember(self) -> None:
        """Saves the state. Call it before each draw."""
        self._before_draw = self.get_state()

    def get_offset(self) -> int:
        """Returns 0. A CPU generator has no offset; vLLM only passes the value back to `set_offset`."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Undoes the last draw."""
        if self._before_draw is not None:
            self.set_state(self._before_draw)
            self._before_draw = None
        return self


class RememberDraws(torch.nn.Module):
    """A sampler that saves the state of each generator before it draws."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Samples like vLLM's TopKTopPSampler."""
        for generator in generators.values():
            if isinstance(generator, RewindableGenerator):
                generator.remember()
        return self.inner(logits, generators, k, p)  # type: ignore[no-any-return]


class DrawLogprobs(torch.nn.Module):
    """A sampler that reports log-softmax(logits / T) of all tokens, or of those from which a request's token is drawn.

    Args:
        inner: vLLM's sampler.
        processors: vLLM's processors that run before it. Min-p moves from there to this class.
    """

    def __init__(self, inner: torch.nn.Module, processors: Sequence[Any]) -> None:
        super().__init__()
        self.inner = inner
        self._min_p = [one for one in processors if isinstance(one, MinPLogitsProcessor)]
        self._cuts = [one.apply for one in self._min_p]
        for one in self._min_p:
            one.apply = lambda logits: logits
        self._recorded: list[int] = []
        self._supports: tuple[torch.Tensor, torch.Tensor] | None = None

    def record(self, rows: list[int]) -> None:
        """Records the supports of these rows of the batch in the next step; of none after an empty list."""
        self._recorded, self._supports = rows, None

    @property
    def supports(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Supports of those rows, ids int32 [rows, most] and their counts, 0 for full; None if nothing was drawn."""
        return self._supports

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Samples from logits [requests, vocabulary], already divided by the temperature."""
        cuts = [cut for one, cut in zip(self._min_p, self._cuts, strict=True) if one.min_p_count]
        whole = None if k is None and p is None and not cuts else logits.log_softmax(dim=-1, dtype=torch.float32)
        for cut in cuts:
            logits = cut(logits)
        sampled, kept = self.inner(logits, generators, k, p)
        whole = kept if whole is None else whole
        if self._recorded:
            self._record(whole, kept)
        return sampled, whole

    def _record(self, whole: torch.Tensor, kept: torch.Tensor) -> None:
        """Records supports, and replaces rows of `whole` by those of `kept`, which are -inf outside the support."""
        rows = async_tensor_h2d(self._recorded, whole.device, torch.int64)
        own, size = kept[rows], kept.shape[1]
        counts = (own > -torch.inf).sum(dim=1, dtype=torch.int32)
        is_full = (counts > MOST_SUPPORT) | (counts == size)
        best = own.topk(min(MOST_SUPPORT, size), sorted=False)
        ids = torch.where(best.values > -torch.inf, best.indices, size).sort(dim=1).values
        whole[rows] = torch.where(is_full[:, None], whole[rows], own)
        self._supports = ids.int(), counts.masked_fill(is_full, 0)


class StepSupports:
    """The supports of one step. The scheduler reads it in place of vLLM's SamplingMaskLists.

    Args:
        asking: Rows of the batch for which supports are returned.
        recorded: Those among them that `supports` describes; the others are full.
        supports: As in `DrawLogprobs`. They are copied from the device meanwhile.
    """

    def __init__(
        self, asking: Sequence[int], recorded: Sequence[int], supports: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        self._packed, self._recorded = dict.fromkeys(asking, FULL_ROW), recorded
        self._copies: tuple[torch.Tensor, torch.Tensor] | None = supports
        self._copied: torch.cuda.Event | None = None
        if supports is not None and supports[0].is_cuda:
            self._copies = supports[0].to("cpu", non_blocking=True), supports[1].to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()  # type: ignore[no-untyped-call]

    def slice_request(self, index: int, count: int) -> SamplingMaskLists | None:
        """Returns the packed row of a request as uint8, in place of ids; None if the request did not ask for it."""
        row = self._rows().get(index)
        return None if row is None else SamplingMaskLists(np.frombuffer(row, np.uint8))

    def __getstate__(self) -> dict[str, Any]:
        """Waits for the copies: only packed rows are sent from one process to another."""
        self._rows()
        return self.__dict__

    def _rows(self) -> dict[int, bytes]:
        if self._copies is not None:
            if self._copied is not None:
                self._copied.synchronize()  # type: ignore[no-untyped-call]
            ids, counts = (copy.numpy() for copy in self._copies)
            offsets = np.concatenate(([0], np.cumsum(counts)))
            rows = split_support(pack_support(ids[np.arange(ids.shape[1]) < counts[:, None]], offsets))
            self._packed.update(zip(self._recorded, rows, strict=True))
            self._copies = self._copied = None
        return self._packed


def apply(runner: Any) -> None:
    """Applies the patch to a model runner: its log-probabilities and supports, and on a CPU its generators."""
    if runner.device.type == "cpu":
        _rewind_generators(runner)
    inner, processors = runner.sampler.topk_topp_sampler, runner.input_batch.logitsprocs.argmax_invariant
    runner.sampler.topk_topp_sampler = sampler = DrawLogprobs(inner, processors)
    sample_tokens = runner.sample_tokens

    def sample(grammar_output: Any) -> Any:
        names = runner.input_batch.req_ids if runner.execute_model_state is not None else ()
        asking = {row: runner.requests[name] for row, name in enumerate(names) if _asks(runner.requests[name])}
        # At a temperature of 0, nothing is drawn.
        recorded = [row for row, request in asking.items() if request.sampling_params.temperature > 0]
        sampler.record(recorded)
        output = sample_tokens(grammar_output)
        if asking:
            # With asynchronous scheduling, the output is wrapped until its tokens have been copied from the device.
            whole = getattr(output, "_model_runner_output", output)
            whole.sampling_masks = StepSupports(list(asking), recorded, sampler.supports)
            sampler.record([])
        return output

    runner.sample_tokens = sample


def configure(scheduler: Any) -> None:
    """Makes a scheduler of vLLM pass supports on, which it otherwise does with the V2 model runner only."""
    scheduler.return_sampling_mask = True


def _asks(request: Any) -> bool:
    arguments = (request.sampling_params and request.sampling_params.extra_args) or {}
    return bool(arguments.get(SUPPORT_KEY))


def _rewind_generators(runner: Any) -> None:
    """Gives every seeded request of a CPU model runner a RewindableGenerator."""
    runner.sampler.topk_topp_sampler = RememberDraws(runner.sampler.topk_topp_sampler)
    update_states = runner._update_states

    def update(scheduler_output: Any) -> Any:
        result = update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            state = runner.requests[new.req_id]
            if state.generator is None or isinstance(state.generator, RewindableGenerator):
                continue
            rewindable = RewindableGenerator()
            rewindable.set_state(state.generator.get_state())
            state.generator = rewindable
            runner.input_batch.generators[runner.input_batch.req_id_to_index[new.req_id]] = rewindable
        return result

    runner._update_states = update
