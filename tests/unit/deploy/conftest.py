"""One copy of the chart for all tests."""

import pytest

from tests.unit.deploy.chart import HELM, MISSING, Chart


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    """The chart; tests that use it are skipped if helm is missing."""
    if HELM is None:
        pytest.skip(MISSING)
    return Chart(tmp_path_factory.mktemp("chart"))
