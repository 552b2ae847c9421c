"""A child can be tied to its parent and ends with it in any case; its imports are excluded from garbage collection."""

import gc
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from fovea.runtime.processes import bare_environment, importing

_CHILD = """
import os, time
from fovea.runtime.processes import die_with_parent
die_with_parent(os.getppid())
print("up", flush=True)
time.sleep(60)
"""
_PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {_CHILD!r}])
"""


def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.send_signal(signal.SIGKILL)
        # The child holds the other end of the pipe, which closes when the child ends.
        assert parent.stdout.read() == b""


def test_a_child_of_a_dead_parent_exits_at_once() -> None:
    code = "from fovea.runtime.processes import die_with_parent; die_with_parent(1 << 22); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_nothing_is_collected_while_importing() -> None:
    """Later collections skip the imported objects, too."""
    before = gc.get_freeze_count()
    with suppress(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_excluded_packages_are_missing_only_during_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    loaded = sys.modules["gc"]
    with importing("colorsys", "gc"):
        assert find_spec("colorsys") is None
        assert import_module("gc") is loaded
    assert import_module("colorsys").rgb_to_hsv


def test_files_of_the_users_folder_do_not_shadow_modules_of_a_process_for_tenants_data(tmp_path: Path) -> None:
    """Image workers, loss workers and trials of grammars start in the folder of `fovea up`."""
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')")
    command = [sys.executable, "-m", "random"]  # prints a few figures
    subprocess.run(command, cwd=tmp_path, env=bare_environment(), check=True, stdout=subprocess.DEVNULL)
