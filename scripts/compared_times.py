"""What scripts share that time one quantity in two ways, in alternation: ratios with quartiles, a table, two files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.measured import Distribution
from pipeline.text_table import markdown_table
from pipeline.values import Value


class Compared(Value):
    """One figure of one variant and shape by both ways; `ratio` is ours ÷ the other, repeat by repeat."""

    variant: str
    batch_size: int
    test: str
    figure: str
    ours: Distribution
    other: Distribution
    ratio: Distribution
    limit: float

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[float, float]],
        *,
        variant: str,
        batch_size: int,
        test: str,
        figure: str,
        limit: float,
    ) -> Compared:
        """From (ours, other) of each repeat."""
        return cls(
            variant=variant,
            batch_size=batch_size,
            test=test,
            figure=figure,
            ours=Distribution.of([ours for ours, _ in pairs]),
            other=Distribution.of([other for _, other in pairs]),
            ratio=Distribution.of([ours / other for ours, other in pairs]),
            limit=limit,
        )

    @property
    def holds(self) -> bool:
        """Whether the median ratio is within the limit."""
        return abs(self.ratio.median - 1) <= self.limit


def missed(figures: Sequence[Compared]) -> tuple[Compared, ...]:
    """The figures beyond their limit."""
    return tuple(one for one in figures if not one.holds)


def verdict(figures: Sequence[Compared]) -> str:
    """Whether all hold, in words."""
    beyond = len(missed(figures))
    return f"{beyond} of {len(figures)} are beyond it" if beyond else "all hold"


def ratio_table(figures: Sequence[Compared], *, unit: str, other: str, scale: float = 1.0) -> str:
    """One line a figure, values times `scale` in `unit`."""
    header = (
        "variant",
        "batch",
        "test",
        "figure",
        f"ours {unit}",
        f"{other} {unit}",
        "ratio",
        "quartiles",
        "repeats",
    )
    rows = [
        (
            one.variant,
            str(one.batch_size),
            one.test,
            one.figure,
            f"{scale * one.ours.median:.1f}",
            f"{scale * one.other.median:.1f}",
            f"{one.ratio.median:.3f}" + ("" if one.holds else " (missed)"),
            f"{one.ratio.lower_quartile:.3f} … {one.ratio.upper_quartile:.3f}",
            str(len(one.ratio.samples)),
        )
        for one in figures
    ]
    return markdown_table(header, rows, text_columns=("test", "figure"))


def write_comparison(folder: Path, name: str, found: Value, *, page: str) -> None:
    """`NAME.json` with everything, `NAME.md` with the page, and the page on standard output."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(found.to_json() + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page + "\n", encoding="utf-8")
    print(page)


def say(text: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(f"{text}\n")
