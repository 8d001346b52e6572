"""How long one step of a serving engine takes, from what is in it.

A step of continuous batching holds some sequences that decode (one token each) and some tokens of prompts.
`RooflineSteps` tells its time from sizes and limits, before anything is measured; `MeasuredSteps` from steps
that were timed. Both also tell the time of many decode steps in a row in closed form, so that a simulation can
jump over them. Pure.

A step is told in four numbers: `prefill_tokens`; `decode_sequences`; `cached_tokens`, the tokens that
its sequences have in the cache before it; `pairs`, its (query, key) pairs: a decoding sequence with c tokens in
the cache has c + 1, a piece of n prompt tokens behind d others n·d + n·(n + 1) ÷ 2.

>>> class Weights:
...     def bytes(self, tokens: int) -> float:
...         return 54e9
>>> steps = RooflineSteps(
...     weights=Weights(), kv_bytes_per_token=0, flops_per_token=54e9,
...     bandwidth_bytes_per_s=3.35e12, peak_flops_per_s=989e12)
>>> round(1 / steps.step_s(prefill_tokens=0, decode_sequences=1, cached_tokens=0, pairs=1), 1)
62.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from pipeline.errors import StageError
from pipeline.values import Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class StepTimes(Protocol):
    """What a simulation asks of step times."""

    def step_s(self, *, prefill_tokens: int, decode_sequences: int, cached_tokens: int, pairs: int) -> float:
        """Seconds of one step; above 0 for a step that isn't empty."""

    def decode_steps_s(self, steps: int, *, sequences: int, cached_tokens: int) -> float:
        """Seconds of `steps` steps in which `sequences` sequences decode and none ends.

        `cached_tokens` are those before the first step; each step adds one for each sequence. Equal to the sum
        of `step_s` over the steps, up to rounding.
        """


class ReadsWeights(Protocol):
    """Weights that a step reads."""

    def bytes(self, tokens: int) -> float:
        """Bytes of weights that a step of `tokens` tokens reads; more tokens touch more experts."""


@dataclass(frozen=True, kw_only=True)
class RooflineSteps:
    """The longer of reading and computing, plus a fixed overhead (the roofline, applied to each step).

    Reading: weights, the cached tokens' KV cache and a decoding sequence's constant state (recurrent state;
    a windowed layer counts here with its full window), at `bandwidth_efficiency` of the bandwidth. Computing:
    `flops_per_token` (2 for each weight that a token uses, and window × FLOPs a pair for windowed layers),
    `head_flops` for each token that is given out (a decoding sequence's; one of the prompts in a step) and
    attention's `flops_per_pair`, at `flops_efficiency` of the peak. Raises ValueError on a figure out of range.
    """

    weights: ReadsWeights
    kv_bytes_per_token: float
    flops_per_token: float
    bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    state_bytes: float = 0.0
    head_flops: float = 0.0
    flops_per_pair: float = 0.0
    bandwidth_efficiency: float = 1.0
    flops_efficiency: float = 1.0
    overhead_s: float = 0.0
    _weights_s: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("flops_per_token", "bandwidth_bytes_per_s", "peak_flops_per_s"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        for name in ("kv_bytes_per_token", "state_bytes", "head_flops", "flops_per_pair", "overhead_s"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("bandwidth_efficiency", "flops_efficiency"):
            _check(name, getattr(self, name), 0 < getattr(self, name) <= 1, "above 0 and at most 1")

    def step_s(self, *, prefill_tokens: int, decode_sequences: int, cached_tokens: int, pairs: int) -> float:
        """Seconds of one step."""
        tokens = prefill_tokens + decode_sequences
        kv_bytes = cached_tokens * self.kv_bytes_per_token + decode_sequences * self.state_bytes
        reading_s = self._weights_reading_s(tokens) + kv_bytes * self._byte_s
        given_out = decode_sequences + (prefill_tokens > 0)
        flops = tokens * self.flops_per_token + given_out * self.head_flops + pairs * self.flops_per_pair
        computing_s = flops * self._flop_s
        return max(reading_s, computing_s) + self.overhead_s

    def decode_steps_s(self, steps: int, *, sequences: int, cached_tokens: int) -> float:
        """Seconds of `steps` decode steps: reading and computing both grow by a constant from step to step.

        So the longer one is either the same throughout or changes once, and each stretch is an arithmetic
        series: exact, in constant time.
        """
        kv_bytes = cached_tokens * self.kv_bytes_per_token + sequences * self.state_bytes
        flops = sequences * (self.flops_per_token + self.head_flops)
        flops += (cached_tokens + sequences) * self.flops_per_pair
        reading = (
            self._weights_reading_s(sequences) + kv_bytes * self._byte_s,
            sequences * self.kv_bytes_per_token * self._byte_s,
        )
        computing = flops * self._flop_s, sequences * self.flops_per_pair * self._flop_s
        # Seconds of the first step, then growth from step to step: the pair that is longer at first is the greater.
        longer, other = (reading, computing) if reading > computing else (computing, reading)
        first = steps
        if other[1] > longer[1]:
            first = min(steps, math.floor((longer[0] - other[0]) / (other[1] - longer[1])) + 1)
        total = _series(longer, 0, first) + steps * self.overhead_s
        return total if first == steps else total + _series(other, first, steps - first)

    @cached_property
    def _byte_s(self) -> float:
        return 1 / (self.bandwidth_bytes_per_s * self.bandwidth_efficiency)

    @cached_property
    def _flop_s(self) -> float:
        return 1 / (self.peak_flops_per_s * self.flops_efficiency)

    def _weights_reading_s(self, tokens: int) -> float:
        found = self._weights_s.get(tokens)
        if found is None:
            found = self._weights_s[tokens] = self.weights.bytes(tokens) * self._byte_s
        return found


def _series(line: tuple[float, float], first: int, count: int) -> float:
    """Sum of start + growth · i over `count` values of i from `first`."""
    start, growth = line
    return count * (start + growth * (first + (count - 1) / 2))


def _check(name: str, value: float, holds: bool, allowed: str) -> None:
    if not (math.isfinite(value) and holds):
        raise ValueError(f"{name} must be a finite number {allowed}, is {value!r}")


# --- from measurements -----------------------------------------------------------------------------------

Term = Literal["step", "batched", "prefill_token", "decode_sequence", "cached_token", "pair", "masked_pair"]
TERMS: tuple[Term, ...] = get_args(Term)
"""What seconds are given to: every step; a step of more than one token (a matrix product in place of a
matrix-vector product); a token of a prompt; a decoding sequence; a token in the cache; a (query, key) pair; a
pair of any query and any key of the step, for engines that compute all of them and mask most."""


class StepSample(Value):
    """One timed step, in the numbers that `StepTimes` takes; those of a mean step may be broken."""

    seconds: float
    prefill_tokens: int
    decode_sequences: int
    cached_tokens: float
    pairs: float


class BatchTimes(Value):
    """A static batch, timed: prompts of `prompt_tokens` prefilled at once, then decoded to `new_tokens`.

    `ttft_s` is the prefill's time, `tpot_s` that of a decode step, the mean over the answer (None with one
    new token).
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    tpot_s: float | None


class MeasuredSteps(Value):
    """Step times as a sum of terms, fitted to steps that were timed.

    `seconds` holds each term's, all at least 0; a term that isn't there counts 0. `median_error` and
    `p90_error` are relative deviations of the fitted steps' times, `total_error` that of their sum (positive:
    the fit is slower).
    """

    seconds: dict[Term, float]
    samples: int
    median_error: float
    p90_error: float
    total_error: float

    def step_s(self, *, prefill_tokens: int, decode_sequences: int, cached_tokens: int, pairs: int) -> float:
        """Seconds of one step."""
        tokens = prefill_tokens + decode_sequences
        return self._sum(tokens, prefill_tokens, decode_sequences, cached_tokens, pairs)

    def decode_steps_s(self, steps: int, *, sequences: int, cached_tokens: int) -> float:
        """Seconds of `steps` decode steps: every term grows linearly, so it's steps × the middle one."""
        middle = cached_tokens + sequences * (steps - 1) / 2
        return steps * self._sum(sequences, 0, sequences, middle, middle + sequences)

    def _sum(self, tokens: int, prefill: int, decode: int, cached: float, pairs: float) -> float:
        get = self.seconds.get
        return (
            get("step", 0.0)
            + (get("batched", 0.0) if tokens > 1 else 0.0)
            + prefill * get("prefill_token", 0.0)
            + decode * get("decode_sequence", 0.0)
            + cached * get("cached_token", 0.0)
            + pairs * get("pair", 0.0)
            + tokens * (cached + tokens) * get("masked_pair", 0.0)
        )


def fit_step_times(samples: Sequence[StepSample], *, terms: Sequence[Term]) -> MeasuredSteps:
    """Seconds of each term, none below 0, by least squares of relative errors.

    Weighted by the fit's own times, round by round, so that short steps count as much as long ones and a
    noisy step pulls neither way. Raises StageError when the samples can't tell the terms apart.
    """
    import numpy as np
    from scipy.optimize import nnls

    if any(not (math.isfinite(sample.seconds) and sample.seconds > 0) for sample in samples):
        raise StageError("a step's seconds must be finite and above 0")
    table = _table(samples, terms)
    unknown = _undetermined(table, terms)
    if unknown:
        raise StageError(
            f"{len(samples)} timed steps can't tell these apart: {', '.join(unknown)}; time steps that differ "
            "in batch size, prompt length and depth"
        )
    seconds = np.array([sample.seconds for sample in samples])
    scale = np.abs(table).max(axis=0)
    weight = 1 / seconds
    for _ in range(4):
        solution = nnls(table / scale * weight[:, None], seconds * weight)[0] / scale
        fitted = table @ solution
        weight = 1 / np.maximum(fitted, 1e-3 * seconds)
    errors = np.abs(fitted / seconds - 1)
    return MeasuredSteps(
        seconds=dict(zip(terms, solution.tolist(), strict=True)),
        samples=len(samples),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        total_error=float(fitted.sum() / seconds.sum() - 1),
    )


def step_times_of_batches(rows: Sequence[BatchTimes]) -> MeasuredSteps:
    """Step times from static batches, as a speed stage times them.

    A batch gives a prefill step and a decode step at the answer's mean depth. Takes the terms that the rows can
    tell apart, in this order: step, prefill_token, decode_sequence, cached_token, pair; with a single prompt
    length the cost of depth stays inside the others, right near that length. Raises StageError when not
    even the first three can be told apart: at least two batch sizes are needed.
    """
    samples = [sample for row in rows for sample in _batch_samples(row)]
    terms: list[Term] = ["step", "prefill_token", "decode_sequence"]
    for term in ("cached_token", "pair"):
        wider: list[Term] = [*terms, term]
        if samples and not _undetermined(_table(samples, wider), wider):
            terms = wider
    return fit_step_times(samples, terms=terms)


def _batch_samples(row: BatchTimes) -> list[StepSample]:
    batch, prompt = row.batch_size, row.prompt_tokens
    prefill = StepSample(
        seconds=row.ttft_s,
        prefill_tokens=batch * prompt,
        decode_sequences=0,
        cached_tokens=0,
        pairs=batch * prompt * (prompt + 1) / 2,
    )
    if row.tpot_s is None:
        return [prefill]
    # Decode steps start with the prompt in the cache and end new_tokens − 2 tokens deeper.
    cached = batch * (prompt + max(row.new_tokens - 2, 0) / 2)
    decode = StepSample(
        seconds=row.tpot_s,
        prefill_tokens=0,
        decode_sequences=batch,
        cached_tokens=cached,
        pairs=cached + batch,
    )
    return [prefill, decode]


def _table(samples: Sequence[StepSample], terms: Sequence[Term]) -> Floats:
    """How often each term counts in each sample, shape [samples, terms]."""
    import numpy as np

    rows = [[_count(sample, term) for term in terms] for sample in samples]
    return np.array(rows, dtype=np.float64).reshape(len(samples), len(terms))


def _count(sample: StepSample, term: Term) -> float:
    tokens = sample.prefill_tokens + sample.decode_sequences
    counts: dict[Term, float] = {
        "step": 1,
        "batched": tokens > 1,
        "prefill_token": sample.prefill_tokens,
        "decode_sequence": sample.decode_sequences,
        "cached_token": sample.cached_tokens,
        "pair": sample.pairs,
        "masked_pair": tokens * (sample.cached_tokens + tokens),
    }
    return counts[term]


def _undetermined(table: Floats, terms: Sequence[Term]) -> list[Term]:
    """The terms that are a combination of those before them, or that no sample holds."""
    import numpy as np

    scaled = table / np.maximum(np.abs(table).max(axis=0, initial=0.0), 1e-300)
    found: list[Term] = []
    rank = 0
    for place, term in enumerate(terms):
        wider = int(np.linalg.matrix_rank(scaled[:, : place + 1], tol=1e-6)) if len(table) else 0
        if wider == rank:
            found.append(term)
        rank = wider
    return found
