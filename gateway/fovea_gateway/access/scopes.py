"""The caller of a request, and the permissions of its API key."""

import enum
from contextvars import ContextVar
from dataclasses import dataclass

from fovea.wire.errors import PermissionDenied


class Scope(enum.StrEnum):
    """The permissions of a key; each scope includes those before it."""

    READ = "read"
    """Open sessions, look at models, checkpoints, results and the owner's usage."""
    SAMPLE = "sample"
    """Sample."""
    TRAIN = "train"
    """Create, train, save and delete models and checkpoints."""
    ADMIN = "admin"
    """Create and revoke keys, set limits, see usage and end sessions of all owners."""

    def includes(self, other: "Scope") -> bool:
        """Returns whether this scope permits what the other one permits."""
        order = list(Scope)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class Caller:
    """The sender of a request, identified by its API key.

    Attributes:
        owner: The owner of the key; all data belongs to an owner.
        key_id: The id of the key; empty for work that no request started.
    """

    owner: str
    key_id: str = ""
    scope: Scope = Scope.TRAIN

    def require(self, scope: Scope, what: str) -> None:
        """Raises PermissionDenied, which names `what`, if the key lacks the scope."""
        if not self.scope.includes(scope):
            raise PermissionDenied(
                f"this API key ({self.key_id}) has scope {self.scope}, and {what} needs {scope}: use another key of "
                f"yours, or ask the operator for one (`fovea keys create --owner {self.owner} --scope {scope}`)",
                scope=scope.value,
            )


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller(""))  # noqa: B039 - frozen
"""The sender of the request that the current task answers."""


def asked_owner(asked: str, what: str) -> str | None:
    """Returns the owner of the requested data: the caller if `asked` is empty, None (all owners) if it is `*`.

    Raises PermissionDenied, which names the data as `what`, for other owners if the caller lacks the scope admin.
    """
    caller = CALLER.get()
    owner = asked or caller.owner
    if owner != caller.owner:
        caller.require(Scope.ADMIN, f"{what} of other owners")
    return None if owner == "*" else owner
