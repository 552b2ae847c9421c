"""Puts a new vision tower and connector before a language model: Idefics 3 with square pictures of one tile."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
)

IMAGE, AROUND, WHOLE, START, END = "<image>", "<fake_token_around_image>", "<global-img>", "<|im_start|>", "<|im_end|>"
# The tiles' tokens are unused: with them, SmolLM2's vocabulary has a multiple of 8 rows, as tensor cores want it.
TOKENS = (
    START,
    END,
    AROUND,
    IMAGE,
    "<end_of_utterance>",
    WHOLE,
    *(f"<row_{n // 2 + 1}_col_{n % 2 + 1}>" for n in range(4)),
)
CHAT = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<image>' }}{%- elif 'text' in part %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML without a default system prompt, with `<image>` for each picture."""


@dataclass(frozen=True, slots=True)
class Tower:
    """The size of the vision tower.

    Attributes:
        side: Pixels a side of every picture.
        patch: Pixels a side of a patch.
        merge: Patches a side of the square that becomes one token.
        width, depth, heads: Channels, layers and attention heads.
    """

    side: int = 256
    patch: int = 16
    merge: int = 2
    width: int = 512
    depth: int = 8
    heads: int = 8

    @property
    def cells(self) -> int:
        """Tokens a side of a picture."""
        return self.side // self.patch // self.merge


def join(language: Path, tower: Tower, seed: int) -> tuple[Any, Any]:
    """Returns the untrained model in float32, and its processor.

    Args:
        language: Folder of a Llama with its tokenizer.
        tower: Size of the tower.
        seed: Seed of the new weights.
    """
    tokenizer = AutoTokenizer.from_pretrained(language)
    text: Any = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS if token not in known])
    tokenizer.eos_token, tokenizer.chat_template = END, CHAT
    # The template writes the whole prompt, so encoding must add no token.
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    torch.manual_seed(seed)
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    end = tokenizer.convert_tokens_to_ids(END)
    tokenizer.pad_token = tokenizer.pad_token or END  # SmolLM2's has none, and prompts of one batch are padded
    pad = tokenizer.pad_token_id
    tied = bool(text.config.tie_word_embeddings)
    config = Idefics3Config(
        text_config=text.config.to_dict() | {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": pad},
        vision_config={
            "image_size": tower.side,
            "patch_size": tower.patch,
            "hidden_size": tower.width,
            "intermediate_size": 4 * tower.width,
            "num_hidden_layers": tower.depth,
            "num_attention_heads": tower.heads,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=pad,
        scale_factor=tower.merge,
        tie_word_embeddings=tied,
    )
    model = Idefics3ForConditionalGeneration(config)
    model.model.text_model.load_state_dict(text.model.state_dict())
    if not tied:
        model.lm_head.load_state_dict(text.lm_head.state_dict())
    _draw_weights(model, tower)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    size = {"longest_edge": tower.side}
    image = Idefics3ImageProcessor(size=size, max_image_size=size, do_image_splitting=False)
    return model, Idefics3Processor(
        image, tokenizer, image_seq_len=tower.cells**2, chat_template=tokenizer.chat_template
    )


@torch.no_grad()
def _draw_weights(model: Any, tower: Tower) -> None:
    """Draws weights that let a small tower learn at once: unit gain, quiet branches, waves for positions."""
    vision = model.model.vision_model
    for name, weight in vision.named_parameters():
        if weight.dim() >= 2:
            quiet = (2 * tower.depth) ** -0.5 if name.endswith(("out_proj.weight", "fc2.weight")) else 1.0
            weight.normal_(std=quiet * weight[0].numel() ** -0.5)
    grid, quarter = tower.side // tower.patch, tower.width // 4
    frequencies = torch.pi / grid * torch.logspace(0.0, 3.0, quarter, base=2.0)
    waves = (torch.arange(grid)[:, None] * frequencies).sin(), (torch.arange(grid)[:, None] * frequencies).cos()
    along = torch.cat(waves, dim=1)
    rows, columns = along[:, None].expand(-1, grid, -1), along[None].expand(grid, -1, -1)
    places = torch.cat([rows, columns], dim=-1).reshape(grid**2, -1)
    vision.embeddings.position_embedding.weight.copy_(0.5 * places)
    embeddings = model.get_input_embeddings().weight
    connector = model.model.connector.modality_projection.proj.weight
    connector.normal_(std=float(embeddings.std()) * connector.shape[1] ** -0.5)


def save(model: Any, processor: Any, folder: Path, dtype: torch.dtype, recipe: Any) -> None:
    """Writes a checkpoint folder as Fovea, vLLM and transformers load it, and the recipe that it was made with."""
    model.to(dtype).save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2, default=str) + "\n")
