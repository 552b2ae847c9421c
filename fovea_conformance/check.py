"""What a check is, and the register of all of them."""

import enum
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tinker

if TYPE_CHECKING:
    from fovea_conformance.target import Target

CheckFunction = Callable[["Target"], str]
REGISTER: dict[str, "Check"] = {}
_REFUSAL = re.compile(r"not support|unsupported|not served|does not (take|support)", re.IGNORECASE)


class Status(enum.StrEnum):
    """How a check ended. `refused` means: turned down by name, as an error of category user."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    NOT_APPLICABLE = "not_applicable"


class Failed(AssertionError):
    """The server did something else than the contract says; the message tells what was seen."""


class Refused(Exception):
    """The server turned the request down by name."""


class NotApplicable(Exception):
    """The check cannot be made here; the message says what it would need."""


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        check_id: C1 to C123.
        title: The contract's own sentence, shortened.
        section: Its letter in the contract, A to I.
        run: Raises `Failed`, `Refused` or `NotApplicable`; returns what was seen in one line.
        timeout_s: After which it counts as failed.
        background: Whether it mostly waits and runs beside the others.
        needs_images: Whether it is made only with `--vlm`.
        alone: Whether it disturbs all others, by a restart of the server, and so runs after them.
    """

    check_id: str
    title: str
    section: str
    run: CheckFunction
    timeout_s: float
    background: bool
    needs_images: bool
    alone: bool = False

    @property
    def number(self) -> int:
        """123 of C123."""
        return int(self.check_id[1:])


def check(
    check_id: str,
    title: str,
    *,
    timeout_s: float = 120.0,
    background: bool = False,
    needs_images: bool = False,
    alone: bool = False,
) -> Callable[[CheckFunction], CheckFunction]:
    """Registers the function below it as a check."""

    def register(function: CheckFunction) -> CheckFunction:
        section = section_of(int(check_id[1:]))
        assert check_id not in REGISTER, f"{check_id} is registered twice"
        REGISTER[check_id] = Check(check_id, title, section, function, timeout_s, background, needs_images, alone)
        return function

    return register


def section_of(number: int) -> str:
    """The letter of the contract's section that holds this check."""
    last = {"A": 12, "B": 35, "C": 50, "D": 77, "E": 99, "F": 105, "G": 116, "H": 119, "I": 123}
    return next(letter for letter, end in last.items() if number <= end)


def expect(condition: bool, otherwise: str) -> None:
    """Raises Failed with what was seen instead."""
    if not condition:
        raise Failed(otherwise)


def expect_close(seen: float, wanted: float, tolerance: float, what: str) -> None:
    """Raises Failed if two numbers differ by more than `tolerance` times the larger of 1 and the wanted one."""
    if not abs(seen - wanted) <= tolerance * max(1.0, abs(wanted)):
        raise Failed(f"{what} is {seen:.9g}, expected {wanted:.9g} within {tolerance:g}")


@contextmanager
def user_error(*words: str) -> Iterator[None]:
    """Expects a failed future of category user whose message has all `words`, ignoring case."""
    try:
        yield
    except tinker.RequestFailedError as error:
        expect(error.category == tinker.types.RequestErrorCategory.User, f"category {error.category}: {error}")
        missing = [word for word in words if word.lower() not in str(error).lower()]
        expect(not missing, f"the error does not name {', '.join(missing)}: {error}")
        return
    raise Failed("was accepted, expected a failed future of category user")


@contextmanager
def may_refuse() -> Iterator[None]:
    """Turns a failed future of category user that says 'not supported' into Refused; other errors stay."""
    try:
        yield
    except tinker.RequestFailedError as error:
        if error.category == tinker.types.RequestErrorCategory.User and _REFUSAL.search(str(error)):
            raise Refused(str(error)) from None
        raise
