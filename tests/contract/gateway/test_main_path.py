"""The main path of the unmodified SDK: create, train on text and images, save, sample, load and close."""

import numpy as np
import pytest
import tinker
from tinker import types

from fovea.api.v1 import weights_pb2
from fovea.wire import tensors
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import IMAGE_PAD, MODEL, FakeSampler
from tests.contract.gateway.requests import image_datum, image_input, text_datum
from tests.waiting import eventually

ADAM = types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)


async def test_train_and_sample_text(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[types.ForwardBackwardOutput, types.SampleResponse]:
        training = client.create_lora_training_client(base_model=MODEL, rank=8, seed=7).result()
        loss = training.forward_backward([text_datum()], "cross_entropy")
        training.optim_step(ADAM).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, seed=1)
        sample = sampling.sample(types.ModelInput.from_ints([1, 2, 3]), num_samples=2, sampling_params=params)
        return loss.result(), sample.result()

    loss, sample = await stand.sdk(use)
    assert loss.metrics == {"loss:sum": 5.0}
    assert loss.loss_fn_outputs[0]["logprobs"].tolist() == [-1.0] * 5
    snapshot_id = stand.sampler.of("Sample")[0].snapshot_id
    assert snapshot_id.endswith(":train:0@1")
    assert [s.tokens for s in sample.sequences] == [FakeSampler.tokens_of(snapshot_id, 1, i, 4) for i in range(2)]
    assert [s.stop_reason for s in sample.sequences] == ["length"] * 2
    assert sample.prompt_cache_hit_tokens == 3
    assert stand.renderer.calls == [], "text needs no renderer call"
    created = stand.trainer.of("CreateModel")[0]
    assert (created.lora.rank, created.lora.alpha, created.lora.seed) == (8, 32.0, 7)
    assert stand.trainer.of("OptimStep")[0].adam.grad_clip_norm == 1.0
    await eventually(lambda: "DeleteModel" in stand.trainer.names())
    await eventually(lambda: "ForgetSnapshot" in stand.trainer.names())


async def test_images_are_rendered_and_reach_trainer_and_sampler_alike(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[types.ForwardBackwardOutput, list[float | None]]:
        training = client.create_lora_training_client(base_model=MODEL).result()
        loss = training.forward_backward([image_datum(), text_datum(), image_datum(None)], "cross_entropy").result()
        sampling = training.save_weights_and_get_sampling_client().result()
        return loss, sampling.compute_logprobs(image_input()).result()

    loss, logprobs = await stand.sdk(use)
    assert [len(output["logprobs"].tolist()) for output in loss.loss_fn_outputs] == [8, 5, 8]
    assert logprobs == [None, *[-0.5] * 7]
    _, datums = stand.trainer.of("ForwardBackward")[0]
    prompt = stand.sampler.of("Sample")[0].prompt
    expected = [1, 2, *[IMAGE_PAD] * 4, 3, 4]
    assert tensors.decode_tokens(datums[0].input.tokens).tolist() == expected
    assert tensors.decode_tokens(prompt.tokens).tolist() == expected
    assert datums[0].input.spans == prompt.spans
    assert len(datums[0].input.spans) == 1


async def test_state_is_saved_and_a_model_created_from_it(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[str, types.GetInfoResponse, types.WeightsInfoResponse, float]:
        training = client.create_lora_training_client(base_model=MODEL, rank=4, train_mlp=False).result()
        training.forward_backward([text_datum()], "cross_entropy").result()
        training.optim_step(ADAM).result()
        path = training.save_state("epoch-1").result().path
        plain = client.create_training_client_from_state(path).result()
        with_optimizer = client.create_training_client_from_state_with_optimizer(path).result()
        loss = with_optimizer.forward([text_datum()], "cross_entropy").result().metrics["loss:sum"]
        info = tinker.RestClient(base_url=stand.url, api_key=KEY).get_weights_info_by_tinker_path(path).result()
        return path, plain.get_info(), info, loss

    path, info, weights_info, loss = await stand.sdk(use)
    assert path.startswith("tinker://sess-")
    assert path.endswith(":train:0/weights/epoch-1")
    assert (info.model_name, info.lora_rank, info.model_data.tokenizer_id) == (MODEL, 4, "/models/fake")
    assert (weights_info.lora_rank, weights_info.train_mlp, weights_info.train_attn) == (4, False, True)
    assert loss == 2.5, "the optimizer's step must be restored"
    created = [
        (request.model_id[-1], request.lora.rank, request.lora.train_mlp) for request in stand.trainer.of("CreateModel")
    ]
    assert created == [("0", 4, False), ("1", 4, False), ("2", 4, False)]
    assert [request.optimizer for request in stand.trainer.of("LoadState")] == [False, True]


async def test_named_weights_are_sampled_by_path(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[str, types.SampleResponse, types.SampleResponse]:
        training = client.create_lora_training_client(base_model=MODEL).result()
        path = training.save_weights_for_sampler("final").result().path
        prompt, params = types.ModelInput.from_ints([5]), types.SamplingParams(max_tokens=2)
        tuned = client.create_sampling_client(model_path=path).result()
        base = client.create_sampling_client(base_model=MODEL).result()
        samples = [sampler.sample(prompt, 1, params).result() for sampler in (tuned, base)]
        return path, samples[0], samples[1]

    path, tuned, base = await stand.sdk(use)
    assert path.endswith(":train:0/sampler_weights/final")
    assert tuned.sequences[0].tokens != base.sequences[0].tokens
    assert [request.snapshot_id.split("@")[-1] for request in stand.sampler.of("Sample")] == ["1", ""]
    assert stand.trainer.of("TakeSnapshot")[0].uri, "a named snapshot must be written to storage"


async def test_load_state_into_an_existing_model(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> None:
        training = client.create_lora_training_client(base_model=MODEL).result()
        path = training.save_state("a").result().path
        training.load_state(path).result()
        training.load_state_with_optimizer(path).result()
        other = client.create_lora_training_client(base_model=MODEL, rank=2).result()
        with pytest.raises(tinker.RequestFailedError, match="rank 32 and other settings") as caught:
            other.load_state(path).result()
        assert caught.value.category is types.RequestErrorCategory.User

    await stand.sdk(use)
    assert [request.optimizer for request in stand.trainer.of("LoadState")] == [False, True]


async def test_custom_loss_runs_on_the_client(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[dict[str, float], dict[str, float]]:
        import torch

        def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            return (logprobs[0] ** 2).sum(), {"custom:sum": 1.0}

        training = client.create_lora_training_client(base_model=MODEL).result()
        output = training.forward_backward_custom([text_datum()], loss).result()
        return output.metrics, training.optim_step(ADAM).result().metrics or {}

    metrics, step = await stand.sdk(use)
    assert metrics["loss:sum"] == 5.0
    assert step["gradients:sum"] == 1
    headers = [header.backward for header, _ in stand.trainer.of("ForwardBackward")]
    assert headers == [False, True]
    weights = tensors.decode(stand.trainer.of("ForwardBackward")[1][1][0].loss_inputs["weights"])
    np.testing.assert_allclose(weights, [2.0] * 5)


async def test_rank_zero_trains_all_parameters(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> types.GetInfoResponse:
        training = client.create_lora_training_client(base_model=MODEL, rank=0).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        sampling.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result()
        return training.get_info()

    info = await stand.sdk(use)
    assert (info.is_lora, info.lora_rank) == (False, None)
    assert stand.trainer.of("CreateModel")[0].WhichOneof("kind") == "full"
    assert stand.sampler.resident.endswith("@1")
    assert stand.trainer.snapshots == {} or all(
        snapshot.kind == weights_pb2.SNAPSHOT_KIND_FULL for snapshot in stand.trainer.snapshots.values()
    )


async def test_full_model_right_after_another_session_was_closed(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> str:
        return client.create_lora_training_client(base_model=MODEL, rank=0).result().model_id

    ids = [await stand.sdk(use) for _ in range(4)]
    assert len(set(ids)) == 4
    names = [name for name in stand.trainer.names() if name in ("CreateModel", "DeleteModel")]
    assert names[:7] == ["CreateModel", "DeleteModel"] * 3 + ["CreateModel"]


async def test_all_sampling_options_arrive(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> types.SampleResponse:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        prompt = types.ModelInput.from_ints([1, 2, 3])
        for stop in ("End", ["a", "b"], [7, 8], []):
            params = types.SamplingParams(max_tokens=3, seed=2**63 + 1, stop=stop, temperature=0.5, top_k=5, top_p=0.9)
            sampling.sample(prompt, 1, params).result()
        return sampling.sample(
            prompt, 2, types.SamplingParams(max_tokens=3), include_prompt_logprobs=True, topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
        ).result()  # fmt: skip

    sample = await stand.sdk(use)
    assert sample.prompt_logprobs == [None, -0.5, -0.5]
    assert sample.topk_prompt_logprobs == [None, [(1, -1.0), (2, -2.0)], [(1, -1.0), (2, -2.0)]]
    assert [len(sequence.topk_logprobs or []) for sequence in sample.sequences] == [3, 3]
    assert len({sequence.sequence_id for sequence in sample.sequences}) == 2
    stops = [request.params.stop for request in stand.sampler.of("Sample")[:4]]
    assert [list(stop.strings) for stop in stops] == [["End"], ["a", "b"], [], []]
    assert [list(stop.token_ids) for stop in stops] == [[], [], [7, 8], []]
    assert [stop.ignore_eos for stop in stops] == [False, False, False, True]
    params = stand.sampler.of("Sample")[0].params
    assert (params.seed, params.temperature, params.top_k) == (-(2**63) + 1, 0.5, 5)
    assert not stand.sampler.of("Sample")[4].params.HasField("stop")


async def test_many_datums_in_parallel_chunks(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[types.ForwardBackwardOutput, types.OptimStepResponse]:
        training = client.create_lora_training_client(base_model=MODEL).result()
        data = [text_datum(3 + index % 4) for index in range(2500)]
        loss = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(ADAM)
        return loss.result(), step.result()

    loss, step = await stand.sdk(use)
    assert [len(output["logprobs"].tolist()) for output in loss.loss_fn_outputs] == [3 + i % 4 for i in range(2500)]
    assert len(stand.trainer.of("ForwardBackward")) == 3
    assert (step.metrics or {})["gradients:sum"] == 2500


async def test_base_path_and_flags(stand: Stand) -> None:
    await stand.stop()
    await stand.start(base_path="/x/y", sdk_flags={"proto_compress_fwdbwd": True, "use_pyqwest_transport": False})

    def use(client: tinker.ServiceClient) -> float:
        training = client.create_lora_training_client(base_model=MODEL).result()
        return training.forward_backward([text_datum()], "cross_entropy").result().metrics["loss:sum"]

    assert await stand.sdk(use) == 5.0


async def test_wrong_key_is_refused_at_once(stand: Stand) -> None:
    with pytest.raises(tinker.AuthenticationError, match="API key is unknown"):
        await stand.sdk(lambda client: client.create_sampling_client(base_model=MODEL).result(), key="tml-wrong")
    async with stand.http(key=None) as http:
        response = await http.post("create_session", json={})
    assert response.status_code == 401
    assert "X-API-Key" in response.json()["detail"]


async def test_capabilities(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> types.GetServerCapabilitiesResponse:
        return tinker.RestClient(base_url=stand.url, api_key=KEY).get_server_capabilities().result()

    capabilities = await stand.sdk(use)
    model = capabilities.supported_models[0]
    assert (model.model_name, model.max_context_length, model.trainable, model.sampleable) == (MODEL, 2048, True, True)
