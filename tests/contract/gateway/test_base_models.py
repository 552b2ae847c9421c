"""Several base models behind one gateway. Each has its own renderers, samplers and, if it is trainable, trainer."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL, FakeRenderer, FakeSampler, FakeTrainer
from tests.contract.gateway.requests import Rest, image_datum, image_input, text_datum
from tests.waiting import eventually

TEACHER, OTHER = "fovea/teacher", "fovea/other-student"


class School:
    """A stand with a gateway that also serves a sampling-only teacher and a second student."""

    def __init__(self, state_dir: Path) -> None:
        self.stand = Stand(state_dir)
        self.teacher_renderer, self.other_renderer = FakeRenderer(), FakeRenderer()
        self.teacher, self.other = FakeSampler(), FakeSampler()
        self.other_trainer = FakeTrainer(lambda: [self.other])
        self.fakes = (self.teacher_renderer, self.other_renderer, self.teacher, self.other, self.other_trainer)

    def models(self) -> list[dict[str, Any]]:
        """The gateway's setting of base models."""
        renderers, samplers = (self.teacher_renderer, self.other_renderer), (self.teacher, self.other)
        return [
            {"model_name": name, "model": f"/models/{name}", "renderer": [renderer.address],
             "sampler": [sampler.address], "trainer": trainer}
            for name, renderer, sampler, trainer in zip(
                (TEACHER, OTHER), renderers, samplers, ("", self.other_trainer.address), strict=True
            )
        ]  # fmt: skip


@contextlib.asynccontextmanager
async def opened(state_dir: Path, **overrides: Any) -> AsyncIterator[School]:
    school = School(state_dir)
    for fake in school.fakes:
        await fake.start()
    try:
        async with running(school.stand, further_models=school.models(), **overrides):
            yield school
    finally:
        for fake in school.fakes:
            await fake.stop()


@pytest.fixture
async def school(tmp_path: Path, database_url: str) -> AsyncIterator[School]:
    async with opened(tmp_path, database_url=database_url) as one:
        yield one


async def test_all_are_listed_with_what_they_are_for(school: School) -> None:
    async with school.stand.http() as http:
        listed = (await http.get("get_server_capabilities")).json()["supported_models"]
    assert [(each["model_name"], each["trainable"], each["sampleable"]) for each in listed] == [
        (MODEL, True, True), (TEACHER, False, True), (OTHER, True, True),
    ]  # fmt: skip


async def test_the_sdk_samples_and_scores_each_by_its_own_services(school: School) -> None:
    def use(client: tinker.ServiceClient) -> list[list[float | None]]:
        prompt, params = image_input(), types.SamplingParams(max_tokens=3, seed=1)
        scores = []
        for name in (MODEL, TEACHER, OTHER):
            sampling = client.create_sampling_client(base_model=name).result()
            sampling.sample(types.ModelInput.from_ints([1, 2]), num_samples=1, sampling_params=params).result()
            scores.append(sampling.compute_logprobs(prompt).result())
        return scores

    assert await school.stand.sdk(use) == [[None, *[-0.5] * 7]] * 3
    for sampler in (school.stand.sampler, school.teacher, school.other):
        assert len(sampler.of("Sample")) == 2
        assert {request.snapshot_id for request in sampler.of("Sample")} == {""}
    for renderer in (school.stand.renderer, school.teacher_renderer, school.other_renderer):
        assert renderer.names() == ["Render"]
    assert "PushSnapshot" not in school.stand.trainer.names() + school.other_trainer.names()


async def test_a_sampling_only_model_refuses_training(school: School) -> None:
    def use(client: tinker.ServiceClient) -> Any:
        with pytest.raises(tinker.BadRequestError, match="for sampling only; train 'fovea/fake-vl' or 'fovea/other"):
            client.create_lora_training_client(base_model=TEACHER, rank=8).result()
        with pytest.raises(tinker.NotFoundError, match="'nobody' is not served; use 'fovea/fake-vl' or"):
            client.create_lora_training_client(base_model="nobody", rank=8).result()
        return client.create_lora_training_client(base_model=OTHER, rank=8).result().get_info()

    info = await school.stand.sdk(use)
    assert (info.model_data.model_name, info.model_data.tokenizer_id) == (OTHER, f"/models/{OTHER}")


async def test_snapshots_go_to_the_samplers_of_their_own_base_model(school: School) -> None:
    def use(client: tinker.ServiceClient) -> list[str]:
        paths = []
        for name in (MODEL, OTHER):
            training = client.create_lora_training_client(base_model=name, rank=8).result()
            training.forward_backward([text_datum(), image_datum()], "cross_entropy").result()
            training.optim_step(types.AdamParams()).result()
            sampling = training.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=3, seed=1)
            sampling.sample(types.ModelInput.from_ints([1, 2]), num_samples=1, sampling_params=params).result()
            paths.append(training.save_weights_for_sampler("kept").result().path)
            assert client.create_sampling_client(model_path=paths[-1]).result().get_base_model() == name
        return paths

    paths = await school.stand.sdk(use)
    for sampler, trainer, number in (
        (school.stand.sampler, school.stand.trainer, 0),
        (school.other, school.other_trainer, 1),
    ):
        assert [request.snapshot_id.partition(":train:")[2] for request in sampler.of("Sample")] == [f"{number}@1"]
        assert len(trainer.of("CreateModel")) == len(trainer.of("ForwardBackward")) == 1
        assert trainer.of("PushSnapshot")[0].samplers == [sampler.address]
    assert school.teacher.adapters == set()
    await eventually(lambda: "DeleteModel" in school.other_trainer.names())
    await eventually(lambda: not school.other.adapters and not school.stand.sampler.adapters)
    assert len(paths) == 2


async def test_a_checkpoint_is_loaded_where_it_was_trained(school: School) -> None:
    def save(client: tinker.ServiceClient) -> tuple[str, str]:
        training = client.create_lora_training_client(base_model=OTHER, rank=8).result()
        return training.save_state("s").result().path, training.save_weights_for_sampler("w").result().path

    state, weights = await school.stand.sdk(save)

    def load(client: tinker.ServiceClient) -> str:
        return str(client.create_training_client_from_state(state).result().get_info().model_name)

    assert await school.stand.sdk(load) == OTHER
    assert len(school.other_trainer.of("LoadState")) == 1
    assert school.stand.trainer.of("LoadState") == []
    async with school.stand.http() as http:
        rest = Rest(http)
        session_id = await rest.open_session()
        wrong = await rest.post(
            "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, model_path=weights,
            base_model=TEACHER,
        )  # fmt: skip
        assert wrong.status_code == 400
        assert f"was trained on '{OTHER}', not '{TEACHER}'" in wrong.text
        await rest.ok(
            "create_sampling_session", session_id=session_id, sampling_session_seq_id=1, model_path=weights,
            base_model=OTHER,
        )  # fmt: skip


async def test_models_of_all_survive_a_restart_and_one_that_is_not_served_any_more_says_so(school: School) -> None:
    stand = school.stand
    async with stand.http() as http:
        rest = Rest(http)
        await rest.open_session()
        first = await rest.create_model(0)
        second = await rest.create_model(1, base_model=OTHER)
        await stand.stop()
        await stand.start()
        for model_id in (first, second):
            assert "metrics" in await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])
        opened = await rest.ok(
            "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=0, base_model=TEACHER
        )
        await stand.stop()
        await stand.start(further_models=[])
        answer = await rest.result((await rest.forward_backward(second, 2)).json()["request_id"])
        assert f"base model '{OTHER}', which is no longer trained here" in answer["error"]
        assert "metrics" in await rest.result((await rest.forward_backward(first, 2)).json()["request_id"])
        gone = await rest.sample(opened["sampling_session_id"], 0)
        assert (gone.status_code, f"base_model '{TEACHER}' is not served" in gone.text) == (404, True)


async def test_what_is_missing_and_what_does_not_fit_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    school_of = School(tmp_path)
    school_of.teacher_renderer.model_files = {"tokenizer.json": "a"}
    school_of.teacher.model_files = {"tokenizer.json": "b"}
    for fake in school_of.fakes:
        await fake.start()
    async with running(school_of.stand, further_models=school_of.models()) as stand:
        assert stand.gateway is not None
        health = stand.gateway.components.health
        await eventually(lambda: health.missing() == [f"a sampler of {TEACHER}"])
        renderer, sampler = school_of.teacher_renderer.address, school_of.teacher.address
        words = f"the sampler at {sampler} has another tokenizer.json than the renderer at {renderer}"
        await eventually(lambda: words in caplog.text)
        school_of.teacher.model_files = school_of.teacher_renderer.model_files
        await eventually(lambda: not health.missing())
    for fake in school_of.fakes:
        await fake.stop()


async def test_a_gateway_may_serve_for_sampling_only(tmp_path: Path) -> None:
    async with running(Stand(tmp_path), trainer="") as stand:
        assert stand.gateway is not None
        await eventually(lambda: not stand.gateway.components.health.missing())  # type: ignore[union-attr]

        def use(client: tinker.ServiceClient) -> Callable[..., Any]:
            with pytest.raises(tinker.BadRequestError, match="no base model here has a trainer"):
                client.create_lora_training_client(base_model=MODEL, rank=8).result()
            return client.create_sampling_client(base_model=MODEL).result().compute_logprobs(image_input()).result()

        assert await stand.sdk(use) == [None, *[-0.5] * 7]


async def test_checkpoints_are_searched_as_sdk_0_39_does(school: School) -> None:
    """The response shapes follow the documentation of 0.39; the package index only has 0.38."""
    async with school.stand.http() as http, school.stand.http("tml-other") as stranger:
        rest = Rest(http)
        await rest.open_session()
        for number, name in enumerate((MODEL, OTHER)):
            model_id = await rest.create_model(number, base_model=name)
            for seq_id, mark in enumerate("xyz", start=1):
                body = {"path": mark, "user_metadata": {"mark": mark, "run": "1"}}
                await rest.result(
                    (await rest.ok("save_weights", model_id=model_id, seq_id=seq_id, **body))["request_id"]
                )
            saved = await rest.ok("save_weights_for_sampler", model_id=model_id, seq_id=4, path="s")
            await rest.result(saved["request_id"])

        async def found(**asked: Any) -> list[str]:
            names, cursor = [], None
            while True:
                page = await rest.ok("checkpoints/search", limit=2, cursor=cursor, **asked)
                names += [f"{each['base_model']} {each['checkpoint_id']}" for each in page["checkpoints"]]
                if (cursor := page["next_cursor"]) is None:
                    return names

        listed = (await http.get("checkpoints")).json()["checkpoints"]
        assert await found() == [f"{each['base_model']} {each['checkpoint_id']}" for each in listed]
        assert len(listed) == 8
        assert await found(base_models=[OTHER], checkpoint_type="sampler") == [f"{OTHER} sampler_weights/s"]
        assert await found(user_metadata={"mark": "y", "run": "1"}, owner={"type": "accessible"}) == [
            f"{OTHER} weights/y", f"{MODEL} weights/y",
        ]  # fmt: skip
        assert await found(base_models=[]) == await found(user_metadata={"mark": "w"}) == []
        for wrong in ({"project_ids": ["p p"]}, {"owner": {"type": "user", "owner_urns": ["u"]}}, {"limit": 201}):
            assert (await rest.post("checkpoints/search", **wrong)).status_code == 400
        assert (await stranger.post("checkpoints/search", json={})).status_code == 401


async def test_a_gateway_may_serve_for_training_only(tmp_path: Path) -> None:
    """Requests that need a sampler fail at once with its name instead of waiting for one that never starts."""
    async with running(Stand(tmp_path), sampler=[]) as stand:
        assert stand.gateway is not None
        await eventually(lambda: not stand.gateway.components.health.missing())  # type: ignore[union-attr]
        async with stand.http() as http:
            (listed,) = (await http.get("get_server_capabilities")).json()["supported_models"]
        assert (listed["trainable"], listed["sampleable"]) == (True, False)

        def use(client: tinker.ServiceClient) -> Any:
            refused = pytest.raises(
                tinker.BadRequestError, match="'fovea/fake-vl' is served for training only; no base"
            )
            with refused:
                client.create_sampling_client(base_model=MODEL).result()
            training = client.create_lora_training_client(base_model=MODEL, rank=8).result()
            training.forward_backward([text_datum()], "cross_entropy").result()
            training.optim_step(types.AdamParams()).result()
            with pytest.raises(tinker.RequestFailedError, match="is served for training only"):
                training.save_weights_and_get_sampling_client().result()
            kept = training.save_weights_for_sampler("kept").result().path
            with refused:
                client.create_sampling_client(model_path=kept).result()
            return training.save_state("state").result().path

        assert (await stand.sdk(use)).endswith("/weights/state")


async def test_a_sampling_session_of_before_is_refused_where_samplers_are_gone(tmp_path: Path) -> None:
    async with running(Stand(tmp_path)) as stand, stand.http() as http:
        rest = Rest(http)
        await rest.open_session()
        opened = await rest.ok(
            "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=0, base_model=MODEL
        )
        await stand.stop()
        await stand.start(sampler=[])
        answer = await rest.sample(opened["sampling_session_id"], 0)
        assert answer.status_code == 400
        assert "is served for training only" in answer.text
