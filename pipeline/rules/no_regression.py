"""The candidate must not fall behind the version that was promoted last: speed, memory, quality.

Speed and memory have a tolerance, because two runs of one checkpoint differ, too. Quality is the paired drop
against the promoted version's answers to the same documents, as `max_quality_drop` judges it.

>>> NoRegression().against
'shippable'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from pipeline.early_stopping import Margin
from pipeline.null_run import above_known_noise, above_noise
from pipeline.promoted import Promoted, PromotedBefore
from pipeline.results import Finding, QualityResult, VariantResults
from pipeline.rules.base import LEAST_LIMIT, Rule
from pipeline.rules.max_memory import MaxMemory
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.rules.min_speedup import MinSpeedup


class NoRegression(Rule):
    """Against the last version that `promote` registered under an alias, from this recipe and model.

    A figure set to null isn't judged. Speed is compared on one machine and engine only.
    """

    kind: Literal["no_regression"] = "no_regression"
    against: Literal["shippable", "champion"] = "shippable"
    slower_percent: float | None = Field(default=5.0, ge=0, lt=100)
    """How much slower decoding may be, at `batch_size`."""
    batch_size: int = Field(default=1, ge=1)
    larger_percent: float | None = Field(default=1.0, ge=0, lt=900)
    """How many more resident bytes the weights may take."""
    points: float | None = Field(default=None, ge=LEAST_LIMIT, lt=100)
    """Percentage points that no task may lose, at `confidence`."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    first: Literal["missing", "pass"] = "missing"
    """What it is when nothing was promoted before: nothing ships because a comparison is absent."""

    _promoted: Promoted | None = PrivateAttr(default=None)
    _not_asked: str = PrivateAttr(default="")
    _machine: str | None = PrivateAttr(default=None)

    needs = frozenset({"speed"})
    unit: ClassVar[str] = ""

    @model_validator(mode="after")
    def _something_is_judged(self) -> Self:
        if self.slower_percent is None and self.larger_percent is None and self.points is None:
            raise ValueError("no_regression needs at least one of slower_percent, larger_percent, points")
        return self

    def beside(self, before: PromotedBefore, *, machine: str | None) -> Self:
        """This rule with the version it compares with; `machine` is the fingerprint of the candidate's."""
        bound = self.model_copy()
        bound._promoted, bound._machine = before.versions.get(self.against), machine
        bound._not_asked = before.not_asked
        return bound

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding for speed, one for memory, one for each task, as far as they are asked for.

        Of the baseline only the null run counts: neither its noise nor the promoted version's may decide a drop.
        """
        before = self._promoted
        if before is None:
            because = f"no version was promoted as {self.against} before, so there is nothing to fall behind"
            if self.first == "missing":
                because += "; promote one, or set first: pass for the first time"
            if self._not_asked:
                because = f"{self._not_asked}, and this store saw no version promoted as {self.against}"
            return (self.finding("missing" if self._not_asked else self.first, because, unit=self.unit),)
        if other := _other_model(before, candidate):
            return (self.finding("missing", other, unit=self.unit),)
        found: list[Finding] = []
        for subject, rule in self._parts():
            if subject == "speed" and (elsewhere := self._other_machine(before)):
                found.append(self.finding("missing", elsewhere, unit=MinSpeedup.unit, subject=subject))
                continue
            judged = rule.judge(baseline=_with_libraries_of(candidate, before.results), candidate=candidate)
            found += (self._own(finding, before, candidate, subject=subject) for finding in judged)
        return tuple(self.above_noise(finding, baseline=baseline) for finding in found)

    def above_noise(self, finding: Finding, *, baseline: VariantResults) -> Finding:
        """A drop or a limit within the noise of the null run decides nothing."""
        if finding.unit != MaxQualityDrop.unit:
            return finding
        return above_noise(finding, baseline=baseline, tasks=_tasks_of(finding, baseline))

    def early_margins(self, task: str, baseline: QualityResult) -> tuple[Margin, ...] | None:
        """All documents where quality is judged: the promoted version's answers are compared one by one."""
        del task, baseline
        return () if self.points is None else None

    def _parts(self) -> tuple[tuple[str, Rule], ...]:
        parts: list[tuple[str, Rule]] = []
        if self.slower_percent is not None:
            factor = 1 - self.slower_percent / 100
            parts.append(("speed", MinSpeedup(factor=factor, batch_size=self.batch_size)))
        if self.larger_percent is not None:
            parts.append(("memory", MaxMemory(fraction=1 + self.larger_percent / 100)))
        if self.points is not None:
            parts.append(("", MaxQualityDrop(points=self.points, confidence=self.confidence)))
        return tuple(parts)

    def _other_machine(self, before: Promoted) -> str:
        """Why speed can't be compared; "" where it can."""
        if before.machine is not None and before.machine == self._machine:
            return ""
        return (
            f"the promoted version {before.version} was timed on another machine (fingerprint {before.machine} "
            f"there, {self._machine} here); run it here again and promote it, or set slower_percent: null"
        )

    def _own(self, finding: Finding, before: Promoted, candidate: VariantResults, *, subject: str) -> Finding:
        """Another rule's finding in this rule's name: its "baseline" is the promoted version."""
        named = f"{before.results.name} promoted as version {before.version} on {before.promoted_at[:10]}"
        named += _other_libraries(before.results, candidate)
        named += (
            f" ({self._not_asked}; this is the last one promoted with this store)" if self._not_asked else ""
        )
        if finding.unit == MaxQualityDrop.unit:
            finding = _above_its_noise(finding, before)
        return finding.model_copy(
            update={
                "rule": self.kind,
                "subject": subject or finding.subject,
                "because": f"with {named} as the baseline: {finding.because}",
            }
        )


def _above_its_noise(finding: Finding, before: Promoted) -> Finding:
    """The finding of a drop, as far as the null run of the promoted version's run lets it be claimed."""
    if finding.outcome == "missing":
        return finding
    if before.noise is None:
        unknown = f"{finding.because}; the noise of the promoted version's run isn't known, promote again to keep it"
        return finding.model_copy(update={"because": unknown})
    tasks = _tasks_of(finding, before.results)
    return above_known_noise(finding, [noise for noise in before.noise if noise.task in tasks])


def _tasks_of(finding: Finding, results: VariantResults) -> tuple[str, ...]:
    """The tasks that a finding of a drop is about."""
    groups = results.quality.groups if results.quality else {}
    return groups.get(finding.subject, (finding.subject,))


def _other_model(before: Promoted, candidate: VariantResults) -> str:
    """Why the promoted version is no predecessor; "" where it may be one. Two folders of weights may share a name."""
    counts = [one.checkpoint.parameters if one.checkpoint else None for one in (before.results, candidate)]
    if None in counts or counts[0] == counts[1]:
        return ""
    return (
        f"the promoted version {before.version} of {before.name} is another model: {counts[0]:,} parameters there, "
        f"{counts[1]:,} here; give this model's recipe a file name of its own"
    )


def _versions(results: VariantResults) -> dict[str, str]:
    return results.checkpoint.versions if results.checkpoint else {}


def _with_libraries_of(candidate: VariantResults, before: VariantResults) -> VariantResults:
    """The promoted results as if made with the candidate's libraries: a new library's loss is what is looked for.

    Within one run other versions are refused, because a speed-up would be partly the library's.
    """
    if before.checkpoint is None:
        return before
    checkpoint = before.checkpoint.model_copy(update={"versions": _versions(candidate)})
    return before.model_copy(update={"checkpoint": checkpoint})


def _other_libraries(before: VariantResults, candidate: VariantResults) -> str:
    old, new = _versions(before), _versions(candidate)
    other = [f"{name} {old[name]}" for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
    return f" (with {', '.join(other)})" if other else ""


def with_promoted(
    rules: Sequence[Rule], *, promoted: PromotedBefore, machine: str | None
) -> tuple[Rule, ...]:
    """The rules, each that compares with a promoted version beside its own."""
    return tuple(
        rule.beside(promoted, machine=machine) if isinstance(rule, NoRegression) else rule for rule in rules
    )
