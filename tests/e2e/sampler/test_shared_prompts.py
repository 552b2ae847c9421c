"""The prompt of several sequences is computed once; a grammar that exceeds its limit fails alone."""

import asyncio
import json
import re

import pytest

from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire.errors import InvalidInput
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import SamplerProcess

PROMPT_LENGTH = 900
SEQUENCES = 12


def computed_tokens(sampler: SamplerProcess) -> float:
    """Returns the number of prompt tokens that the engine has computed instead of reading its cache."""
    (found,) = re.findall(
        r'^vllm:prompt_tokens_by_source_total\{[^}]*source="local_compute"[^}]*\} (\S+)',
        sampler.metrics_page(),
        re.MULTILINE,
    )
    return float(found)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("scored", [False, True])
async def test_the_prompt_of_many_sequences_is_computed_once(
    client: SamplerClient, sampler: SamplerProcess, at_once: bool, scored: bool
) -> None:
    prompt = [10 + (7 * number + 13 * at_once + 29 * scored) % 201 for number in range(PROMPT_LENGTH)]
    before = computed_tokens(sampler)
    stop = sampler_pb2.StopCondition(ignore_eos=True)
    asked = request_for(
        rendered([prompt]),
        sample_count=SEQUENCES,
        max_tokens=4,
        seed=5,
        stop=stop,
        at_once=at_once,
        prompt_logprobs=scored,
        cache_salt=f"{at_once}{scored}",
    )
    answer = await ask(client, asked)
    assert [len(sequence.tokens) for sequence in answer.sequences] == [4] * SEQUENCES
    computed = computed_tokens(sampler) - before
    assert PROMPT_LENGTH <= computed < PROMPT_LENGTH + SEQUENCES * 32, computed
    again = await ask(client, request_for(rendered([prompt]), sample_count=SEQUENCES, max_tokens=4, seed=5, stop=stop))
    assert [one.tokens for one in again.sequences] == [one.tokens for one in answer.sequences]


async def test_a_grammar_that_takes_too_much_fails_alone(client: SamplerClient) -> None:
    def asked(structure: dict[str, str]) -> object:
        request = request_for(rendered([[10, 11, 12]]), max_tokens=400)
        request.params.structured_outputs = json.dumps(structure)
        return ask(client, request)

    bomb, harmless, plain = await asyncio.gather(
        asked({"regex": "((a{1,300}){1,300}){200,300}"}),
        asked({"regex": "[a-z]{100}"}),
        ask(client, request_for(rendered([[10, 11, 12]]), max_tokens=16)),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(bomb, InvalidInput)
    assert "of processor time" in bomb.message
    assert not isinstance(harmless, BaseException)
    assert not isinstance(plain, BaseException)
