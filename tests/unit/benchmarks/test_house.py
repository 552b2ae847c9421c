"""The figures of a small house with known flaws."""

import ast

import pytest

from benchmarks.foreign_attributes import foreign_attributes
from benchmarks.house import House, figures, floors

HOUSE = House(
    {
        "fovea_gateway/__init__.py": '"""A gateway that is described well enough."""\nfrom fovea_gateway import app\n',
        "fovea_gateway/app.py": "from fovea_gateway.http import routes\nfrom fovea_gateway import names\n",
        "fovea_gateway/http/__init__.py": "",
        "fovea_gateway/http/routes.py": '"""Routes."""\ndef serve():\n  from ..store import names\n\n  return names\n',
        "fovea_gateway/store/names.py": "import fovea_gateway.http.routes\n",
        "fovea_gateway/names.py": 'import fovea.wire\nSIZE = 1\n"""Of a name, in bytes."""\n"""Offers names."""\n',
        "fovea/wire/__init__.py": '"""What is sent over the wire."""\n',
    },
    {
        "README.md": "# Two words\n",
        "docs/guides/page.md": "one two\n<!-- rows: made by `make models` -->\nthree\n<!-- end of rows -->\nfour\n",
        "docs/reference/cli.md": "five six seven\n",
    },
)


def test_figures_of_a_small_house() -> None:
    found = {name: figure.value for name, figure in figures(HOUSE).items()}
    assert found == {
        "core_files": 7,
        "core_files_without_init": 4,
        "core_files_without_rollout": 7,
        "core_lines": 15,
        "shared_names": 1,
        "circles": 1,
        "gateway_floors": 3,
        "gateway_rooms": 4,
        "gateway_arrows": 4,
        "foreign_attributes": 0,
        "short_docstrings": 1,
        "clause_docstrings": 2,
        "longest_file": 5,
        "longest_function": 4,
        "docs_words": 6,
        "readme_words": 3,
    }
    assert figures(HOUSE)["circles"].behind == ["fovea_gateway: http store"]


def test_a_way_goes_through_a_circle_but_enters_no_room_twice() -> None:
    assert floors({"a": {"b"}, "b": {"c", "d"}, "c": {"b", "e"}, "d": {"e"}, "e": set()}) == ["a", "b", "c", "e"]
    assert floors({}) == []


CLASSES = """
class Board:
    def __init__(self, log: "Log") -> None:
        self.start = None
        self.log = log
        self.record = Record()

    def run(self, other, state: Record) -> None:
        {}

class Log:
    def __init__(self) -> None:
        self.since = 0

@dataclass
class Record:
    state: int
    hook: object
"""


@pytest.mark.parametrize(
    ("statement", "is_foreign"),
    [
        ("self.start = 1", False),
        ("other.start = 1", True),
        ("self.log.since += 1", True),
        ("a, other.since = 1, 2", True),
        ("state.state = 1", False),
        ("self.record.hook = self.run", True),
        ("other.unheard_of = 1", False),
        ("log = Log(); log.since = 3", False),
    ],
)
def test_assignments_to_foreign_attributes_are_found(statement: str, is_foreign: bool) -> None:
    found = foreign_attributes({"fovea_gateway/board.py": ast.parse(CLASSES.format(statement))})
    assert bool(found) is is_foreign
