"""The cache of uploaded images."""

import hashlib

import pytest

from fovea.api.v1 import model_input_pb2
from fovea.wire.errors import InvalidInput, NotFound
from fovea_gateway.fronts.gateway_servicer import UploadedImages


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def reference(data: bytes) -> model_input_pb2.ModelInput:
    image = model_input_pb2.ImageReference(
        sha256=sha(data), format=model_input_pb2.IMAGE_FORMAT_PNG, expected_token_count=7, max_side=9
    )
    return model_input_pb2.ModelInput(chunks=[model_input_pb2.Chunk(image_reference=image)])


def test_references_become_images() -> None:
    shelf = UploadedImages()
    shelf.put("o", sha(b"one"), b"one")
    image = shelf.inline("o", reference(b"one"), "prompt").chunks[0].image
    assert (image.data, image.format, image.expected_token_count) == (b"one", model_input_pb2.IMAGE_FORMAT_PNG, 7)
    assert image.max_side == 9


def test_addresses_are_left_for_the_renderer() -> None:
    chunk = model_input_pb2.Chunk(image_reference=model_input_pb2.ImageReference(uri="http://x"))
    whole = model_input_pb2.ModelInput(chunks=[chunk])
    assert UploadedImages().inline("o", whole, "prompt") == whole


def test_wrong_digests_and_unknown_images_are_refused() -> None:
    shelf = UploadedImages()
    with pytest.raises(InvalidInput, match="does not have SHA-256"):
        shelf.put("o", sha(b"one"), b"two")
    with pytest.raises(NotFound, match=r"prompt.chunks\[0\].image_reference.sha256"):
        shelf.inline("o", reference(b"one"), "prompt")


def test_the_oldest_goes_first() -> None:
    shelf = UploadedImages(capacity_bytes=8)
    for data in (b"aaaa", b"bbbb"):
        shelf.put("o", sha(data), data)
    shelf.put("o", sha(b"aaaa"), b"aaaa")
    shelf.put("o", sha(b"cccc"), b"cccc")
    assert shelf.inline("o", reference(b"aaaa"), "p").chunks[0].image.data == b"aaaa"
    with pytest.raises(NotFound):
        shelf.inline("o", reference(b"bbbb"), "p")


def test_the_images_of_others_are_not_there() -> None:
    shelf = UploadedImages()
    shelf.put("alice", sha(b"one"), b"one")
    words = []
    for data in (b"one", b"nobody's"):
        with pytest.raises(NotFound) as refused:
            shelf.inline("bob", reference(data), "prompt")
        words.append(str(refused.value).replace(sha(data), "SHA"))
    assert words[0] == words[1]
    assert shelf.inline("alice", reference(b"one"), "prompt").chunks[0].image.data == b"one"


def test_the_owner_with_most_bytes_is_evicted_first() -> None:
    shelf = UploadedImages(capacity_bytes=12)
    shelf.put("alice", sha(b"aaaa"), b"aaaa")
    for data in (b"bbb1", b"bbb2", b"bbb3", b"bbb4"):
        shelf.put("bob", sha(data), data)
    assert shelf.inline("alice", reference(b"aaaa"), "p").chunks[0].image.data == b"aaaa"
    shelf.inline("bob", reference(b"bbb4"), "p")
    with pytest.raises(NotFound):
        shelf.inline("bob", reference(b"bbb2"), "p")
