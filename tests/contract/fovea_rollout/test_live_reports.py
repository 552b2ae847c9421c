"""A loop's live reports arrive with the samples that they belong to. A server without the route causes no error."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import tinker

from fovea_rollout.evaluation import Evaluation
from fovea_rollout.loop.live_reports import LiveReports
from fovea_rollout.loop.step_report import Agreement, StepReport
from fovea_rollout.policies.policy import Policy
from fovea_rollout.trajectory import Failure, Trajectory
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest
from tests.unit.fovea_rollout.rollouts import FourTokenPictures, rollout, turn


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with running(Stand(tmp_path)) as stand:
        yield stand


def played(conversation: str, sequence_id: str, reward: float) -> Trajectory:
    """A one-turn rollout that a server has sampled under this name."""
    found = turn([1, 2, 3], [4, 5, 6, 7], [-0.25] * 4, reward)
    named = replace(found, sampled=replace(found.sampled, sequence_id=sequence_id))
    return rollout(named, conversation=conversation)


def report(*trajectories: Trajectory, kl: float | None = None) -> StepReport:
    policy: Policy = FourTokenPictures()
    return StepReport(
        step=0, reward_mean=0.5, signal_share=1.0, lag=0, sampled_tokens=8, trained_tokens=8,
        agreement=Agreement(kl=0.002, largest_log_ratio=0.1), moved_kl=None, rate_share=1.0, base_kl=kl, metrics={},
        seconds={}, failures=(), trajectories=(trajectories,), data=(), policy=policy,
    )  # fmt: skip


async def test_rewards_kl_and_right_answers_arrive_beside_their_samples(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])
    await rest.result((await rest.optim_step(model_id, 2))["request_id"])
    sampling_id = await rest.snapshot(model_id, 3)
    sample = (await rest.sample(sampling_id, 0)).json()["request_id"]
    await rest.result(sample)

    live = LiveReports(stand.url, KEY, model_id)
    failed = rollout(conversation="failed", failure=Failure("reset", "OSError", ""))
    told = replace(report(played("a", f"{sample}:0", 1.0), failed), evaluation=Evaluation(0.75, {}, (), ()))
    await live.send(told, {"a": "seven", "failed": "nine"})
    curves = (await rest.http.get(f"live/curves/{model_id}")).json()["curves"]
    assert {name: curves[name] for name in ("reward", "held_out_reward", "kl", "signal_share", "lag")} == {
        "reward": {"step": [1], "mean": [0.5]},
        "held_out_reward": {"step": [1], "mean": [0.75]},
        "kl": {"step": [1], "mean": [0.002]},
        "signal_share": {"step": [1], "mean": [1.0]},
        "lag": {"step": [1], "mean": [0.0]},
    }
    (group,) = (await rest.http.get("live/samples", params={"source": model_id})).json()["groups"]
    assert (group["truth"], group["drawn"][0]["reward"]) == ("seven", 1.0)


async def test_held_out_samples_arrive_as_such_with_reward_right_answer_and_the_loops_step(
    stand: Stand, rest: Rest
) -> None:
    model_id = await rest.create_model()
    sampling_id = await rest.snapshot(model_id, 1)
    ids = [(await rest.sample(sampling_id, number)).json()["request_id"] for number in range(2)]
    for sample in ids:
        await rest.result(sample)
    held_out = Evaluation(0.75, {}, (), (played("held-out-0/0", f"{ids[1]}:0", 0.75),))
    told = replace(report(played("group-0/0", f"{ids[0]}:0", 1.0), kl=0.25), step=8, evaluation=held_out)
    await LiveReports(stand.url, KEY, model_id).send(told, {"held-out-0/0": "eight"})
    (group,) = (await rest.http.get("live/samples", params={"source": model_id})).json()["groups"]
    assert [(one["reward"], one["held_out"]) for one in group["drawn"]] == [(1.0, False), (0.75, True)]
    assert group["truth"] == "eight"
    found = (await rest.http.get(f"live/curves/{model_id}")).json()
    assert found["curves"]["loop_step"]["mean"] == [9.0]
    assert sum(map(sum, found["rewards"]["counts"])) == 1, "the histogram is of the trained rollouts"


async def test_more_samples_than_one_report_may_have_all_arrive(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    sampling_id = await rest.snapshot(model_id, 1)
    sample = (await rest.sample(sampling_id, 0)).json()["request_id"]
    await rest.result(sample)
    others = [played(f"group-0/{number}", f"s:{number}", 0.0) for number in range(1100)]
    await LiveReports(stand.url, KEY, model_id).send(report(*others, played("a", f"{sample}:0", 1.0)), {})
    (group,) = (await rest.http.get("live/samples", params={"source": model_id})).json()["groups"]
    assert group["drawn"][0]["reward"] == 1.0


async def test_the_distance_of_the_base_model_is_reported_if_known(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await LiveReports(f"{stand.url}/", KEY, model_id).send(report(kl=0.25), {})
    assert (await rest.http.get(f"live/curves/{model_id}")).json()["curves"]["kl"]["mean"] == [0.25]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
async def test_numbers_that_are_not_finite_are_left_out(stand: Stand, rest: Rest, number: float) -> None:
    model_id = await rest.create_model()
    live = LiveReports(stand.url, KEY, model_id)
    await live.send(replace(report(played("a", "s:0", number), kl=number), signal_share=number), {"a": "seven"})
    curves = (await rest.http.get(f"live/curves/{model_id}")).json()["curves"]
    assert (curves["reward"]["mean"], "kl" in curves, "signal_share" in curves) == ([0.5], False, False)


async def test_a_server_that_takes_no_reports_is_asked_once(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fovea_rollout")
    for url, level, words in (
        (f"{stand.url}/elsewhere", "INFO", "the server has no live page for this run"),
        ("http://127.0.0.1:1", "WARNING", "metrics are not reported to the live page from here on"),
    ):
        live = LiveReports(url, KEY, "sess-1:train:0")
        caplog.clear()
        await live.send(report(), {})
        await live.send(report(), {})
        (record,) = [each for each in caplog.records if each.name.startswith("fovea_rollout")]
        assert (record.levelname, words in record.getMessage()) == (level, True)
        assert "\n" not in record.getMessage()


async def test_a_name_that_a_person_gave_stays(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    live = LiveReports(stand.url, KEY, model_id)
    own = {"name": "mine", "notes": "do not touch", "tags": ["best"]}
    await rest.http.put(f"live/runs/{model_id}", json=own)
    await live.name_run("out")
    kept = await rest.http.put(f"live/runs/{model_id}", json={"name": "x", "only_if_none": True})
    assert {name: kept.json()[name] for name in own} == own


async def test_a_run_that_cannot_be_named_is_still_reported(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    live = LiveReports(stand.url, KEY, model_id)
    live._model_id = "sess-1:train:0"
    await live.name_run("out")
    live._model_id = model_id
    await live.send(report(), {})
    assert "reward" in (await rest.http.get(f"live/curves/{model_id}")).json()["curves"]


async def test_reports_go_where_the_training_client_is_connected(
    monkeypatch: pytest.MonkeyPatch, stand: Stand, rest: Rest
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", f"{stand.url}/elsewhere")
    monkeypatch.setenv("TINKER_API_KEY", "tml-elsewhere")

    def use(service: tinker.ServiceClient) -> str:
        training = service.create_lora_training_client(base_model=MODEL).result()
        live = LiveReports.of(training)
        live.send_metrics({"accuracy": 0.75})
        asyncio.run(live.send(report(), {}))
        return str(training.model_id)

    model_id = await stand.sdk(use)
    curves = (await rest.http.get(f"live/curves/{model_id}")).json()["curves"]
    assert (curves["accuracy"]["mean"], curves["reward"]["mean"]) == ([0.75], [0.5])


async def test_a_run_is_named_unless_its_metadata_names_it(stand: Stand) -> None:
    def use(service: tinker.ServiceClient) -> list[str]:
        made = [service.create_lora_training_client(MODEL, user_metadata=one).result() for one in (None, {"name": "a"})]
        for training in made:
            asyncio.run(LiveReports.of(training).name_run("walker"))
        return [str(training.model_id) for training in made]

    unnamed, named = await stand.sdk(use)
    assert stand.gateway is not None
    labels = (await stand.gateway.components.live_view.sections(None))["labels"]["labels"]
    assert (labels[unnamed]["name"], named in labels) == ("walker", False)
