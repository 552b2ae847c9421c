"""Limits on resources that all owners share."""

from collections import Counter
from collections.abc import Mapping
from types import TracebackType

from fovea.wire.errors import ResourceExhausted


class Quota:
    """A limit on things that all owners share. Each owner may hold at most as many as are still free.

    A single owner can therefore take half, and two owners a third each, so that some are always free for the next
    owner. This is the dynamic threshold by which switches share their buffers (Choudhury and Hahne, 1998). Nothing is
    reserved for owners that are absent.

    Args:
        setting: The name of the setting that contains the capacity.
        capacity: The total number of things.
        what: A plural noun for the things, for the error message.
    """

    def __init__(self, setting: str, capacity: int, what: str) -> None:
        self._setting, self._capacity, self._what = setting, capacity, what
        self._held: Counter[str] = Counter()
        self._total = 0

    def check(self, owner: str, count: int = 1) -> None:
        """Raises ResourceExhausted if the owner may not take `count` more."""
        free = self._capacity - self._total - (count - 1)
        if self._held[owner] + count > free:
            raise ResourceExhausted(
                f"this owner has {self._held[owner]} {self._what}, and all have {self._total} of {self._setting} "
                f"{self._capacity}: an owner may have as many as are free; send this request again later",
                limit=self._setting,
            )

    def take(self, owner: str, count: int = 1) -> None:
        """Records that the owner holds `count` more, without a check."""
        self._held[owner] += count
        self._total += count

    def give(self, owner: str, count: int = 1) -> None:
        """Records that the owner holds `count` less."""
        self._held[owner] -= count
        self._total -= count
        if not self._held[owner]:
            del self._held[owner]

    def reset(self, held: Mapping[str, int]) -> None:
        """Replaces all recorded counts."""
        self._held = Counter(held)
        self._total = sum(held.values())

    @property
    def is_half_free(self) -> bool:
        """Returns whether at most half of the capacity is in use, so that no owner can exceed its share."""
        return self._total <= self._capacity // 2

    def surplus(self, owner: str) -> int:
        """Returns the amount that an owner must give back to hold no more than is free then; 0 or less means none."""
        return (self._held[owner] + self._total - self._capacity + 1) // 2

    def holding(self, owner: str) -> "QuotaUse":
        """Returns a context manager. When it ends, it gives back the amount that `QuotaUse.take` took."""
        return QuotaUse(self, owner)


class QuotaUse:
    """The amount that one request of an owner holds."""

    def __init__(self, quota: Quota, owner: str) -> None:
        self._quota, self._owner, self._count = quota, owner, 0

    def take(self, count: int) -> None:
        """Takes `count` more. Raises ResourceExhausted if the owner may not have them."""
        self._quota.check(self._owner, count)
        self._quota.take(self._owner, count)
        self._count += count

    def __enter__(self) -> "QuotaUse":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._quota.give(self._owner, self._count)
