"""Samples: limits, retries, weight pushes and concurrency."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from fovea.wire.errors import FeatureEvicted, Internal, NotFinite, Unavailable
from fovea_gateway.sampling import sample_runner
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL, FakeSampler
from tests.contract.gateway.requests import Rest, image_input
from tests.waiting import eventually

IMAGE = {"type": "image", "data": "iVBORw0KGgo=", "format": "png"}


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[Stand, Rest]]:
    """A stand with two samplers."""
    async with running(Stand(tmp_path, sampler_count=2)) as stand, stand.http() as http:
        rest = Rest(http)
        await rest.open_session()
        yield stand, rest


async def base_session(rest: Rest, number: int = 0) -> str:
    """A sampling session on the base model."""
    answer = await rest.ok(
        "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=number, base_model=MODEL
    )
    return str(answer["sampling_session_id"])


async def test_context_overflow_is_400_in_the_known_words(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> str:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1] * 2040), *image_input().chunks])
        with pytest.raises(tinker.BadRequestError) as caught:
            sampling.sample(prompt, 1, types.SamplingParams(max_tokens=16)).result()
        return str(caught.value)

    assert (
        "Prompt length plus max_tokens exceeds the model's context window: 2048 prompt tokens + 16 max_tokens > 2048."
        in await stand.sdk(use)
    )


async def test_bad_samples_fail_by_name_and_the_next_one_works(stand: Stand, rest: Rest) -> None:
    sampling_id = await base_session(rest)
    text = {"type": "encoded_text", "tokens": [1]}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"num_samples": 1_000_000}, "num_samples is 1000000; 65536 is the maximum"),
        ({"num_samples": 129}, "num_samples is 129; it must be 1 .. 128"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**30}, "num_samples"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 1000]}]}}, "1000 at position 1"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**40]}]}}, "prompt.chunks[0].tokens"),
        ({"prompt": {"chunks": []}}, "prompt has no tokens"),
        ({"prompt": {"chunks": [{"type": "dmel", "dmel": "AA=="}]}}, "dmel"),
        ({"prompt": {"chunks": [{**IMAGE, "data": "//8="}]}}, "cannot be decoded"),
        ({"prompt": {"chunks": [{**IMAGE, "data": "§"}]}}, "prompt.chunks[0].data is not base64"),
        ({"prompt": {"chunks": [{**IMAGE, "format": "gif"}]}}, "'png' or 'jpeg'"),
        ({"prompt": {"chunks": [{**IMAGE, "expected_tokens": 5}]}}, "expected 5 tokens, got 4"),
        (
            {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "http://x/y.png", "format": "png"}]}},
            "host of http://x/y.png is not allowed",
        ),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs is 21; it must be 0 .. 20"),
        ({"sampling_params": {"max_tokens": 1, "min_p": 0.1}}, "sampling_params.min_p"),
        ({"sampling_params": {"max_tokens": 1, "stop": [""]}}, "stop"),
        ({"best_of": 2}, "best_of"),
    ]
    for seq_id, (more, words) in enumerate(bad):
        response = await rest.sample(sampling_id, seq_id, **more)
        assert response.status_code == 200, response.text
        answer = await rest.result(response.json()["request_id"])
        assert words in answer["error"]
        assert answer["category"] == "user"
        good = await rest.sample(sampling_id, 1000 + seq_id, prompt={"chunks": [text]})
        assert "sequences" in await rest.result(good.json()["request_id"])
    assert (await rest.sample("sess-none:sample:0", 0)).status_code == 404
    assert (await rest.post("asample", num_samples=1)).status_code == 400


async def test_a_snapshot_is_pushed_once_for_all_waiting_requests_and_again_after_eviction(
    stand: Stand, rest: Rest
) -> None:
    sampling_id = await rest.snapshot(await rest.create_model(), 1)
    stand.trainer.push_delay_s = 0.05
    responses = await asyncio.gather(*(rest.sample(sampling_id, seq_id) for seq_id in range(20)))
    for response in responses:
        assert "sequences" in await rest.result(response.json()["request_id"])
    assert len(stand.trainer.of("PushSnapshot")) == 1
    stand.sampler.adapters.clear()
    again = await rest.sample(sampling_id, 100)
    assert "sequences" in await rest.result(again.json()["request_id"])
    assert "NotLoaded" in stand.sampler.names()
    assert len(stand.trainer.of("PushSnapshot")) == 2


async def test_an_overflowing_snapshot_fails_at_once(stand: Stand, rest: Rest) -> None:
    sampling_id, base = await rest.snapshot(await rest.create_model(), 1), await base_session(rest, 7)
    stand.sampler.failures["Sample"].append(NotFinite("snapshot 'm@1' cannot be sampled: train with a lower rate"))
    answer = await rest.result((await rest.sample(sampling_id, 0)).json()["request_id"])
    assert answer["error"] == "snapshot 'm@1' cannot be sampled: train with a lower rate"
    assert answer["category"] == "user"
    assert len(stand.sampler.of("Sample")) == 1, "another attempt would fail the same way"
    assert "sequences" in await rest.result((await rest.sample(base, 0)).json()["request_id"])


async def test_an_adapter_that_no_sampler_takes_is_refused_when_it_is_created(stand: Stand, rest: Rest) -> None:
    stand.sampler.takes_no_mlp = True
    await rest.open_session()
    asked = {"session_id": rest.session_id, "base_model": MODEL, "optimizer_config": {"type": "adamw"}}
    lora = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}
    refused = await rest.ok("create_model", model_seq_id=0, lora_config=lora, **asked)
    answer = await rest.result(refused["request_id"])
    assert "cannot adapt model.layers.0.mlp.odd_proj; switch off train_attn, train_mlp" in answer["error"]
    assert answer["category"] == "user"
    assert not stand.trainer.models, "the trainer must keep it"
    taken = await rest.ok("create_model", model_seq_id=1, lora_config=lora | {"train_mlp": False}, **asked)
    assert (await rest.result(taken["request_id"]))["model_id"].endswith(":train:1")
    await stand.sampler.stop()
    await eventually(lambda: stand.gateway is not None and not stand.gateway.components.base_models.default.samplers.up)
    assert await rest.create_model(2), "there is no sampler to ask"


async def test_failed_push_is_tried_again(stand: Stand, rest: Rest) -> None:
    stand.trainer.push_failures[stand.sampler.address] = 2
    sampling_id = await rest.snapshot(await rest.create_model(), 1)
    response = await rest.sample(sampling_id, 0)
    assert "sequences" in await rest.result(response.json()["request_id"])
    assert len(stand.trainer.of("PushSnapshot")) == 3


async def test_weights_that_no_sampler_can_load_are_given_up(
    stand: Stand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_runner, "_BREAKS", 2)
    stand.trainer.failures["PushSnapshot"] += [Internal("no sampler received it: a tensor is missing")] * 9
    sampling_id = await rest.snapshot(await rest.create_model(), 1)
    answer = await rest.result((await rest.sample(sampling_id, 0)).json()["request_id"])
    assert answer["category"] == "server"
    assert "samplers failed 3 times with this request: no sampler received it: a tensor is missing" in answer["error"]
    stand.trainer.failures["PushSnapshot"].clear()
    assert "sequences" in await rest.result((await rest.sample(sampling_id, 1)).json()["request_id"])


async def test_killed_sampler_comes_back_and_the_samples_finish(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    sampling_id = await rest.snapshot(model_id, 1)
    stand.sampler.open.clear()
    ids = [(await rest.sample(sampling_id, seq_id)).json()["request_id"] for seq_id in range(3)]
    await eventually(lambda: stand.sampler.running == 3)
    await stand.sampler.stop()
    step = await rest.result((await rest.optim_step(model_id, 2))["request_id"])
    assert "metrics" in step, "training must not be affected"
    waiting = await rest.poll(ids[0])
    assert waiting.status_code == 408
    stand.sampler.restart()
    stand.sampler.open.set()
    await stand.sampler.start()
    for request_id in ids:
        assert "sequences" in await rest.result(request_id)
    assert len(stand.trainer.of("PushSnapshot")) == 2, "the new engine must get the snapshot again, once"


async def test_sampler_that_stays_away_ends_in_a_clear_error(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(retry_deadline_s=0.5)
    sampling_id = await base_session(rest)
    await stand.sampler.stop()
    answer = await rest.result((await rest.sample(sampling_id, 0)).json()["request_id"])
    assert answer["category"] == "server"
    assert "gave up after" in answer["error"]
    await stand.sampler.start()


async def test_a_request_that_ends_its_sampler_again_and_again_is_given_up(
    stand: Stand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_runner, "_BREAKS", 2)
    sampling_id = await base_session(rest)
    stand.sampler.failures["Sample"] += [Unavailable("the engine has died")] * 3
    answer = await rest.result((await rest.sample(sampling_id, 0)).json()["request_id"])
    assert answer["category"] == "server"
    assert "samplers failed 3 times with this request: the engine has died" in answer["error"]
    assert "sequences" in await rest.result((await rest.sample(sampling_id, 1)).json()["request_id"])


async def test_evicted_image_is_rendered_again(stand: Stand, rest: Rest) -> None:
    sampling_id = await base_session(rest)
    stand.sampler.failures["Sample"].append(FeatureEvicted("gone"))
    response = await rest.sample(sampling_id, 0, prompt={"chunks": [{"type": "encoded_text", "tokens": [1]}, IMAGE]})
    assert "sequences" in await rest.result(response.json()["request_id"])
    assert len(stand.renderer.of("Render")) == 2


async def test_full_weights_alternate_without_starving_anybody(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model(rank=0)
    first, second = await rest.snapshot(model_id, 1, 0), await rest.snapshot(model_id, 2, 1)
    base = await base_session(rest, 2)
    stand.sampler.open.clear()
    order = [(sampling_id, seq_id) for seq_id in range(30) for sampling_id in (first, second, base)]
    ids = [(await rest.sample(sampling_id, seq_id)).json()["request_id"] for sampling_id, seq_id in order]
    stand.sampler.open.set()
    for request_id in ids:
        assert "sequences" in await rest.result(request_id)
    pushes = len(stand.trainer.of("PushSnapshot"))
    assert 2 <= pushes <= 6, "requests that wait for the same weights are admitted together"
    sampled = {request.snapshot_id for request in stand.sampler.of("Sample")}
    assert sampled == {"", f"{model_id}@1", f"{model_id}@2"}


@pytest.mark.slow
async def test_five_hundred_samples_pend_and_finish(stand: Stand, rest: Rest) -> None:
    """The SDK itself keeps at most 400 in progress."""
    await stand.stop()
    await stand.start(sampler_concurrency=64, poll_hold_s=30.0)

    def use(client: tinker.ServiceClient) -> list[types.SampleResponse]:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        params = types.SamplingParams(max_tokens=4)
        futures = [sampling.sample(types.ModelInput.from_ints([1, 2]), 1, params) for _ in range(500)]
        return [future.result() for future in futures]

    stand.sampler.open.clear()
    work = asyncio.create_task(stand.sdk(use))
    await eventually(lambda: stand.sampler.running == 64, 60)
    assert stand.gateway is not None
    futures = stand.gateway.components.futures
    await eventually(lambda: futures.pending_count >= 400, 60)
    async with stand.http(KEY) as http:
        assert (await http.get("get_server_capabilities")).status_code == 200
    stand.sampler.open.set()
    samples = await work
    assert len(samples) == 500
    assert stand.sampler.most_running == 64


async def test_work_spreads_over_samplers_and_moves_away_from_a_dead_one(two: tuple[Stand, Rest]) -> None:
    stand, rest = two
    sampling_id = await rest.snapshot(await rest.create_model(), 1)
    for sampler in stand.samplers:
        sampler.open.clear()
    ids = [(await rest.sample(sampling_id, seq_id)).json()["request_id"] for seq_id in range(10)]
    await eventually(lambda: sum(sampler.running for sampler in stand.samplers) == 10)
    assert [sampler.running for sampler in stand.samplers] == [5, 5]
    assert len(stand.trainer.of("PushSnapshot")) == 1, "one push must bring the snapshot to both"
    await stand.samplers[0].stop()
    stand.samplers[1].open.set()
    for request_id in ids:
        assert "sequences" in await rest.result(request_id)
    assert len([r for r in stand.samplers[1].of("Sample")]) == 10
    await stand.samplers[0].start()


async def test_too_many_pending_samples_make_the_client_wait_and_finish(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(max_pending=6)  # half of it for one owner

    def use(client: tinker.ServiceClient) -> list[types.SampleResponse]:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        params = types.SamplingParams(max_tokens=1)
        futures = [sampling.sample(types.ModelInput.from_ints([1]), 1, params) for _ in range(8)]
        return [future.result() for future in futures]

    stand.sampler.open.clear()
    work = asyncio.create_task(stand.sdk(use))
    await eventually(lambda: stand.sampler.running == 3)
    refused = await rest.sample(await base_session(rest), 0)
    assert (refused.status_code, refused.json()["reason"]) == (429, "RESOURCE_EXHAUSTED")
    stand.sampler.open.set()
    assert len(await work) == 8
    ids = [request.request_id for request in stand.sampler.of("Sample")]
    assert len(set(ids)) == len(ids) == 8, "a sample that had to wait must come again with its own number"


async def test_sequences_differ_by_seed_only(stand: Stand, rest: Rest) -> None:
    sampling_id = await base_session(rest)
    results = []
    for seq_id in range(2):
        params = {"max_tokens": 4, "seed": 3}
        response = await rest.sample(sampling_id, seq_id, num_samples=2, sampling_params=params)
        results.append((await rest.result(response.json()["request_id"]))["sequences"])
    assert all(request.at_once for request in stand.sampler.of("Sample")), "no client streams a stored sample"
    assert results[0] == results[1]
    assert results[0][0]["tokens"] == FakeSampler.tokens_of("", 3, 0, 4)


async def test_services_that_read_another_model_than_the_trainer_are_named_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stand = Stand(tmp_path, sampler_count=2)
    files = {"config.json": "a", "tokenizer.json": "b", "image processor": "c"}
    stand.trainer.model_files = files
    stand.samplers[0].model_files = files | {"config.json": "x"}
    stand.samplers[1].model_files = {"config.json": "a"}  # an older version, which reports fewer files
    stand.renderer.model_files = files | {"image processor": "x"}
    async with running(stand):
        assert stand.gateway is not None
        parts = stand.gateway.components

        def refused() -> bool:
            return parts.base_models.default.renderers.up == [] and [
                one.address for one in parts.base_models.default.samplers.up
            ] == [stand.samplers[1].address]

        await eventually(refused)
        assert parts.health.missing() == ["a renderer"]
        for service, fake, name in (
            ("renderer", stand.renderer, "image processor"),
            ("sampler", stand.samplers[0], "config.json"),
        ):
            assert (
                f"the {service} at {fake.address} has another {name} than the trainer at {stand.trainer.address}"
                in caplog.text
            )
        stand.renderer.model_files = files
        await eventually(lambda: not parts.health.missing())
