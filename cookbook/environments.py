"""Client environments: one virtual environment for each version of tinker-cookbook, apart from Fovea's own."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1] / ".cookbook"
_REQUIREMENTS = Path(__file__).parent / "requirements"


class NoEnvironment(Exception):
    """An environment could not be made; the message ends with what uv or Python said."""


@dataclass(frozen=True)
class Environment:
    """One client environment.

    Attributes:
        version: Of tinker-cookbook.
        python_version: Major and minor of its Python, as in 3.12.
    """

    version: str
    python_version: str

    @property
    def folder(self) -> Path:
        """Where it lies; git does not see it."""
        return ROOT / self.version

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def ensure(self) -> None:
        """Makes it, or brings it up to date with its requirements file. Raises NoEnvironment."""
        requirements = _REQUIREMENTS / f"{self.version}.txt"
        fingerprint = hashlib.sha256(requirements.read_bytes()).hexdigest()
        stamp = self.folder / "ready"
        if stamp.exists() and stamp.read_text() == fingerprint:
            return
        if not self.python.exists():
            _uv("venv", "--quiet", "--python", find_python(self.python_version), str(self.folder))
        sync = ["pip", "sync", "--quiet", "--require-hashes", "--compile-bytecode", "--python", str(self.python)]
        _uv(*sync, str(requirements))
        stamp.write_text(fingerprint)


ENVIRONMENTS = {one.version: one for one in (Environment("0.5.8", "3.11"), Environment("0.6.1", "3.12"))}


def find_python(version: str) -> str:
    """An interpreter of this version on this machine, or the bare version, which uv may be able to fetch."""
    if sys.version_info[:2] == tuple(int(part) for part in version.split(".")):
        return sys.executable
    return next((path for path in _candidates(version) if _runs(path, version)), version)


def _candidates(version: str) -> Iterator[str]:
    if found := shutil.which(f"python{version}"):
        yield found
    # pyenv's own command is only a name for versions that nobody made global, so its folders are looked into.
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from (str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True))


def _runs(path: str, version: str) -> bool:
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return shown.returncode == 0 and shown.stdout.startswith(f"Python {version}.")


def _uv(*arguments: str) -> None:
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv) if uv.exists() else "uv", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoEnvironment(f"`uv {' '.join(arguments[:2])}` failed:\n{done.stderr[-2000:]}")
