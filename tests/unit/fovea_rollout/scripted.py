"""A scripted model and a template with one token per letter, so that tests can predict the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fovea_rollout.environments.environment import Answer
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policies.policy import Chunk, Sampled, SamplingSettings, Tokens, WeightVersions

END = 0
PICTURE_TOKENS = 4


def ids_of(text: str) -> tuple[int, ...]:
    """Encodes one token per letter."""
    return tuple(map(ord, text))


def text_of(chunks: Sequence[Chunk]) -> str:
    """Returns a prompt as text, with `#` for a picture and `|` for the end of a turn."""
    return "".join(
        "#" if isinstance(chunk, Picture) else "".join(chr(i) if i else "|" for i in chunk.ids) for chunk in chunks
    )


class LetterTemplate:
    """Renders `u:...|a:...|`; with `strips`, omits the part before a `>` in earlier answers."""

    stop_ids = (END,)

    def __init__(self, strips: bool = False) -> None:
        self.is_append_only = not strips

    def render(self, history: Sequence[Message | Sampled]) -> tuple[Chunk, ...]:
        """Renders with `a:` at the end."""
        chunks: list[Chunk] = []
        for entry in history:
            if isinstance(entry, Sampled):
                ids = (
                    entry.ids
                    if self.is_append_only or ord(">") not in entry.ids
                    else entry.ids[entry.ids.index(62) + 1 :]
                )
                closing = () if entry.ids[-1] == END else (END,)
                chunks += [Tokens(ids_of("a:")), Tokens(ids), Tokens(closing)]
                continue
            chunks.append(Tokens(ids_of(f"{entry.role[0]}:")))
            chunks += [part if isinstance(part, Picture) else Tokens(ids_of(part)) for part in entry.parts]
            chunks.append(Tokens((END,)))
        return (*chunks, Tokens(ids_of("a:")))

    def read(self, sampled: Sampled) -> Answer:
        """Returns the text after the thinking."""
        thinking, mark, text = text_of([Tokens(sampled.ids)]).rstrip("|").rpartition(">")
        return Answer(text, thinking + mark, is_cut=sampled.stop_reason == "length")


class ScriptedPolicy:
    """Answers a prompt with the result of `script`; a text without `|` was cut off."""

    def __init__(self, script: Callable[[str], str], version: int = 0) -> None:
        self._script = script
        self.version = version
        self.seeds: list[int | None] = []
        self.running = 0
        self.most_running = 0

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """Takes one turn of the event loop."""
        self.seeds.append(settings.seed)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            said = self._script(text_of(prompt))
        finally:
            self.running -= 1
        ids = tuple(END if letter == "|" else ord(letter) for letter in said)
        logprobs = tuple(-0.5 - index for index in range(len(ids)))
        versions = WeightVersions(self.version, self.version)
        return Sampled(ids, logprobs, "stop" if said.endswith("|") else "length", versions)

    async def token_count(self, picture: Picture) -> int:
        """Returns the same count for all pictures."""
        return PICTURE_TOKENS
