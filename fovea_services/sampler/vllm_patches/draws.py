"""Draws: seeds on CPU that a prompt in several steps does not spoil, and log-probabilities before top-k and top-p.

Replaces: `vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states` on a CPU, and wraps
    `vllm.v1.sample.sampler.Sampler.topk_topp_sampler`, an instance of
    `vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler`.
Why: after each step of a prompt but the last vLLM takes the draw back by moving the generator's offset
    (`_bookkeeping_sync`). A CPU generator has none: the engine dies of the first seeded request whose prompt spans two
    steps. Here a generator remembers its state.
    With `logprobs_mode="processed_logprobs"` vLLM reports log-probabilities after top-k and top-p. Alternatives hold
    -inf then, and a trainer, which knows the whole distribution only, cannot reproduce them; "raw_logprobs" leave the
    temperature out.
Upstream: none filed with vLLM; RBLN-SW/vllm-rbln pull request 1025 describes the same crash, and vllm-project/vime
    issue 64 the same gap.
Delete when: torch's CPU generators have offsets, or the CPU runner no longer moves them; and vLLM has a mode that
    reports log-probabilities after the temperature alone.
"""

from typing import Any

import torch


class RewindableGenerator(torch.Generator):
    """A CPU generator whose last draw can be taken back in the way that vLLM asks for it."""

    _before_draw: torch.Tensor | None = None

    def remember(self) -> None:
        """To be called before each draw."""
        self._before_draw = self.get_state()

    def get_offset(self) -> int:
        """Means nothing on CPU."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Takes the last draw back."""
        if self._before_draw is not None:
            self.set_state(self._before_draw)
            self._before_draw = None
        return self


class RememberDraws(torch.nn.Module):
    """Notes the state of each generator before it draws."""

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
        """See vLLM's TopKTopPSampler."""
        for generator in generators.values():
            if isinstance(generator, RewindableGenerator):
                generator.remember()
        return self.inner(logits, generators, k, p)  # type: ignore[no-any-return]


class TemperatureLogprobs(torch.nn.Module):
    """Reports log-softmax(logits / T), finite everywhere, whatever top-k and top-p cut off."""

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
    """Makes a model runner's sampler report temperature-scaled log-probabilities, and mends its seeds on a CPU."""
    if runner.device.type == "cpu":
        _rewind_generators(runner)
    runner.sampler.topk_topp_sampler = TemperatureLogprobs(runner.sampler.topk_topp_sampler)


def _rewind_generators(runner: Any) -> None:
    """Gives every seeded request of a CPU model runner a generator that can be rewound."""
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
