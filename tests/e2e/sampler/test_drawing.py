"""Seeds, several sequences, stops, lengths and cancellation."""

import asyncio
from contextlib import aclosing

import numpy as np
import numpy.typing as npt
import pytest
from transformers import PreTrainedTokenizerBase

from fovea.api.v1 import model_input_pb2, sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire.errors import ContextOverflow
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.conftest import PromptMaker, picture
from tests.e2e.sampler.process import SamplerProcess
from tests.e2e.sampler.renderer import TinyRenderer
from tests.waiting import eventually

STOP, LENGTH = sampler_pb2.FINISH_REASON_STOP, sampler_pb2.FINISH_REASON_LENGTH
THROUGH = sampler_pb2.StopCondition(ignore_eos=True)
HOT = {"temperature": 2.0}  # draws must differ for any model


async def test_a_sequence_depends_on_its_seed_and_number_alone(client: SamplerClient, prompts: PromptMaker) -> None:
    """Two seeds share no draw, even if the seeds are neighbours."""
    prompt = prompts.make("Once ", picture(4), " upon a time")

    async def draw(seed: int, count: int) -> list[tuple[int, ...]]:
        request = request_for(prompt.wire, sample_count=count, seed=seed, max_tokens=20, stop=THROUGH, **HOT)
        sequences = (await ask(client, request)).sequences
        assert all(drawn.finish == LENGTH and len(drawn.tokens) == 20 for drawn in sequences)
        return [tuple(drawn.tokens) for drawn in sequences]

    eight, four, next_eight = await asyncio.gather(draw(100, 8), draw(100, 4), draw(101, 8))
    assert eight[:4] == four
    assert len({*eight, *next_eight}) == 16


@pytest.mark.parametrize("scored", [{}, {"prompt_logprobs": True, "alt_token_count": 2}])
async def test_an_unstreamed_sample_arrives_whole_and_equal(
    client: SamplerClient, prompts: PromptMaker, scored: dict[str, int]
) -> None:
    wire = prompts.make("Once ", picture(5), " more").wire
    options = {"sample_count": 2, "seed": 5, "max_tokens": 24, "stop": THROUGH, **scored, **HOT}
    streamed = await ask(client, request_for(wire, **options))
    whole = await ask(client, request_for(wire, at_once=True, **options))
    assert [drawn.delta_count for drawn in whole.sequences] == [1, 1]
    assert all(drawn.delta_count > 1 for drawn in streamed.sequences)
    for one, other in zip(whole.sequences, streamed.sequences, strict=True):
        assert one.tokens == other.tokens
        assert one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    if scored:
        np.testing.assert_allclose(whole.prompt_logprobs, streamed.prompt_logprobs, atol=1e-4)
        np.testing.assert_array_equal(whole.alt_ids, streamed.alt_ids)


async def test_alternatives_are_streamed_whatever_was_asked(client: SamplerClient, prompts: PromptMaker) -> None:
    request = request_for(
        prompts.make("Which").wire, top_sample_logprobs=3, at_once=True, max_tokens=24, stop=THROUGH, **HOT
    )
    (drawn,) = (await ask(client, request)).sequences
    assert drawn.delta_count > 1
    assert len(drawn.top_ids) == 24


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
async def test_any_64_bit_seed_is_repeatable(client: SamplerClient, prompts: PromptMaker, seed: int) -> None:
    request = request_for(prompts.make("Any seed").wire, sample_count=2, seed=seed, max_tokens=12, stop=THROUGH, **HOT)
    first, second = await ask(client, request), await ask(client, request)
    assert [d.tokens for d in first.sequences] == [d.tokens for d in second.sequences]
    assert first.sequences[0].tokens != first.sequences[1].tokens


async def test_a_seed_holds_whether_the_prompt_takes_one_step_or_several(
    client: SamplerClient, prompts: PromptMaker
) -> None:
    """The second request finds its prompt in the cache. The first crashes vLLM's CPU engine without
    Fovea's workaround.
    """
    tokens = prompts.make("A prompt of several steps. " * 1200).tokens[:5000].tolist()
    request = request_for(rendered([tokens]), sample_count=2, seed=11, max_tokens=10, stop=THROUGH, **HOT)
    first, second = await ask(client, request), await ask(client, request)
    assert first.cached_token_count < second.cached_token_count
    assert [d.tokens for d in first.sequences] == [d.tokens for d in second.sequences]


async def test_without_a_seed_draws_differ(client: SamplerClient, prompts: PromptMaker) -> None:
    answer = await ask(
        client, request_for(prompts.make("No seed").wire, sample_count=8, max_tokens=16, stop=THROUGH, **HOT)
    )
    assert len({tuple(drawn.tokens) for drawn in answer.sequences}) == 8


async def test_top_k_1_and_a_tiny_top_p_are_greedy(client: SamplerClient, prompts: PromptMaker) -> None:
    prompt = prompts.make("Greedy ", picture(5)).wire
    greedy = await ask(client, request_for(prompt, temperature=0.0, max_tokens=12, stop=THROUGH))
    for params in ({"top_k": 1}, {"top_p": 1e-6}):
        assert (await ask(client, request_for(prompt, max_tokens=12, stop=THROUGH, **params))).sequences[0].tokens == (
            greedy.sequences[0].tokens
        )


async def test_a_stop_token_ends_the_sequence_and_is_returned(client: SamplerClient, prompts: PromptMaker) -> None:
    prompt = prompts.make("Stop at a token").wire
    free = (await ask(client, request_for(prompt, seed=5, max_tokens=30, stop=THROUGH, **HOT))).sequences[0].tokens
    stop = sampler_pb2.StopCondition(token_ids=[free[9]], ignore_eos=True)
    drawn = (await ask(client, request_for(prompt, stop=stop, seed=5, max_tokens=30, **HOT))).sequences[0]
    assert drawn.tokens == free[: free.index(free[9]) + 1]
    assert drawn.finish == STOP
    assert len(drawn.logprobs) == len(drawn.tokens)


async def test_a_stop_string_ends_with_the_tokens_that_complete_it(
    client: SamplerClient, prompts: PromptMaker, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = prompts.make("Stop at a string").wire
    free = (await ask(client, request_for(prompt, seed=6, max_tokens=40, stop=THROUGH, **HOT))).sequences[0].tokens
    text = tokenizer.decode(free)
    wanted = text[len(text) // 2 : len(text) // 2 + 4]
    stop = sampler_pb2.StopCondition(strings=["never in the text", wanted], ignore_eos=True)
    drawn = (await ask(client, request_for(prompt, stop=stop, seed=6, max_tokens=40, **HOT))).sequences[0]
    assert drawn.finish == STOP
    assert drawn.tokens == free[: len(drawn.tokens)]
    assert wanted in tokenizer.decode(drawn.tokens)
    assert wanted not in tokenizer.decode(drawn.tokens[:-1])


async def test_the_end_of_sequence_token_stops_unless_ignored(
    client: SamplerClient, prompts: PromptMaker, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = prompts.make("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello").wire
    ends = {tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    # Sampled at a high temperature, so that any model reaches its end token soon.
    hot = {"seed": 1, "max_tokens": 4000} | HOT
    stopped = (await ask(client, request_for(prompt, **hot))).sequences[0]
    assert stopped.finish == STOP
    assert stopped.tokens[-1] in ends
    assert not ends & set(stopped.tokens[:-1])
    length = len(stopped.tokens) + 10
    on = (await ask(client, request_for(prompt, stop=THROUGH, **{**hot, "max_tokens": length}))).sequences[0]
    assert on.finish == LENGTH
    assert len(on.tokens) == length
    assert on.tokens[: len(stopped.tokens)] == stopped.tokens


async def test_absent_max_tokens_is_the_rest_of_the_context(client: SamplerClient, prompts: PromptMaker) -> None:
    context = (await client.info()).max_context_length
    prompt = prompts.make("word " * (context + 1)).tokens[: context - 5].tolist()
    answer = await ask(client, request_for(rendered([prompt]), stop=THROUGH))
    assert len(answer.sequences[0].tokens) == 5
    assert answer.sequences[0].finish == LENGTH
    with pytest.raises(ContextOverflow, match=rf"{context - 5} prompt tokens \+ 6 max_tokens > {context}"):
        await ask(client, request_for(rendered([prompt]), max_tokens=6))


async def test_a_repeated_prompt_comes_from_the_cache(client: SamplerClient, prompts: PromptMaker) -> None:
    prompt = prompts.make("A long prompt that is asked twice. " * 20, picture(6)).wire
    assert (await ask(client, request_for(prompt, max_tokens=1))).cached_token_count == 0
    again = await ask(client, request_for(prompt, max_tokens=1, sample_count=4))
    assert 0 < again.cached_token_count < len(prompt.tokens) // 4


async def test_requests_of_different_salts_share_no_prefix(client: SamplerClient, prompts: PromptMaker) -> None:
    """The number of cached tokens must not confirm a guess of another owner's prompt."""
    for prompt in (prompts.make("A secret that can be guessed. " * 20), prompts.make("And a picture: ", picture(8))):
        cached = []
        for salt in ("", "owner-1", "owner-2", "owner-1"):
            answer = await ask(client, request_for(prompt.wire, max_tokens=1, cache_salt=salt))
            cached.append(answer.cached_token_count)
        assert cached[:3] == [0, 0, 0]
        assert cached[3] > 0


async def test_requests_of_different_salts_share_no_encoded_image(
    client: SamplerClient, prompts: PromptMaker, renderer: TinyRenderer
) -> None:
    """Other pixels under a known digest: an encoded image of one owner is not used for another."""
    known, other = prompts.make("Look: ", picture(10), " Well?"), prompts.make("Look: ", picture(11), " Well?")
    digest = known.wire.spans[0].feature.digest
    forged = model_input_pb2.RenderedInput()
    forged.CopyFrom(other.wire)
    forged.spans[0].feature.digest = digest

    async def score(wire: model_input_pb2.RenderedInput, salt: str) -> npt.NDArray[np.float32]:
        answer = await ask(client, request_for(wire, prompt_logprobs=True, max_tokens=1, cache_salt=salt))
        assert answer.prompt_logprobs is not None
        return answer.prompt_logprobs

    seen, expected = await score(known.wire, "owner-1"), await score(other.wire, "owner-1")
    assert np.nanmax(np.abs(seen - expected)) > 1e-3
    held = renderer.features[digest]
    renderer.features[digest] = other.images[0]
    try:
        np.testing.assert_allclose(await score(forged, "owner-2"), expected, atol=1e-4)
    finally:
        renderer.features[digest] = held


async def test_cancelling_frees_the_engine(
    client: SamplerClient, prompts: PromptMaker, sampler: SamplerProcess
) -> None:
    request = request_for(prompts.make("Endless ", picture(7)).wire, stop=THROUGH, sample_count=4)
    drawn_before = sampler.metric("vllm:generation_tokens_total")
    async with aclosing(client.sample(request)) as events:
        async for event in events:
            if event.WhichOneof("event") == "delta":
                break
        await eventually(lambda: sampler.metric("vllm:num_requests_running") == 4)
    await eventually(lambda: sampler.metric("vllm:num_requests_running") == 0)
    await eventually(lambda: sampler.metric("fovea_sampler_requests_in_flight") == 0)
    context = (await client.info()).max_context_length
    assert sampler.metric("vllm:generation_tokens_total") - drawn_before < 2 * context, "it must run to its end"
    assert (
        len((await ask(client, request_for(prompts.make("Next").wire, max_tokens=3, stop=THROUGH))).sequences[0].tokens)
        == 3
    )
