"""What filled the memory at the largest batch that ran, predicted beside measured.

svg = memory_plot(report)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.inline_svg import INK, inline_svg
from pipeline.plot_marks import COLOURS, LABEL_POINTS, LEGEND_ROW_IN
from pipeline.results import Report, VariantReport
from pipeline.row_axes import mark_height, row_axes, rows_size_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ABOVE_IN = 0.3
HEIGHT = 0.34
HATCH = "////"
KINDS = {"weights": COLOURS[0], "KV cache": COLOURS[2], "activations": COLOURS[4]}


@dataclass(frozen=True)
class MemoryBar:
    """Bytes by kind, in the order of `KINDS`; `sequences` is None where only the weights are known."""

    variant: str
    predicted: bool
    sequences: int | None
    parts: tuple[tuple[str, float], ...]

    @property
    def total_bytes(self) -> float:
        """All parts."""
        return sum(size for _, size in self.parts)

    @property
    def name(self) -> str:
        """Variant, what it is, for how many sequences."""
        held = "" if self.sequences is None else f", {self.sequences} sequence{'s' * (self.sequences != 1)}"
        return f"{self.variant} {'predicted' if self.predicted else 'measured'}{held}"


def memory_bars(report: Report) -> tuple[MemoryBar, ...]:
    """Predicted, then measured, of each variant; a bar that nothing is known of is left out."""
    bars = (bar for variant in report.variants for bar in (_predicted(variant), _measured(variant)))
    return tuple(bar for bar in bars if bar is not None)


def _measured(variant: VariantReport) -> MemoryBar | None:
    split = variant.capacity.memory if variant.capacity else None
    if split:
        parts = zip(KINDS, (split.weight_bytes, split.kv_cache_bytes, split.activation_bytes), strict=True)
        return MemoryBar(variant.name, False, split.sequences, tuple(parts))
    memory = variant.loaded_memory
    if memory is None:
        return None
    return MemoryBar(variant.name, False, None, (("weights", memory.weight_bytes_resident),))


def _predicted(variant: VariantReport) -> MemoryBar | None:
    """For as many sequences as were measured; without a prediction of the peak, weights alone."""
    planned = next((one.predicted for one in variant.planned if one.figure == "weights resident"), None)
    if planned is None:
        return None
    weights = ("weights", 1e6 * planned)
    capacity = variant.capacity
    split, peak = (capacity.memory, capacity.predicted_peak) if capacity else (None, None)
    cache = capacity.kv_bytes_per_sequence_predicted if capacity else None
    if split is None or peak is None or cache is None:
        return MemoryBar(variant.name, True, None, (weights,))
    activations = peak.bytes_at(split.sequences) - split.sequences * cache
    parts = (
        weights,
        ("KV cache", float(split.sequences * cache)),
        ("activations", float(max(0, activations))),
    )
    return MemoryBar(variant.name, True, split.sequences, parts)


def memory_plot(report: Report) -> str | None:
    """None where nothing is known of memory."""
    bars = memory_bars(report)
    if not bars:
        return None
    budget = next((one.capacity.budget_bytes for one in report.variants if one.capacity), None)
    view = _View(bars=bars, budget_bytes=budget)
    return inline_svg(
        "memory",
        size_in=rows_size_in(len(bars), below_in=LEGEND_ROW_IN, above_in=ABOVE_IN),
        title=view.title,
        paint=view.paint,
    )


@dataclass(frozen=True)
class _View:
    bars: tuple[MemoryBar, ...]
    budget_bytes: int | None

    @property
    def title(self) -> str:
        budget = "" if self.budget_bytes is None else f", budget {self.budget_bytes / 1e6:,.1f} MB"
        return f"Memory in MB{budget}: " + "; ".join(f"{bar.name}: {parts_text(bar)}" for bar in self.bars)

    def paint(self, figure: Figure) -> dict[str, str]:
        from matplotlib.patches import Patch

        rows = [(bar.name, f"{bar.total_bytes / 1e6:,.1f} MB") for bar in self.bars]
        axes = row_axes(figure, rows, label="MB (1e6 bytes)", below_in=LEGEND_ROW_IN, above_in=ABOVE_IN)
        longest = max(bar.total_bytes for bar in self.bars) / 1e6
        axes.set_xlim(0, 1.04 * max(longest, (self.budget_bytes or 0) / 1e6))
        tips = {f"bar-{row}": f"{bar.name}: {parts_text(bar)} MB" for row, bar in enumerate(self.bars)}
        for row, bar in enumerate(self.bars):
            self._draw(axes, row, bar)
        self._draw_budget(axes)
        handles = [Patch(facecolor=colour, edgecolor=INK, label=kind) for kind, colour in KINDS.items()]
        handles.append(Patch(facecolor="white", edgecolor=INK, hatch=HATCH, label="predicted"))
        figure.legend(handles=handles, loc="lower center", ncols=4, columnspacing=0.9, handlelength=1.2)
        return tips

    def _draw(self, axes: Axes, row: int, bar: MemoryBar) -> None:
        at = 0.0
        for kind, size in bar.parts:
            (drawn,) = axes.barh(
                mark_height(row),
                size / 1e6,
                left=at,
                height=HEIGHT,
                facecolor="white" if bar.predicted else KINDS[kind],
                edgecolor=KINDS[kind] if bar.predicted else "white",
                hatch=HATCH if bar.predicted else None,
                linewidth=0.8,
            )
            if not at:
                drawn.set_gid(f"bar-{row}")
            at += size / 1e6

    def _draw_budget(self, axes: Axes) -> None:
        if self.budget_bytes is None:
            return
        at = self.budget_bytes / 1e6
        axes.axvline(at, color=INK, linewidth=1.2, linestyle="--", gid="budget")
        axes.annotate(
            f"budget {at:,.1f} MB",
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 4),
            textcoords="offset points",
            ha="right",
            fontsize=LABEL_POINTS,
        )


def parts_text(bar: MemoryBar) -> str:
    """Each part in MB."""
    return ", ".join(f"{kind} {size / 1e6:,.1f}" for kind, size in bar.parts)
