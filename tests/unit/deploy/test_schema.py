"""The schema of the chart's values: its descriptions, and the value sets that come with the chart."""

import json
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from deploy.helm import schema
from fovea_gateway.settings import GatewaySettings
from tests.unit.deploy.chart import SOURCE, VALUE_SETS

OPEN = {"type": "object"}


def test_the_file_is_what_the_settings_say() -> None:
    said = "services' settings or the schema changed; write it anew: python -m deploy.helm.schema"
    assert schema.TARGET.read_text() == schema.text(), said


def test_every_object_is_closed() -> None:
    """Except typed maps, and fields that only the API server knows."""

    def objects(node: Any) -> list[dict[str, Any]]:
        if isinstance(node, list):
            return [found for item in node for found in objects(item)]
        if not isinstance(node, dict):
            return []
        inner = [found for item in node.values() for found in objects(item)]
        return [node, *inner] if node.get("type") == "object" else inner

    found = [node for node in objects(schema.values()) if node != OPEN]
    assert len(found) > 40
    assert all("additionalProperties" in node for node in found)
    assert all(node["additionalProperties"] is False for node in found if "properties" in node)


@pytest.mark.parametrize("service", schema.SETTINGS)
def test_values_that_the_chart_sets_itself_are_settings(service: str) -> None:
    own = {*schema.OWN[service].split(), *schema.OWN_OF_ALL.split()}
    assert own <= set(schema.SETTINGS[service].model_fields)


@pytest.mark.parametrize("name", ["values", *(f"values-{name}" for name in VALUE_SETS)])
def test_values_fit(name: str) -> None:
    jsonschema.validate(yaml.safe_load((SOURCE / f"{name}.yaml").read_text()), json.loads(schema.text()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("oidc_roles", {"ml-team": "trian"}),
        ("oidc_issuer", "http://sso.example.com"),
        ("oidc_public_url", "fovea.example.com"),
        ("alerts_webhook", "hooks.example.org"),
        ("default_limits", {"max_model": 3}),
    ],
)
def test_a_value_that_the_gateway_would_refuse_is_refused_before_anything_is_installed(name: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(**{name: value})
    values = {"gateway": {"settings": {name: value}}}
    with pytest.raises(jsonschema.ValidationError) as refused:
        jsonschema.validate(values, json.loads(schema.text()))
    assert list(refused.value.absolute_path)[:3] == ["gateway", "settings", name]


def test_every_value_of_the_schema_has_a_default() -> None:
    def missing(node: dict[str, Any], values: Any, path: str) -> list[str]:
        if "$ref" in node:
            node = schema.definitions()[node["$ref"].rsplit("/", 1)[1]]
        properties = node.get("properties", {})
        if not isinstance(values, dict) or path.endswith((".settings", ".affinity", ".resources")):
            return []
        lost = [f"{path}.{name}" for name in properties if name not in values]
        inner = [missing(properties[name], values[name], f"{path}.{name}") for name in properties if name in values]
        return [*lost, *(found for item in inner for found in item)]

    values = yaml.safe_load((SOURCE / "values.yaml").read_text())
    assert missing(schema.values(), values, "") == [".global"]
