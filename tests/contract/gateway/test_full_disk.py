"""A disk that is really full: nothing new is accepted, what gives room back works, and then all does."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import Rest
from tests.waiting import eventually


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64m", "fovea-test", str(place)]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(file: Path) -> None:
    """Takes all the room that is left."""
    with file.open("wb", buffering=0) as junk:
        for size in (2**20, 4096):
            try:
                while True:
                    junk.write(b"x" * size)
            except OSError:
                continue


async def test_on_a_full_disk_sessions_end_and_nothing_new_begins(small_disk: Path) -> None:
    async with running(Stand(small_disk), session_ttl_s=600.0) as stand, stand.http() as http:
        rest = Rest(http)
        await rest.open_session()
        model_id = await rest.create_model()
        waits = (await rest.optim_step(model_id, 2))["request_id"]
        fill(small_disk / "junk")
        body = {"tags": ["x" * 4000], "user_metadata": None, "sdk_version": "0.38.0"}
        statuses = [(await rest.post("create_session", **body)).status_code for _ in range(200)]
        assert statuses[-1] == 503
        assert "disk" in (await rest.post("optim_step", model_id=model_id, seq_id=1, adam_params={})).text
        await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
        assert "is over" in (await rest.result(waits))["error"], "what was accepted has its outcome"
        (small_disk / "junk").unlink()
        assert stand.gateway is not None
        await stand.gateway.parts.database.look_for_room()

        async def is_accepted() -> bool:
            return (await rest.post("create_session", **body)).status_code == 200

        await eventually(is_accepted)
