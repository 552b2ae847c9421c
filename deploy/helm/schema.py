"""Writes fovea/values.schema.json, with the services' settings from their settings.py: `python -m deploy.helm.schema`.

The schema rejects values that are not listed here, except in maps with free keys (labels, annotations and so on).
"""

import json
from pathlib import Path
from typing import Any

from fovea.runtime.settings import ServiceSettings
from fovea_gateway.settings import GatewaySettings
from fovea_renderer.settings import RendererSettings
from fovea_sampler.settings import SamplerSettings
from fovea_trainer.settings import TrainerSettings

Schema = dict[str, Any]

TARGET = Path(__file__).parent / "fovea" / "values.schema.json"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "renderer": RendererSettings,
    "sampler": SamplerSettings,
    "trainer": TrainerSettings,
}
OWN = {
    "gateway": "renderer sampler trainer model_name tokenizer grpc_port base_path state_dir database_url checkpoint_dir"
    " api_key api_key_file discovery kubernetes_namespace shards shard_host",
    "renderer": "advertise workers",
    "sampler": "renderer tensor_parallel shared_base",
    "trainer": "renderer ranks nodes node_rank master_addr master_port transfer_address checkpoints shared_base",
}
"""Settings that have their own values in the chart, follow from others, or need one machine for several services."""
OWN_OF_ALL = "host port metrics_port health_port log_level drain_s model trace_endpoint"

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "array", "items": STRING}
MAP: Schema = {"type": "object", "additionalProperties": STRING}
QUANTITY: Schema = {
    "type": ["string", "number"],
    "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i|[MGTPE])?$",
    "description": "A Kubernetes quantity, such as 500m or 16Gi.",
}
SIZE: Schema = {
    "type": "string",
    "pattern": r"^([0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE]))?$",
    "description": "A size, such as 200Gi.",
}
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}


def closed(**properties: Schema) -> Schema:
    """Returns the schema of an object with these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def at_least(minimum: int, maximum: int | None = None) -> Schema:
    """Returns the schema of an integer within bounds."""
    return {"type": "integer", "minimum": minimum} | ({} if maximum is None else {"maximum": maximum})


def one_of(*values: str) -> Schema:
    """Returns the schema of one of these strings."""
    return {"enum": list(values)}


def reference(name: str) -> Schema:
    """Returns a reference to an entry of `definitions`."""
    return {"$ref": f"#/$defs/{name}"}


def settings(service: str) -> Schema:
    """Returns the schema of `<service>.settings`: the service's settings without those that the chart sets itself."""
    own = {*OWN[service].split(), *OWN_OF_ALL.split()}
    said = SETTINGS[service].model_json_schema()
    fields, models = said["properties"], said.get("$defs", {})
    return closed(
        **{name: _without_defaults(field, models) for name, field in sorted(fields.items()) if name not in own}
    )


def _without_defaults(field: Schema, models: Schema) -> Schema:
    kept = {key: value for key, value in field.items() if key not in ("title", "default", "format")}
    if choices := kept.pop("anyOf", None):  # an optional setting is omitted instead of null
        (choice,) = [choice for choice in choices if choice.get("type") != "null"]
        kept |= {key: value for key, value in choice.items() if key != "format"}
    if model := models.get(kept.get("items", {}).get("$ref", "").rpartition("/")[2]):
        inner = {name: _without_defaults(each, models) for name, each in model["properties"].items()}
        kept["items"] = closed(**inner) | {"required": model["required"]}
    return kept


def component(name: str, *, start: int, **properties: Schema) -> Schema:
    """Returns the schema of one component: `properties` and those that all of them have."""
    own = {"settings": settings(name)} if name in SETTINGS else {}  # a router reads the gateway's
    return closed(
        **properties,
        **own,
        env=MAP,
        resources=reference("resources"),
        startSeconds=at_least(start),
        drainSeconds=at_least(0, 3600),
        maxUnavailable={"type": ["integer", "null"], "minimum": 0},
        labels=MAP,
        annotations=MAP,
        nodeSelector=MAP,
        tolerations=reference("tolerations"),
        affinity=reference("affinity"),
        priorityClassName=STRING,
        runtimeClassName=STRING,
        schedulerName=STRING,
    )


def definitions() -> Schema:
    """Returns schemas that several values share."""
    anything: Schema = {"type": "object"}
    toleration = closed(
        key=STRING, operator=one_of("Exists", "Equal"), value=STRING,
        effect=one_of("NoSchedule", "PreferNoSchedule", "NoExecute"), tolerationSeconds=at_least(0),
    )  # fmt: skip
    modes = one_of("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod")
    return {
        "resources": closed(requests=QUANTITIES, limits=QUANTITIES),
        "tolerations": {"type": "array", "items": toleration},
        "affinity": closed(nodeAffinity=anything, podAffinity=anything, podAntiAffinity=anything),
        "peers": {"type": "array", "items": closed(podSelector=anything, namespaceSelector=anything, ipBlock=anything)},
        "volume": closed(
            claim=STRING, size=SIZE, storageClass=STRING, readOnly=BOOLEAN,
            accessModes={"type": "array", "minItems": 1, "items": modes},
        ),
    }  # fmt: skip


def gateway() -> Schema:
    """Returns the schema of the gateway's values."""
    return component(
        "gateway",
        start=10,
        shards=at_least(1, 256),
        topologySpread=STRING,
        envSecret=STRING,
        basePath={"type": "string", "pattern": "^(/.*[^/])?$", "description": "Path prefix, such as /fovea."},
        service=closed(type=one_of("ClusterIP", "NodePort", "LoadBalancer"), annotations=MAP),
        ingress=closed(enabled=BOOLEAN, className=STRING, host=STRING, tlsSecret=STRING, annotations=MAP),
        grpcRoute=closed(enabled=BOOLEAN, gateway=STRING, gatewayNamespace=STRING, hostnames=STRINGS),
    )


def values() -> Schema:
    """Returns the complete schema."""
    spread: dict[str, Any] = {"topologySpread": STRING}
    shared: dict[str, Any] = {"gpus": at_least(0), "sharedMemory": SIZE} | spread
    replicas = {"enabled": BOOLEAN, "minReplicas": at_least(1), "maxReplicas": at_least(1)}
    scaling = closed(**replicas, cpuPercent=at_least(1, 100))
    by_tokens = closed(**replicas, tokens=at_least(1), scaleDownSeconds=at_least(0, 3600))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions()} | closed(
        **{"global": {"type": "object"}},  # Helm passes it to every chart
        fullnameOverride=STRING,
        image=closed(
            repository=STRING, tag=STRING, pullPolicy=one_of("Always", "IfNotPresent", "Never"), pullSecrets=STRINGS
        ),
        model=closed(
            source={"type": "string", "minLength": 1}, name=STRING, tokenizer=STRING,
            token=closed(secret=STRING, key=STRING), volume=reference("volume"),
        ),
        checkpoints=closed(
            url={"type": "string", "pattern": "^([a-z0-9+]+://.+)?$", "description": "An fsspec URL, such as "
"s3://bucket/fovea."},
            secret=STRING, volume=reference("volume"),
        ),
        database=closed(secret=STRING, key=STRING, volume=reference("volume")),
        apiKeys=closed(secret=STRING),
        serviceSecret=closed(secret=STRING),
        secretSeed={"type": "string", "pattern": "^(.{32,})?$", "description": "At least 32 random characters."},
        tls=closed(enabled=BOOLEAN, secret=STRING),
        serviceAccount=closed(annotations=MAP),
        traceEndpoint={"type": "string", "pattern": "^(https?://.+)?$"},
        logLevel=one_of("DEBUG", "INFO", "WARNING", "ERROR"),
        gpuResource={"type": "string", "pattern": "/"},
        gpuDeviceClass=STRING,
        kueue=closed(queue=STRING),
        ipcLock=BOOLEAN,
        gateway=gateway(),
        router=component("router", start=10, replicas=at_least(1), **spread),
        renderer=component(
            "renderer", start=10, replicas=at_least(1), workers=at_least(1, 256), autoscaling=scaling, **spread
        ),
        sampler=component("sampler", start=60, replicas=at_least(0), autoscaling=by_tokens, **shared),
        trainer=component("trainer", start=60, replicas=at_least(1), nodes=at_least(1), **shared),
        networkPolicy=closed(
            enabled=BOOLEAN,
            clients=reference("peers"),
            monitoring=reference("peers"),
            egress=closed(enabled=BOOLEAN, rules={"type": "array", "items": {"type": "object"}}),
        ),
        monitoring=closed(
            podMonitor=closed(enabled=BOOLEAN, interval=STRING, labels=MAP),
            dashboard=closed(enabled=BOOLEAN, labels=MAP),
            alerts=closed(enabled=BOOLEAN, labels=MAP, prometheusRule=BOOLEAN),
        ),
    )  # fmt: skip


def text() -> str:
    """Returns the content of the file."""
    return json.dumps(values(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
