"""Invalid input gets a clear error, and the next valid request works: sampling and training,
through the official SDK.
"""

import struct
import zlib
from collections.abc import Callable, Iterator

import httpx
import pytest
import tinker
from tinker import SamplingParams
from transformers import PreTrainedTokenizerBase

from tests.e2e.prompts import Prompt, PromptBuilder, image_chunk, picture
from tests.e2e.stack import API_KEY, Stack

PARAMS = SamplingParams(max_tokens=2, temperature=0.0)


def text(*ids: int) -> tinker.EncodedTextChunk:
    return tinker.EncodedTextChunk(tokens=list(ids))


def pixel_bomb() -> bytes:
    """Returns a valid PNG of 30,000 x 30,000 black pixels in about 110 KB."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    compressor = zlib.compressobj(9)
    row = b"\0" * (1 + 30_000 // 8)
    data = b"".join(compressor.compress(row) for _ in range(30_000)) + compressor.flush()
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


BAD_INPUTS: dict[str, tuple[Callable[[], list[tinker.ModelInputChunk]], str]] = {
    "corrupt image": (lambda: [text(1), image_chunk(b"\x89PNG\r\n\x1a\n" + b"\0" * 50), text(2)], r"chunks\[1\]"),
    "truncated image": (lambda: [text(1), image_chunk(picture(224, 224)[:-4000]), text(2)], r"chunks\[1\]"),
    "declared PNG that is JPEG": (
        lambda: [image_chunk(picture(64, 64, image_format="jpeg"), "png"), text(2)],
        "(?i)jpeg",
    ),
    "pixel bomb": (lambda: [image_chunk(pixel_bomb()), text(2)], "30,?000"),
    "aspect ratio": (lambda: [image_chunk(picture(2010, 10)), text(2)], "200"),
    "expected_tokens off by one": (lambda: [image_chunk(picture(224, 224), expected=63), text(2)], "63.*64"),
    "token outside the vocabulary": (lambda: [text(1, 10_000_000)], "10,?000,?000"),
    "negative token": (lambda: [text(1, -5)], "-5"),
    "no tokens": (lambda: [text()], "(?i)empty|no token|at least one"),
    "image URL": (
        lambda: [
            tinker.types.ImageAssetPointerChunk(
                location="http://169.254.169.254/x.png", format="png", expected_tokens=64
            )
        ],
        "169.254.169.254",
    ),
}


@pytest.fixture(autouse=True)
def a_good_request_succeeds_afterwards(
    base_sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase
) -> Iterator[None]:
    yield
    good = PromptBuilder(tokenizer).build("<|vision_start|>", (picture(150, 224), 70), "<|vision_end|>What is this?")
    response = base_sampler.sample(good.model_input, num_samples=1, sampling_params=PARAMS).result()
    assert len(response.sequences[0].tokens) >= 1


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_sampling_refuses(base_sampler: tinker.SamplingClient, case: str) -> None:
    build, message = BAD_INPUTS[case]
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=message) as caught:
        base_sampler.sample(tinker.ModelInput(chunks=build()), num_samples=1, sampling_params=PARAMS).result()
    assert_user_error(caught.value)


@pytest.fixture(scope="module")
def training(stack: Stack) -> Iterator[tinker.TrainingClient]:
    with stack.service_client() as service:
        yield service.create_lora_training_client(base_model=stack.model_name, rank=4).result()


@pytest.mark.parametrize("case", [case for case in BAD_INPUTS if case != "image URL"])
def test_training_refuses(training: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, case: str) -> None:
    build, message = BAD_INPUTS[case]
    bad = tinker.Datum(model_input=tinker.ModelInput(chunks=build()), loss_fn_inputs=loss_inputs(3))
    good = PromptBuilder(tokenizer).build("<|im_start|>user\nhello<|im_end|>").datum()
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        training.forward([good, bad], "cross_entropy").result()
    assert_user_error(caught.value)
    assert_trains(training, good)


def loss_inputs(count: int, weight_count: int | None = None) -> dict[str, tinker.TensorData]:
    weight_count = count if weight_count is None else weight_count
    return {
        "target_tokens": tinker.TensorData(data=[1] * count, dtype="int64", shape=[count]),
        "weights": tinker.TensorData(data=[1.0] * weight_count, dtype="float32", shape=[weight_count]),
    }


def assert_trains(training: tinker.TrainingClient, good: tinker.Datum) -> None:
    result = training.forward_backward([good], "cross_entropy").result()
    assert result.metrics["loss:sum"] > 0
    training.optim_step(tinker.AdamParams(learning_rate=0.0)).result()


def assert_user_error(error: Exception) -> None:
    if isinstance(error, tinker.RequestFailedError):
        assert str(error.category).lower().endswith("user"), error
    else:
        assert isinstance(error, tinker.APIStatusError)
        assert 400 <= error.status_code < 500


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (loss_inputs(3, 2), "weights"),
        (loss_inputs(2), "target_tokens"),
        ({"target_tokens": loss_inputs(3)["target_tokens"], "wieghts": loss_inputs(3)["weights"]}, "wieghts"),
        ({"weights": loss_inputs(3)["weights"]}, "target_tokens"),
    ],
)
def test_wrong_loss_inputs_are_named(
    training: tinker.TrainingClient,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, tinker.TensorData],
    message: str,
) -> None:
    bad = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        training.forward([bad], "cross_entropy").result()
    assert_user_error(caught.value)
    assert_trains(training, PromptBuilder(tokenizer).build("hello there").datum())


def test_an_unknown_loss_is_refused_by_name(
    training: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = PromptBuilder(tokenizer).build("hello there").datum()
    with pytest.raises(tinker.RequestFailedError, match="cross_entropy") as caught:
        training.forward([good], "hinge").result()  # type: ignore[arg-type]
    assert_user_error(caught.value)
    assert_trains(training, good)


def test_a_failed_forward_backward_is_never_followed_by_a_silent_step(
    training: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    good: Prompt = PromptBuilder(tokenizer).build("hello there")
    before = training.forward([good.datum()], "cross_entropy").result().metrics["loss:sum"]
    bad = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=loss_inputs(2))
    backward = training.forward_backward([good.datum(), bad], "cross_entropy")
    step = training.optim_step(tinker.AdamParams(learning_rate=1.0))
    with pytest.raises(tinker.RequestFailedError):
        backward.result()
    with pytest.raises(tinker.RequestFailedError, match="forward_backward"):
        step.result()
    assert training.forward([good.datum()], "cross_entropy").result().metrics["loss:sum"] == pytest.approx(before)
    assert_trains(training, good.datum())


def test_a_prompt_over_the_context_is_refused(base_sampler: tinker.SamplingClient) -> None:
    with pytest.raises(tinker.APIStatusError, match=r"Prompt length plus max_tokens exceeds .*\d+ prompt tokens"):
        base_sampler.sample(tinker.ModelInput.from_ints([1] * 100_000), num_samples=1, sampling_params=PARAMS).result()


def test_a_million_samples_are_refused(base_sampler: tinker.SamplingClient) -> None:
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=r"num_samples|1,?000,?000") as caught:
        base_sampler.sample(tinker.ModelInput.from_ints([1]), num_samples=1_000_000, sampling_params=PARAMS).result()
    assert_user_error(caught.value)


def test_an_unknown_model_is_refused_by_name(service: tinker.ServiceClient, stack: Stack) -> None:
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match="no-such-model") as caught:
        service.create_lora_training_client(base_model="no-such-model", rank=4).result()
    assert_user_error(caught.value)
    assert stack.model_name in str(caught.value)


def test_a_body_of_200_mb_is_refused(stack: Stack) -> None:
    def body() -> Iterator[bytes]:
        for _ in range(200):
            yield b"\0" * 2**20

    headers = {"X-API-Key": API_KEY, "Content-Type": "application/x-protobuf", "Content-Length": str(200 * 2**20)}
    try:
        answer = httpx.post(f"{stack.base_url}/api/v1/forward_backward", content=body(), headers=headers, timeout=60)
    except httpx.WriteError:
        # The server may close the connection before the whole body is sent, as intended.
        return
    assert answer.status_code == 413
    assert "bytes" in answer.text


@pytest.mark.parametrize("key", [None, "tml-wrong"])
def test_a_missing_or_wrong_key_is_refused(stack: Stack, key: str | None) -> None:
    headers = {"X-API-Key": key} if key else {}
    answer = httpx.get(f"{stack.base_url}/api/v1/get_server_capabilities", headers=headers, timeout=10)
    assert answer.status_code == 401
    assert "API key" in answer.text or "X-API-Key" in answer.text
