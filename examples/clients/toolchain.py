"""Builds and starts the clients. The builds are stored in `~/.cache/fovea/clients`, never among the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fovea_tinyvlm.cache import cache_directory

ROOT = Path(__file__).parents[2]
_MADE = ("build", "gen", "node_modules", "target", "sample")


class BuildFailed(Exception):
    """Raised if a toolchain could not build its client. The message ends with the output of the toolchain."""


@dataclass(frozen=True)
class Toolchain:
    """The steps from `protos/` to a program in one language.

    Attributes:
        language: Name of the folder.
        programs: Programs that must be on the PATH.
        build: Commands to run one after another in the folder.
        start: Command of the client. Relative paths that exist after the build are inside the folder.
    """

    language: str
    programs: tuple[str, ...]
    build: tuple[tuple[str, ...], ...]
    start: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        """Programs that are not on the PATH."""
        return [program for program in self.programs if shutil.which(program, path=_path()) is None]

    @property
    def is_built(self) -> bool:
        """True if the client exists, built from the current sources and protos."""
        stamp = self._place / "digest"
        return stamp.exists() and stamp.read_text() == self._digest

    @property
    def _place(self) -> Path:
        return cache_directory() / "clients" / self.language

    @property
    def _digest(self) -> str:
        return f"{_digest(ROOT / 'examples' / 'clients' / self.language, ROOT / 'protos')} {self.build}"

    @contextmanager
    def built(self) -> Iterator[list[str]]:
        """Builds the client if its sources or the protos have changed; yields the command that starts it.

        A lock keeps other processes from changing the build meanwhile. Raises BuildFailed.
        """
        self._place.mkdir(parents=True, exist_ok=True)
        with (self._place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The folders are as in the repository, so that the paths in build files are right.
            folder = self._place / "examples" / "clients" / self.language
            if not self.is_built:
                self._build(self._place, folder)
            yield [str(folder / word) if (folder / word).exists() else word for word in self.start]

    def _build(self, place: Path, folder: Path) -> None:
        sources = ROOT / "examples" / "clients" / self.language
        stamp, digest = place / "digest", self._digest
        stamp.unlink(missing_ok=True)
        for old in (place / "protos", folder):
            if old.exists():
                shutil.rmtree(old)
        shutil.copytree(sources, folder, ignore=shutil.ignore_patterns(*_MADE))
        shutil.copytree(ROOT / "protos", place / "protos")
        shutil.copy(ROOT / "buf.yaml", place)
        for command in self.build:
            done = subprocess.run(
                command, cwd=folder, env=os.environ | {"PATH": _path()}, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise BuildFailed(f"`{' '.join(command)}` failed in {folder}:\n{done.stdout}{done.stderr}")
        stamp.write_text(digest)


def _path() -> str:
    """Returns the PATH with the programs of this Python environment (buf) first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _digest(*folders: Path) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not {"__pycache__", *_MADE} & set(name.parts):
                digest.update(str(name).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


TOOLCHAINS = {
    one.language: one
    for one in (
        Toolchain("go", ("go", "buf"), (("buf", "generate"), ("go", "build", "-o", "sample", ".")), ("./sample",)),
        Toolchain(
            "typescript",
            ("node", "npm", "buf"),
            (("npm", "ci", "--no-audit", "--no-fund"), ("npm", "run", "build")),
            ("node", "build/sample.js"),
        ),
        Toolchain("java", ("java", "mvn"), (("mvn", "-q", "-B", "package"),), ("java", "-jar", "target/sample.jar")),
    )
}
