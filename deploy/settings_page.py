"""Generates docs/reference/settings.md, a list of all settings of all services: `python -m deploy.settings_page`."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from deploy.helm.schema import SETTINGS
from fovea.runtime.settings import ServiceSettings

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
_HEAD = """# Settings of the services

`python -m deploy.settings_page` generates this page from the code, and a test compares the two. For example, the
sampler's setting `max_loras` can be given as

* `--set sampler.max_loras=16` to `fovea up`, unless it has an option of its own ([cli.md](cli.md));
* `FOVEA_SAMPLER_MAX_LORAS=16` in the environment;
* `--max-loras 16` to `python -m fovea_sampler`;
* `sampler.settings.max_loras: 16` in the values of the [chart](../guides/operations.md#install), unless the chart has
  its own value for it.

The command line overrides the environment, and the environment overrides the default. An invalid value is rejected
with an error of one line.
"""
_LIMITS = {"minimum": "≥ ", "exclusiveMinimum": "> ", "maximum": "≤ ", "exclusiveMaximum": "< "}


def page() -> str:
    """Returns the page as Markdown."""
    common = ServiceSettings.model_json_schema()["properties"]
    sections = [_section("all four", common, {})]
    for name, settings in SETTINGS.items():
        sections.append(_section(name, settings.model_json_schema()["properties"], common))
    return _HEAD + "".join(sections)


def _section(name: str, fields: Mapping[str, Any], common: Mapping[str, Any]) -> str:
    rows = [_row(field, told) for field, told in fields.items() if common.get(field) != told]
    return "\n".join([f"\n## {name}\n", "| setting | what it is | default |", "|---|---|---|", *rows, ""])


def _row(name: str, told: Mapping[str, Any]) -> str:
    choices = [one for one in told.get("anyOf", [told]) if one.get("type") != "null"]
    kind = " or ".join(filter(None, map(_kind, choices)))
    words = " ".join(str(told.get("description", "")).split()).replace("|", "\\|")
    default = told.get("default")
    shown = "" if default in (None, "") else f"`{default if isinstance(default, str) else json.dumps(default)}`"
    return f"| `{name}` {kind} | {words} | {shown} |"


def _kind(told: Mapping[str, Any]) -> str:
    if "enum" in told:
        return ", ".join(str(one) for one in told["enum"])
    limits = [f"{sign}{told[limit]:g}" for limit, sign in _LIMITS.items() if limit in told]
    return ", ".join([str(told.get("type", "")), *limits])


if __name__ == "__main__":
    PAGE.write_text(page())
