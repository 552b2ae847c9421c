"""Groups and orders the tests for the processes of `make test`: tests that share a slow start run together."""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

_APART = ("conformance", "sampler", "trainer")
"""Folders of tests/e2e that start their own services; all others share one Fovea."""


class Lanes(LoadScopeScheduling):
    """Gives a process one folder at a time, or one file of unit tests, so that no process waits long at the end."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        _, kind, place, *_ = PurePosixPath(path).parts
        if kind == "unit":
            return path
        return kind if kind == "e2e" and place not in _APART else f"{kind}/{place}"
