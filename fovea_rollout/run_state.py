"""Where a run is, as a small JSON file: what a run that was killed goes on from."""

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
        """Writes the file as a whole: a kill or a power cut leaves the old one or the new one."""
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
            InvalidInput: The file is empty, or is not one that `save` wrote.
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
        """Reads the file, or makes a fresh state if there is none.

        Args:
            identity: Of the run that begins or resumes.
            later: Names of the identity that only `confirm` will tell.

        Raises:
            InvalidInput: The file is of a run of other settings or data, the first of which it names, or is broken.
        """
        if not path.exists():
            return cls(_as_json(identity))
        found = cls.read(path)
        found._compare(path, identity, sorted({*identity, *found.identity} - {*later}))
        return found

    def confirm(self, path: pathlib.Path, further: Mapping[str, Any]) -> None:
        """Adds to the identity of a fresh run, and compares with that of a resumed one.

        Raises:
            InvalidInput: The resumed run had other values, the first of which it names.
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
                    f"{path} is of a run whose {name} is {was!r}, not {now!r}: give another folder, or the same"
                    " settings and data to resume it",
                    field=name,
                )


def _as_json(identity: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it, so that tuples and lists are the same."""
    found: dict[str, Any] = json.loads(json.dumps(identity))
    return found
