"""An adapter is stored as the bytes that a push broadcasts."""

import pytest
import torch

from fovea_trainer.weights.snapshot_store import digest_of, packed, specs_of
from fovea_trainer.weights.snapshot_taker import packed_digest

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (1, 1)])
def test_the_digest_is_that_of_the_tensors_one_by_one(shape: tuple[int, int], device: str) -> None:
    """Even if the bytes wait on the host because the device that computes the digest has no room for them."""
    tensors = {name: torch.randn(shape) for name in ("a", "b", "c")}
    specs = specs_of(tensors)
    assert packed_digest(specs, packed(specs, tensors.values()), torch.device(device)) == digest_of(
        specs, tensors.values()
    )


def test_a_flat_buffer_of_even_parts_is_packed_as_it_is() -> None:
    flat = torch.randn(24)
    tensors = {"a": flat[:8].view(2, 4), "b": flat[8:].view(4, 4)}
    assert torch.equal(packed(specs_of(tensors), tensors.values()), flat.view(torch.uint8))
