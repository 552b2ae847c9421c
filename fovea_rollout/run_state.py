"""Where a run is, as a small JSON file: what a run that was killed goes on from."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from fovea.wire.errors import InvalidInput


@dataclass
class RunState:
    """Where a run is. What a step trains on follows from the run's seed and the step's number.

    Attributes:
        identity: What a run must have in common with the one that it goes on from: model, settings, data.
        step: Steps that the saved state has taken.
        state: Checkpoint of weights and optimizer, `tinker://...`; empty before the first one.
    """

    identity: dict[str, Any]
    step: int = 0
    state: str = ""

    @property
    def next_name(self) -> str:
        """The checkpoint's name that `state` has next: of two in turn, so that a kill before the file is written leaves
        the checkpoint that it names as it is."""
        return "resume-even" if self.state.endswith("resume-odd") else "resume-odd"

    def save(self, path: pathlib.Path) -> None:
        """Writes it, whole or not at all."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(fresh, path)

    @classmethod
    def read(cls, path: pathlib.Path) -> Self:
        """What a file says."""
        return cls(**json.loads(path.read_text()))

    @classmethod
    def begin_or_resume(cls, path: pathlib.Path, identity: Mapping[str, Any]) -> Self:
        """What a file says; a fresh state if there is none.

        Raises:
            InvalidInput: The file is of a run of other settings or data, the first of which it names.
        """
        # As JSON has it, so that tuples and lists are the same.
        identity = json.loads(json.dumps(identity))
        if not path.exists():
            return cls(dict(identity))
        found = cls.read(path)
        for name in sorted({*identity, *found.identity}):
            if identity.get(name) != found.identity.get(name):
                raise InvalidInput(
                    f"{path} is of a run whose {name} is {found.identity.get(name)!r}, not {identity.get(name)!r}: give"
                    " another folder, or the same settings to resume it",
                    field=name,
                )
        return found
