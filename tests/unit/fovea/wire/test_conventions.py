"""The names of services are those of the protos."""

from fovea.api.v1 import gateway_pb2, renderer_pb2, sampler_pb2, trainer_pb2
from fovea.wire import conventions


def test_services_are_called_as_in_the_protos() -> None:
    files = (gateway_pb2, renderer_pb2, sampler_pb2, trainer_pb2)
    services = {service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()}
    assert services == {
        conventions.GATEWAY_SERVICE,
        conventions.RENDERER_SERVICE,
        conventions.SAMPLER_SERVICE,
        conventions.TRAINER_SERVICE,
    }
