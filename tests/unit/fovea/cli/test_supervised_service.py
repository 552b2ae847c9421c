"""A supervised process is started again when it dies, and takes its own children with it when it is stopped."""

import asyncio
import os

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
    """A start that nobody follows."""


async def wait_for(lines: list[str], count: int) -> None:
    async with asyncio.timeout(20):
        while len(lines) < count:  # noqa: ASYNC110  the lines come from another process
            await asyncio.sleep(0.05)


async def test_a_dead_process_is_started_again_without_its_orphans() -> None:
    service, lines, exits = make(FOREVER)

    async def note(name: str, how: str, pause_s: float) -> None:
        exits.append(f"{name} ended by {how}")

    pids: list[int | None] = []
    running = asyncio.create_task(service.run(note, lambda: pids.append(service.pid)))
    await wait_for(lines, 1)
    orphan = psutil.Process(int(lines[0].split()[1]))
    assert service.pid is not None
    os.kill(service.pid, 9)
    await wait_for(lines, 2)
    assert exits == ["worker ended by SIGKILL"]
    assert survivors([orphan], 5.0) == []
    assert pids[1:] == [service.pid]
    child = psutil.Process(int(lines[1].split()[1]))
    await service.stop(5.0)
    await running
    assert service.pid is None
    assert survivors([child], 5.0) == []


async def test_a_process_that_keeps_dying_is_started_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LONGEST_PAUSE_S", 0.04)
    monkeypatch.setattr(service_module, "FIRST_PAUSE_S", 0.01)
    service, lines, _ = make("import os; print(os.environ['MARK']); raise SystemExit(3)")
    pauses: list[float] = []

    async def note(name: str, how: str, pause_s: float) -> None:
        assert (name, how) == ("worker", "code 3")
        pauses.append(pause_s)
        if len(pauses) == 8:
            await service.stop(1.0)

    await service.run(note, ignore)
    assert lines == ["yes"] * 8
    assert pauses == [0.01, 0.02] + [0.04] * 6


async def test_a_process_that_ignores_the_stop_is_killed() -> None:
    service, lines, _ = make("import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)")

    async def note(name: str, how: str, pause_s: float) -> None:
        raise AssertionError(how)

    running = asyncio.create_task(service.run(note, ignore))
    await wait_for(lines, 1)
    await service.stop(0.3)
    await running
    assert lines[-1] == "did not end within 0 s and is killed"
