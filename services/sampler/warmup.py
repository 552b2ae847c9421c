"""One sample of each kind before the first request, so that it is as quick as later ones."""

import hashlib
import logging
from contextlib import aclosing

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import model_input_pb2, sampler_pb2
from fovea.vision.vision_family import VisionFamily
from fovea.wire.features import FeatureTensors
from fovea.wire.rendered_input import ImageSpan
from services.sampler.engine_api import Limits, SampleSpec
from services.sampler.ports import SampleEngine

logger = logging.getLogger(__name__)

_TEXT_TOKENS = 8


async def warm_up(engine: SampleEngine, vision: VisionFamily | None, limits: Limits) -> None:
    """Draws greedily and with a temperature, with and without logprobs; from an image too if the model takes any.

    Raises whatever the engine raises: then it cannot serve.
    """
    spans, images, tokens = _prompt(vision)
    count = min(2, limits.max_top_logprobs)
    scores = sampler_pb2.SampleRequest(
        prompt_logprobs=True, top_prompt_logprobs=count, alt_token_count=count, top_sample_logprobs=count
    )
    greedy = sampler_pb2.SamplingParams(max_tokens=2, temperature=0.0, top_p=1.0, top_k=-1)
    drawn = sampler_pb2.SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, top_k=2, seed=1)
    for params in (greedy, drawn):
        for asked in (sampler_pb2.SampleRequest(), scores):
            request = sampler_pb2.SampleRequest(request_id="warm-up", sample_count=1)
            request.MergeFrom(asked)
            spec = SampleSpec(request, params, tokens, spans)
            async with aclosing(engine.sample(spec, 0, engine.prompt(spec, images), None)) as events:
                async for _ in events:
                    pass


def _prompt(
    vision: VisionFamily | None,
) -> tuple[tuple[ImageSpan, ...], list[FeatureTensors], npt.NDArray[np.int32]]:
    reserved = vision.reserved_ids if vision else ()
    text = [token for token in range(_TEXT_TOKENS + len(reserved)) if token not in reserved][:_TEXT_TOKENS]
    if vision is None:
        return (), [], np.asarray(text, dtype=np.int32)
    tensors, grid = vision.blank_image()
    placeholders = vision.placeholder_ids(grid)
    feature = model_input_pb2.VisionFeature(digest=hashlib.sha256(b"warm-up").hexdigest(), grid_thw=grid)
    tokens = np.concatenate([text, placeholders, text]).astype(np.int32)
    return (ImageSpan(len(text), len(placeholders), grid, feature),), [tensors], tokens
