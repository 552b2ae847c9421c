"""Scores prompts, instead of vLLM's own prompt log-probabilities.

Replaces: `vllm.v1.worker.gpu_model_runner.GPUModelRunner._get_prompt_logprobs_dict` and `.sample_tokens`.
Why: the V1 model runner scores only the actual token and the best ones, stores each score as a Python object, and
    applies the wrong adapter of `lm_head`. The patch computes everything that a request asks of its prompt (targets,
    draws, the last n rows) from each step's logits, one block of rows at a time. The result uses the output field for
    scores of fixed tokens, which the V1 runner leaves empty.
Upstream: vllm-project/vllm issues 51594 (adapters of `lm_head`), open, and 9404 (scores of given tokens), closed as
    stale. The V2 runner scores given tokens per row (`prompt_logprob_token_ids`), but draws none.
Delete when: vLLM scores given tokens, the best tokens and tokens that it draws, with the request's adapter, also on a
    CPU.

A prompt of P tokens has P - 1 rows; row i is the distribution of token i + 1. All results are sent in one int32 tensor,
with the bits of floats as integers, because vLLM returns such a tensor from a worker without converting it to lists.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fovea_sampler.engine_api import AltRows, SampleSpec, TopRows

PLAN_KEY = "fovea_score_plan"
"""The key of the plan in vLLM's `extra_args` of a request."""
_BLOCK_LOGITS = 32 * 2**20  # 128 MiB in float32

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ScorePlan:
    """The scores to compute for one prompt. All values are of types that MessagePack supports.

    Args:
        row_count: P - 1.
        first_row: The first row at which the actual token and the `top_count` best are scored; `row_count` for no row.
        top_count: The number of best tokens to return per row.
        target_ids: The target tokens of all rows, the bytes of int32 [M].
        target_offsets: The start of each row's targets and the end of the last, the bytes of int64 [P]; empty if there
            are no targets.
        alt_count: The number of tokens to draw at each row.
        alt_seed: The seed of those draws.
        temperature: The temperature of those draws; 0 selects the most likely token.
    """

    row_count: int
    first_row: int
    top_count: int = 0
    target_ids: bytes = b""
    target_offsets: bytes = b""
    alt_count: int = 0
    alt_seed: int = 0
    temperature: float = 1.0

    @staticmethod
    def of(spec: SampleSpec, alt_seed: int) -> "ScorePlan":
        """Returns the plan of a request that `scores_prompt`. `alt_seed` only matters if it draws alternatives."""
        row_count = len(spec.tokens) - 1
        listed = spec.request.prompt_logprobs or spec.request.top_prompt_logprobs > 0
        return ScorePlan(
            row_count=row_count,
            first_row=row_count - (spec.request.prompt_logprobs_last_n or row_count) if listed else row_count,
            top_count=spec.request.top_prompt_logprobs,
            target_ids=spec.targets.token_ids.astype(np.int32).tobytes() if spec.targets else b"",
            target_offsets=spec.targets.row_offsets.astype(np.int64).tobytes() if spec.targets else b"",
            alt_count=spec.request.alt_token_count,
            alt_seed=alt_seed,
            temperature=spec.params.temperature,
        )

    def to_message(self) -> dict[str, Any]:
        """Returns the plan in the form for vLLM's `extra_args`."""
        return asdict(self)

    @staticmethod
    def from_message(message: Mapping[str, Any]) -> "ScorePlan":
        """Returns the plan from the form that `to_message` returned."""
        return ScorePlan(**message)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the results: actual, top ids, top logprobs, targets, drawn ids, drawn logprobs."""
        listed = self.row_count - self.first_row
        top, alt = (listed, self.top_count), (self.row_count, self.alt_count)
        return (listed,), top, top, (len(self.target_ids) // 4,), alt, alt


@dataclass(frozen=True)
class Scores:
    """The results of a plan: rows from `first_row` on in `actual` and `top`, all rows in `alt`; float32, ids int32."""

    actual: npt.NDArray[np.float32]
    top: TopRows
    targets: npt.NDArray[np.float32]
    alt: AltRows

    @staticmethod
    def unpack(plan: ScorePlan, packed: npt.NDArray[np.int32]) -> "Scores":
        """Unpacks the result of `PromptScores.packed`. Raises ValueError if it does not fit the plan."""
        shapes = plan.shapes()
        sizes = [math.prod(shape) for shape in shapes]
        if packed.dtype != np.int32 or packed.shape != (1 + sum(sizes),) or packed[0] != sum(sizes):
            raise ValueError(f"{packed.dtype} {packed.shape} instead of int32 ({1 + sum(sizes)},)")
        parts = np.split(packed[1:], np.cumsum(sizes)[:-1])
        actual, top_ids, top, targets, alt_ids, alt = (
            part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)
        )
        return Scores(
            actual.view(np.float32),
            TopRows(top_ids, top.view(np.float32)),
            targets.view(np.float32),
            AltRows(alt_ids, alt.view(np.float32)),
        )


class PromptScores:
    """The scores of one prompt while the engine computes it in chunks.

    Chunks may come in any order and more than once, as after a preemption.

    Args:
        plan: The scores to compute.
        prompt_ids: The tokens of the prompt.
    """

    def __init__(self, plan: ScorePlan, prompt_ids: list[int]) -> None:
        self._plan = plan
        self._next_ids = np.asarray(prompt_ids[1:], dtype=np.int64)
        self._target_ids = np.frombuffer(plan.target_ids, np.int32)
        offsets = np.frombuffer(plan.target_offsets, np.int64)
        self._offsets = offsets if offsets.size else np.zeros(plan.row_count + 1, np.int64)
        actual, top_ids, top, targets, alt_ids, alt = plan.shapes()
        self._actual = np.zeros(actual, np.float32)
        self._top_ids, self._top = np.zeros(top_ids, np.int32), np.zeros(top, np.float32)
        self._targets = np.zeros(targets, np.float32)
        self._alt_ids, self._alt = np.zeros(alt_ids, np.int32), np.zeros(alt, np.float32)
        # All random numbers are drawn at once, so that the drawn tokens depend neither on the chunks nor on the batch.
        self._uniform = np.random.default_rng(plan.alt_seed).random(alt_ids)

    @property
    def row_count(self) -> int:
        """The number of rows of the prompt."""
        return self._plan.row_count

    def wanted(self, start: int, end: int) -> Ints:
        """Returns the rows from `start` to `end` that need logits, in ascending order."""
        rows = np.arange(start, min(end, self._plan.row_count))
        if self._plan.alt_count:
            return rows
        needed: npt.NDArray[np.bool_] = rows >= self._plan.first_row
        needed |= self._offsets[rows] < self._offsets[rows + 1]
        return rows[needed]

    def add(self, rows: Ints, logits: torch.Tensor) -> None:
        """Computes the scores of `rows` from their logits [rows, vocabulary].

        `rows` must be consecutive entries of `wanted`.
        """
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        self._add_listed(rows, logprobs)
        self._add_targets(rows, logprobs)
        if self._plan.alt_count:
            self._add_alternatives(rows, logprobs)

    def packed(self) -> torch.Tensor:
        """Returns all scores as int32 [1 + N]; `Scores.unpack` reverses it.

        The first element is N, so that the tensor is never empty: vLLM 0.32.0 cannot send an empty tensor from numpy;
        its sending thread dies.
        """
        parts = (self._actual, self._top_ids, self._top, self._targets, self._alt_ids, self._alt)
        words = [part.reshape(-1).view(np.int32) for part in parts]
        count = np.asarray([sum(part.size for part in words)], dtype=np.int32)
        return torch.from_numpy(np.concatenate([count, *words]))

    def _add_listed(self, rows: Ints, logprobs: torch.Tensor) -> None:
        skipped = int(np.searchsorted(rows, self._plan.first_row))
        rows, logprobs = rows[skipped:], logprobs[skipped:]
        if not rows.size:
            return
        places = rows - self._plan.first_row
        next_ids = torch.from_numpy(self._next_ids[rows]).to(logprobs.device)
        self._actual[places] = _numpy(logprobs.gather(1, next_ids[:, None])[:, 0])
        if self._plan.top_count:
            best = logprobs.topk(self._plan.top_count, dim=-1)
            self._top_ids[places], self._top[places] = _numpy(best.indices), _numpy(best.values)

    def _add_targets(self, rows: Ints, logprobs: torch.Tensor) -> None:
        # Rows between the given ones are not wanted, so they have no targets. The targets of the given rows are
        # therefore consecutive.
        start, end = int(self._offsets[rows[0]]), int(self._offsets[rows[-1] + 1])
        if start == end:
            return
        counts = self._offsets[rows + 1] - self._offsets[rows]
        places = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(logprobs.device)
        ids = torch.from_numpy(self._target_ids[start:end].astype(np.int64)).to(logprobs.device)
        self._targets[start:end] = _numpy(logprobs[places, ids])

    def _add_alternatives(self, rows: Ints, logprobs: torch.Tensor) -> None:
        if self._plan.temperature == 0:
            ids = logprobs.argmax(dim=-1, keepdim=True).expand(-1, self._plan.alt_count)
        else:
            ids = _invert(logprobs, self._plan.temperature, torch.from_numpy(self._uniform[rows]))
        self._alt_ids[rows], self._alt[rows] = _numpy(ids), _numpy(logprobs.gather(1, ids))


def _invert(logprobs: torch.Tensor, temperature: float, uniform: torch.Tensor) -> torch.Tensor:
    """Draws from softmax(logprobs / temperature) by inverse transform sampling; returns ids [rows, k].

    Args:
        logprobs: Log-probabilities [rows, vocabulary].
        temperature: The temperature, above 0.
        uniform: Uniform random numbers in [0, 1), [rows, k].
    """
    # The cumulative sum is in float64, because float32 would round away the tail of a large vocabulary.
    mass = (logprobs.double() / temperature).softmax(dim=-1).cumsum_(dim=-1)
    total = mass[:, -1:]
    # A height equal to the total would yield an index behind the last token, so it is lowered to the next double below.
    heights = torch.minimum(uniform.to(mass.device) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, heights, right=True)


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array


class OneAdapterLogits:
    """A mix-in for LoRA wrappers that can apply one adapter to all rows of `add_lora_logits`.

    Attributes:
        logits_slot: The slot of that adapter, -1 for no adapter; None while rows belong to the batch's requests.
    """

    logits_slot: int | None = None

    @contextmanager
    def one_adapter_logits(self, slot: int) -> Iterator[None]:
        """Makes `add_lora_logits` apply the adapter in `slot` to all rows within the block, or no adapter for -1."""
        before, self.logits_slot = self.logits_slot, slot
        try:
            yield
        finally:
            self.logits_slot = before


def apply(runner: Any) -> None:
    """Makes a model runner score prompts as their requests ask. Call it once."""
    PromptScorer(runner).install()


class PromptScorer:
    """The scorer of the prompts in a model runner's requests.

    Args:
        runner: vLLM's model runner, with its model loaded.

    Raises TypeError if the runner applies adapters with a wrapper that is not Fovea's.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._manager: Any = None
        self._wrapper = OneAdapterLogits()  # has no effect in a model without adapters
        if runner.lora_config is not None:
            self._manager = runner.lora_manager._adapter_manager
            self._wrapper = _language_wrapper(self._manager)
        self._block_rows = max(1, _BLOCK_LOGITS // runner.model_config.get_vocab_size())
        self._finished: dict[str, torch.Tensor] = {}

    def install(self) -> None:
        """Replaces the runner's own scoring. Call it once."""
        sample_tokens = self._runner.sample_tokens

        def sample(grammar_output: Any) -> Any:
            output = sample_tokens(grammar_output)
            if self._finished:
                # With asynchronous scheduling, the output is wrapped until its tokens have been copied from the device.
                whole = getattr(output, "_model_runner_output", output)
                whole.prompt_token_id_logprobs_dict = self._finished
                self._finished = {}
            return output

        self._runner._get_prompt_logprobs_dict = self._score_step
        self._runner.sample_tokens = sample

    def _score_step(self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        """Replaces GPUModelRunner._get_prompt_logprobs_dict; returns no log-probabilities in vLLM's form."""
        for request_id, token_count in num_scheduled_tokens.items():
            request = self._runner.requests[request_id]
            scores = _scores_of(request)
            if scores is None:
                continue
            start, end = request.num_computed_tokens, request.num_computed_tokens + token_count
            self._score(scores, request, start, end, hidden_states)
            # The step that computes the last prompt token also draws a token, so the scheduler passes on its output.
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
        """Returns the slot of the request's adapter, or -1 if it has none."""
        if request.lora_request is None:
            return -1
        slot: int = self._manager.lora_index_to_id.index(request.lora_request.lora_int_id)
        return slot


def _scores_of(request: Any) -> PromptScores | None:
    """Returns the unfinished scores of a request, or None if it asks for none.

    They are an attribute of the runner's record of the request, so they end with it.
    """
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
