"""Links and file names in documents, code and the live page exist, and the README's figures equal the measured ones.

No test opens an external address. `EXTERNAL` lists those of the documents, so that a person can.
"""

import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[3]
LISTED = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
PAGES = [ROOT / path for path in LISTED if path.endswith(".md") and not path.startswith("tests/")]
_ENDS = {path[start:] for path in LISTED for start in [0, *(at.end() for at in re.finditer("/", path))]}
LIVE = ROOT / "gateway/fovea_gateway/live"
EXTERNAL = """
https://arxiv.org/abs/1707.06347
https://arxiv.org/abs/2109.11978
https://arxiv.org/abs/2402.03300
https://arxiv.org/abs/2402.14740
https://arxiv.org/abs/2503.14476
https://arxiv.org/abs/2503.20783
https://github.com/PrimeIntellect-ai/verifiers
https://github.com/huggingface/Math-Verify
https://github.com/huggingface/safetensors
https://github.com/leeoniya/uPlot
https://github.com/meta-pytorch/OpenEnv
https://github.com/visgym/VisGym
https://inspect.aisi.org.uk/
https://joschu.net/blog/kl-approx.html
https://json-schema.org/draft/2020-12/schema
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
https://kwok.sigs.k8s.io
https://pypi.org/project/tinker-cookbook/
https://pypi.org/project/tinker/
https://semver.org
https://www.w3.org/TR/trace-context/
""".split()
"""All addresses outside this repository that documents, programs and the chart name."""
_OURS = re.compile(
    r"localhost|127\.|0\.0\.0\.0|[^a-z]|[\w-]+(:|/|$)|[\w.-]+\.(example|test|invalid|local|lan|svc|internal)\b|(\w+\.)?example\."
)
"""Hosts of this machine, of the cluster, of examples, and placeholders."""
_SHIPPED = ("client/", "gateway/", "services/", "libraries/", "deploy/", "examples/", "tools/", "Makefile", "pyproject")
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
    folders = {path.partition("/")[0] for path in LISTED if "/" in path} - {"docs"}  # docs/README.md lists moved pages
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # it names files of its time
            continue
        for named in re.findall(r"`([\w./-]+\.(?:py|sh|yaml|toml|proto|ipynb|jsonl?))`", page.read_text()):
            is_result = re.search(r"-20\d\d-\d\d-\d\d\w*(-\w+)?\.jsonl$", named)
            if is_result or named.partition("/")[0] in folders:
                assert named in _ENDS, f"{page.relative_to(ROOT)} names {named}, which does not exist"


def _texts(*folders: str) -> Iterator[tuple[str, str]]:
    for path in LISTED:
        if path.startswith(folders) and path.endswith((".py", ".js", ".html", ".yaml", ".toml", ".txt", "Makefile")):
            yield path, (ROOT / path).read_text()


def test_the_pages_that_code_and_messages_name_exist() -> None:
    found = 0
    for path, text in _texts(*_SHIPPED):
        for title, page, anchor in re.findall(r"(?:'([^'\n]+)' in )?\b(docs/[\w/.-]+\.\w+)(?:#([\w-]+))?", text):
            found += 1
            assert (ROOT / page).exists(), f"{path} names {page}, which does not exist"
            assert not anchor or anchor in anchors(ROOT / page), f"{path} names {page}#{anchor}: no such heading"
            assert not title or title in (ROOT / page).read_text(), f"{path} names {title!r}, which {page} lacks"
        for named in re.findall(r"\b[\w/-]+\.md\b", text):
            assert named in _ENDS, f"{path} names {named}, which does not exist"
    assert found > 20


def test_the_live_pages_files_are_there() -> None:
    text = (LIVE / "page/index.html").read_text()
    named = re.findall(r'(?:href|src)="([^"]+)"', text)
    modules = {path.name for path in (LIVE / "page").glob("*.js")}
    assert len(named) > 10
    for link in named:
        assert link == "api/v1/auth/login" or (LIVE / link).exists(), f"index.html: {link} leads nowhere"
    for module in sorted(modules):
        for other in re.findall(r'from "\./([^"]+)"', (LIVE / "page" / module).read_text()):
            assert other in modules, f"{module} imports {other}, which does not exist"


def test_external_links_use_https_and_are_listed() -> None:
    texts = [*_texts(*_SHIPPED), *((str(page.relative_to(ROOT)), page.read_text()) for page in PAGES)]
    found = set()
    for path, text in texts:
        for link in re.findall(r"https?://[^\s\"'`<>)\]\\,|]+", text):
            scheme, _, rest = link.rstrip(".:;").partition("://")
            if not _OURS.match(rest) and rest != "www.w3.org/2000/svg":  # the name of SVG, which no browser opens
                assert scheme == "https", f"{path}: {link} is not https"
                found.add(link.rstrip(".:;"))
    assert sorted(found) == EXTERNAL


def test_no_page_installs_another_projects_fovea() -> None:
    for page in PAGES:
        assert not re.search(r"pip install (-\S+ )*[\"']?fovea[\"'\[\s`]", page.read_text()), page
