"""Distances between two models' next-token distributions, token by token and in sum. Pure.

The baseline's distribution comes from disk, 16 bits a value: the logarithms of one position lie on 65,536 equal
steps between its largest and the smaller of its smallest and 32 nats below (what is still less likely counts as
that). Read back, each position is normalised again, so that KL is never below 0 by more than FP32's rounding. With h
half a step (at most 2.5e-4 nats) and L the logarithm of the ratio of both probabilities, a position's KL is off by at
most h · E|L − KL| + h².

>>> import numpy
>>> uniform = numpy.full((1, 256), -numpy.log(256), dtype=numpy.float32)
>>> figures = perplexity_figures([60.0], units=[60.0 / float(numpy.log(256))])
>>> round(figures.value)
256
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipeline.distribution_results import BaselineDistance, DistributionWindow
from pipeline.statistics import paired_bootstrap, ratio_standard_error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Codes = NDArray[np.uint16]
    Ids = NDArray[np.int64]

RANGE_NATS = 32.0
"""Below the most likely token; 262,144 tokens there hold 3e-9 of the probability together."""
STEPS = 65535
TOP = 5
BEYOND_NATS = 700.0
"""exp of more is no finite number."""
FEWEST_WINDOWS = 4
"""Of fewer the spread can't be told well enough for a mean to be called small."""


class Estimate(NamedTuple):
    """A figure and its standard error over windows; None where it isn't finite or there is one window."""

    value: float | None
    stderr: float | None


@dataclass(frozen=True)
class Block:
    """Positions of one model: log-probabilities [positions, vocabulary], the text's own token, the likeliest five."""

    log_probs: Floats
    targets: Ids
    top: Ids


@dataclass(frozen=True)
class CodedBlock:
    """The same as it lies on disk: codes [positions, vocabulary] of `floor` + code × `step` nats.

    `target_log_prob` and `top` are those before coding, so that no tie is made by it.
    """

    codes: Codes
    floor: Floats
    step: Floats
    target_log_prob: Floats
    top: Ids


@dataclass(frozen=True)
class TokenDistances:
    """Figures of each position, all [positions]."""

    nats: NDArray[np.float64]
    baseline_nats: NDArray[np.float64]
    kl_nats: NDArray[np.float64]
    same_top1: NDArray[np.bool_]
    top5_share: NDArray[np.float64]
    probability_difference: NDArray[np.float64]


def target_log_probs(block: Block) -> Floats:
    """Log-probability of the text's own token at each position."""
    import numpy as np

    found: Floats = np.take_along_axis(block.log_probs, block.targets[:, None], axis=1)[:, 0]
    return found


def encode(block: Block) -> CodedBlock:
    """16 bits a value; the log-probabilities must be finite."""
    import numpy as np

    highest = block.log_probs.max(axis=1)
    floor = np.maximum(block.log_probs.min(axis=1), highest - np.float32(RANGE_NATS))
    step = (highest - floor) / np.float32(STEPS)
    scaled = (block.log_probs - floor[:, None]) / np.where(step > 0, step, np.float32(1))[:, None]
    codes = np.clip(np.rint(scaled), 0, STEPS).astype(np.uint16)
    return CodedBlock(
        codes=codes, floor=floor, step=step, target_log_prob=target_log_probs(block), top=block.top
    )


def compare(block: Block, baseline: CodedBlock) -> TokenDistances:
    """Figures of each position of a model against the baseline's at the same positions of the same text."""
    import numpy as np

    log_p = baseline.codes * baseline.step[:, None] + baseline.floor[:, None]
    p = np.exp(log_p)
    total = p.sum(axis=1, dtype=np.float64)
    p *= log_p - block.log_probs
    # Σ p(ln p − ln p̂) ÷ Σ p − ln Σ p: what normalising p would give, without another pass over it.
    divergence = p.sum(axis=1, dtype=np.float64) / total - np.log(total)
    mine, theirs = target_log_probs(block).astype(np.float64), baseline.target_log_prob.astype(np.float64)
    shared = (block.top[:, :, None] == baseline.top[:, None, :]).any(axis=2).mean(axis=1)
    return TokenDistances(
        nats=-mine,
        baseline_nats=-theirs,
        kl_nats=divergence,
        same_top1=block.top[:, 0] == baseline.top[:, 0],
        top5_share=shared,
        probability_difference=np.exp(mine) - np.exp(theirs),
    )


def joined(parts: Sequence[TokenDistances]) -> TokenDistances:
    """Positions of several blocks as one."""
    import numpy as np

    names = TokenDistances.__dataclass_fields__
    return TokenDistances(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def perplexity_figures(nats: Sequence[float], *, units: Sequence[float]) -> Estimate:
    """exp(Σ nats ÷ Σ units) over windows; the unit is a token, a word or a byte."""
    mean = ratio(nats, weights=units)
    if mean.value is None or mean.value > BEYOND_NATS:
        return Estimate(None, None)
    value = math.exp(mean.value)
    return Estimate(value, None if mean.stderr is None else value * mean.stderr)


def ratio(totals: Sequence[float], *, weights: Sequence[float]) -> Estimate:
    """Σ totals ÷ Σ weights over windows, with its standard error."""
    weight = math.fsum(weights)
    if weight <= 0:
        return Estimate(None, None)
    value = math.fsum(totals) / weight
    return Estimate(value, ratio_standard_error(totals, weights) if len(totals) > 1 else None)


def summarise(distances: TokenDistances, *, window_tokens: int) -> BaselineDistance:
    """All figures against the baseline; each `window_tokens` positions are one window."""
    import numpy as np

    count = len(distances.kl_nats) // window_tokens
    weights = [float(window_tokens)] * count

    def mean(values: Iterable[float]) -> tuple[float, float | None]:
        parts = np.asarray(values, dtype=np.float64).reshape(count, window_tokens).sum(axis=1)
        found = ratio(parts.tolist(), weights=weights)
        assert found.value is not None, "windows without tokens"
        return found.value, found.stderr

    kl, top1, top5 = (mean(one) for one in (distances.kl_nats, distances.same_top1, distances.top5_share))
    shift, grown = mean(distances.probability_difference), mean(distances.nats - distances.baseline_nats)
    median, p99, p999 = (float(one) for one in np.quantile(distances.kl_nats, (0.5, 0.99, 0.999)))
    return BaselineDistance(
        kl_mean_nats=kl[0],
        kl_mean_nats_stderr=kl[1],
        kl_median_nats=median,
        kl_p99_nats=p99,
        kl_p999_nats=p999,
        kl_max_nats=float(distances.kl_nats.max()),
        top1_agreement_share=top1[0],
        top1_agreement_share_stderr=top1[1],
        top5_agreement_share=top5[0],
        top5_agreement_share_stderr=top5[1],
        probability_difference_rms=math.sqrt(float(np.mean(distances.probability_difference**2))),
        probability_difference_mean=shift[0],
        probability_difference_mean_stderr=shift[1],
        log_perplexity_ratio=grown[0],
        log_perplexity_ratio_stderr=grown[1],
        baseline_token_perplexity=perplexity_figures(
            [float(distances.baseline_nats.sum())], units=[float(len(distances.baseline_nats))]
        ).value,
    )


def mean_bounds(sums: Sequence[float], *, weights: Sequence[float], confidence: float) -> tuple[float, float]:
    """One-sided bounds of Σ sums ÷ Σ weights of something that is never below 0, over at least two windows.

    Each is the wider of Student's t with resampled quantiles (`paired_bootstrap`) and of the bound of a lognormal
    distribution's mean. docs/gate.md says how often they err.
    """
    found = paired_bootstrap([0.0] * len(sums), sums, weights=weights, confidence=confidence).interval
    assert found is not None, "two windows at least"
    lower, upper = found.lower, found.upper
    means = [one / weight for one, weight in zip(sums, weights, strict=True)]
    if min(means) > 0:
        low, high = _lognormal_bounds([math.log(mean) for mean in means], confidence=confidence)
        lower, upper = min(lower, low), max(upper, high)
    return max(0.0, lower), upper


def _lognormal_bounds(logs: Sequence[float], *, confidence: float) -> tuple[float, float]:
    """exp of ȳ + s² ÷ 2 ± t √(s² ÷ n + s⁴ ÷ (2n − 2)), ȳ and s² being the logarithms' mean and variance.

    Cox's method with t: Olsson, Journal of Statistics Education 13(1), 2005.
    """
    from scipy.special import stdtrit

    count = len(logs)
    middle = math.fsum(logs) / count
    variance = math.fsum((one - middle) ** 2 for one in logs) / (count - 1)
    reach = float(stdtrit(count - 1, confidence)) * math.sqrt(
        variance / count + variance**2 / (2 * (count - 1))
    )
    centre = middle + variance / 2
    # Beyond the largest finite number nothing is known.
    return math.exp(min(centre - reach, BEYOND_NATS)), math.exp(min(centre + reach, BEYOND_NATS))


def share_above(
    windows: Sequence[DistributionWindow], limit_nats: float, *, confidence: float
) -> tuple[float, float]:
    """One-sided bounds of the share of tokens whose KL is above a limit."""
    counts = [sum(value > limit_nats for value in window.kl_nats) for window in windows]
    return clustered_share_bounds(counts, trials=[window.tokens for window in windows], confidence=confidence)


def quantile_bounds(
    windows: Sequence[DistributionWindow], quantile: float, *, limit_nats: float, confidence: float
) -> tuple[float, float | None]:
    """One-sided bounds of a percentile of KL over tokens: limits that its share of tokens surely is above and under.

    The bounds agree with what `share_above` says of `limit_nats`. 0 or None where the text is too short for a bound.
    """
    import numpy as np

    values = np.unique(np.concatenate([window.kl_nats for window in windows])).tolist()

    def bound(which: int) -> tuple[float | None, float | None]:
        return _boundary(
            values,
            limit_nats,
            lambda nats: share_above(windows, nats, confidence=confidence)[which] >= 1 - quantile,
        )

    return bound(0)[0] or 0.0, bound(1)[1]


def _boundary(
    values: Sequence[float], limit: float, holds: Callable[[float], bool]
) -> tuple[float | None, float | None]:
    """The last of rising values at which something holds and the first at which it doesn't; it ends to hold once.

    `limit` is among the values, and what holds there is never contradicted.
    """
    holds_at_limit = holds(limit)
    side = [value for value in values if (value > limit if holds_at_limit else value < limit)]
    place = bisect_left(side, True, key=lambda value: not holds(value))
    values = [limit, *side] if holds_at_limit else [*side, limit]
    place += holds_at_limit
    return values[place - 1] if place else None, values[place] if place < len(values) else None


def clustered_share_bounds(
    successes: Sequence[int], *, trials: Sequence[int], confidence: float
) -> tuple[float, float]:
    """One-sided bounds of Σ successes ÷ Σ trials over at least two windows, whose trials go together.

    Clopper and Pearson's with as many trials as are worth it: divided by how much more the share varies between
    windows than by chance, and by (t ÷ z)² for having that from a few windows (Korn and Graubard, Survey Methodology
    24, 1998, 193-201); never closer than Clopper and Pearson's of all, nor than Student's t over windows.
    """
    from scipy.special import ndtri, stdtrit

    count, total = len(successes), sum(trials)
    share = sum(successes) / total
    error = ratio_standard_error([float(one) for one in successes], [float(one) for one in trials])
    quantile = float(stdtrit(count - 1, confidence))
    by_chance = share * (1 - share) / total
    excess = max(1.0, error**2 / by_chance) if by_chance > 0 else 1.0
    worth = total / max(1.0, excess * (quantile / float(ndtri(confidence))) ** 2)
    low, high = share_bounds(share * worth, trials=worth, confidence=confidence)
    return max(0.0, min(low, share - quantile * error)), min(1.0, max(high, share + quantile * error))


def share_bounds(successes: float, *, trials: float, confidence: float) -> tuple[float, float]:
    """One-sided Clopper–Pearson bounds of a share (Biometrika 26, 1934): wide even at 0 and at all."""
    from scipy.special import betaincinv

    low = 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, 1 - confidence))
    high = 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, confidence))
    return low, high
