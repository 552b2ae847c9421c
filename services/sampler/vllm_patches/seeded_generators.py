"""Seeds of requests on CPU, kept right when a prompt is computed in several steps.

After each step of a prompt but the last vLLM takes the draw back by moving the generator's offset. A CPU generator has
none: vLLM 0.32.0 dies of the first seeded request whose prompt spans two steps. Here a generator remembers its state.
"""

from typing import Any

import torch


class RewindableGenerator(torch.Generator):
    """A CPU generator whose last draw can be taken back in the way that vLLM asks for it."""

    before_draw: torch.Tensor | None = None

    def get_offset(self) -> int:
        """Means nothing on CPU."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Takes the last draw back."""
        if self.before_draw is not None:
            self.set_state(self.before_draw)
            self.before_draw = None
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
                generator.before_draw = generator.get_state()
        return self.inner(logits, generators, k, p)  # type: ignore[no-any-return]


def rewind_draws_on_cpu(runner: Any) -> None:
    """Gives every seeded request of a CPU model runner a generator that can be rewound. Elsewhere no effect."""
    if runner.device.type != "cpu":
        return
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
