"""Client environments: one virtual environment per version of tinker-cookbook, separate from Fovea's own."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2] / ".cookbook"
_REQUIREMENTS = Path(__file__).parent / "requirements"


class NoEnvironment(Exception):
    """An environment could not be created. The message ends with the output of uv or Python."""


@dataclass(frozen=True)
class Environment:
    """One client environment.

    Attributes:
        version: Version of tinker-cookbook.
        python_version: Major and minor version of Python, such as 3.12.
    """

    version: str
    python_version: str

    @property
    def folder(self) -> Path:
        """Folder of the environment; git ignores it."""
        return ROOT / self.version

    @property
    def python(self) -> Path:
        """Path of its Python interpreter."""
        return self.folder / "bin" / "python"

    def ensure(self) -> None:
        """Creates the environment, or updates it to its requirements file. Raises NoEnvironment."""
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
    """Returns an interpreter of this version on this machine, or the bare version, which uv may be able to download."""
    if sys.version_info[:2] == tuple(int(part) for part in version.split(".")):
        return sys.executable
    return next((path for path in _candidates(version) if _runs(path, version)), version)


def _candidates(version: str) -> Iterator[str]:
    if found := shutil.which(f"python{version}"):
        yield found
    # pyenv's own commands fail for versions that are not global, so search its folders.
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
