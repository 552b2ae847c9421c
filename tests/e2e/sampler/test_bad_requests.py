"""Every invalid request gets a clear error, and the next request succeeds."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire import tensors
from fovea.wire.errors import FeatureEvicted, FoveaError, Internal, InvalidInput, SnapshotNotLoaded
from fovea.wire.tensors import size_bytes, tensors_sha256
from tests.e2e.sampler.asking import ask, request_for
from tests.e2e.sampler.conftest import PromptMaker, picture
from tests.e2e.sampler.renderer import TinyRenderer

Spoil = Callable[[sampler_pb2.SampleRequest, TinyRenderer], None]


def tensor_swap(name: str, change: Callable[[np.ndarray], np.ndarray], promised: bool) -> Spoil:
    """Makes the renderer hold a changed tensor; with `promised`, the request announces its digest."""

    def spoil(request: sampler_pb2.SampleRequest, renderer: TinyRenderer) -> None:
        feature = request.prompt.spans[0].feature
        held = dict(renderer.features[feature.digest])
        held[name] = change(held[name])
        feature.digest = hashlib.sha256(f"{name}{held[name].shape}{held[name].dtype}{promised}".encode()).hexdigest()
        renderer.features[feature.digest] = held
        if promised:
            feature.tensors_sha256 = tensors_sha256(held)

    return spoil


def set_span(**fields: int) -> Spoil:
    """Changes the first span."""

    def spoil(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
        for name, value in fields.items():
            setattr(request.prompt.spans[0], name, getattr(request.prompt.spans[0], name) + value)

    return spoil


def set_feature(**fields: object) -> Spoil:
    """Changes the first image."""

    def spoil(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
        for name, value in fields.items():
            setattr(request.prompt.spans[0].feature, name, value)

    return spoil


def held_grid(*grid: int) -> Spoil:
    """Makes the renderer hold, and the request promise, another grid."""
    return tensor_swap("image_grid_thw", lambda _: np.array([grid], np.int64), True)


def set_token(place: int, token_id: int) -> Spoil:
    """Changes one token."""

    def spoil(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
        ids = tensors.decode_tokens(request.prompt.tokens).copy()
        ids[place] = token_id
        request.prompt.tokens = tensors.encode_tokens(ids)

    return spoil


def set_request(**fields: object) -> Spoil:
    """Changes the request."""

    def spoil(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
        for name, value in fields.items():
            setattr(request, name, value)

    return spoil


def set_params(**fields: float) -> Spoil:
    """Changes the sampling parameters."""

    def spoil(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
        for name, value in fields.items():
            setattr(request.params, name, value)

    return spoil


def set_ids(request: sampler_pb2.SampleRequest, start: int, *new: int) -> None:
    """Overwrites tokens of the prompt."""
    ids = tensors.decode_tokens(request.prompt.tokens).copy()
    ids[start : start + len(new)] = new
    request.prompt.tokens = tensors.encode_tokens(ids)


def no_images(request: sampler_pb2.SampleRequest, renderer: TinyRenderer) -> None:
    """Keeps the placeholders and removes the spans."""
    set_ids(request, request.prompt.spans[0].offset - 1, renderer.image_opener_id)
    del request.prompt.spans[:]


def stray(request: sampler_pb2.SampleRequest, renderer: TinyRenderer) -> None:
    """Puts a placeholder where there is no image."""
    placeholder = tensors.decode_tokens(request.prompt.tokens)[request.prompt.spans[0].offset]
    set_ids(request, 0, renderer.image_opener_id, int(placeholder))


def twice(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
    """Puts two spans over the same tokens."""
    request.prompt.spans.add().CopyFrom(request.prompt.spans[0])


def many(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
    """Adds more images than the engine's limit."""
    for _number in range(100):
        request.prompt.spans.add().CopyFrom(request.prompt.spans[0])


def claimed_mask(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
    """Claims one embedding fewer than the tower makes."""
    feature = request.prompt.spans[0].feature
    feature.embedding_mask = b"\0" + bytes([1]) * (feature.token_count - 1)


def evicted(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
    """Refers to an image that the renderer does not hold."""
    request.prompt.spans[0].feature.digest = hashlib.sha256(b"nobody holds this").hexdigest()


def positions(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
    """Sets positions of another length."""
    request.prompt.positions.CopyFrom(tensors.encode(np.zeros((3, 2), dtype=np.int32)))


def stop_id(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
    """Sets a stop token that does not exist."""
    request.params.stop.token_ids.append(10**6)


def stop_string(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
    """Sets a stop string that matches everywhere."""
    request.params.stop.strings.append("")


def set_targets(ids: np.ndarray, offsets: Callable[[int], np.ndarray]) -> Spoil:
    """Sets target tokens; `offsets` computes the row offsets from the prompt's length."""

    def spoil(request: sampler_pb2.SampleRequest, _: TinyRenderer) -> None:
        length = len(request.prompt.tokens) // 4
        request.target_tokens.token_ids.CopyFrom(tensors.encode(ids))
        request.target_tokens.row_offsets.CopyFrom(tensors.encode(offsets(length)))

    return spoil


def spread(count: int) -> Callable[[int], np.ndarray]:
    """Returns offsets of one id in each of the first `count` rows."""
    return lambda length: np.minimum(np.arange(length), count)


def down(length: int) -> np.ndarray:
    """Returns offsets that rise beyond the end and then fall."""
    return np.asarray([0, 5] + [2] * (length - 2), dtype=np.int64)


IDS = np.asarray([1, 2], dtype=np.int32)

CASES: dict[str, tuple[Spoil, type[FoveaError], str]] = {
    "too few patches": (tensor_swap("pixel_values", lambda a: a[:-4], True), InvalidInput, "pixel_values has shape"),
    "narrow patches": (tensor_swap("pixel_values", lambda a: a[:, :-1], True), InvalidInput, "pixel_values has shape"),
    "float patches": (
        tensor_swap("pixel_values", lambda a: a.astype(np.float32), True),
        InvalidInput,
        "pixel_values is float32",
    ),
    "another grid": (held_grid(1, 8, 10), InvalidInput, "pixel_values has shape"),
    "odd grid": (held_grid(1, 7, 9), InvalidInput, "multiples of 2"),
    "huge grid": (held_grid(1, 1 << 40, 1 << 40), InvalidInput, "at most"),
    "video grid": (held_grid(2, 6, 8), InvalidInput, "2 frames"),
    "flat grid": (held_grid(6, 8), InvalidInput, "image_grid_thw has shape"),
    "other bytes than promised": (tensor_swap("pixel_values", lambda a: a ^ 1, False), Internal, "digest"),
    "evicted image": (evicted, FeatureEvicted, "render it again"),
    "no renderer there": (
        set_feature(source="127.0.0.1:9", digest=hashlib.sha256(b"elsewhere").hexdigest()),
        FeatureEvicted,
        "did not return image",
    ),
    "claimed size": (set_feature(size_bytes=5), InvalidInput, "size_bytes"),
    "claimed tokens": (set_feature(token_count=5), InvalidInput, "token_count"),
    "claimed mask": (claimed_mask, InvalidInput, "embedding_mask is not that of the tensors"),
    "short mask": (set_feature(embedding_mask=b"\1"), InvalidInput, "embedding_mask has 1 bytes"),
    "no digest": (set_feature(digest=""), InvalidInput, "digest"),
    "path as digest": (set_feature(digest="../../etc/passwd"), InvalidInput, "digest"),
    "no tensor digest": (set_feature(tensors_sha256=""), InvalidInput, "tensors_sha256"),
    "short span": (set_span(length=-1), InvalidInput, "length is"),
    "long span": (set_span(length=1), InvalidInput, "length is"),
    "shifted span": (set_span(offset=1), InvalidInput, "placeholder"),
    "span behind the prompt": (set_span(offset=10_000), InvalidInput, "offset is"),
    "negative span": (set_span(offset=-10_000), InvalidInput, "offset is"),
    "overlapping spans": (twice, InvalidInput, "offset is"),
    "too many images": (many, InvalidInput, "at most"),
    "placeholder without image": (no_images, InvalidInput, "but no image for it"),
    "stray placeholder": (stray, InvalidInput, "but no image for it"),
    "token above the vocabulary": (set_token(0, 10**6), InvalidInput, "the vocabulary is"),
    "negative token": (set_token(-1, -5), InvalidInput, "the vocabulary is"),
    "positions": (positions, InvalidInput, "prompt.positions"),
    "no sequences": (set_request(sample_count=0), InvalidInput, "sample_count"),
    "too many sequences": (set_request(sample_count=10**4), InvalidInput, "sample_count"),
    "too many alternatives": (set_request(top_sample_logprobs=10**5), InvalidInput, "top_sample_logprobs"),
    "negative alternatives": (set_request(top_prompt_logprobs=-1), InvalidInput, "top_prompt_logprobs"),
    "target above the vocabulary": (
        set_targets(IDS + 10**6, spread(2)),
        InvalidInput,
        "token_ids has token id 1000001 at position 0",
    ),
    "negative target": (set_targets(IDS - 2, spread(2)), InvalidInput, "token_ids has token id -1 at position 0"),
    "no targets": (set_targets(IDS[:0], spread(0)), InvalidInput, "token_ids is empty"),
    "long targets": (set_targets(IDS.astype(np.int64), spread(2)), InvalidInput, "token_ids is int64"),
    "square targets": (set_targets(IDS.reshape(1, 2), spread(2)), InvalidInput, "token_ids is int32"),
    "too few rows": (set_targets(IDS, lambda n: spread(2)(n)[1:]), InvalidInput, "row_offsets is int64"),
    "short offsets": (set_targets(IDS, lambda n: spread(2)(n).astype(np.int32)), InvalidInput, "row_offsets is int32"),
    "offsets beyond the ids": (set_targets(IDS, spread(3)), InvalidInput, "must rise from 0 to 2"),
    "offsets before the end": (set_targets(IDS, spread(1)), InvalidInput, "must rise from 0 to 2"),
    "falling offsets": (set_targets(IDS, down), InvalidInput, "must rise from 0 to 2"),
    "late offsets": (set_targets(IDS, lambda n: spread(2)(n).clip(1)), InvalidInput, "must rise from 0 to 2"),
    "too many draws": (set_request(alt_token_count=65), InvalidInput, "alt_token_count is 65"),
    "negative draws": (set_request(alt_token_count=-1), InvalidInput, "alt_token_count is -1"),
    "last n without logprobs": (
        set_request(prompt_logprobs_last_n=2, top_prompt_logprobs=2),
        InvalidInput,
        "prompt_logprobs, which it applies to",
    ),
    "last n of the whole prompt": (
        set_request(prompt_logprobs=True, prompt_logprobs_last_n=10**6),
        InvalidInput,
        "last_n is 1000000, must be between 1 and",
    ),
    "negative last n": (set_request(prompt_logprobs=True, prompt_logprobs_last_n=-1), InvalidInput, "last_n is -1"),
    "unknown snapshot": (set_request(snapshot_id="nobody@1"), SnapshotNotLoaded, "push it"),
    "no tokens wanted": (set_params(max_tokens=0), InvalidInput, "max_tokens"),
    "too long": (set_params(max_tokens=10**6), InvalidInput, "exceeds the context"),
    "negative temperature": (set_params(temperature=-1.0), InvalidInput, "temperature"),
    "temperature NaN": (set_params(temperature=float("nan")), InvalidInput, "temperature"),
    "temperature too small": (set_params(temperature=1e-4), InvalidInput, "temperature"),
    "temperature too big": (set_params(temperature=2.5), InvalidInput, "temperature"),
    "temperature infinite": (set_params(temperature=float("inf")), InvalidInput, "temperature"),
    "top_p 0": (set_params(top_p=0.0), InvalidInput, "top_p"),
    "top_p above 1": (set_params(top_p=1.5), InvalidInput, "top_p"),
    "top_k 0": (set_params(top_k=0), InvalidInput, "top_k"),
    "top_k -2": (set_params(top_k=-2), InvalidInput, "top_k"),
    "stop id": (stop_id, InvalidInput, "stop.token_ids"),
    "stop string": (stop_string, InvalidInput, "stop.strings"),
}


@pytest.mark.parametrize("case", CASES)
async def test_it_is_refused_and_the_next_request_works(
    client: SamplerClient, prompts: PromptMaker, renderer: TinyRenderer, case: str
) -> None:
    spoil, error, message = CASES[case]
    good = request_for(prompts.make("A good ", picture(1), " request").wire, max_tokens=4, temperature=0.0)
    before = (await ask(client, good)).sequences[0]
    bad = request_for(prompts.make("A good ", picture(1), " request").wire, max_tokens=4)
    spoil(bad, renderer)
    with pytest.raises(error, match=message) as caught:
        await ask(client, bad)
    assert type(caught.value) is error or issubclass(type(caught.value), InvalidInput)
    after = (await ask(client, good)).sequences[0]
    assert after.tokens == before.tokens
    assert after.logprobs == before.logprobs


async def test_an_empty_prompt(client: SamplerClient) -> None:
    with pytest.raises(InvalidInput, match=r"prompt\.tokens has no tokens"):
        await ask(client, sampler_pb2.SampleRequest(request_id="empty", sample_count=1))


async def test_a_broken_prompt(client: SamplerClient) -> None:
    request = sampler_pb2.SampleRequest(request_id="broken", sample_count=1)
    request.prompt.tokens = b"\0\0\0"
    with pytest.raises(InvalidInput, match="multiple of 4"):
        await ask(client, request)


async def test_an_image_is_fetched_once_for_many_requests(
    client: SamplerClient, prompts: PromptMaker, renderer: TinyRenderer
) -> None:
    prompt = prompts.make("Cached ", picture(40))
    digest = prompt.wire.spans[0].feature.digest
    for _ in range(3):
        await ask(client, request_for(prompt.wire, max_tokens=1, sample_count=2))
    assert renderer.fetched.count(digest) == 1
    assert size_bytes(renderer.features[digest]) == prompt.wire.spans[0].feature.size_bytes
