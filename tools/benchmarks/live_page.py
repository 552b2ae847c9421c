"""Measures the live page with 200 models of 100,000 steps: `python -m benchmarks.live_page`.

Measures the bytes and the time until the page has drawn, alone and with eight runs over each other, the gateway's CPU
time per second while all models take steps and change their places, and the browser's frame times and bytes meanwhile.
An empty page's frame times show how much of these the machine's other work causes.

The gateway is real and runs in this process, with fake services. The browser is Debian's Chromium without a GPU, on the
same cores. All bytes, with their headers, pass a relay that counts them.
"""

import asyncio
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from benchmarks.figure import emit, quantile
from fovea_gateway.database.schema import models
from fovea_gateway.live.live_state import write_curves
from fovea_gateway.live.step_curves import StepCurves
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import Rest
from tests.e2e.browser import Browser, running_browser

_MODELS = 200
_STEPS = 100_000
_COMPARED = 8
_VARIANTS = 4
_WATCHED_S = 10
_SLICE_S = 0.05
_LOADS = 5
_PER_SESSION = 100
_DRAWN = "return performance.getEntriesByName('curves-drawn')[0]?.startTime ?? 0"
_FRAMES = """
    return new Promise((done) => {
        const frames = [], long = [];
        new PerformanceObserver((list) => long.push(...list.getEntries().map((one) => one.duration)))
            .observe({type: "longtask"});
        let before = performance.now();
        const end = before + arguments[0] * 1000;
        requestAnimationFrame(function next(now) {
            frames.push(now - before);
            before = now;
            if (now < end) requestAnimationFrame(next); else done([frames, long]);
        });
    });
"""


def _metrics(step: int, noise: random.Random) -> dict[str, float]:
    loss = 2 * math.exp(-step / 2000) + 0.1 * noise.random()
    reward = 1 - math.exp(-step / 3000) + 0.05 * noise.random()
    return {
        "loss_per_token": loss,
        "reward": reward,
        "kl": 1e-3 * noise.random(),
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
    }


class _Relay:
    """A relay to the gateway. `received` counts the bytes that the gateway has sent through it."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), int(address.port or 0)
        self.received = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Yields the relay's address."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, up_writer = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(self._pump(reader, up_writer, False), self._pump(upstream, writer, True))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_counted: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                self.received += len(data) if is_counted else 0
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            return
        finally:
            sink.close()


def _load(browser: Browser, url: str, charts: int, runs: int) -> float:
    """Opens the page anew. Returns the milliseconds from the start of the navigation to the drawn curves."""
    browser.command("Network.clearBrowserCache")
    browser.open("about:blank")
    browser.open(url)
    script = "return document.querySelectorAll(`#curves .curve[data-runs='${arguments[1]}']`).length >= arguments[0]"
    browser.wait(script, charts, runs)
    return float(browser.run(_DRAWN))


def _main_thread_s(browser: Browser) -> dict[str, float]:
    """Returns the processor seconds of the page's thread: in all, in scripts and in layout."""
    found = {one["name"]: one["value"] for one in browser.command("Performance.getMetrics")["metrics"]}
    layout = found["LayoutDuration"] + found["RecalcStyleDuration"]
    return {"task": found["TaskDuration"], "script": found["ScriptDuration"], "layout": layout}


def _slices_s(browser: Browser) -> list[float]:
    """Returns the processor seconds of the page's thread in slices of 50 ms or more, for _WATCHED_S seconds.

    A slice has three frames or more, so it bounds the work of a frame even if other processes delay the frames.
    """
    end, found, before = time.monotonic() + _WATCHED_S, list[float](), _main_thread_s(browser)["task"]
    while time.monotonic() < end:
        time.sleep(_SLICE_S)
        now = _main_thread_s(browser)["task"]
        found.append(now - before)
        before = now
    return found


def _browse(relay: _Relay, url: str, model_ids: list[str], sizes: dict[str, Any]) -> None:
    beside = ",".join(model_ids[1:_COMPARED])
    with running_browser() as browser:
        browser.show(1280, dark=False)
        browser.command("Performance.enable", timeDomain="threadTicks")
        for name, place, runs in (
            ("live_page", f"run={model_ids[0]}", 1),
            ("live_compare", f"run={model_ids[0]}&with={beside}", _COMPARED),
        ):
            drawn, received = [], []
            for _ in range(_LOADS):
                before = relay.received
                drawn.append(_load(browser, f"{url}/#{place}", 3, runs))
                received.append(float(relay.received - before))
            emit(f"{name}_drawn_ms", drawn, "ms from opening the page to its curves", **sizes, runs=runs)
            emit(f"{name}_load_bytes", received, "bytes until the curves are drawn", **sizes, runs=runs)
        before, begun = relay.received, _main_thread_s(browser)
        frames, long = browser.run(_FRAMES, _WATCHED_S)
        spent = {name: seconds - begun[name] for name, seconds in _main_thread_s(browser).items()}
        slices = [1000 * slice_s for slice_s in _slices_s(browser)]
        emit("live_compare_watched_bytes", [float(relay.received - before)], "bytes", **sizes, seconds=_WATCHED_S)
        assert browser.complaints() == []
        browser.open("about:blank")
        empty, _ = browser.run(_FRAMES, _WATCHED_S)
    watched = sizes | {"seconds": _WATCHED_S, "steps_per_s_and_model": 2, "runs": _COMPARED}
    watched["load_of_a_minute"] = round(os.getloadavg()[0], 1)
    for name, seconds in spent.items():
        emit(f"live_compare_{name}_ms_per_s", [1000 * seconds / _WATCHED_S], "ms of a core, page's thread", **watched)
    emit("live_compare_slice_p99_ms", [quantile(slices, 0.99)], "ms of a core", **watched, worst=max(slices))
    emit("live_compare_frame_ms", [statistics.median(frames[1:])], "ms, median", **watched)
    emit("live_compare_frame_p99_ms", [quantile(frames[1:], 0.99)], "ms", **watched, worst=max(frames[1:]))
    emit("live_empty_frame_p99_ms", [quantile(empty[1:], 0.99)], "ms, an empty page", **watched, worst=max(empty[1:]))
    emit("live_compare_long_tasks", [float(len(long))], "tasks above 50 ms", **watched, longest_ms=max(long, default=0))


async def _steps_forever(stand: Stand, model_ids: list[str], noise: random.Random) -> None:
    assert stand.gateway is not None
    parts, step = stand.gateway.components, _STEPS
    while True:
        step += 1
        for model_id in model_ids:
            (await parts.live_state.curves(model_id)).add(step, _metrics(step, noise))
        if step % 4 == 0:  # As requests do: the list is ordered by their times.
            used = {model_id: time.time() + noise.random() for model_id in model_ids}
            await parts.database.write(partial(_use, used=used))
        await asyncio.sleep(0.5)


def _use(connection: sa.Connection, used: dict[str, float]) -> None:
    for model_id, at in used.items():
        connection.execute(sa.update(models).where(models.c.model_id == model_id).values(last_request_at=at))


def _curves(noise: random.Random) -> bytes:
    curves = StepCurves()
    for step in range(1, _STEPS + 1):
        curves.add(step, _metrics(step, noise))
    return curves.to_blob()


async def _measure() -> None:
    noise = random.Random(0)
    sizes: dict[str, Any] = {"models": _MODELS, "steps": _STEPS}
    variants = [_curves(noise) for _ in range(_VARIANTS)]
    with tempfile.TemporaryDirectory(prefix="fovea-live-page-") as folder:
        async with running(Stand(Path(folder))) as stand, stand.http() as http:
            assert stand.gateway is not None
            rest, model_ids = Rest(http), []
            for number in range(_MODELS):
                if number % _PER_SESSION == 0:
                    await rest.open_session()
                model_ids.append(await rest.create_model(number % _PER_SESSION))
            # The gateway knows new models as models without curves; a new process reads them.
            await stand.stop()
            await stand.start()
            parts = stand.gateway.components
            blobs = {model_id: variants[at % _VARIANTS] for at, model_id in enumerate(model_ids)}
            await parts.database.write(lambda connection: write_curves(connection, blobs, time.time()))
            before = time.perf_counter()
            await parts.live_view.sections(None)
            cold_ms = 1000 * (time.perf_counter() - before)
            emit("live_page_cold_ms", [cold_ms], "ms of the gateway to read all curves", **sizes)
            spent = []
            stepping = asyncio.create_task(_steps_forever(stand, model_ids, noise))
            for _ in range(10):
                await asyncio.sleep(1)
                before = time.perf_counter()
                await parts.live_view.sections(None)
                spent.append(1000 * (time.perf_counter() - before))
            emit("live_page_second_ms", spent, "ms of the gateway for one second of one owner", **sizes)
            relay = _Relay(stand.url)
            async with relay.running() as url:
                await asyncio.to_thread(_browse, relay, url, model_ids, sizes)
            stepping.cancel()


if __name__ == "__main__":
    asyncio.run(_measure())
