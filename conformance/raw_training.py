"""forward_backward on the wire, without the SDK's client around it."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as proto
from tinker.proto.request_conv import forward_backward_request_to_proto

from conformance.check import expect
from conformance.target import Target

PROTOBUF = "application/x-protobuf"
ZERO_BLOCKS = 32_768  # of 128 KiB each: 4 GiB


def request(
    model_id: str,
    seq_id: int,
    data: Sequence[types.Datum],
    loss: str = "cross_entropy",
    config: Mapping[str, float | str] | None = None,
) -> Any:
    """The SDK's own protobuf message; may be changed before it is sent."""
    given: Any = types.ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)  # type: ignore[arg-type]
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=given, model_id=model_id, seq_id=seq_id)
    )


def submit(target: Target, body: bytes, encoding: str = "") -> httpx.Response:
    """POSTs a body as protobuf."""
    headers = {"Content-Type": PROTOBUF} | ({"Content-Encoding": encoding} if encoding else {})
    return target.http.post("forward_backward", content=body, headers=headers)


def run(target: Target, message: Any) -> Any:
    """Sends the message and waits: a ForwardBackwardOutput message, or the error as a dict."""
    answer = submit(target, message.SerializeToString())
    expect(answer.status_code == 200, f"forward_backward answered {answer.status_code}: {answer.text[:200]}")
    result = target.poll(answer.json()["request_id"], accept=PROTOBUF)
    if "protobuf" in result.headers.get("content-type", ""):
        return proto.ForwardBackwardOutput.FromString(result.content)
    return result.json()


def zstd(message: Any) -> bytes:
    """The message as the SDK compresses it."""
    return zstandard.ZstdCompressor().compress(message.SerializeToString())


def zstd_bomb() -> bytes:
    """About 130 kB that decompress to 4 GiB of zeros: a frame (RFC 8878) of run-length blocks, without its size."""
    header = bytes.fromhex("28b52ffd") + bytes([0x00, 0x50])  # no content size; a window of 1 MiB
    size = 128 * 1024
    blocks = bytearray()
    for number in range(ZERO_BLOCKS):
        last = number == ZERO_BLOCKS - 1
        blocks += (size << 3 | 1 << 1 | last).to_bytes(3, "little") + b"\x00"
    return header + bytes(blocks)
