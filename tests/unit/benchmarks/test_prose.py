"""The English of code, documents and tests: patterns that make it hard to read may only become fewer."""

import json
from pathlib import Path

import pytest

from benchmarks.prose import Finding, Text, counts, files, findings, is_suspect, is_test, texts

ROOT = Path(__file__).parents[3]
LIMITS: dict[str, int] = json.loads((ROOT / "tools/benchmarks/house_limits.json").read_text())


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    suspects = [path for path in files([]) if is_suspect((ROOT / path).read_text())]
    return [finding for path in suspects for text in texts(path) for finding in findings(text)]


@pytest.mark.parametrize("scope", ["prose", "prose_tests"])
@pytest.mark.parametrize("name", sorted(counts([])))
def test_no_pattern_occurs_more_often_than_its_limit(found: list[Finding], scope: str, name: str) -> None:
    in_tests = scope == "prose_tests"
    own = [finding for finding in found if finding.pattern == name and is_test(finding.text.path) == in_tests]
    assert len(own) <= LIMITS[f"{scope}_{name}"], "\n".join(map(str, own))


@pytest.mark.parametrize(
    ("kind", "words", "pattern"),
    [
        ("docstring", "What a client sends.", "clause_docstrings"),
        ("message", "nobody asks for it", "indefinite_persons"),
        ("comment", "# a process who ends", "who_for_things"),
        ("document", "The caller is told why.", "vague_passives"),
        ("message", "it is refused by name", "vague_passives"),
    ],
)
def test_a_pattern_is_found(kind: str, words: str, pattern: str) -> None:
    assert [finding.pattern for finding in findings(Text(Path("a.py"), 1, kind, words))] == [pattern]
    assert is_suspect(f'"{words}"')


@pytest.mark.parametrize(
    "source", ['"it was " "told"', 'f"by "\n    f"name"', '"""\nWhether it ends."""', "# by  name"]
)
def test_a_source_is_suspect_however_its_text_is_laid_out(source: str) -> None:
    assert is_suspect(source)


def test_a_source_without_any_word_of_a_pattern_is_not_suspect() -> None:
    assert not is_suspect('"""Returns the name by which a caller asks, whatever it is."""')


@pytest.mark.parametrize("words", ["People who train models", "It is for users who have a GPU."])
def test_people_may_be_who(words: str) -> None:
    assert not list(findings(Text(Path("a.md"), 1, "document", words)))


def test_only_messages_of_assertions_count_as_messages_of_tests() -> None:
    found = {text.words for text in texts(Path(__file__).relative_to(ROOT)) if text.kind == "message"}
    assert found == {"\n", "expected the messages of this file"}, "expected the messages of this file"
