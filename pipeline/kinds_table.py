"""The quantizers, engines and rules that there are, each with its fields, their types and defaults.

print(kinds_table(as_json=False))
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.plugins import plugin_classes

PLUGIN_PACKAGES = {"quantizer": "pipeline.quantizers", "engine": "pipeline.engines", "rule": "pipeline.rules"}


def kinds_table(*, as_json: bool) -> str:
    """Every plugin with its fields, their types and defaults."""
    schemas = {
        family: {
            kind.model_fields["kind"].default: kind.model_json_schema() for kind in plugin_classes(package)
        }
        for family, package in PLUGIN_PACKAGES.items()
    }
    if as_json:
        return json.dumps(schemas, indent=2)
    lines = []
    for family, kinds in schemas.items():
        for name, schema in kinds.items():
            lines.append(f"{family} {name}: {schema.get('description', '').splitlines()[0]}")
            lines += [
                f"    {field}: {_field_text(field, schema)}"
                for field in schema["properties"]
                if field != "kind"
            ]
    return "\n".join(lines)


def _field_text(field: str, schema: dict[str, Any]) -> str:
    described = schema["properties"][field]
    options = (
        described.get("enum") or [described["const"]] if "const" in described or "enum" in described else None
    )
    if options is None and "anyOf" in described:
        options = [option.get("type", "object") for option in described["anyOf"]]
    kind = " | ".join(str(option) for option in options) if options else described.get("type", "object")
    if field in schema.get("required", ()):
        return f"{kind} (must be given)"
    return f"{kind} = {json.dumps(described.get('default'))}"
