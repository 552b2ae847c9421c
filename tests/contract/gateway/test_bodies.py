"""Small bodies that would need much memory are refused before it is allocated, without affecting other clients."""

import asyncio
import resource

import pytest
import zstandard

from fovea.tinker.v1 import tinker_pb2
from fovea.wire.errors import ResourceExhausted
from fovea_gateway.access.owners import Quota
from fovea_gateway.http.request_body import SMALL_BYTES, parse_start
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.requests import PROTOBUF, Rest
from tests.contract.gateway.valid_bodies import Bodies

ZSTD = {"Content-Type": "application/json", "Content-Encoding": "zstd"}
_MIB = 2**20


def zstd(*pieces: tuple[bytes, int]) -> bytes:
    """Returns a zstd frame that repeats each piece a number of times."""
    compressor = zstandard.ZstdCompressor(level=9).compressobj()
    out = []
    for piece, count in pieces:
        many, rest = divmod(count, 10_000)
        out += [compressor.compress(piece * 10_000) for _ in range(many)]
        out.append(compressor.compress(piece * rest))
    return b"".join([*out, compressor.flush()])


def peak_mib() -> int:
    """Returns the peak memory of this process, which includes the gateway."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


async def test_a_bomb_of_tokens_costs_its_bytes_and_no_more(rest: Rest, made: Bodies) -> None:
    start = b'{"sampling_session_id":"%b","seq_id":1,"sampling_params":{},' % made.sampling_id.encode()
    prompt = b'"prompt":{"chunks":[{"type":"encoded_text","tokens":['
    body = zstd((start + prompt, 1), (b"1,", 60_000_000), (b"1]}]}}", 1))
    assert len(body) < 20_000
    before = peak_mib()
    response = await rest.http.post("asample", content=body, headers=ZSTD)
    assert response.status_code == 413
    assert "elements; the limit is" in response.json()["detail"]
    assert peak_mib() - before < 600, "expected 120 MB of text, held twice while its pieces are joined"


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("create_session", b'"user_metadata":{"a":[%b0]}'),
        ("create_session", b'"tags":[%b"a"]'),
        ("create_model", b'"session_id":"a","model_seq_id":0,"base_model":"b","user_metadata":{"a":[%b0]}'),
        ("save_weights", b'"model_id":"a","seq_id":1,"path":[%b0]'),
        ("optim_step", b'"model_id":"a","seq_id":1,"optimizer_params":{"a":[%b0]}'),
        ("retrieve_futures", b'"target":{"sampling_session_id":"a"},"retrieved_request_ids":[%b"a"]'),
        ("create_custom_loss", b'"session_id":"a","custom_loss_seq_id":0,"name":"n","inputs":[],"graph":{"a":[%b0]}'),
    ],
)
async def test_every_route_has_a_limit_of_its_own(rest: Rest, route: str, fields: bytes) -> None:
    for count in 100_000, 8_000_000:
        head, _, tail = fields.partition(b"%b")
        filling = b'"a",' if tail.startswith(b'"a"') else b"[],"
        body = zstd((b"{" + head, 1), (filling, count), (tail + b"}", 1))
        response = await rest.http.post(route, content=body, headers=ZSTD)
        assert response.status_code == 413, response.text


async def test_a_window_of_terabytes_is_not_allocated(rest: Rest) -> None:
    # Frame header: magic, no content size and no single segment, window descriptor of 2^41 bytes; an empty last block.
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([31 << 3]) + b"\x01\x00\x00"
    response = await rest.http.post("create_session", content=frame, headers=ZSTD)
    assert response.status_code == 400
    assert "window" in response.json()["detail"]


@pytest.mark.parametrize(
    "filling",
    [b"\x1a\x00", b"\x1a\x02\x0a\x00", b"\x1a\x04\x1a\x02\x0a\x00", b"\x3a\x00"],
    ids=["datums", "chunks", "spans", "settings"],
)
async def test_a_loss_is_counted_before_it_is_built(rest: Rest, made: Bodies, filling: bytes) -> None:
    head = tinker_pb2.ForwardBackwardRequest(model_id=made.model_id, seq_id=1).SerializeToString()
    body = zstd((head, 1), (filling, 2_000_000))
    headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    response = await rest.http.post("forward_backward", content=body, headers=headers)
    assert response.status_code == 413
    assert "fields" in response.json()["detail"]
    failed = await rest.result(f"{made.model_id}:1")
    assert failed["reason"] == "PAYLOAD_TOO_LARGE", (
        "the refused request must use up its number, so that later commands do not wait for it"
    )


async def test_a_loss_of_an_old_sdk_is_refused_with_the_version_to_install(rest: Rest, made: Bodies) -> None:
    body = {"model_id": made.model_id, "seq_id": 1, "forward_backward_input": {"data": [], "loss_fn": "cross_entropy"}}
    for headers in ({}, {"Content-Type": PROTOBUF}):
        response = await rest.http.post("forward_backward", json=body, headers=headers)
        assert response.status_code == 400
        assert response.json()["detail"].endswith("install tinker>=0.38")


@pytest.mark.parametrize("tag", [b"", b"\x0a", b"\x10"], ids=["a key", "a length", "a number"])
async def test_a_number_of_any_length_costs_ten_bytes(rest: Rest, made: Bodies, tag: bytes) -> None:
    """A varint with excess bytes is refused after ten. Without this limit, 200 kB took four seconds, and a body may
    have 128 MiB.
    """
    head = tinker_pb2.ForwardBackwardRequest(model_id=made.model_id, seq_id=1).SerializeToString()
    response = await rest.send(head + tag + b"\xff" * 4096 + b"\x01")
    assert response.status_code == 400
    assert "more than 10 bytes" in response.json()["detail"]
    failed = await rest.result(f"{made.model_id}:1")
    assert failed["reason"] == "INVALID_INPUT", (
        "the refused request must use up its number, so that later commands do not wait for it"
    )


@pytest.mark.parametrize("seq_id", [b"\xff" * 9 + b"\x01", b"\xff" * 12 + b"\x01"])
async def test_a_loss_with_a_seq_id_beyond_64_bits_is_refused(rest: Rest, made: Bodies, seq_id: bytes) -> None:
    head = tinker_pb2.ForwardBackwardRequest(model_id=made.model_id).SerializeToString()
    response = await rest.send(head + b"\x10" + seq_id + b"\x1a\xff")
    assert (response.status_code, response.json()["reason"]) == (400, "INVALID_INPUT")


@pytest.mark.parametrize(
    ("route", "filling"),
    [
        ("optim_step", b'"adam_params":{"a":"%b"}'),
        ("save_weights", b'"path":"%b"'),
        ("save_weights_for_sampler", b'"user_metadata":{"a":"%b"}'),
        ("load_weights", b'"optimizer":true,"path":"%b"'),
        ("save_weights_external", b'"path":"%b"'),
        ("optim_step", b'"adam_params":{"a":[%b]}'),
    ],
)
async def test_a_command_that_is_too_large_is_not_waited_for(
    rest: Rest, made: Bodies, route: str, filling: bytes
) -> None:
    long = b"[],[]," * 20_000 + b"[]" if b"[" in filling else b"a" * SMALL_BYTES
    body = b'{"model_id":"%b","seq_id":1,%b}' % (made.model_id.encode(), filling % long)
    response = await rest.http.post(route, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    failed = await rest.result(f"{made.model_id}:1")
    assert failed["reason"] == "PAYLOAD_TOO_LARGE", (
        "the refused request must use up its number, so that later commands do not wait for it"
    )


@pytest.mark.parametrize(
    ("prefix", "fields"),
    [
        (b'{"model_id":"a:1","seq_id":12,"path":"aaa', {"model_id": "a:1", "seq_id": 12}),
        (b'{"model_id":"a:1","seq_id":12', {"model_id": "a:1"}),
        (b'{"path":"a,\xff,', {}),
        (b"[1,", {}),
        (b"", {}),
    ],
)
def test_only_what_is_whole_is_read_of_a_start(prefix: bytes, fields: dict[str, object]) -> None:
    assert parse_start(prefix) == fields


PROMPT = b'{"sampling_session_id":"%b","seq_id":1,"sampling_params":{},"prompt":{"chunks":[%b]}}'
TOKENS = b'{"type":"encoded_text","tokens":[%b]}'


@pytest.mark.parametrize("wrong", [b"1.5", b"null", b"[]"])
async def test_one_of_many_wrong_tokens_is_reported(rest: Rest, made: Bodies, wrong: bytes) -> None:
    """Only the first invalid token is reported: a million errors blocked the event loop for eight seconds."""
    many = TOKENS % b",".join([wrong] * 2**18)
    response = await rest.http.post("asample", content=PROMPT % (made.sampling_id.encode(), many))
    failed = await rest.result(response.json()["request_id"])
    assert failed["reason"] == "INVALID_INPUT"
    assert failed["error"].startswith("prompt.chunks.0.encoded_text.tokens.0: ")
    assert "tokens.1: " not in failed["error"]


@pytest.mark.parametrize("chunk", [TOKENS % b"", b'"a"', b'{"a":1}'], ids=["empty chunks", "texts", "objects"])
async def test_names_and_texts_are_counted(rest: Rest, made: Bodies, chunk: bytes) -> None:
    many = b",".join([chunk] * 2**16)
    response = await rest.http.post("asample", content=PROMPT % (made.sampling_id.encode(), many))
    assert response.status_code == 413
    assert "names and strings; the limit is" in response.json()["detail"]


async def test_an_image_is_measured_before_it_is_decoded(rest: Rest, made: Bodies) -> None:
    image = b'{"type":"image","format":"png","data":"%b"}' % (b"A" * (4 * 33 * _MIB // 3))
    response = await rest.http.post("asample", content=PROMPT % (made.sampling_id.encode(), image))
    failed = await rest.result(response.json()["request_id"])
    assert failed["error"].startswith("prompt.chunks[0].data has 46137344 characters; an image may have 33554432 bytes")


async def test_a_long_query_is_not_read(stand: Stand) -> None:
    async with stand.http(None) as stranger:
        response = await stranger.get("exports/a/external_weights/b/c?" + "a=b&" * 10_000)
    assert (response.status_code, response.json()["reason"]) == (400, "INVALID_INPUT")
    assert "the query has 40000 bytes" in response.json()["detail"]


async def test_sparse_tensors_are_counted_as_they_will_be(rest: Rest, made: Bodies) -> None:
    request = tinker_pb2.ForwardBackwardRequest(model_id=made.model_id, seq_id=1, loss_fn="cross_entropy")
    for _ in range(64):
        tensor = request.data.add().loss_fn_inputs["weights"]
        tensor.dtype = tinker_pb2.DTYPE_INT64
        tensor.shape.extend([1, 4 * _MIB // 8])
        tensor.sparse_csr.crow_indices = bytes(16)
    response = await rest.send(request.SerializeToString())
    failed = await rest.result(response.json()["request_id"])
    assert (failed["reason"], failed["category"]) == ("PAYLOAD_TOO_LARGE", "user")


async def test_one_owner_does_not_fill_the_memory_of_all(stand: Stand) -> None:
    await stand.stop()
    await stand.start(max_request_memory_bytes=8 * _MIB)
    async with stand.http() as http:
        response = await http.post("asample", content=b" " * 5 * _MIB)
        assert response.status_code == 429
        assert "max_request_memory_bytes" in response.json()["detail"]
        for _ in range(8):  # a request's memory is released after an answer and after a refusal
            assert (await http.post("asample", content=b" " * _MIB)).status_code == 400


def test_bytes_are_shared_as_everything_is() -> None:
    quota = Quota("memory", 100, "bytes")
    with quota.holding("one") as first, quota.holding("two") as second:
        first.take(40)
        with pytest.raises(ResourceExhausted, match="memory 100"):
            first.take(20)
        second.take(25)
    with quota.holding("one") as again:
        again.take(50)


async def test_a_body_that_does_not_come_is_not_waited_for(stand: Stand) -> None:
    await stand.stop()
    await stand.start(request_timeout_s=0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
    head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Length: 9\r\n\r\n"
    writer.write(head.encode())
    assert b" 408 " in await reader.readline()
    writer.close()


async def test_metadata_that_is_kept_in_memory_is_small(stand: Stand, rest: Rest) -> None:
    response = await rest.post("create_session", tags=[], user_metadata={"a": "b" * 70_000})
    assert response.status_code == 400
    assert "user_metadata" in response.json()["detail"]
