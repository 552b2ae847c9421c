"""The question to the clients: one picture between two sequences of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

IMAGE = Path(__file__).parents[1] / "square.png"
BEFORE = "<|im_start|>user\n<|vision_start|>"
AFTER = "<|vision_end|>What colour is it?<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Question:
    """A picture, the token ids before and after it, and the settings of sampling."""

    image: Path
    before: list[int]
    after: list[int]
    temperature: float
    seed: int
    max_tokens: int = 16

    def arguments(self) -> list[str]:
        """Returns the arguments for a client's command line."""
        drawing = [f"--max-tokens={self.max_tokens}", f"--temperature={self.temperature}", f"--seed={self.seed}"]
        return [*drawing, str(self.image), " ".join(map(str, self.before)), " ".join(map(str, self.after))]


def questions(model: Path) -> list[Question]:
    """Returns the same question twice: for greedy and for seeded sampling.

    Args:
        model: Directory of the served model, for its tokenizer.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    before, after = (tokenizer.encode(text, add_special_tokens=False).ids for text in (BEFORE, AFTER))
    return [Question(IMAGE, before, after, temperature, seed=4) for temperature in (0.0, 2.0)]
