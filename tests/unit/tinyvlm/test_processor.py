"""Processor, tokenizer and chat template behave like those of the released Qwen checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

from fovea_tinyvlm.recipe import Kind
from fovea_tinyvlm.special_tokens import ADDITIONAL_SPECIAL_TOKENS, END_OF_TEXT, PLAIN_ADDED_TOKENS

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize(
    ("kind", "size", "token_count"),
    [
        ("qwen3_vl", (8, 8), 64),
        ("qwen3_vl", (224, 224), 64),
        ("qwen3_vl", (150, 224), 70),
        ("qwen3_vl", (400, 300), 108),
        ("qwen2_5_vl", (224, 224), 64),
        ("qwen2_5_vl", (150, 224), 40),
    ],
)
def test_image_token_counts(
    model_directories: dict[Kind, Path], kind: Kind, size: tuple[int, int], token_count: int
) -> None:
    image_processor = AutoImageProcessor.from_pretrained(model_directories[kind])
    grid = image_processor([Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"]
    assert grid.prod().item() // image_processor.merge_size**2 == token_count


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_processor_expands_the_image_token(model_directories: dict[Kind, Path], kind: Kind) -> None:
    processor = AutoProcessor.from_pretrained(model_directories[kind])
    inputs = processor(text=[IMAGE], images=[Image.new("RGB", (224, 224))], return_tensors="pt")
    assert (inputs["input_ids"] == AutoConfig.from_pretrained(model_directories[kind]).image_token_id).sum() == 64


def test_special_tokens_are_single_and_come_last(model_directories: dict[Kind, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directories["qwen3_vl"])
    config = AutoConfig.from_pretrained(model_directories["qwen3_vl"])
    added = (END_OF_TEXT, *ADDITIONAL_SPECIAL_TOKENS, *PLAIN_ADDED_TOKENS)
    ids = [tokenizer(token)["input_ids"] for token in added]
    first = len(tokenizer) - len(added)
    assert ids == [[first + index] for index in range(len(added))]
    assert len(tokenizer) == config.text_config.vocab_size
    for name in ("image", "video", "vision_start", "vision_end"):
        token = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
        assert getattr(config, f"{name}_token_id") == tokenizer.convert_tokens_to_ids(token)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)


@pytest.mark.parametrize("text", ["Which digit is this?", "7", "a\n\n  b", "naïve 日本 🙂", "x = 12345"])
def test_text_survives_the_tokenizer(model_directories: dict[Kind, Path], text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directories["qwen3_vl"])
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_single_tokens(model_directories: dict[Kind, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directories["qwen3_vl"])
    assert [len(tokenizer(str(digit))["input_ids"]) for digit in range(10)] == [1] * 10
    assert len(tokenizer("123")["input_ids"]) == 3


def test_qwen3_vl_chat_format(model_directories: dict[Kind, Path]) -> None:
    processor = AutoProcessor.from_pretrained(model_directories["qwen3_vl"])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A lamp."}]},
        {"role": "user", "content": "Sure?"},
    ]
    assert processor.apply_chat_template(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{IMAGE}What is it?{IMAGE}<|im_end|>\n"
        "<|im_start|>assistant\nA lamp.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with_ids = processor.apply_chat_template(messages, add_vision_id=True)
    assert f"Picture 1: {IMAGE}What is it?Picture 2: {IMAGE}" in with_ids


def test_qwen2_5_vl_chat_format_adds_a_system_message(model_directories: dict[Kind, Path]) -> None:
    processor = AutoProcessor.from_pretrained(model_directories["qwen2_5_vl"])
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    assert processor.apply_chat_template(messages) == (
        f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{IMAGE}Hi<|im_end|>\n"
    )
