"""Texts of tokens for the live page, from a tokenizer file on this machine. Nothing is downloaded."""

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
    """Returns the text of each token; None if no tokenizer is available. Blocks: it may read a file.

    If a character consists of several tokens, its last token has the text and the others are empty.

    Args:
        tokenizer: A directory, or the name of a hub repository in this machine's cache.
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
    except Exception as error:  # The library raises plain exceptions.
        logger.info("the live page shows token ids only: found no tokenizer of %s (%s)", tokenizer, error)
        return None


def _cached(name: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, _FILE)
    if not isinstance(found, str):
        raise FileNotFoundError(f"{_FILE} of {name} is not in the cache")
    return Path(found)
