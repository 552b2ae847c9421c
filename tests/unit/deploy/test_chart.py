"""The chart through helm: rendered manifests and refused values."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from deploy.helm.schema import SETTINGS
from fovea.runtime.credentials import SECRET_VARIABLE
from fovea.runtime.settings import TRACE_VARIABLE, ServiceSettings
from fovea_sampler.settings import SamplerSettings
from tests.unit.deploy.chart import GOLDEN, VALUE_SETS, Chart, Manifest, of_kind, pods


def container(pod: Manifest) -> Manifest:
    (only,) = pod["spec"]["containers"]
    return dict(only)


@pytest.fixture(scope="module", params=VALUE_SETS)
def manifests(request: pytest.FixtureRequest, chart: Chart) -> list[Manifest]:
    return chart.manifests("--values", chart.values_file(request.param), "--set", "traceEndpoint=http://collector:4317")


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_lint(chart: Chart, value_set: str) -> None:
    done = chart.run("lint", "--strict", "CHART", "--values", chart.values_file(value_set))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_golden(chart: Chart, value_set: str) -> None:
    said = "read the difference, then: python -m tests.unit.deploy.chart"
    assert chart.golden(value_set) == (GOLDEN / f"{value_set}.yaml").read_text(), said


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("sampler.replica=3", ["/sampler", "replica"]),
        ("smapler.replicas=3", ["smapler"]),
        ("trainer.settings.max_lora_rnk=8", ["/trainer/settings", "max_lora_rnk"]),
        ("gateway.settings.port=1", ["/gateway/settings", "port"]),
        ("model.volume.sise=1Gi", ["/model/volume", "sise"]),
        ("sampler.replicas=many", ["/sampler/replicas", "got string, want integer"]),
        ("sampler.settings.max_lora_rank=9", ["/sampler/settings/max_lora_rank", "must be one of 8, 16"]),
        (
            "gateway.settings.oidc_roles.ml=trian",
            ["/gateway/settings/oidc_roles/ml", "train"],
        ),
        ("trainer.drainSeconds=4000", ["/trainer/drainSeconds", "maximum: got 4,000, want 3,600"]),
        ("trainer.settings.node_rank=1", ["/trainer/settings", "node_rank"]),
        ("checkpoints.volume.size=big", ["/checkpoints/volume/size", "'big' does not match pattern"]),
        ("checkpoints.volume.size=", ["checkpoints: set checkpoints.url"]),
        ("database.volume.size=", ["database: set database.secret"]),
        ("gateway.ingress.enabled=true", ["gateway.ingress.host"]),
        ("gateway.grpcRoute.enabled=true", ["gateway.grpcRoute.gateway"]),
    ],
)
def test_wrong_values_are_refused_by_name(chart: Chart, assignment: str, words: list[str]) -> None:
    done = chart.run("template", "fovea", "CHART", "--set", assignment)
    assert done.returncode != 0
    for word in words:
        assert word in done.stderr


def test_environment_is_settings(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable is a setting of that service, with a valid value."""
    for pod in pods(manifests).values():
        service = container(pod)
        settings = SETTINGS[service["name"]]
        prefix = settings.model_config["env_prefix"]
        variables = {
            item["name"]: item["value"] if "value" in item else _injected(item["valueFrom"]) for item in service["env"]
        }
        ours = {name for name in variables if name.startswith("FOVEA_")}
        assert SECRET_VARIABLE in ours
        assert ours - {TRACE_VARIABLE, SECRET_VARIABLE} <= {prefix + field.upper() for field in settings.model_fields}
        with monkeypatch.context() as patch:
            for name in ours:
                patch.setenv(name, variables[name])
            assert isinstance(read := settings(), ServiceSettings)
        assert (read.host, read.metrics_port) == ("0.0.0.0", 9090)
        assert read.trace_endpoint == "http://collector:4317"


def _injected(source: Manifest) -> str:
    """Returns an example of a value that the cluster injects: the number of a pod, or an entry of a secret."""
    field = source.get("fieldRef", {}).get("fieldPath", "")
    if source.get("secretKeyRef", {}).get("key") == "service-secret":
        return "x" * 40
    return "1" if "worker-index" in field else '["tml-x"]'


def test_ports_are_those_that_the_service_listens_on(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        service = container(pod)
        ports = {port["name"]: port["containerPort"] for port in service.get("ports", [])}
        variables = {
            item["name"].split("_", 2)[2]: item.get("value") for item in service["env"] if "_" in item["name"][6:]
        }
        assert str(ports["metrics"]) == variables["METRICS_PORT"] == "9090"
        if name == "fovea-gateway":
            assert (variables["PORT"], variables["GRPC_PORT"]) == (str(ports["rest"]), str(ports["grpc"]))
        else:
            assert variables["PORT"] == str(ports["grpc"])
            assert service["startupProbe"]["grpc"]["port"] == ports["grpc"]


def test_pods_are_unprivileged(manifests: list[Manifest]) -> None:
    for pod in pods(manifests).values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        security = container(pod)["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert pod["spec"]["enableServiceLinks"] is False
        writable = {mount["mountPath"] for mount in container(pod)["volumeMounts"]}
        assert "/tmp" in writable


def test_only_the_gateway_may_ask_the_api_server(manifests: list[Manifest]) -> None:
    tokens = {name for name, pod in pods(manifests).items() if pod["spec"]["automountServiceAccountToken"]}
    assert tokens == {"fovea-gateway"}
    (role,) = of_kind(manifests, "Role").values()
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]


def test_only_the_gateway_is_open_to_the_outside(manifests: list[Manifest]) -> None:
    policies = of_kind(manifests, "NetworkPolicy")
    assert len(policies) == 4
    for name, policy in policies.items():
        for rule in policy["spec"]["ingress"]:
            is_open = "from" not in rule
            assert is_open == (name == "fovea-gateway" and {port["port"] for port in rule["ports"]} == {8000, 50050})
    free = [rule for rule in policies["fovea-sampler"]["spec"]["ingress"] if "ports" not in rule]
    (peers,) = [[peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in r["from"]] for r in free]
    assert peers == ["sampler", "trainer"]


def test_pods_connect_to_each_other_and_to_named_ports_alone(manifests: list[Manifest], chart: Chart) -> None:
    expected = {
        "fovea-gateway": {("renderer", 50051), ("sampler", 50052), ("trainer", 50053)},
        "fovea-renderer": set(),
        "fovea-sampler": {("renderer", 50051), ("sampler", 0), ("trainer", 0)},
        "fovea-trainer": {("renderer", 50051), ("sampler", 0), ("trainer", 0)},
    }
    for name, policy in of_kind(manifests, "NetworkPolicy").items():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        dns, *rules = policy["spec"]["egress"]
        assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
        inner = {
            (peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"], port["port"])
            for rule in rules
            for peer in rule.get("to", ())
            for port in rule.get("ports", [{"port": 0}])
        }
        assert inner == expected[name]
        (outer,) = [rule for rule in rules if "to" not in rule]
        assert {port["port"] for port in outer["ports"]} == {443, 6443, 5432, 4317}
    values = chart.values_file("one-gpu")
    without = chart.manifests("--values", values, "--set", "networkPolicy.egress.enabled=false")
    assert all("egress" not in policy["spec"] for policy in of_kind(without, "NetworkPolicy").values())
    narrowed = chart.manifests(
        "--values", values, "--set-json", 'networkPolicy.egress.rules=[{"ports": [{"port": 9000}]}]'
    )
    for policy in of_kind(narrowed, "NetworkPolicy").values():
        assert policy["spec"]["egress"][-1] == {"ports": [{"port": 9000}]}


def test_selectors_find_pods_and_names_are_short(manifests: list[Manifest]) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(manifests).values()]
    for service in of_kind(manifests, "Service").values():
        assert any(service["spec"]["selector"].items() <= label.items() for label in labels)
    for budget in of_kind(manifests, "PodDisruptionBudget").values():
        assert any(budget["spec"]["selector"]["matchLabels"].items() <= label.items() for label in labels)


def test_mounts_have_volumes(manifests: list[Manifest]) -> None:
    claims = of_kind(manifests, "PersistentVolumeClaim")
    for pod in pods(manifests).values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container(pod)["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_two_nodes_meet_at_the_leader_of_their_group(chart: Chart) -> None:
    manifests = chart.manifests("--values", chart.values_file("two-nodes"))
    group = of_kind(manifests, "LeaderWorkerSet")["fovea-trainers"]["spec"]
    assert (group["replicas"], group["leaderWorkerTemplate"]["size"]) == (1, 2)
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "leaderTemplate" not in group["leaderWorkerTemplate"], "all nodes must run the same pod"
    only = container(pods(manifests)["fovea-trainers"])
    assert "command" not in only
    variables = {item["name"].removeprefix("FOVEA_TRAINER_"): item for item in only["env"]}
    assert variables["NODES"]["value"] == "2"
    assert variables["MASTER_ADDR"]["value"] == "$(LWS_LEADER_ADDRESS).svc"
    assert "sigs.k8s.io/worker-index" in variables["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    gateway = {item["name"]: item.get("value") for item in container(pods(manifests)["fovea-gateway"])["env"]}
    assert gateway["FOVEA_GATEWAY_TRAINER"] == "fovea-trainers-0.fovea-trainers.ml.svc:50053"
    assert of_kind(manifests, "Service")["fovea-trainer"]["spec"]["publishNotReadyAddresses"] is True


def test_gpus_are_asked_for(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        gpus = [
            number for resource, number in container(pod)["resources"]["limits"].items() if "nvidia.com" in resource
        ]
        assert len(gpus) == (("sampler" in name) or ("trainer" in name))


def test_a_long_release_name_leaves_room(chart: Chart) -> None:
    found = chart.manifests("--values", chart.values_file("two-nodes"), release="a" * 53)
    names = [item["metadata"]["name"] for item in found]
    assert len(names) == len(set(zip(names, [item["kind"] for item in found], strict=True)))
    # A stateful set writes its name and a hash of ten characters into a label of 63.
    assert max(map(len, of_kind(found, "StatefulSet"))) <= 52


def test_a_key_is_made_unless_one_is_given(chart: Chart) -> None:
    made = [re.search(r"(?m)^  api-keys: (\S+)$", chart.render()) for _ in range(2)]
    assert made[0]
    assert made[1]
    assert made[0].group(1) != made[1].group(1)
    assert "api-keys: " not in chart.render("--set", "apiKeys.secret=mine")


def test_a_service_secret_is_made_unless_one_is_given(chart: Chart) -> None:
    """All pods get the same secret."""
    made = [re.search(r"(?m)^  service-secret: (\S+)$", chart.render()) for _ in range(2)]
    assert made[0]
    assert made[1]
    assert made[0].group(1) != made[1].group(1)
    manifests = chart.manifests("--set", "serviceSecret.secret=mine")
    assert "service-secret" not in {name.removeprefix("fovea-") for name in of_kind(manifests, "Secret")}
    for pod in pods(manifests).values():
        (given,) = [item["valueFrom"] for item in container(pod)["env"] if item["name"] == SECRET_VARIABLE]
        assert given == {"secretKeyRef": {"name": "mine", "key": "service-secret"}}


def test_with_tls_every_pod_has_the_certificate_and_probes_a_port_without(chart: Chart) -> None:
    assert of_kind(chart.manifests(), "Certificate") == {}
    manifests = chart.manifests("--set", "tls.enabled=true")
    made = of_kind(manifests, "Certificate")
    assert set(made) == {"fovea-ca", "fovea-tls"}
    assert made["fovea-tls"]["spec"]["dnsNames"] == ["fovea"]
    assert made["fovea-tls"]["spec"]["issuerRef"]["name"] in of_kind(manifests, "Issuer")
    for name, pod in pods(manifests).items():
        (volume,) = [each["secret"] for each in pod["spec"]["volumes"] if each["name"] == "tls"]
        assert volume["secretName"] == made["fovea-tls"]["spec"]["secretName"]
        assert {"name": "FOVEA_TLS_DIR", "value": "/tls"} in container(pod)["env"]
        if "gateway" not in name:
            assert container(pod)["readinessProbe"]["grpc"] == {"port": 9091}
    given = chart.manifests("--set", "tls.enabled=true", "--set", "tls.secret=mine")
    assert of_kind(given, "Certificate") == {}


def test_the_notes_say_what_to_do_next(chart: Chart, tmp_path: Path) -> None:
    """`helm template` does not print them, so a copy of the chart has them as a manifest."""
    copy = Chart(tmp_path)
    (copy.path / "files/notes.txt").write_text((copy.path / "templates/NOTES.txt").read_text())
    shown = 'notes: {{ tpl (.Files.Get "files/notes.txt") . | toJson }}'
    (copy.path / "templates/notes.yaml").write_text(shown)
    (notes,) = [item["notes"] for item in copy.manifests("--set", "apiKeys.secret=mine") if "notes" in item]
    assert "rollout status deployment/fovea-gateway" in notes
    assert "port-forward service/fovea-gateway 8000 50050" in notes
    assert "export TINKER_BASE_URL=http://127.0.0.1:8000" in notes
    assert "exec deployment/fovea-gateway -- python -m fovea_gateway.access.access_command" in notes
    for given in '["tml-one", "tml-two"]', '["alice=tml-one"]':
        key = subprocess.run(
            ["sh", "-c", notes.split(r"{.data.api-keys}' |")[1].split(")\n")[0].replace("base64 --decode", "cat")],
            input=given, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert key.stdout.strip() == "tml-one"


def test_everything_optional(chart: Chart) -> None:
    found = chart.manifests(
        "--set", "gateway.ingress.enabled=true,gateway.ingress.host=fovea.example,gateway.ingress.tlsSecret=tls",
        "--set", "gateway.grpcRoute.enabled=true,gateway.grpcRoute.gateway=public,gateway.basePath=/fovea",
        "--set", "monitoring.podMonitor.enabled=true,monitoring.alerts.prometheusRule=true",
        "--set", "model.token.secret=hub,image.pullSecrets={mine},renderer.maxUnavailable=null",
    )  # fmt: skip
    kinds = {item["kind"] for item in found}
    assert {"Ingress", "GRPCRoute", "PodMonitor", "PrometheusRule"} <= kinds
    probe = container(pods(found)["fovea-gateway"])["livenessProbe"]
    assert probe["httpGet"]["path"] == "/fovea/api/v1/healthz"
    assert "fovea-renderer" not in of_kind(found, "PodDisruptionBudget")


def test_large_numbers_stay_integers(chart: Chart) -> None:
    found = chart.manifests("--set", "gateway.settings.max_body_bytes=134217728,gateway.settings.reflection=false")
    variables = {item["name"]: item.get("value") for item in container(pods(found)["fovea-gateway"])["env"]}
    assert variables["FOVEA_GATEWAY_MAX_BODY_BYTES"] == "134217728"
    assert variables["FOVEA_GATEWAY_REFLECTION"] == "false"


def test_vllms_own_arguments_reach_the_sampler(chart: Chart, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"gdn_prefill_backend": "triton", "compilation_config": {"cudagraph_capture_sizes": [1, 2]}}
    found = chart.manifests("--set-json", f"sampler.settings.engine_arguments={json.dumps(given)}")
    variables = {item["name"]: item.get("value") for item in container(pods(found)["fovea-sampler"])["env"]}
    monkeypatch.setenv("FOVEA_SAMPLER_ENGINE_ARGUMENTS", variables["FOVEA_SAMPLER_ENGINE_ARGUMENTS"])
    assert SamplerSettings(model="m").engine_arguments == given


def test_gateways_overlap_on_postgresql_alone(chart: Chart) -> None:
    for value_set, kind in (("eight-gpus", "Recreate"), ("two-nodes", "RollingUpdate")):
        found = chart.manifests("--values", chart.values_file(value_set))
        gateway = of_kind(found, "Deployment")["fovea-gateway"]["spec"]
        assert gateway["strategy"]["type"] == kind
        assert gateway["strategy"].get("rollingUpdate", {}).get("maxUnavailable", 1) == 1


def test_every_pod_has_time_to_drain(manifests: list[Manifest]) -> None:
    for pod in pods(manifests).values():
        service = container(pod)
        (drain,) = [int(item["value"]) for item in service["env"] if item["name"].endswith("_DRAIN_S")]
        before = service.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod["spec"]["terminationGracePeriodSeconds"] >= before + 2 * drain + 20


def test_the_gateway_reads_variables_from_secrets(chart: Chart) -> None:
    """Its own secret does not reach other services, and comes after the bucket's, so that it overrides those."""
    bucket = ["--set", "checkpoints.secret=bucket,checkpoints.url=s3://b/f"]
    both = pods(chart.manifests(*bucket, "--set", "gateway.envSecret=sign-in"))
    names = {
        name: [each["secretRef"]["name"] for each in container(pod).get("envFrom", [])] for name, pod in both.items()
    }
    assert names["fovea-gateway"] == ["bucket", "sign-in"]
    assert names["fovea-trainer"] == ["bucket"]
    assert names["fovea-sampler"] == names["fovea-renderer"] == []
    alone = pods(chart.manifests("--set", "gateway.envSecret=sign-in"))
    assert container(alone["fovea-gateway"])["envFrom"] == [{"secretRef": {"name": "sign-in"}}]
    assert "envFrom" not in container(pods(chart.manifests())["fovea-gateway"])
