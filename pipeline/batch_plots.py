"""What a plan's batches cost and how long their steps take, against batch size.

svg = cost_plot(plan)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.inline_svg import INK, inline_svg
from pipeline.plan_values import BatchPlan, Plan, VariantPlan
from pipeline.plot_marks import (
    BESIDE_END,
    LEGEND_ROW_IN,
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

WIDTH_IN = 6.0
LABEL_SHARE = 0.24
"""Part of the width that is kept for the labels of lines' ends."""
OUT_OF_REACH = "over a limit"


@dataclass(frozen=True)
class _Curve:
    """A figure of a batch against its size, for every variant of a plan."""

    plan: Plan
    key: str
    figure: str
    unit: str
    label: str
    value: Callable[[BatchPlan], float | None]
    limit: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(variant.name for variant in self.plan.variants)

    @property
    def lines(self) -> tuple[tuple[tuple[BatchPlan, float], ...], ...]:
        """Each variant's batches that have a value."""
        return tuple(
            tuple((batch, value) for batch in variant.batches if (value := self.value(batch)) is not None)
            for variant in self.plan.variants
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        over = (
            out_of_reach(variant, batch)
            for variant, line in zip(self.plan.variants, self.lines, strict=True)
            for batch, _ in line
        )
        return (OUT_OF_REACH,) if any(over) else ()

    def svg(self) -> str | None:
        if not any(self.lines):
            return None
        rows = legend_rows([*self.names, *self.kinds], width_in=WIDTH_IN)
        return inline_svg(
            self.key,
            size_in=(WIDTH_IN, 4.0 + rows * LEGEND_ROW_IN),
            title=f"{self.figure} in {self.unit} against batch size on {self.plan.hardware.name}: "
            + ", ".join(self.names),
            paint=self.paint,
        )

    def paint(self, figure: Figure) -> dict[str, str]:
        axes = axes_over_legend(figure, self.names, kinds=self.kinds)
        self.scale(axes)
        labels = Labels(axes, places=BESIDE_END)
        tips: dict[str, str] = {}
        for index, line in enumerate(self.lines):
            for batch, value in line:
                labels.keep_clear(batch.batch_size, value, radius_points=6)
            tips |= self.draw_line(axes, index, line)
        if self.limit:
            self.draw_limit(axes, self.limit)
            labels.keep_clear(axes.get_xlim()[1], self.limit, radius_points=1, left_points=axes.bbox.width)
        for index, line in enumerate(self.lines):
            self.draw_best(axes, index, line, labels)
        return tips

    def scale(self, axes: Axes) -> None:
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        sizes = sorted({batch.batch_size for line in self.lines for batch, _ in line})
        values = [value for line in self.lines for _, value in line]
        values += [self.limit] if self.limit else []
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(*_with_room_right(sizes[0] / 1.4, 1.1 * sizes[-1]))
        axes.set_ylim(min(values) / 1.6, 1.6 * max(values))
        axes.set_xlabel("batch size, sequences decoded together")
        axes.set_ylabel(f"{self.figure}, {self.unit}")
        powers = [2**power for power in range(sizes[-1].bit_length()) if 2**power >= sizes[0]]
        axes.xaxis.set_major_locator(FixedLocator(powers or sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
        plain_ticks(axes.yaxis, axes.get_ylim(), plain)

    def draw_line(self, axes: Axes, index: int, line: Sequence[tuple[BatchPlan, float]]) -> dict[str, str]:
        variant, colour = self.plan.variants[index], ink_of(index)
        tips: dict[str, str] = {}
        axes.plot(
            [batch.batch_size for batch, _ in line], [value for _, value in line], color=colour, linewidth=1.2
        )
        for batch, value in line:
            gid = f"{self.key}-{index}-{batch.batch_size}"
            hollow = out_of_reach(variant, batch)
            mark(axes, (batch.batch_size, value), variant=index, gid=gid, hollow=hollow)
            tips[gid] = (
                f"{variant.name}, batch {batch.batch_size}: {value:,.4g} {self.unit}"
                f"{f', {OUT_OF_REACH}' if hollow else ''}"
            )
        return tips

    def draw_limit(self, axes: Axes, limit: float) -> None:
        axes.axhline(limit, color=INK, linewidth=1, linestyle="--", gid="limit", zorder=0)
        axes.annotate(
            f"limit {limit:g} {self.unit}",
            (0.01, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
        )

    def draw_best(
        self, axes: Axes, index: int, line: Sequence[tuple[BatchPlan, float]], labels: Labels
    ) -> None:
        """A ring around the best batch, with its size and figure."""
        best = self.plan.variants[index].best_batch
        for batch, value in line:
            if batch.batch_size == best:
                axes.plot(
                    [best],
                    [value],
                    marker="o",
                    markersize=13,
                    markerfacecolor="none",
                    markeredgecolor=ink_of(index),
                    linestyle="none",
                    gid=f"best-{index}",
                )
                labels.place(best, value, f"{self.label.format(value)} at {best}", colour=ink_of(index))


def _with_room_right(low: float, high: float) -> tuple[float, float]:
    """Limits of a logarithmic axis that leave its last part to the labels of lines' ends."""
    return low, high * (high / low) ** (LABEL_SHARE / (1 - LABEL_SHARE))


def out_of_reach(variant: VariantPlan, batch: BatchPlan) -> bool:
    """True for a batch that doesn't fit or breaks the latency limit."""
    return batch.fits is False or (variant.best_batch is not None and batch.batch_size > variant.best_batch)


def shows_cost(plan: Plan) -> bool:
    """True where some batch has a price, so that the cost curve can be drawn."""
    batches = [batch for variant in plan.variants for batch in variant.batches]
    return any(batch.dollars_per_million_output_tokens is not None for batch in batches)


def cost_plot(plan: Plan) -> str | None:
    """Dollars a million output tokens against batch size; output tokens per second where no price is known.

    None where the device's bandwidth isn't known.
    """
    if shows_cost(plan):
        return _Curve(
            plan=plan,
            key="cost",
            figure="output, at least",
            unit="$ per 1M tokens",
            label="${:,.3f}",
            value=lambda batch: batch.dollars_per_million_output_tokens,
        ).svg()
    return _Curve(
        plan=plan,
        key="rate",
        figure="output of all sequences, at most",
        unit="tokens/s",
        label="{:,.0f}",
        value=lambda batch: batch.tokens_per_s,
    ).svg()


def tpot_plot(plan: Plan) -> str | None:
    """Shortest time between a sequence's tokens against batch size, with the limit where there is one."""
    return _Curve(
        plan=plan,
        key="tpot",
        figure="TPOT, at least",
        unit="ms",
        label="{:,.1f}",
        value=lambda batch: 1e3 * batch.step_floor_s,
        limit=None if plan.latency_limit_s is None else 1e3 * plan.latency_limit_s,
    ).svg()
