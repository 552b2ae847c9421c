"""Where a run is, as a small JSON file: what a run that was killed goes on from."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fovea.wire.errors import InvalidInput


@dataclass
class RunState:
    """Where a run is. Which rows a step takes follows from the seed and its number.

    Attributes:
        identity: What a run must have in common with the one that it goes on from: model, settings, data.
        step: Steps that the saved state has taken.
        state: Checkpoint of weights and optimizer, `tinker://...`; empty before the first one.
        weights: Checkpoint to sample from, of the best evaluation until now; empty before the first one.
        best_step: Steps that it has taken.
        best_loss: Its held-out loss.
        misses: Evaluations since then, none of which was better.
        is_finished: Whether training is over.
    """

    identity: dict[str, Any]
    step: int = 0
    state: str = ""
    weights: str = ""
    best_step: int = 0
    best_loss: float | None = None
    misses: int = 0
    is_finished: bool = False

    def save(self, path: pathlib.Path) -> None:
        """Writes it, whole or not at all."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(fresh, path)

    @classmethod
    def begin_or_resume(cls, path: pathlib.Path, identity: Mapping[str, Any]) -> RunState:
        """What a file says; a fresh state if there is none.

        Raises:
            InvalidInput: The file is of a run of other settings or data, the first of which it names.
        """
        # As JSON has it, so that tuples and lists are the same.
        identity = json.loads(json.dumps(identity))
        if not path.exists():
            return cls(dict(identity))
        found = cls(**json.loads(path.read_text()))
        for name in sorted({*identity, *found.identity}):
            if identity.get(name) != found.identity.get(name):
                raise InvalidInput(
                    f"{path} is of a run whose {name} is {found.identity.get(name)!r}, not {identity.get(name)!r}: give"
                    " another folder, or the same settings to resume it",
                    field=name,
                )
        return found
