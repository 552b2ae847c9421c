"""Builds the binaries of a cluster with Go, from the modules pinned in go.mod next to this file and checked by go.sum.

A real node needs further modules, which are pinned in `runtime/` and `network/`; the checker of the alert rules is
pinned in `rules/`, the controllers of LeaderWorkerSets and of Kueue in `groups/` and `queue/`, and Dex, an OpenID
Connect provider, in `issuer/`. In a single go.mod they would change each other's dependencies and those of Kubernetes.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from fovea_tinyvlm.cache import cache_directory

_MODULE = Path(__file__).parent
RUNTIME = _MODULE / "runtime"
NETWORK = _MODULE / "network"
RULES = _MODULE / "rules"
GROUPS = _MODULE / "groups"
QUEUE = _MODULE / "queue"
ISSUER = _MODULE / "issuer"
FOLDER = Path(os.environ.get("FOVEA_K8S_HOME") or cache_directory() / "k8s").expanduser()
BIN = FOLDER / "bin"
PACKAGES: Mapping[str, str] = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kwokctl": "sigs.k8s.io/kwok/cmd/kwokctl",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "helm": "helm.sh/helm/v3/cmd/helm",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
}
"""Go package of each binary, in build order."""

RUNTIME_PACKAGES: Mapping[str, str] = {
    "containerd": "github.com/containerd/containerd/v2/cmd/containerd",
    "containerd-shim-runc-v2": "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    "ctr": "github.com/containerd/containerd/v2/cmd/ctr",
    "dns": "fovea/deploy/cluster/runtime/dns",
}
"""The same for the module in `runtime/`."""

_CILIUM = "github.com/cilium/cilium"
NETWORK_PACKAGES: Mapping[str, str] = {
    "cilium-agent": f"{_CILIUM}/daemon",
    "cilium-cni": f"{_CILIUM}/plugins/cilium-cni",
}
"""The same for the module in `network/`."""

RULES_PACKAGES: Mapping[str, str] = {"promtool": "github.com/prometheus/prometheus/cmd/promtool"}
"""The same for the module in `rules/`."""

CONTROLLER_PACKAGES: Mapping[Path, Mapping[str, str]] = {
    GROUPS: {"lws": "sigs.k8s.io/lws/cmd"},
    QUEUE: {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
}
"""Controllers that the chart can use, by the module that pins them. Each has a chart, which `CHARTS` holds."""

CHARTS = FOLDER / "charts"
ISSUER_PACKAGES: Mapping[str, str] = {"dex": "github.com/dexidp/dex/cmd/dex"}
"""The same for the module in `issuer/`."""

_MODULES = {
    _MODULE: PACKAGES,
    RUNTIME: RUNTIME_PACKAGES,
    NETWORK: NETWORK_PACKAGES,
    RULES: RULES_PACKAGES,
    **CONTROLLER_PACKAGES,
    ISSUER: ISSUER_PACKAGES,
}
NAMES = tuple(name for packages in _MODULES.values() for name in packages)
"""All binaries."""

_TAGS = {"promtool": "remove_all_sd"}  # leaves out the service discovery clients of all clouds

CILIUM = FOLDER / "cilium"
"""Cilium's files. `bpf/` has the source of its kernel programs, which the agent compiles for its node.

`definitions/` has the custom resources that the agent waits for.
"""
_CILIUM_RESOURCES = (
    "v2/ciliumendpoints.yaml",
    "v2/ciliumidentities.yaml",
    "v2/ciliumloadbalancerippools.yaml",
    "v2/ciliumnodes.yaml",
    "v2alpha1/ciliuml2announcementpolicies.yaml",
    "v2alpha1/ciliumpodippools.yaml",
)

_WRAPPED = {"fovea/deploy/cluster/runtime/dns": "github.com/coredns/coredns"}
"""Programs of this repository, which have no version, and the package that gives them theirs."""

DEFINITIONS = FOLDER / "definitions"
_DEFINED_IN: Mapping[str, Sequence[str]] = {
    "sigs.k8s.io/gateway-api@v1.4.0": (
        "config/crd/standard/gateway.networking.k8s.io_gateways.yaml",
        "config/crd/standard/gateway.networking.k8s.io_grpcroutes.yaml",
        "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    ),
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
    ),
}
"""Custom resources that the chart may use, by the module with their definitions."""


class NoGo(Exception):
    """Go is missing or unusable. The message says what to install."""


def missing(node: bool = False) -> list[str]:
    """Returns the names of files that a cluster needs and that are not built yet.

    Args:
        node: Whether the cluster has a real node instead of simulated ones.
    """
    real = {"kubelet", "kube-proxy", *RUNTIME_PACKAGES, *NETWORK_PACKAGES}
    controllers = {name for packages in CONTROLLER_PACKAGES.values() for name in packages}
    binaries = {*PACKAGES} | real if node else ({*PACKAGES} - real) | controllers
    absent = sorted(name for name in binaries if not os.access(BIN / name, os.X_OK))
    absent += [CILIUM.name] if node and not CILIUM.exists() else []
    wanted = {Path(file).name for files in _DEFINED_IN.values() for file in files}
    return absent + sorted(wanted - {file.name for file in DEFINITIONS.glob("*.yaml")})


def build(report: Callable[[str], None], names: Collection[str] = ()) -> None:
    """Builds missing and outdated binaries into `BIN`, at low priority, one after another.

    The first build compiles some 4,000 packages, which takes minutes on every core. Without changes it takes seconds.

    Args:
        report: Called with each line of progress.
        names: Binaries to build, of `NAMES`; empty builds everything that a cluster needs.

    Raises:
        NoGo: There is no go command.
        subprocess.CalledProcessError: A build failed; Go's output is on stderr.
    """
    if not shutil.which("go"):
        raise NoGo("go is not on PATH; install Go 1.26 or newer, which builds the Kubernetes tools")
    BIN.mkdir(parents=True, exist_ok=True)
    for module, packages in _MODULES.items():
        versions = _versions(module)
        flags = _linker_flags(versions) if module == _MODULE else "-s -w"
        for name, package in packages.items():
            if not names or name in names:
                _build(report, module, name, package, versions, flags)
                if module in CONTROLLER_PACKAGES:
                    _copy_chart(module, name)
    if not names or "kube-apiserver" in names:
        _fetch_definitions(report)
    if not names or "cilium-agent" in names:
        _copy_cilium(report)


def _build(
    report: Callable[[str], None], module: Path, name: str, package: str, versions: Mapping[str, str], flags: str
) -> None:
    pinned = _module_of(_WRAPPED.get(package, package), versions)
    version = versions[pinned]
    if _built(BIN / name, pinned) == (package, version):
        report(f"{name} {version} is up to date")
        return
    report(f"building {name} {version}")
    options = ["-trimpath", "-tags", _TAGS.get(name, ""), "-ldflags", flags]
    _go("build", *options, "-o", str(BIN / f"{name}.new"), package, module=module)
    # A rename never leaves a partial file, and it can replace a binary that is running.
    (BIN / f"{name}.new").rename(BIN / name)


def _fetch_definitions(report: Callable[[str], None]) -> None:
    DEFINITIONS.mkdir(parents=True, exist_ok=True)
    for module, files in _DEFINED_IN.items():
        report(f"definitions of {module}")
        folder = Path(json.loads(_go("mod", "download", "-json", module))["Dir"])
        for file in files:
            shutil.copyfile(folder / file, DEFINITIONS / Path(file).name)


def _copy_chart(module: Path, name: str) -> None:
    """Copies a controller's own Helm chart, which holds its definitions, webhooks and configuration."""
    (package,) = CONTROLLER_PACKAGES[module].values()
    versions = _versions(module)
    pinned = _module_of(package, versions)
    source = Path(json.loads(_go("mod", "download", "-json", pinned, module=module))["Dir"])
    shutil.copytree(source / "charts" / name, CHARTS / name, dirs_exist_ok=True, copy_function=shutil.copyfile)


def _copy_cilium(report: Callable[[str], None]) -> None:
    """Copies the files that Cilium's agent reads from its source, at the version pinned in go.mod."""
    module = json.loads(_go("mod", "download", "-json", _CILIUM, module=NETWORK))
    report(f"datapath and definitions of {_CILIUM}@{module['Version']}")
    source = Path(module["Dir"])
    resources = source / "pkg/k8s/apis/cilium.io/client/crds"
    wanted = {resources / name: CILIUM / "definitions" / Path(name).name for name in _CILIUM_RESOURCES}
    for file in (source / "bpf").rglob("*.[ch]"):
        wanted[file] = CILIUM / file.relative_to(source)
    for file, copy in wanted.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _go(*arguments: str, module: Path = _MODULE) -> str:
    # At the default GOGC, the compiler would spend a fifth of its time on garbage collection.
    settings = {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -p=2", "GOTOOLCHAIN": "local", "GOGC": "400"}
    command = ["nice", "-n", "19", "go", *arguments]
    return subprocess.run(
        command, cwd=module, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _versions(module: Path) -> dict[str, str]:
    """Returns the version of each module in go.mod."""
    # `go list -m all` would also request modules that no build needs, some of which no server offers.
    required = json.loads(_go("mod", "edit", "-json", module=module))["Require"]
    return {item["Path"]: item["Version"] for item in required}


def _module_of(package: str, versions: Mapping[str, str]) -> str:
    return max((module for module in versions if f"{package}/".startswith(f"{module}/")), key=len)


def _built(binary: Path, module: str) -> tuple[str, str] | None:
    """Returns the package from which a binary was built, and the version of a module in it."""
    if not binary.exists():
        return None
    words = [line.split() for line in _go("version", "-m", str(binary)).splitlines()]
    (package,) = (line[1] for line in words if line[:1] == ["path"])
    versions = {line[1]: line[2] for line in words if line[:1] in (["mod"], ["dep"])}
    return package, versions.get(module, "")


def _linker_flags(versions: Mapping[str, str]) -> str:
    """Returns the flags that set versions, as releases do; otherwise the API server reports v0.0.0 and Helm assumes
    1.20.
    """
    kubernetes, helm = versions["k8s.io/kubernetes"], versions["helm.sh/helm/v3"]
    major, minor, _ = kubernetes.removeprefix("v").split(".")
    stamps = {
        "k8s.io/component-base/version.gitVersion": kubernetes,
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "helm.sh/helm/v3/internal/version.version": helm,
    }
    for package in ("chartutil", "lint/rules"):
        stamps[f"helm.sh/helm/v3/pkg/{package}.k8sVersionMajor"] = major
        stamps[f"helm.sh/helm/v3/pkg/{package}.k8sVersionMinor"] = minor
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])
