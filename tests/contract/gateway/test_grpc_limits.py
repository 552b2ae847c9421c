"""Limits of the gRPC API: connections, streams, unauthenticated calls and the memory of calls."""

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest

from fovea.api.v1 import gateway_pb2 as pb
from fovea.api.v1 import gateway_pb2_grpc, model_input_pb2
from fovea.wire import tensors
from fovea.wire.errors import (
    FoveaError,
    InvalidInput,
    PayloadTooLarge,
    ResourceExhausted,
    Unauthenticated,
    from_rpc_error,
)
from fovea_gateway.fronts import grpc_interceptors
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.test_connections import Pair, ending
from tests.contract.gateway.test_grpc_front import KEYED, create
from tests.waiting import eventually

_MIB = 2**20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""An empty SETTINGS frame, which completes the client's handshake."""
_MAX_CONCURRENT_STREAMS = 3
"""The number of the setting SETTINGS_MAX_CONCURRENT_STREAMS in RFC 9113, section 6.5.2."""


@contextlib.asynccontextmanager
async def limited(stand: Stand, **overrides: Any) -> AsyncIterator[Any]:
    """A stub for a gateway with other settings."""
    await stand.stop()
    await stand.start(**overrides)
    assert stand.gateway is not None
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


async def connect(stand: Stand, data: bytes) -> Pair:
    """Opens a bare connection to the gRPC port."""
    assert stand.gateway is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.gateway.grpc.port)
    writer.write(data)
    return reader, writer


async def raised(call: Any) -> FoveaError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("data", [b"", PREFACE], ids=["nothing", "half a handshake"])
async def test_a_connection_without_a_handshake_is_closed(stand: Stand, data: bytes) -> None:
    async with limited(stand, request_timeout_s=0.3):
        await ending(await connect(stand, data))


async def test_connections_are_counted_and_shared_by_address(stand: Stand) -> None:
    async with limited(stand, max_connections=20) as stub:
        await stub.GetCapabilities(pb.GetCapabilitiesRequest(), metadata=KEYED)
        others = [await connect(stand, PREFACE + SETTINGS) for _ in range(19)]
        for reader, _ in others:
            assert await asyncio.wait_for(reader.readexactly(1), 20) == b"\0", "expected the server's handshake"
        # 127.0.0.2 stands for another machine; a full server would refuse its connection.
        await eventually(lambda: _is_let_in(stand, "127.0.0.2"))
        assert 9 <= await _ended([reader for reader, _ in others]) <= 11, (
            "as many connections may stay as there are free places"
        )
        await stub.GetCapabilities(pb.GetCapabilitiesRequest(), metadata=KEYED)
        for _, writer in others:
            writer.close()


async def _ended(readers: list[asyncio.StreamReader]) -> int:
    """Returns the number of closed connections once it is positive and no longer grows."""
    reading = [asyncio.create_task(reader.read()) for reader in readers]
    await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    done, pending = await asyncio.wait(reading, timeout=3.0)
    for task in pending:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    return len(done)


async def _is_let_in(stand: Stand, address: str) -> bool:
    assert stand.gateway is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.gateway.grpc.port, local_addr=(address, 0))
    writer.write(PREFACE + SETTINGS)
    with contextlib.suppress(ConnectionError):
        found = await asyncio.wait_for(reader.read(1), 20)
        writer.close()
        return found == b"\0"
    return False


async def test_streams_of_a_connection_are_bounded_above_what_clients_need(stand: Stand) -> None:
    reader, writer = await connect(stand, PREFACE + SETTINGS)
    head = await asyncio.wait_for(reader.readexactly(9), 20)
    assert head[3] == 4, "the first frame must contain the server's settings"
    body = await reader.readexactly(int.from_bytes(head[:3]))
    pairs = [body[start : start + 6] for start in range(0, len(body), 6)]
    settings = {int.from_bytes(pair[:2]): int.from_bytes(pair[2:]) for pair in pairs}
    assert 2_000 < settings[_MAX_CONCURRENT_STREAMS] < 10_000
    writer.close()


async def test_nothing_is_waited_for_without_a_key(stand: Stand) -> None:
    assert stand.gateway is not None

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        for method in "CreateSession", "SubmitForwardBackward":
            call = channel.stream_unary(f"/fovea.api.v1.GatewayService/{method}")
            for metadata in (), (("x-api-key", "tml-wrong"),):
                error = await raised(call(never(), timeout=20, metadata=metadata))
                assert isinstance(error, Unauthenticated)


def loss(model_id: str, seq_id: int, *chunks: model_input_pb2.Chunk) -> AsyncIterator[pb.SubmitForwardBackwardRequest]:
    """Yields a stream with one datum per chunk."""

    async def stream() -> AsyncIterator[pb.SubmitForwardBackwardRequest]:
        header = pb.SubmitForwardBackwardHeader(model_id=model_id, seq_id=seq_id, backward=True)
        yield pb.SubmitForwardBackwardRequest(header=header)
        for chunk in chunks:
            datum = pb.InputDatum(input=model_input_pb2.ModelInput(chunks=[chunk]))
            yield pb.SubmitForwardBackwardRequest(datum=datum)

    return stream()


async def test_one_owner_does_not_fill_the_memory_of_all(stand: Stand) -> None:
    async with limited(stand, max_request_memory_bytes=8 * _MIB) as stub:
        _, model_id = await create(stub)
        mib = model_input_pb2.Chunk(tokens=model_input_pb2.TokenChunk(tokens=tensors.encode_tokens([1] * (_MIB // 4))))
        error = await raised(stub.SubmitForwardBackward(loss(model_id, 1, *[mib] * 6), metadata=KEYED))
        assert isinstance(error, ResourceExhausted)
        assert "max_request_memory_bytes" in error.message
        for seq_id in 1, 2, 3:  # a call's memory is released after an answer and after a refusal
            await stub.SubmitForwardBackward(loss(model_id, seq_id, *[mib] * 3), metadata=KEYED)


async def test_an_uploaded_image_counts_wherever_it_is_named(stand: Stand) -> None:
    async with limited(stand, max_body_bytes=8 * _MIB) as stub:
        session_id, model_id = await create(stub)
        data = bytes(_MIB)
        sha256 = hashlib.sha256(data).hexdigest()

        async def pieces() -> AsyncIterator[pb.UploadImageRequest]:
            yield pb.UploadImageRequest(sha256=sha256, data=data)

        await stub.UploadImage(pieces(), metadata=KEYED)
        image = model_input_pb2.Chunk(image_reference=model_input_pb2.ImageReference(sha256=sha256))
        error = await raised(stub.SubmitForwardBackward(loss(model_id, 1, *[image] * 20), metadata=KEYED))
        assert isinstance(error, PayloadTooLarge)
        opened = await stub.CreateSamplingSession(
            pb.CreateSamplingSessionRequest(session_id=session_id, base_model=MODEL), metadata=KEYED
        )
        prompt = model_input_pb2.ModelInput(chunks=[image] * 20)
        request = pb.SampleTokensRequest(sampling_session_id=opened.sampling_session_id, prompt=prompt)
        assert isinstance(await raised(stub.SampleTokens(request, metadata=KEYED).read()), PayloadTooLarge)


EMPTY_CHUNKS = bytes([0x0A, 0])
"""An element of ModelInput.chunks: two bytes on the wire, forty in memory."""


def delimited(number: int, body: bytes) -> bytes:
    """Encodes a field of bytes."""
    length, size = bytearray(), len(body)
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + body


async def test_elements_of_messages_are_counted_before_they_are_built(stand: Stand) -> None:
    process = psutil.Process()
    many = EMPTY_CHUNKS * (2**21 - 2048)
    calls = {
        "SampleTokens": [delimited(pb.SampleTokensRequest.PROMPT_FIELD_NUMBER, many)],
        "SubmitForwardBackward": [delimited(2, delimited(1, many))] * 30,
        "CreateSession": [bytes([pb.CreateSessionRequest.TAGS_FIELD_NUMBER << 3 | 2, 0]) * 2**16],
        "SubmitOptimStep": [delimited(1, b"a" * 2**19)],
    }
    async with limited(stand) as _:
        assert stand.gateway is not None
        # grpc.aio (1.76) is unsuitable: a write that meets the end of its call may replace the status by INTERNAL.
        with grpc.insecure_channel(stand.gateway.grpc.address) as channel:
            before = process.memory_info().rss
            for name, bodies in calls.items():
                call = channel.stream_unary(f"/fovea.api.v1.GatewayService/{name}")
                with pytest.raises(grpc.RpcError) as caught:
                    await asyncio.to_thread(call, iter(bodies), timeout=20, metadata=KEYED)
                assert isinstance(from_rpc_error(caught.value), PayloadTooLarge), name
            assert process.memory_info().rss - before < 64 * _MIB


async def test_a_message_is_counted_and_read_off_the_loop(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are measured and parsed outside the event loop: 64,000 empty fields blocked it for 0.1 s."""
    threads: list[threading.Thread] = []
    count = grpc_interceptors.check_protobuf_elements

    def noting(*arguments: Any) -> int:
        threads.append(threading.current_thread())
        return count(*arguments)

    monkeypatch.setattr(grpc_interceptors, "check_protobuf_elements", noting)
    body = bytes([pb.CreateSessionRequest.TAGS_FIELD_NUMBER << 3 | 2, 0]) * 2**15
    assert stand.gateway is not None
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        call = channel.unary_unary("/fovea.api.v1.GatewayService/CreateSession")
        assert isinstance(await raised(call(body, timeout=20, metadata=KEYED)), PayloadTooLarge)
    assert threads
    assert threading.main_thread() not in threads


async def test_the_memory_of_many_small_messages_is_counted(stand: Stand) -> None:
    async with limited(stand, max_body_bytes=8 * _MIB) as stub:
        _, model_id = await create(stub)
        tiny = [model_input_pb2.Chunk()] * 10_000

        async def records() -> AsyncIterator[pb.SubmitForwardBackwardRequest]:
            async for record in loss(model_id, 1):
                yield record
            for _ in range(200):  # 20 kB each
                yield pb.SubmitForwardBackwardRequest(
                    datum=pb.InputDatum(input=model_input_pb2.ModelInput(chunks=tiny))
                )

        assert isinstance(await raised(stub.SubmitForwardBackward(records(), metadata=KEYED)), PayloadTooLarge)


async def test_a_message_that_is_none_is_refused_by_name(stand: Stand) -> None:
    assert stand.gateway is not None
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        for body in b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xff", b"\xff" * 11 + b"\x01":
            call = channel.unary_unary("/fovea.api.v1.GatewayService/CreateSession")
            assert isinstance(await raised(call(body, timeout=20, metadata=KEYED)), InvalidInput)
