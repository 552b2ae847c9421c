"""Keeps seeded draws on a CPU reproducible, and reports log-probabilities before top-k and top-p.

Replaces: `vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states` on a CPU, and wraps
    `vllm.v1.sample.sampler.Sampler.topk_topp_sampler`, an instance of
    `vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler`.
Why: vLLM also draws a token in the steps that compute only a part of a prompt, and undoes the draw by resetting the
    generator's offset (`_bookkeeping_sync`). CPU generators have no offset, so the engine dies at the first seeded
    request with a prompt that spans two steps. The patch gives seeded requests generators that save their state
    before each draw and restore it when vLLM resets the offset.
    With `logprobs_mode="processed_logprobs"`, vLLM reports log-probabilities after top-k and top-p. Alternatives then
    contain -inf, and the trainer, which computes the whole distribution, cannot reproduce the values.
    "raw_logprobs" ignore the temperature. The patch reports the values after the temperature, before top-k and top-p.
Upstream: none filed with vLLM; RBLN-SW/vllm-rbln pull request 1025 describes the same crash, and vllm-project/vime
    issue 64 the same gap.
Delete when: torch's CPU generators have offsets, or the CPU runner no longer moves them; and vLLM has a mode that
    reports log-probabilities after the temperature alone.
"""

from typing import Any

import torch


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


class TemperatureLogprobs(torch.nn.Module):
    """A sampler that reports log-softmax(logits / T) of all tokens, also of those that top-k and top-p exclude."""

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
        """Samples from logits [requests, vocabulary], already divided by the temperature."""
        if k is None and p is None:
            return self.inner(logits, generators, k, p)  # type: ignore[no-any-return]
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        sampled, _ = self.inner(logits, generators, k, p)
        return sampled, logprobs


def apply(runner: Any) -> None:
    """Applies the patch to a model runner: its log-probabilities, and on a CPU its generators."""
    if runner.device.type == "cpu":
        _rewind_generators(runner)
    runner.sampler.topk_topp_sampler = TemperatureLogprobs(runner.sampler.topk_topp_sampler)


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
