"""A small byte-level vocabulary for all families, to which each family adds its own special tokens."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from fovea_tinyvlm.curriculum import lesson_texts
from fovea_tinyvlm.families.declaration import Family
from fovea_tinyvlm.prose import corpus

_LEARNT_SIZE = 1024
MAX_LENGTH = 8192


def family_tokenizer(family: Family) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a family. Ids 0 .. 1023 are bytes and merges; the family's tokens follow in order."""
    bpe = Tokenizer.from_str(_trained())
    bpe.add_tokens([AddedToken(token, special=True, normalized=False) for token in family.tokens])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in family.plain_tokens])
    if family.begin is not None:
        begin = [(family.begin, bpe.token_to_id(family.begin))]
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{family.begin} $A", pair=f"{family.begin} $A $B", special_tokens=begin
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=family.begin,
        eos_token=family.end,
        pad_token=family.pad,
        extra_special_tokens=dict(family.token_names),
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = family.chat.template()
    return tokenizer


@cache
def _trained() -> str:
    """Returns the vocabulary without added tokens, in the form of tokenizer.json."""
    bpe = Tokenizer(models.BPE())
    # All families split words by Qwen's rule, because transformers loads a Qwen tokenizer with it regardless of its
    # file.
    words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_LEARNT_SIZE,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator([*corpus(), *(20 * lesson_texts())], trainer)
    assert bpe.get_vocab_size() == _LEARNT_SIZE
    return bpe.to_str()
