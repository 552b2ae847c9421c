"""Scores of prompts, in place of vLLM's own prompt logprobs.

Replaces: `vllm.v1.worker.gpu_model_runner.GPUModelRunner._get_prompt_logprobs_dict` and `.sample_tokens`.
Why: the V1 runner scores the actual token and the best ones only, in Python objects, and takes the wrong adapter of
    `lm_head` for them. Here each step's logits serve all that a request asks of its prompt (targets, draws, the last n
    rows), a block of rows at a time, and the result rides in the output's field for scores of fixed tokens, which the
    V1 runner leaves empty.
Upstream: vllm-project/vllm issues 51594 (adapters of `lm_head`), open, and 9404 (scores of given tokens), closed as
    stale. The V2 runner scores given tokens per row (`prompt_logprob_token_ids`), but draws none.
Delete when: vLLM scores given tokens, the best and draws of its own, with the request's adapter, on CPU too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fovea_services.sampler.vllm_patches.prompt_scores import PLAN_KEY, PromptScores, ScorePlan

_BLOCK_LOGITS = 32 * 2**20  # 128 MiB in float32


class OneAdapterLogits:
    """Part of a LoRA wrapper: tells its `add_lora_logits` that all rows belong to one adapter."""

    logits_slot: int | None = None

    @contextmanager
    def one_adapter_logits(self, slot: int) -> Iterator[None]:
        """Within it, all rows given to `add_lora_logits` belong to the adapter in `slot`, or to none for -1."""
        before, self.logits_slot = self.logits_slot, slot
        try:
            yield
        finally:
            self.logits_slot = before


def apply(runner: Any) -> None:
    """Has a runner score prompts as their requests ask. To be called once."""
    PromptScorer(runner).install()


class PromptScorer:
    """Scores the prompts of a runner's requests.

    Args:
        runner: vLLM's model runner, its model loaded.

    Raises TypeError if its LoRA wrapper is not one of ours.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._manager: Any = None
        self._wrapper = OneAdapterLogits()  # which nobody asks if the model takes no adapters
        if runner.lora_config is not None:
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


def _language_wrapper(manager: Any) -> OneAdapterLogits:
    from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

    key = manager.mm_mapping.language_model[0] if manager.supports_mm else DEFAULT_LANGUAGE_WRAPPER_KEY
    wrapper = manager.punica_wrapper_mapping[key]
    if not isinstance(wrapper, OneAdapterLogits):
        raise TypeError(f"the engine applies adapters with {type(wrapper).__name__}, which cannot score prompts")
    return wrapper
