"""Which tests a process of `make test` runs together, in order: those that share what takes long to start."""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

_APART = ("conformance", "sampler", "trainer")
"""Folders of tests/e2e that start what they need themselves; all others use one Fovea."""


class Lanes(LoadScopeScheduling):
    """A process is given a folder at a time, or a file where there are no folders."""

    def _split_scope(self, nodeid: str) -> str:
        _, kind, place, *_ = PurePosixPath(nodeid.partition("::")[0]).parts
        return kind if kind == "e2e" and place not in _APART else f"{kind}/{place}"
