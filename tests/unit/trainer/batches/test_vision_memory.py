"""Outputs of the frozen tower: split, cached, retrieved with the right size, joined."""

import torch

from fovea_trainer.batches.vision_cache import VisionOutput, VisionOutputCache, split_output

COUNTS = [4, 1, 4]


def _output() -> VisionOutput:
    return VisionOutput(torch.randn(9, 3), (torch.randn(9, 3), torch.randn(9, 3)))


def test_split_and_joined_again() -> None:
    output = _output()
    images = split_output(output, COUNTS)
    assert [len(image.embeddings) for image in images] == [4, 1, 4]
    joined = VisionOutput.joined(images)
    torch.testing.assert_close(joined.embeddings, output.embeddings)
    torch.testing.assert_close(joined.deepstack, output.deepstack)
    swapped = VisionOutput.joined([images[1], images[0], images[0]])
    torch.testing.assert_close(swapped.embeddings, torch.cat([output.embeddings[4:5], *[output.embeddings[:4]] * 2]))


def test_families_without_deepstack() -> None:
    images = split_output(VisionOutput(torch.randn(9, 3), ()), COUNTS)
    assert VisionOutput.joined(images).deepstack == ()


def test_recalled_with_as_many_embeddings_only() -> None:
    memory = VisionOutputCache(10**6)
    images = split_output(_output(), COUNTS)
    memory.store_all({"a": images[0], "b": images[1]})
    assert set(memory.lookup({"a": 4, "b": 1, "c": 1})) == {"a", "b"}
    assert memory.lookup({"a": 5}) == {}


def test_least_recently_used_goes_first() -> None:
    images = split_output(_output(), COUNTS)
    memory = VisionOutputCache(images[0].size_bytes * 2)
    memory.store_all({"a": images[0], "b": images[2]})
    memory.lookup({"a": COUNTS[0]})
    memory.store_all({"c": images[1]})
    assert set(memory.lookup({"a": COUNTS[0], "b": COUNTS[2], "c": COUNTS[1]})) == {"a", "c"}
    nothing = VisionOutputCache(0)
    nothing.store_all({"a": images[0]})
    assert nothing.lookup({"a": COUNTS[0]}) == {}
