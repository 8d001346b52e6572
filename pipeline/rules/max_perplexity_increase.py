"""Token perplexity may rise by at most a percentage, judged on the same documents.

>>> MaxPerplexityIncrease(percent=1.0).confidence
0.95
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from pipeline.comparison import UnmeasuredError, comparable_quality, comparable_task, metric_pairs
from pipeline.null_run import above_noise
from pipeline.results import Finding, QualityResult, VariantResults
from pipeline.rules.base import SureRule, would_decide
from pipeline.sample_sizes import documents_for_distance
from pipeline.statistics import BootstrapDifference, Decision, non_inferiority, paired_bootstrap

QUANTIZED = frozenset({"int8", "int6", "int5", "int4", "fp8", "fp4"})
LARGEST_NATS = 1e40
"""Of a document; arithmetic in FP32, which ends at 3.4e38, gives no more."""

_ROUNDING_NATS = 1e-9
"""Below it a standard error of nats a token is rounding."""
IMPLAUSIBLE_RATIO = 0.45
"""A perplexity this far under the 16-bit baseline's, beyond chance, was not measured rightly."""


class MaxPerplexityIncrease(SureRule):
    """Non-inferiority of exp(NLL per token), the NLL per token being Σ nats ÷ Σ tokens over documents.

    Bounds come from the paired bootstrap over documents on the difference of NLL per token, which is the
    logarithm of the ratio of perplexities; each is one-sided at `confidence`.
    """

    kind: Literal["max_perplexity_increase"] = "max_perplexity_increase"
    percent: float = Field(gt=0)
    tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    """None: every rolling log-likelihood task."""

    needs = frozenset({"quality"})
    output_types = frozenset({"loglikelihood_rolling"})
    unit: ClassVar[str] = "percent"

    def judge(self, *, baseline: VariantResults, candidate: VariantResults) -> tuple[Finding, ...]:
        """One finding for each task."""
        try:
            before, after = comparable_quality(baseline, candidate)
        except UnmeasuredError as reason:
            return (self.finding("missing", str(reason), unit=self.unit),)
        names = self.tasks if self.tasks is not None else _rolling_tasks(before, after)
        if not names:
            nothing = "no task measures perplexity (rolling log-likelihood), so there is nothing to judge"
            return (self.finding("missing", nothing, unit=self.unit),)
        must_differ = candidate.precision in QUANTIZED and candidate.precision != baseline.precision
        findings = {
            task: self._judge_task(task, before, after, must_differ=must_differ)
            for task in dict.fromkeys(names)
        }

        held = self.held_together(
            findings, lambda rule, task: rule._judge_task(task, before, after, must_differ=must_differ)
        )
        return tuple(self.above_noise(finding, baseline=baseline) for finding in held)

    def above_noise(self, finding: Finding, *, baseline: VariantResults) -> Finding:
        """A rise or a limit within the noise of perplexity decides nothing."""
        return above_noise(finding, baseline=baseline)

    def _judge_task(
        self, task: str, before: QualityResult, after: QualityResult, *, must_differ: bool
    ) -> Finding:
        try:
            return self._compare(task, before, after, must_differ=must_differ)
        except UnmeasuredError as reason:
            return self.finding("missing", str(reason), unit=self.unit, subject=task, limit=self.percent)

    def _compare(
        self, task: str, before: QualityResult, after: QualityResult, *, must_differ: bool
    ) -> Finding:
        first, second, tokens = _nats_and_tokens(task, before, after)
        if must_differ and first == second:
            raise UnmeasuredError(
                f"{task}: implausible, every log-likelihood equals the baseline's to the last bit"
            )
        result = paired_bootstrap(first, second, weights=tokens, confidence=self.confidence)
        assert result.difference is not None
        if result.interval is not None and result.interval.upper < math.log(IMPLAUSIBLE_RATIO):
            raise UnmeasuredError(
                f"{task}: implausible, quantizing multiplied perplexity by {math.exp(result.difference):.2g}"
            )
        outcome: Decision = "inconclusive"
        interval = None
        if result.interval is not None:
            margin = math.log1p(self.percent / 100)
            outcome = non_inferiority(result.interval.lower, result.interval.upper, margin)
            interval = (_percent(result.interval.lower), _percent(result.interval.upper))
        if outcome == "pass" and first != second and _all_alike(result):
            outcome = "inconclusive"
        totals = tuple(sum(nats) / sum(tokens) for nats in (first, second))
        return self.finding(
            outcome,
            f"perplexity {_exp(totals[0]):.4g} → {_exp(totals[1]):.4g} per token on {len(tokens)} "
            f"documents; {self._bounds(result, outcome)}",
            unit=self.unit,
            subject=task,
            observed=_percent(result.difference),
            limit=self.percent,
            interval=interval,
        )

    def _bounds(self, result: BootstrapDifference, outcome: Decision) -> str:
        assert result.difference is not None
        verdict = self.told(outcome, f"the limit of {self.percent:g} %", needed=self._needed(result))
        if result.interval is None:
            return f"{result.documents} document gives no interval, {verdict}"
        if outcome == "inconclusive" and _all_alike(result):
            return (
                f"all documents changed by the same {_percent(result.difference):+.2f} %, so nothing shows how others "
                f"would: undecided against the limit of {self.percent:g} %; other documents would decide"
            )
        low, high = (_percent(bound) for bound in (result.interval.lower, result.interval.upper))
        return (
            f"the change of {_percent(result.difference):+.2f} % lies in {low:+.2f} … {high:+.2f} "
            f"({100 * self.confidence:g} % bounds), {verdict}"
        )

    def _needed(self, result: BootstrapDifference) -> str:
        if result.standard_error is None or result.difference is None:
            return "two documents are the least that show a spread"
        count = documents_for_distance(
            math.log1p(self.percent / 100) - result.difference,
            variance=result.documents * result.standard_error**2,
            confidence=self.confidence,
        )
        return would_decide(count, answered=result.documents)


def _all_alike(result: BootstrapDifference) -> bool:
    """Whether documents show no spread beyond rounding, as copies of one do: bounds of no width aren't certainty."""
    return result.standard_error is not None and result.standard_error < _ROUNDING_NATS


def _rolling_tasks(before: QualityResult, after: QualityResult) -> tuple[str, ...]:
    names = dict.fromkeys((*before.tasks, *after.tasks))
    return tuple(
        name
        for name in names
        if any(
            name in quality.tasks and quality.tasks[name].output_type == "loglikelihood_rolling"
            for quality in (before, after)
        )
    )


def _nats_and_tokens(
    task: str, before: QualityResult, after: QualityResult
) -> tuple[list[float], list[float], list[float]]:
    """Negative log-likelihoods of both arms and the tokens they share, by document."""
    _, _, pairs = comparable_task(task, before, after)
    log_likelihoods = metric_pairs(task, "log_likelihood_nats", pairs)
    tokens = metric_pairs(task, "tokens", pairs)
    if any(first != second for first, second in tokens):
        raise UnmeasuredError(f"{task}: the arms cut the same documents into different numbers of tokens")
    if any(first <= 0 for first, _ in tokens):
        raise UnmeasuredError(f"{task}: implausible, a document without tokens")
    if any(value > 0 for pair in log_likelihoods for value in pair):
        raise UnmeasuredError(f"{task}: implausible, a positive log-likelihood")
    if any(value < -LARGEST_NATS for pair in log_likelihoods for value in pair):
        raise UnmeasuredError(f"{task}: implausible, a log-likelihood under {-LARGEST_NATS:g} nats")
    first, second = ([-pair[arm] for pair in log_likelihoods] for arm in (0, 1))
    return first, second, [count for count, _ in tokens]


def _exp(nats: float) -> float:
    """exp, kept finite for a model that is broken beyond e^700."""
    return math.exp(min(nats, 700.0))


def _percent(log_ratio: float) -> float:
    """Percent of increase that a difference of NLL per token means."""
    return 100 * math.expm1(min(log_ratio, 700.0))
