"""What stands for weights: a digest over all that was done to them, in order. Two are equal only if the same commands
made them; a command that is lost, done twice or done in another order gives others.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field


def chained(*parts: object) -> str:
    """A digest over several things."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def number_of(text: str) -> float:
    """A number below 2**24, exact in float32, that tells digests apart."""
    return float(int(text[:6], 16))


@dataclass
class FakeWeights:
    """A model's state.

    Attributes:
        weights: Of all steps taken.
        gradients: Of the batches since the last step.
    """

    weights: str
    step: int = 0
    gradients: list[str] = field(default_factory=list)

    @classmethod
    def fresh(cls, seed: int) -> "FakeWeights":
        """As a new model has them."""
        return cls(chained("fresh", seed))

    def loss(self, tokens: Sequence[bytes], backward: bool, drops_gradients: bool = False) -> float:
        """Of a batch, each input's tokens as int32."""
        computed = chained(self.weights, tokens)
        if backward:
            self.gradients = [*([] if drops_gradients else self.gradients), computed]
        return number_of(computed)

    def take_step(self, learning_rate: float) -> float:
        """The norm of the gradients, which are gone then."""
        norm = number_of(chained("norm", self.weights, self.gradients))
        self.weights, self.gradients = chained(self.weights, self.gradients, learning_rate), []
        self.step += 1
        return norm

    def load(self, other: "FakeWeights") -> None:
        """Takes the weights of a saved state."""
        self.weights, self.step, self.gradients = other.weights, other.step, []

    def copy(self) -> "FakeWeights":
        """As it is now, for good."""
        return FakeWeights(self.weights, self.step, list(self.gradients))


def sampled(weights: str, prompt: bytes, seed: int, count: int) -> list[int]:
    """The tokens that some weights answer a prompt with."""
    digest = hashlib.blake2b(f"{weights}/{seed}".encode() + prompt, digest_size=32).digest()
    return [digest[index % 32] for index in range(count)]
