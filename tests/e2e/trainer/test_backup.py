"""Backup and upgrade, with a real PostgreSQL, a real gateway and a real trainer of two ranks.

A backup from the middle of a training restores to a working Fovea, and tables of the previous schema are migrated with
their contents.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import fovea_tinyvlm
from fovea_gateway.database.schema import REVISION
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_process import Process
from tests.e2e.trainer.copied_trainer import CopiedTrainer
from tests.postgresql import Server, find_programs
from tests.waiting import eventually

_FILES = ("checkpoints", "recovery")


class Site:
    """A gateway on PostgreSQL and a trainer, with `checkpoints` and `recovery` in a folder."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self._url = folder, url
        self._stand = Stand(folder / "state")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rest]:
        """Starts both, yields a client without a session, and stops both as SIGTERM does."""
        folders = [argument for name in _FILES for argument in (f"--{name}", str(self.folder / name))]
        await self._stand.start_fakes()
        trainer = CopiedTrainer(fovea_tinyvlm.ensure("qwen3"), self.folder / "trainer.log", *folders)
        gateway = Process(self._stand)
        try:
            async with await trainer.ready():
                where: dict[str, Any] = {"checkpoint_dir": self.folder / "checkpoints", "database_url": self._url}
                process = await gateway.start(trainer=trainer.address, **where)
            async with gateway.http() as http:
                yield Rest(http)
            process.terminate()
            assert await process.wait() == 0
        finally:
            if gateway.process is not None and gateway.process.returncode is None:
                gateway.process.kill()
                await gateway.process.wait()
            trainer.stop()
            await self._stand.stop_fakes()


class Training:
    """A client's model and the number of its last command."""

    def __init__(self, rest: Rest, model_id: str, seq_id: int = 0) -> None:
        self.rest, self.model_id, self.seq_id = rest, model_id, seq_id

    async def run(self, route: str, **body: object) -> dict[str, Any]:
        """Runs a command; returns its result."""
        self.seq_id += 1
        accepted = await self.rest.ok(route, model_id=self.model_id, seq_id=self.seq_id, **body)
        return await self.result(str(accepted["request_id"]))

    async def step(self) -> str:
        """Runs a loss and an optimizer step. Returns the id of the loss."""
        request_id = await self.loss()
        await self.run("optim_step", adam_params={"learning_rate": 1e-2})
        return request_id

    async def loss(self) -> str:
        """Computes a loss; returns its request id."""
        self.seq_id += 1
        accepted = (await self.rest.forward_backward(self.model_id, self.seq_id)).json()
        await self.result(accepted["request_id"])
        return str(accepted["request_id"])

    async def result(self, request_id: str) -> dict[str, Any]:
        """Returns the result of a request, which must not fail."""
        answer = await self.rest.result(request_id)
        assert "error" not in answer, answer
        return answer


async def _begin(rest: Rest) -> Training:
    await rest.open_session()
    return Training(rest, await rest.create_model(rank=4))


def _dump(url: str, file: Path) -> None:
    """Dumps one schema with `pg_dump` while a gateway uses it."""
    schema = url.rpartition("%3D")[2]
    _program("pg_dump", f"--schema={schema}", f"--file={file}", url.partition("?")[0])


def _restore(url: str, file: Path) -> None:
    _program("psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={file}", url.partition("?")[0])


def _program(name: str, *arguments: str) -> None:
    programs = find_programs()
    assert programs is not None
    done = subprocess.run([str(programs / name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _downgrade(url: str, revision: int) -> None:
    command = [sys.executable, "-m", "fovea_gateway.database.migrations", "--to", str(revision)]
    done = subprocess.run(command, env=os.environ | {"FOVEA_GATEWAY_DATABASE_URL": url}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _copy(source: Path, target: Path) -> None:
    """Copies files in use. Files that are replaced meanwhile are missing, as in any backup of a live folder."""
    done = subprocess.run(["cp", "-a", str(source), str(target)], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert all("No such file or directory" in line for line in lines), done.stderr


@pytest.mark.slow
async def test_a_backup_taken_while_training_restores(postgresql: Server, tmp_path: Path) -> None:
    """After the loss of the whole site, answers, checkpoints and their weights are restored, and new work runs."""
    url = postgresql.new_url()
    site, backup = Site(tmp_path / "site", url), tmp_path / "backup"
    for folder in (site.folder, backup):
        folder.mkdir()
    async with site.running() as rest:
        training = await _begin(rest)
        for _ in range(2):
            await training.step()
        kept = (await training.run("save_weights", path="kept"))["path"]
        known = await training.loss()
        answer = await training.result(known)
        stop = asyncio.Event()

        async def go_on() -> None:
            while not stop.is_set():
                await training.step()

        going_on = asyncio.create_task(go_on())
        at_backup = training.seq_id
        await eventually(lambda: training.seq_id > at_backup + 4, 60)
        await asyncio.to_thread(_dump, url, backup / "gateway.sql")
        for name in _FILES:
            await asyncio.to_thread(_copy, site.folder / name, backup / name)
        in_backup = training.seq_id
        await eventually(lambda: training.seq_id > in_backup + 4, 60)
        stop.set()
        await going_on
        session_id, model_id = rest.session_id, training.model_id
    shutil.rmtree(site.folder)
    postgresql.execute(f"DROP SCHEMA {url.rpartition('%3D')[2]} CASCADE")

    shutil.copytree(backup, site.folder)
    _restore(url, backup / "gateway.sql")
    async with site.running() as rest:
        old = Training(rest, model_id)
        assert await old.result(known) == answer, "an answer from before the backup"
        listed = (await rest.http.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]
        assert [item["tinker_path"] for item in listed] == [kept]
        assert (await rest.post("session_heartbeat", session_id=session_id)).status_code == 200
        new = await _begin(rest)
        await new.run("load_weights", path=kept, optimizer=True)
        assert await new.result(await new.loss()) == answer, "the weights must be bit-identical"
        await new.step()
        assert (await new.run("save_weights", path="later"))["path"]


@pytest.mark.slow
async def test_tables_of_the_previous_schema_are_migrated_with_what_they_hold(
    postgresql: Server, tmp_path: Path
) -> None:
    """The trainer's models, answers and checkpoints survive the upgrade of a gateway with the previous schema."""
    url, previous = postgresql.new_url(), int(REVISION) - 1
    site = Site(tmp_path / "site", url)
    site.folder.mkdir()
    async with site.running() as rest:
        training = await _begin(rest)
        known = await training.step()
        answer = await training.result(known)
        kept = (await training.run("save_weights", path="kept"))["path"]
    _downgrade(url, previous)
    schema = url.rpartition("%3D")[2]
    assert postgresql.execute(f"SELECT version FROM {schema}.schema_version") == [(previous,)]

    async with site.running() as rest:
        assert postgresql.execute(f"SELECT version FROM {schema}.schema_version") == [(int(REVISION),)]
        old = Training(rest, training.model_id)
        assert await old.result(known) == answer
        new = await _begin(rest)
        await new.run("load_weights", path=kept, optimizer=True)
        await new.step()
