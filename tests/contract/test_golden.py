"""Wire bytes stay stable: compares one message of each service with a golden file.

After an intended change, regenerate the files: `python -m tests.contract.test_golden`.
"""

import pathlib

import numpy as np
import pytest
from google.protobuf.message import Message

from fovea.api.v1 import gateway_pb2, model_input_pb2, renderer_pb2, sampler_pb2, trainer_pb2, weights_pb2
from fovea.wire import tensors

FOLDER = pathlib.Path(__file__).parent / "golden"
RENDERED = model_input_pb2.RenderedInput(
    tokens=tensors.encode_tokens([1, 90, 90, 2]),
    spans=[
        model_input_pb2.VisionSpan(
            offset=1,
            length=2,
            feature=model_input_pb2.VisionFeature(
                digest="d" * 64,
                token_count=2,
                size_bytes=8,
                source="h:1",
                tensors_sha256="e" * 64,
                embedding_mask=b"\1\0",
            ),
        )
    ],
    positions=tensors.encode(np.arange(12, dtype=np.int32).reshape(3, 4)),
)
MESSAGES: dict[str, Message] = {
    "renderer": next(tensors.iter_pieces("d", {"pixel_values": np.arange(6, dtype=np.uint8).reshape(2, 3)})),
    "rendered_input": renderer_pb2.RenderResponse(rendered=RENDERED),
    "sampler": sampler_pb2.SampleRequest(
        request_id="r",
        snapshot_id="m@1",
        prompt=RENDERED,
        sample_count=2,
        params=sampler_pb2.SamplingParams(
            max_tokens=0, temperature=0.0, seed=-1, stop=sampler_pb2.StopCondition(token_ids=[5], strings=["x"])
        ),
        prompt_logprobs=True,
    ),
    "trainer": trainer_pb2.Datum(
        input=RENDERED,
        loss_inputs={
            "target_tokens": tensors.encode(np.array([1, 2, 3, 4])),
            "weights": tensors.encode(np.array([0, 0, 0.5, 1], np.float32)),
        },
    ),
    "weights": weights_pb2.SnapshotManifest(
        snapshot=weights_pb2.Snapshot(snapshot_id="m@1", kind=weights_pb2.SNAPSHOT_KIND_ADAPTER, step=3),
        tensors=[weights_pb2.TensorSpec(name="a", dtype="float32", shape=[2, 3])],
        lora=weights_pb2.LoraConfig(rank=4, alpha=32.0, seed=-2, train_mlp=True),
        bucket_bytes=64,
    ),
    "gateway": gateway_pb2.WaitFutureResponse(snapshot_saved=gateway_pb2.SnapshotSaved(path="tinker://m/weights/x")),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_are_those_of_the_file(name: str) -> None:
    assert MESSAGES[name].SerializeToString(deterministic=True) == (FOLDER / f"{name}.binpb").read_bytes()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, message in MESSAGES.items():
        (FOLDER / f"{name}.binpb").write_bytes(message.SerializeToString(deterministic=True))
