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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipeline.distribution_results import BaselineDistance, DistributionWindow
from pipeline.statistics import ratio_standard_error

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


def quantile_bounds(
    windows: Sequence[DistributionWindow], quantile: float, *, confidence: float, resamples: int = 2000
) -> tuple[float, float]:
    """One-sided bounds of a percentile of KL over tokens, by drawing whole windows with replacement.

    Percentile bootstrap (Efron & Tibshirani, 1993, chapter 13) over windows, because a window's tokens go together.
    """
    import numpy as np

    values = np.array([window.kl_nats for window in windows])
    generator = np.random.default_rng(0)
    count = len(values)
    drawn = [
        float(np.quantile(values[generator.integers(0, count, size=count)], quantile))
        for _ in range(resamples)
    ]
    low, high = np.quantile(drawn, (1 - confidence, confidence))
    return float(low), float(high)


def share_bounds(successes: int, *, trials: int, confidence: float) -> tuple[float, float]:
    """One-sided Clopper–Pearson bounds of a share (Biometrika 26, 1934): wide even at 0 and at all."""
    from scipy.special import betaincinv

    low = 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, 1 - confidence))
    high = 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, confidence))
    return low, high
