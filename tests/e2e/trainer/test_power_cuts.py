"""A power cut at any moment: acknowledged work is kept, and every named checkpoint is complete.

Each change of a model is in a durable point of the trainer or in the gateway's journal. A real gateway and a real
trainer serve a client while all their disk operations are recorded. Then 200 possible states of the disk after a cut
are built and checked.
"""

import json
import random
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import pyrage  # type: ignore[import-untyped]
import pytest

import fovea_tinyvlm
from fovea.wire.conventions import PLAIN_SUFFIX, REPLACED_SUFFIX, STAGING_SUFFIX
from fovea_trainer.recovery.recovery_folder import POINT
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_process import Process
from tests.e2e.trainer.trainer_process import TrainerProcess
from tests.power.recording import Disk, Event, Kind, Recording, build, write_files
from tests.waiting import eventually

CUTS = 200
_CHECKPOINT = re.compile(r"state/checkpoints/[^/]+/[^/]+/[^/]+|recovery/[^/]+/\d+")
_UNFINISHED = re.compile(re.escape(STAGING_SUFFIX) + "|" + re.escape(REPLACED_SUFFIX) + "|" + re.escape(PLAIN_SUFFIX))
_DATABASE = "state/gateway.db"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the recorder needs a C compiler")


class Told:
    """A client that writes each acknowledgement into the record when it arrives."""

    def __init__(self, rest: Rest, recording: Recording) -> None:
        self._rest, self._recording, self._seq_id = rest, recording, 0
        self.model_id = ""

    async def create(self, number: int, lora: dict[str, object]) -> None:
        """Creates the model of the following commands."""
        self._seq_id = 0
        body = {"session_id": self._rest.session_id, "model_seq_id": number, "base_model": "fovea/fake-vl"}
        self.model_id = str(
            (await self._wait(await self._rest.ok("create_model", **body, lora_config=lora)))["model_id"]
        )
        self._note_change()

    async def run(self, route: str, **body: object) -> dict[str, object]:
        """Runs a command; returns its result."""
        self._seq_id += 1
        return await self._wait(await self._rest.ok(route, model_id=self.model_id, seq_id=self._seq_id, **body))

    async def train(self) -> None:
        """Runs a loss and a step."""
        self._seq_id += 1
        await self._wait((await self._rest.forward_backward(self.model_id, self._seq_id)).json())
        self._note_change()
        await self.run("optim_step", adam_params={"learning_rate": 1e-3})
        self._note_change()

    async def load(self, path: object) -> None:
        """Loads a state into the model."""
        await self.run("load_weights", path=path, optimizer=True)
        self._note_change()

    async def finish(self) -> None:
        """Ends the session, and with it the model."""
        self._recording.mark(ended=self.model_id)
        await self._rest.ok(f"sessions/{self._rest.session_id}/finish", reason={"type": "success"}, detail=None)

    async def copy(self, path: object, number: int) -> None:
        """Copies a checkpoint."""
        body = {"source_path": path, "session_id": self._rest.session_id, "model_seq_id": number}
        copied = await self._rest.ok("copy_weights", **body)
        self._recording.mark(named=copied["tinker_path"])

    async def delete(self, path: str) -> None:
        """Deletes a checkpoint."""
        self._recording.mark(given_up=path)
        run, _, rest = path.removeprefix("tinker://").partition("/")
        (await self._rest.http.delete(f"training_runs/{run}/checkpoints/{rest}")).raise_for_status()

    def _note_change(self) -> None:
        self._recording.mark(changed=f"{self.model_id} {self._seq_id}")

    async def _wait(self, accepted: dict[str, object]) -> dict[str, object]:
        request_id = str(accepted["request_id"])
        self._recording.mark(accepted=request_id)
        answer = await self._rest.result(request_id)
        assert "error" not in answer, answer
        self._recording.mark(answered=request_id)
        if "path" in answer:
            self._recording.mark(named=answer["path"])
        return answer


async def work(told: Told) -> None:
    """Exercises all kinds of storage: states, sampler weights, exports and copies, with overwrites, deletions and
    loads.
    """
    await told.create(0, {"rank": 4})
    await told.train()
    first = await told.run("save_weights", path="a")
    await told.run("save_weights_for_sampler", path="s")
    await told.train()
    await told.run("save_weights", path="a", overwrite=True)
    await told.copy(first["path"], 1)
    await told.run("save_weights_external", path="plain")
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    await told.run("save_weights_external", path="secret", age_encryption_recipients=[recipient])
    await told.delete(f"tinker://{told.model_id}/sampler_weights/s")
    await told.load(first["path"])
    await told.train()


async def work_on_all(told: Told) -> None:
    """The same for full parameters, which ranks write together."""
    await told.create(0, {"rank": 0})
    await told.train()
    saved = await told.run("save_weights", path="full")
    await told.run("save_weights_for_sampler", path="full")
    await told.load(saved["path"])
    await told.train()


@dataclass
class Recorded:
    """The recorded events, and the inode of the recorded folder."""

    events: list[Event]
    root: Path

    def disk(self) -> Disk:
        """Returns the disk before the first event."""
        disk = Disk()
        disk.sees_root(self.root.stat().st_ino)
        return disk

    @cached_property
    def whole(self) -> dict[str, dict[str, bytes]]:
        """The files of each checkpoint's folder when it was published, or at the end."""
        disk, found = self.disk(), dict[str, dict[str, bytes]]()
        for event in self.events:
            disk.do(event)
            place = event.data.decode() if event.kind is Kind.RENAME else ""
            if _CHECKPOINT.fullmatch(place) and not _UNFINISHED.search(place):
                found[place] = below(disk.files(), place)
        final = disk.files()
        for path in final:
            if checkpoint := _CHECKPOINT.match(path):
                found[checkpoint[0]] = below(final, checkpoint[0])
        return found

    @cached_property
    def answers(self) -> dict[str, bytes]:
        """The stored results of all futures."""
        with closing(sqlite3.connect(self.root / _DATABASE)) as connection:
            return dict(connection.execute("SELECT future_id, result FROM future_results"))


@pytest.fixture(scope="module")
async def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """One recording for all tests of this file."""
    folder = tmp_path_factory.mktemp("power")
    root = folder / "disk"
    root.mkdir()
    (folder / "logs").mkdir()
    recording = Recording(build(folder), root, folder / "record")
    stand = Stand(root / "state")
    await stand.start_fakes()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in recording.environment.items():
            patch.setenv(name, value)
        trainer = TrainerProcess(
            fovea_tinyvlm.ensure("qwen3"), folder / "logs" / "trainer.log", "--recovery", str(root / "recovery")
        )
        gateway = Process(stand)
        async with await trainer.ready():
            process = await gateway.start(trainer=trainer.address)
    try:
        async with gateway.http() as http:
            for each in (work, work_on_all):
                rest = Rest(http)
                await rest.open_session()
                told = Told(rest, recording)
                await each(told)
                await eventually(lambda: not journaled(root / _DATABASE, told.model_id), 60)  # noqa: B023
                await told.finish()
    finally:
        process.terminate()
        await process.wait()
        ended = trainer.stop()
        await stand.stop_fakes()
    assert (process.returncode, ended) == (0, 0)
    return Recorded(recording.events(), root)


def test_the_record_has_all_that_was_done(recorded: Recorded) -> None:
    disk = recorded.disk()
    for event in recorded.events:
        disk.do(event)
    there = {str(path.relative_to(recorded.root)): path for path in recorded.root.rglob("*") if path.is_file()}
    found = disk.files()
    assert sorted(found) == sorted(there)
    # SQLite maps the index of its log into memory, and rebuilds it after a crash.
    assert [name for name in found if found[name] != there[name].read_bytes() and not name.endswith("-shm")] == []


def test_after_200_cuts_every_named_checkpoint_is_whole_and_every_answer_is_there(
    recorded: Recorded, tmp_path: Path
) -> None:
    assert list(problems(recorded, tmp_path)) == []


@pytest.mark.parametrize(
    ("unsynced", "lost"),
    [("state/checkpoints/", "is not whole"), ("recovery/", "durable|not whole"), (_DATABASE, "database|gone")],
)
def test_without_syncs_the_same_look_finds_what_is_lost(
    recorded: Recorded, tmp_path: Path, unsynced: str, lost: str
) -> None:
    assert re.search(lost, next(problems(recorded, tmp_path, unsynced), ""))


def problems(recorded: Recorded, scratch: Path, unsynced: str = "-") -> Iterator[str]:
    """Yields the faults after cuts at random moments.

    Args:
        unsynced: Prefix of paths; their syncs are ignored.
    """
    ignored = {event.inode for event in recorded.events if event.path.startswith(unsynced)}
    chance = random.Random(16)
    moments = sorted(chance.randrange(len(recorded.events)) for _ in range(CUTS))
    disk, promises, done = recorded.disk(), Promises(), 0
    for number, moment in enumerate(moments):
        for event in recorded.events[done:moment]:
            disk.do(event, does_sync=event.inode not in ignored)
            promises.note(event)
        done = moment
        folder = scratch / str(number)
        files = disk.cut(random.Random(number))
        write_files(files, folder, _DATABASE)
        for problem in promises.broken(folder / _DATABASE, files, recorded.whole, recorded.answers, str(recorded.root)):
            yield f"cut {number} before event {moment}: {problem}"
        shutil.rmtree(folder, ignore_errors=True)


def journaled(database: Path, model_id: str) -> set[int]:
    """Returns the commands of a model that could be replayed."""
    query = "SELECT seq_id FROM journal JOIN journal_requests USING (model_id, seq_id) WHERE model_id = ?"
    with closing(sqlite3.connect(database)) as connection:
        return {row[0] for row in connection.execute(query, (model_id,))}


def newest_point(files: dict[str, bytes], whole: dict[str, dict[str, bytes]], model_id: str) -> tuple[int, bool]:
    """Returns the command from which a trainer would restore a model (-1 if none), and whether that
    point is complete.
    """
    parent = f"recovery/{quote(model_id, safe='').replace('.', '%2E')}/"
    names = {path.removeprefix(parent).partition("/")[0] for path in files if path.startswith(parent)}
    for name in sorted((name for name in names if name.isdecimal()), key=int, reverse=True):
        found = below(files, parent + name)
        sizes = {path.removeprefix(f"{parent}{name}/"): len(data) for path, data in found.items()}
        if sizes.pop(POINT, 0) and json.loads(found[f"{parent}{name}/{POINT}"])["files"] == sizes:
            return int(name), found == whole[parent + name]
    return -1, True


def below(files: dict[str, bytes], folder: str) -> dict[str, bytes]:
    """Returns the files of a folder."""
    return {path: data for path, data in files.items() if path.startswith(f"{folder}/")}


class Promises:
    """The acknowledgements that clients have received so far."""

    def __init__(self) -> None:
        self._accepted: set[str] = set()
        self._answered: set[str] = set()
        self._named: set[str] = set()
        self._changed: dict[str, set[int]] = {}

    def note(self, event: Event) -> None:
        """Records the content of a mark."""
        if event.kind is Kind.MARK:
            told = event.told()
            self._accepted |= {told[name] for name in ("accepted",) if name in told}
            self._answered |= {told[name] for name in ("answered",) if name in told}
            self._named |= {told[name] for name in ("named",) if name in told}
            self._named -= {told.get("given_up", "")}
            self._changed.pop(told.get("ended", ""), None)
            if "changed" in told:
                model_id, seq_id = told["changed"].split()
                self._changed.setdefault(model_id, set()).add(int(seq_id))

    def broken(
        self, database: Path, files: dict[str, bytes], whole: dict[str, dict[str, bytes]], answers: dict[str, bytes],
        root: str,
    ) -> Iterator[str]:  # fmt: skip
        """Yields the promises that a disk breaks."""
        if not database.exists():
            if self._accepted:
                yield "the database is gone"
            return
        connection = sqlite3.connect(database)
        try:
            damage = connection.execute("PRAGMA integrity_check").fetchone()[0]
            if damage != "ok":
                yield f"the database is damaged: {damage}"
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone():
                if self._accepted:
                    yield "the tables are gone"
                return
            futures = {row[0] for row in connection.execute("SELECT future_id FROM futures")}
            yield from (f"{one} was accepted and is gone" for one in self._accepted - futures)
            kept = dict(connection.execute("SELECT future_id, result FROM future_results"))
            yield from (f"the answer to {one} is gone" for one in self._answered if kept.get(one) != answers[one])
            checkpoints = dict(connection.execute("SELECT path, uri FROM checkpoints"))
            for model_id, changed in self._changed.items():
                durable, is_whole = newest_point(files, whole, model_id)
                if not is_whole:
                    yield f"point {durable} of {model_id} is not whole, and says it is"
                lost = {seq_id for seq_id in changed if seq_id > durable} - journaled(database, model_id)
                if lost:
                    yield f"{sorted(lost)} of {model_id} are neither durable, up to {durable}, nor in the journal"
        except sqlite3.DatabaseError as error:
            yield f"the database cannot be read: {error}"
            return
        finally:
            connection.close()
        yield from (f"{path} was saved and is gone" for path in self._named - set(checkpoints))
        for path, uri in checkpoints.items():
            place = uri.removeprefix("file://").removeprefix(f"{root}/")
            if not whole.get(place) or below(files, place) != whole[place]:
                yield f"{path} is not whole"
