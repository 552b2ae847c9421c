"""Every alert fires in its own case and in no other: Prometheus's promtool runs `alerts_test.yaml`."""

import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from deploy.cluster.tools import BIN
from tests.unit.deploy.test_dashboard import ALERTS, FILES, KNOWN, SCRAPED

TESTS = yaml.safe_load((pathlib.Path(__file__).parent / "alerts_test.yaml").read_text())["tests"]
RULES = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
PROMTOOL = shutil.which("promtool", path=os.pathsep.join([str(BIN), os.environ.get("PATH", "")]))
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason=f"promtool is neither in {BIN} nor on the path: python -m deploy.cluster build promtool"
)


def run(*arguments: str | pathlib.Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def completed(tests: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a file for promtool, which compares all annotations: each expected alert gets its rule's runbook."""
    for test in tests:
        for moment in test["alert_rule_test"]:
            for alert in moment.get("exp_alerts", ()):
                alert["exp_annotations"]["runbook"] = RULES[moment["alertname"]]["annotations"]["runbook"]
    return {"rule_files": [str(FILES / "alerts.yaml")], "evaluation_interval": "1m", "tests": tests}


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    run("check", "rules", "--lint=all", "--lint-fatal", FILES / "alerts.yaml")


@needs_promtool
def test_alerts_fire_when_they_should_and_are_silent_when_not(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "alerts_test.yaml"
    file.write_text(yaml.safe_dump(completed(TESTS)))
    run("test", "rules", file)


def test_every_alert_is_tested_both_ways() -> None:
    moments = [moment for test in TESTS for moment in test["alert_rule_test"]]
    assert {moment["alertname"] for moment in moments if moment.get("exp_alerts")} == set(RULES)
    assert {moment["alertname"] for moment in moments if not moment.get("exp_alerts")} == set(RULES)


def test_they_are_tested_on_series_that_services_show() -> None:
    for series in (each["series"] for test in TESTS for each in test["input_series"]):
        name, labels = series.partition("{")[::2]
        assert set(re.findall(r"(\w+)=", labels)) <= KNOWN[name] | SCRAPED, series
        assert KNOWN[name] <= set(re.findall(r"(\w+)=", labels)), f"{series} lacks a label"
