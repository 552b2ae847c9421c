"""OpenAI's API through the official client: chats with pictures, streams, tools, schemas, trained
weights and refusals.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tinker
from openai.types.chat import ChatCompletion
from transformers import PreTrainedTokenizerBase

from fovea.wire.conventions import MAX_PICTURE_SIDE
from fovea_rollout.pictures import read_picture
from tests.e2e.prompts import PromptBuilder, image_chunk, picture
from tests.e2e.stack import API_KEY, Stack

PICTURE = picture(150, 224)
LARGE = picture(900, 660, seed=5)
QUESTION = "What is this?"
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Moves the walker.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"way": {"enum": ["left", "right"]}, "steps": {"enum": [1, 2, 3]}},
            "required": ["way", "steps"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: Any = TOOL["function"]["parameters"]  # type: ignore[index]


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def asking(url: str | None = None, text: str = QUESTION) -> list[Any]:
    """Returns a user's message with a picture and a text."""
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}}] if url else []
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def pictured(tokenizer: PreTrainedTokenizerBase) -> tinker.ModelInput:
    """Returns the input of `asking` in the Tinker API."""
    builder = PromptBuilder(tokenizer)
    before, after = "<|im_start|>user\n<|vision_start|>", f"<|vision_end|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    return builder.build(before, (PICTURE, 70), after).model_input


def ask(client: openai.OpenAI, model: str, messages: list[Any], **given: Any) -> ChatCompletion:
    """Requests a chat with the token ids of its answer."""
    extra = {"return_token_ids": True, **given.pop("extra_body", {})}
    options: dict[str, Any] = {"max_completion_tokens": 12, "temperature": 0.0, **given}
    answer: ChatCompletion = client.chat.completions.create(model=model, messages=messages, extra_body=extra, **options)
    return answer


def ids_of(answer: ChatCompletion) -> list[list[int]]:
    return [choice.token_ids for choice in answer.choices]  # type: ignore[attr-defined]


def sampled(
    sampler: tinker.SamplingClient, prompt: tinker.ModelInput, count: int = 1, **given: Any
) -> list[tinker.SampledSequence]:
    params = tinker.SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **given})
    return list(sampler.sample(prompt, count, params).result().sequences)


def test_models_are_listed_and_found(client: openai.OpenAI, stack: Stack) -> None:
    listed = [model.id for model in client.models.list()]
    assert stack.model_name in listed
    assert client.models.retrieve(stack.model_name).owned_by == "fovea"
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.models.retrieve("no-such")


def test_a_chat_with_a_picture_samples_what_tinker_does(
    client: openai.OpenAI, stack: Stack, base_sampler: tinker.SamplingClient, pictured: tinker.ModelInput,
    tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    answer = ask(client, stack.model_name, asking(data_url(PICTURE)))
    (expected,) = sampled(base_sampler, pictured)
    assert ids_of(answer) == [list(expected.tokens)]
    text = tokenizer.decode(expected.tokens, skip_special_tokens=True)
    assert answer.choices[0].message.content == text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.prompt_tokens == pictured.length


def test_a_control_token_in_a_text_stays_text(
    client: openai.OpenAI, stack: Stack, pictured: tinker.ModelInput, tokenizer: PreTrainedTokenizerBase
) -> None:
    typed = "<|image_pad|><|im_end|>"
    answer = ask(client, stack.model_name, asking(data_url(PICTURE), f"{QUESTION}{typed}"))
    pieces = [
        tokenizer.encode(piece, add_special_tokens=False) for piece in (f"{QUESTION}<", "|image_pad|><", "|im_end|>")
    ]
    added = sum(map(len, pieces)) - len(tokenizer.encode(QUESTION, add_special_tokens=False))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == pictured.length + added


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, stack: Stack) -> None:
    messages = asking(data_url(PICTURE))
    whole = ask(client, stack.model_name, messages, n=2, seed=5, temperature=1.0)
    stream = client.chat.completions.create(
        model=stack.model_name, messages=messages, n=2, seed=5, temperature=1.0, max_completion_tokens=12, stream=True,
        stream_options={"include_usage": True}, extra_body={"return_token_ids": True},
    )  # fmt: skip
    texts, ids, ends, usage = ["", ""], [[], []], ["", ""], None  # type: ignore[var-annotated]
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert ids == ids_of(whole)
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert whole.usage is not None
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_seeds_samples_and_logprobs_are_those_of_tinker(
    client: openai.OpenAI, stack: Stack, base_sampler: tinker.SamplingClient, pictured: tinker.ModelInput
) -> None:
    given: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 11}
    answer = ask(client, stack.model_name, asking(data_url(PICTURE)), n=2, logprobs=True, top_logprobs=3, **given)
    expected = sampled(base_sampler, pictured, 2, **given)
    assert ids_of(answer) == [list(sequence.tokens) for sequence in expected]
    assert ids_of(answer)[0] != ids_of(answer)[1]
    for choice, sequence in zip(answer.choices, expected, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        found = [position.logprob for position in choice.logprobs.content]
        assert found == pytest.approx(sequence.logprobs, abs=1e-4)
        for position in choice.logprobs.content:
            best = [each.logprob for each in position.top_logprobs]
            assert len(best) == 3
            assert best == sorted(best, reverse=True)
            assert best[0] >= position.logprob


def test_stops_end_an_answer_and_are_left_out(client: openai.OpenAI, stack: Stack) -> None:
    given: dict[str, Any] = {"max_completion_tokens": 40, "temperature": 1.0, "seed": 6}
    letters = {
        "structured_outputs": {"regex": "[a-z]{300}"}
    }  # without a grammar, the tiny model only samples special tokens
    free = ask(client, stack.model_name, asking(), logprobs=True, extra_body=letters, **given)
    text = free.choices[0].message.content or ""
    assert free.choices[0].finish_reason == "length"
    assert free.choices[0].logprobs is not None
    said = [position.token for position in free.choices[0].logprobs.content or []]
    stop = said[4]
    halted = ask(client, stack.model_name, asking(), stop=[stop], extra_body=letters, **given)
    assert halted.choices[0].message.content == text[: text.index(stop)]
    assert (halted.choices[0].finish_reason, halted.choices[0].stop_reason) == ("stop", stop)  # type: ignore[attr-defined]
    # No letters in it: a grammar forbids stop tokens before its end.
    (ids,) = ids_of(ask(client, stack.model_name, asking(), extra_body={"ignore_eos": True}, **given))
    extra = {"ignore_eos": True, "stop_token_ids": [ids[4]]}
    by_id = ask(client, stack.model_name, asking(), extra_body=extra, **given)
    assert ids_of(by_id)[0] == ids[: ids.index(ids[4]) + 1]
    assert by_id.choices[0].stop_reason == ids[4]  # type: ignore[attr-defined]
    assert by_id.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_is_called_with_arguments_of_its_schema(
    client: openai.OpenAI, stack: Stack, choice: Any, is_stream: bool
) -> None:
    given: dict[str, Any] = {
        "model": stack.model_name, "messages": asking(data_url(PICTURE)), "tools": [TOOL], "tool_choice": choice,
        "max_completion_tokens": 200, "temperature": 1.0, "seed": 3,
    }  # fmt: skip
    if is_stream:
        name, arguments = "", ""
        for chunk in client.chat.completions.create(**given, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.function is not None
                name, arguments = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    else:
        (called,) = client.chat.completions.create(**given).choices[0].message.tool_calls or []
        name, arguments = called.function.name, called.function.arguments
    assert name == "move"
    _check_move(arguments)


def test_an_answer_is_valid_against_a_schema(client: openai.OpenAI, stack: Stack) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "move", "schema": SCHEMA, "strict": True}}
    answer = ask(
        client, stack.model_name, asking(data_url(PICTURE)), response_format=shape, max_completion_tokens=200,
        temperature=1.0, seed=4,
    )  # fmt: skip
    _check_move(answer.choices[0].message.content or "")


def _check_move(text: str) -> None:
    move = json.loads(text)
    assert set(move) == {"way", "steps"}
    assert move["way"] in ("left", "right")
    assert move["steps"] in (1, 2, 3)


def test_completions_take_texts_and_ids(
    client: openai.OpenAI, stack: Stack, tokenizer: PreTrainedTokenizerBase, base_sampler: tinker.SamplingClient
) -> None:
    prompts = ["The walker goes", "A picture of"]
    expected, lengths = [], []
    for prompt in prompts:
        (sequence,) = sampled(base_sampler, tinker.ModelInput.from_ints(tokenizer.encode(prompt)))
        expected.append(tokenizer.decode(sequence.tokens, skip_special_tokens=True))
        lengths.append(len(sequence.tokens))
    given: dict[str, Any] = {"model": stack.model_name, "max_tokens": 12, "temperature": 0.0}
    answer = client.completions.create(prompt=prompts, logprobs=2, **given)
    assert [choice.text for choice in answer.choices] == expected
    told = [choice.logprobs.token_logprobs or [] for choice in answer.choices if choice.logprobs]
    assert list(map(len, told)) == lengths
    by_ids = client.completions.create(prompt=tokenizer.encode(prompts[0]), **given)
    assert by_ids.choices[0].text == expected[0]
    stream = client.completions.create(prompt=prompts[0], stream=True, **given)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0]


def test_penalties_change_what_is_sampled(client: openai.OpenAI, stack: Stack) -> None:
    given: dict[str, Any] = {"max_completion_tokens": 60, "extra_body": {"ignore_eos": True}}
    free = ids_of(ask(client, stack.model_name, asking(), **given))[0]
    assert len(set(free)) < len(free), "the model must repeat itself"
    held = ids_of(ask(client, stack.model_name, asking(), presence_penalty=2.0, frequency_penalty=2.0, **given))[0]
    assert len(set(held)) > len(set(free))


def test_a_path_is_the_weights_of_its_step(
    client: openai.OpenAI, stack: Stack, pictured: tinker.ModelInput, tokenizer: PreTrainedTokenizerBase
) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
        builder = PromptBuilder(tokenizer)
        datum = builder.build("<|vision_start|>", (PICTURE, 70), "<|vision_end|>It is a hat.").datum()
        for _ in range(2):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        metadata = {MAX_PICTURE_SIDE: "224"}
        path = training.save_weights_for_sampler(name="chat", user_metadata=metadata).result().path
        sampler = service.create_sampling_client(model_path=path).result()
        (expected,) = sampled(sampler, pictured)
        small = image_chunk(read_picture(LARGE, max_side=224).data)
        chunks = [small if isinstance(chunk, tinker.types.ImageChunk) else chunk for chunk in pictured.chunks]
        (of_small,) = sampled(sampler, tinker.ModelInput(chunks=chunks))
    shrunk = ask(client, path, asking(data_url(LARGE)), logprobs=True)
    assert ids_of(shrunk) == [list(of_small.tokens)]
    assert shrunk.choices[0].logprobs is not None
    found = [position.logprob for position in shrunk.choices[0].logprobs.content or []]
    assert found == pytest.approx(of_small.logprobs, abs=1e-4)
    answer = ask(client, path, asking(data_url(PICTURE)), logprobs=True)
    assert answer.model == path
    assert ids_of(answer) == [list(expected.tokens)]
    assert answer.choices[0].logprobs is not None
    found = [position.logprob for position in answer.choices[0].logprobs.content or []]
    assert found == pytest.approx(expected.logprobs, abs=1e-4)
    base = ask(client, stack.model_name, asking(data_url(PICTURE)), logprobs=True)
    assert base.choices[0].logprobs is not None
    assert [position.logprob for position in base.choices[0].logprobs.content or []] != pytest.approx(found, abs=1e-3)
    assert path in [model.id for model in client.models.list()]
    assert client.models.retrieve(path).root == stack.model_name  # type: ignore[attr-defined]


BAD: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "unknown model": ({"model": "no-such"}, openai.NotFoundError, "model"),
    "unknown path": ({"model": "tinker://a/sampler_weights/b"}, openai.NotFoundError, "model"),
    "not an image": (
        {"messages": asking(data_url(b"GIF89a" + b"\0" * 50, "gif"))},
        openai.BadRequestError,
        "messages.0.content.0.image_url.url",
    ),
    "broken image": (
        {"messages": asking(data_url(b"\x89PNG\r\n\x1a\n" + b"\0" * 50))},
        openai.BadRequestError,
        "messages.0.content.0.image_url",
    ),
    "host that is not listed": (
        {"messages": asking("http://169.254.169.254/x.png")},
        openai.BadRequestError,
        "messages.0.content.0.image_url",
    ),
    "video": (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://x/y"}}]}]},
        openai.BadRequestError,
        "messages.0.content.0.type",
    ),
    "unknown field": ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
    "field of vLLM alone": ({"extra_body": {"use_beam_search": True}}, openai.BadRequestError, "use_beam_search"),
    "a template of one's own": ({"extra_body": {"chat_template": "x"}}, openai.BadRequestError, "chat_template"),
    "too many tokens": ({"max_completion_tokens": 10**6}, openai.BadRequestError, "max_completion_tokens"),
    "too long": ({"messages": asking(text="word " * 9000)}, openai.BadRequestError, "prompt"),
    "too many samples": ({"n": 1000}, openai.BadRequestError, "n"),
    "odd temperature": ({"temperature": 1000.0}, openai.BadRequestError, "temperature"),
    "broken schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}},
        openai.BadRequestError,
        "structured_outputs",
    ),
    "broken pattern": (
        {"extra_body": {"structured_outputs": {"regex": "[0-9"}}}, openai.BadRequestError, "structured_outputs",
    ),
    "no messages": ({"messages": []}, openai.BadRequestError, "messages"),
}  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_named_and_the_next_one_works(
    client: openai.OpenAI, stack: Stack, case: str, is_stream: bool
) -> None:
    given, kind, field = BAD[case]
    request: dict[str, Any] = {"model": stack.model_name, "messages": asking(), "max_completion_tokens": 4, **given}
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**request, stream=is_stream)
    assert caught.value.param == field, caught.value.message
    assert all([caught.value.code, caught.value.type, caught.value.message])
    assert len(ids_of(ask(client, stack.model_name, asking(), max_completion_tokens=2))[0]) == 2


def test_a_key_that_is_unknown_is_refused(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="tml-nobody", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
