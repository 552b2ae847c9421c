"""A request ends, alone, when its grammar takes too much of the engine's time.

Replaces: `vllm.v1.structured_output.backend_xgrammar.XgrammarBackend.compile_grammar` and
    `vllm.sampling_params.SamplingParams._validate_structured_outputs`.
Why: vLLM follows the grammars of a batch between two steps of the engine. `accept_token` of xgrammar takes seconds for
    some grammars of 28 characters, and everybody waits. `grammar_trials` refuses those before; this measures
    what a trial did not reach. Requests with the same grammar share one budget, so that 64 sequences cost no more than
    one. Compiling releases the interpreter's lock; it gets the lowest priority here, since it competes with the engine
    for the processor. vLLM checks grammars on the event loop of the service: trials have done so elsewhere.
Upstream: none filed; vLLM's VLLM_REGEX_COMPILATION_TIMEOUT_S covers the compilation of regular expressions alone.
Delete when: vLLM bounds the time of compiling and of following a grammar, for each request, and checks it elsewhere.
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

from fovea_services.sampler.grammar_trials import GrammarBudget

BACKEND = "xgrammar"
_LOWEST_PRIORITY = 19
_KEPT = 4096
_compile_grammar = backend_xgrammar.XgrammarBackend.compile_grammar
_budgets: OrderedDict[bytes, GrammarBudget] = OrderedDict()
_counting = threading.Lock()


def apply() -> None:
    """Has xgrammar's grammars measured in this process; twice is no error."""
    backend: Any = backend_xgrammar.XgrammarBackend
    backend.compile_grammar = _compile


class TriedParams(SamplingParams):  # type: ignore[misc]
    """SamplingParams with a structure that has been tried."""

    def _validate_structured_outputs(self, *_: object) -> None:
        if self.structured_outputs is not None:
            self.structured_outputs._backend = BACKEND


class BudgetedGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar that rejects every token once its budget is spent: then vLLM ends the request."""

    def __init__(self, inner: StructuredOutputGrammar, budget: GrammarBudget) -> None:
        self._inner, self._budget = inner, budget

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See vLLM's."""
        if self._budget.is_spent:
            return False
        with self._budget.measured(len(tokens)):
            accepted: bool = self._inner.accept_tokens(request_id, tokens)
        return accepted

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """See vLLM's."""
        if self._budget.is_spent:
            return []
        with self._budget.measured():
            valid: list[int] = self._inner.validate_tokens(tokens)
        return valid

    def rollback(self, num_tokens: int) -> None:
        """See vLLM's."""
        self._inner.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """See vLLM's; allows all tokens, none of which will be accepted, once the budget is spent."""
        if self._budget.is_spent:
            bitmask[idx].fill_(-1)
            return
        with self._budget.measured():
            self._inner.fill_bitmask(bitmask, idx)

    def is_terminated(self) -> bool:
        """See vLLM's."""
        return not self._budget.is_spent and bool(self._inner.is_terminated())

    def reset(self) -> None:
        """See vLLM's."""
        self._inner.reset()


def budget_of(kind: object, text: str) -> GrammarBudget:
    """The budget that all requests with this grammar share in this process."""
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
    """Takes the place of XgrammarBackend.compile_grammar, on a thread of its own."""
    budget = budget_of(request_type, grammar_spec)
    if budget.is_spent:
        raise ValueError("this grammar has taken too much time before")
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    return BudgetedGrammar(_compile_grammar(backend, request_type, grammar_spec, stop_token_ids), budget)
