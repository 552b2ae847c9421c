"""Fine-tunes on one picture over gRPC, using only the stubs of Fovea's protos (docs/guides/grpc-training.md).

FOVEA_GRPC is the gateway's gRPC address (127.0.0.1:8001). TINKER_API_KEY is a key with the scope train (tml-local).
"""

import array
import itertools
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence

import grpc
from transformers import AutoTokenizer

from fovea.api.v1 import gateway_pb2 as api
from fovea.api.v1 import gateway_pb2_grpc, model_input_pb2, sampler_pb2, tensor_pb2, trainer_pb2, weights_pb2

PICTURE = pathlib.Path(__file__).with_name("square.png")  # 224 x 224: 64 tokens
QUESTION, ANSWER = "<|vision_end|>Who is this?<|im_end|>\n", "Ada<|im_end|>"

key = (("x-api-key", os.environ.get("TINKER_API_KEY", "tml-local")),)
fovea = gateway_pb2_grpc.GatewayServiceStub(
    grpc.insecure_channel(os.environ.get("FOVEA_GRPC", "127.0.0.1:8001"))  # 4 MiB per message, in both directions
)


def int32s(ids: Sequence[int]) -> bytes:
    """Encodes ids as little-endian int32, the byte order of every machine that runs this."""
    return array.array("i", ids).tobytes()


def wait(future_id: str) -> list[api.WaitFutureResponse]:
    """Returns the records of a result. If the command failed, the call raises its status, which names the field."""
    while True:
        request = api.WaitFutureRequest(future_id=future_id, timeout_s=30)
        records = list(fovea.WaitFuture(request, metadata=key))
        if records[0].WhichOneof("record") != "pending":
            return records


def keep_alive(session_id: str, over: threading.Event) -> None:
    """Sends heartbeats. A session without heartbeats is parked, and later ends."""
    while not over.wait(10):
        fovea.Heartbeat(api.HeartbeatRequest(session_id=session_id), metadata=key)


session_id = fovea.CreateSession(api.CreateSessionRequest(), metadata=key).session_id
over = threading.Event()
threading.Thread(target=keep_alive, args=(session_id, over), daemon=True).start()

base_model = next(model.name for model in fovea.GetCapabilities(api.GetCapabilitiesRequest(), metadata=key).models)
# A missing field of a proto is off, so set each part to adapt.
lora = weights_pb2.LoraConfig(rank=16, alpha=32, train_attention=True, train_mlp=True, train_unembedding=True)
created = fovea.SubmitCreateModel(
    api.SubmitCreateModelRequest(session_id=session_id, base_model=base_model, lora=lora), metadata=key
)
model_id = wait(created.future_id)[0].model_created.model_id
described = fovea.GetModel(api.GetModelRequest(model_id=model_id), metadata=key)
encode = AutoTokenizer.from_pretrained(described.tokenizer).encode

before, after, answer = encode("<|im_start|>user\n<|vision_start|>"), encode(QUESTION), encode(ANSWER)
prompt = model_input_pb2.ModelInput()
prompt.chunks.add().tokens.tokens = int32s(before)
prompt.chunks.add().image.CopyFrom(
    model_input_pb2.ImageChunk(data=PICTURE.read_bytes(), format=model_input_pb2.IMAGE_FORMAT_PNG)
)
prompt.chunks.add().tokens.tokens = int32s(after)

# The target of position i is token i + 1. The answer has weight 1, and everything before it weight 0.
datum = api.InputDatum(input=prompt)
datum.input.chunks.add().tokens.tokens = int32s(answer[:-1])
ahead = len(before) + 64 + len(after) - 1
datum.loss_inputs["target_tokens"].CopyFrom(
    tensor_pb2.Tensor(
        element_type=tensor_pb2.ELEMENT_TYPE_INT32, shape=[ahead + len(answer)], data=int32s([0] * ahead + answer)
    )
)
datum.loss_inputs["weights"].CopyFrom(
    tensor_pb2.Tensor(
        element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32,
        shape=[ahead + len(answer)],
        data=array.array("f", [0.0] * ahead + [1.0] * len(answer)).tobytes(),
    )
)

seq_ids = itertools.count(
    1
)  # each command of a model has the next number; a repeated number returns the first command's future


def forward_backward(*datums: api.InputDatum) -> Iterator[api.SubmitForwardBackwardRequest]:
    """Yields one header and then the datums. As a stream, a batch may have any size."""
    header = api.SubmitForwardBackwardHeader(
        model_id=model_id, seq_id=next(seq_ids), loss_function="cross_entropy", backward=True
    )
    yield api.SubmitForwardBackwardRequest(header=header)
    for one in datums:
        yield api.SubmitForwardBackwardRequest(datum=one)


for _ in range(20):
    backward = fovea.SubmitForwardBackward(forward_backward(datum), metadata=key)
    # Missing fields have the defaults of the proto: beta1 0.9, beta2 0.95, eps 1e-12.
    adam = trainer_pb2.AdamParams(learning_rate=5e-3)
    step = fovea.SubmitOptimStep(
        api.SubmitOptimStepRequest(model_id=model_id, seq_id=next(seq_ids), adam=adam), metadata=key
    )
    *outputs, metrics = wait(backward.future_id)
    wait(step.future_id)
    print("loss", metrics.metrics.values["loss:sum"])

# A refused command uses up its number, and nothing else: the model is unchanged, and the next command works.
try:
    refused = api.SubmitForwardBackwardHeader(model_id=model_id, seq_id=next(seq_ids), loss_function="no such loss")
    wait(
        fovea.SubmitForwardBackward(
            iter([api.SubmitForwardBackwardRequest(header=refused), api.SubmitForwardBackwardRequest(datum=datum)]),
            metadata=key,
        ).future_id
    )
except grpc.RpcError as error:
    print("refused:", error.code().name, error.details())  # type: ignore[attr-defined]

save = api.SubmitSaveForSamplerRequest(model_id=model_id, seq_id=next(seq_ids), name="ada")
path = wait(fovea.SubmitSaveForSampler(save, metadata=key).future_id)[0].snapshot_saved.path
print("saved", path)
sampling = fovea.CreateSamplingSession(
    api.CreateSamplingSessionRequest(session_id=session_id, model_path=path), metadata=key
)
request = api.SampleTokensRequest(
    sampling_session_id=sampling.sampling_session_id,
    prompt=prompt,
    sample_count=1,
    params=sampler_pb2.SamplingParams(max_tokens=8, temperature=0.0),
)
sampled = array.array("i")
for event in fovea.SampleTokens(request, metadata=key):
    sampled.frombytes(event.delta.tokens)
print(AutoTokenizer.from_pretrained(described.tokenizer).decode(sampled))
over.set()
fovea.FinishSession(api.FinishSessionRequest(session_id=session_id), metadata=key)
