"""The chart in tests. `python -m tests.unit.deploy.chart` writes the golden files."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from deploy.cluster.tools import BIN

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "deploy/helm/fovea"
GOLDEN = Path(__file__).parent / "golden"
VALUE_SETS = ("one-gpu", "eight-gpus", "two-nodes", "team")
HELM = shutil.which("helm", path=os.pathsep.join([str(BIN), os.environ.get("PATH", "")]))
MISSING = f"helm is neither in {BIN} nor on the path: python -m deploy.cluster build helm"

KUBERNETES = "1.36.0"
"""A helm from `go install` assumes version 1.20 of the cluster unless it is set."""

Manifest = dict[str, Any]


class Chart:
    """A copy of the chart with placeholders for dashboard and alerts, which have their own tests.

    Args:
        folder: Empty folder for the copy.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fovea"
        shutil.copytree(SOURCE, self.path)
        files = self.path / "files"
        files.mkdir(exist_ok=True)
        (files / "dashboard.json").write_text('{"title": "Fovea"}\n')
        (files / "alerts.yaml").write_text("groups: []\n")

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs `template` or `lint` of helm; `CHART` among the arguments stands for the chart's folder."""
        assert HELM is not None
        words = [str(self.path) if argument == "CHART" else argument for argument in arguments]
        command = [HELM, *words, "--kube-version", KUBERNETES]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def values_file(self, value_set: str) -> str:
        """Returns the path of a value set."""
        return str(self.path / f"values-{value_set}.yaml")

    def render(self, *arguments: str, release: str = "fovea") -> str:
        """Returns the manifests as text. Raises AssertionError with helm's message if it refuses."""
        done = self.run("template", release, "CHART", "--namespace", "ml", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def manifests(self, *arguments: str, release: str = "fovea") -> list[Manifest]:
        """Returns the parsed manifests."""
        return [manifest for manifest in yaml.safe_load_all(self.render(*arguments, release=release)) if manifest]

    def golden(self, value_set: str) -> str:
        """Returns the manifests of a set without random keys, for comparison with its golden file."""
        text = self.render("--values", self.values_file(value_set))
        return re.sub(r"(?m)^(  (?:api-keys|service-secret): ).*$", r"\1MADE-AT-INSTALL", text)


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Returns the pod templates by the name of their Deployment, StatefulSet or LeaderWorkerSet."""
    found = {}
    for item in manifests:
        if item["kind"] == "LeaderWorkerSet":
            found[item["metadata"]["name"]] = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        elif item["kind"] in ("Deployment", "StatefulSet"):
            found[item["metadata"]["name"]] = item["spec"]["template"]
    return found


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Returns a dict of the manifests of a kind."""
    return {item["metadata"]["name"]: item for item in manifests if item["kind"] == kind}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        chart = Chart(Path(scratch))
        GOLDEN.mkdir(exist_ok=True)
        for value_set in VALUE_SETS:
            (GOLDEN / f"{value_set}.yaml").write_text(chart.golden(value_set))
