"""Invalid values in gRPC messages never cause a status that blames the server."""

import asyncio
import copy
import itertools
from typing import Any

import grpc
import pytest

from fovea.api.v1 import gateway_pb2_grpc
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.nasty import mutants
from tests.contract.gateway.valid_bodies import Bodies
from tests.contract.gateway.valid_messages import calls

KEYED = (("x-api-key", KEY),)
_AT_ONCE = 6


@pytest.mark.usefixtures("no_surprises")
async def test_no_message_is_an_internal_error_over_grpc(stand: Stand, made: Bodies) -> None:
    assert stand.gateway is not None
    wrong: list[str] = []
    room = asyncio.Semaphore(_AT_ONCE)
    header: Any = next(request for request in calls(made) if request.DESCRIPTOR.name == "SubmitForwardBackwardRequest")
    numbers = itertools.count(1)
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def send(name: str, what: str, request: Any) -> None:
            is_datum = name == "SubmitForwardBackward" and request.WhichOneof("record") == "datum"
            if is_datum:
                header_of_its_own = copy.deepcopy(header)
                header_of_its_own.header.seq_id = next(numbers)
            async with room:
                method = getattr(stub, name)
                is_stream = isinstance(method, grpc.aio.StreamUnaryMultiCallable)
                records = [header_of_its_own, request] if is_datum else [request]
                call = method(iter(records) if is_stream else request, metadata=KEYED, timeout=20)
                try:
                    if isinstance(method, grpc.aio.UnaryStreamMultiCallable):
                        async for _ in call:
                            pass
                    else:
                        await call
                except grpc.aio.AioRpcError as error:
                    if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                        wrong.append(f"{name} with {what}: {error.details()}")

        sent = []
        for request in calls(made):
            name = request.DESCRIPTOR.name.removesuffix("Request")
            for what, mutant in mutants(request):
                if getattr(mutant, "seq_id", None) == 0:
                    mutant.seq_id = next(numbers)
                sent.append(send(name, what, mutant))
        await asyncio.gather(*sent)
    assert wrong == []
