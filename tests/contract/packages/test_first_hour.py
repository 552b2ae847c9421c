"""The first hour of a new user in an empty environment: examples/first_hour.py, watched in a real browser.

Set `FOVEA_FIRST_HOUR=1` to run it: it installs the whole `cpu` extra (6.5 GB) and takes minutes. The environment is
made as docs/guides/operations.md describes and cannot import anything from this checkout.
"""

import os
import pathlib
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.contract.packages.conftest import ROOT, UV, run
from tests.e2e.browser import Browser, running_browser, why_no_browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        os.environ.get("FOVEA_FIRST_HOUR") != "1",
        reason="installs 6.5 GB and takes minutes; set FOVEA_FIRST_HOUR=1 to run it",
    ),
    pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser()),
]
_PATIENCE_S = 1200.0


class Hour:
    """The running script: its lines and those of the processes beside it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.lines: list[str] = []
        self._process, self._coming = process, queue.Queue[str]()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._coming.put(line.rstrip())
        self._coming.put("")

    def close(self) -> None:
        """Waits until the script has ended and all its output is read."""
        self._reading.join(60)

    def until(self, pattern: str) -> "re.Match[str]":
        """Returns the next line that contains a text."""
        while line := self._coming.get(timeout=_PATIENCE_S):
            self.say(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("\n".join(["it ended:", *self.lines]))

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.say(f"{time.monotonic() - begun:7.1f} s  {what}")


def watch(hour: Hour, browser: Browser, address: str) -> None:
    """Opens the page, selects the new model and waits until its curves are complete."""
    browser.show(1280, dark=False)
    with hour.timed("open / in a browser"):
        browser.open(address)
        browser.wait_text("#link", "live")
    with hour.timed("until the page has the first points of a curve"):
        browser.click("#models button")
        browser.wait("return document.querySelector('#run .curve')?.dataset.points > 1")
    steps = hour.until(r"(\d+) steps; of 60 held-out pictures \d+% are read right")[1]
    browser.wait_text("#run .figures", f"{steps}\nsteps", "Loss per token")
    points = "return Number(document.querySelector('#run .curve').dataset.points)"
    browser.wait(f"{points} >= arguments[0] / 2", int(steps))
    assert browser.complaints() == []


def test_from_an_empty_environment_to_the_same_tokens_everywhere(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    begun = time.monotonic()
    environment, overrides = tmp_path / "environment", tmp_path / "torch.txt"
    overrides.write_text("torch==2.13.0\n")
    run(UV, "venv", "--quiet", str(environment))
    python = str(environment / "bin" / "python")
    install = ("pip", "install", "--quiet", "--python", python, "--overrides", str(overrides), "--compile-bytecode")
    run(UV, *install, f"{wheel}[cpu,demo]")
    installed_s = time.monotonic() - begun

    cleared = ("PYTHONPATH", "VIRTUAL_ENV", "TINKER_BASE_URL", "TINKER_API_KEY")
    told = {name: value for name, value in os.environ.items() if name not in cleared and not name.startswith("FOVEA")}
    told |= {"FOVEA_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [python, "-P", str(ROOT / "examples" / "first_hour.py"), str(tmp_path / "hour")]
    errors = (tmp_path / "errors").open("w+")
    process = subprocess.Popen(command, cwd=tmp_path, env=told, stdout=subprocess.PIPE, stderr=errors, text=True)
    hour = Hour(process)
    try:
        hour.say(f"{installed_s:7.1f} s  install the wheel with the extras cpu and demo")
        address = hour.until(r"watch it learn: (http://127\.0\.0\.1:\d+/)")[1]
        with running_browser() as browser:
            watch(hour, browser, address)
        hour.until(r"OpenAI's client: 60 of 60 answers equal")
        hour.until(r"transformers: 60 of 60 answers equal")
        assert process.wait(60) == 0
        hour.say(f"{time.monotonic() - begun:7.1f} s  in all")
    except AssertionError:
        errors.seek(0)
        print(errors.read())
        raise
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
        hour.close()
        errors.close()
