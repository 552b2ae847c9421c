"""What every program is told on its command line, and the file of metrics that it writes."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Told:
    """The command line.

    Attributes:
        base_url: The server; the key is in TINKER_API_KEY.
        model_name: Its model.
        renderer_name: The cookbook's renderer for it.
        log_path: The folder for metrics.
        state: A training checkpoint to look at or start from, if one was named.
    """

    base_url: str
    model_name: str
    renderer_name: str
    log_path: Path
    state: str | None


def read_command_line() -> Told:
    """Parses sys.argv; leaves with a usage message if something is missing."""
    parser = argparse.ArgumentParser()
    for name in ("base-url", "model-name", "renderer-name", "log-path"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--state")
    given = parser.parse_args()
    return Told(given.base_url, given.model_name, given.renderer_name, Path(given.log_path), given.state)


def write_metrics(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line, as the cookbook's own metrics.jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
