"""A plan as text for a terminal: the tables of its page, and what pays.

print(plan_table(plan))
"""

from __future__ import annotations

from pipeline.parameter_parts import ParameterParts
from pipeline.plan_tables import (
    Table,
    decision_table,
    fleet_table,
    measured_table,
    memory_table,
    quality_table,
    speed_table,
    what_if_table,
)
from pipeline.plan_values import Plan
from pipeline.text_table import text_table


def plan_table(plan: Plan) -> str:
    """Each table under its title, from what decides to what was measured; then advice and notes."""
    tables = (
        decision_table(plan),
        memory_table(plan),
        speed_table(plan),
        fleet_table(plan),
        quality_table(plan),
        measured_table(plan),
        what_if_table(plan),
    )
    advice = [f"{one.step}, {one.gain:.2f} × output tokens per second: {one.text}" for one in plan.advice]
    parts = [
        _head(plan),
        *(_table(one) for one in tables if one),
        _listed("What pays, in this order", advice),
        _listed("Notes", list(plan.notes)),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(table: Table) -> str:
    """Units stand under the labels, so that columns stay narrow."""
    labels = [column.label for column in table.columns]
    units = [column.unit for column in table.columns]
    texts = [column.label for column in table.columns if column.text]
    rows = [[cell for _, cell in row] for row in table.rows]
    under = [units] if any(units) else []
    return f"{table.title}:\n{text_table(labels, [*under, *rows], text_columns=texts)}"


def _listed(title: str, items: list[str]) -> str:
    return "\n".join([f"{title}:", *(f"  - {item}" for item in items)]) if items else ""


def _head(plan: Plan) -> str:
    hardware = plan.hardware
    speed = f", {hardware.bandwidth_bytes_per_s / 1e9:.0f} GB/s" if hardware.bandwidth_bytes_per_s else ""
    price = f", ${hardware.dollars_per_hour:g} an hour" if hardware.dollars_per_hour else ""
    kind = f"; {plan.workload_class}" if plan.workload_class else ""
    if plan.prefill_share is not None:
        kind += f" (prefill takes {100 * plan.prefill_share:.0f} % of the time at batch {plan.planned_batch})"
    return "\n".join(
        (
            f"{plan.model} on {hardware.name}: {hardware.memory_bytes / 1e9:.1f} GB memory{speed}{price} "
            f"({hardware.source})",
            f"{plan.parameters['total']:,} parameters: {_parameters(plan.parameters)}",
            f"budget {plan.budget_bytes / 1e9:.2f} GB; context {plan.context_tokens} tokens; "
            f"prompt {plan.prompt_tokens}, answer {plan.new_tokens}{kind}",
        )
    )


def _parameters(parts: dict[str, int]) -> str:
    """Parts of at least half a per mille."""
    shares = [
        f"{name} {100 * parts[name] / parts['total']:.1f} %"
        for name in ParameterParts.model_fields
        if parts[name] >= 0.0005 * parts["total"]
    ]
    tied = "" if parts["head"] else " (head tied)"
    return ", ".join(shares) + tied
