"""Runs one recipe in its client environment and checks its metrics."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cookbook.criterion import Verdict
from cookbook.environments import Environment
from cookbook.recipe import Command, MissingCheckpoint, Recipe, Situation

_POLL_S = 0.5
_TAIL_LINES = 12


@dataclass(frozen=True)
class Result:
    """Result of one run; a row of results.json.

    Attributes:
        recipe: Name of the recipe.
        version: Version of tinker-cookbook.
        python: Python version of the client environment.
        checks: Checks of the contract that it covers.
        steps: Number of rows with the first criterion's metric.
        first: First value of that metric.
        last: Last value of that metric.
        seconds: Duration of the run.
        ok: Whether the program succeeded and every criterion holds.
        detail: Description of the criteria, or the end of the output.
        replaced: Descriptions of replaced settings; a run with one does not count as the recipe.
    """

    recipe: str
    version: str
    python: str
    checks: list[str]
    steps: int
    first: float | None
    last: float | None
    seconds: float
    ok: bool
    detail: str
    replaced: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        return asdict(self)


class RecipeFailed(Exception):
    """A program of the run failed or timed out. The message ends with its last lines."""


@dataclass(frozen=True)
class Run:
    """One recipe to run.

    Attributes:
        recipe: The recipe.
        here: Context of the run.
        environment: Client environment.
        api_key: API key for the server.
        timeout_s: Timeout in seconds.
        stopped: Event that ends the run.
    """

    recipe: Recipe
    here: Situation
    environment: Environment
    api_key: str
    timeout_s: float
    stopped: threading.Event

    def execute(self, progress: Callable[[int], None]) -> Result:
        """Runs all programs and checks the metrics. Calls `progress` repeatedly with the number of logged rows."""
        start = time.monotonic()
        try:
            self.recipe.prepare(self.here)
            for command in self.recipe.commands(self.here):
                self._execute(command, start + self.timeout_s, progress)
        except (MissingCheckpoint, RecipeFailed) as error:
            verdicts = [Verdict(False, 0, None, None, str(error))]
        else:
            rows = self.recipe.metrics(self.here)
            verdicts = [criterion.judge(rows) for criterion in self.recipe.criteria]
        return Result(
            recipe=self.recipe.name,
            version=self.here.version,
            python=self.environment.python_version,
            checks=list(self.recipe.checks),
            steps=verdicts[0].steps,
            first=verdicts[0].first,
            last=verdicts[0].last,
            seconds=round(time.monotonic() - start, 1),
            ok=all(verdict.ok for verdict in verdicts),
            detail="; ".join(verdict.detail for verdict in verdicts),
            replaced=[
                f"{name}={each.value} instead of {each.own[self.here.version]} ({each.why})"
                for name, each in self.recipe.replaced_in(self.here.version).items()
            ],
        )

    def _execute(self, command: Command, deadline: float, progress: Callable[[int], None]) -> None:
        output = self.here.log_folder(self.recipe.name).with_suffix(".log")
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a") as file:
            process = subprocess.Popen(
                # -P: do not import the dataset folders as Python packages.
                [str(self.environment.python), "-P", "-m", command.module, *command.arguments],
                cwd=self.here.folder,
                env=_surroundings(self.here, self.api_key, command.path),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None and time.monotonic() < deadline and not self.stopped.wait(_POLL_S):
                    progress(self.recipe.steps_logged(self.here))
                code = process.poll()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code is None:
            why = "was stopped" if self.stopped.is_set() else f"took longer than {self.timeout_s:g} s"
            raise RecipeFailed(f"{why}; {_tail(output)}")
        if code != 0:
            raise RecipeFailed(f"ended with code {code}; {_tail(output)}")


def _surroundings(here: Situation, api_key: str, python_path: Path | None) -> dict[str, str]:
    # Keep the caller's Python settings out of the client environment, and allow no downloads.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    if python_path is not None:
        kept["PYTHONPATH"] = str(python_path)
    return kept | {
        "TINKER_API_KEY": api_key,
        "TINKER_BASE_URL": here.base_url,
        "TINKER_TELEMETRY": "0",
        "SANDBOX_URL": here.sandbox_url,
        "TINKER_COOKBOOK_RUNS_DIR": str(here.folder / "runs"),
        "HF_HOME": str(here.folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        # Old recipes use deprecated features of the SDK; the warnings would fill the end of every log.
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def _tail(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return f"the end of {output}:\n" + "\n".join(lines)
