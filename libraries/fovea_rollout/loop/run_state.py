"""The state of a run in a small JSON file, from which a killed run resumes."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from fovea.wire.errors import InvalidInput


@dataclass
class RunState:
    """The state of a run. The data of a step depends only on the run's seed and the step's number.

    Attributes:
        identity: What a resumed run must have in common with the run before: model, settings and data.
        step: Number of steps of the saved state.
        state: Checkpoint of weights and optimizer, `tinker://...`; empty before the first checkpoint.
    """

    identity: dict[str, Any]
    step: int = 0
    state: str = ""

    @property
    def next_name(self) -> str:
        """Name of the next checkpoint.

        Two names alternate, so that a kill before `save` cannot damage the checkpoint that the file still names.
        """
        return "resume-even" if self.state.endswith("resume-odd") else "resume-odd"

    def save(self, path: pathlib.Path) -> None:
        """Writes the file atomically: after a kill or a power cut there is the old file or the new one."""
        fresh = path.with_suffix(".new")
        with fresh.open("w") as file:
            file.write(json.dumps(asdict(self), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)

    @classmethod
    def read(cls, path: pathlib.Path) -> Self:
        """Reads the file.

        Raises:
            InvalidInput: The file is empty, or `save` did not write it.
        """
        text = path.read_text(errors="replace")
        try:
            found = cls(**json.loads(text))
            if not (isinstance(found.identity, dict) and type(found.step) is int and isinstance(found.state, str)):
                raise TypeError("identity, step and state have other types")
        except (ValueError, TypeError) as error:
            said = f"cannot be read ({error})" if text.strip() else "is empty"
            raise InvalidInput(
                f"{path} {said}: restore the file to resume the run, or give another folder to begin a new one",
                field="out",
            ) from None
        return found

    @classmethod
    def begin_or_resume(cls, path: pathlib.Path, identity: Mapping[str, Any], later: Collection[str] = ()) -> Self:
        """Reads the file, or makes a new state if there is none.

        Args:
            path: The file.
            identity: Identity of the run that begins or resumes.
            later: Names in the identity that only `confirm` compares.

        Raises:
            InvalidInput: The file belongs to a run with other settings or data, and the message names the first
                difference; or the file is broken.
        """
        if not path.exists():
            return cls(_as_json(identity))
        found = cls.read(path)
        found._compare(path, identity, sorted({*identity, *found.identity} - {*later}))
        return found

    def confirm(self, path: pathlib.Path, further: Mapping[str, Any]) -> None:
        """Adds entries to the identity of a new run, or compares them with those of a resumed run.

        Raises:
            InvalidInput: The resumed run had other values. The message names the first difference.
        """
        if path.exists():
            self._compare(path, further, sorted(further))
        self.identity |= _as_json(further)

    def _compare(self, path: pathlib.Path, identity: Mapping[str, Any], names: Sequence[str]) -> None:
        identity = _as_json(identity)
        for name in names:
            was, now = self.identity.get(name), identity.get(name)
            if was != now:
                raise InvalidInput(
                    f"{path} belongs to a run with {name} {was!r}, not {now!r}: give another folder, or the same"
                    " settings and data to resume the run",
                    field=name,
                )


def _as_json(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Converts an identity to JSON and back, so that tuples and lists are equal."""
    found: dict[str, Any] = json.loads(json.dumps(identity))
    return found
