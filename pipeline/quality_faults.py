"""Contradictions in a recipe's quality section, looked for in its raw data.

    for path, message in evaluation_faults(data):
        print(path, message)

Parts of the wrong shape are left to the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.plugins import plugin_classes
from pipeline.yaml_document import KeyPath


def evaluation_faults(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """What can't be evaluated as the section asks: path in the file and one sentence each."""
    quality = data.get("quality")
    if not isinstance(quality, dict):
        return
    size, null = quality.get("batch_size", 8), quality.get("null_batch_size")
    if type(null) is int and null == size:
        yield (
            ("quality", "null_batch_size"),
            f"{null} is quality.batch_size, so nothing could differ; name another batch size, "
            f"such as {1 if size != 1 else 8}",
        )
    if quality.get("sequential") is True and not _some_rule_stops(data.get("gate")):
        yield (
            ("quality", "sequential"),
            f"no rule of the gate can end a task early; add one of {', '.join(_stopping_kinds())}, "
            "or leave it out to answer every document",
        )
    yield from _distribution_faults(quality.get("distribution"), data.get("gate"))


def _distribution_faults(block: Any, gate: Any) -> Iterator[tuple[KeyPath, str]]:
    """A text that fills no two windows, and rules about a text that there is none of."""
    if isinstance(block, dict):
        context, most = block.get("context_tokens", 512), block.get("max_tokens", 8192)
        if type(context) is int and type(most) is int and most < 2 * context:
            yield (
                ("quality", "distribution", "max_tokens" if "max_tokens" in block else "context_tokens"),
                f"max_tokens: {most} hold fewer than two windows of {context} tokens, which an interval needs",
            )
    needing = {
        rule.model_fields["kind"].default
        for rule in plugin_classes("pipeline.rules")
        if "distribution" in rule.quality_blocks
    }
    for index, rule in enumerate(_listed(gate)):
        if block is None and isinstance(rule, dict) and str(rule.get("kind")) in needing:
            yield (
                ("gate", index),
                f"{rule['kind']} needs the block quality.distribution, which the recipe doesn't have",
            )


def _stopping_kinds() -> list[str]:
    rules = plugin_classes("pipeline.rules")
    return sorted(rule.model_fields["kind"].default for rule in rules if rule.stops_early)


def _some_rule_stops(gate: Any) -> bool:
    kinds = _stopping_kinds()
    return any(isinstance(rule, dict) and rule.get("kind") in kinds for rule in _listed(gate))


def _listed(items: Any) -> list[Any]:
    return items if isinstance(items, list) else []
