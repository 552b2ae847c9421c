"""Generates docs/reference/metrics.md, a list of all Prometheus metrics: `python -m deploy.metrics_page`."""

import pathlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

import fovea_gateway.gateway_metrics
import fovea_renderer.renderer_metrics
import fovea_sampler.sampler_metrics
import fovea_trainer.trainer_metrics
from fovea.runtime import server
from fovea.runtime.machine_memory import GpuMemory

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
SERVICES: dict[str, ModuleType] = {
    "all four": server,
    "gateway": fovea_gateway.gateway_metrics,
    "renderer": fovea_renderer.renderer_metrics,
    "sampler": fovea_sampler.sampler_metrics,
    "trainer": fovea_trainer.trainer_metrics,
}
"""Modules that declare the metrics of each service."""
_HEAD = """# Metrics of the services

`python -m deploy.metrics_page` generates this page from the code, and a test compares the two. The sampler also exports
vLLM's own metrics, `vllm:*`. [The monitoring guide](../guides/monitoring.md) groups metrics by the question that they
answer, with healthy values.
"""


class _Shown(NamedTuple):
    name: str
    kind: str
    labels: Sequence[str]
    words: str


def page() -> str:
    """Returns the page as Markdown."""
    return _HEAD + "".join(_section(service, module) for service, module in SERVICES.items())


def _section(service: str, module: ModuleType) -> str:
    rows = [
        f"| `{one.name}` {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.words} |"
        for one in _shown(module)
    ]
    return "\n".join([f"\n## {service}\n", "| metric | labels | what it is |", "|---|---|---|", *rows, ""])


def _shown(module: ModuleType) -> Iterator[_Shown]:
    for metric in vars(module).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            yield _row(family, metric._labelnames)
    if module is server:
        for family in GpuMemory(lambda: []).describe():
            yield _row(family, family._labelnames)


def _row(family: Metric, labels: Sequence[str]) -> _Shown:
    ending = "_total" if family.type == "counter" else ""
    return _Shown(family.name + ending, family.type, labels, family.documentation.replace("|", "\\|"))


if __name__ == "__main__":
    PAGE.write_text(page())
