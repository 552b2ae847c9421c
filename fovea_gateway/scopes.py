"""Who calls, and what the key that was shown allows."""

import enum
from contextvars import ContextVar
from dataclasses import dataclass

from fovea.wire.errors import PermissionDenied


class Scope(enum.StrEnum):
    """What a key allows; each one includes those before it."""

    READ = "read"
    """Open sessions, look at models, checkpoints, results and the owner's usage."""
    SAMPLE = "sample"
    """Sample."""
    TRAIN = "train"
    """Make, train, save and delete models and checkpoints."""
    ADMIN = "admin"
    """Make and take back everybody's keys, set everybody's limits, see everybody's usage, end everybody's sessions."""

    def includes(self, other: "Scope") -> bool:
        """Whether whoever has this may do what needs the other."""
        order = list(Scope)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request, by the key that came with it.

    Attributes:
        owner: Whose the key is: all data belongs to an owner.
        key_id: Which of the owner's keys; empty for work that no request brought.
    """

    owner: str
    key_id: str = ""
    scope: Scope = Scope.TRAIN

    def require(self, scope: Scope, what: str) -> None:
        """Raises PermissionDenied, naming `what`, if the key does not allow it."""
        if not self.scope.includes(scope):
            raise PermissionDenied(
                f"this API key ({self.key_id}) has scope {self.scope}, and {what} needs {scope}: use another key of "
                f"yours, or have one made (`fovea keys create --owner {self.owner} --scope {scope}`)",
                scope=scope.value,
            )


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller(""))  # noqa: B039 - frozen
"""Who sent the request that this task answers."""


def asked_owner(asked: str, what: str) -> str | None:
    """Whose `what` a caller is told who asked about an owner: nobody named is the caller; None, for `*`, is everybody.

    Raises PermissionDenied for somebody else's without the scope admin.
    """
    caller = CALLER.get()
    owner = asked or caller.owner
    if owner != caller.owner:
        caller.require(Scope.ADMIN, f"{what} of other owners")
    return None if owner == "*" else owner
