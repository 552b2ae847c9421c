"""Measures the structure of the code: files, names, cycles, layers. `python -m benchmarks.house [--list] [REVISION
...]`.

Prints each figure of a git revision, or of the working tree by default, as a line of JSON, and then a table. Core files
are the Python files of client, gateway and services, without the generated fovea/api and fovea/tinker.
Documents are the README, docs/guides and docs/reference, without generated pages and tables. With `--list`, the files
and lines behind the figures are printed too.
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

from benchmarks.figure import emit
from benchmarks.foreign_attributes import foreign_attributes
from benchmarks.prose import CLAUSE

_CORE = re.compile(
    r"(client/|gateway/|services/[a-z]+/)?(fovea|fovea_gateway|fovea_services|fovea_renderer|fovea_sampler|fovea_trainer|fovea_weights)/"
)
"""Matches the start of a core file's path, in this layout and in the flat one of earlier revisions."""
DOCUMENTS = ("README.md", "docs/guides", "docs/reference")
"""The documents of the product; docs/lab is a record of measurements, which may grow."""
_GENERATED_PAGES = ("docs/reference/cli.md", "docs/reference/metrics.md", "docs/reference/settings.md")
_GENERATED_TABLE = re.compile(r"<!-- [^>]*made by [^>]*-->.*?<!-- end of [^>]*-->", re.DOTALL)
_ROOT = Path(__file__).parents[2]
_GENERATED = re.compile(r"(client/)?fovea/(api|tinker)/")
_NAMELESS = ("__init__.py", "__main__.py")
"""File names that do not count as shared, because every package may have them."""

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class House:
    """The core files and product documents of one revision: text by path."""

    sources: Mapping[str, str]
    documents: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, revision: str | None) -> "House":
        """Reads a git revision, or the working tree for None, including untracked files."""
        if revision is None:
            listed = _git("ls-files", "--cached", "--others", "--exclude-standard").decode().splitlines()
            paths = [path for path in listed if (_is_core(path) or _is_document(path)) and (_ROOT / path).exists()]
            texts = {path: (_ROOT / path).read_text() for path in paths}
        else:
            with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", revision))) as archive:
                members = [one for one in archive if _is_core(one.name) or _is_document(one.name)]
                files = {member.name: archive.extractfile(member) for member in members}
                texts = {path: file.read().decode() for path, file in files.items() if file is not None}
        return cls(
            {path: text for path, text in texts.items() if _is_core(path)},
            {path: text for path, text in texts.items() if _is_document(path)},
        )

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """The parsed files."""
        return {path: ast.parse(text, path) for path, text in self.sources.items()}

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        """All nodes of each parsed file, cached for several figures."""
        return {path: list(ast.walk(tree)) for path, tree in self.trees.items()}

    @cached_property
    def imports(self) -> Graph:
        """The core files that each core file imports, including late imports and imports for types."""
        modules = {_dotted(path): path for path in self.sources}
        return {
            path: set(_imported(nodes, _dotted(path), path, modules)) - {path} for path, nodes in self.nodes.items()
        }

    def named_files(self) -> list[str]:
        """All files except `__init__.py` and `__main__.py`."""
        return [path for path in self.sources if PurePosixPath(path).name not in _NAMELESS]

    def shared_names(self) -> dict[str, list[str]]:
        """Base names of several files, with these files."""
        found = defaultdict(list)
        for path in self.named_files():
            found[PurePosixPath(path).name].append(path)
        return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}

    def rooms(self, folder: str) -> Graph:
        """Returns the direct children of a folder and the imports between them, without `__init__`."""
        room_of = {
            path: path.removeprefix(f"{folder}/").partition("/")[0]
            for path in self.sources
            if path.startswith(f"{folder}/") and path != f"{folder}/__init__.py"
        }
        graph: Graph = {room: set() for room in room_of.values()}
        for path, room in room_of.items():
            graph[room] |= {room_of[other] for other in self.imports[path] if other in room_of} - {room}
        return graph

    def circles(self) -> list[tuple[str, list[str]]]:
        """Returns cycles of imports between the children of a folder: (folder, children)."""
        folders = sorted({str(parent) for path in self.sources for parent in PurePosixPath(path).parents} - {"."})
        found = [(folder, knot) for folder in folders for knot in _knots(self.rooms(folder)) if len(knot) > 1]
        return [(folder, sorted(knot)) for folder, knot in found]

    def short_docstrings(self) -> list[str]:
        """Returns definitions and modules with a docstring of at most three words."""
        described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        return [
            f"{path}:{getattr(node, 'lineno', 1)}: {text}"
            for path, nodes in self.nodes.items()
            for node in nodes
            if isinstance(node, described) and (text := ast.get_docstring(node)) and len(text.split()) <= 3
        ]

    def clause_docstrings(self) -> list[str]:
        """Docstrings, those of attributes included, that open with a relative word instead of a noun or a verb."""
        return [
            f"{path}:{statement.lineno}: {statement.value.value.splitlines()[0]}"
            for path, nodes in self.nodes.items()
            for node in nodes
            if isinstance(body := getattr(node, "body", None), list)
            for statement in body
            if isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
            and CLAUSE.match(statement.value.value)
        ]

    def function_lengths(self) -> Counter[str]:
        """Returns the number of lines of each function without decorators, by `path:line name`."""
        return Counter(
            {
                f"{path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
                for path, nodes in self.nodes.items()
                for node in nodes
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        )

    def file_lengths(self) -> Counter[str]:
        """Returns the number of lines of each file."""
        return Counter({path: len(text.splitlines()) for path, text in self.sources.items()})

    def document_words(self) -> Counter[str]:
        """Returns the words of each document, without generated pages and tables, as `wc -w` counts them."""
        return Counter(
            {
                path: len(_GENERATED_TABLE.sub("", text).split())
                for path, text in self.documents.items()
                if path not in _GENERATED_PAGES
            }
        )


def floors(graph: Graph) -> list[str]:
    """Returns a longest import path without repeated nodes, the topmost importer first."""
    knot_of = {node: number for number, knot in enumerate(_knots(graph)) for node in knot}

    @cache
    def below(node: str, behind: frozenset[str]) -> tuple[str, ...]:
        longest: tuple[str, ...] = ()
        # No path leads back into a cycle that was left, so only nodes of the same cycle must be remembered.
        for other in sorted(graph[node] - behind):
            way = below(other, behind | {other} if knot_of[other] == knot_of[node] else frozenset({other}))
            longest = max(longest, way, key=len)
        return (node, *longest)

    longest: tuple[str, ...] = ()
    for node in sorted(graph):
        longest = max(longest, below(node, frozenset({node})), key=len)
    return list(longest)


def _knots(graph: Graph) -> list[list[str]]:
    """Returns strongly connected components, deepest first (Tarjan, "Depth-first search and linear graph algorithms",
    1972).
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def _imported(nodes: Iterable[ast.AST], module: str, path: str, modules: Mapping[str, str]) -> Iterable[str]:
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - (PurePosixPath(path).name == "__init__.py")
                package = module.split(".")[: len(module.split(".")) - up]
                base = ".".join([*package, *([base] if base else [])])
            # `from package import name` is the module `package.name` if it exists, otherwise `package` itself.
            names = [whole if (whole := f"{base}.{alias.name}") in modules else base for alias in node.names]
        yield from (modules[name] for name in names if name in modules)


def _dotted(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    package = next(number for number, part in enumerate(parts) if part.startswith("fovea"))
    parts = parts[package:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_core(path: str) -> bool:
    return path.endswith(".py") and bool(_CORE.match(path)) and not _GENERATED.match(path)


def _is_document(path: str) -> bool:
    return path.endswith(".md") and any(PurePosixPath(path).is_relative_to(folder) for folder in DOCUMENTS)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=_ROOT, check=True, capture_output=True).stdout


@dataclass(frozen=True)
class Figure:
    """A number and the items behind it."""

    value: float
    unit: str
    behind: list[str] = field(default_factory=list)


def figures(house: House) -> dict[str, Figure]:
    """Returns all figures, keyed by their names."""
    paths, shared = list(house.sources), house.shared_names()
    circles = [f"{folder}: {' '.join(knot)}" for folder, knot in house.circles()]
    foreign, short = foreign_attributes(house.trees), house.short_docstrings()
    clauses = house.clause_docstrings()
    gateway_folder = "gateway/fovea_gateway" if any(path.startswith("gateway/") for path in paths) else "fovea_gateway"
    rooms = house.rooms(gateway_folder)
    way = floors(rooms)
    lines, words = house.file_lengths(), house.document_words()
    files, functions = lines.most_common(5), house.function_lengths().most_common(5)
    return {
        "core_files": Figure(len(paths), "files"),
        "core_files_without_init": Figure(sum(not one.endswith("/__init__.py") for one in paths), "files"),
        "core_files_without_rollout": Figure(sum("/rollout/" not in one for one in paths), "files"),
        "core_lines": Figure(lines.total(), "lines"),
        "shared_names": Figure(len(shared), "names", [" ".join(same) for same in shared.values()]),
        "circles": Figure(len(circles), "circles", circles),
        "gateway_floors": Figure(len(way), "floors", [" > ".join(way)]),
        "gateway_rooms": Figure(len(rooms), "rooms"),
        "gateway_arrows": Figure(sum(map(len, rooms.values())), "arrows"),
        "foreign_attributes": Figure(len(foreign), "assignments", foreign),
        "short_docstrings": Figure(len(short), "docstrings", short),
        "clause_docstrings": Figure(len(clauses), "docstrings", clauses),
        "longest_file": Figure(files[0][1], "lines", [f"{count} {name}" for name, count in files]),
        "longest_function": Figure(functions[0][1], "lines", [f"{count} {name}" for name, count in functions]),
        "docs_words": Figure(words.total(), "words", [f"{count} {path}" for path, count in words.most_common()]),
        "readme_words": Figure(words["README.md"], "words"),
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", metavar="REVISION", help="Git revisions. Default: the working tree.")
    parser.add_argument("--list", action="store_true", help="Also print the items behind the figures.")
    options = parser.parse_args()
    columns = {revision or "working tree": figures(House.of(revision)) for revision in options.revisions or [None]}
    for revision, found in columns.items():
        for name, figure in found.items():
            emit(f"house.{name}", [figure.value], figure.unit, revision=revision)
            if options.list:
                print("".join(f"    {line}\n" for line in figure.behind), end="")
    print(" " * 28 + "".join(f"{revision:>14}" for revision in columns))
    for name in next(iter(columns.values())):
        print(f"{name:28}" + "".join(f"{found[name].value:>14.5g}" for found in columns.values()))


if __name__ == "__main__":
    main()
