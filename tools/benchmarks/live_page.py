"""Measures the live page with 64 models of 10,000 steps: `python -m benchmarks.live_page`.

Measures the bytes and time of the first load, the gateway's CPU time per second while all models take steps, and the
browser's frame times meanwhile.

The gateway is real and runs in this process, with fake services. The browser is Debian's Chromium without a GPU, on the
same cores.
"""

import asyncio
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figure import emit, quantile
from fovea_gateway.live.live_state import write_curves
from fovea_gateway.live.step_curves import StepCurves
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import Rest
from tests.e2e.browser import running_browser

_MODELS = 64
_STEPS = 10_000
_WATCHED_S = 10
_SECTIONS = {"models", "queue", "services", "errors", "samples", "checkpoints"}
_DRAWN = """
    return performance.getEntriesByType("resource").find((one) => one.name.includes("live/curves")).responseEnd;
"""
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


async def _first_load(stand: Stand, model_id: str) -> None:
    page_bytes, began = 0, time.perf_counter()
    async with httpx.AsyncClient(base_url=stand.url) as http:
        for name in (
            "",
            "page/page.css",
            *(f"page/{one}.js" for one in ("main", "dom", "charts", "panels", "samples", "stream")),
        ):
            page_bytes += len((await http.get(f"/{name}")).content)
    emit("live_page_files_bytes", [page_bytes], "bytes")
    async with stand.http() as http:
        seen: set[str] = set()
        stream_bytes, stream_at = 0, time.perf_counter()
        async with http.stream("GET", "live/events") as response:
            async for line in response.aiter_lines():
                stream_bytes += len(line) + 1
                if line.startswith("event: "):
                    seen.add(line.removeprefix("event: "))
                if not line and seen >= _SECTIONS:
                    break
        stream_ms = 1000 * (time.perf_counter() - stream_at)
        curves_at = time.perf_counter()
        curves = await http.get(f"live/curves/{model_id}")
        curves_ms = 1000 * (time.perf_counter() - curves_at)
    sizes: dict[str, Any] = {"models": _MODELS, "steps": _STEPS}
    emit("live_page_stream_bytes", [stream_bytes], "bytes", **sizes)
    emit("live_page_stream_ms", [stream_ms], "ms", **sizes)
    emit("live_page_curves_bytes", [int(curves.headers["content-length"])], "bytes", **sizes, raw=len(curves.content))
    emit("live_page_curves_ms", [curves_ms], "ms", **sizes)
    emit("live_page_all_ms", [1000 * (time.perf_counter() - began)], "ms", **sizes)


def _browse(url: str) -> tuple[float, list[float], list[float]]:
    with running_browser() as browser:
        browser.show(1280, dark=False)
        browser.open(f"{url}/")
        browser.wait("return document.querySelectorAll('#run .curve canvas').length >= 4")
        drawn = browser.run(_DRAWN)
        frames, long = browser.run(_FRAMES, _WATCHED_S)
        assert browser.complaints() == []
        return float(drawn), frames[1:], long


async def _steps_forever(stand: Stand, model_ids: list[str], noise: random.Random) -> None:
    assert stand.gateway is not None
    state, step = stand.gateway.components.live_state, _STEPS
    while True:
        step += 1
        for model_id in model_ids:
            (await state.curves(model_id)).add(step, _metrics(step, noise))
        await asyncio.sleep(0.5)


async def _measure() -> None:
    noise = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="fovea-live-page-") as folder:
        async with running(Stand(Path(folder))) as stand, stand.http() as http:
            assert stand.gateway is not None
            rest = Rest(http)
            await rest.open_session()
            model_ids = [await rest.create_model(number) for number in range(_MODELS)]
            view = stand.gateway.components.live_view
            curves = StepCurves()
            for step in range(1, _STEPS + 1):
                curves.add(step, _metrics(step, noise))
            blobs = dict.fromkeys(model_ids, curves.to_blob())
            await stand.gateway.components.database.write(
                lambda connection: write_curves(connection, blobs, time.time())
            )
            await _first_load(stand, model_ids[0])
            spent = []
            for _ in range(20):
                before = time.perf_counter()
                await view.sections(None)
                spent.append(1000 * (time.perf_counter() - before))
                await asyncio.sleep(1)
            emit(
                "live_page_second_ms",
                spent,
                "ms of the gateway for one second of one owner",
                models=_MODELS,
                steps=_STEPS,
            )
            stepping = asyncio.create_task(_steps_forever(stand, model_ids, noise))
            drawn, frames, long = await asyncio.to_thread(_browse, stand.url)
            stepping.cancel()
            sizes: dict[str, Any] = {
                "models": _MODELS,
                "steps": _STEPS,
                "seconds": _WATCHED_S,
                "steps_per_s_and_model": 2,
            }
            emit("live_page_drawn_ms", [drawn], "ms from opening the page to its curves", **sizes)
            emit("live_page_frame_ms", [statistics.median(frames)], "ms, median", **sizes)
            emit("live_page_frame_p99_ms", [quantile(frames, 0.99)], "ms", **sizes, worst=max(frames))
            emit(
                "live_page_long_tasks",
                [float(len(long))],
                "tasks longer than 50 ms",
                **sizes,
                longest_ms=max(long, default=0),
            )


if __name__ == "__main__":
    asyncio.run(_measure())
