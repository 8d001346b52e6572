"""Rules of a recipe's gate that its other sections can't feed, looked for in its raw data.

    for path, message in gate_faults(data):
        print(path, message)

Parts of the wrong shape are left to the schema. Whether a rule's tasks are the recipe's can't be told here: one of
them may be a group's, which only the task files know (`preflight`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.plugins import plugin_classes
from pipeline.schema_faults import shown
from pipeline.yaml_document import KeyPath

Found = Iterator[tuple[KeyPath, str]]

MEASURED_AT = {
    "batch_size": ("speed", "batch_sizes", [1]),
    "concurrency": ("serving", "concurrency", [1, 4, 8]),
}
"""A rule's field → section, its list of what is measured, and that list where the recipe doesn't give one."""


def gate_faults(data: dict[str, Any]) -> Found:
    """What a rule needs and the recipe doesn't measure: path in the file and one sentence each."""
    rules = {rule.model_fields["kind"].default: rule for rule in plugin_classes("pipeline.rules")}
    listed = data.get("gate")
    for index, rule in enumerate(listed if isinstance(listed, list) else ()):
        kind = rules.get(str(rule.get("kind"))) if isinstance(rule, dict) else None
        if kind is None:
            continue  # the schema says so
        for section in sorted(kind.needs):
            if data.get(section) is None:
                missing = f"{rule['kind']} needs the section {section!r}, which the recipe doesn't have"
                yield ("gate", index), missing
        for field in MEASURED_AT.keys() & kind.model_fields.keys():
            wanted = rule.get(field, kind.model_fields[field].default)
            yield from _unmeasured(data, index, field, wanted)


def _unmeasured(data: dict[str, Any], index: int, field: str, wanted: Any) -> Found:
    section, name, default = MEASURED_AT[field]
    block = data.get(section)
    sizes = block.get(name, default) if isinstance(block, dict) else None
    if isinstance(sizes, list) and wanted is not None and wanted not in sizes:
        what = field.replace("_", " ")
        yield ("gate", index), f"{what} {shown(wanted)} is not measured; {section}.{name}: {shown(sizes)}"
