"""The client's error for a call that the service ended while it was being sent."""

import os
import subprocess
import sys

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


GOAWAY = """
import socket, sys, threading
import fovea
import grpc

SETTINGS = bytes.fromhex("000000040000000000")
GOAWAY = bytes.fromhex("000008070000000000") + bytes(4) + (2).to_bytes(4, "big")  # error 2: INTERNAL_ERROR

def serve():
    connection, _ = listener.accept()
    with connection:
        connection.sendall(SETTINGS)
        connection.recv(1000)
        connection.sendall(GOAWAY)
        connection.recv(1000)

with socket.create_server(("127.0.0.1", 0)) as listener:
    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
        try:
            channel.unary_unary("/some/Call")(b"", timeout=1)
        except grpc.RpcError as error:
            print(error.code())
"""


def test_grpcs_core_prints_no_end_of_a_connection_unless_it_is_asked_to() -> None:
    unset = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    command = [sys.executable, "-c", GOAWAY]
    quiet = subprocess.run(command, env=unset, capture_output=True, text=True, check=True)
    asked = subprocess.run(command, env=unset | {"GRPC_VERBOSITY": "INFO"}, capture_output=True, text=True, check=True)
    assert quiet.stdout == asked.stdout != ""
    assert quiet.stderr == ""
    assert "Got goaway" in asked.stderr
