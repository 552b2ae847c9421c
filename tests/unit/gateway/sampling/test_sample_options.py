"""A sample option is declared once in the protos and keeps that name from REST to the sampler."""

from fovea.api.v1 import gateway_pb2, sampler_pb2
from fovea_gateway.sampling import sample_routes, sample_runner


def test_rest_options_are_called_as_in_the_protos() -> None:
    assert set(sample_routes._AS_GIVEN) < set(sampler_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_all_that_a_client_asks_reaches_the_sampler() -> None:
    # Sent as a snapshot, rendered, and as target_tokens; the record stays in the gateway.
    told_otherwise = {"sampling_session_id", "prompt", "target_table", "record_stability_info"}
    asked = set(gateway_pb2.SampleTokensRequest.DESCRIPTOR.fields_by_name)
    assert set(sample_runner._OPTIONS) == asked - told_otherwise
