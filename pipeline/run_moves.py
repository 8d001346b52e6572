"""Which figures of two runs are apart by more than their noise, and how that is known. Pure.

Repeated figures are apart when their quartiles don't meet and the 95 % interval of their ratio doesn't hold 1: of three
repeats without any difference the quartiles alone are apart in a third of all cases. Answers to the same documents are
when the 95 % interval of their paired difference doesn't hold 0; what is counted when it differs at all. A figure
without a known spread is told to differ, and no more. Figures of time and memory compare on one machine only.

    moves = run_moves(before, after)
    [move.name for move in moves if move.outcome == "moved"]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from pipeline.comparison import UnmeasuredError, comparable_quality, comparable_task, metric_pairs
from pipeline.figures import Figure, Section, variant_figures
from pipeline.paired_drop import paired_drop
from pipeline.quality_change import nats_per_token_change
from pipeline.results import Report, VariantReport
from pipeline.scores import TOKEN_PERPLEXITY
from pipeline.values import Value

MoveOutcome = Literal["moved", "within noise", "noise unknown", "not comparable", "appeared", "vanished"]

OF_THE_MACHINE = frozenset({"speed", "serving", "capacity", "cost"})
_TOLD_BY_ANOTHER = (
    *("tpot_s", "prefill_tokens_per_s", "duration_s"),
    *("word_perplexity", "byte_perplexity", "bits_per_byte"),
)
"""Endings of metrics that say what another one says: decode rate, TTFT, output rate, token perplexity."""


class Move(Value):
    """One figure of one variant in two runs. `because` says how the outcome is known."""

    variant: str
    section: Section
    metric: str
    unit: str
    before: float | None
    after: float | None
    outcome: MoveOutcome
    because: str

    @property
    def name(self) -> str:
        """VARIANT SECTION.METRIC."""
        return f"{self.variant} {self.section}.{self.metric}"

    @property
    def change_percent(self) -> float | None:
        """Of the first figure; None where there is none to divide by."""
        if self.before is None or self.after is None or self.before <= 0:
            return None
        return 100 * (self.after / self.before - 1)


def run_moves(before: Report, after: Report) -> tuple[Move, ...]:
    """Every figure that differs, of the variants that both runs have; equal figures are left out."""
    machines = [one.provenance.get("device_fingerprint") for one in (before, after)]
    one_machine = machines[0] is not None and machines[0] == machines[1]
    return tuple(
        move
        for variant in after.variants
        if (old := before.variant(variant.name)) is not None
        for move in _variant_moves(old, variant, one_machine=one_machine)
    )


def _variant_moves(old: VariantReport, new: VariantReport, *, one_machine: bool) -> Iterator[Move]:
    first, second = ({one.name: one for one in variant_figures(each)} for each in (old, new))
    for name in dict.fromkeys((*first, *second)):
        if name.endswith(_TOLD_BY_ANOTHER) and "distribution" not in name:
            continue
        before, after = first.get(name), second.get(name)
        shown = after or before
        assert shown is not None
        values = [one.value if one else None for one in (before, after)]
        if values[0] == values[1]:
            continue
        outcome, because = _judged(before, after, old=old, new=new, one_machine=one_machine)
        yield Move(
            variant=new.name,
            section=shown.section,
            metric=shown.metric,
            unit=shown.unit,
            before=values[0],
            after=values[1],
            outcome=outcome,
            because=because,
        )


def _judged(
    before: Figure | None, after: Figure | None, *, old: VariantReport, new: VariantReport, one_machine: bool
) -> tuple[MoveOutcome, str]:
    if before is None or before.value is None:
        return "appeared", f"before: {before.outcome if before else 'not measured'}"
    if after is None or after.value is None:
        return "vanished", f"now: {after.outcome if after else 'not measured'}"
    counted = before.spread == after.spread == "counted"
    if before.section in OF_THE_MACHINE and not one_machine:
        return "not comparable", "measured on another machine"
    if counted:
        return "moved", "counted, not sampled"
    if before.section == "memory" and not one_machine:
        return "not comparable", "measured on another machine"
    paired = _paired(before, old=old, new=new)
    return paired if paired is not None else _apart(before, after)


def _apart(before: Figure, after: Figure) -> tuple[MoveOutcome, str]:
    """By the two intervals, where both figures have one of a kind."""
    ends = (before.low, before.high, after.low, after.high)
    if before.spread != after.spread or None in ends:
        return "noise unknown", "measured once, so that its spread isn't known"
    low, high, new_low, new_high = (end for end in ends if end is not None)
    apart = high < new_low or new_high < low
    text = f"{low:.4g} … {high:.4g} and {new_low:.4g} … {new_high:.4g}"
    if before.spread == "quartiles":
        return _repeated(before, after, apart=apart, text=text)
    kind = "95 % intervals, of unpaired figures,"
    return ("moved", f"{kind} apart: {text}") if apart else ("within noise", f"{kind} meet: {text}")


def _repeated(before: Figure, after: Figure, *, apart: bool, text: str) -> tuple[MoveOutcome, str]:
    if not apart:
        return "within noise", f"quartiles meet: {text}"
    if min(*before.samples, *after.samples) <= 0:
        return "noise unknown", f"quartiles apart: {text}, but a repeat of 0 or less has no ratio"
    low, high = ratio_interval(before.samples, after.samples)
    ratio = f"ratio {low:.3f} … {high:.3f} (95 %)"
    if low <= 1 <= high:
        return "within noise", f"{ratio} holds 1: too few repeats to tell"
    return "moved", f"quartiles apart: {text}; {ratio}"


def ratio_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Two-sided 95 % interval of after ÷ before, from at least two repeats of each, all above 0.

    Welch's interval (Biometrika 34, 1947) of the logarithms, so that it is one of the ratio of geometric means.
    """
    from scipy.special import stdtrit

    logs = [[math.log(sample) for sample in samples] for samples in (before, after)]
    shares = [statistics.variance(one) / len(one) for one in logs]
    difference = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    squares = sum(share**2 / (len(one) - 1) for share, one in zip(shares, logs, strict=True))
    if squares == 0:
        return math.exp(difference), math.exp(difference)
    reach = float(stdtrit(sum(shares) ** 2 / squares, 0.975)) * math.sqrt(sum(shares))
    return math.exp(difference - reach), math.exp(difference + reach)


def _paired(figure: Figure, *, old: VariantReport, new: VariantReport) -> tuple[MoveOutcome, str] | None:
    """By the same documents, where the figure is a task's and has documents to pair; None for any other figure."""
    task, _, metric = figure.metric.rpartition(".")
    known = [one.quality.tasks.get(task) if one.quality else None for one in (old, new)]
    if figure.section != "quality" or None in known:
        return None
    try:
        before, after = comparable_quality(old, new)
        if metric == TOKEN_PERPLEXITY:
            change = nats_per_token_change(task, before, after)
            return _interval(change.low, change.high, "% less perplexity")
        _, _, pairs = comparable_task(task, before, after)
        values = metric_pairs(task, metric, pairs)
    except UnmeasuredError as reason:
        return "not comparable", str(reason)
    if not all(0 <= value <= 1 for pair in values for value in pair):
        return None
    drop = paired_drop(metric, values, confidence=0.975)
    low = None if drop.upper is None else -100 * drop.upper
    high = None if drop.lower is None else -100 * drop.lower
    return _interval(low, high, f"points on the same {drop.documents} documents")


def _interval(low: float | None, high: float | None, unit: str) -> tuple[MoveOutcome, str]:
    """A paired difference's two-sided 95 % interval against 0."""
    if low is None or high is None:
        return "noise unknown", "too few documents for an interval"
    text = f"paired difference {low:+.3g} … {high:+.3g} {unit}"
    return ("moved", f"{text}: without 0") if low > 0 or high < 0 else ("within noise", f"{text}: holds 0")
