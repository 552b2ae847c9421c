"""Samples an answer to a picture over gRPC, and prints the tokens as they arrive. Run `fovea up` first."""

import os
import pathlib

import grpc
from transformers import AutoTokenizer

from fovea.api.v1 import gateway_pb2 as api
from fovea.api.v1 import gateway_pb2_grpc, model_input_pb2, sampler_pb2
from fovea.wire.tensors import decode_tokens, encode_tokens

key = (("x-api-key", "tml-local"),)
fovea = gateway_pb2_grpc.GatewayServiceStub(grpc.insecure_channel(os.environ.get("FOVEA_GRPC", "127.0.0.1:8001")))
model = fovea.GetCapabilities(api.GetCapabilitiesRequest(), metadata=key).models[0].name
session = fovea.CreateSession(api.CreateSessionRequest(), metadata=key)
sampling = fovea.CreateSamplingSession(
    api.CreateSamplingSessionRequest(session_id=session.session_id, base_model=model), metadata=key
)
tokenizer = AutoTokenizer.from_pretrained(model)
prompt = model_input_pb2.ModelInput()
prompt.chunks.add().tokens.tokens = encode_tokens(tokenizer.encode("<|im_start|>user\n<|vision_start|>"))
prompt.chunks.add().image.CopyFrom(
    model_input_pb2.ImageChunk(data=pathlib.Path("examples/square.png").read_bytes(), format="IMAGE_FORMAT_PNG")
)
question = "<|vision_end|>What colour is it?<|im_end|>\n<|im_start|>assistant\n"
prompt.chunks.add().tokens.tokens = encode_tokens(tokenizer.encode(question))
request = api.SampleTokensRequest(
    sampling_session_id=sampling.sampling_session_id,
    prompt=prompt,
    sample_count=1,
    params=sampler_pb2.SamplingParams(max_tokens=16, temperature=0.0),
)
for event in fovea.SampleTokens(request, metadata=key):
    print(tokenizer.decode(decode_tokens(event.delta.tokens)), end="", flush=True)
print()
