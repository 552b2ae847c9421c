"""Links and file names in the documents exist, and the README's figures equal the measured ones."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCES = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the link anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", _FENCES.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_are_there(page: pathlib.Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", _FENCES.sub("", page.read_text()))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


def test_the_readmes_figures_are_those_that_were_measured() -> None:
    readme, measured = (ROOT / "README.md").read_text(), (ROOT / "docs" / "lab" / "performance.md").read_text()
    table = readme[readme.index("| measured on H200s") : readme.index("## What it does")]
    figures = set(re.findall(r"\d+,\d{3}|\d+\.\d+", table))
    assert len(figures) >= 5
    missing = sorted(figure for figure in figures if figure not in measured)
    assert not missing, f"docs/lab/performance.md no longer has {missing}: change the README's table too"


def test_the_files_that_the_documents_name_exist() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    folders = {path.partition("/")[0] for path in listed if "/" in path} - {"docs"}  # docs/README.md lists moved pages
    ends = {path[start:] for path in listed for start in [0, *(at.end() for at in re.finditer("/", path))]}
    for page in PAGES[:2] + PAGES[3:]:  # the changelog names files of its time
        for named in re.findall(r"`([\w./-]+\.(?:py|sh|yaml|toml|proto|ipynb))`", page.read_text()):
            if named.partition("/")[0] in folders:
                assert named in ends, f"{page.relative_to(ROOT)} names {named}, which does not exist"


def test_no_page_installs_another_projects_fovea() -> None:
    for page in PAGES:
        assert not re.search(r"pip install (-\S+ )*[\"']?fovea[\"'\[\s`]", page.read_text()), page
