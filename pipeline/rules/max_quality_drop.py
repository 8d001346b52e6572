"""No task may lose more than a number of points, or a share of its score, judged on the same documents.

>>> MaxQualityDrop(points=2.0).confidence
0.95
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.comparison import (
    UnmeasuredError,
    comparable_quality,
    comparable_task,
    distinct_samples,
    metric_pairs,
    refuse_chance_level,
    refuse_guessing,
)
from pipeline.early_stopping import Margin
from pipeline.null_run import above_noise
from pipeline.paired_drop import (
    PairedDrop,
    documents_needed,
    p_values,
    paired_drop,
    power,
    surely_above,
    surely_under,
)
from pipeline.results import Finding, QualityResult, TaskResult, VariantResults
from pipeline.rules.base import LEAST_LIMIT, SCORED_OUTPUT_TYPES, SureRule, exactly_one, would_decide
from pipeline.score_checks import direction
from pipeline.sequential import planned_look
from pipeline.statistics import Decision, group_score, holm, holm_claims

IMPLAUSIBLE_GAIN = 0.2
"""A candidate this much better than the 16-bit baseline, beyond chance, was not measured rightly."""


@dataclass(frozen=True)
class _Answers:
    """One task's answers of both arms, a pair a document, more being better; all of the baseline's, and chance."""

    metric: str
    pairs: tuple[tuple[float, float], ...]
    baseline: tuple[float, ...]
    chance: float | None
    confidence: float


@dataclass(frozen=True)
class _Judged:
    """A task or a pooled group, as it is judged; `members` are the answers of each of its tasks.

    `margin` is the largest drop allowed, as a share of documents.
    """

    drop: PairedDrop
    members: tuple[_Answers, ...]
    margin: float

    @property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        return tuple(pair for member in self.members for pair in member.pairs)


class MaxQualityDrop(SureRule):
    """Non-inferiority of every task with a score from 0 to 1.

    Right/wrong metrics get Tango's interval of the paired difference and an exact test against the limit, graded ones
    Gaffke's bounds. A group of tasks is judged by its documents pooled, as one. Fails are held together by p values
    (`_outcomes`): a task that stopped early has the confidence of its look, and can't be judged again at another.

    A limit in `percent` is that share of the score that the baseline reached on all its documents, taken as known: its
    own chance adds percent × its standard error, 0.05 points for 2 % of 70 % on 400 documents.
    """

    kind: Literal["max_quality_drop"] = "max_quality_drop"
    points: float | None = Field(default=None, ge=LEAST_LIMIT, lt=100)
    """Percentage points."""
    percent: float | None = Field(default=None, ge=LEAST_LIMIT, lt=100)
    """Percent of the baseline's own score."""
    tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    """None: every task whose metric is a score from 0 to 1. Groups may be named."""
    metric: str | None = None
    """None: each task's primary metric."""
    pool_groups: bool = True
    """False: every task of a group is judged by itself."""

    needs = frozenset({"quality"})
    output_types = SCORED_OUTPUT_TYPES
    stops_early = True
    unit: ClassVar[str] = "points"

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        exactly_one(self.kind, points=self.points, percent=self.percent)
        return self

    def margin(self, score: float) -> float:
        """The largest drop allowed beside a baseline's score, as a share of documents."""
        if self.points is not None:
            return self.points / 100
        assert self.percent is not None
        return self.percent / 100 * score

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding for each task or pooled group."""
        try:
            before, after = comparable_quality(baseline, candidate)
        except UnmeasuredError as reason:
            return (self.finding("missing", str(reason), unit=self.unit),)
        subjects = self._subjects(before, after)
        if not subjects:
            nothing = "no task has a metric from 0 to 1, so there is nothing to judge"
            return (self.finding("missing", nothing, unit=self.unit),)
        measured = {name: self._measure(name, tasks, before, after) for name, tasks in subjects.items()}
        judged = {name: one for name, one in measured.items() if isinstance(one, _Judged)}
        outcomes, adjusted = self._outcomes(judged), _holm_p(judged)
        findings = (
            self.finding("missing", one, unit=self.unit, subject=name, limit=self.points)
            if isinstance(one, str)
            else self._finding(name, one, outcomes[name], holm_p=adjusted.get(name), tests=len(judged))
            for name, one in measured.items()
        )
        return tuple(self.above_noise(finding, baseline=baseline) for finding in findings)

    def above_noise(self, finding: Finding, *, baseline: VariantResults) -> Finding:
        """A drop or a limit within the noise of the documents that were judged decides nothing."""
        groups = baseline.quality.groups if baseline.quality else {}
        tasks = groups.get(finding.subject, (finding.subject,))
        return above_noise(finding, baseline=baseline, metric=self.metric, tasks=tasks)

    def early_margins(self, task: str, baseline: QualityResult) -> tuple[Margin, ...] | None:
        """The limit, for a task that is judged on its own documents; a pooled group needs all of them."""
        result = baseline.tasks.get(task)
        subjects = self._subjects(baseline, baseline)
        if any(task in tasks for name, tasks in subjects.items() if name != task):
            return None
        if result is None or task not in subjects:
            return ()
        metric = self.metric or result.primary_metric
        answers = [sample.metrics[metric] for sample in result.samples if metric in sample.metrics]
        drop = self.margin(sum(answers) / len(answers)) if answers else 0.0
        if drop == 0:
            return None  # nothing that could be lost: no look decides that
        return (Margin(metric=metric, drop=drop, confidence=self.confidence, tests=len(subjects)),)

    def _subjects(self, before: QualityResult, after: QualityResult) -> dict[str, tuple[str, ...]]:
        """What is judged, each with its tasks: the named, or all that aren't known to have another kind of metric."""
        groups = {**after.groups, **before.groups}
        if self.tasks is not None:
            named = self.tasks
        else:
            grouped = {task for tasks in groups.values() for task in tasks}
            alone = (name for name in (*before.tasks, *after.tasks) if name not in grouped)
            named = (*groups, *alone)
        subjects: dict[str, tuple[str, ...]] = {}
        for name in named:
            tasks = groups.get(name, (name,))
            subjects |= {name: tasks} if self.pool_groups else {task: (task,) for task in tasks}
        if self.tasks is not None:
            return subjects
        return {
            name: tasks
            for name, tasks in subjects.items()
            if not all(self._other_scale(task, before) for task in tasks)
        }

    def _other_scale(self, task: str, baseline: QualityResult) -> bool:
        """Whether the baseline's samples show a metric that isn't a score from 0 to 1.

        A candidate's don't count: what it gets wrong must not take a task from the gate.
        """
        if task not in baseline.tasks:
            return False
        result = baseline.tasks[task]
        values = (sample.metrics.get(self.metric or result.primary_metric, 0.0) for sample in result.samples)
        return result.output_type == "loglikelihood_rolling" or any(
            value < 0 or value > 1 for value in values
        )

    def _measure(
        self, name: str, tasks: tuple[str, ...], before: QualityResult, after: QualityResult
    ) -> _Judged | str:
        """What was measured of a task or pooled group, or why nothing can be judged."""
        try:
            members = tuple(self._answers(task, before, after) for task in tasks)
            drop = self._drop(name, members)
            self._refuse_implausible(name, drop)
            margin = self.margin(_share(members))
            answers = [answer for member in members for answer in member.baseline]
            guessed = _pooled_chance(members, unknown=0.0)
            refuse_guessing(name, drop.metric, answers, chance=guessed, margin=margin)
        except UnmeasuredError as reason:
            return str(reason)
        return _Judged(drop=drop, members=members, margin=margin)

    def _answers(self, task: str, before: QualityResult, after: QualityResult) -> _Answers:
        first, second, pairs = comparable_task(task, before, after)
        metric = self.metric or first.primary_metric
        higher_is_better = direction(task, metric, baseline=first, candidate=second)
        if self.percent is not None and not higher_is_better:
            raise UnmeasuredError(
                f"{task}: less {metric} is better, so a percentage of it is no limit; give points"
            )
        values = metric_pairs(task, metric, pairs)
        if not all(0 <= value <= 1 for pair in values for value in pair):
            raise UnmeasuredError(f"{task}: {metric} is not a score from 0 to 1, points don't apply to it")
        return _Answers(
            metric=metric,
            pairs=tuple((b, c) if higher_is_better else (1 - b, 1 - c) for b, c in values),
            baseline=tuple(
                sample.metrics[metric] if higher_is_better else 1 - sample.metrics[metric]
                for sample in distinct_samples(first.samples)
                if metric in sample.metrics
            ),
            chance=first.chance_score,
            confidence=self._confidence_of(task, second),
        )

    def _confidence_of(self, task: str, result: TaskResult) -> float:
        """That of the look at which a sequential evaluation stopped, else the rule's."""
        if result.look_confidence is None:
            return self.confidence
        look = planned_look(
            result.documents,
            available_documents=result.available_documents or result.documents,
            look_confidence=result.look_confidence,
            confidence=self.confidence,
        )
        if look is None:
            raise UnmeasuredError(
                f"{task}: stopped after {result.documents} of {result.available_documents} documents by looks that "
                f"weren't planned for {100 * self.confidence:g} % confidence; judge it by the gate it was run with"
            )
        return look.confidence

    def _drop(self, name: str, members: tuple[_Answers, ...]) -> PairedDrop:
        metrics = dict.fromkeys(member.metric for member in members)
        if len(metrics) > 1:
            raise UnmeasuredError(
                f"{name}: its tasks have different metrics ({', '.join(metrics)}); set metric, or pool_groups: false"
            )
        confidence = members[0].confidence
        if len(members) > 1 and any(member.confidence != self.confidence for member in members):
            raise UnmeasuredError(
                f"{name}: a task of it was stopped early, a pooled group needs every document"
            )
        (metric,) = metrics
        pairs = [pair for member in members for pair in member.pairs]
        drop = paired_drop(metric, pairs, confidence=confidence)
        if drop.baseline_score == 0:
            raise UnmeasuredError(f"{name}: void, {metric} of the baseline is 0, so no drop could show")
        answers = [answer for member in members for answer in member.baseline]
        refuse_chance_level(name, metric, answers, chance=_pooled_chance(members))
        return drop

    def _refuse_implausible(self, name: str, drop: PairedDrop) -> None:
        by_chance = drop.p >= 0.05 if drop.p is not None else drop.upper is None or drop.upper >= 0
        if drop.drop <= -IMPLAUSIBLE_GAIN and not by_chance:
            raise UnmeasuredError(
                f"{name}: implausible, {drop.metric} rose from {drop.baseline_score:.1%} to "
                f"{drop.candidate_score:.1%} by quantizing"
            )

    def _outcomes(self, judged: Mapping[str, _Judged]) -> dict[str, Decision]:
        """A pass for each drop that surely is under the limit, a fail for those that are above it all together."""
        failed = holm_claims(
            {
                name: lambda tests, one=one: surely_above(  # type: ignore[misc]
                    one.drop, one.pairs, margin=one.margin, tests=tests
                )
                for name, one in judged.items()
            }
        )
        return {
            name: "pass"
            if surely_under(one.drop, margin=one.margin)
            else "fail"
            if name in failed
            else "inconclusive"
            for name, one in judged.items()
        }

    def _finding(
        self, name: str, one: _Judged, outcome: Decision, *, holm_p: float | None, tests: int
    ) -> Finding:
        drop = one.drop
        known = drop.lower is not None and drop.upper is not None
        return self.finding(
            outcome,
            f"{_scores(one)}{_flips(drop, holm_p, tests)}; {self._bounds(one, outcome, tests=tests)}",
            unit=self.unit,
            subject=name,
            observed=100 * drop.drop,
            limit=100 * one.margin if self.points is None else self.points,
            interval=(100 * drop.lower, 100 * drop.upper) if known else None,  # type: ignore[operator]
            power=power(
                documents=drop.documents,
                flip_rate=drop.variance,
                margin=one.margin,
                confidence=drop.confidence,
            ),
        )

    def _bounds(self, one: _Judged, outcome: Decision, *, tests: int) -> str:
        drop, limit = one.drop, self._limit_text(one)
        nearly = self._nearly(one, tests=tests) if outcome == "inconclusive" else ""
        verdict = self.told(outcome, f"the limit of {limit}{nearly}", needed=self._needed(one, tests=tests))
        if drop.lower is None or drop.upper is None:
            return f"{drop.documents} document gives no interval, {verdict}"
        return (
            f"the drop of {100 * drop.drop:.2f} points lies in {100 * drop.lower:.2f} … "
            f"{100 * drop.upper:.2f} ({100 * drop.confidence:g} % bounds), {verdict}"
        )

    def _limit_text(self, one: _Judged) -> str:
        if self.points is not None:
            return f"{self.points:g}"
        return f"{100 * one.margin:.4g} ({self.percent:g} % of the baseline's score)"

    def _nearly(self, one: _Judged, *, tests: int) -> str:
        """Why nothing is decided where a bound alone would."""
        drop, margin = one.drop, one.margin
        p = p_values(drop, margin=margin)
        if drop.lower is None or drop.upper is None:
            return ""
        if tests > 1 and surely_above(drop, one.pairs, margin=margin, tests=1):
            return f", above it by itself, but not surely once {tests} tasks are looked at (Holm)"
        if p is not None and (drop.upper < margin or drop.lower >= margin):
            exact = p.inside if drop.upper < margin else p.outside
            return f", since the exact test gives p = {exact:.3f} where {1 - drop.confidence:.3g} is needed"
        return ""

    def _needed(self, one: _Judged, *, tests: int) -> str:
        drop, margin = one.drop, one.margin
        error = (1 - drop.confidence) / (tests if drop.drop > margin else 1)
        count = documents_needed(drop, margin=margin, confidence=1 - error)
        more = "" if count is None else f", {count - drop.documents:,} more than now"
        return would_decide(count, answered=drop.documents) + more


def _pooled_chance(members: tuple[_Answers, ...], *, unknown: float | None = None) -> float | None:
    """What guessing gets over all documents, `unknown` for a task whose chance isn't known; None where one stays so."""
    known = [
        (unknown if member.chance is None else member.chance, len(member.baseline)) for member in members
    ]
    if any(chance is None for chance, _ in known):
        return None
    return sum(chance * count for chance, count in known if chance) / max(1, sum(count for _, count in known))


def _holm_p(judged: Mapping[str, _Judged]) -> dict[str, float]:
    """McNemar's p of each task after Holm's adjustment, for those that have one."""
    p_values = {name: one.drop.p for name, one in judged.items() if one.drop.p is not None}
    return dict(zip(p_values, holm(tuple(p_values.values())), strict=True))


def _share(members: tuple[_Answers, ...]) -> float:
    """The baseline's score over all its documents."""
    answers = [answer for member in members for answer in member.baseline]
    return sum(answers) / len(answers)


def _scores(one: _Judged) -> str:
    drop = one.drop
    scores = (
        f"{drop.metric}: {drop.baseline_score:.1%} → {drop.candidate_score:.1%} on {drop.documents} documents"
    )
    if len(one.members) == 1:
        return scores
    counts = [len(member.pairs) for member in one.members]
    plain = [
        group_score(
            [sum(pair[arm] for pair in member.pairs) / len(member.pairs) for member in one.members],
            documents=counts,
            stderrs=[None] * len(counts),
        ).plain
        for arm in (0, 1)
    ]
    return (
        f"{scores} of {len(counts)} tasks, each document counting the same "
        f"(plain mean of the tasks: {plain[0]:.1%} → {plain[1]:.1%})"
    )


def _flips(drop: PairedDrop, holm_p: float | None, tests: int) -> str:
    if drop.flips is None or drop.p is None:
        return ""
    several = f", {holm_p:.4g} after Holm over {tests} tasks" if tests > 1 and holm_p is not None else ""
    return (
        f", {drop.flips.lost} right → wrong and {drop.flips.gained} wrong → right "
        f"(exact McNemar p = {drop.p:.4g}{several})"
    )
