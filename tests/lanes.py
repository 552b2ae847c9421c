"""Which tests a process of `make test` runs together, in order: those that share what takes long to start."""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

_APART = ("conformance", "sampler", "trainer")
"""Folders of tests/e2e that start what they need themselves; all others use one Fovea."""


class Lanes(LoadScopeScheduling):
    """A process is given a folder at a time; of unit tests a file, so that at the end none waits long for another."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        _, kind, place, *_ = PurePosixPath(path).parts
        if kind == "unit":
            return path
        return kind if kind == "e2e" and place not in _APART else f"{kind}/{place}"
