"""Sends forward_backward over raw HTTP, without the SDK's client."""

from typing import Any

import zstandard
from tinker.proto import tinker_public_pb2 as proto

from fovea_conformance.check import expect
from fovea_conformance.target import Target

PROTOBUF = "application/x-protobuf"
ZERO_BLOCKS = 32_768  # 128 KiB each, 4 GiB in total


def run(target: Target, message: Any) -> Any:
    """Sends a message and waits; returns a ForwardBackwardOutput message, or the error as a dict."""
    answer = target.send_loss(message.SerializeToString())
    expect(answer.status_code == 200, f"forward_backward answered {answer.status_code}: {answer.text[:200]}")
    result = target.poll(answer.json()["request_id"], accept=PROTOBUF)
    if "protobuf" in result.headers.get("content-type", ""):
        return proto.ForwardBackwardOutput.FromString(result.content)
    return result.json()


def zstd(message: Any) -> bytes:
    """Compresses a message as the SDK does."""
    return zstandard.ZstdCompressor().compress(message.SerializeToString())


def zstd_bomb() -> bytes:
    """Returns 130 kB that decompress to 4 GiB of zeros: a frame (RFC 8878) of run-length blocks without a size."""
    header = bytes.fromhex("28b52ffd") + bytes([0x00, 0x50])  # no content size; a window of 1 MiB
    size = 128 * 1024
    blocks = bytearray()
    for number in range(ZERO_BLOCKS):
        last = number == ZERO_BLOCKS - 1
        blocks += (size << 3 | 1 << 1 | last).to_bytes(3, "little") + b"\x00"
    return header + bytes(blocks)
