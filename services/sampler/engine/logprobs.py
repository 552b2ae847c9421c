"""Which distribution reported logprobs follow, put into a model runner that vLLM has built."""

from typing import Any

import torch


class TemperatureLogprobs(torch.nn.Module):
    """Reports logprobs after the temperature and before top-k and top-p.

    With `logprobs_mode="processed_logprobs"` vLLM reports them after top-k and top-p: then alternatives hold -inf, and
    a trainer, which knows the whole distribution only, cannot reproduce them. Here they are finite everywhere, equal to
    log-softmax(logits / T) whatever was cut off.
    """

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


def report_temperature_logprobs(runner: Any) -> None:
    """Makes a model runner's sampler report temperature-scaled logprobs."""
    runner.sampler.topk_topp_sampler = TemperatureLogprobs(runner.sampler.topk_topp_sampler)


def score_prompts_one_by_one(runner: Any) -> None:
    """Lets prompt logprobs and adapters of the unembedding work together in one batch.

    vLLM computes prompt logits request by request but keeps the batch's row-to-adapter mapping, so an adapter on
    `lm_head` would meet rows of another request. Here each request's rows are marked with its own adapter.
    """
    manager = runner.lora_manager._adapter_manager
    wrapper = _language_wrapper(manager)
    score_all = runner._get_prompt_logprobs_dict

    def score(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        waiting = runner.num_prompt_logprobs
        scored: dict[str, Any] = {}
        for request_id in [name for name in waiting if name in num_scheduled_tokens]:
            request = runner.requests[request_id]
            lora_id = request.lora_request.lora_int_id if request.lora_request else 0
            slot = manager.lora_index_to_id.index(lora_id) if lora_id else -1
            runner.num_prompt_logprobs = {request_id: waiting[request_id]}
            try:
                with wrapper.one_adapter_logits(slot):
                    scored |= score_all(hidden_states, num_scheduled_tokens)
                if request_id not in runner.num_prompt_logprobs:
                    del waiting[request_id]
            finally:
                runner.num_prompt_logprobs = waiting
        return scored

    runner._get_prompt_logprobs_dict = score


def _language_wrapper(manager: Any) -> Any:
    from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

    key = manager.mm_mapping.language_model[0] if manager.supports_mm else DEFAULT_LANGUAGE_WRAPPER_KEY
    wrapper = manager.punica_wrapper_mapping[key]
    if not hasattr(wrapper, "one_adapter_logits"):
        raise TypeError(f"the engine applies adapters with {type(wrapper).__name__}, which cannot score prompts")
    return wrapper
