"""Grammars that exceed the limits are refused with a reason, before the engine sees them and inside it; others work."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch
import xgrammar
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from fovea.wire.errors import InvalidInput
from fovea_sampler.engine.request_conversion import structure_of
from fovea_sampler.grammar_trials import GrammarTrials, Kind
from fovea_sampler.vllm_patches.grammar_budget import BudgetedGrammar, TriedParams, apply, budget_of

VOCABULARY = [bytes([value]).decode("latin1") for value in range(256)] + ["a" * count for count in range(2, 12)]
BOMB = "((a{1,300}){1,300}){200,300}"
AMBIGUOUS = 'root ::= s\ns ::= s s s | s s | [a-z] | ""'


def tokenizer_info() -> xgrammar.TokenizerInfo:
    """Returns a tokenizer with one token for every byte and for runs of the letter a."""
    return xgrammar.TokenizerInfo(
        VOCABULARY, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(VOCABULARY), stop_token_ids=[0]
    )


@pytest.fixture
async def trials() -> AsyncIterator[GrammarTrials]:
    """Trials over the small vocabulary."""
    trials = GrammarTrials(lambda: tokenizer_info().serialize_json())
    yield trials
    trials.close()


async def refusal(trials: GrammarTrials, asked: dict[str, Any], owner: str = "owner") -> str:
    """Returns the refusal of a request's structure; empty if it is accepted."""
    structure = structure_of(json.dumps(asked))
    assert structure is not None
    try:
        await trials.check(structure.kind, structure.text, owner)
    except InvalidInput as error:
        return f"{error.field} {error.message}"
    return ""


@pytest.mark.slow
async def test_grammars_that_take_too_much_are_refused_by_name_and_others_are_not(trials: GrammarTrials) -> None:
    harmless: list[dict[str, Any]] = [
        {"regex": "[a-z]{300}"},
        {"choice": ["yes", "no"]},
        {"json_object": True},
        {"grammar": 'root ::= "a" | "b" root'},
        {"grammar": 'start: "a" | "b"'},
        {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 1000}}}},
    ]
    said = await asyncio.gather(*(refusal(trials, one, str(number)) for number, one in enumerate(harmless)))
    assert said == [""] * len(harmless)
    bombs: list[dict[str, Any]] = [
        {"regex": BOMB},
        {"grammar": AMBIGUOUS},
        {"json": {"type": "string", "pattern": f"^{BOMB}$"}},
    ]
    for bomb in bombs:
        said_of_it = await refusal(trials, bomb)
        assert said_of_it.startswith("params.structured_outputs "), bomb
        assert "of processor time per token; lower its repetition counts" in said_of_it, bomb
    wrong = await refusal(trials, {"regex": "[0-9"})
    assert wrong.startswith(
        "params.structured_outputs params.structured_outputs: the regex is not valid: Regex parsing"
    )


@pytest.mark.slow
async def test_a_grammar_is_tried_once(trials: GrammarTrials) -> None:
    await asyncio.gather(*(trials.check("regex", "[0-9]+", "owner") for _ in range(64)))
    for _ in range(2):
        with pytest.raises(InvalidInput):
            await trials.check("regex", "[0-9", "owner")
    assert trials._count == 2


def test_a_schema_that_xgrammar_would_ignore_in_part_is_refused() -> None:
    for asked in (
        {"json": {"type": "integer", "multipleOf": 3}},
        {"choice": []},
        {"json_object": False},
        {"grammar": " "},
        {"regex": "a\0"},
        {"regex": "a", "choice": ["b"]},
        {"unknown": 1},
        {"json": "[" * 5000},
    ):
        with pytest.raises(InvalidInput, match=r"params\.structured_outputs is not a structure that vLLM accepts"):
            structure_of(json.dumps(asked))


@pytest.mark.slow
async def test_an_owners_trials_run_one_after_the_other(trials: GrammarTrials) -> None:
    async def asked(number: int) -> str:
        return await refusal(trials, {"regex": f"[a-z]{{{number}}}"})

    first, *waiting = [asyncio.create_task(asked(number)) for number in (1, 2, 3)]
    await first
    waiting.append(asyncio.create_task(asked(4)))  # arrives while the second one runs and the third waits
    most = 0
    while not all(task.done() for task in waiting):
        assert trials._forks is not None
        most = max(most, len(trials._forks.answers))
        await asyncio.sleep(0)
    assert [await task for task in (first, *waiting)] == [""] * 4
    assert most == 1, "trials of one owner must not run side by side"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> XgrammarBackend:
    """vLLM's backend over the small vocabulary, which creates grammars with budgets."""
    made: Any = object.__new__(XgrammarBackend)
    made.compiler = xgrammar.GrammarCompiler(tokenizer_info(), cache_enabled=False)
    made.vocab_size, made.num_speculative_tokens, made.disable_any_whitespace = len(VOCABULARY), 0, False
    monkeypatch.setattr(XgrammarBackend, "compile_grammar", XgrammarBackend.compile_grammar)
    monkeypatch.setenv("VLLM_REGEX_COMPILATION_TIMEOUT_S", "0")
    apply()
    return made  # type: ignore[no-any-return]


def steps_until_refused(grammar: Any, most: int) -> int:
    """Returns the number of tokens after which a grammar accepts no more; `most` if it accepts them all."""
    mask = torch.zeros(1, (len(VOCABULARY) + 31) // 32, dtype=torch.int32)
    for step in range(most):
        grammar.fill_bitmask(mask, 0)
        if not grammar.accept_tokens("request", [ord("a")]):
            return step
    return most


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated")  # vLLM sets it
def test_the_engine_ends_what_a_trial_did_not_reach_and_compiles_it_no_more(backend: XgrammarBackend) -> None:
    harmless = backend.compile_grammar(StructuredOutputOptions.REGEX, "a*")
    assert steps_until_refused(harmless, 300) == 300
    bomb = backend.compile_grammar(StructuredOutputOptions.REGEX, BOMB)
    same = backend.compile_grammar(StructuredOutputOptions.REGEX, BOMB)
    assert isinstance(bomb, BudgetedGrammar)
    assert steps_until_refused(bomb, 300) < 300
    assert steps_until_refused(same, 300) == 0, "requests with the same grammar must share one budget"
    assert not same.is_terminated()
    assert budget_of(StructuredOutputOptions.REGEX, BOMB).is_spent
    with pytest.raises(ValueError, match="took too much time in an earlier request"):
        backend.compile_grammar(StructuredOutputOptions.REGEX, BOMB)
    assert steps_until_refused(backend.compile_grammar(StructuredOutputOptions.REGEX, "a*"), 50) == 50


@pytest.mark.parametrize(("kind", "text"), [("regex", "a+"), ("lark", 'start: "a"'), ("json", "{}")])
def test_tried_parameters_reach_the_engine_as_vllms_own(kind: Kind, text: str) -> None:
    structure = structure_of(json.dumps({"grammar" if kind == "lark" else kind: text}))
    assert structure is not None
    assert structure.kind == kind
    params = TriedParams(structured_outputs=structure.params)
    params._validate_structured_outputs(None, None, None)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params.clone()), type=SamplingParams)
    assert sent.structured_outputs is not None
