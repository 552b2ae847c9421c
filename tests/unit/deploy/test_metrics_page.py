"""docs/reference/metrics.md equals the code."""

from deploy import metrics_page
from tests.unit.deploy.test_dashboard import KNOWN


def test_the_page_is_what_the_services_declare() -> None:
    said = "services' metrics changed; write the page anew: python -m deploy.metrics_page (or make chart)"
    assert metrics_page.PAGE.read_text() == metrics_page.page(), said


def test_every_metric_is_there() -> None:
    page = metrics_page.page()
    endings = ("_bucket", "_sum", "_count")
    for name in {name for name in KNOWN if name.startswith("fovea_") and not name.endswith(endings)}:
        assert f"| `{name}` " in page
