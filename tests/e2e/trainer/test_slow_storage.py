"""Recovery of many models in a whole trainer, on storage that is slower than their snapshots: writing is limited by a
byte credit.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from textwrap import dedent
from typing import TypeVar

import pytest

import fovea_tinyvlm
from fovea.api.v1 import weights_pb2
from fovea.wire.errors import StorageBehind
from tests.e2e.trainer.conftest import adam
from tests.e2e.trainer.trainer_process import TrainerProcess
from tests.waiting import eventually

T = TypeVar("T")
MODELS, STEPS, BOUND_MIB = 6, 12, 2

CREDIT_DISK = """
    import time
    from pathlib import Path
    from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

    written = 0

    class CreditFile(LocalFileOpener):
        def write(self, data):
            global written
            written += len(data)
            while written > int(Path(CREDIT).read_text() or 0):
                time.sleep(0.005)
            return self.f.write(data)

    class CreditDisk(LocalFileSystem):
        protocol = ("credit",)

        @classmethod
        def _strip_protocol(cls, path):
            return LocalFileSystem._strip_protocol(str(path).removeprefix("credit://"))

        def unstrip_protocol(self, name):
            return f"credit://{self._strip_protocol(name)}"

        def _open(self, path, mode="rb", block_size=None, **more):
            kind = CreditFile if "w" in mode else LocalFileOpener
            return kind(path, mode, fs=self, **more)
"""


def install(folder: Path, credit: Path) -> None:
    """Installs a package with the fsspec protocol `credit`: a local disk that writes at most the bytes that a file
    grants.
    """
    about = folder / "credit_disk-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: credit-disk\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\ncredit = credit_disk:CreditDisk\n")
    (folder / "credit_disk.py").write_text(f"CREDIT = {str(credit)!r}\n{dedent(CREDIT_DISK)}")


async def test_every_model_gets_points_on_storage_that_takes_less_than_their_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credit, granted, refused = tmp_path / "credit", 0, 0
    install(tmp_path / "packages", credit)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)

    def grant(size_bytes: int) -> None:
        nonlocal granted
        granted += size_bytes
        aside = credit.with_suffix(".new")
        aside.write_text(str(granted))
        aside.replace(credit)

    grant(0)
    (tmp_path / "trainer").mkdir()
    arguments = ("--recovery", f"credit://{tmp_path}/recovery", "--snapshot-memory-mib", str(BOUND_MIB))
    trainer = TrainerProcess(fovea_tinyvlm.ensure("qwen3"), tmp_path / "trainer" / "trainer.log", *arguments, ranks=1)
    try:
        client = await trainer.ready()
        lora = weights_pb2.LoraConfig(rank=32, train_attention=True, train_mlp=True, train_unembedding=True)
        models = [f"m{number}" for number in range(MODELS)]
        for model_id in models:
            await client.create_model(model_id, lora)

        async def patiently(call: Callable[[], Awaitable[T]]) -> T:
            nonlocal refused
            while True:
                try:
                    return await call()
                except StorageBehind:
                    refused += 1
                    grant(2**16)
                    await asyncio.sleep(0.05)

        async def train(model_id: str) -> None:
            for step in range(1, STEPS + 1):
                await patiently(lambda step=step: client.optim_step(model_id, adam(), None, step))
                name = f"{model_id}@{step}"
                taken = await patiently(lambda name=name: client.take_snapshot(model_id, name))
                grant(taken.size_bytes * 4 // 5)

        await asyncio.gather(*map(train, models))
        points = dict((await client.info()).durable_seq_ids)
        assert points.keys() == set(models), trainer.log.read_text()[-2000:]
        assert refused
        grant(2**40)

        async def is_durable() -> bool:
            return dict((await client.info()).durable_seq_ids) == dict.fromkeys(models, STEPS)

        await eventually(is_durable)
        await client.close()
    finally:
        grant(2**40)
        trainer.stop()


async def test_models_train_on_and_are_durable_later_while_storage_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credit = tmp_path / "credit"
    install(tmp_path / "packages", credit)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)
    credit.write_text("0")
    (tmp_path / "trainer").mkdir()
    arguments = ("--recovery", f"credit://{tmp_path}/recovery", "--recovery-most-lag-s", "0.02")
    trainer = TrainerProcess(fovea_tinyvlm.ensure("qwen3"), tmp_path / "trainer" / "trainer.log", *arguments, ranks=1)
    try:
        client = await trainer.ready()
        models = ("one", "two", "three")
        for model_id in models:
            await client.create_model(model_id, weights_pb2.LoraConfig(rank=32, train_attention=True, train_mlp=True))

        async def stepped(model_id: str, seq_id: int) -> bool:
            try:
                return (await client.optim_step(model_id, adam(), None, seq_id)).step == seq_id
            except StorageBehind:
                return False

        for model_id in models:
            for seq_id in (1, 2, 3):
                await eventually(lambda model_id=model_id, seq_id=seq_id: stepped(model_id, seq_id))
            assert (await client.take_snapshot(model_id, f"{model_id}@3")).size_bytes
        info = await client.info()
        assert "has not returned for" in info.recovery_failure
        assert not info.durable_seq_ids
        credit.write_text(str(2**40))

        async def is_durable() -> bool:
            info = await client.info()
            return dict(info.durable_seq_ids) == dict.fromkeys(models, 3) and not info.recovery_failure

        await eventually(is_durable)
        await client.close()
    finally:
        credit.write_text(str(2**40))
        trainer.stop()


async def test_others_train_while_a_state_and_a_snapshot_are_saved_on_slow_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credit, place = tmp_path / "credit", f"credit://{tmp_path}/checkpoints"
    install(tmp_path / "packages", credit)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)
    credit.write_text("0")
    (tmp_path / "trainer").mkdir()
    trainer = TrainerProcess(
        fovea_tinyvlm.ensure("qwen3"), tmp_path / "trainer" / "trainer.log", "--checkpoints", place, ranks=1
    )
    try:
        client = await trainer.ready()
        lora = weights_pb2.LoraConfig(rank=32, train_attention=True, train_mlp=True)
        for model_id in ("saved", "named", "other"):
            await client.create_model(model_id, lora)
        await client.optim_step("saved", adam(), None, 1)
        saving = asyncio.create_task(client.save_state("saved", f"{place}/state"))
        naming = asyncio.create_task(client.take_snapshot("named", "named@1", f"{place}/snapshot"))
        steps = [(await client.optim_step("other", adam(), None, seq_id)).step for seq_id in range(1, 11)]
        await client.optim_step("saved", adam(), None, 2)  # the save has copied its weights
        assert steps == list(range(1, 11))
        assert not saving.done()
        assert not naming.done()
        credit.write_text(str(2**40))
        assert (await saving).step == 1
        snapshot = await naming
        assert await client.load_state("other", f"{place}/state", optimizer=True) == 1
        assert (tmp_path / "checkpoints" / "snapshot" / "adapter_model.safetensors").stat().st_size > 0
        assert snapshot.snapshot_id == "named@1"
        await client.close()
    finally:
        credit.write_text(str(2**40))
        trainer.stop()
