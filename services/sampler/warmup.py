"""One sample of each kind before the first request, so that it is as quick as later ones."""

import hashlib
import logging
from contextlib import aclosing

import numpy as np

from fovea.api.v1 import model_input_pb2
from services.sampler.engine_api import Draw, ImageSpan, Limits, SampleSpec
from services.sampler.families.base import Family, FeatureTensors
from services.sampler.ports import SampleEngine

logger = logging.getLogger(__name__)

_TEXT_TOKENS = 8


async def warm_up(engine: SampleEngine, family: Family, limits: Limits) -> None:
    """Draws from a text and, if the family has them, from an image; greedily, with a temperature, with all logprobs.

    Raises whatever the engine raises: then it cannot serve.
    """
    spans, images, tokens = _prompt(family, limits)
    for draw in (Draw(max_tokens=2, temperature=0.0), Draw(max_tokens=2, top_k=2, top_p=0.9, seed=1)):
        for scored in (False, True):
            spec = SampleSpec(
                request_id="warm-up",
                snapshot_id="",
                tokens=tokens,
                spans=spans,
                sample_count=1,
                draw=draw,
                prompt_logprobs=scored,
                top_prompt_logprobs=min(2, limits.max_top_logprobs) if scored else 0,
                alt_token_count=min(2, limits.max_top_logprobs) if scored else 0,
                top_sample_logprobs=min(2, limits.max_top_logprobs) if scored else 0,
            )
            async with aclosing(engine.sample(spec, 0, engine.prompt(spec, images), None)) as events:
                async for _ in events:
                    pass


def _prompt(
    family: Family, limits: Limits
) -> tuple[tuple[ImageSpan, ...], list[FeatureTensors], "np.ndarray[tuple[int], np.dtype[np.int32]]"]:
    text = [token for token in range(_TEXT_TOKENS + 4) if token not in family.reserved_token_ids][:_TEXT_TOKENS]
    grey = family.grey_image()
    if grey is None:
        return (), [], np.asarray(text, dtype=np.int32)
    tensors, grid = grey
    length = family.token_count(grid)
    feature = model_input_pb2.VisionFeature(digest=hashlib.sha256(b"warm-up").hexdigest(), grid_thw=grid)
    tokens = np.asarray([*text, *[family.image_token_id] * length, *text], dtype=np.int32)
    return (ImageSpan(len(text), length, feature),), [tensors], tokens
