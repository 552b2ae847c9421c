"""The definition of a check, and the register of all checks."""

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
    """The result of a check. `refused`: the server says in an error of category user what it does not support."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    NOT_APPLICABLE = "not_applicable"


class Failed(AssertionError):
    """Raised if the server violates the contract. The message says what was seen."""


class Refused(Exception):
    """Raised if the server says that it does not support a request."""


class NotApplicable(Exception):
    """Raised if a check cannot run. The message says what it needs."""


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        check_id: C1 to C131.
        title: The contract's sentence, shortened.
        section: Letter of the contract's section, A to K.
        run: Runs the check; returns one line about what was seen. Raises `Failed`, `Refused` or `NotApplicable`.
        timeout_s: Seconds after which the check counts as failed.
        background: Whether the check mostly waits, and so runs beside others.
        needs_images: Whether the check needs `--vlm`.
        alone: Whether the check disturbs all others by restarting the server, and so runs after them.
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
        """The number of the check: 123 for C123."""
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
    """Registers the decorated function as a check."""

    def register(function: CheckFunction) -> CheckFunction:
        section = section_of(int(check_id[1:]))
        assert check_id not in REGISTER, f"{check_id} is registered twice"
        REGISTER[check_id] = Check(check_id, title, section, function, timeout_s, background, needs_images, alone)
        return function

    return register


def section_of(number: int) -> str:
    """Returns the letter of the contract's section with this check."""
    last = {"A": 12, "B": 35, "C": 50, "D": 77, "E": 99, "F": 105, "G": 116, "H": 119, "I": 123, "J": 128, "K": 131}
    return next(letter for letter, end in last.items() if number <= end)


def expect(condition: bool, otherwise: str) -> None:
    """Raises Failed with a message unless a condition holds."""
    if not condition:
        raise Failed(otherwise)


def expect_close(seen: float, wanted: float, tolerance: float, what: str) -> None:
    """Raises Failed if two numbers differ by more than `tolerance` times the larger of 1 and the expected number."""
    if not abs(seen - wanted) <= tolerance * max(1.0, abs(wanted)):
        raise Failed(f"{what} is {seen:.9g}, expected {wanted:.9g} within {tolerance:g}")


@contextmanager
def user_error(*words: str) -> Iterator[None]:
    """Expects a failed future of category user with a message that contains all `words`, in any case."""
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
    """Converts a failed future of category user that says 'not supported' to Refused. Other errors pass."""
    try:
        yield
    except tinker.RequestFailedError as error:
        if error.category == tinker.types.RequestErrorCategory.User and _REFUSAL.search(str(error)):
            raise Refused(str(error)) from None
        raise
