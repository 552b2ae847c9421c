"""A real browser for tests: Debian's Chromium, driven by chromedriver with the W3C WebDriver protocol.

It loads only pages of this machine. `python -m tests.e2e.browser PAGE.html[#PLACE] docs/pictures/NAME [HEIGHT]` takes
the screenshots of a page for the docs.
"""

import asyncio
import base64
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from fovea.runtime.hosts import free_ports

_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
]  # fmt: skip
_TOO_WIDE = """
    return [...document.querySelectorAll("body *")]
        .filter((one) => !one.closest(arguments[0]))
        .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
        .map((one) => `${one.tagName} ${one.className}`);
"""
_CONTRAST = """
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((one) => one / 255)
            .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (one) => {
        for (; one; one = one.parentElement) {
            const colour = getComputedStyle(one).backgroundColor;
            if (!/, 0\\)$/.test(colour)) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const ink = (one) => getComputedStyle(one, one.placeholder && !one.value ? "::placeholder" : null).color;
    return [...document.querySelectorAll(arguments[0])].map((one) => {
        const [low, high] = [light(ink(one)), light(behind(one))].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    }).reduce((least, one) => Math.min(least, one), 21);
"""
_PATIENCE_S = 60.0
_SETTLED_S = 20.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def why_no_browser() -> str:
    """Returns why tests with a browser cannot run here; empty if they can."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)}: apt-get install chromium chromium-driver" if missing else ""


class Browser:
    """One browser window. Methods wait for the requested element until it appears or a generous limit has passed."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def open(self, url: str) -> None:
        """Opens a URL."""
        self._call("POST", "url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs the body of a JavaScript function; returns its result."""
        return self._call("POST", "execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, *arguments: Any) -> Any:
        """Returns the first truthy result of a function's body. Fails with the page's text after the limit."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            if found := self.run(script, *arguments):
                return found
            time.sleep(0.1)
        raise AssertionError(f"it did not come: {script}\nthe page shows:\n{self.text('body')}")

    def text(self, selector: str) -> str:
        """Returns the visible text of an element; empty if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def wait_text(self, selector: str, *words: str) -> str:
        """Returns the text of an element once it contains all these words."""
        script = """
            const text = document.querySelector(arguments[0])?.innerText ?? "";
            return arguments[1].every((one) => text.includes(one)) && (text || " ");
        """
        return str(self.wait(script, selector, list(words)))

    def click(self, selector: str, text: str = "") -> None:
        """Clicks the element that matches the selector and has this text, once it is visible. Repeats the click if the
        page has redrawn the element.
        """
        script = """
            return [...document.querySelectorAll(arguments[0])].find(
                (one) => one.checkVisibility() && (!arguments[1] || one.textContent.trim() === arguments[1]));
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            found = self.wait(script, selector, text)
            try:
                self._call("POST", f"element/{found[_ELEMENT]}/click")
                return
            except AssertionError as error:
                if time.monotonic() > deadline or not ("stale element" in str(error) or "intercepted" in str(error)):
                    raise
            # The bar at the top may cover it.
            self.run("document.querySelector(arguments[0])?.scrollIntoView({ block: 'center' })", selector)

    def type(self, selector: str, text: str) -> None:
        """Types into an element and presses Enter."""
        found = self.wait("return document.querySelector(arguments[0])", selector)
        self._call("POST", f"element/{found[_ELEMENT]}/value", text=f"{text}\ue007")

    def press(self, key: str) -> None:
        """Presses and releases a key, given by its WebDriver code, on the focused element."""
        steps = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self._call("POST", "actions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    def command(self, name: str, **parameters: Any) -> Any:
        """Sends a command of Chromium's DevTools protocol."""
        return self._call("POST", "goog/cdp/execute", cmd=name, params=parameters)

    def show(self, width: int, dark: bool) -> None:
        """Sets the window's width and the colour scheme, light or dark."""
        height = 900 if width > 600 else 844
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, most_height: int = 4000) -> None:
        """Takes a screenshot of the whole page, limited to a height."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most_height), "scale": 1}
        found = self.command("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        # Chromium compresses screenshots poorly, and pages have few colours.
        picture = Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB")
        _in_few_colours(picture).save(path, optimize=True)

    def pictures(self, folder: Path, name: str, most_height: int = 2400) -> None:
        """Takes four screenshots: desktop and phone width, in light and dark."""
        folder.mkdir(parents=True, exist_ok=True)
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                self.show(width, dark=scheme == "dark")
                self.wait("return new Promise((done) => setTimeout(() => done(true), 1500))")
                self.screenshot(folder / f"{name}-{width}-{scheme}.png", most_height)

    def too_wide(self, allowed: str = ".scroll") -> list[str]:
        """Returns elements that exceed the right edge of the window, except those inside `allowed` elements.

        Charts are redrawn some frames after a change of width, so this waits up to 20 s until there are none.
        """
        deadline = time.monotonic() + _SETTLED_S
        while (found := self.run(_TOO_WIDE, allowed)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [str(one) for one in found]

    def contrast(self, selector: str) -> float:
        """Returns the lowest contrast of texts, placeholders included; WCAG 2 requires 4.5 for small text."""
        return float(self.run(_CONTRAST, selector))

    def read_everywhere(self, texts: str, allowed: str = ".scroll") -> None:
        """Checks the page at both widths, in light and dark: nothing is cut off, and these texts have contrast."""
        for width, dark in ((1280, False), (1280, True), (390, True), (390, False)):
            self.show(width, dark)
            assert self.too_wide(allowed) == [], (width, dark)
            shown = self.run("return Math.max(innerWidth, document.documentElement.scrollWidth)")
            assert shown == width, "without a viewport, a phone shrinks the page"
            assert self.contrast(texts) >= 4.5, (width, dark)

    def complaints(self) -> list[str]:
        """Returns errors on the console since the last call: failed scripts and requests that the policy blocked."""
        entries = self._call("POST", "se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _call(self, method: str, path: str, **body: Any) -> Any:
        answer = self._http.request(method, f"/session/{self._session}/{path}", json=body)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise AssertionError(f"{path} failed: {value['message'] if isinstance(value, dict) else value}")
        return value


async def see(look: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a method of a browser in a thread, so that servers in this event loop can answer the page."""
    return await asyncio.to_thread(look, *arguments)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Starts a browser with an empty profile and ends it."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="fovea-browser-", ignore_cleanup_errors=True) as folder:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}", "--allowed-ips=127.0.0.1"], stdout=subprocess.DEVNULL
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as http:
                _wait_ready(http)
                options = {"args": [*_FLAGS, f"--user-data-dir={folder}/profile"], "binary": shutil.which("chromium")}
                wanted = {
                    "browserName": "chrome",
                    "goog:chromeOptions": options,
                    "goog:loggingPrefs": {"browser": "ALL"},
                }
                answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
                assert "sessionId" in answer, json.dumps(answer)[:500]
                try:
                    yield Browser(http, answer["sessionId"])
                finally:
                    http.delete(f"/session/{answer['sessionId']}")
        finally:
            driver.terminate()
            driver.wait(30)


def _in_few_colours(picture: Image.Image) -> Image.Image:
    """Reduces an image to 256 colours: the most common ones exactly, plus some spread over the rest, so that a rare
    colour keeps its hue.
    """
    colours, places, counts = np.unique(
        np.asarray(picture).reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    others = picture.quantize(64, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = np.concatenate([colours[np.argsort(-counts)[:192]], np.reshape(others, (-1, 3))]).astype(np.int64)
    # Pillow's own choice from a palette is inexact: white becomes nearly white.
    nearest = [np.argmin(((palette - colour) ** 2).sum(1)) for colour in colours.astype(np.int64)]
    drawn = Image.fromarray(np.asarray(nearest, np.uint8)[places].reshape(picture.height, picture.width), "P")
    drawn.putpalette(palette.astype(np.uint8).tobytes())
    return drawn


def _wait_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if http.get("/status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("chromedriver does not answer")


def _main(page: str, stem: str, most_height: str = "2400") -> None:
    file, number_sign, place = page.partition("#")
    with running_browser() as browser:
        browser.open(Path(file).resolve().as_uri() + number_sign + place)
        browser.pictures(Path(stem).parent, Path(stem).name, int(most_height))


if __name__ == "__main__":
    _main(*sys.argv[1:])
