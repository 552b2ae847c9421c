"""Writes the tables of recipes in docs/reference/tinker.md: `python -m cookbook.page`."""

from pathlib import Path

from cookbook.recipes import not_run_table, replaced_table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tinker.md"
BEGIN, END = "<!-- recipes: made by `python -m cookbook.page` -->\n", "<!-- end of recipes -->\n"


def with_tables(page: str) -> str:
    """Returns the page with new tables. Raises ValueError if the page has no marks for them."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the lines {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}{replaced_table()}\n{not_run_table()}{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
