"""A plan's points under the roofline: FLOP/s against arithmetic intensity.

svg = roofline_plot(plan)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.inline_svg import FAINT, INK, inline_svg
from pipeline.plan_values import BatchPlan, Plan, VariantPlan
from pipeline.plot_marks import (
    BESIDE_SLOPE,
    CROSS,
    LEGEND_ROW_IN,
    STROKE,
    Labels,
    axes_over_legend,
    ink_of,
    legend_rows,
    mark,
    plain,
    plain_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 9.4
FEW_VARIANTS = 4
"""So many have room for the size of every batch; of more the smallest and the best are named."""


@dataclass(frozen=True)
class Peak:
    """A dense peak that variants compute at, and the types that have it."""

    types: tuple[str, ...]
    flops_per_s: float
    ops_per_byte: float


def compute_peaks(plan: Plan) -> tuple[Peak, ...]:
    """The device's peaks that the plan's variants compute at, the lowest first; none where none is known."""
    bandwidth = plan.hardware.bandwidth_bytes_per_s
    types: dict[float, list[str]] = {}
    for variant in plan.variants:
        flops = variant.arithmetic_flops_per_s
        if flops and variant.arithmetic_type not in types.setdefault(flops, []):
            types[flops].append(variant.arithmetic_type or "")
    if not bandwidth:
        return ()
    return tuple(
        Peak(types=tuple(names), flops_per_s=flops, ops_per_byte=flops / bandwidth)
        for flops, names in sorted(types.items())
    )


@dataclass(frozen=True)
class RoofPoint:
    """One decode step (or, without a batch, the prefill) at the roof of its variant."""

    variant: int
    batch_size: int | None
    intensity_flops_per_byte: float
    flops_per_s: float
    fits: bool | None
    measured_ratio: float | None = None


def roof_points(plan: Plan) -> tuple[RoofPoint, ...]:
    """Every variant's batches and its prefill, on the roof; FLOP/s are intensity × bytes a second."""
    bandwidth = plan.hardware.bandwidth_bytes_per_s
    if not bandwidth:
        return ()
    points = []
    for index, variant in enumerate(plan.variants):
        peak = variant.arithmetic_flops_per_s
        points += [
            RoofPoint(
                variant=index,
                batch_size=batch.batch_size,
                intensity_flops_per_byte=batch.intensity_flops_per_byte,
                flops_per_s=_roof(batch.intensity_flops_per_byte, bandwidth, peak),
                fits=batch.fits,
                measured_ratio=_measured_ratio(variant, batch),
            )
            for batch in variant.batches
        ]
        intensity = variant.prefill_intensity_flops_per_byte
        if peak and intensity:
            points.append(RoofPoint(index, None, intensity, _roof(intensity, bandwidth, peak), variant.fits))
    return tuple(points)


def _roof(intensity: float, bandwidth: float, peak_flops_per_s: float | None) -> float:
    slope = intensity * bandwidth
    return min(slope, peak_flops_per_s) if peak_flops_per_s else slope


def _measured_ratio(variant: VariantPlan, batch: BatchPlan) -> float | None:
    return next((one.ratio for one in variant.measured if one.batch_size == batch.batch_size), None)


def roofline_plot(plan: Plan) -> str | None:
    """FLOP/s against arithmetic intensity; None where the device's bandwidth isn't known."""
    points = roof_points(plan)
    bandwidth = plan.hardware.bandwidth_bytes_per_s
    if not points or not bandwidth:
        return None
    view = _View(plan=plan, points=points, bandwidth=bandwidth, peaks=compute_peaks(plan))
    rows = legend_rows([*view.names, *view.kinds], width_in=WIDTH_IN)
    return inline_svg(
        "roofline",
        size_in=(WIDTH_IN, 4.9 + rows * LEGEND_ROW_IN),
        title=view.title,
        paint=view.paint,
    )


@dataclass(frozen=True)
class _View:
    plan: Plan
    points: tuple[RoofPoint, ...]
    bandwidth: float
    peaks: tuple[Peak, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(variant.name for variant in self.plan.variants)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is drawn beside steps that fit."""
        seen = {
            "doesn't fit": any(point.fits is False for point in self.points),
            "prefill": any(point.batch_size is None for point in self.points),
            "measured": any(point.measured_ratio for point in self.points),
        }
        return tuple(kind for kind, is_seen in seen.items() if is_seen)

    @property
    def title(self) -> str:
        roofs = [
            f"roof {rate(peak.flops_per_s)}, ridge {three_digits(peak.ops_per_byte)} FLOP/byte"
            for peak in self.peaks
        ]
        return (
            f"Roofline of {self.plan.hardware.name}: {', '.join([f'slope {self.bandwidth / 1e9:.0f} GB/s', *roofs])}; "
            f"decode steps of {', '.join(self.names)}"
        )

    @property
    def highest(self) -> Peak | None:
        return self.peaks[-1] if self.peaks else None

    def roof(self, intensity: float) -> float:
        """The highest roof."""
        return _roof(intensity, self.bandwidth, self.highest.flops_per_s if self.highest else None)

    def paint(self, figure: Figure) -> dict[str, str]:
        axes = axes_over_legend(figure, self.names, kinds=self.kinds)
        axes.set_xscale("log")
        axes.set_yscale("log")
        at = [point.intensity_flops_per_byte for point in self.points]
        low, high = min(at) / 2, 1.6 * max(*at, 4 * self.highest.ops_per_byte if self.highest else 0)
        lowest = min(point.flops_per_s * min(1, point.measured_ratio or 1) for point in self.points)
        axes.set_xlim(low, high)
        axes.set_ylim(lowest / 2.5, 2.6 * self.roof(high))
        axes.set_xlabel("arithmetic intensity, FLOP for each byte read")
        unit, unit_name = rate_unit(self.roof(high))
        axes.set_ylabel(unit_name)
        plain_ticks(axes.xaxis, axes.get_xlim(), plain)
        plain_ticks(axes.yaxis, axes.get_ylim(), lambda value: plain(value / unit))
        self.draw_roof(axes)
        return self.draw_points(axes)

    def draw_roof(self, axes: Axes) -> None:
        low, high = axes.get_xlim()
        bend = min(max(self.highest.ops_per_byte, low), high) if self.highest else high
        xs = [low, bend, high]
        axes.plot(xs, [self.roof(x) for x in xs], color=INK, linewidth=1.4, gid="roof", zorder=1)
        axes.annotate(
            f"memory: {self.bandwidth / 1e9:,.0f} GB/s",
            (low * 1.2, low * 1.2 * self.bandwidth),
            xytext=(-6, 6),
            textcoords="offset points",
            rotation=45,
            rotation_mode="anchor",
            transform_rotates_text=True,
        )
        for peak in self.peaks[:-1]:
            flat = [peak.ops_per_byte, high]
            axes.plot(flat, [peak.flops_per_s] * 2, color=INK, linewidth=1.0, linestyle="--", zorder=1)
        for place, peak in enumerate(self.peaks):
            self.draw_ridge(axes, peak, place=place)

    def draw_ridge(self, axes: Axes, peak: Peak, *, place: int) -> None:
        axes.annotate(
            f"arithmetic ({', '.join(peak.types)}): {rate(peak.flops_per_s)}",
            (axes.get_xlim()[1], peak.flops_per_s),
            xytext=(-4, 11),
            textcoords="offset points",
            ha="right",
        )
        axes.axvline(
            peak.ops_per_byte,
            color=FAINT,
            linewidth=0.9,
            linestyle=":",
            gid=f"ridge-{place}" if place else "ridge",
            zorder=0,
        )
        at_left = (
            axes.transAxes.inverted().transform(axes.transData.transform((peak.ops_per_byte, 1)))[0] > 0.6
        )
        axes.annotate(
            f"ridge: {three_digits(peak.ops_per_byte)} FLOP/byte",
            (peak.ops_per_byte, axes.get_ylim()[0]),
            xytext=(-4 if at_left else 4, 5 + 14 * place),  # ridges of two types lie near each other
            textcoords="offset points",
            ha="right" if at_left else "left",
            color="#595959",
        )

    def draw_points(self, axes: Axes) -> dict[str, str]:
        labels = Labels(axes, places=BESIDE_SLOPE)
        for peak in self.peaks:
            labels.keep_clear(axes.get_xlim()[1], 1.2 * peak.flops_per_s, radius_points=12, left_points=230)
        last = 2 if len(self.names) <= FEW_VARIANTS else 1
        tips: dict[str, str] = {}
        for point in self.points:
            for ratio in {1.0, point.measured_ratio or 1.0}:
                labels.keep_clear(point.intensity_flops_per_byte, ratio * point.flops_per_s)
            tips |= self.draw_point(axes, point)
        for point in sorted(self.points, key=self.label_rank):
            if point.batch_size is not None and self.label_rank(point) <= last:
                labels.place(
                    point.intensity_flops_per_byte,
                    point.flops_per_s,
                    str(point.batch_size),
                    colour=ink_of(point.variant),
                )
        return tips

    def label_rank(self, point: RoofPoint) -> int:
        """First the batches that matter: the best, then one request alone."""
        best = self.plan.variants[point.variant].best_batch
        return 0 if point.batch_size == best else 1 if point.batch_size == 1 else 2

    def draw_point(self, axes: Axes, point: RoofPoint) -> dict[str, str]:
        x, y, size = point.intensity_flops_per_byte, point.flops_per_s, point.batch_size
        what = f"{self.names[point.variant]}, {'prefill' if size is None else f'batch {size}'}"
        gid = f"prefill-{point.variant}" if size is None else f"decode-{point.variant}-{size}"
        hollow = point.fits is False
        marker = STROKE if size is None else ""
        mark(axes, (x, y), variant=point.variant, gid=gid, marker=marker, hollow=hollow)
        tips = {gid: f"{what}: {x:,.4g} FLOP/byte, {rate(y)}{', does not fit' if hollow else ''}"}
        if point.measured_ratio:
            gid = f"measured-{point.variant}-{size}"
            mark(axes, (x, y * point.measured_ratio), variant=point.variant, gid=gid, marker=CROSS)
            tips[gid] = f"{what}: measured {point.measured_ratio:.2f} × the roof"
        return tips


def rate_unit(flops_per_s: float) -> tuple[float, str]:
    """The unit that rates up to `flops_per_s` are shown in, and its name."""
    return (1e12, "TFLOP/s") if flops_per_s >= 1e12 else (1e9, "GFLOP/s")


def rate(flops_per_s: float) -> str:
    """A rate with its unit."""
    unit, name = rate_unit(flops_per_s)
    return f"{flops_per_s / unit:,.4g} {name}"


def three_digits(value: float) -> str:
    """A figure with at least three digits and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
