"""Generated answers may be so many percent longer or shorter than the baseline's.

>>> MaxLengthDrift(percent=10.0).confidence
0.95
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, comparable_quality, comparable_task
from pipeline.early_stopping import Margin
from pipeline.results import Finding, QualityResult, TaskResult, VariantResults
from pipeline.rules.base import LEAST_LIMIT, SureRule, would_decide
from pipeline.sample_sizes import documents_for_distance
from pipeline.statistics import BootstrapDifference, Decision, paired_bootstrap

EMPTY = 1e-9
"""Tokens that an empty answer counts as where a total is divided by: a resampled total must not be 0."""


class MaxLengthDrift(SureRule):
    """Tokens of the candidate's answers ÷ the baseline's on the same documents, as a change in percent, either way.

    A variant that talks 10 % longer costs 10 % more, at the same price of a token; one that falls silent isn't the
    same model. Bounds are those of the bootstrap over documents on Σ difference ÷ Σ baseline's tokens, each one-sided
    at `confidence`: both inside ± `percent` pass (two one-sided tests, Schuirmann, Journal of Pharmacokinetics and
    Biopharmaceutics 15, 1987), one wholly outside fails. An answer that the length limit ended would have been longer:
    by more than `percent` more of them in one arm leave open whatever longer answers of that arm could change.
    """

    kind: Literal["max_length_drift"] = "max_length_drift"
    percent: float = Field(ge=LEAST_LIMIT, lt=100)
    tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    """None: every task that generates text."""

    needs = frozenset({"quality"})
    output_types = frozenset({"generate_until"})
    two_sided = True
    unit: ClassVar[str] = "percent"
    sides = ("within", "beyond")

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding for each task."""
        try:
            before, after = comparable_quality(baseline, candidate)
        except UnmeasuredError as reason:
            return (self.finding("missing", str(reason), unit=self.unit),)
        names = self._tasks(before, after)
        if not names:
            nothing = "no task generates text, so there are no lengths to judge"
            return (self.finding("missing", nothing, unit=self.unit),)
        findings = {task: self._judge_task(task, before, after) for task in names}
        return self.held_together(findings, lambda rule, task: rule._judge_task(task, before, after))

    def early_margins(self, task: str, baseline: QualityResult) -> tuple[Margin, ...] | None:
        """Lengths need all documents: looks are planned for drops."""
        return None if task in self._tasks(baseline, baseline) else ()

    def _tasks(self, *arms: QualityResult) -> tuple[str, ...]:
        """The named tasks, groups opened; else every one of which some arm generated text."""
        if self.tasks is not None:
            groups = {name: tasks for quality in arms for name, tasks in quality.groups.items()}
            return tuple(dict.fromkeys(task for name in self.tasks for task in groups.get(name, (name,))))
        return tuple(
            dict.fromkeys(
                name
                for quality in arms
                for name, task in quality.tasks.items()
                if task.output_tokens is not None
            )
        )

    def _judge_task(self, task: str, before: QualityResult, after: QualityResult) -> Finding:
        try:
            first, second, pairs = comparable_task(task, before, after)
            known = _lengths(task, first, "baseline"), _lengths(task, second, "candidate")
            _refuse_nothing_to_see(task, first, second)
        except UnmeasuredError as reason:
            return self.finding("missing", str(reason), unit=self.unit, subject=task, limit=self.percent)
        lengths = tuple([known[arm][pair[arm].doc_hash] for pair in pairs] for arm in (0, 1))
        weights = [max(length, EMPTY) for length in lengths[0]]
        found = paired_bootstrap(*lengths, weights=weights, confidence=self.confidence)
        return self._finding(task, found, lengths, cut=_more_cut(first, second))

    def _finding(
        self, task: str, found: BootstrapDifference, lengths: tuple[list[float], ...], *, cut: float
    ) -> Finding:
        assert found.difference is not None
        change = 100 * found.difference
        interval = (100 * found.interval.lower, 100 * found.interval.upper) if found.interval else None
        outcome = self._outcome(interval, cut)
        means = [sum(arm) / len(arm) for arm in lengths]
        return self.finding(
            outcome,
            f"{means[0]:.4g} → {means[1]:.4g} tokens an answer on {found.documents} documents, {change:+.2f} %; "
            f"{self._bounds(interval, outcome, found, cut)}",
            unit=self.unit,
            subject=task,
            observed=change,
            limit=self.percent,
            interval=interval,
        )

    def _outcome(self, interval: tuple[float, float] | None, cut: float) -> Decision:
        if interval is None:
            return "inconclusive"
        if interval[0] > self.percent:
            return "fail" if cut >= -self.percent else "inconclusive"
        if interval[1] < -self.percent:
            return "fail" if cut <= self.percent else "inconclusive"
        inside = -self.percent <= interval[0] and interval[1] <= self.percent
        return "pass" if inside and abs(cut) <= self.percent else "inconclusive"

    def _bounds(
        self, interval: tuple[float, float] | None, outcome: Decision, found: BootstrapDifference, cut: float
    ) -> str:
        if interval is None:
            return f"{found.documents} document gives no interval, undecided"
        needed = self._needed(found)
        if abs(cut) > self.percent:
            arms = ("candidate", "baseline") if cut > 0 else ("baseline", "candidate")
            needed = (
                f"the length limit cut {abs(cut):.3g} % more of the {arms[0]}'s answers than of the {arms[1]}'s, and "
                "how long they would have become isn't known; raise the task's max_gen_toks"
            )
        told = self.told(outcome, f"±{self.percent:g} %", needed=needed)
        return (
            f"it lies in {interval[0]:+.2f} … {interval[1]:+.2f} ({100 * self.confidence:g} % bounds), {told}"
        )

    def _needed(self, found: BootstrapDifference) -> str:
        assert found.difference is not None
        if not found.standard_error:
            return "more documents would decide"
        count = documents_for_distance(
            self.percent / 100 - abs(found.difference),
            variance=found.documents * found.standard_error**2,
            confidence=self.confidence,
        )
        return would_decide(count, answered=found.documents)


def _lengths(task: str, result: TaskResult, arm: str) -> dict[str, float]:
    """Tokens of each document's answer, which are kept in the order of the samples."""
    if result.output_tokens is None:
        raise UnmeasuredError(f"{task}: the {arm} generated no text, so its answers have no length")
    if result.look_confidence is not None:
        raise UnmeasuredError(f"{task}: stopped early by looks at its drop; lengths need all documents")
    lengths = result.output_tokens.samples
    known = {sample.doc_hash: length for sample, length in zip(result.samples, lengths, strict=False)}
    if len(known) != len(result.samples) or len(lengths) != len(result.samples):
        raise UnmeasuredError(
            f"{task}: the {arm} has {len(lengths)} lengths for {len(result.samples)} documents"
        )
    if min(lengths) < 0:
        raise UnmeasuredError(f"{task}: implausible, an answer of {min(lengths):g} tokens ({arm})")
    return known


def _refuse_nothing_to_see(task: str, before: TaskResult, after: TaskResult) -> None:
    if all(result.truncated_outputs == result.documents for result in (before, after)):
        raise UnmeasuredError(
            f"{task}: void, the length limit ended every answer of both, so no drift could show; raise the task's "
            "max_gen_toks"
        )
    if before.output_tokens is not None and not any(before.output_tokens.samples):
        raise UnmeasuredError(f"{task}: void, every answer of the baseline is empty")


def _more_cut(before: TaskResult, after: TaskResult) -> float:
    """Answers that the length limit ended, the candidate's minus the baseline's, in percent of the documents."""
    return 100 * ((after.truncated_outputs or 0) - (before.truncated_outputs or 0)) / max(1, after.documents)
