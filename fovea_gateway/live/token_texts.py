"""Texts of tokens, for people: read by the tokenizer's own file if this machine has it, and nothing is fetched."""

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_CHARACTER_TOKENS = 4


class _Tokenizer(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def texts(tokenizer: str, ids: Sequence[int]) -> list[str] | None:
    """The text of each token; None if there is no tokenizer here. A character of several tokens is shown by the last
    of them. Blocks: it may read a file.

    Args:
        tokenizer: A directory, or a hub name whose files are in this machine's cache.
    """
    found = _load(tokenizer)
    return None if found is None else list(_texts(found, ids))


def _texts(tokenizer: _Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(pending) < _CHARACTER_TOKENS:
            yield ""
        else:
            yield text
            pending = []


@lru_cache(maxsize=8)
def _load(tokenizer: str) -> _Tokenizer | None:
    try:
        from tokenizers import Tokenizer

        path = Path(tokenizer) / _FILE
        if not path.is_file():
            path = _cached(tokenizer)
        loaded: Any = Tokenizer.from_file(str(path))
        found: _Tokenizer = loaded
        return found
    except Exception as error:  # tokenizers raises bare ones
        logger.info("the page shows token ids alone: no tokenizer of %s is here (%s)", tokenizer, error)
        return None


def _cached(name: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, _FILE)
    if not isinstance(found, str):
        raise FileNotFoundError(f"{_FILE} of {name} is not in the cache")
    return Path(found)
