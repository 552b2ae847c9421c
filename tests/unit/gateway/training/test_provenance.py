"""Provenance spans: accepted as the SDK sends them, and refused with a reason if they are inconsistent."""

from dataclasses import replace
from typing import Any

import pytest
from tinker import types
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

from fovea.tinker.v1 import tinker_pb2
from fovea.wire.errors import InvalidInput
from fovea_gateway.training.training_wire import data_from_proto, datum_from_proto, header_from_proto
from tests.unit.gateway.training.test_datum_decoding import encode

TEXT = types.EncodedTextChunk(tokens=[5, 6, 7])
IMAGE = types.ImageChunk(data=b"png", format="png", expected_tokens=4)


def attributed(*chunks: Any) -> types.Datum:
    """Returns three prompt positions and sampled ones after them, as cookbook 0.6.1 attributes them."""
    whole = types.ModelInput(chunks=list(chunks))
    plain = types.Datum(model_input=whole, loss_fn_inputs={"target_tokens": [1] * whole.length})
    prompt = PromptProvenanceSpan(sequence_id="one", length=3)
    sampled = SampledProvenanceSpan(sequence_id="one", length=whole.length - 3)
    return plain.with_provenance([prompt, sampled], [prompt, sampled])


def wire(datum: types.Datum) -> tinker_pb2.Datum:
    return encode([datum]).data[0]


@pytest.mark.parametrize("chunks", [(TEXT, TEXT), (TEXT, IMAGE, TEXT)])
def test_spans_as_the_sdk_makes_them_are_taken(chunks: tuple[Any, ...]) -> None:
    datum = attributed(*chunks)
    with_spans, plain = wire(datum), wire(replace(datum, model_input_spans=None, loss_fn_input_spans=None))
    assert len(with_spans.model_input_spans) == len(with_spans.loss_fn_input_spans) == 2
    assert not plain.model_input_spans
    assert datum_from_proto(with_spans, "data[0]") == datum_from_proto(plain, "data[0]")


def test_spans_reach_the_one_loss_that_reads_them() -> None:
    body = encode([attributed(TEXT, TEXT)])
    found = {}
    for body.loss_fn in ("ppo", "stable_reinforce"):
        (datum,) = data_from_proto(body, header_from_proto(body))
        found[body.loss_fn] = [
            [(span.sequence_id, span.sampled, span.offset, span.length) for span in spans]
            for spans in (datum.input_spans, datum.target_spans)
        ]
    assert found == {"ppo": [[], []], "stable_reinforce": [[("one", False, 0, 3), ("one", True, 0, 3)]] * 2}


def test_an_image_that_does_not_say_its_size_leaves_the_input_untiled() -> None:
    message = wire(attributed(TEXT, IMAGE, TEXT))
    message.model_input[1].image.ClearField("expected_tokens")
    message.model_input_spans[1].sampled_tokens.length = 99
    assert datum_from_proto(message, "data[0]").input.chunks[1].image.data == b"png"


@pytest.mark.parametrize("name", ["model_input_spans", "loss_fn_input_spans"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spans: spans[1].sampled_tokens.__setattr__("length", 4), "covers 7 positions, but .* has 6"),
        (lambda spans: spans[1].sampled_tokens.__setattr__("length", -1), "length -1"),
        (lambda spans: spans[0].prompt_tokens.__setattr__("offset", -2), "offset -2"),
        (lambda spans: spans[0].prompt_tokens.__setattr__("sequence_id", ""), "sequence_id ''"),
        (lambda spans: spans[1].Clear(), "neither a prompt span nor a span of sampled tokens"),
    ],
)
def test_bad_spans_are_refused_by_name(name: str, change: Any, said: str) -> None:
    message = wire(attributed(TEXT, TEXT))
    change(getattr(message, name))
    with pytest.raises(InvalidInput, match=said) as caught:
        datum_from_proto(message, "data[0]")
    assert f"data[0].{name}" in str(caught.value)


@pytest.mark.parametrize("name", ["model_input_spans", "loss_fn_input_spans"])
def test_one_list_alone_is_refused(name: str) -> None:
    message = wire(attributed(TEXT, TEXT))
    message.ClearField(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="set both lists of spans or neither"):
        datum_from_proto(message, "data[0]")
