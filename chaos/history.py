"""What a client asked and was answered, in a file that is only added to: a line for each question and each answer."""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Answer:
    """An answer, or the error that came in its place. `at_s` is of `time.monotonic`, which all processes share."""

    at_s: float
    value: dict[str, Any]
    error: str = ""


@dataclass
class Command:
    """One command of one client.

    Attributes:
        client: Who asked.
        number: Rises by one from one command of a client to its next.
        operation: Such as forward_backward or sample.
        invoked_s: When it was sent, of `time.monotonic`.
        arguments: What is needed to tell it from others, such as the snapshot that it samples from.
        answers: One, if the promises hold.
    """

    client: str
    number: int
    operation: str
    invoked_s: float
    arguments: dict[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.client} #{self.number} {self.operation}"


@dataclass
class History:
    """The commands of all clients by (client, number), and answers to what was never asked."""

    commands: dict[tuple[str, int], Command] = field(default_factory=dict)
    unasked: list[str] = field(default_factory=list)

    def of(self, client: str) -> list[Command]:
        """One client's commands in the order in which it sent them."""
        return sorted((one for one in self.commands.values() if one.client == client), key=lambda one: one.number)

    @property
    def clients(self) -> list[str]:
        """Their names."""
        return sorted({client for client, _ in self.commands})

    def rounds(self, client: str) -> int:
        """How many rounds a client has begun."""
        return 1 + max((one.arguments.get("round", -1) for one in self.of(client)), default=-1)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> "History":
        """From the files of all clients."""
        history = cls()
        for path in paths:
            for line in path.read_text().splitlines():
                history.add(json.loads(line))
        return history

    def add(self, event: dict[str, Any]) -> None:
        """Takes one line of a file."""
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
        """Notes that a command is being sent, and returns its number."""
        number = self._count
        self._count += 1
        self._write(number, operation=operation, invoked_s=time.monotonic(), arguments=arguments)
        return number

    def answered(self, number: int, **value: Any) -> None:
        """Notes an answer."""
        self._write(number, at_s=time.monotonic(), value=value)

    def failed(self, number: int, error: str) -> None:
        """Notes an error in the place of an answer."""
        self._write(number, at_s=time.monotonic(), error=error)

    def _write(self, number: int, **event: Any) -> None:
        self._file.write(json.dumps({"client": self._client, "number": number, **event}) + "\n")
        self._file.flush()


def digest(value: Any) -> str:
    """Of a JSON value, floats to the last bit."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
