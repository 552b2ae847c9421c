"""A supervised process is restarted when it dies, and its children end with it when it is stopped."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fovea.cli import service as service_module
from fovea.cli.service import Service, ServiceSpec
from tests.processes import survivors

FOREVER = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
FOREVER += "print('child', p.pid, flush=True); time.sleep(600)"


def make(program: str) -> tuple[Service, list[str], list[str]]:
    lines: list[str] = []
    exits: list[str] = []
    spec = ServiceSpec("worker", ("-c", program), "127.0.0.1:1", "x", 0, {"MARK": "yes"})
    return Service(spec, lambda _, line: lines.append(line)), lines, exits


def ignore() -> None:
    """A start without a reader of its progress."""


async def wait_for(lines: list[str], count: int) -> None:
    async with asyncio.timeout(20):
        while len(lines) < count:  # noqa: ASYNC110  the lines come from another process
            await asyncio.sleep(0.05)


async def test_a_dead_process_is_started_again_without_its_orphans() -> None:
    service, lines, exits = make(FOREVER)

    def note(name: str, how: str, pause_s: float) -> None:
        exits.append(f"{name} ended with {how}")

    pids: list[int | None] = []
    running = asyncio.create_task(service.run(note, lambda: pids.append(service.pid)))
    await wait_for(lines, 1)
    orphan = psutil.Process(int(lines[0].split()[1]))
    assert service.pid is not None
    os.kill(service.pid, 9)
    await wait_for(lines, 2)
    assert exits == ["worker ended with SIGKILL"]
    assert survivors([orphan], 5.0) == []
    assert pids[1:] == [service.pid]
    child = psutil.Process(int(lines[1].split()[1]))
    await service.stop(5.0)
    await running
    assert service.pid is None
    assert survivors([child], 5.0) == []


async def ends(program: str, count: int, serves: bool = False) -> tuple[list[str], list[float], list[str]]:
    """Returns the exit statuses of `count` ends, the pauses after them, and the printed lines."""
    service, lines, hows = make(program)
    pauses: list[float] = []
    over = asyncio.Event()

    def note(name: str, how: str, pause_s: float) -> None:
        hows.append(how)
        pauses.append(pause_s)
        if len(pauses) == count:
            over.set()

    running = asyncio.create_task(service.run(note, service.note_serving if serves else ignore))
    async with asyncio.timeout(30):
        await over.wait()
    assert service.state["restarts"] == count - 1
    assert service.state["last_end"] == hows[-1]
    assert service.state["starts_again_at"] > service.state["started_at"]
    await service.stop(1.0)
    running.cancel()
    return hows, pauses, lines


async def test_a_process_that_keeps_dying_is_started_without_end_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "LONGEST_PAUSE_S", 0.04)
    monkeypatch.setattr(service_module, "FIRST_PAUSE_S", 0.01)
    hows, pauses, lines = await ends("import os; print(os.environ['MARK']); raise SystemExit(3)", 8)
    assert hows == ["code 3 (yes)"] * 8
    assert lines == ["yes"] * 8
    for pause, most in zip(pauses, [0.01, 0.02] + [0.04] * 6, strict=True):
        assert 0.8 * most <= pause <= most
    assert len(set(pauses)) == 8, "random delays must keep services from starting at the same moment"


async def test_one_that_served_for_long_starts_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "STEADY_S", 0.02)
    monkeypatch.setattr(service_module, "FIRST_PAUSE_S", 0.01)
    program = "import time; time.sleep(0.3); raise SystemExit(3)"
    _, pauses, _ = await ends(program, 3, serves=True)
    assert max(pauses) <= 0.01
    _, pauses, _ = await ends(program, 3)
    assert pauses[2] > 0.03, "it lived as long but never served"


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("raise ValueError('no such folder')", "code 1 (ValueError: no such folder)"),
        (
            "import logging, sys\nfrom fovea.runtime.processes import configure_logging\nconfigure_logging('x')\n"
            "logging.getLogger('loader').error('the file is short')\nprint('bye')\nsys.exit(4)",
            "code 4 (loader: the file is short)",
        ),
        ("print(); print('the end'); raise SystemExit(5)", "code 5 (the end)"),
        (
            "print('ValueError: no memory'); print('\\n' * 90); "
            "raise SystemExit('RuntimeError: the engine has failed. See root cause above. Failed: {}')",
            "code 1 (ValueError: no memory)",
        ),
        (
            "class Half:\n def __del__(self): raise RuntimeError('the loop is closed')\n"
            "half = Half(); raise OSError('the port is taken')",
            "code 1 (OSError: the port is taken)",
        ),
        (
            "print('1:02 ERROR a call was cancelled'); raise SystemExit('renderer: no image worker')",
            "code 1 (renderer: no image worker)",
        ),
        ("raise SystemExit(6)", "code 6"),
        ("import os; print('ERROR of before', flush=True); os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
async def test_the_cause_is_the_last_line_of_an_error(program: str, how: str) -> None:
    os.environ["FOVEA_SUPERVISED"] = "1"
    hows, _, _ = await ends(program, 1)
    assert hows == [how]


async def test_a_line_without_end_stops_nobody() -> None:
    _, _, lines = await ends("import sys; sys.stdout.write('x' * 3_000_000 + '\\nlast'); raise SystemExit(3)", 1)
    assert sum(map(len, lines)) == 3_000_004
    assert lines[-1] == "last"


async def test_one_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    hows, _, _ = await ends("", 2)
    assert all(how.startswith("a failed start ([Errno 2] No such file or directory") for how in hows)


async def test_a_process_that_ignores_the_stop_is_killed() -> None:
    service, lines, _ = make("import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)")

    def note(name: str, how: str, pause_s: float) -> None:
        raise AssertionError(how)

    running = asyncio.create_task(service.run(note, ignore))
    await wait_for(lines, 1)
    await service.stop(0.3)
    await running
    assert lines[-1] == "did not end within 0 s; killing it"


async def test_what_a_killed_process_leaves_in_its_temporary_folder_is_removed(tmp_path: Path) -> None:
    program = "import tempfile, time; print(tempfile.mkstemp()[1], flush=True); time.sleep(600)"
    lines: list[str] = []
    spec = ServiceSpec("worker", ("-c", program), "127.0.0.1:1", "x", 0, {}, str(tmp_path / "own"))
    service = Service(spec, lambda _, line: lines.append(line))
    running = asyncio.create_task(service.run(lambda *_: None, ignore))
    await wait_for(lines, 1)
    assert service.pid is not None
    os.kill(service.pid, 9)
    await wait_for(lines, 2)
    left, own = map(Path, lines)
    assert (left.exists(), own.exists()) == (False, True)
    assert own.parent == tmp_path / "own"
    await service.stop(5.0)
    assert not own.parent.exists(), "a stop must return once it is removed"
    await running


async def test_a_temporary_folder_of_another_user_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ServiceSpec("worker", ("-c", ""), "127.0.0.1:1", "x", 0, {}, str(tmp_path / "own"))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    hows: list[str] = []

    def note(name: str, how: str, pause_s: float) -> None:
        hows.append(how)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        await Service(spec, lambda *_: None).run(note, ignore)
    assert hows == [f"a failed start ({tmp_path} belongs to another user; set TMPDIR to a folder of your own)"]


async def test_files_of_the_users_folder_do_not_shadow_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    _, _, lines = await ends("import random, sys; print('it is', random.__name__); sys.exit(3)", 1)
    assert lines[0] == "it is random"


FORKING = """
import asyncio, os, sys
import fovea.cli.main
import grpc
from fovea.runtime.hosts import free_ports

def count_threads():
    os.write(1, b"%d " % len(os.listdir("/proc/self/task")))

async def main():
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{free_ports(1)[0]}")
    ready = asyncio.ensure_future(channel.channel_ready())
    for _ in range(20):
        await asyncio.sleep(0.02)
        process = await asyncio.create_subprocess_exec("/bin/true", preexec_fn=count_threads)
        await process.wait()
    ready.cancel()
    await channel.close()

asyncio.run(main())
"""


def test_grpc_starts_no_threads_in_a_child_before_it_becomes_a_service() -> None:
    """They abort if they find their descriptors closed, so a service that starts at such a moment ends with SIGABRT."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-c", FORKING]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split() == ["1"] * 20, result.stderr
