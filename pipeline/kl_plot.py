"""How far single tokens move from the baseline's distribution: a histogram over their KL divergences.

svg = kl_plot(report)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.distribution_results import BaselineDistance
from pipeline.inline_svg import inline_svg
from pipeline.plot_marks import LEGEND_ROW_IN, axes_over_legend, ink_of, legend_rows, mark
from pipeline.report_findings import candidates
from pipeline.results import Report
from pipeline.row_axes import WIDTH_IN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOWEST_NATS = 1e-6
"""Smaller ones, zero among them, share the first bin: they were rounded to six digits."""
BINS_EACH_POWER = 4


@dataclass(frozen=True)
class KlHistogram:
    """Shares of a variant's tokens in bins of equal width on a logarithmic axis."""

    name: str
    place: int
    distance: BaselineDistance
    shares: tuple[float, ...]


def bin_edges(highest_nats: float) -> tuple[float, ...]:
    """From `LOWEST_NATS` to the first edge beyond `highest_nats`, in nats."""
    powers = math.log10(max(highest_nats, 10 * LOWEST_NATS) / LOWEST_NATS)
    count = math.floor(powers * BINS_EACH_POWER) + 1
    return tuple(LOWEST_NATS * 10 ** (place / BINS_EACH_POWER) for place in range(count + 1))


def token_shares(kl_nats: Sequence[float], edges: Sequence[float]) -> tuple[float, ...]:
    """Share of the values in each bin; those below the first edge are in the first bin."""
    counts = [0] * (len(edges) - 1)
    for value in kl_nats:
        counts[min(max(bisect_right(edges, value) - 1, 0), len(counts) - 1)] += 1
    return tuple(count / len(kl_nats) for count in counts)


def kl_histograms(report: Report) -> tuple[tuple[float, ...], tuple[KlHistogram, ...]]:
    """Edges in nats and the candidates whose tokens were compared."""
    places = {variant.name: place for place, variant in enumerate(report.variants)}
    found: list[tuple[str, BaselineDistance, list[float]]] = []
    for variant in candidates(report):
        held = variant.quality.distribution if variant.quality else None
        values = [value for window in held.windows for value in window.kl_nats] if held else []
        if held and held.distance and values:
            found.append((variant.name, held.distance, values))
    if not found:
        return (), ()
    edges = bin_edges(max(max(values) for _, _, values in found))
    return edges, tuple(
        KlHistogram(name, places[name], distance, token_shares(values, edges))
        for name, distance, values in found
    )


def kl_plot(report: Report) -> str | None:
    """None where no token was compared."""
    edges, found = kl_histograms(report)
    if not found:
        return None
    view = _View(edges=edges, found=found)
    rows = legend_rows(view.names, width_in=WIDTH_IN)
    return inline_svg(
        "kl", size_in=(WIDTH_IN, 3.1 + rows * LEGEND_ROW_IN), title=view.title, paint=view.paint
    )


@dataclass(frozen=True)
class _View:
    edges: tuple[float, ...]
    found: tuple[KlHistogram, ...]

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.found]

    @property
    def title(self) -> str:
        told = (
            f"{one.name} mean {one.distance.kl_mean_nats:.3g}, median {one.distance.kl_median_nats:.3g}, p99 "
            f"{one.distance.kl_p99_nats:.3g}, max {one.distance.kl_max_nats:.3g}"
            for one in self.found
        )
        return f"Histogram of tokens by KL divergence from the baseline in nats: {'; '.join(told)}"

    def paint(self, figure: Figure) -> dict[str, str]:
        axes = axes_over_legend(figure, self.names, places=[one.place for one in self.found])
        axes.set_xscale("log")
        axes.set_xlim(self.edges[0], self.edges[-1])
        axes.set_ylim(0, 112 * max(max(one.shares) for one in self.found))
        axes.set_xlabel("KL divergence at a token, nats")
        axes.set_ylabel("tokens, %")
        self._ticks(axes)
        tips: dict[str, str] = {}
        for one in self.found:
            tips |= self._draw(axes, one)
        return tips

    def _ticks(self, axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        axes.xaxis.set_major_locator(LogLocator(base=100, numticks=8))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6f}".rstrip("0").rstrip(".")))
        axes.xaxis.set_minor_locator(NullLocator())

    def _draw(self, axes: Axes, one: KlHistogram) -> dict[str, str]:
        """The outline, and the variant's marker where its mean and its p99 are."""
        percents = [100 * share for share in one.shares]
        axes.stairs(percents, self.edges, color=ink_of(one.place), linewidth=1.4)
        tips = {}
        for name, nats in (("mean", one.distance.kl_mean_nats), ("p99", one.distance.kl_p99_nats)):
            if self.edges[0] <= nats <= self.edges[-1]:
                gid = f"kl-{name}-{one.place}"
                place = min(bisect_right(self.edges, nats) - 1, len(percents) - 1)
                mark(axes, (nats, percents[place]), variant=one.place, gid=gid, hollow=name == "p99")
                tips[gid] = f"{one.name}: {name} {nats:.3g} nats"
        return tips
