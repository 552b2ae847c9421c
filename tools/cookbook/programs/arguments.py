"""The command line of every program, and its file of metrics."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Arguments:
    """The parsed command line.

    Attributes:
        base_url: URL of the server; the key is in TINKER_API_KEY.
        model_name: Model of the server.
        renderer_name: The cookbook's renderer for the model.
        log_path: Folder for metrics.
        state: A training checkpoint to inspect or start from, if given.
    """

    base_url: str
    model_name: str
    renderer_name: str
    log_path: Path
    state: str | None


def read_command_line() -> Arguments:
    """Parses sys.argv; exits with a usage message if something is missing."""
    parser = argparse.ArgumentParser()
    for name in ("base-url", "model-name", "renderer-name", "log-path"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--state")
    given = parser.parse_args()
    return Arguments(given.base_url, given.model_name, given.renderer_name, Path(given.log_path), given.state)


def write_metrics(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line, like the cookbook's own metrics.jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
