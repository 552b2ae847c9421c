"""What all owners draw on, and how much of it each may have."""

from collections import Counter

from fovea.wire.errors import ResourceExhausted


class Shares:
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

    def check(self, owner: str) -> None:
        """Raises ResourceExhausted if an owner may not take one more."""
        free = self._capacity - self._total
        if self._held[owner] + 1 > free:
            raise ResourceExhausted(
                f"this owner has {self._held[owner]} {self._what}, and all have {self._total} of {self._setting} "
                f"{self._capacity}: an owner may have as many as are free; send this again later",
                limit=self._setting,
            )

    def take(self, owner: str) -> None:
        """Notes one more, whether it may be or not."""
        self._held[owner] += 1
        self._total += 1

    def give(self, owner: str) -> None:
        """Notes one less."""
        self._held[owner] -= 1
        self._total -= 1
        if not self._held[owner]:
            del self._held[owner]
