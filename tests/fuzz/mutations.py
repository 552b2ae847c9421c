"""Almost valid inputs: mutated bytes, JSON values and messages, each generated from one number that reproduces it."""

import os
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.gateway.nasty import JSON_VALUES, mutants, places, with_value

INPUTS = int(os.environ.get("FOVEA_FUZZ_INPUTS", "400"))
"""Number of inputs for all targets together; `make fuzz` uses 100,000."""
BATCH = 20

Case = TypeVar("Case", bound=Callable[..., None])
_WORDS = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff" * 8,
    b"[",
    b'"',
)
_RARELY = 0.05
_MOST_EDITS = 6


def fuzzed(share: float) -> Callable[[Case], Case]:
    """Runs a test with batches of seeds (`seeds`), which are `share` of all inputs.

    Without FOVEA_FUZZ_INPUTS the seeds are the same in every run.
    """
    batches = max(1, round(INPUTS * share / BATCH))
    numbers = st.lists(st.integers(0, 2**63 - 1), min_size=BATCH, max_size=BATCH)

    def decorate(test: Case) -> Case:
        limits = settings(
            max_examples=batches, deadline=None, database=None, derandomize="FOVEA_FUZZ_INPUTS" not in os.environ,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        fuzz: Case = limits(given(seeds=numbers)(test))
        return fuzz

    return decorate


def mutated_bytes(rng: random.Random, right: Sequence[bytes]) -> bytes:
    """Returns a valid input with a few bytes changed, deleted, repeated or inserted, or with another input's end."""
    data = bytearray(rng.choice(right))
    for _ in range(rng.randint(1, _MOST_EDITS)):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + int(rng.expovariate(1 / 16)) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[place % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[place:end]
            case 2:
                data[end:end] = data[place:end] * rng.randint(1, 8)
            case 3:
                data[place:place] = rng.choice(_WORDS)
            case 4:
                word = rng.choice(_WORDS)
                data[place : place + len(word)] = word
            case _ if rng.random() < _RARELY:
                other = rng.choice(right)
                data[place:] = other[rng.randrange(len(other) + 1) :]
    return bytes(data)


def mutated_json(rng: random.Random, right: Any) -> Any:
    """Returns a JSON value with one or two members replaced by invalid values."""
    value = right
    for _ in range(rng.randint(1, 2)):
        everywhere = list(places(value))
        if not everywhere:
            break
        value = with_value(value, rng.choice(everywhere), rng.choice(JSON_VALUES))
    return value


class Messages:
    """Mutants of valid messages; mutants with one invalid value are generated once."""

    def __init__(self, right: Sequence[Message]) -> None:
        self.of_kind = {
            kind: [mutant for message in right if message.DESCRIPTOR.name == kind for _, mutant in mutants(message)]
            for kind in sorted({message.DESCRIPTOR.name for message in right})
        }
        self._right = {
            kind: [message.SerializeToString() for message in right if message.DESCRIPTOR.name == kind]
            for kind in self.of_kind
        }

    def encoded(self, rng: random.Random, kind: str) -> bytes:
        """Returns the bytes of a message with an invalid value, mutated bytes, or both."""
        how = rng.randrange(3)
        right = [rng.choice(self.of_kind[kind]).SerializeToString()] if how else self._right[kind]
        return right[0] if how == 1 else mutated_bytes(rng, right)
