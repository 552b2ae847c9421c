"""A stand-in for weights: a digest over all commands applied to them, in order.

Two are equal only if the same commands made them. A command that is lost, applied twice or applied in another order
changes the digest.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field


def chained(*parts: object) -> str:
    """Returns a digest over several values."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def number_of(text: str) -> float:
    """Returns a number below 2**24, exact in float32, that distinguishes digests."""
    return float(int(text[:6], 16))


@dataclass
class FakeWeights:
    """The state of a model.

    Attributes:
        weights: Digest of all steps.
        gradients: Digest of the batches since the last step.
    """

    weights: str
    step: int = 0
    gradients: list[str] = field(default_factory=list)

    @classmethod
    def fresh(cls, seed: int) -> "FakeWeights":
        """Returns the weights of a new model."""
        return cls(chained("fresh", seed))

    def loss(self, tokens: Sequence[bytes], backward: bool, drops_gradients: bool = False) -> float:
        """Returns the loss of a batch; `tokens` has the int32 bytes of each input."""
        computed = chained(self.weights, tokens)
        if backward:
            self.gradients = [*([] if drops_gradients else self.gradients), computed]
        return number_of(computed)

    def take_step(self, learning_rate: float) -> float:
        """Applies a step, discards the gradients and returns their norm."""
        norm = number_of(chained("norm", self.weights, self.gradients))
        self.weights, self.gradients = chained(self.weights, self.gradients, learning_rate), []
        self.step += 1
        return norm

    def load(self, other: "FakeWeights") -> None:
        """Loads the weights of a saved state."""
        self.weights, self.step, self.gradients = other.weights, other.step, []

    def copy(self) -> "FakeWeights":
        """Returns a copy that later commands do not change."""
        return FakeWeights(self.weights, self.step, list(self.gradients))


def sampled(weights: str, prompt: bytes, seed: int, count: int) -> list[int]:
    """Returns the tokens sampled from weights for a prompt."""
    digest = hashlib.blake2b(f"{weights}/{seed}".encode() + prompt, digest_size=32).digest()
    return [digest[index % 32] for index in range(count)]
