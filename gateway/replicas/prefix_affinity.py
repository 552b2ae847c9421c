"""Which samplers have computed the beginning of a prompt, so that a conversation returns to its prefix cache.

Only prompts count, by blocks, as vLLM caches them. What was sampled after the last one is not known here: a turn later
it is part of a prompt, and computing it anew takes one step.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from fovea.api.v1 import model_input_pb2

_BLOCK_BYTES = 32 * 4
_CAPACITY = 2**16


class Affinity:
    """Remembers who was sent which prompts. What was not seen for longest is forgotten first.

    Args:
        capacity: Blocks of 32 tokens that are remembered.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._instances: OrderedDict[bytes, set[str]] = OrderedDict()

    def longest(self, keys: Sequence[bytes]) -> set[str]:
        """The sampler instances that were sent the most blocks of a prompt; empty if nobody was sent even the first."""
        found: set[str] = set()
        for key in keys:
            deeper = self._instances.get(key, set())
            if found:
                deeper = deeper & found
            if not deeper:
                break
            found = deeper
        return set(found)

    def note(self, keys: Sequence[bytes], instance: str) -> None:
        """An instance is sent a prompt."""
        for key in keys:
            self._instances.setdefault(key, set()).add(instance)
        # The first block goes last: without it the others are of no use.
        for key in reversed(keys):
            self._instances.move_to_end(key)
        while len(self._instances) > self._capacity:
            self._instances.popitem(last=False)


def prefix_keys(owner: str, snapshot_id: str, prompt: model_input_pb2.RenderedInput) -> list[bytes]:
    """A key for each whole block of a prompt, which depends on all that the engine's cache does.

    Args:
        owner: Whose request it is: what is cached for one is not used for another.
        snapshot_id: The weights.
        prompt: Its placeholders are alike for all pictures; what tells them apart is the features' digests.
    """
    key = hashlib.blake2b(f"{owner}\0{snapshot_id}".encode(), digest_size=16).digest()
    spans = [(4 * span.offset, span.feature.digest.encode()) for span in prompt.spans]
    keys = []
    for start in range(0, len(prompt.tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        end = start + _BLOCK_BYTES
        begun = [digest for offset, digest in spans if start <= offset < end]
        block = b"".join([key, prompt.tokens[start:end], *begun])
        key = hashlib.blake2b(block, digest_size=16).digest()
        keys.append(key)
    return keys
