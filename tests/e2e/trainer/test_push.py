"""Snapshots arrive in samplers over gloo complete and identical; a failing sampler does not affect the others."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import AlreadyExists, Internal, InvalidInput, NotFound, Unavailable
from fovea_trainer.model.packed_model import file_names
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.examples import datums_of, header
from tests.e2e.trainer.receiving_sampler import ReceivingSampler
from tests.waiting import eventually


@pytest.fixture
async def sampler() -> AsyncIterator[ReceivingSampler]:
    started = ReceivingSampler()
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
async def second_sampler() -> AsyncIterator[ReceivingSampler]:
    started = ReceivingSampler()
    await started.start()
    yield started
    await started.stop()


async def test_adapters_go_from_memory_to_memory(qwen3_vl: Bench, sampler: ReceivingSampler) -> None:
    model_id = await qwen3_vl.adapter(vision=True, alpha=16.0)
    first = await qwen3_vl.client.take_snapshot(model_id, f"{model_id}@1")
    await _train(qwen3_vl, model_id)
    folder = qwen3_vl.scratch / f"{model_id}-2"
    second = await qwen3_vl.client.take_snapshot(model_id, f"{model_id}@2", str(folder))
    for snapshot in (second, first):
        response = await qwen3_vl.client.push_snapshot(snapshot.snapshot_id, [sampler.address])
        assert response.snapshot == snapshot
        assert [(r.sampler, r.error, r.pause_s) for r in response.results] == [(sampler.address, "", 0.5)]
    assert (first.step, second.step) == (0, 1)
    assert first.digest != second.digest
    assert len(sampler.joined) == 1, "the group must be kept"
    _assert_equal(sampler.received[second.snapshot_id], load_file(folder / "adapter_model.safetensors"))
    lora = sampler.manifests[first.snapshot_id].lora
    assert (lora.rank, lora.alpha, lora.train_vision) == (8, 16.0, True)


async def test_snapshot_that_a_sampler_holds_is_not_sent_again(qwen3: Bench, sampler: ReceivingSampler) -> None:
    model_id = await qwen3.adapter()
    await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
    await qwen3.client.push_snapshot(f"{model_id}@1", [sampler.address])
    sampler.received.clear()
    response = await qwen3.client.push_snapshot(f"{model_id}@1", [sampler.address])
    assert response.results[0].error == ""
    assert not sampler.received


async def test_full_parameters_and_the_base(
    vlm: Bench, sampler: ReceivingSampler, second_sampler: ReceivingSampler
) -> None:
    """Several samplers at once. The base can also be pushed while a full model is trained."""
    model_id = await vlm.create(None)
    await _train(vlm, model_id)
    folder = vlm.scratch / f"{model_id}-full"
    snapshot = await vlm.client.take_snapshot(model_id, f"{model_id}@1", str(folder))
    assert snapshot.kind == weights_pb2.SNAPSHOT_KIND_FULL
    addresses = [sampler.address, second_sampler.address]
    response = await vlm.client.push_snapshot(snapshot.snapshot_id, addresses)
    assert [result.error for result in response.results] == ["", ""]
    written = _checkpoint(folder)
    for receiver in (sampler, second_sampler):
        _assert_equal(receiver.received[snapshot.snapshot_id], written)
    names = file_names(vlm.reference)
    base = {names[name]: parameter.detach() for name, parameter in vlm.reference.named_parameters()}
    await vlm.client.push_snapshot("", addresses)
    _assert_equal(sampler.received[""], base)
    assert any(not torch.equal(base[name], written[name]) for name in base)
    reloaded = type(vlm.reference).from_pretrained(folder, dtype=torch.float32)
    _assert_equal({names[n]: p.detach() for n, p in reloaded.named_parameters()}, written)


async def test_each_worker_gets_its_rows_of_full_parameters(qwen3_vl: Bench, one_rank: Bench) -> None:
    """Trainers of two ranks and of one. All samplers prove the same digest: one of a single worker, which gets all
    tensors; two that divide them equally; one that divides nothing; and one of an earlier version.
    """
    for bench in (qwen3_vl, one_rank):
        whole, pair, other = ReceivingSampler(), ReceivingSampler(2), ReceivingSampler(2)
        undivided = ReceivingSampler(2, divides=False)
        old = ReceivingSampler(2, is_old=True)
        samplers = (whole, pair, other, undivided, old)
        for sampler in samplers:
            await sampler.start()
        addresses = [sampler.address for sampler in samplers]
        model_id = await bench.create(None)
        await _train(bench, model_id)
        snapshot = await bench.client.take_snapshot(model_id, f"{model_id}@1")
        response = await bench.client.push_snapshot(snapshot.snapshot_id, addresses)
        assert [result.error for result in response.results] == [""] * 5
        expected = whole.received[snapshot.snapshot_id]
        assert whole.received_bytes == [snapshot.size_bytes]
        assert undivided.received_bytes == old.received_bytes == [snapshot.size_bytes] * 2
        for sampler in (pair, other, undivided, old):
            _assert_equal(sampler.received[snapshot.snapshot_id], expected)
        for sampler in (pair, other):
            assert all(0.5 <= size / snapshot.size_bytes < 0.51 for size in sampler.received_bytes)
        await bench.clean()
        adapter = await bench.client.take_snapshot(await bench.adapter(), "adapter@1")
        await bench.client.push_snapshot("adapter@1", addresses)
        assert pair.received_bytes == [adapter.size_bytes] * 2, "each worker stores a whole adapter"
        for sampler in samplers:
            await sampler.stop()
        await bench.clean()


async def test_a_sampler_with_an_invalid_division_is_reported_and_the_others_served(qwen3: Bench) -> None:
    samplers = [ReceivingSampler(2), ReceivingSampler(2)]
    samplers[1].divide_wrongly = True
    for sampler in samplers:
        await sampler.start()
    snapshot = await qwen3.client.take_snapshot(await qwen3.create(None), "full@1")
    response = await qwen3.client.push_snapshot(snapshot.snapshot_id, [one.address for one in samplers], timeout_s=60)
    assert response.results[0].error == ""
    assert "its division of the tensors is invalid" in response.results[1].error
    assert "is divided into 1 parts" in response.results[1].error
    for sampler in samplers:
        await sampler.stop()


async def test_forgotten_snapshot_is_read_back_from_storage(vlm: Bench, sampler: ReceivingSampler) -> None:
    for lora in (weights_pb2.LoraConfig(rank=4, train_mlp=True), None):
        model_id = await vlm.create(lora)
        folder = str(vlm.scratch / f"{model_id}-stored")
        snapshot = await vlm.client.take_snapshot(model_id, f"{model_id}@1", folder)
        await vlm.client.forget_snapshot(snapshot.snapshot_id)
        with pytest.raises(NotFound, match="neither in memory"):
            await vlm.client.push_snapshot(snapshot.snapshot_id, [sampler.address])
        response = await vlm.client.push_snapshot(snapshot.snapshot_id, [sampler.address], uri=folder)
        assert response.snapshot == snapshot
        await vlm.clean()
        with pytest.raises(InvalidInput, match="holds snapshot"):
            await vlm.client.push_snapshot("other@1", [sampler.address], uri=folder)


async def test_dead_sampler_is_reported_and_the_others_served(
    qwen3: Bench, sampler: ReceivingSampler, second_sampler: ReceivingSampler
) -> None:
    model_id = await qwen3.adapter()
    addresses = [second_sampler.address, sampler.address]
    await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
    await qwen3.client.push_snapshot(f"{model_id}@1", addresses)
    await second_sampler.stop()
    await _train(qwen3, model_id)
    await qwen3.client.take_snapshot(model_id, f"{model_id}@2")
    response = await qwen3.client.push_snapshot(f"{model_id}@2", addresses, timeout_s=30)
    assert "does not answer" in response.results[0].error
    assert response.results[1].error == ""
    assert f"{model_id}@2" in sampler.received
    with pytest.raises(Unavailable, match="no sampler received"):
        await qwen3.client.push_snapshot(f"{model_id}@2", [second_sampler.address])
    await _train(qwen3, model_id)


async def test_sampler_that_refuses_or_differs_is_reported(
    qwen3: Bench, sampler: ReceivingSampler, second_sampler: ReceivingSampler
) -> None:
    model_id = await qwen3.adapter()
    await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
    second_sampler.refuse_manifest = True
    response = await qwen3.client.push_snapshot(
        f"{model_id}@1", [sampler.address, second_sampler.address], timeout_s=30
    )
    assert [result.error for result in response.results] == ["", "manifest: no room"]
    with pytest.raises(InvalidInput, match="manifest: no room"):  # no sampler will ever come, so do not retry
        await qwen3.client.push_snapshot(f"{model_id}@1", [second_sampler.address], timeout_s=30)
    second_sampler.refuse_manifest = False
    second_sampler.lie_about_digest = True
    with pytest.raises(Internal, match="received data with digest 0000"):
        await qwen3.client.push_snapshot(f"{model_id}@1", [second_sampler.address])
    second_sampler.lie_about_digest = False
    second_sampler.manifests.clear()
    await qwen3.client.push_snapshot(f"{model_id}@1", [second_sampler.address])


@pytest.mark.parametrize("weakness", ["refuse_join", "break_off"])
async def test_sampler_that_fails_on_the_way_does_not_cost_the_others(
    qwen3: Bench, sampler: ReceivingSampler, second_sampler: ReceivingSampler, weakness: str
) -> None:
    setattr(second_sampler, weakness, True)
    for lora in (weights_pb2.LoraConfig(rank=2, train_mlp=True), None):
        model_id = await qwen3.create(lora)
        await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
        response = await qwen3.client.push_snapshot(
            f"{model_id}@1", [second_sampler.address, sampler.address], timeout_s=60
        )
        assert response.results[0].error in ("no route to the store", "the engine died")
        assert response.results[1].error == ""
        assert f"{model_id}@1" in sampler.received
        kind = Internal if weakness == "break_off" else Unavailable
        with pytest.raises(kind, match="no sampler received"):
            await qwen3.client.push_snapshot(f"{model_id}@1", [second_sampler.address], timeout_s=60)
        await qwen3.clean()


async def test_sampler_that_was_restarted_joins_anew(qwen3: Bench, sampler: ReceivingSampler) -> None:
    model_id = await qwen3.adapter()
    await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
    await qwen3.client.push_snapshot(f"{model_id}@1", [sampler.address])
    sampler.instance_id = uuid.uuid4().hex
    sampler.manifests.clear()
    await qwen3.client.push_snapshot(f"{model_id}@1", [sampler.address])
    assert len(sampler.joined) == 2


async def test_an_absent_sampler_delays_no_other_push(
    qwen3: Bench, sampler: ReceivingSampler, second_sampler: ReceivingSampler
) -> None:
    model_id = await qwen3.adapter()
    await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
    second_sampler.may_join.clear()
    slow = asyncio.create_task(qwen3.client.push_snapshot(f"{model_id}@1", [second_sampler.address]))
    await second_sampler.asked_to_join.wait()
    await qwen3.client.push_snapshot(f"{model_id}@1", [sampler.address])
    assert f"{model_id}@1" in sampler.received
    assert not slow.done()
    second_sampler.may_join.set()
    await slow
    assert f"{model_id}@1" in second_sampler.received


async def test_a_full_snapshot_stays_until_its_push_is_over(qwen3: Bench, sampler: ReceivingSampler) -> None:
    """The second snapshot follows the first one's description and precedes its broadcast, with memory for one."""
    model_id = await qwen3.create(None)
    await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
    sampler.may_join.clear()
    pushing = asyncio.create_task(qwen3.client.push_snapshot(f"{model_id}@1", [sampler.address]))
    await sampler.asked_to_join.wait()
    await _train(qwen3, model_id)
    await qwen3.client.take_snapshot(model_id, f"{model_id}@2")
    sampler.may_join.set()
    response = await pushing
    assert response.results[0].error == ""
    with pytest.raises(NotFound, match="neither in memory"):
        await qwen3.client.push_snapshot(f"{model_id}@1", [sampler.address])
    await qwen3.client.push_snapshot(f"{model_id}@2", [sampler.address])


async def test_groups_with_samplers_that_are_gone_are_closed(qwen3: Bench, sampler: ReceivingSampler) -> None:
    model_id = await qwen3.adapter()
    await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
    rank = psutil.Process(qwen3.process.rank_pids()[0])

    def connections() -> int:
        return len([one for one in rank.net_connections() if one.status != psutil.CONN_LISTEN])

    await qwen3.client.push_snapshot(f"{model_id}@1", [sampler.address])
    first = connections()
    for _ in range(2):
        sampler.restart()
        await qwen3.client.push_snapshot(f"{model_id}@1", [sampler.address])
        await eventually(lambda: connections() <= first)  # a closed one may stay for a moment on a busy machine


async def test_snapshot_id_never_names_other_weights(qwen3: Bench) -> None:
    model_id = await qwen3.adapter()
    first = await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
    assert await qwen3.client.take_snapshot(model_id, f"{model_id}@1") == first
    await _train(qwen3, model_id)
    with pytest.raises(AlreadyExists, match="a snapshot cannot be changed"):
        await qwen3.client.take_snapshot(model_id, f"{model_id}@1")
    await qwen3.client.take_snapshot(model_id, f"{model_id}@2")


async def _train(bench: Bench, model_id: str) -> None:
    datums = datums_of(bench.images, "text" if bench.kind == "qwen3" else "mixed")
    await bench.client.forward_backward(header(model_id, len(datums)), datums)
    await bench.client.optim_step(model_id, adam(learning_rate=1e-2))


def _checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
