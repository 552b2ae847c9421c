"""Neutral values of OpenAI's fields are accepted, and bytes of log-probabilities are the tokens' own."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.logprobs import Logprob
from vllm.sampling_params import SamplingParams

from fovea.api.v1 import sampler_pb2
from fovea.wire import tensors
from fovea.wire.errors import Unimplemented
from fovea_sampler.engine import openai_requests
from fovea_sampler.engine.message_apis import ChatHandler
from fovea_sampler.engine.openai_serving import _Sequence

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = "one café 🦊 two"


def read(**more: Any) -> Any:
    """Parses a chat request with more fields."""
    return openai_requests.read(
        sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS, {"model": "m", "messages": MESSAGES, **more}, 8
    )


@pytest.mark.parametrize(
    ("name", "idle", "asking"),
    [
        ("store", False, True),
        ("metadata", {}, {"a": "b"}),
        ("logit_bias", {}, {"5": 1}),
        ("modalities", ["text"], ["text", "audio"]),
        ("service_tier", "auto", "priority"),
        ("functions", [], [{"name": "f"}]),
        ("function_call", "none", {"name": "f"}),
        ("prompt_cache_key", "mine", 1),
        ("prompt_cache_retention", "24h", "a week"),
        ("safety_identifier", "mine", 1),
        ("verbosity", "medium", "low"),
    ],
)
def test_a_field_that_asks_for_nothing_is_taken(name: str, idle: Any, asking: Any) -> None:
    assert read(**{name: idle}).messages
    with pytest.raises(Unimplemented, match=f"does not serve {name} with this value") as refused:
        read(**{name: asking})
    assert refused.value.field == name


def byte_level() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with bytes as tokens, written as characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with letters, and with bytes for other characters."""
    pieces = [f"<0x{value:02X}>" for value in range(256)] + list("acefnotw▁")
    model = models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token=None)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("stop", ["<|mark|>", "o<|mark|>", "hello<|mark|>"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_special_token_is_the_stop_reason(stop: str, ends: bool) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|mark|>"]})
    ids = tokenizer.encode("hello<|mark|>", add_special_tokens=False)
    params = SamplingParams(stop=[stop], detokenize=True)
    sequence = _Sequence(0, tokenizer, params, ids[:1], {ids[-1]} if ends else set())
    for place, token in enumerate(ids):
        delta = sampler_pb2.SequenceDelta(tokens=tensors.encode_tokens([token]))
        delta.finish_reason = sampler_pb2.FINISH_REASON_STOP if place == len(ids) - 1 else 0
        sequence.add(delta)
    output = sequence.output(False)
    assert (output.text, output.finish_reason, output.stop_reason) == ("hello", "stop", stop)
    assert openai_requests.special_stop(tokenizer, ids, ["x<|mark|>", "hell"]) is None


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
def test_bytes_of_logprobs_joined_are_the_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(ids) > len(TEXT)
    serving: Any = object.__new__(ChatHandler)
    serving.return_tokens_as_token_ids = False
    rows = [{token: Logprob(-1.0, 1, tokenizer.decode([token])), ids[0]: Logprob(-2.0, 2, "o")} for token in ids]
    rows[0] = {ids[0]: Logprob(-1.0, 1, "o")}
    content = serving._create_chat_logprobs(ids, rows, tokenizer, 2).content
    assert bytes(value for one in content for value in one.bytes).decode() == TEXT
    assert bytes(value for one in content for value in one.top_logprobs[0].bytes).decode() == TEXT
