"""The requests and answers of clients, in append-only files with one line per event."""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Answer:
    """An answer, or the error in its place. `at_s` is from `time.monotonic`, which all processes share."""

    at_s: float
    value: dict[str, Any]
    error: str = ""


@dataclass
class Command:
    """One command of one client.

    Attributes:
        client: Name of the client.
        number: Number of the command, which rises by one per command of a client.
        operation: Operation, such as forward_backward or sample.
        invoked_s: When it was sent, from `time.monotonic`.
        arguments: Arguments that distinguish it, such as the sampled snapshot.
        answers: Answers; exactly one if the promises hold.
    """

    client: str
    number: int
    operation: str
    invoked_s: float
    arguments: dict[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.client} #{self.number} {self.operation}"


@dataclass
class History:
    """The commands of all clients, keyed by (client, number), and answers to commands that were never sent."""

    commands: dict[tuple[str, int], Command] = field(default_factory=dict)
    unasked: list[str] = field(default_factory=list)

    def of(self, client: str) -> list[Command]:
        """Returns one client's commands in the order in which they were sent."""
        return sorted((one for one in self.commands.values() if one.client == client), key=lambda one: one.number)

    @property
    def clients(self) -> list[str]:
        """Returns the names of all clients."""
        return sorted({client for client, _ in self.commands})

    def rounds(self, client: str) -> int:
        """Returns how many rounds a client has started."""
        return 1 + max((one.arguments.get("round", -1) for one in self.of(client)), default=-1)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> "History":
        """Reads the files of all clients."""
        history = cls()
        for path in paths:
            for line in path.read_text().splitlines():
                history.add(json.loads(line))
        return history

    def add(self, event: dict[str, Any]) -> None:
        """Adds the event of one line."""
        key = (event["client"], event["number"])
        if "operation" in event:
            self.commands[key] = Command(**event)
        elif key in self.commands:
            answer = Answer(event["at_s"], event.get("value", {}), event.get("error", ""))
            self.commands[key].answers.append(answer)
        else:
            self.unasked.append(f"{key[0]} #{key[1]}")


class Recorder:
    """Writes the file of one client."""

    def __init__(self, file: IO[str], client: str) -> None:
        self._file = file
        self._client = client
        self._count = 0

    def invoked(self, operation: str, **arguments: Any) -> int:
        """Records that a command is being sent. Returns its number."""
        number = self._count
        self._count += 1
        self._write(number, operation=operation, invoked_s=time.monotonic(), arguments=arguments)
        return number

    def answered(self, number: int, **value: Any) -> None:
        """Records an answer."""
        self._write(number, at_s=time.monotonic(), value=value)

    def failed(self, number: int, error: str) -> None:
        """Records an error in place of an answer."""
        self._write(number, at_s=time.monotonic(), error=error)

    def _write(self, number: int, **event: Any) -> None:
        self._file.write(json.dumps({"client": self._client, "number": number, **event}) + "\n")
        self._file.flush()


def digest(value: Any) -> str:
    """Returns a digest of a JSON value that depends on every bit of its floats."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
