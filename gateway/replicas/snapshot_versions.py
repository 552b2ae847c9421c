"""How far samplers are behind the snapshots that samples ask for."""

from collections import OrderedDict
from collections.abc import Iterable

from gateway import identity

_KNOWN = 4096


class Versions:
    """The newest snapshot of each model that a sample has asked for."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, int] = OrderedDict()

    def want(self, snapshot_id: str) -> None:
        """Notes that a sample asks for a snapshot; the base model has no versions."""
        version = identity.version_of(snapshot_id)
        if version is None:
            return
        model_id, number = version
        self._newest[model_id] = max(number, self._newest.get(model_id, number))
        self._newest.move_to_end(model_id)
        if len(self._newest) > _KNOWN:
            self._newest.popitem(last=False)

    def lag(self, held: Iterable[str]) -> int:
        """Versions between the newest that was asked for and the newest of `held`, of the model where they are most.

        Models of which nothing is held do not count: nobody samples them there, or their adapters had to leave.
        """
        newest_held: dict[str, int] = {}
        for model_id, number in filter(None, map(identity.version_of, held)):
            newest_held[model_id] = max(number, newest_held.get(model_id, number))
        return max((self._newest.get(model_id, at) - at for model_id, at in newest_held.items()), default=0)
