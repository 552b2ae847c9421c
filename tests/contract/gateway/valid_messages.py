"""A valid request for every call of the gRPC API."""

from typing import Any

import numpy as np
from google.protobuf.message import Message

from fovea.api.v1 import gateway_pb2 as pb
from fovea.api.v1 import model_input_pb2, sampler_pb2, trainer_pb2, weights_pb2
from fovea.wire import tensors
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.nasty import to_json
from tests.contract.gateway.requests import GRAPH, PNG
from tests.contract.gateway.valid_bodies import Bodies


def calls(made: Bodies) -> list[Message]:
    """Returns one request per call, for the objects in `made`. A call with a datum sends its header first."""
    command: dict[str, Any] = {"model_id": made.model_id}
    text = model_input_pb2.Chunk(tokens=model_input_pb2.TokenChunk(tokens=tensors.encode_tokens([1, 2])))
    image = model_input_pb2.Chunk(
        image=model_input_pb2.ImageChunk(data=PNG, format=model_input_pb2.IMAGE_FORMAT_PNG, expected_token_count=4)
    )
    prompt = model_input_pb2.ModelInput(chunks=[text, image])
    loss_inputs = {
        "target_tokens": tensors.encode(np.zeros(6, np.int64)),
        "weights": tensors.encode(np.zeros(6, np.float32)),
    }
    table = pb.TargetTable(
        tokens=sampler_pb2.TargetTokens(
            token_ids=tensors.encode(np.ones(1, np.int32)), row_offsets=tensors.encode(np.arange(2))
        ),
        column_count=1,
        column_indices=tensors.encode(np.zeros(1, np.int32)),
    )
    traced = trainer_pb2.CustomLoss(
        name="n", inputs=[trainer_pb2.CustomLossInput(name="logprobs", rank=1)], graph=to_json(GRAPH).encode()
    )
    return [
        pb.CreateSessionRequest(tags=["a"], user_metadata={"a": "b"}),
        pb.HeartbeatRequest(session_id=made.session_id),
        pb.FinishSessionRequest(session_id="sess-none"),
        pb.SubmitCreateModelRequest(
            session_id=made.session_id, model_seq_id=1, base_model=MODEL, lora=weights_pb2.LoraConfig(rank=4, alpha=8)
        ),
        pb.GetModelRequest(model_id=made.model_id),
        pb.UploadImageRequest(sha256="0" * 64, data=PNG),
        pb.SubmitForwardBackwardRequest(
            header=pb.SubmitForwardBackwardHeader(
                **command, seq_id=1, loss_function="cross_entropy", loss_config={"a": 1}
            )
        ),
        pb.SubmitForwardBackwardRequest(datum=pb.InputDatum(input=prompt, loss_inputs=loss_inputs)),
        pb.CreateCustomLossRequest(session_id=made.session_id, custom_loss_seq_id=1, loss=traced),
        pb.SubmitOptimStepRequest(**command, adam=trainer_pb2.AdamParams(learning_rate=1e-4)),
        pb.SubmitSaveStateRequest(**command, name="a", ttl_s=7200, user_metadata={"a": "b"}),
        pb.SubmitLoadStateRequest(**command, path=f"tinker://{made.model_id}/weights/a"),
        pb.SubmitSaveForSamplerRequest(**command, name="b", ttl_s=7200, user_metadata={"a": "b"}),
        pb.SubmitSaveExternalRequest(**command, name="c", ttl_s=7200, age_recipients=["age1"]),
        pb.CreateSamplingSessionRequest(session_id=made.session_id, sampling_session_seq_id=1, base_model=MODEL),
        pb.SampleTokensRequest(
            sampling_session_id=made.sampling_id, prompt=prompt, sample_count=1, target_table=table,
            params=sampler_pb2.SamplingParams(max_tokens=4, seed=1, stop=sampler_pb2.StopCondition(strings=["a"])),
        ),
        pb.WaitFutureRequest(future_id=f"{made.model_id}:0", timeout_s=0.1),
    ]  # fmt: skip
