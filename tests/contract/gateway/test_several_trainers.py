"""Two trainers of one base model: models are placed; drained and lost trainers hand theirs over; clients see only a
pause.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import tinker

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import FailedPrecondition
from fovea_gateway.database.schema import drained_trainers
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL, Context
from tests.contract.gateway.recovering import RecoveringTrainer
from tests.contract.gateway.requests import Rest, text_datum
from tests.waiting import eventually

# ruff: noqa: N802 - gRPC names the methods.


class SharingTrainer(RecoveringTrainer):
    """A trainer that shares its recovery storage with others."""

    store = "shared"
    max_models = 0
    keeps_recovery = True

    async def GetTrainerInfo(self, request: Any, context: Context) -> trainer_pb2.GetTrainerInfoResponse:
        info = await super().GetTrainerInfo(request, context)
        info.recovery_store, info.max_models = self.store, self.max_models
        info.keeps_recovery = self.keeps_recovery
        info.model_bytes.update(dict.fromkeys(self.models, 1000))
        return info

    async def CreateModel(self, request: Any, context: Context) -> trainer_pb2.CreateModelResponse:
        if self.max_models and request.model_id not in self.models and len(self.models) >= self.max_models:
            raise FailedPrecondition("all places are taken")
        return await super().CreateModel(request, context)

    async def DeleteModel(self, request: Any, context: Context) -> trainer_pb2.DeleteModelResponse:
        kept = self.points.get(request.model_id) if request.keeps_recovery else None
        answer = await super().DeleteModel(request, context)
        self.last_seq_ids.pop(request.model_id, None)
        if kept:
            self.points[request.model_id] = kept
        return answer


class TwoTrainers(Stand):
    """A gateway with two trainers that share their recovery storage."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self.trainer: SharingTrainer = SharingTrainer(lambda: self.samplers)
        self.other = SharingTrainer(lambda: self.samplers)
        self.other.points, self.other.kept_snapshots = self.trainer.points, self.trainer.kept_snapshots

    @property
    def trainers(self) -> list[SharingTrainer]:
        return [self.trainer, self.other]

    async def start_fakes(self) -> None:
        await super().start_fakes()
        await self.other.start()

    async def stop_fakes(self) -> None:
        self.other.open.set()
        await self.other.stop()
        await super().stop_fakes()

    async def start(self, **overrides: Any) -> None:
        await super().start(trainer=[self.trainer.address, self.other.address], **overrides)

    async def drain(self, *trainers: SharingTrainer) -> None:
        """Drains trainers as `fovea drain` does."""
        assert self.gateway is not None
        rows = [{"address": trainer.address} for trainer in trainers]

        def job(connection: sa.Connection) -> None:
            connection.execute(sa.delete(drained_trainers))
            if rows:
                connection.execute(sa.insert(drained_trainers), rows)

        await self.gateway.components.database.write(job)

    def draining(self) -> list[str]:
        """Addresses that the gateway is draining."""
        assert self.gateway is not None
        return [link.address for link in self.gateway.components.base_models.trainers if link.is_draining]

    def holder(self, model_id: str) -> SharingTrainer:
        (found,) = [trainer for trainer in self.trainers if model_id in trainer.models]
        return found


@pytest.fixture
async def stand(tmp_path: Path, database_url: str) -> AsyncIterator[TwoTrainers]:
    async with running(TwoTrainers(tmp_path), database_url=database_url) as stand:
        assert isinstance(stand, TwoTrainers)
        yield stand


Answers = list[dict[str, Any]]


_NUMBERS = itertools.count()


async def created(rest: Rest, count: int = 1) -> list[str]:
    """Creates models in one session."""
    if not rest.session_id:
        await rest.open_session()
    return await asyncio.gather(*(rest.create_model(next(_NUMBERS)) for _ in range(count)))


async def model_of(rest: Rest) -> str:
    """Creates a model."""
    return (await created(rest))[0]


async def steps(rest: Rest, model_id: str, first: int, count: int) -> Answers:
    """Submits `count` losses and as many steps, one after another."""
    found = []
    for seq_id in range(first, first + 2 * count, 2):
        sent = await rest.forward_backward(model_id, seq_id, data=[text_datum(4 + seq_id % 5)])
        found.append(await rest.result(sent.json()["request_id"]))
        found.append(await rest.result((await rest.optim_step(model_id, seq_id + 1, learning_rate=0.1))["request_id"]))
    return found


async def test_models_are_placed_by_bytes_and_places(stand: TwoTrainers, rest: Rest) -> None:
    ids = await created(rest, 8)
    assert [len(trainer.models) for trainer in stand.trainers] == [4, 4]
    assert len({*ids}) == 8
    stand.other.max_models = 4
    more = await created(rest, 2)
    assert all(stand.holder(model_id) is stand.trainer for model_id in more), (
        "the other trainer must have no place left"
    )


async def test_a_trainer_that_refuses_a_model_is_passed_over(stand: TwoTrainers, rest: Rest) -> None:
    await created(rest, 2)
    stand.trainer.failures["CreateModel"] = [FailedPrecondition("full parameters need the trainer for themselves")] * 9
    more = await created(rest, 3)
    assert all(stand.holder(model_id) is stand.other for model_id in more)


async def test_commands_go_to_the_trainer_of_their_model(stand: TwoTrainers, rest: Rest) -> None:
    ids = await created(rest, 4)
    found = await asyncio.gather(*(steps(rest, model_id, 1, 2) for model_id in ids))
    assert all(answers == found[0] for answers in found)
    for trainer in stand.trainers:
        stepped = {request.model_id for request in trainer.of("OptimStep")}
        assert stepped == set(trainer.models)
        assert len(stepped) == 2


async def test_owners_share_each_trainer_and_wait_for_no_other(tmp_path: Path) -> None:
    keys = ["alice=tml-alice", "bob=tml-bob"]
    async with running(TwoTrainers(tmp_path), api_key=keys) as stand:
        assert isinstance(stand, TwoTrainers)
        async with stand.http("tml-alice") as hers, stand.http("tml-bob") as his:
            alice, bob = Rest(hers), Rest(his)
            flood, quiet = await created(alice, 12), await created(bob, 2)
            assert {stand.holder(model_id) for model_id in quiet} == set(stand.trainers)
            for trainer in stand.trainers:
                trainer.open.clear()
            sent = [await alice.forward_backward(model_id, 1) for model_id in flood]
            await eventually(lambda: all(trainer.waiting == 1 for trainer in stand.trainers))
            sent_by_bob = [await bob.forward_backward(model_id, 1) for model_id in quiet]
            stand.trainer.open.set()
            first = quiet[0] if stand.holder(quiet[0]) is stand.trainer else quiet[1]
            answer = sent_by_bob[quiet.index(first)].json()["request_id"]
            assert "metrics" in await bob.result(answer), "the other trainer, which is stopped, must block it"
            stand.other.open.set()
            for rest, answers in ((alice, sent), (bob, sent_by_bob)):
                for one in answers:
                    assert "metrics" in await rest.result(one.json()["request_id"])
    for trainer in stand.trainers:
        begun = [header.model_id for header, _ in trainer.of("ForwardBackward")]
        assert [model_id in quiet for model_id in begun].index(True) == 1, (
            "before the requests that the other owner queued"
        )
        assert len(begun) == 7


@pytest.mark.parametrize("is_disk_slow", [False, True])
@pytest.mark.parametrize("way", ["drained", "lost"])
async def test_models_of_a_trainer_that_goes_continue_in_the_other(
    stand: TwoTrainers, rest: Rest, way: str, is_disk_slow: bool
) -> None:
    expected = await steps(rest, await model_of(rest), 1, 6)
    for trainer in stand.trainers:
        trainer.is_disk_slow = is_disk_slow
    ids = await created(rest, 7)
    stand.trainer.open.clear()
    training = [asyncio.create_task(steps(rest, model_id, 1, 6)) for model_id in ids]
    await eventually(lambda: stand.trainer.waiting > 0)
    if way == "drained":
        await stand.drain(stand.trainer)
        stand.trainer.open.set()
    else:
        await stand.trainer.stop()
    assert await asyncio.gather(*training) == [expected] * 7
    await eventually(lambda: set(ids) <= set(stand.other.models))
    if way == "drained":
        await eventually(lambda: not stand.trainer.models)
    done = Counter((request.model_id, request.seq_id) for request in stand.other.of("OptimStep"))
    assert max(done.values()) == 1
    await steps(rest, ids[0], 13, 1)


async def test_a_trainer_that_was_cut_off_frees_its_copies_and_receives_models_again(
    stand: TwoTrainers, rest: Rest
) -> None:
    expected = await steps(rest, await model_of(rest), 1, 6)
    model_id = await model_of(rest)
    home = stand.holder(model_id)
    away = next(trainer for trainer in stand.trainers if trainer is not home)
    found = await steps(rest, model_id, 1, 2)
    await home.stop()  # The process keeps running.
    found += await steps(rest, model_id, 5, 2)
    assert model_id in home.models
    assert model_id in away.models
    await home.start()
    await eventually(lambda: model_id not in home.models)
    assert model_id in stand.trainer.points, "its recovery data must stay"
    await stand.drain(away)
    await eventually(lambda: stand.draining() == [away.address])
    found += await steps(rest, model_id, 9, 2)
    assert stand.holder(model_id) is home
    assert found == expected


async def test_an_idle_model_leaves_a_drained_trainer_and_the_gateway_remembers(stand: TwoTrainers, rest: Rest) -> None:
    ids = await created(rest, 4)
    await asyncio.gather(*(steps(rest, model_id, 1, 1) for model_id in ids))
    await stand.drain(stand.trainer)
    await eventually(lambda: not stand.trainer.models)
    await stand.stop()
    await stand.start()
    assert await model_of(rest) in stand.other.models
    await asyncio.gather(*(steps(rest, model_id, 3, 1) for model_id in ids))
    assert not stand.trainer.models
    assert set(ids) <= set(stand.other.models)
    await stand.drain()
    await eventually(lambda: not stand.draining())
    assert await model_of(rest) in stand.trainer.models


async def test_snapshots_are_pushed_by_the_trainer_of_their_model(stand: TwoTrainers) -> None:
    def use(client: tinker.ServiceClient) -> list[str]:
        models = [client.create_lora_training_client(base_model=MODEL, rank=8).result() for _ in range(2)]
        params = tinker.SamplingParams(max_tokens=3, seed=1)
        for model in models:
            sampling = model.save_weights_and_get_sampling_client().result()
            sampling.sample(tinker.ModelInput.from_ints([1, 2]), num_samples=1, sampling_params=params).result()
        return [str(model._guaranteed_model_id()) for model in models]

    before = {trainer: set(trainer.models) for trainer in stand.trainers}
    ids = await stand.sdk(use)
    assert not any(before.values())
    for trainer in stand.trainers:
        created = [request.model_id for request in trainer.of("CreateModel")]
        pushed = {request.snapshot_id.partition("@")[0] for request in trainer.of("PushSnapshot")}
        assert len(created) == 1
        assert pushed == set(created) <= set(ids)


async def test_a_snapshot_of_a_lost_trainer_is_pushed_by_the_other(stand: TwoTrainers, rest: Rest) -> None:
    model_id = await model_of(rest)
    await steps(rest, model_id, 1, 1)
    saved = await rest.snapshot(model_id, 3)
    home = stand.holder(model_id)
    away = next(trainer for trainer in stand.trainers if trainer is not home)
    await home.stop()
    for sampler in stand.samplers:
        sampler.restart()
    await rest.result((await rest.sample(saved, 0)).json()["request_id"])
    assert [request.snapshot_id for request in away.of("PushSnapshot")] == [f"{model_id}@1"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("files", "has another config.json than the trainer at"),
        ("store", "has another recovery storage than the trainer at"),
        ("none", "has no --recovery: several trainers need one shared recovery storage"),
    ],
)
async def test_a_trainer_that_cannot_take_over_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str, words: str
) -> None:
    stand = TwoTrainers(tmp_path)
    if wrong == "files":
        stand.trainer.model_files = {"config.json": "a"}
        stand.other.model_files = {"config.json": "b"}
    elif wrong == "store":
        stand.other.store = "another"
    else:
        stand.other.keeps_recovery = False
    with caplog.at_level(logging.WARNING):
        async with running(stand), stand.http() as http:
            rest = Rest(http)
            ids = await created(rest, 3)
            assert len(stand.trainer.models) + len(stand.other.models) == len(ids)
            assert 0 in (len(stand.trainer.models), len(stand.other.models)), "only one of them may be used"
    assert any(words in record.getMessage() for record in caplog.records)
    caplog.clear()


async def test_the_page_shows_the_trainer_of_each_model(stand: TwoTrainers, rest: Rest) -> None:
    ids = await created(rest, 2)
    assert stand.gateway is not None
    await stand.drain(stand.other)
    await eventually(lambda: stand.other.address in stand.draining())
    await eventually(lambda: not stand.other.models)
    view = stand.gateway.components.live_view
    trainers = (await view.sections(None))["services"]["base_models"][0]["trainers"]
    assert [(one["address"], one["draining"]) for one in trainers] == [
        (stand.trainer.address, False), (stand.other.address, True),
    ]  # fmt: skip

    async def where() -> set[int | None]:
        shown = (await view.sections(None))["models"]
        return {shown[model_id]["trainer"] for model_id in ids}

    async def are_shown() -> bool:
        return await where() == {1, None}  # None: the model is suspended until its client returns.

    await eventually(are_shown)
