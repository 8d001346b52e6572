"""What fills a device's memory under each variant, as bars.

svg = memory_bars(plan)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.inline_svg import INK, POINTS_PER_INCH, inline_svg
from pipeline.plan_values import Plan, VariantPlan
from pipeline.plot_marks import CHARACTER_POINTS, COLOURS, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 9.4


FAR = 2.0
"""A device with more than so many times the memory in use isn't drawn to scale."""
LABEL_SHARE = 0.28
"""Room for what is written beside bars, in bars."""
HEADROOM = "#dddddd"
KEPT, LINEAR, SMALL = "weights never quantized", "linear layers' weights", "scales, zero-points, codebooks"
UNPACKED, CACHE = "more once loaded", "KV cache"
KINDS = {
    KEPT: COLOURS[0],
    LINEAR: COLOURS[5],
    SMALL: COLOURS[3],
    UNPACKED: COLOURS[4],
    CACHE: COLOURS[2],
}
"""What lies in memory, from left to right, in its colour."""


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    label: str
    size_bytes: int
    colour: str


def memory_segments(variant: VariantPlan) -> tuple[Segment, ...]:
    """What a variant keeps in memory: its weights by kind, and the cache of as many sequences as fit, or of one.

    Kinds are counted as stored. What a loaded model takes beyond its file is a part of its own; what it takes
    less comes off the scales first, then off the linear layers, which a wider type on disk makes larger.
    """
    parts = variant.weight_parts
    small = parts.scales + parts.zero_points + parts.codebooks + parts.metadata
    more = variant.weight_bytes_resident - variant.weight_bytes_on_disk
    sizes = {SMALL: small, LINEAR: parts.packed, KEPT: parts.unquantized}
    less = max(0, -more)
    for kind, size in sizes.items():
        sizes[kind] = max(0, size - less)
        less -= size - sizes[kind]
    cache = (variant.kv_bytes_at_context or 0) * (variant.max_batch or 1)
    sizes |= {UNPACKED: max(0, more), CACHE: cache}
    return tuple(Segment(kind, sizes[kind], KINDS[kind]) for kind in KINDS if sizes[kind] > 0)


def memory_bars(plan: Plan) -> str:
    """A bar for each variant against the budget and the device's memory."""
    bars = _Bars(plan=plan, bars=tuple(memory_segments(variant) for variant in plan.variants))
    return inline_svg(
        "memory",
        size_in=(WIDTH_IN, 1.5 + 0.42 * len(plan.variants)),
        title=f"Memory of {', '.join(variant.name for variant in plan.variants)} on {plan.hardware.name}: "
        f"{plan.hardware.memory_bytes / 1e9:.1f} GB, {plan.budget_bytes / 1e9:.2f} GB of it usable",
        paint=bars.paint,
    )


@dataclass(frozen=True)
class _Bars:
    plan: Plan
    bars: tuple[tuple[Segment, ...], ...]

    @property
    def budget_gb(self) -> float:
        return self.plan.budget_bytes / 1e9

    @property
    def device_gb(self) -> float:
        return self.plan.hardware.memory_bytes / 1e9

    @property
    def used_gb(self) -> float:
        """What bars and budget reach."""
        longest = max(sum(segment.size_bytes for segment in bar) for bar in self.bars)
        return max(longest / 1e9, self.budget_gb)

    @property
    def shows_device(self) -> bool:
        """False where the budget is so small a part that bars would shrink to lines beside the device."""
        return self.device_gb <= FAR * self.used_gb

    @property
    def reach_gb(self) -> float:
        return max(self.used_gb, self.device_gb) if self.shows_device else self.used_gb

    def gb(self, size_gb: float) -> str:
        digits = 1 if self.used_gb >= 10 else 2 if self.used_gb >= 1 else 3
        return f"{size_gb:,.{digits}f}"

    def paint(self, figure: Figure) -> dict[str, str]:
        height, names = figure.get_figheight(), [short(variant.name) for variant in self.plan.variants]
        left = 0.3 + max(len(name) for name in names) * CHARACTER_POINTS / POINTS_PER_INCH
        box = (left / WIDTH_IN, 0.85 / height, 1 - (left + 0.3) / WIDTH_IN, 1 - 1.15 / height)
        axes = figure.add_axes(box)
        axes.set_xlim(0, (1 + LABEL_SHARE) * self.reach_gb)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("GB (1e9 bytes)")
        tips: dict[str, str] = {}
        for place, (variant, bar) in enumerate(zip(self.plan.variants, self.bars, strict=True)):
            tips |= self.draw_bar(axes, place, bar, variant)
        self.draw_limits(axes)
        self.draw_legend(figure)
        return tips

    def draw_bar(
        self, axes: Axes, place: int, bar: Sequence[Segment], variant: VariantPlan
    ) -> dict[str, str]:
        tips, at = {}, 0.0
        points_per_gb = axes.bbox.width / axes.get_xlim()[1]
        for number, segment in enumerate(bar):
            size, gid = segment.size_bytes / 1e9, f"bar-{place}-{number}"
            (drawn,) = axes.barh(
                place, size, left=at, height=0.62, color=segment.colour, edgecolor="white", linewidth=0.6
            )
            drawn.set_gid(gid)
            tips[gid] = f"{variant.name}: {segment.label} {size:,.3f} GB"
            text = self.gb(size)
            if size * points_per_gb > CHARACTER_POINTS * len(text) + 4:
                axes.text(
                    at + size / 2,
                    place,
                    text,
                    ha="center",
                    va="center_baseline",
                    color="white" if segment.label == KEPT else INK,
                    bbox={"facecolor": segment.colour, "edgecolor": "none", "pad": 1.5},
                )
            at += size
        self.draw_end(axes, place, variant, total_gb=at)
        return tips

    def draw_end(self, axes: Axes, place: int, variant: VariantPlan, *, total_gb: float) -> None:
        """Beside the bar: what it holds and leaves, or by how much it is too long."""
        too_long = variant.fits is False
        if too_long:
            text = f"{self.gb(total_gb - self.budget_gb)} GB too many"
        elif variant.max_batch is None:
            text = "cache unknown"
        else:
            text = f"{variant.max_batch} × KV, {self.gb(self.budget_gb - total_gb)} GB left"
        axes.annotate(
            text,
            (max(total_gb, self.device_gb if self.shows_device else self.budget_gb), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center_baseline",
            color="#B03A00" if too_long else INK,
            fontweight="bold" if too_long else "normal",
        )

    def draw_limits(self, axes: Axes) -> None:
        """Budget and memory as lines, the headroom between them shaded; their names above, apart."""
        end = axes.get_xlim()[1]
        if self.device_gb > self.budget_gb:
            until = self.device_gb if self.shows_device else end
            axes.axvspan(self.budget_gb, until, color=HEADROOM, linewidth=0, zorder=0, gid="headroom")
        axes.axvline(self.budget_gb, color=INK, linewidth=1.2, linestyle="--", gid="budget")
        budget, device = f"budget {self.gb(self.budget_gb)} GB", f"device {self.device_gb:,.1f} GB"
        if self.shows_device:
            axes.axvline(self.device_gb, color=INK, linewidth=1.6, gid="device")
        if not self.shows_device:
            names = [(end, f"{budget} (dashed), {device} beyond this axis", "right")]
        elif self.budget_gb / end * axes.bbox.width < CHARACTER_POINTS * len(budget):
            names = [(self.device_gb, f"{budget}, {device}", "left")]
        else:
            names = [(self.budget_gb, budget, "right"), (self.device_gb, device, "left")]
        for x, text, side in names:
            axes.annotate(
                text,
                (x, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3 if side == "left" else -3, 4),
                textcoords="offset points",
                ha=side,
            )

    def draw_legend(self, figure: Figure) -> None:
        from matplotlib.patches import Patch

        visible = 1e9 * self.reach_gb / 1000
        seen = {segment.label for bar in self.bars for segment in bar if segment.size_bytes > visible}
        colours = {kind: colour for kind, colour in KINDS.items() if kind in seen} | {"headroom": HEADROOM}
        handles = [Patch(facecolor=colour, label=label) for label, colour in colours.items()]
        figure.legend(
            handles=handles, loc="lower center", ncols=len(handles), columnspacing=1.2, handlelength=1.2
        )
