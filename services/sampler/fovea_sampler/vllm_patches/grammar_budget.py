"""Ends a request, and only that request, when its grammar takes too much of the engine's time.

Replaces: `vllm.v1.structured_output.backend_xgrammar.XgrammarBackend.compile_grammar` and
    `vllm.sampling_params.SamplingParams._validate_structured_outputs`.
Why: vLLM advances the grammars of a batch between two engine steps. xgrammar's `accept_token` takes seconds for some
    grammars of 28 characters, and all other requests wait. `grammar_trials` refuses such grammars beforehand; this
    patch also measures the states of a grammar that a trial did not reach. Requests with the same grammar share one
    budget, so that 64 sequences cost no more than one.
    Compiling a grammar releases the interpreter's lock but competes with the engine for the processor. The patch gives
    the compiling thread the lowest priority.
    vLLM validates grammars on the event loop of the service. The patch skips that, because a trial has done it in
    another process.
Upstream: none filed; vLLM's VLLM_REGEX_COMPILATION_TIMEOUT_S limits only the compilation of regular expressions.
Delete when: vLLM limits, for each request, the time of compiling and advancing a grammar, and validates grammars
    outside the event loop.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from fovea_sampler.grammar_trials import GrammarBudget

BACKEND = "xgrammar"
_LOWEST_PRIORITY = 19
_KEPT = 4096
_compile_grammar = backend_xgrammar.XgrammarBackend.compile_grammar
_budgets: OrderedDict[bytes, GrammarBudget] = OrderedDict()
_counting = threading.Lock()


def apply() -> None:
    """Makes vLLM measure xgrammar's grammars in this process. It may be called twice."""
    backend: Any = backend_xgrammar.XgrammarBackend
    backend.compile_grammar = _compile


class TriedParams(SamplingParams):  # type: ignore[misc]
    """SamplingParams with a structure that has passed a trial, so that vLLM need not validate it."""

    def _validate_structured_outputs(self, *_: object) -> None:
        if self.structured_outputs is not None:
            self.structured_outputs._backend = BACKEND


class BudgetedGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar that rejects every token once its budget is spent. vLLM then ends the request."""

    def __init__(self, inner: StructuredOutputGrammar, budget: GrammarBudget) -> None:
        self._inner, self._budget = inner, budget

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advances the grammar; returns False if it rejects a token or the budget is spent."""
        if self._budget.is_spent:
            return False
        with self._budget.measured(len(tokens)):
            accepted: bool = self._inner.accept_tokens(request_id, tokens)
        return accepted

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Returns the longest valid prefix of the tokens, or none if the budget is spent."""
        if self._budget.is_spent:
            return []
        with self._budget.measured():
            valid: list[int] = self._inner.validate_tokens(tokens)
        return valid

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last tokens."""
        self._inner.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Writes the allowed tokens. Once the budget is spent it allows all, and `accept_tokens` will reject each."""
        if self._budget.is_spent:
            bitmask[idx].fill_(-1)
            return
        with self._budget.measured():
            self._inner.fill_bitmask(bitmask, idx)

    def is_terminated(self) -> bool:
        """Returns True at the end of the grammar; False once the budget is spent, so that vLLM offers another token."""
        return not self._budget.is_spent and bool(self._inner.is_terminated())

    def reset(self) -> None:
        """Returns to the start of the grammar."""
        self._inner.reset()


def budget_of(kind: object, text: str) -> GrammarBudget:
    """Returns the budget that all requests with this grammar share in this process."""
    key = hashlib.sha256(f"{kind}:{text}".encode(errors="surrogatepass")).digest()
    with _counting:
        budget = _budgets.setdefault(key, GrammarBudget())
        _budgets.move_to_end(key)
        while len(_budgets) > _KEPT:
            _budgets.popitem(last=False)
    return budget


def _compile(
    backend: Any, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
) -> BudgetedGrammar:
    """Replaces XgrammarBackend.compile_grammar. vLLM calls it on a thread of its own."""
    budget = budget_of(request_type, grammar_spec)
    if budget.is_spent:
        raise ValueError("this grammar took too much time in an earlier request; simplify it")
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    return BudgetedGrammar(_compile_grammar(backend, request_type, grammar_spec, stop_token_ids), budget)
