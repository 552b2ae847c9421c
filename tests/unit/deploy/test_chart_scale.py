"""The chart's options for teams: queues, quotas, autoscaling, claimed GPUs, and stable secrets."""

import base64
import json
import re
import shlex

import pytest

from tests.unit.deploy.chart import ROOT, Chart, Manifest, of_kind, pods

_QUEUE = "kueue.x-k8s.io/queue-name"
_SEED = "secretSeed=" + "0123456789" * 4
_OWN_SECRETS = ("fovea-database", "fovea-bucket", "fovea-keys", "fovea-services")


def _labels(pod: Manifest) -> dict[str, str]:
    return dict(pod["metadata"]["labels"])


def _secrets(manifests: list[Manifest]) -> dict[str, str]:
    found = of_kind(manifests, "Secret").values()
    return {key: base64.b64decode(text).decode() for secret in found for key, text in secret["data"].items()}


def test_a_queue_holds_back_single_pods_one_by_one(chart: Chart) -> None:
    """Kueue refuses to resize a StatefulSet with its label, so the pods have the label."""
    found = chart.manifests("--set", "kueue.queue=gpus")
    labelled = {name for name, pod in pods(found).items() if _labels(pod).get(_QUEUE) == "gpus"}
    assert labelled == {"fovea-sampler", "fovea-trainer"}
    assert not [item for item in found if _QUEUE in item["metadata"]["labels"]]


def test_a_queue_admits_a_group_of_pods_as_a_whole(chart: Chart) -> None:
    found = chart.manifests("--set", "kueue.queue=gpus,trainer.nodes=4")
    group = of_kind(found, "LeaderWorkerSet")["fovea-trainers"]
    assert group["metadata"]["labels"][_QUEUE] == "gpus"
    assert _QUEUE not in _labels(pods(found)["fovea-trainers"])


@pytest.mark.parametrize(("nodes", "name"), [(1, "fovea-trainer"), (2, "fovea-trainers")])
def test_several_trainers_have_an_address_each(chart: Chart, nodes: int, name: str) -> None:
    found = chart.manifests("--set", f"trainer.replicas=2,trainer.nodes={nodes}")
    kind = "StatefulSet" if nodes == 1 else "LeaderWorkerSet"
    assert of_kind(found, kind)[name]["spec"]["replicas"] == 2
    (gateway,) = pods(found)["fovea-gateway"]["spec"]["containers"]
    variables = {item["name"]: item.get("value") for item in gateway["env"]}
    addresses = [f"{name}-{index}.{name}.ml.svc:50053" for index in range(2)]
    assert variables["FOVEA_GATEWAY_TRAINER"] == ",".join(addresses)


@pytest.mark.parametrize("kind", ["LeaderWorkerSet", "ResourceClaimTemplate"])
def test_one_host_needs_no_controller_of_others(chart: Chart, kind: str) -> None:
    for values in (), ("--values", chart.values_file("eight-gpus")):
        assert of_kind(chart.manifests(*values), kind) == {}


def test_samplers_scale_by_a_metric_that_the_gateway_has(chart: Chart) -> None:
    found = chart.manifests("--values", chart.values_file("team"))
    scaler = of_kind(found, "HorizontalPodAutoscaler")["fovea-sampler"]["spec"]
    assert "replicas" not in of_kind(found, "StatefulSet")["fovea-sampler"]["spec"], "an upgrade would undo the scaling"
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (4, 16)
    (metric,) = [item["external"]["metric"] for item in scaler["metrics"]]
    assert f"`{metric['name']}` gauge" in (ROOT / "docs/reference/metrics.md").read_text()
    (monitor,) = of_kind(found, "PodMonitor").values()
    copied = {label.translate(str.maketrans("./", "__")) for label in monitor["spec"]["podTargetLabels"]}
    assert set(metric["selector"]["matchLabels"]) <= {"service"} | copied


def test_bounds_of_an_autoscaler_are_compared(chart: Chart) -> None:
    done = chart.run("template", "fovea", "CHART", "--set", "sampler.autoscaling.minReplicas=5")
    assert done.returncode != 0
    assert "sampler.autoscaling: minReplicas is 5, above maxReplicas, 4" in done.stderr


def test_gpus_are_claimed_from_a_device_class(chart: Chart) -> None:
    found = chart.manifests("--set", "gpuDeviceClass=gpu.nvidia.com,sampler.gpus=2")
    templates = of_kind(found, "ResourceClaimTemplate")
    for component, gpus in (("sampler", 2), ("trainer", 1)):
        spec = pods(found)[f"fovea-{component}"]["spec"]
        (claim,) = spec["resourceClaims"]
        (request,) = templates[claim["resourceClaimTemplateName"]]["spec"]["spec"]["devices"]["requests"]
        assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com", "count": gpus}
        resources = spec["containers"][0]["resources"]
        assert resources["claims"] == [{"name": claim["name"]}]
        assert not [name for name in resources["limits"] if "nvidia" in name]


def test_a_seed_makes_the_same_secrets_in_every_render(chart: Chart) -> None:
    first, second = (_secrets(chart.manifests("--set", _SEED)) for _ in range(2))
    assert first == second
    (key,) = json.loads(first["api-keys"])
    assert re.fullmatch(r"tml-\w{40}", key)
    assert first["service-secret"] not in key
    assert _secrets(chart.manifests("--set", _SEED, release="other"))["api-keys"] != first["api-keys"]
    assert _secrets(chart.manifests()) != _secrets(chart.manifests()), "without a seed they are random"
    refused = chart.run("template", "fovea", "CHART", "--set", "secretSeed=short")
    assert "/secretSeed" in refused.stderr


def test_the_gateway_reads_the_tokenizer_where_the_others_store_it(chart: Chart) -> None:
    found = chart.manifests("--set", "model.volume.size=100Gi")
    (service,) = pods(found)["fovea-gateway"]["spec"]["containers"]
    assert {"name": "HF_HOME", "value": "/models/huggingface"} in service["env"]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in service["volumeMounts"]
    for image in ("renderer", "sampler", "trainer"):
        assert "HF_HOME=/models/huggingface" in (ROOT / "services" / image / "Dockerfile").read_text()
    (without,) = pods(chart.manifests())["fovea-gateway"]["spec"]["containers"]
    assert "/models" not in {mount["mountPath"] for mount in without["volumeMounts"]}


def test_a_team_keeps_its_state_and_secrets_outside(chart: Chart) -> None:
    """Two renders of the value set are equal and refer to the secrets that its first lines describe."""
    first, second = (chart.render("--values", chart.values_file("team")) for _ in range(2))
    assert first == second
    found = chart.manifests("--values", chart.values_file("team"))
    assert of_kind(found, "Secret") == {}
    assert set(of_kind(found, "PersistentVolumeClaim")) == {"fovea-model"}
    comment = (chart.path / "values-team.yaml").read_text()
    for name in _OWN_SECRETS:
        assert name in first
        assert f"#   {name}" in comment


@pytest.mark.parametrize("page", ["README.md", "docs/guides/operations.md"])
def test_the_documented_install_lines_render(chart: Chart, page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", " ")
    lines = re.findall(r"helm install fovea deploy/helm/fovea[^`\n]*", text)
    assert lines
    for line in lines:
        words = shlex.split(line)[4:]
        words = [word.replace("$REPOSITORY", "REPOSITORY") for word in words if word != "--create-namespace"]
        words = [str(ROOT / word) if word.startswith("deploy/") else word for word in words]
        done = chart.run("template", "fovea", "CHART", *words)
        assert done.returncode == 0, done.stderr
        assert "image: REPOSITORY/gateway:0.1.0" in done.stdout
