"""A report as one HTML file: verdict and reasons first, then the triple of each variant, plots, every figure.

The file fetches nothing and runs nothing. A plot that can't be drawn leaves its reason in its place.

    write_atomically(folder / "report.html", report_page(report))
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from pipeline.html_page import html_page
from pipeline.interval_plots import margin_plots
from pipeline.kl_plot import kl_plot
from pipeline.latency_plots import LatencyPlot, figures_text, latency_plots
from pipeline.measured_memory_plot import memory_bars, memory_plot
from pipeline.pick_tables import pick_markdown
from pipeline.plan_tables import Table
from pipeline.report import comparison_rows, figure_sections, marks_explained, variant_notes
from pipeline.report_answers import answers
from pipeline.report_blocks import blocks, rows_table
from pipeline.report_cards import limit_of, variant_cards
from pipeline.report_findings import VERDICT_MARKS
from pipeline.results import Report
from pipeline.sweep_plot import sweep_plot
from pipeline.trade_plot import TradePoint, trade_points, trade_svg

if TYPE_CHECKING:
    from markupsafe import Markup

_LATENCY_NOTE = "A line joins the three of one load; the axis is logarithmic, to the left is better."


@dataclass(frozen=True)
class Plot:
    """A drawn figure, or why there is none, with what to read off it and its numbers as a table."""

    heading: str
    caption: str
    svg: Markup | None = None
    refused: str = ""
    table: Table | None = None


def report_page(report: Report) -> str:
    """The whole page. Every text of the report is escaped, in tables, captions and plots."""
    return html_page("report.html.j2", **_content(report))


def _content(report: Report) -> dict[str, Any]:
    header, rows = comparison_rows(report)
    return {
        "report": report,
        "title": f"{report.verdict}: {_model_name(report)}",
        "model": _model_name(report),
        "measured_on": _measured_on(report),
        "beside": report.baseline_run.text if report.baseline_run else "",
        "mark": VERDICT_MARKS[report.verdict],
        "marks": VERDICT_MARKS,
        "answers": answers(report),
        "summary": rows_table("Every variant beside the baseline", header, rows, text_columns=("verdict",)),
        "key": " ".join((_key(header, rows), *(f"{line}." for line in marks_explained(report)))),
        "cards": variant_cards(report),
        "groups": [(heading, plots) for heading, plots in _plots(report).items() if plots],
        "findings": _findings(report),
        "sections": {name: blocks(text, title=name) for name, text in _sections(report).items()},
        "notes": [(one.name, notes) for one in report.variants if (notes := variant_notes(one))],
        "facts": tuple(_facts(report)),
        "provenance": json.dumps(report.provenance, indent=2, ensure_ascii=False),
    }


def _model_name(report: Report) -> str:
    """A folder's own name: where it lies is told among the facts."""
    name = report.model_id or report.recipe
    return PurePosixPath(name).name or name if name.startswith((".", "/", "~")) else name


def _measured_on(report: Report) -> str:
    """Device and day, as far as they are known."""
    device = report.provenance.get("device")
    name = device.get("name") if isinstance(device, dict) else None
    return " on ".join((*([str(name)] if name else []), report.started_at[:10]))


_KEY = {
    "weights MB": "weights MB: bytes of the weights in memory, 1e6 each",
    "mem ×": "mem ×: those beside the baseline's",
    "bits/w": "bits/w: bits stored for a weight, scales, embedding and head among them",
    "TTFT ms": "TTFT: time to the first token",
    "tok/s b": "tok/s b…: tokens decoded a second at that batch size, all sequences together",
    "speed × b": "speed ×: that beside the baseline's",
    "max seqs": "max seqs: sequences that memory held at once",
}
_MARKS = {
    "~": "~: noisy",
    "+": "+: the search's ceiling, perhaps more",
    "±": "±: standard error",
    "–": "–: not measured",
}


def _key(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """What the table's short heads and marks mean, of those that are in it."""
    heads = [text for start, text in _KEY.items() if any(head.startswith(start) for head in header)]
    cells = [cell for row in rows for cell in row[1:]]
    marks = [text for mark, text in _MARKS.items() if any(mark in cell for cell in cells)]
    return f"{'; '.join((*heads, *marks))}."


def _sections(report: Report) -> dict[str, str]:
    picked = pick_markdown(report).removeprefix("## Pick\n\n")
    return {"Pick": picked, **figure_sections(report)} if picked else figure_sections(report)


def _findings(report: Report) -> Table:
    found = [(variant.name, limit_of(one)) for variant in report.variants for one in variant.findings]
    return rows_table(
        "Every finding: what was observed, its interval, its limit",
        ("variant", "rule", "outcome", "observed", "interval", "limit"),
        [
            (name, one.rule, f"{one.mark} {one.word}", one.observed, one.interval, one.limit)
            for name, one in found
        ],
        text_columns=("rule", "outcome"),
    )


# --- plots -------------------------------------------------------------------------------------------------


def _plots(report: Report) -> Mapping[str, list[Plot]]:
    """Plots by heading; what there is nothing to draw of is left out."""
    return {
        "Speed against quality and memory": list(_trade(report)),
        "Latency": [_latency(one) for one in latency_plots(report)],
        "Quality against its limits": list(_quality(report)),
        "Memory, predicted and measured": list(_memory(report)),
    }


def _trade(report: Report) -> Iterator[Plot]:
    for place, points in enumerate(trade_points(report)):
        unit = points[0].change.unit
        yield from _drawn(
            f"speed against {unit}",
            f"Speed against {unit}, the baseline at 0. Up and right is better, a smaller disc needs less memory, "
            "hollow discs don't ship; upright lines are 95 % intervals, two-sided and so wider than the gate's bounds.",
            partial(trade_svg, report, points, key=f"trade-{place}"),
            table=_trade_table(points),
        )
    yield from _drawn(
        "batches",
        "Solid: measured. Dotted: the most that the measured memory bandwidth allows for the bytes a step reads, "
        "and measured FLOP/s where these are known to allow less"
        f"{_break_even(report)}{_capacity(report)}. The figures stand in the tables of speed and capacity below.",
        lambda: sweep_plot(report),
    )


def _trade_table(points: tuple[TradePoint, ...]) -> Table:
    rows = []
    for one in points:
        low, high = one.change.low, one.change.high
        interval = "–" if low is None or high is None else f"{low:+,.3g} … {high:+,.3g}"
        megabytes = f"{one.resident_bytes / 1e6:,.1f}"
        rows.append((one.name, f"{one.tokens_per_s:,.1f}", f"{one.change.value:+,.3g}", interval, megabytes))
    unit = points[0].change.unit
    return rows_table(f"Speed, {unit}, memory", ("variant", "tok/s", unit, "95 % interval", "MB"), rows)


def _break_even(report: Report) -> str:
    known = any(one.speed and one.speed.measured_break_even_batch for one in report.variants)
    return ". ▲ below: how many single streams the best batch is worth (break-even)" if known else ""


def _capacity(report: Report) -> str:
    known = any(one.capacity and one.capacity.measured_sequences for one in report.variants)
    return ". ▼ above: how many sequences memory held, where the axis reaches so far" if known else ""


def _latency(one: LatencyPlot) -> Plot:
    numbers = rows_table(
        f"{one.heading}, ms",
        ("variant", "load", " / ".join(one.figures)),
        [(wait.variant, wait.load, figures_text(wait)) for wait in one.waits],
        text_columns=("load",),
    )
    return next(_drawn(one.heading, f"{one.heading}. {_LATENCY_NOTE}", one.svg, table=numbers))


def _quality(report: Report) -> Iterator[Plot]:
    for one in margin_plots(report):
        caption = (
            f"{one.heading}. Lines reach from bound to bound, each one-sided at the rule's confidence; the limit's "
            "forbidden side is shaded; ● kept, ✕ broken, ◇ undecided. The figures are among the findings below."
        )
        yield from _drawn(one.heading, caption, one.svg)
    yield from _drawn(
        "KL divergence",
        "How far the next-token distribution moves from the baseline's, token by token of the held text; to the left "
        "is better. Filled marks are means, hollow ones 99th percentiles; the first bin holds all smaller ones.",
        lambda: kl_plot(report),
    )


def _memory(report: Report) -> Iterator[Plot]:
    kinds = ("weights", "KV cache", "activations")
    rows = []
    for bar in memory_bars(report):
        sizes = dict(bar.parts)
        parts = (f"{sizes[kind] / 1e6:,.1f}" if kind in sizes else "–" for kind in kinds)
        kind_of = "predicted" if bar.predicted else "measured"
        held = "–" if bar.sequences is None else str(bar.sequences)
        rows.append((bar.variant, kind_of, held, *parts, f"{bar.total_bytes / 1e6:,.1f}"))
    yield from _drawn(
        "memory",
        "At the largest batch that ran, weights alone where no batch was held. Hatched bars were predicted from shapes "
        "before anything ran.",
        lambda: memory_plot(report),
        table=rows_table(
            "Memory, MB (1e6 bytes)",
            ("variant", "", "sequences", *kinds, "together"),
            rows,
            text_columns=("",),
        ),
    )


def _drawn(
    heading: str, caption: str, draw: Callable[[], str | None], *, table: Table | None = None
) -> Iterator[Plot]:
    """The plot; nothing where there is nothing to draw. The only text that isn't escaped is an `<svg>` whose texts an
    XML writer has escaped."""
    from markupsafe import Markup

    try:
        svg = draw()
    except Exception as error:  # noqa: BLE001  a plot is no reason to lose the verdict's page
        yield Plot(heading, caption, refused=f"{type(error).__name__}: {error}", table=table)
        return
    if svg is not None:
        yield Plot(heading, caption, svg=Markup(svg), table=table)


# --- provenance --------------------------------------------------------------------------------------------


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    git = report.provenance.get("git")
    yield "model", report.model_id or "unknown"
    yield "recipe", report.recipe
    yield "to repeat", f"python -m pipeline run {shlex.quote(report.recipe)}"
    yield "recipe digest", report.recipe_digest[:16]
    yield "started", report.started_at.replace("T", " ").replace("+00:00", " UTC")
    yield "took", f"{report.seconds:,.0f} s"
    yield "baseline", report.baseline
    device = report.provenance.get("device")
    if isinstance(device, dict) and device.get("name"):
        yield "machine", str(device["name"])
    if isinstance(git, dict):
        yield "code", f"{str(git.get('commit'))[:12]}{', with changes' if git.get('dirty') else ''}"
    if report.device:
        yield "measured read bandwidth", f"{report.device.read_bandwidth_bytes_per_s / 1e9:,.1f} GB/s"
        for name, flops in report.device.matmul_flops_per_s.items():
            yield f"measured {name}", f"{flops / 1e9:,.0f} GFLOP/s"
    packages = report.provenance.get("packages")
    for name, version in packages.items() if isinstance(packages, dict) else ():
        if version is not None:
            yield str(name), str(version)
