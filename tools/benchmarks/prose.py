"""Measures the English of the code and the documents: `python -m benchmarks.prose [PATH...] [--list]`.

`make lint` compares the counts with `benchmarks/house_limits.json`. A pattern is here only if a program can find it; a
reader finds the rest.
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Generated code, the record of past releases, and this file, which contains the patterns.
SKIPPED = re.compile(r"fovea/(api|tinker)/|/node_modules/|^CHANGELOG|^tools/benchmarks/prose\.py$")

CLAUSE = re.compile(r"\s*(What|Who|Whose|Whom|Of|Where|Whether|Why)\b")

# People may be "who"; processes, values and files may not. A form such as "researchers who" is therefore allowed.
PEOPLE = (
    r"(?:people|person|users?|researchers?|engineers?|administrators?|operators?|readers?|developers?|anyone|those)"
)
PATTERNS = {
    "indefinite_persons": re.compile(r"\b(nobody|somebody|anybody|everybody)\b", re.IGNORECASE),
    "who_for_things": re.compile(r"(?<!\w)(?<!-)\b(?:who|whose|whom)\b(?!['’]?s? is for)", re.IGNORECASE),
    "vague_passives": re.compile(r"\b(?:is|are|was|were|be|been|being) (?:told|taken)\b|\bby name\b", re.IGNORECASE),
}
_SUSPECT = re.compile(
    r"(?i:\b(?:nobody|somebody|anybody|everybody|who|whose|whom|told|taken)\b|\bby\W+f?\W?name\b)"
    r"|[\"']\s*(?:What|Who|Whose|Whom|Of|Where|Whether|Why)\b"
)
_ALLOWED_WHO = re.compile(rf"\b{PEOPLE},? (?:who|whose|whom)\b|\bwho it is for\b", re.IGNORECASE)


@dataclass(frozen=True)
class Text:
    """A piece of English and its position; `kind` is docstring, comment, message or document."""

    path: Path
    line: int
    kind: str
    words: str


@dataclass(frozen=True)
class Finding:
    """A pattern found in a text."""

    pattern: str
    text: Text

    def __str__(self) -> str:
        return f"{self.text.path}:{self.text.line}: {self.pattern}: {' '.join(self.text.words.split())[:160]}"


def texts(path: Path) -> Iterator[Text]:
    """Yields the docstrings, comments and messages of a Python file, or the prose lines of any other file.

    Messages of a test are those of its assertions: other strings are data.
    """
    source = (ROOT / path).read_text()
    if path.suffix != ".py":
        yield from _document_lines(path, source)
        return
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add(id(node.value))
            yield Text(path, node.lineno, "docstring", node.value.value)
    asserted = (node.msg for node in ast.walk(tree) if isinstance(node, ast.Assert) and node.msg is not None)
    for root in asserted if is_test(path) else [tree]:
        for node in ast.walk(root):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield Text(path, node.lineno, "message", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], "comment", token.string)


def is_test(path: Path) -> bool:
    """Returns whether a file belongs to the tests, which have limits of their own."""
    return path.is_relative_to("tests")


def _document_lines(path: Path, source: str) -> Iterator[Text]:
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield Text(path, number, "document", re.sub(r"`[^`]*`", "``", line))


def findings(text: Text) -> Iterator[Finding]:
    """Yields each pattern of a text once per occurrence."""
    if text.kind == "docstring" and CLAUSE.match(text.words):
        yield Finding("clause_docstrings", text)
    for name, pattern in PATTERNS.items():
        words = _ALLOWED_WHO.sub("", text.words) if name == "who_for_things" else text.words
        for _ in pattern.findall(words):
            yield Finding(name, text)


def is_suspect(source: str) -> bool:
    """Returns whether a source can have a finding: most cannot, and parsing them takes four fifths of the time."""
    return _SUSPECT.search(source) is not None


def files(paths: list[str]) -> list[Path]:
    """Returns the tracked Python, Markdown, YAML and proto files under the given paths (all of them by default)."""
    patterns = ["*.py", "*.md", "*.yaml", "*.proto", "*.txt", "*.js", "*.html"]
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [
        Path(name)
        for name in listed.split("\n")
        if name and not SKIPPED.search(name) and (not paths or any(Path(name).is_relative_to(path) for path in paths))
    ]


def counts(found: list[Finding]) -> dict[str, int]:
    """Returns the number of occurrences of each pattern, zeros included."""
    names = ["clause_docstrings", *PATTERNS]
    return {name: sum(one.pattern == name for one in found) for name in names}


def main() -> None:
    """Prints the counts, and with `--list` the position of each occurrence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders; the whole repository by default")
    parser.add_argument("--list", action="store_true", help="print where each pattern was found")
    arguments = parser.parse_args()
    everything = [text for path in files(arguments.paths) for text in texts(path)]
    found = [finding for text in everything for finding in findings(text)]
    if arguments.list:
        print(*found, sep="\n")
    for name, of_tests in (("code and documents", False), ("tests", True)):
        docstrings = sum(text.kind == "docstring" and is_test(text.path) == of_tests for text in everything)
        print(
            f"{name}: {counts([one for one in found if is_test(one.text.path) == of_tests])} docstrings: {docstrings}"
        )


if __name__ == "__main__":
    main()
