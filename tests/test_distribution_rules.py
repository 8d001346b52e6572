"""What the rules over distributions pass, fail and can't tell, and what must never count as a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.distribution import TokenDistances, summarise
from pipeline.distribution_results import DistributionResult, DistributionWindow
from pipeline.results import VariantResults
from pipeline.rules.max_kl import MaxKl
from pipeline.rules.min_top1_agreement import MinTop1Agreement
from tests import result_builders as build

TOKENS = 100


def held(
    kl: Sequence[float], *, same: Sequence[int] | None = None, nats: float = 250.0, **fields: Any
) -> DistributionResult:
    """One window for each mean KL of `kl`; its tokens spread evenly from 0 to twice of it."""
    same = same or [TOKENS] * len(kl)
    values = np.array([[mean * 2 * place / (TOKENS - 1) for place in range(TOKENS)] for mean in kl])
    top = np.array([[place < count for place in range(TOKENS)] for count in same])
    flat = np.zeros(values.size)
    distances = TokenDistances(
        nats=flat + 2.5,
        baseline_nats=flat + 2.5,
        kl_nats=values.ravel(),
        same_top1=top.ravel(),
        top5_share=flat + 1.0,
        probability_difference=flat,
    )
    windows = tuple(
        DistributionWindow(
            tokens=TOKENS,
            nats=nats,
            words=80,
            utf8_bytes=400,
            kl_nats=tuple(row.tolist()),
            kl_sum_nats=float(row.sum()),
            same_top1=count,
            baseline_nats=250.0,
        )
        for row, count in zip(values, same, strict=True)
    )
    defaults: dict[str, Any] = {
        "text_sha256": "t" * 64,
        "context_tokens": 202,
        "bos_first": False,
        "vocabulary_tokens": 300,
        "scored_tokens": TOKENS * len(kl),
        "windows": windows,
        "finite": True,
        "token_perplexity": 12.18,
        "distance": summarise(distances, window_tokens=TOKENS),
        "reference_key": "k",
    }
    return DistributionResult(**{**defaults, **fields})


def arms(
    candidate: DistributionResult | None, baseline: DistributionResult | None = None, **fields: Any
) -> dict[str, VariantResults]:
    base = baseline or held([0.0] * len(candidate.windows) if candidate else [0.0] * 4)
    return {
        "baseline": build.variant("fp16", quality=build.quality(build.task(), distribution=base), **fields),
        "candidate": build.variant("int8", quality=build.quality(build.task(), distribution=candidate)),
    }


SPREAD = [0.8, 0.9, 1.0, 1.1, 1.2, 0.85, 1.15, 1.0]


@pytest.mark.parametrize(("limit", "outcome"), [(0.02, "pass"), (0.005, "fail"), (0.0101, "inconclusive")])
def test_a_mean_is_judged_by_its_bounds(limit: float, outcome: str) -> None:
    candidate = held([0.01 * part for part in SPREAD], nats=251.0)
    (finding,) = MaxKl(mean_nats=limit).judge(**arms(candidate))
    assert finding.outcome == outcome
    assert finding.observed == pytest.approx(0.01)
    assert finding.interval is not None
    assert finding.interval[0] < 0.01 < finding.interval[1]
    assert ("scored tokens would decide" in finding.because) == (outcome == "inconclusive")


def test_both_limits_give_a_finding_each() -> None:
    candidate = held([0.01 * part for part in SPREAD], nats=251.0)
    mean, p99 = MaxKl(mean_nats=0.02, p99_nats=0.01).judge(**arms(candidate))
    assert (mean.subject, mean.outcome) == ("mean", "pass")
    assert (p99.subject, p99.outcome) == ("p99", "fail")
    assert p99.observed == pytest.approx(0.0223, abs=0.001)


@pytest.mark.parametrize(
    ("above", "outcome"),
    # Of 100 tokens in each of 16 windows, how many are at 0.5 nats; the limit is 0.3.
    [
        ([0] * 16, "pass"),
        ([1] * 16, "inconclusive"),
        ([0] * 14 + [4] * 2, "inconclusive"),
        ([4] * 16, "fail"),
    ],
)
def test_a_percentile_is_judged_by_the_share_of_tokens_above_the_limit(
    above: list[int], outcome: str
) -> None:
    candidate = outlying(above)
    (finding,) = MaxKl(p99_nats=0.3).judge(**arms(candidate))
    assert finding.outcome == outcome
    assert "% of tokens are above it, 1 % may be" in finding.because
    assert finding.interval is not None
    low, high = finding.interval
    assert finding.observed is not None
    assert low <= finding.observed <= high
    assert {"pass": high <= 0.3, "fail": low >= 0.3, "inconclusive": low < 0.3 < high}[outcome]


def outlying(above: list[int]) -> DistributionResult:
    """A window for each count, with so many tokens at 0.5 nats and the others at 0.01."""
    plain = held([0.01] * len(above), nats=251.0)
    kl = [(0.5,) * count + (0.01,) * (TOKENS - count) for count in above]
    windows = tuple(
        window.model_copy(update={"kl_nats": values, "kl_sum_nats": math.fsum(values)})
        for window, values in zip(plain.windows, kl, strict=True)
    )
    flat = [value for values in kl for value in values]
    assert plain.distance is not None
    figures = {"kl_mean_nats": math.fsum(flat) / len(flat), "kl_p99_nats": float(np.quantile(flat, 0.99))}
    return changed(plain, windows=windows, distance=plain.distance.model_copy(update=figures))


def test_a_text_too_short_for_a_percentile_s_bound_says_so() -> None:
    (finding,) = MaxKl(p99_nats=9.0).judge(**arms(outlying([0, 0])))
    assert (finding.outcome, finding.interval) == ("inconclusive", None)
    assert "the text is too short for an upper bound" in finding.because


def test_a_mean_over_fewer_than_four_windows_is_never_small_enough() -> None:
    for count, outcome in ((2, "inconclusive"), (3, "inconclusive"), (4, "pass")):
        candidate = held([1e-6 * part for part in SPREAD[:count]], nats=251.0)
        (finding,) = MaxKl(mean_nats=0.02).judge(**arms(candidate))
        assert finding.outcome == outcome
    (finding,) = MaxKl(mean_nats=1e-9).judge(**arms(held([0.01, 0.011, 0.012], nats=251.0)))
    assert finding.outcome == "fail"


def test_a_limit_is_needed() -> None:
    with pytest.raises(ValidationError, match="mean_nats, p99_nats or both"):
        MaxKl()


@pytest.mark.parametrize(
    ("same", "percent", "outcome"),
    [
        (98, 95.0, "pass"),
        (90, 95.0, "fail"),
        (95, 95.0, "inconclusive"),
        (100, 99.0, "pass"),
        (100, 99.9, "inconclusive"),
    ],
)
def test_agreement_is_judged_by_its_bounds_and_is_never_certain(
    same: int, percent: float, outcome: str
) -> None:
    candidate = held([0.01] * 8, same=[same] * 8, nats=251.0)
    (finding,) = MinTop1Agreement(percent=percent).judge(**arms(candidate))
    assert finding.outcome == outcome
    assert finding.observed == pytest.approx(same)
    assert finding.interval is not None
    assert finding.interval[0] < finding.interval[1]


def changed(result: DistributionResult, **fields: Any) -> DistributionResult:
    return result.model_copy(update=fields)


GOOD = held([0.01 * part for part in SPREAD], nats=251.0)
OWN = held([0.0] * 8)


@pytest.mark.parametrize("rule", [MaxKl(mean_nats=0.02), MaxKl(p99_nats=1.0), MinTop1Agreement(percent=50)])
@pytest.mark.parametrize(
    ("candidate", "baseline", "words"),
    [
        (None, OWN, "no distribution on held text"),
        (changed(GOOD, finite=False), OWN, "not finite"),
        (changed(GOOD, distance=None), OWN, "compared with none"),
        (changed(GOOD, text_sha256="u" * 64), OWN, "text_sha256"),
        (changed(GOOD, reference_key="other"), OWN, "reference_key"),
        (changed(GOOD, windows=GOOD.windows[:-1]), OWN, "don't hold the tokens"),
        (changed(GOOD, distance=OWN.distance), OWN, "implausible"),
        (changed(GOOD, windows=OWN.windows, distance=OWN.distance), OWN, "to the last bit"),
        (GOOD, changed(OWN, distance=None), "void, against its own"),
        (GOOD, held([0.01] * 8), "void, against its own"),
    ],
)
def test_what_was_not_measured_or_can_t_be_true_is_missing(
    rule: Any, candidate: DistributionResult | None, baseline: DistributionResult, words: str
) -> None:
    findings = rule.judge(**arms(candidate, baseline))
    assert {finding.outcome for finding in findings} == {"missing"}
    assert words in findings[0].because


def test_a_limit_within_the_baseline_s_distance_from_itself_can_t_be_shown_to_be_kept() -> None:
    null = build.quality(build.task(), batch_size=1, distribution=held([3e-4] * 8))
    candidate = held([1e-4] * 8, nats=251.0)
    (finding,) = MaxKl(mean_nats=2e-4).judge(**arms(candidate, null_quality=null))
    assert finding.outcome == "inconclusive"
    assert "from itself" in finding.because
    (finding,) = MaxKl(mean_nats=1e-3).judge(**arms(candidate, null_quality=null))
    assert finding.outcome == "pass"


def test_noise_of_the_baseline_softens_passes_and_fails_of_both_rules() -> None:
    """The null run's windows differ by more than the candidate's, and by more than the limit."""
    null = build.quality(build.task(), batch_size=1, distribution=held([0.05] * 8, same=[90] * 8, nats=250.0))
    quiet, far = held([0.01] * 8, same=[99] * 8, nats=251.0), held([0.04] * 8, same=[92] * 8, nats=251.0)
    for candidate, rule, alone in (
        (quiet, MaxKl(mean_nats=0.02), "pass"),
        (far, MaxKl(mean_nats=0.02), "fail"),
        (quiet, MinTop1Agreement(percent=95.0), "pass"),
        (far, MinTop1Agreement(percent=95.0), "fail"),
    ):
        assert [one.outcome for one in rule.judge(**arms(candidate))] == [alone]
        (finding,) = rule.judge(**arms(candidate, null_quality=null))
        assert finding.outcome == "inconclusive"
        assert "itself" in finding.because
    (finding,) = MaxKl(mean_nats=0.02).judge(
        **arms(held([0.2] * 8, same=[60] * 8, nats=251.0), null_quality=null)
    )
    assert finding.outcome == "fail", "far beyond the noise"


def test_two_limits_on_one_text_are_claims_that_must_hold_together() -> None:
    """Of 16 windows of a hundred tokens 25 are above: the bound at 95 % is over 1 %, that at 97.5 % isn't."""
    candidate = outlying([2] * 9 + [1] * 7)
    (alone,) = MaxKl(p99_nats=0.3).judge(**arms(candidate))
    mean, p99 = MaxKl(mean_nats=1.0, p99_nats=0.3).judge(**arms(candidate))
    assert (alone.outcome, mean.outcome, p99.outcome) == ("fail", "pass", "inconclusive")
    assert "by itself only" in p99.because
