"""Teaches a model one picture with the official Tinker SDK, and then asks about it. Run `fovea up` first."""

import pathlib

import tinker
from tinker import AdamParams, Datum, EncodedTextChunk, ModelInput, SamplingParams, TensorData
from tinker.types import ImageChunk

service = tinker.ServiceClient()  # reads TINKER_BASE_URL and TINKER_API_KEY
model = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
training = service.create_lora_training_client(base_model=model, rank=16).result()
encode = training.get_tokenizer().encode

picture = ImageChunk(data=pathlib.Path("examples/square.png").read_bytes(), format="png")  # 224 x 224: 64 tokens
before, after = encode("<|im_start|>user\n<|vision_start|>"), encode("<|vision_end|>Who is this?<|im_end|>\n")
answer = encode("Ada<|im_end|>")
question = [EncodedTextChunk(tokens=before), picture, EncodedTextChunk(tokens=after)]
length = len(before) + 64 + len(after)
targets, weights = [0] * (length - 1) + answer, [0.0] * (length - 1) + [1.0] * len(answer)
inputs = {
    "target_tokens": TensorData(data=targets, dtype="int64"),
    "weights": TensorData(data=weights, dtype="float32"),
}
datum = Datum(model_input=ModelInput(chunks=[*question, EncodedTextChunk(tokens=answer[:-1])]), loss_fn_inputs=inputs)
for _ in range(20):
    backward = training.forward_backward([datum], "cross_entropy")
    training.optim_step(AdamParams(learning_rate=5e-3)).result()
    print("loss", backward.result().metrics["loss:sum"])
sampler = training.save_weights_and_get_sampling_client().result()  # pushed live into vLLM
sample = sampler.sample(ModelInput(chunks=question), 1, SamplingParams(max_tokens=8, temperature=0.0)).result()
print(training.get_tokenizer().decode(sample.sequences[0].tokens))
service.close("success")
