"""Paired statistics of two variants on the same documents: tests, intervals, pooled scores. Pure.

Both variants answer the same documents, so every comparison is paired: an unpaired test throws away most of
its power. A drop is always baseline minus candidate, so a positive drop is a loss. Bounds are one-sided, each
at the stated confidence; both together make a two-sided interval at 2 × confidence − 1.

>>> round(mcnemar_exact_p(lost=10, gained=2), 6)
0.038574
>>> interval = tango_interval(lost=0, gained=0, documents=100)
>>> round(interval.upper, 4)
0.0263
>>> non_inferiority(interval.lower, interval.upper, margin=0.02)
'inconclusive'
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from pipeline.values import Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Decision = Literal["pass", "fail", "inconclusive"]

MINIMUM_RESAMPLES = 2_000
FEWEST_RESAMPLED = 4
Z95 = 1.959963984540054
"""Quantile of the normal distribution that 95 % lie within, on both sides."""


class Flips(Value):
    """The paired right/wrong table of two variants on the same documents."""

    both_right: int
    lost: int
    """Right with the baseline, wrong with the candidate."""
    gained: int
    """Wrong with the baseline, right with the candidate."""
    both_wrong: int

    @property
    def documents(self) -> int:
        """Documents in the table."""
        return self.both_right + self.lost + self.gained + self.both_wrong

    @property
    def flips(self) -> int:
        """Documents whose answer changed, either way."""
        return self.lost + self.gained

    @property
    def smoothed_flip_rate(self) -> float:
        """(flips + ½) ÷ (documents + 1): no flip seen in few documents doesn't mean that none happens."""
        return (self.flips + 0.5) / (self.documents + 1)


class Interval(Value):
    """Bounds of a difference; each holds one-sided with `confidence`."""

    lower: float
    upper: float
    confidence: float


class BootstrapDifference(Value):
    """A difference of document totals per unit of weight, candidate minus baseline.

    `interval` and `standard_error` are None with fewer than two documents: one document says nothing about
    how documents differ.
    """

    difference: float | None
    interval: Interval | None
    standard_error: float | None
    documents: int


class GroupScore(Value):
    """A group's score over its documents (`weighted`, each counts the same) and over its tasks (`plain`)."""

    documents: int
    weighted: float
    plain: float
    weighted_stderr: float | None


def paired_flips(pairs: Sequence[tuple[bool, bool]]) -> Flips:
    """Count (baseline right, candidate right) pairs."""
    counts = Counter((bool(baseline), bool(candidate)) for baseline, candidate in pairs)
    return Flips(
        both_right=counts[True, True],
        lost=counts[True, False],
        gained=counts[False, True],
        both_wrong=counts[False, False],
    )


def mcnemar_exact_p(*, lost: int, gained: int) -> float:
    """Two-sided exact McNemar p: twice the smaller binomial(½) tail over the flips, at most 1.

    Integer arithmetic, so exact for any number of flips. No flip gives 1.
    """
    flips = lost + gained
    term = tail = 1
    for k in range(1, min(lost, gained) + 1):
        term = term * (flips - k + 1) // k
        tail += term
    return float(min(1.0, 2 * tail / 2**flips))


def tango_interval(*, lost: int, gained: int, documents: int, confidence: float = 0.95) -> Interval:
    """Tango's score interval for the paired drop (lost − gained) ÷ documents, each bound one-sided.

    Inverts the score test with the flip probabilities at their constrained maximum likelihood (Tango,
    Statistics in Medicine 17, 1998, 891-908). It is never empty: no flip in n documents still leaves
    ± z² ÷ (n + z²). Without documents it is the whole range −1 … 1.
    """
    if min(lost, gained, documents - lost - gained) < 0:
        raise ValueError(f"no paired table has {lost} lost and {gained} gained in {documents} documents")
    if documents == 0:
        return Interval(lower=-1.0, upper=1.0, confidence=confidence)
    z = normal_quantile(confidence)

    def score(drop: float) -> float:
        return tango_score(drop, lost=lost, gained=gained, documents=documents)

    estimate = (lost - gained) / documents
    return Interval(
        lower=_root(lambda drop: score(drop) - z, low=-1.0, high=estimate),
        upper=_root(lambda drop: score(drop) + z, low=estimate, high=1.0),
        confidence=confidence,
    )


def tango_score(drop: float, *, lost: int, gained: int, documents: int) -> float:
    """Tango's score of the hypothesis that the true drop is `drop`: about standard normal, falls as `drop` rises."""
    a = 2.0 * documents
    b = -lost - gained + (2 * documents - lost + gained) * drop
    c = -gained * drop * (1 - drop)
    gained_probability = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = documents * (2 * gained_probability + drop * (1 - drop))
    distance = lost - gained - documents * drop
    if variance <= 1e-300:
        return math.copysign(math.inf, distance) if abs(distance) > 1e-12 * documents else 0.0
    return distance / math.sqrt(variance)


def _root(falling: Callable[[float], float], *, low: float, high: float) -> float:
    """Zero of a falling function by bisection; the nearer end when it lies outside."""
    if falling(low) <= 0:
        return low
    if falling(high) >= 0:
        return high
    for _ in range(100):
        middle = (low + high) / 2
        if falling(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def paired_bootstrap(
    baseline_totals: Sequence[float],
    candidate_totals: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 1234,
) -> BootstrapDifference:
    """Σ(candidate − baseline) ÷ Σ weights over documents, with bounds from resampling whole documents.

    For perplexity the totals are negative log-likelihoods in nats and the weights tokens, so the difference
    is that of NLL per token and its exponential the ratio of perplexities. Without `weights` each document
    counts once. Bounds are Student's t of the linearised ratio, with the quantiles that resampled documents show for
    it where they are further out (bootstrap-t: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section
    12.5): a few documents of a skewed figure seldom hold its large values. Raises ValueError on unequal
    lengths, weights that are not positive, or fewer than 2,000 resamples.
    """
    import numpy as np

    weights = [1.0] * len(baseline_totals) if weights is None else weights
    if not len(baseline_totals) == len(candidate_totals) == len(weights):
        raise ValueError("baseline, candidate and weights must have one number for each document")
    if resamples < MINIMUM_RESAMPLES:
        raise ValueError(f"{resamples} resamples are too few for a bound; at least {MINIMUM_RESAMPLES}")
    differences = np.asarray(candidate_totals, dtype=float) - np.asarray(baseline_totals, dtype=float)
    weight = np.asarray(weights, dtype=float)
    if not (np.isfinite(differences).all() and np.isfinite(weight).all() and (weight > 0).all()):
        raise ValueError("totals must be finite and weights positive")
    count = len(differences)
    if count == 0:
        return BootstrapDifference(difference=None, interval=None, standard_error=None, documents=0)
    observed = float(differences.sum() / weight.sum())
    if count == 1:
        return BootstrapDifference(difference=observed, interval=None, standard_error=None, documents=1)
    error = ratio_standard_error(differences.tolist(), weight.tolist())
    low, high = _student_quantiles(
        differences, weight, observed, confidence=confidence, resamples=resamples, seed=seed
    )
    return BootstrapDifference(
        difference=observed,
        interval=Interval(lower=observed - high * error, upper=observed - low * error, confidence=confidence),
        standard_error=error,
        documents=count,
    )


def bounded_mean_interval(
    values: Sequence[float],
    *,
    lowest: float,
    highest: float,
    confidence: float = 0.95,
    draws: int = 10_000,
    seed: int = 1234,
) -> Interval:
    """Bounds of the mean of values that can't leave `lowest` … `highest`, for values of any distribution.

    Gaffke's bound (Mathematical Methods of Statistics 14, 2005, 451-467): weights are drawn evenly from all that add
    up to 1, for the values and for one more that lies at the worst end; the bound is the quantile of the weighted
    mean. So what no document showed yet is reckoned with, however alike they are. For values at both ends only it is
    Clopper and Pearson's bound, and no distribution is known for which it errs more often than stated
    (Learned-Miller and Thomas, arXiv:1905.06208, 2019). Raises ValueError without values or for one out of range.
    """
    import numpy as np

    if not values or not all(lowest <= value <= highest for value in values):
        raise ValueError(f"values must lie from {lowest} to {highest}, and there must be one")
    different, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    generator = np.random.default_rng(seed)
    rows = max(1, 1_000_000 // (len(different) + 1))
    low, high = [], []
    for start in range(0, draws, rows):
        # The weights of k equal values add up to one drawn from the gamma distribution of shape k.
        shape = (min(rows, draws - start), len(different) + 1)
        weights = generator.standard_gamma(np.append(counts, 1).astype(float), size=shape)
        total, seen = weights.sum(axis=1), weights[:, :-1] @ different
        low.append((seen + lowest * weights[:, -1]) / total)
        high.append((seen + highest * weights[:, -1]) / total)
    return Interval(
        lower=float(np.quantile(np.concatenate(low), 1 - confidence)),
        upper=float(np.quantile(np.concatenate(high), confidence)),
        confidence=confidence,
    )


def ratio_standard_error(totals: Sequence[float], weights: Sequence[float]) -> float:
    """Standard error of Σ totals ÷ Σ weights over at least two units that were drawn.

    Linearised ratio estimator (Cochran, Sampling Techniques, section 6.4): with r the ratio, n units and W = Σ weights,
    √(n ÷ (n − 1) × Σ(total − r·weight)²) ÷ W. 0 where no residual total − r·weight is above rounding error.
    """
    count, weight = len(totals), math.fsum(weights)
    mean = math.fsum(totals) / weight
    residuals = [total - mean * one for total, one in zip(totals, weights, strict=True)]
    # Equal units must not get an interval made of noise.
    if max(map(abs, residuals)) <= 1e-12 * max(*map(abs, totals), 1e-300):
        return 0.0
    return math.sqrt(count / (count - 1) * math.fsum(one * one for one in residuals)) / weight


def _student_quantiles(
    differences: Floats, weight: Floats, observed: float, *, confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    """Quantiles of (ratio − true ratio) ÷ its standard error: Student's, or those of resamples if further out.

    Of fewer than four documents too many resamples are one document alone, which has no standard error.
    """
    import numpy as np
    from scipy.special import stdtrit

    student = float(stdtrit(len(differences) - 1, confidence))
    if len(differences) < FEWEST_RESAMPLED:
        return -student, student
    drawn = _resampled_t(differences - observed * weight, weight, resamples=resamples, seed=seed)
    if not len(drawn):
        return -student, student
    low, high = np.quantile(drawn, (1 - confidence, confidence))
    return min(-student, float(low)), max(student, float(high))


def _resampled_t(residuals: Floats, weight: Floats, *, resamples: int, seed: int) -> Floats:
    """t of ratios over draws of documents with replacement, without draws of equal documents. In blocks of 8 MB."""
    import numpy as np

    generator = np.random.default_rng(seed)
    count = len(residuals)
    least = 1e-9 * float(abs(residuals).max())
    block = max(1, 1_000_000 // count)
    parts = []
    for start in range(0, resamples, block):
        chosen = generator.integers(0, count, size=(min(block, resamples - start), count))
        drawn, weights = residuals[chosen], weight[chosen]
        off = drawn.sum(axis=1) / weights.sum(axis=1)
        squares = ((drawn - off[:, None] * weights) ** 2).sum(axis=1)
        spread = np.sqrt(squares * count / (count - 1))
        kept = spread > least
        parts.append((off * weights.sum(axis=1))[kept] / spread[kept])
    return np.concatenate(parts)


def wilson_interval(right: float, *, documents: int) -> tuple[float, float]:
    """Two-sided 95 % interval of a share, of at least one document.

    Wilson (Journal of the American Statistical Association 22, 1927): never empty, not even where all is right.
    """
    share = right / documents
    scale = 1 + Z95**2 / documents
    middle = share + Z95**2 / (2 * documents)
    reach = Z95 * math.sqrt(share * (1 - share) / documents + Z95**2 / (4 * documents**2))
    return (middle - reach) / scale, (middle + reach) / scale


def normal_interval(value: float, stderr: float | None) -> tuple[float, float] | None:
    """Two-sided 95 % interval of 1.96 standard errors; None where the error isn't known."""
    return None if stderr is None else (value - Z95 * stderr, value + Z95 * stderr)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's adjusted p of each value, in the order given (Scandinavian Journal of Statistics 6, 1979)."""
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return tuple(adjusted)


def holm_claims(claims: Mapping[str, Callable[[int], bool]]) -> frozenset[str]:
    """Names of the claims that hold together: Holm's step-down procedure without p values.

    Each claim tells whether it would hold with its error divided by so many. The error of all is that of one.
    """
    left, held = dict(claims), frozenset[str]()
    while left:
        now = {name for name, holds in left.items() if holds(len(left))}
        if not now:
            break
        held |= now
        left = {name: holds for name, holds in left.items() if name not in now}
    return held


def group_score(
    scores: Sequence[float], *, documents: Sequence[int], stderrs: Sequence[float | None]
) -> GroupScore:
    """The scores of a group's tasks as one: weighted by documents, with the plain mean of tasks beside it.

    The weighted mean's standard error is √Σ (share of the documents × standard error)², None where a task has none.
    Raises ValueError for lists of other lengths or a task without documents.
    """
    if not len(scores) == len(documents) == len(stderrs) or not scores or min(documents) < 1:
        raise ValueError("a group needs a score, a standard error or None, and documents for each task")
    total = sum(documents)
    shares = [count / total for count in documents]
    known = [error for error in stderrs if error is not None]
    errors = (
        (share * error for share, error in zip(shares, known, strict=True))
        if len(known) == len(stderrs)
        else None
    )
    return GroupScore(
        documents=total,
        weighted=math.fsum(share * score for share, score in zip(shares, scores, strict=True)),
        plain=math.fsum(scores) / len(scores),
        weighted_stderr=None if errors is None else math.sqrt(math.fsum(error**2 for error in errors)),
    )


def non_inferiority(lower_bound_of_drop: float, upper_bound_of_drop: float, margin: float) -> Decision:
    """Whether a drop is surely under the margin, surely not, or can't be told from these bounds.

    Raises ValueError on NaN, which would otherwise compare false and slip through.
    """
    if any(math.isnan(value) for value in (lower_bound_of_drop, upper_bound_of_drop, margin)):
        raise ValueError("a bound or margin is NaN")
    if upper_bound_of_drop < margin:
        return "pass"
    if lower_bound_of_drop >= margin:
        return "fail"
    return "inconclusive"


def normal_quantile(probability: float) -> float:
    """Of the standard normal distribution; ValueError for a confidence or power outside 0.5 … 1."""
    if not 0.5 < probability < 1:
        raise ValueError(f"a confidence or power must lie between 0.5 and 1, not {probability}")
    return NormalDist().inv_cdf(probability)
