"""Runs programs in forks of one process that has imported their shared modules, which takes 0.5 s each."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """The exit status and output of a program, and the modules that its process loaded."""

    returncode: int
    stdout: str
    stderr: str
    loaded: frozenset[str]


# A copy runs its program as `python -m` does and ends as a program does: the interpreter turns an exception into an
# exit status and a message on stderr.
_BEGIN = """
import importlib, json, os, runpy, sys
shared, programs, folder = json.loads(sys.argv[1])
importlib.import_module(shared)
ends = []
for number, (module, *arguments) in enumerate(programs):
    child = os.fork()
    if not child:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
        sys.argv = [module, *arguments]
        sys.modules.pop(module, None)  # it is run anew, as __main__
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            with open(f"{folder}/{number}.loaded", "w") as file:
                file.write("\\n".join(sys.modules))
        sys.exit()
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(ends))
"""


def run_copies(
    shared: str, *programs: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> list[Ended]:
    """Runs modules with arguments one after another, as `python -m MODULE ARGUMENTS` would.

    Args:
        shared: A module that all of them import. Its import must not start threads.
        programs: The name of each module with its arguments.
        cwd: Their working directory; this process's by default.
        environment: Their environment variables; those of this process by default.
    """
    with tempfile.TemporaryDirectory(prefix="copies-") as name:
        command = [sys.executable, "-c", _BEGIN, json.dumps([shared, programs, name])]
        begun = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, timeout=120, cwd=cwd, env=environment
        )
        written = [[(Path(name) / f"{i}.{kind}").read_text() for kind in _KINDS] for i in range(len(programs))]
    return [
        Ended(status, out, err, frozenset(loaded.split()))
        for status, (out, err, loaded) in zip(json.loads(begun.stdout), written, strict=True)
    ]


_KINDS = ("out", "err", "loaded")
