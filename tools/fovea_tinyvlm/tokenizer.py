"""Trains the byte-level BPE tokenizer, with Qwen's pre-tokenization and special tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from fovea_tinyvlm.special_tokens import ADDITIONAL_SPECIAL_TOKENS, END_OF_TEXT, IM_END, PLAIN_ADDED_TOKENS

VOCABULARY_SIZE = 1280
"""The number of bytes, merges and added tokens together, which is also the number of rows of the embedding."""
MAX_LENGTH = 8192


def train_tokenizer(corpus: Iterable[str], chat_template: str) -> PreTrainedTokenizerBase:
    """Trains the tokenizer on `corpus`. Ids 0..255 are bytes; the added tokens come last, as in Qwen.

    Raises:
        ValueError: The corpus is too small to fill the vocabulary.
    """
    added_tokens = (END_OF_TEXT, *ADDITIONAL_SPECIAL_TOKENS, *PLAIN_ADDED_TOKENS)
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(added_tokens),
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(corpus, trainer)
    bpe.add_tokens(
        [AddedToken(token, special=token not in PLAIN_ADDED_TOKENS, normalized=False) for token in added_tokens]
    )
    if bpe.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(
            f"the corpus is too small: it fills {bpe.get_vocab_size()} of {VOCABULARY_SIZE} vocabulary entries"
        )
    tokenizer = Qwen2Tokenizer(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        unk_token=None,
        bos_token=None,
        extra_special_tokens=list(ADDITIONAL_SPECIAL_TOKENS),
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        add_bos_token=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
