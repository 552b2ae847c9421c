"""Loads downloaded weights with plain transformers and PEFT, as another program would."""

import io
import pathlib
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from tinker.types import ImageChunk
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tests.e2e.prompts import Prompt


class Downloaded:
    """A model as its user loads it: a PEFT adapter on the base, or a full checkpoint."""

    def __init__(self, base: pathlib.Path, folder: pathlib.Path) -> None:
        is_adapter = (folder / "adapter_config.json").exists()
        source = base if is_adapter else folder
        model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
        self._config = model.config
        self._model = PeftModel.from_pretrained(model, str(folder)).eval() if is_adapter else model
        self._processor = AutoImageProcessor.from_pretrained(source)

    @torch.no_grad()
    def logprobs(self, prompt: Prompt) -> list[float]:
        """Returns the log-probabilities of the prompt's tokens from the second on."""
        ids = torch.tensor([prompt.ids])
        chunks = [chunk for chunk in prompt.model_input.chunks if isinstance(chunk, ImageChunk)]
        vision: dict[str, Any] = {}
        if chunks:
            made = self._processor([Image.open(io.BytesIO(chunk.data)) for chunk in chunks], return_tensors="pt")
            kinds = (ids == self._config.image_token_id).int()
            vision = {
                "pixel_values": made["pixel_values"],
                "image_grid_thw": made["image_grid_thw"],
                "mm_token_type_ids": kinds,
            }
        logits = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **vision).logits[0]
        scores = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return [float(score) for score in scores]
