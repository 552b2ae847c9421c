"""The chart with several active gateways: one for each shard, one standby, and routers in front of them."""

import importlib.util

import pytest

from fovea.runtime.settings import ServiceSettings
from fovea_gateway.fronts.router import RouterSettings
from fovea_gateway.settings import GatewaySettings
from tests.unit.deploy.chart import Chart, Manifest, of_kind, pods

SHARDED = ("gateway.shards=3,database.secret=fovea-database", "gateway.basePath=/fovea,tls.enabled=true")
ARGUMENTS = [word for assignment in SHARDED for word in ("--set", assignment)]


@pytest.fixture(scope="module")
def manifests(chart: Chart) -> list[Manifest]:
    return chart.manifests(*ARGUMENTS, "--set-json", 'gateway.settings={"max_body_bytes": 4096, "max_sessions": 5}')


def container(manifests: list[Manifest], component: str) -> Manifest:
    (only,) = pods(manifests)[f"fovea-{component}"]["spec"]["containers"]
    return dict(only)


def read(service: Manifest, kind: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """Returns the settings that a process reads from the variables of its container."""
    given = {"POD_IP": "10.1.2.3", "FOVEA_GATEWAY_API_KEY": '["tml-x"]', "FOVEA_GATEWAY_DATABASE_URL": "postgresql://h"}
    with monkeypatch.context() as patch:
        for item in service["env"]:
            if item["name"] == "FOVEA_TLS_DIR":  # there are no certificates here
                continue
            text = item["value"] if "value" in item else given.get(item["name"], "x" * 40)
            patch.setenv(item["name"], text.replace("$(POD_IP)", given["POD_IP"]))
        return kind()


def test_one_gateway_more_than_shards_runs(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = of_kind(manifests, "Deployment")["fovea-gateway"]["spec"]
    assert gateway["replicas"] == 4
    assert gateway["strategy"] == {"type": "Recreate"}, "gateways of two versions cannot share a database"
    settings = read(container(manifests, "gateway"), GatewaySettings, monkeypatch)
    assert isinstance(settings, GatewaySettings)
    assert (settings.shards, settings.shard_host, settings.max_sessions) == (3, "10.1.2.3", 5)
    assert pods(manifests)["fovea-gateway"]["spec"]["topologySpreadConstraints"]


def test_a_gateway_that_waits_is_ready_and_a_router_once_fovea_serves(manifests: list[Manifest]) -> None:
    alive = {"path": "/fovea/api/v1/healthz", "port": "rest"}
    for component, ready in (("gateway", {"httpGet": alive}), ("router", {"grpc": {"port": 50050}})):
        service = container(manifests, component)
        assert service["startupProbe"]["httpGet"] == service["livenessProbe"]["httpGet"] == alive
        assert ready.items() <= service["readinessProbe"].items()


def test_a_router_is_a_program_of_the_gateways_image(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, gateway = container(manifests, "router"), container(manifests, "gateway")
    assert (router["image"], router["ports"]) == (gateway["image"], gateway["ports"])
    assert router["command"][:2] == ["python", "-m"]
    assert importlib.util.find_spec(router["command"][2])
    settings = read(router, RouterSettings, monkeypatch)
    assert isinstance(settings, RouterSettings)
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert (settings.port, settings.grpc_port, settings.metrics_port) == (
        ports["rest"],
        ports["grpc"],
        ports["metrics"],
    )
    assert (settings.base_path, settings.max_body_bytes, settings.host) == ("/fovea", 4096, "0.0.0.0")
    known = {f"FOVEA_GATEWAY_{name.upper()}" for name in RouterSettings.model_fields}
    assert {item["name"] for item in router["env"]} <= {*known, "POD_IP"}, (
        "it must need no secret except the database's"
    )
    pod = pods(manifests)["fovea-router"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["scratch"]
    assert not pod["automountServiceAccountToken"]
    assert pod["serviceAccountName"] in of_kind(manifests, "ServiceAccount")


def test_clients_reach_routers_at_the_gateways_address(manifests: list[Manifest]) -> None:
    labels = pods(manifests)["fovea-router"]["metadata"]["labels"]
    service = of_kind(manifests, "Service")["fovea-gateway"]["spec"]
    assert service["selector"].items() <= labels.items()
    assert "fovea-router" not in of_kind(manifests, "Service")
    budget = of_kind(manifests, "PodDisruptionBudget")["fovea-router"]["spec"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_gateways_are_open_to_routers_only(manifests: list[Manifest]) -> None:
    policies = of_kind(manifests, "NetworkPolicy")
    front = [{"port": 8000}, {"port": 50050}]
    (opened,) = [rule for rule in policies["fovea-router"]["spec"]["ingress"] if "from" not in rule]
    assert opened["ports"] == front
    (inner,) = [rule for rule in policies["fovea-gateway"]["spec"]["ingress"] if rule["ports"] == front]
    router = pods(manifests)["fovea-router"]["metadata"]["labels"]
    assert [peer["podSelector"]["matchLabels"].items() <= router.items() for peer in inner["from"]] == [True]
    gateway = pods(manifests)["fovea-gateway"]["metadata"]["labels"]
    (way,) = [rule for rule in policies["fovea-router"]["spec"]["egress"] if "to" in rule]
    assert way["ports"] == front
    assert [peer["podSelector"]["matchLabels"].items() <= gateway.items() for peer in way["to"]] == [True]


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("gateway.shards=2", "gateway.shards: it is 2, and several gateways need PostgreSQL; set database.secret"),
        ("gateway.shards=0", "/gateway/shards"),
        ("gateway.settings.shards=2", "/gateway/settings"),
        ("router.settings.port=2", "/router"),
    ],
)
def test_wrong_values_are_refused_by_name(chart: Chart, assignment: str, words: str) -> None:
    refused = chart.run("template", "fovea", "CHART", "--set", assignment)
    assert refused.returncode != 0
    assert words in refused.stderr


def test_one_shard_has_no_router(chart: Chart) -> None:
    found = chart.manifests("--set", "gateway.shards=1,database.secret=fovea-database")
    assert not [item for item in found if item["metadata"]["name"] == "fovea-router"]
    linted = chart.run("lint", "--strict", "CHART", *ARGUMENTS)
    assert linted.returncode == 0, linted.stdout + linted.stderr
