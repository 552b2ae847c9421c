"""What all owners draw on, and how much of it each may have."""

from collections import Counter
from collections.abc import Mapping
from types import TracebackType

from fovea.wire.errors import ResourceExhausted


class Quota:
    """A number of things of which one owner may hold as many as are free for all.

    So one owner alone takes half, two take a third each, and some are always free for whoever comes next: the dynamic
    threshold by which switches share their buffers (Choudhury and Hahne, 1998). Nothing is set aside for those who do
    not come.

    Args:
        setting: The name of the setting that is the number.
        what: The things, for whoever is refused.
    """

    def __init__(self, setting: str, capacity: int, what: str) -> None:
        self._setting, self._capacity, self._what = setting, capacity, what
        self._held: Counter[str] = Counter()
        self._total = 0

    def check(self, owner: str, count: int = 1) -> None:
        """Raises ResourceExhausted if an owner may not take so many more."""
        free = self._capacity - self._total - (count - 1)
        if self._held[owner] + count > free:
            raise ResourceExhausted(
                f"this owner has {self._held[owner]} {self._what}, and all have {self._total} of {self._setting} "
                f"{self._capacity}: an owner may have as many as are free; send this again later",
                limit=self._setting,
            )

    def take(self, owner: str, count: int = 1) -> None:
        """Notes so many more, whether they may be or not."""
        self._held[owner] += count
        self._total += count

    def give(self, owner: str, count: int = 1) -> None:
        """Notes so many less."""
        self._held[owner] -= count
        self._total -= count
        if not self._held[owner]:
            del self._held[owner]

    def reset(self, held: Mapping[str, int]) -> None:
        """Puts a new count in the place of what was noted."""
        self._held = Counter(held)
        self._total = sum(held.values())

    @property
    def is_half_free(self) -> bool:
        """Returns whether so little is in use that no owner can exceed its share."""
        return self._total <= self._capacity // 2

    def surplus(self, owner: str) -> int:
        """Returns the amount an owner must give back to hold no more than is then free; 0 or less means none."""
        return (self._held[owner] + self._total - self._capacity + 1) // 2

    def holding(self, owner: str) -> "QuotaUse":
        """A context that gives back at its end what was taken within it."""
        return QuotaUse(self, owner)


class QuotaUse:
    """What one piece of an owner's work has."""

    def __init__(self, quota: Quota, owner: str) -> None:
        self._quota, self._owner, self._count = quota, owner, 0

    def take(self, count: int) -> None:
        """Takes so many more. Raises ResourceExhausted if the owner may not."""
        self._quota.check(self._owner, count)
        self._quota.take(self._owner, count)
        self._count += count

    def __enter__(self) -> "QuotaUse":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._quota.give(self._owner, self._count)
