"""The client's error for a call that the service ended while it was being sent."""

import grpc
import pytest

from fovea.api.v1 import trainer_pb2, trainer_pb2_grpc
from fovea.client.trainer import TrainerClient
from fovea.wire.errors import BrokenOff


class Leaving(trainer_pb2_grpc.TrainerServiceServicer):
    """A trainer that stops while a batch arrives."""

    async def ForwardBackward(self, requests: object, context: grpc.aio.ServicerContext[object, object]) -> None:  # noqa: N802
        await context.abort(grpc.StatusCode.UNAVAILABLE, "going")


async def test_who_is_still_sending_to_a_service_that_goes_may_ask_again() -> None:
    """gRPC reports UNAVAILABLE, as the service did, or an internal error of its own; both may be retried."""
    server = grpc.aio.server()
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Leaving(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    header = trainer_pb2.ForwardBackwardHeader(model_id="m", datum_count=0)
    async with TrainerClient(f"127.0.0.1:{port}") as client:
        for _ in range(20):
            with pytest.raises(BrokenOff):
                await client.forward_backward(header, [trainer_pb2.Datum()] * 2000)
    await server.stop(0)
