"""The parity check of refusals, on services that refuse invalid tensors with a reason and on those that do not."""

import numpy as np
import pytest

from fovea.api.v1 import model_input_pb2
from fovea.wire.errors import InvalidInput
from fovea.wire.tensors import FeatureTensors, tensors_sha256
from fovea_parity.refusals import Ask, refusal_problem, with_wrong_tensors

RIGHT = model_input_pb2.RenderedInput(spans=[model_input_pb2.VisionSpan(feature=model_input_pb2.VisionFeature())])
PIXELS = {"pixel_values": np.zeros((1, 2, 3), np.float32)}


def service(refusal: str = "", breaks: bool = False) -> Ask:
    """Returns a service that refuses wrong tensors with `refusal`, and may fail afterwards."""
    refused: list[str] = []

    async def ask(rendered: model_input_pb2.RenderedInput) -> None:
        if rendered.spans[0].feature.digest and refusal:
            refused.append(refusal)
            raise InvalidInput(refusal)
        if refused and breaks:
            raise InvalidInput("broken")

    return ask


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (service("pixel_values has shape [1]"), ""),
        (service(), "a wrong pixel_values is accepted"),
        (service("no"), "a wrong pixel_values is refused, but the error does not name it: no"),
        (service("pixel_values", breaks=True), "after a wrong pixel_values the right one fails: broken"),
    ],
)
async def test_what_is_said_of_a_wrong_tensor(asked: Ask, problem: str) -> None:
    assert (
        await refusal_problem(asked, with_wrong_tensors(RIGHT, PIXELS, "here:1", {}), RIGHT, "pixel_values") == problem
    )


def test_a_spoilt_input_is_announced_truly() -> None:
    held: dict[str, FeatureTensors] = {}
    feature = with_wrong_tensors(RIGHT, PIXELS, "here:1", held).spans[0].feature
    assert (feature.tensors_sha256, feature.size_bytes, feature.source) == (tensors_sha256(PIXELS), 24, "here:1")
    assert held[feature.digest] is PIXELS
    assert not RIGHT.spans[0].feature.digest
