"""The main path of the unmodified SDK: create, train, save, sample, load."""

import tinker
from tinker import types

from tests.contract.gateway.conftest import MODEL, Stand
from tests.contract.gateway.fakes import FakeSampler

PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 64


def text_datum(length: int = 5) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=list(range(2, length + 2)), dtype="int64", shape=[length]),
            "weights": types.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
        },
    )


async def test_first_slice(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[types.ForwardBackwardOutput, types.SampleResponse]:
        training = client.create_lora_training_client(base_model=MODEL, rank=8).result()
        loss = training.forward_backward([text_datum()], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        sample = sampling.sample(
            types.ModelInput.from_ints([1, 2, 3]),
            num_samples=2,
            sampling_params=types.SamplingParams(max_tokens=4, seed=1),
        ).result()
        return loss.result(), sample

    loss, sample = await stand.sdk(use)
    assert loss.metrics == {"loss:sum": 5.0}
    assert loss.loss_fn_outputs[0]["logprobs"].tolist() == [-1.0] * 5
    snapshot_id = stand.sampler.of("Sample")[0].snapshot_id
    assert snapshot_id.endswith(":train:0@1")
    assert [s.tokens for s in sample.sequences] == [FakeSampler.tokens_of(snapshot_id, 1, i, 4) for i in range(2)]
