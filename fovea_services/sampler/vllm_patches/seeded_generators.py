"""Seeds of requests on CPU, kept right when a prompt is computed in several steps.

Replaces: `vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states`, and wraps the sampler's `topk_topp_sampler`.
Why: after each step of a prompt but the last vLLM takes the draw back by moving the generator's offset
    (`_bookkeeping_sync`). A CPU generator has none: the engine dies of the first seeded request whose prompt spans two
    steps. Here a generator remembers its state.
Upstream: none filed with vLLM; RBLN-SW/vllm-rbln pull request 1025 describes the same crash.
Delete when: torch's CPU generators have offsets, or the CPU runner no longer moves them.
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


def apply(runner: Any) -> None:
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
