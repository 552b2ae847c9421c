"""A mapping that forgets what was used longest ago when its values pass a number of bytes."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ByteLru(Generic[Value]):
    """Values by key, `limit_bytes` at most in all. Not safe across threads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> Value | None:
        """The value, which is now the one used last, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: Value, size_bytes: int) -> None:
        """Holds a value, in place of others if needed.

        Raises ValueError if the value alone passes the limit: then nothing is forgotten for it.
        """
        if size_bytes > self.limit_bytes:
            raise ValueError(f"{size_bytes} bytes do not fit into {self.limit_bytes}")
        _, freed_bytes = self._entries.pop(key, (None, 0))
        self.used_bytes += size_bytes - freed_bytes
        self._entries[key] = (value, size_bytes)
        while self.used_bytes > self.limit_bytes:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Forgets the value that was used longest ago. Raises KeyError if there is none."""
        _, (_, oldest_bytes) = self._entries.popitem(last=False)
        self.used_bytes -= oldest_bytes
