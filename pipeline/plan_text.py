"""A plan as text for a terminal.

print(plan_table(plan))
"""

from __future__ import annotations

from pipeline.plan_values import FleetPlan, Plan, VariantPlan
from pipeline.reconciliation import HEADER, TEXT_COLUMNS, table_rows
from pipeline.text_table import text_table


def plan_table(plan: Plan) -> str:
    """Fit, limits, fleet, what was measured, advice and notes, each under its title."""
    parts = [
        _head(plan),
        _section("Fit", _fit(plan)),
        _section("Limits of one request, and the price of many", _limits(plan)),
        _section(_fleet_title(plan), _fleet(plan)),
        _section(f"Planned and measured ({plan.measured_run})", _measured(plan)),
        _listed("What if", [_what_if(plan, index) for index in range(len(plan.what_ifs))]),
        _listed(
            "Advice, in this order",
            [f"{one.step}, {one.gain:.2f} × output tokens per second: {one.text}" for one in plan.advice],
        ),
        _listed("Notes", list(plan.notes)),
    ]
    return "\n\n".join(part for part in parts if part)


def _section(title: str, table: str) -> str:
    return f"{title}:\n{table}" if table else ""


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
    names = ("embedding", "head", "attention", "mlp", "experts", "norms", "vision", "other")
    shares = [
        f"{name} {100 * parts[name] / parts['total']:.1f} %"
        for name in names
        if parts[name] >= 0.0005 * parts["total"]
    ]
    tied = "" if parts["head"] else " (head tied)"
    return ", ".join(shares) + tied


def _fit(plan: Plan) -> str:
    header = (
        *("variant", "stored by", "weights GB", "bits/weight", "KV budget GB", "× baseline"),
        *("KV MB/seq", "fits", "max batch", "paged", "with FP8 KV", "devices to hold one"),
    )
    rows = [
        (
            variant.name,
            variant.quantizer,
            f"{variant.weight_bytes_resident / 1e9:.2f}",
            f"{variant.bits_per_weight:.2f}",
            f"{variant.kv_budget_bytes / 1e9:.2f}",
            _shown(variant.kv_budget_gain, ".2f"),
            _shown(variant.kv_bytes_at_context, ".1f", unit=1e6),
            {True: "yes", False: "no", None: "?"}[variant.fits],
            _shown(variant.max_batch, "d"),
            _shown(variant.capacity.paged if variant.capacity else None, "d"),
            _shown(variant.max_batch_fp8_kv, "d"),
            _shown(variant.devices_to_hold, "d"),
        )
        for variant in plan.variants
    ]
    return text_table(header, rows)


def _limits(plan: Plan) -> str:
    header = (
        *("variant", "TTFT ≥ ms", "TPOT ≥ ms", "decode ≤ tok/s", "answer ≥ s", "GB/answer"),
        *("break-even batch", "batching ends at", "best batch", "$/1M in", "$/1M out"),
    )
    rows = [
        (
            variant.name,
            _shown(variant.ttft_floor_s, ".1f", unit=1e-3),
            _shown(variant.tpot_floor_s, ".2f", unit=1e-3),
            _shown(variant.decode_ceiling_tokens_per_s, ".1f"),
            _shown(variant.answer_floor_s, ".2f"),
            _shown(variant.bytes_per_answer, ".0f", unit=1e9),
            _shown(variant.break_even_batch, ".0f"),
            _ending(variant),
            _shown(variant.best_batch, "d"),
            _shown(variant.dollars_per_million_input_tokens, ".3f"),
            _shown(variant.dollars_per_million_output_tokens, ".3f"),
        )
        for variant in plan.variants
    ]
    return text_table(header, rows)


def _ending(variant: VariantPlan) -> str:
    if variant.limited_by == "compute":
        return f"{variant.compute_bound_batch} (arithmetic)"
    if variant.limited_by == "capacity":
        return f"{variant.max_batch} (memory)"
    return "?"


def _fleet_title(plan: Plan) -> str:
    fleets = [variant.fleet for variant in plan.variants if variant.fleet]
    measured = " (measured step times)" if any(fleet.step_times == "measured" for fleet in fleets) else ""
    return f"Fleet for {plan.traffic}{measured}"


def _fleet(plan: Plan) -> str:
    if plan.target_percentile is None:
        return ""
    at = f"p{plan.target_percentile:g} ms"
    header = (
        *("variant", "devices", "load %", "mean batch", "TTFT p50 ms", at, "TPOT p50 ms", at),
        *("tok/s each", "$/month", "why not"),
    )
    rows = [(variant.name, *_fleet_cells(variant.fleet)) for variant in plan.variants if variant.fleet]
    return text_table(header, rows, text_columns=("why not",))


def _fleet_cells(fleet: FleetPlan) -> tuple[str, ...]:
    size = fleet.size
    if size.devices is None:
        return ("none", *("–" for _ in range(8)), size.reason)
    waits = [
        _shown(wait_s, ".1f", unit=1e-3)
        for wait_s in (
            size.ttft_s.p50 if size.ttft_s else None,
            size.target_ttft_s,
            size.tpot_s.p50 if size.tpot_s else None,
            size.target_tpot_s,
        )
    ]
    return (
        str(size.devices),
        _shown(size.load, ".0f", unit=0.01),
        _shown(size.mean_batch, ".1f"),
        *waits,
        _shown(size.output_tokens_per_s, ".0f"),
        _shown(fleet.dollars_per_month, ",.0f"),
        "",
    )


def _measured(plan: Plan) -> str:
    rows = table_rows((variant.name, variant.measured) for variant in plan.variants)
    return text_table(HEADER, rows, text_columns=TEXT_COLUMNS) if rows else ""


def _what_if(plan: Plan, index: int) -> str:
    what = plan.what_ifs[index]
    return (
        f"{what.change}: {plan.variants[0].name} decodes {what.decode_gain:.2f} ×, "
        f"prefills {what.prefill_gain:.2f} ×, answers {what.answer_gain:.2f} × as fast"
    )


def _shown(value: float | None, form: str, *, unit: float = 1) -> str:
    if value is None:
        return "?"
    return format(int(value) if form == "d" else value / unit, form)
