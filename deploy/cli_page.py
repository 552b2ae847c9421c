"""Generates docs/reference/cli.md from the commands: `python -m deploy.cli_page`."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import typer

from fovea.cli.main import PROGRAMS, app

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
_HEAD = """# The `fovea` command

`python -m deploy.cli_page` generates this page from the commands, and a test compares the two. Errors are one
line. Exit code 2 means that the command line is wrong or cannot work here; 1 means that the command failed or that a
service is unhealthy. Commands find the Fovea that was started in the same folder or with the same `--state-dir`.
"""

# A single process prints the help of all programs. It hides torch, which the SDK imports if it finds it and no help
# text needs.
_ASK_ALL = """
import contextlib, io, json, runpy, sys
sys.modules["torch"] = None
told = []
for module, arguments in json.loads(sys.argv[1]):
    sys.argv = [module, *arguments, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise
    told.append(out.getvalue())
print(json.dumps(told))
"""


def page() -> str:
    """Returns the page as Markdown."""
    root: Any = typer.main.get_command(app)
    return _HEAD + "".join(_sections(root, "fovea"))


def _sections(command: Any, name: str) -> Iterator[str]:
    children = getattr(command, "commands", {})
    if name != "fovea" and not children:
        yield f"\n## {name}\n\n{_text(command.help)}\n"
        yield _theirs(name) if name in PROGRAMS else _options(command)
    for child, inner in children.items():
        if not inner.hidden:
            yield from _sections(inner, f"{name} {child}")


def _options(command: Any) -> str:
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        record = parameter.param_type_name == "option"
        names = (
            ", ".join(f"`{each}`" for each in parameter.opts)
            if record
            else f"`{parameter.metavar or str(parameter.name).upper()}`"
        )
        kind = "" if getattr(parameter, "is_flag", False) else _kind(parameter, command)
        rows.append(f"| {names}{f' {kind}' if kind else ''} | {_text(parameter.help)} | {_default(parameter)} |")
    return "\n".join(["", "| option | what it does | default |", "|---|---|---|", *rows, ""]) if rows else ""


def _kind(parameter: Any, command: Any) -> str:
    if parameter.param_type_name != "option":
        return ""
    return f"`{parameter.metavar or parameter.display_type(typer.Context(command)).strip('<>')}`"


def _default(parameter: Any) -> str:
    default, variable = parameter.default, parameter.envvar
    shown = "" if default in (None, "", False) or callable(default) else f"`{default}`"
    return ", ".join(filter(None, [shown, f"`${variable}`" if variable else ""]))


def _text(words: str | None) -> str:
    return " ".join((words or "").split()).replace("|", "\\|")


def _theirs(name: str) -> str:
    """Returns the help text of a command that is a program of its own."""
    words = _told()[name].strip().replace(f"{PAGE.parents[2]}/", "")
    return "\n```\n" + "\n".join(line.rstrip() for line in words.splitlines()) + "\n```\n"


@cache
def _told() -> dict[str, str]:
    """Returns the help text of each program, as printed on a terminal 100 characters wide, without colours."""
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "TYPER_USE_RICH": "0"}
    command = [
        sys.executable,
        "-c",
        _ASK_ALL,
        json.dumps([(program.module, program.arguments) for program in PROGRAMS.values()]),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return dict(zip(PROGRAMS, json.loads(done.stdout), strict=True))


if __name__ == "__main__":
    PAGE.write_text(page())
