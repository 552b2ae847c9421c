"""go.mod pins exactly the built tools and one Kubernetes version. Needs no cluster."""

import re
from pathlib import Path

import deploy.cluster
from deploy.cluster.tools import (
    CONTROLLER_PACKAGES,
    ISSUER,
    ISSUER_PACKAGES,
    NETWORK,
    NETWORK_PACKAGES,
    PACKAGES,
    RULES,
    RULES_PACKAGES,
    RUNTIME,
    RUNTIME_PACKAGES,
)

_GO_MOD = (Path(deploy.cluster.__file__).parent / "go.mod").read_text()
_OWN = "fovea/deploy/cluster/runtime/dns"


def test_every_tool_is_pinned() -> None:
    """`go mod tidy` keeps the modules of tools that go.mod names, and only those."""
    assert _tools(_GO_MOD) == set(PACKAGES.values())
    assert _tools((RUNTIME / "go.mod").read_text()) | {_OWN} == set(RUNTIME_PACKAGES.values())
    assert _tools((NETWORK / "go.mod").read_text()) == set(NETWORK_PACKAGES.values())
    assert _tools((RULES / "go.mod").read_text()) == set(RULES_PACKAGES.values())
    for module, packages in CONTROLLER_PACKAGES.items():
        assert _tools((module / "go.mod").read_text()) == set(packages.values())
    assert _tools((ISSUER / "go.mod").read_text()) == set(ISSUER_PACKAGES.values())
    assert (RUNTIME / Path(_OWN).name / "main.go").exists()


def test_the_parts_of_kubernetes_are_of_one_version() -> None:
    """Kubernetes 1.36.3 requires its libraries 0.36.3: a partial upgrade builds, and fails at run time."""
    (version,) = re.findall(r"^\s*k8s\.io/kubernetes v1\.(\S+)", _GO_MOD, re.MULTILINE)
    libraries = re.findall(r"^\s*(k8s\.io/\S+) => \1 v0\.(\S+)", _GO_MOD, re.MULTILINE)
    assert libraries
    assert {library: found for library, found in libraries if found != version} == {}


def _tools(go_mod: str) -> set[str]:
    (found,) = re.findall(r"^tool (\(.*?^\)|\S+$)", go_mod, re.DOTALL | re.MULTILINE)
    return set(found.strip("()").split())
