"""Scores prompts inside vLLM's model runner, in place of its own prompt logprobs.

vLLM 0.32.0's V1 runner, the only one on CPU and the one that Fovea takes on GPU, can score the actual token and the
best ones only. Here each step's logits serve all that a request asks of its prompt, a block of rows at a time, and the
result rides in the output's field for scores of fixed tokens, which the V1 runner leaves empty.
"""

from typing import Any

import torch

from services.sampler.vllm_patches.prompt_scores import PLAN_KEY, PromptScores, ScorePlan

_BLOCK_LOGITS = 32 * 2**20  # 128 MiB in float32


class PromptScorer:
    """Scores the prompts of a runner's requests.

    Args:
        runner: vLLM's model runner, its model loaded.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._manager = runner.lora_manager._adapter_manager
        self._wrapper = _language_wrapper(self._manager)
        self._block_rows = max(1, _BLOCK_LOGITS // runner.model_config.get_vocab_size())
        self._finished: dict[str, torch.Tensor] = {}

    def install(self) -> None:
        """Takes the place of the runner's own scoring. To be called once."""
        sample_tokens = self._runner.sample_tokens

        def sample(grammar_output: Any) -> Any:
            output = sample_tokens(grammar_output)
            if self._finished:
                # With asynchronous scheduling the output is wrapped until its tokens have left the device.
                whole = getattr(output, "_model_runner_output", output)
                whole.prompt_token_id_logprobs_dict = self._finished
                self._finished = {}
            return output

        self._runner._get_prompt_logprobs_dict = self._score_step
        self._runner.sample_tokens = sample

    def _score_step(self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        """Takes the place of GPUModelRunner._get_prompt_logprobs_dict."""
        for request_id, token_count in num_scheduled_tokens.items():
            request = self._runner.requests[request_id]
            scores = _scores_of(request)
            if scores is None:
                continue
            start, end = request.num_computed_tokens, request.num_computed_tokens + token_count
            self._score(scores, request, start, end, hidden_states)
            # The step that computes the last prompt token also draws one, so that the scheduler tells of the request.
            if end > scores.row_count:
                self._finished[request_id] = scores.packed()
                request.fovea_scores = None
        return {}

    def _score(self, scores: PromptScores, request: Any, start: int, end: int, hidden_states: torch.Tensor) -> None:
        rows = scores.wanted(start, end)
        if not rows.size:
            return
        index = self._runner.input_batch.req_id_to_index[request.req_id]
        offset = self._runner.query_start_loc.np[index].item() - start
        with self._wrapper.one_adapter_logits(self._slot(request)):
            for first in range(0, len(rows), self._block_rows):
                block = rows[first : first + self._block_rows]
                places = torch.from_numpy(block + offset).to(hidden_states.device)
                scores.add(block, self._runner.model.compute_logits(hidden_states[places]))

    def _slot(self, request: Any) -> int:
        """Where the request's adapter lies, -1 for none.

        vLLM maps rows of logits to adapters by the batch's requests; the rows of a prompt all belong to one.
        """
        if request.lora_request is None:
            return -1
        slot: int = self._manager.lora_index_to_id.index(request.lora_request.lora_int_id)
        return slot


def _scores_of(request: Any) -> PromptScores | None:
    """Scores under way; they live as long as the runner's record of the request, as its own would."""
    if not hasattr(request, "fovea_scores"):
        arguments = (request.sampling_params and request.sampling_params.extra_args) or {}
        message = arguments.get(PLAN_KEY)
        request.fovea_scores = message and PromptScores(ScorePlan.from_message(message), request.prompt_token_ids)
    scores: PromptScores | None = request.fovea_scores
    return scores


def _language_wrapper(manager: Any) -> Any:
    from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

    key = manager.mm_mapping.language_model[0] if manager.supports_mm else DEFAULT_LANGUAGE_WRAPPER_KEY
    wrapper = manager.punica_wrapper_mapping[key]
    if not hasattr(wrapper, "one_adapter_logits"):
        raise TypeError(f"the engine applies adapters with {type(wrapper).__name__}, which cannot score prompts")
    return wrapper
