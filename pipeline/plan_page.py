"""A plan as one HTML file: what decides in a table, the roofline, memory, cost, and what it all assumes.

The file fetches nothing and runs nothing; the same plan gives the same bytes.

    path.write_text(plan_page(plan), encoding="utf-8")
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.batch_plots import cost_plot, shows_cost, tpot_plot
from pipeline.html_page import html_page
from pipeline.memory_plot import memory_bars
from pipeline.plan_tables import (
    batch_table,
    best_rate,
    decision_table,
    fleet_table,
    measured_table,
    memory_table,
    quality_table,
    shown,
    speed_table,
    what_if_table,
)
from pipeline.plan_values import Plan
from pipeline.roof import mean_depth_tokens
from pipeline.roofline_plot import compute_peaks, rate, roof_points, roofline_plot, three_digits

if TYPE_CHECKING:
    from markupsafe import Markup


MANY_NAMES = 4
"""More than so many are counted in a sentence, not named."""


def plan_page(plan: Plan) -> str:
    """The whole page. Every text of the plan is escaped, in tables, captions and plots."""
    return html_page("plan.html.j2", **_content(plan))


def _content(plan: Plan) -> dict[str, Any]:
    curves = (_cost(plan), _tpot(plan))
    return {
        "plan": plan,
        "title": f"{plan.model} on {plan.hardware.name}",
        "headline": headline(plan),
        "summary": decision_table(plan),
        "facts": _facts(plan),
        "memory": _memory(plan),
        "memory_table": memory_table(plan),
        "roofline": _roofline(plan),
        "no_roofline": _no_roofline(plan),
        "speed_table": speed_table(plan),
        "curves_heading": "Cost and speed by batch size" if shows_cost(plan) else "Speed by batch size",
        "curves": [one for one in curves if one],
        "batch_table": batch_table(plan),
        "fleet_table": fleet_table(plan),
        "quality_table": quality_table(plan),
        "what_if_table": what_if_table(plan),
        "measured_table": measured_table(plan),
        "assumptions": _assumptions(plan),
        "sources": _sources(plan),
    }


# --- sentences ---------------------------------------------------------------------------------------------


def headline(plan: Plan) -> tuple[str, ...]:
    """What the tables come to, in a sentence each: fit, the fastest, the cheapest."""
    lines = (_fit(plan), _fastest(plan), _cheapest(plan))
    return tuple(line for line in lines if line)


def _fit(plan: Plan) -> str:
    where = f"on {plan.hardware.name} with one sequence of {plan.context_tokens:,} tokens"
    parts = []
    for answer, one, many in ((True, "fits", "fit"), (False, "doesn't fit", "don't fit")):
        names = [variant.name for variant in plan.variants if variant.fits is answer]
        if names:
            parts.append(f"{_listed(names, plan)} {one if len(names) == 1 else many} {where}".rstrip())
            where = ""
    if not parts:
        return "Whether a variant fits can't be told: the shape of the KV cache isn't known."
    return f"{'; '.join(parts)}."


def _listed(names: list[str], plan: Plan) -> str:
    if len(names) > MANY_NAMES:
        return f"{len(names)} of {len(plan.variants)} variants"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _fastest(plan: Plan) -> str:
    fitting = [one for one in plan.variants if one.fits is not False and one.decode_ceiling_tokens_per_s]
    if not fitting:
        return ""
    best = max(fitting, key=lambda one: one.decode_ceiling_tokens_per_s or 0)
    first = plan.variants[0]
    beside = ""
    if best is not first and first.decode_ceiling_tokens_per_s:
        beside = f", {first.name} {shown(first.decode_ceiling_tokens_per_s, ',.1f')}"
    return (
        f"One request alone: {best.name} decodes at most "
        f"{shown(best.decode_ceiling_tokens_per_s, ',.1f')} tokens/s{beside}."
    )


def _cheapest(plan: Plan) -> str:
    priced = [one for one in plan.variants if one.dollars_per_million_output_tokens is not None]
    if not priced:
        return ""
    best = min(priced, key=lambda one: one.dollars_per_million_output_tokens or 0)
    limit = "" if plan.latency_limit_s is None else f" within {1e3 * plan.latency_limit_s:g} ms a token"
    all_rate = best_rate(best)
    in_all = "" if all_rate is None else f", {shown(all_rate, ',.0f')} tokens/s in all"
    return (
        f"Cheapest at the limit: {best.name} at batch {shown(best.best_batch, ',d')}{limit}, "
        f"${shown(best.dollars_per_million_output_tokens, ',.3f')} per million output tokens{in_all}."
    )


def _facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    hardware, peaks = plan.hardware, compute_peaks(plan)
    workload: str = plan.workload_class or "?"
    if plan.prefill_share is not None:
        workload += f", prefill {100 * plan.prefill_share:.0f} % of the time at batch {plan.planned_batch}"
    price = None if hardware.dollars_per_hour is None else f"${hardware.dollars_per_hour:,.2f} an hour"
    return (
        ("device", hardware.name),
        ("device memory", f"{shown(hardware.memory_bytes, ',.1f', unit=1e9)} GB"),
        ("budget", f"{shown(plan.budget_bytes, ',.2f', unit=1e9)} GB"),
        ("memory bandwidth", f"{shown(hardware.bandwidth_bytes_per_s, ',.0f', unit=1e9)} GB/s"),
        ("arithmetic", _each(f"{rate(peak.flops_per_s)} ({', '.join(peak.types)})" for peak in peaks)),
        ("operations to bytes", _each(f"{three_digits(peak.ops_per_byte)} FLOP/byte" for peak in peaks)),
        ("price", price or "?"),
        ("parameters", f"{shown(plan.parameters['total'], ',.2f', unit=1e9)} billion"),
        ("read for each token", f"{shown(plan.parameters['read_per_token'], ',.2f', unit=1e9)} billion"),
        ("context", f"{plan.context_tokens:,} tokens"),
        ("request", f"{plan.prompt_tokens:,} tokens in, {plan.new_tokens:,} out"),
        ("workload", workload),
    )


def _each(facts: Iterable[str]) -> str:
    return ", ".join(facts) or "?"


def _assumptions(plan: Plan) -> tuple[str, ...]:
    depth = mean_depth_tokens(plan.prompt_tokens, plan.new_tokens)
    return (
        "≥ is a floor, the shortest time, and ≤ a ceiling, the highest rate, that the device's bandwidth and "
        "arithmetic allow. Launching kernels, dequantizing, sampling and scheduling come on top: no engine "
        "reaches these figures, none may pass them.",
        "A decode step reads the weights that its tokens use once, whatever the batch, and the KV cache of "
        f"every sequence at the mean depth of {depth:,} tokens: the prompt and half the answer.",
        "Weight-only quantization multiplies in 16 bits, so that the arithmetic's limit is the 16-bit one and "
        "prefill gains only where reading limits it (short prompts, mixtures of experts); LLM.int8 multiplies in "
        "INT8. On a CPU the fastest type's limit is taken.",
        "Embedding, head and norms stay unquantized. The embedding's table takes memory but isn't read "
        "unless it is the head, too.",
        "The budget is 0.9 of the device's memory unless the recipe names one; the rest is headroom for "
        "activations, the allocator and the runtime.",
        f"Max batch reserves the whole context of {plan.context_tokens:,} tokens for each sequence; paged "
        "counts blocks that a sequence of mean length fills.",
        "A price is that of a device kept busy: at the best batch for output tokens, with prefill alone for "
        "input tokens. The best batch is the largest that fits and keeps the latency limit, where there is one.",
        "Nothing here says how well a quantized model answers: quality has to be measured.",
    )


def _sources(plan: Plan) -> tuple[str, ...]:
    hardware = plan.hardware
    lines = [f"{hardware.name}: {hardware.source}"]
    if hardware.dollars_per_hour is not None:
        lines.append(
            f"price, ${hardware.dollars_per_hour:,.2f} an hour: {hardware.price_source or 'no source named'}"
        )
    return tuple(lines)


# --- plots -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plot:
    heading: str
    svg: Markup
    caption: str


def _plot(heading: str, svg: str | None, *caption: str) -> _Plot | None:
    """The only text that isn't escaped is an `<svg>` whose texts an XML writer has escaped."""
    from markupsafe import Markup

    return None if svg is None else _Plot(heading, Markup(svg), " ".join(filter(None, caption)))


def _roofline(plan: Plan) -> _Plot | None:
    flat = ", on the flat part by arithmetic" if compute_peaks(plan) else ""
    return _plot(
        "roofline",
        roofline_plot(plan),
        f"A point is one decode step at the batch size beside it. On the slope it is limited by memory{flat}: "
        "on the slope a larger batch does more work for the same read, and fewer bits need less of it.",
        "Bars across the roof are prefills."
        if any(one.batch_size is None for one in roof_points(plan))
        else "",
        "Hollow points don't fit in the budget." if _any_too_large(plan) else "",
        "Crosses are what was measured." if any(one.measured for one in plan.variants) else "",
        "The figures stand in the tables below.",
    )


def _any_too_large(plan: Plan) -> bool:
    return any(batch.fits is False for variant in plan.variants for batch in variant.batches)


def _no_roofline(plan: Plan) -> str:
    return (
        f"The memory bandwidth of {plan.hardware.name} isn't known, so there are no speeds and no roofline: name a "
        "device of the data sheet, or give the bandwidth in a device file; "
        "the doctor command measures the device at hand."
    )


def _memory(plan: Plan) -> _Plot | None:
    return _plot(
        "memory",
        memory_bars(plan),
        "Weights, then the KV cache of as many whole contexts as the budget holds (of one, where none fits). "
        "The grey band is the headroom that the budget leaves of the device.",
        _too_large(plan),
    )


def _too_large(plan: Plan) -> str:
    """The devices that each variant takes which sticks out; of many the table tells."""
    names = [
        f"{one.name} takes {shown(one.devices_to_hold, ',d')}" for one in plan.variants if one.fits is False
    ]
    if not names or len(names) > MANY_NAMES:
        return ""
    return f"Counting devices by memory alone, {_listed(names, plan)}."


def _cost(plan: Plan) -> _Plot | None:
    best = "A ring marks the best batch: the largest that fits" + (
        "." if plan.latency_limit_s is None else " and keeps the latency limit."
    )
    if shows_cost(plan):
        text = "What a million output tokens cost at least, on a device kept busy: down and to the right is cheaper."
        return _plot("cost", cost_plot(plan), text, best)
    why = (
        "no price is known"
        if plan.hardware.dollars_per_hour is None
        else "nothing fits that could have a price"
    )
    text = f"Output tokens per second of all sequences together, at most; {why}, so no cost is shown."
    return _plot("rate", cost_plot(plan), text, best)


def _tpot(plan: Plan) -> _Plot | None:
    return _plot(
        "TPOT",
        tpot_plot(plan),
        "The time between two tokens that each reader sees, at least. It stays flat while weights dominate the "
        "read, and rises once the KV cache or the arithmetic does.",
        "The dashed line is the latency limit." if plan.latency_limit_s is not None else "",
    )
