"""Loggers of a run's metrics: JSON lines, and TensorBoard, Weights & Biases or MLflow where they are installed."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from fovea.wire.errors import FailedPrecondition, InvalidInput

LoggerName = Literal["tensorboard", "wandb", "mlflow"]


class Logger(Protocol):
    """A logger of metrics by step. A resumed run logs the steps after its saved state again."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLinesLogger:
    """A logger that writes one line per call: `{"step": 3, "loss": 0.52, ...}`.

    Args:
        path: The file. Its lines of steps after `last_step` are removed, because the run takes these steps again.
        last_step: The last step to retain.
    """

    def __init__(self, path: pathlib.Path, last_step: int) -> None:
        self.path = path
        kept = [row for row in self.rows() if row["step"] <= last_step] if path.exists() else []
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(fresh, path)
        self._file = path.open("a")

    def rows(self) -> list[dict[str, float]]:
        """Returns the rows of the file, without a last line that is incomplete because the process was killed."""
        lines = self.path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorboardLogger:
    """A logger that writes event files to a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        from tensorboard.summary import Writer  # type: ignore[import-not-found, import-untyped]

        self._writer = Writer(str(folder))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A logger to Weights & Biases, which reads project and mode from its own environment variables."""

    def __init__(self, folder: pathlib.Path) -> None:
        import wandb  # type: ignore[import-not-found, import-untyped]

        self._run = wandb.init(dir=str(folder), name=folder.resolve().parent.name)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """A logger to MLflow, which reads server and experiment from its own environment variables."""

    def __init__(self, folder: pathlib.Path) -> None:
        import mlflow  # type: ignore[import-not-found, import-untyped]

        self._mlflow: Any = mlflow
        self._run: Any = mlflow.start_run(run_name=folder.resolve().parent.name)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(figures), step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        self._mlflow.end_run()


_KINDS: Mapping[str, Callable[[pathlib.Path], Logger]] = {
    "tensorboard": TensorboardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def open_loggers(wanted: Sequence[LoggerName | Logger], folder: pathlib.Path) -> list[Logger]:
    """Opens the named loggers, and returns them with those that are given as objects.

    Args:
        wanted: Names and objects.
        folder: Each named logger writes to a folder with its name in this one.

    Raises:
        InvalidInput: A name is unknown.
        FailedPrecondition: A logger's package is not installed.
    """
    loggers: list[Logger] = []
    for one in wanted:
        if not isinstance(one, str):
            loggers.append(one)
            continue
        if one not in _KINDS:
            raise InvalidInput(f"logger {one!r} is unknown; use {sorted(_KINDS)} or an object", field="loggers")
        (folder / one).mkdir(parents=True, exist_ok=True)
        try:
            loggers.append(_KINDS[one](folder / one))
        except ImportError as error:
            raise FailedPrecondition(f"logger {one!r} needs its package: pip install {one} ({error})") from error
    return loggers
