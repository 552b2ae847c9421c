"""Code in the documents is valid: Python compiles and uses existing names, and commands and their options exist.

Python also runs: see `RUN`.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from deploy.cli_page import _ASK_ALL
from fovea.cli.main import PROGRAMS, app

ROOT = pathlib.Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in ("cli.md", "notes.md")),
]
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:\.venv/bin/)?(?:fovea|make|python -m) [^`\n]+)`")
_OPTION = re.compile(r"(?<![\w-])-{1,2}[a-zA-Z][\w-]*")
_PARTS = re.compile(r"&&|\|\||[|;]|\$\(|\)")
_FOLDERS = ("deploy/", "docs/", "examples/", "requirements/", "services/", "tests/", "tools/")


class Code(NamedTuple):
    """A block of code of a page."""

    where: str
    language: str
    text: str


def _codes() -> Iterator[Code]:
    for page in PAGES:
        text = page.read_text()
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            yield Code(f"{page.relative_to(ROOT)}:{line}", block[2], textwrap.dedent(block[3]))
        for span in _INLINE.finditer(_BLOCK.sub("", text)):
            yield Code(f"{page.relative_to(ROOT)}, `{span[1]}`", "", span[1])


CODES = list(_codes())
PYTHON = [code for code in CODES if code.language == "python"]
RUN = {
    "docs/guides/rollout.md": (3, "tests/contract/fovea_rollout/test_guide.py"),
    "docs/guides/first-fine-tune.md": (4, "tests/e2e/test_guides.py"),
    "docs/guides/openai.md": (1, "tests/e2e/test_guides.py"),
}
"""The number of Python blocks of each page, and the tests that run all of them."""


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.where)
def test_python_compiles_and_names_what_exists(code: Code) -> None:
    tree = compile(code.text, code.where, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{code.where}: {node.module} has no {alias.name}"
                names[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and callable(names.get(node.func.id)):
            known = inspect.signature(names[node.func.id]).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
                unknown = {one.arg for one in node.keywords if one.arg} - known.keys()
                assert not unknown, f"{code.where}: {node.func.id} has no argument {unknown}"


def test_data_can_be_read() -> None:
    for code in CODES:
        if code.language == "json":
            json.loads(code.text)
        elif code.language in ("yaml", "yml"):
            list(yaml.safe_load_all(code.text))


def _commands(code: Code) -> Iterator[list[str]]:
    """Returns the words of each command of a shell block."""
    for line in code.text.replace("\\\n", " ").splitlines():
        for part in _PARTS.split(re.sub(r"(^|\s)#.*", "", line.strip().removeprefix("$ "))):
            try:
                words = shlex.split(part)
            except ValueError:  # a quotation over several lines, or prose
                continue
            while words and re.match(r"\w+=", words[0]):
                words = words[1:]
            if words:
                yield [words[0].removeprefix(".venv/bin/"), *(word.rstrip(":") for word in words[1:])]


COMMANDS = [(code.where, words) for code in CODES if code.language in ("", "sh", "bash") for words in _commands(code)]
_OWN = [(where, words) for where, words in COMMANDS if words[0] == "fovea"]


def _place(words: list[str]) -> tuple[str, Any]:
    """Returns the subcommand of `fovea` that the words name, and its node."""
    node: Any = typer.main.get_command(app)
    name = "fovea"
    for word in words[1:]:
        if word not in getattr(node, "commands", {}):
            break
        node, name = node.commands[word], f"{name} {word}"
    return name, node


@cache
def _helps() -> dict[tuple[str, ...], str]:
    """Returns the help of each program behind `fovea` and of its subcommands, from one process."""
    subcommands = {"fovea keys": ("create", "list", "revoke", "expire"), "fovea owners": ("list", "set")}
    asked = {
        (name, *more): [PROGRAMS[name].module, [*PROGRAMS[name].arguments, *more]]
        for name in PROGRAMS
        for more in ((), *((one,) for one in subcommands.get(name, ())))
    }
    asking = [sys.executable, "-c", _ASK_ALL, json.dumps(list(asked.values()))]
    told = subprocess.run(asking, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return dict(zip(asked, json.loads(told.splitlines()[-1]), strict=True))


def _options_of(words: list[str]) -> set[str]:
    name, node = _place(words)
    if name not in PROGRAMS:
        return {option for one in node.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    rest = words[len(name.split()) :]
    key = (name, rest[0]) if rest and (name, rest[0]) in _helps() else (name,)
    return {*_OPTION.findall(_helps()[key])}


@pytest.mark.parametrize(("where", "words"), _OWN, ids=lambda one: one if isinstance(one, str) else " ".join(one))
def test_commands_of_fovea_have_the_options_that_the_documents_give_them(where: str, words: list[str]) -> None:
    name, node = _place(words)
    following = words[len(name.split()) :]
    assert not getattr(node, "commands", {}) or not following or following[0].startswith("-"), (
        f"{where}: {name} has no command {following[0]}"
    )
    given = {word.partition("=")[0] for word in words if re.fullmatch(r"-{1,2}[a-zA-Z][\w-]*(=.*)?", word)}
    assert given <= _options_of(words), f"{where}: {name} has no option {given - _options_of(words)}"


def _findable(module: str) -> str:
    """Returns the name of a module, or of its package if another project owns it: finding the
    module would import it.
    """
    package = module.partition(".")[0]
    return module if package.startswith("fovea") or (ROOT / package).is_dir() else package


def test_commands_name_targets_modules_and_files_that_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for where, words in COMMANDS:
        if words[0] == "make":
            named = [word for word in words[1:] if re.fullmatch(r"[a-z0-9]+", word)]
            wrong += [f"{where}: no target {word}" for word in named[:1] if word not in targets]
        is_module = words[0].startswith("python") and words[1:2] == ["-m"] and len(words) > 2
        if is_module and importlib.util.find_spec(_findable(words[2])) is None:
            wrong.append(f"{where}: no module {words[2]}")
        for word in words:
            path = word.partition("::")[0].rstrip(",.")
            is_plain = path.startswith(_FOLDERS) and re.fullmatch(r"[\w./-]+", path)
            if is_plain and not (ROOT / path).exists() and path.startswith(("deploy/", "tests/", "tools/")):
                wrong.append(f"{where}: no file {path}")
    assert not wrong, "\n".join(wrong)


def test_all_python_of_the_documents_runs_in_a_test() -> None:
    found = Counter(code.where.partition(":")[0] for code in PYTHON)
    assert found == {page: count for page, (count, _) in RUN.items()}, (
        "run the new block in a test, and count it in RUN"
    )
    for page, (_, test) in RUN.items():
        assert page.rpartition("/")[2] in (ROOT / test).read_text()


def test_the_harness_sees_the_documents() -> None:
    assert len(PYTHON) >= 6
    assert len(_OWN) >= 60
