"""Where figures of a run go: JSON lines always, TensorBoard, Weights & Biases and MLflow where they are installed."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from fovea.wire.errors import FailedPrecondition, InvalidInput

LoggerName = Literal["tensorboard", "wandb", "mlflow"]


class Logger(Protocol):
    """Takes figures, by name, of a step. A run that is resumed logs steps after the saved one again."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLinesLogger:
    """One line per call: `{"step": 3, "loss": 0.52, ...}`.

    Args:
        path: The file. What it has of steps after `last_step` is dropped: those are taken again.
        last_step: The last step that is kept.
    """

    def __init__(self, path: pathlib.Path, last_step: int) -> None:
        self.path = path
        kept = [row for row in self.rows() if row["step"] <= last_step] if path.exists() else []
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(fresh, path)
        self._file = path.open("a")

    def rows(self) -> list[dict[str, float]]:
        """What it has. A last line that a kill cut off is left out."""
        lines = self.path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorboardLogger:
    """Event files in a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        from tensorboard.summary import Writer  # type: ignore[import-not-found, import-untyped]

        self._writer = Writer(str(folder))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases; project and mode are read from its own environment variables."""

    def __init__(self, folder: pathlib.Path) -> None:
        import wandb  # type: ignore[import-not-found, import-untyped]

        self._run = wandb.init(dir=str(folder), name=folder.resolve().parent.name)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """A run of MLflow; server and experiment are read from its own environment variables."""

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
    """Loggers by name, and those that are given as they are.

    Args:
        folder: Each gets a folder of its name in it.

    Raises:
        InvalidInput: A name is unknown.
        FailedPrecondition: Its package is not installed.
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
