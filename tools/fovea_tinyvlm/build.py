"""Builds a directory that transformers and vLLM can load from a recipe.

`python -m fovea_tinyvlm.build RECIPE DIRECTORY` builds in a separate process; RECIPE is JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from fovea_tinyvlm.architecture import random_model
from fovea_tinyvlm.curriculum import lesson_texts
from fovea_tinyvlm.pretraining import pretrain
from fovea_tinyvlm.processor import chat_template, save_processor
from fovea_tinyvlm.prose import corpus
from fovea_tinyvlm.recipe import Recipe
from fovea_tinyvlm.special_tokens import END_OF_TEXT, IM_END
from fovea_tinyvlm.tokenizer import train_tokenizer


def build(recipe: Recipe, directory: Path) -> None:
    """Writes the model, tokenizer and processor files of `recipe` into `directory`, which may exist."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([*corpus(), *(20 * lesson_texts())], chat_template(recipe.kind))
    torch.set_num_threads(recipe.thread_count)
    torch.manual_seed(recipe.seed)
    model = random_model(recipe.kind, tokenizer)
    if recipe.step_count:
        pretrain(model, tokenizer, recipe)
    end_of_text, im_end = (tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, IM_END))
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text,
        eos_token_id=[im_end, end_of_text],
        pad_token_id=end_of_text,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.8,
    )
    model.save_pretrained(directory)
    save_processor(recipe.kind, tokenizer, directory)
    for path in directory.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    disable_progress_bar()
    build(Recipe(**json.loads(sys.argv[1])), Path(sys.argv[2]))
