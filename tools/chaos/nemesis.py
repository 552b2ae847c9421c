"""Makes the faults of a plan on time, and records them and how long recovery took."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import psutil

from chaos.faults import Fault, Happened
from chaos.links import Trouble
from chaos.stack import Stack

_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
_BACK_WITHIN_S = 300.0
_TARGET_WITHIN_S = 90.0  # includes the time of a restart in progress


class Nemesis:
    """Disturbs a stack.

    Args:
        stack: The stack.
        on_fault: Called with each fault as it is made.
    """

    def __init__(self, stack: Stack, on_fault: Callable[[Fault], None] = lambda _: None) -> None:
        self._stack = stack
        self._on_fault = on_fault
        self._whole = asyncio.Lock()

    async def run(self, plan: Sequence[Fault]) -> list[Happened]:
        """Makes all faults. Returns when all are undone and all services serve again."""
        start = time.monotonic()
        making: list[asyncio.Task[Happened]] = []
        for fault in plan:
            await asyncio.sleep(max(start + fault.at_s - time.monotonic(), 0.0))
            async with self._whole:  # while everything restarts, no other fault may happen
                making.append(asyncio.create_task(self._make(fault)))
                await asyncio.sleep(0)
        return [await one for one in making]

    async def _make(self, fault: Fault) -> Happened:
        self._on_fault(fault)
        begun = time.monotonic()
        match fault.kind:
            case "kill" if fault.target == "everything":
                async with self._whole:
                    await self._stack.kill()
                    await self._stack.start()
                note = ""
            case "kill" | "terminate":
                note = await self._signal(fault)
            case "stop":
                note = await self._pause(fault)
            case "full-disk":
                assert self._stack.disk
                with self._stack.disk.full():
                    await asyncio.sleep(fault.for_s)
                note = ""
            case trouble:
                link = self._stack.links[fault.target]
                link.disturb(Trouble(trouble), fault.delay_s)
                await asyncio.sleep(fault.for_s)
                link.disturb(Trouble.NONE)
                note = ""
        healed = time.monotonic()
        await self._wait_until_back()
        return Happened(fault, begun, healed, time.monotonic(), note)

    async def _signal(self, fault: Fault) -> str:
        process = await self._found(fault.target)
        if process is None:
            return "no such process"
        with suppress(psutil.NoSuchProcess):
            process.send_signal(_SIGNALS[fault.kind])
            await until(lambda: not _runs(process), 40.0)
        return "" if not _runs(process) else "did not end within 40 s"

    async def _pause(self, fault: Fault) -> str:
        process = await self._found(fault.target)
        if process is None:
            return "no such process"
        try:
            process.suspend()
            await asyncio.sleep(fault.for_s)
        finally:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        return ""

    async def _found(self, target: str) -> psutil.Process | None:
        deadline = time.monotonic() + _TARGET_WITHIN_S
        while not (found := self._stack.find(target)):
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.1)
        return found[0]

    async def _wait_until_back(self) -> None:
        await until(self._stack.is_serving, _BACK_WITHIN_S)


async def until(holds: Callable[[], bool | Awaitable[bool]], timeout_s: float) -> None:
    """Waits until a condition holds or the timeout passes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        await asyncio.sleep(0.2)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
