"""Service names equal those of the protos, and messages are grouped by size."""

import pytest

from fovea.api.v1 import gateway_pb2, renderer_pb2, sampler_pb2, tensor_pb2, trainer_pb2
from fovea.wire import conventions
from fovea.wire.conventions import group_by_size


def test_services_are_called_as_in_the_protos() -> None:
    files = (gateway_pb2, renderer_pb2, sampler_pb2, trainer_pb2)
    services = {service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()}
    assert services == {
        conventions.GATEWAY_SERVICE,
        conventions.RENDERER_SERVICE,
        conventions.SAMPLER_SERVICE,
        conventions.TRAINER_SERVICE,
    }


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [([], []), ([10, 20], [2]), ([600_000, 600_000, 10], [1, 2]), ([3 * 2**20, 5, 3 * 2**20], [1, 1, 1])],
)
def test_messages_are_grouped_up_to_a_size(sizes: list[int], groups: list[int]) -> None:
    messages = [tensor_pb2.Tensor(data=bytes(size)) for size in sizes]
    found = list(group_by_size(messages))
    assert [len(group) for group in found] == groups
    assert [message for group in found for message in group] == messages
