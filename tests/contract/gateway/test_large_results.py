"""Large results: their size is announced, they are compressed on request, and encoding does not block other clients."""

import gzip

import zstandard
from tinker.proto.response_conv import deserialize_sample_response

from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.requests import PROTOBUF, Rest
from tests.contract.gateway.test_samplers import base_session


async def test_a_result_above_the_limit_is_announced_to_clients_that_support_it(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(inline_limit_bytes=300)
    sampling_id = await base_session(rest)
    params = {"max_tokens": 100}
    large = (await rest.sample(sampling_id, 0, sampling_params=params)).json()["request_id"]
    small = (await rest.sample(sampling_id, 1)).json()["request_id"]
    assert "sequences" in await rest.result(small)
    whole = {"request_id": large, "allow_metadata_only": False}
    headers = {"Accept": PROTOBUF}
    announced = await rest.poll(large, PROTOBUF)
    payload = await rest.http.post("retrieve_future", json=whole, headers=headers)
    assert announced.json() == {"status": "complete_metadata", "response_payload_size": len(payload.content)}
    assert len(deserialize_sample_response(payload.content).sequences[0].tokens) == 100
    again = await rest.http.post("retrieve_future", json={"request_id": large}, headers=headers)
    assert again.content == payload.content
    assert (await rest.poll(small, PROTOBUF)).headers["content-type"] == PROTOBUF
    failed = (await rest.sample(sampling_id, 2, num_samples=0)).json()["request_id"]
    assert (await rest.poll(failed, PROTOBUF)).json()["category"] == "user"


async def test_the_sdk_fetches_what_was_announced(stand: Stand) -> None:
    import tinker
    from tinker import types

    from tests.contract.gateway.fakes import MODEL

    await stand.stop()
    await stand.start(inline_limit_bytes=10, sdk_flags={"sample_use_retrieve_futures": False})

    def use(client: tinker.ServiceClient) -> types.SampleResponse:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        return sampling.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=50)).result()

    assert len((await stand.sdk(use)).sequences[0].tokens) == 50


async def test_large_results_are_compressed_for_clients_that_accept_it(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(compress_from_bytes=300)
    sampling_id = await base_session(rest)
    large = (await rest.sample(sampling_id, 0, sampling_params={"max_tokens": 1500})).json()["request_id"]
    small = (await rest.sample(sampling_id, 1)).json()["request_id"]
    bodies = {}
    for encoding in ("identity", "gzip", "zstd", "gzip, deflate, zstd", "br", "zstd;q=0, gzip"):
        headers = {"Accept": PROTOBUF, "Accept-Encoding": encoding}
        async with rest.http.stream("POST", "retrieve_future", json={"request_id": large}, headers=headers) as response:
            used = response.headers.get("content-encoding")
            bodies[encoding] = used, b"".join([piece async for piece in response.aiter_raw()])
    plain = bodies["identity"][1]
    assert [used for used, _ in bodies.values()] == [None, "gzip", "zstd", "zstd", None, "gzip"]
    assert gzip.decompress(bodies["gzip"][1]) == plain
    assert zstandard.ZstdDecompressor().decompress(bodies["zstd"][1]) == plain
    assert len(bodies["zstd"][1]) < len(plain)
    assert bodies["br"][1] == plain
    await rest.result(small)
    assert "content-encoding" not in (await rest.poll(small, PROTOBUF)).headers
    assert (await rest.result(large))["sequences"]
