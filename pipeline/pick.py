"""The best variant of those that ship, by what the recipe prefers, and the trades that none of them beats. Pure.

Only variants with the verdict `ship` are looked at, optional ones too; the baseline isn't, for it is what they are
measured against. A figure that is missing, void or implausible never wins.

    pick = pick_variant(variants, baseline_name="fp16", prefer="fastest")
    pick.variant, pick.front
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.comparison import UnmeasuredError
from pipeline.pick_results import Pick, Preference, Trade
from pipeline.quality_change import QualityChange, shared_changes
from pipeline.readings import Reading, price, rate, smallest_batch
from pipeline.results import VariantReport

_WORDS: dict[Preference, str] = {
    "cheapest": "a million output tokens cost",
    "fastest": "decode rate",
    "smallest": "weights in memory",
    "best_quality": "quality against the baseline",
}


@dataclass(frozen=True)
class _Scale:
    """A figure of which less or more is better, the interval it may truly lie in, and its text."""

    value: float
    low: float
    high: float
    text: str
    less_is_better: bool = False

    def beats(self, other: _Scale | None) -> bool:
        """Whether the figure itself is better; any is better than none."""
        if other is None:
            return True
        return self.value < other.value if self.less_is_better else self.value > other.value

    def surely_beats(self, other: _Scale | None) -> bool:
        """Whether it is better and the two intervals don't meet."""
        if other is None:
            return True
        return self.high < other.low if self.less_is_better else self.low > other.high


@dataclass(frozen=True)
class _Candidate:
    """A variant that ships, on every scale it has a figure for."""

    variant: VariantReport
    speed: _Scale | None
    memory: _Scale | None
    quality: _Scale | None
    price: _Scale | None

    def on(self, prefer: Preference) -> _Scale | None:
        """Its figure of a preference."""
        scales = {"cheapest": self.price, "fastest": self.speed, "smallest": self.memory}
        return self.quality if prefer == "best_quality" else scales[prefer]

    def surely_beats(self, other: _Candidate) -> bool:
        """At least as good on every scale, and better on one by more than the noise of both."""
        ours, theirs = (self.speed, self.memory, self.quality), (other.speed, other.memory, other.quality)
        pairs = list(zip(ours, theirs, strict=True))
        if any(their is not None and (our is None or their.beats(our)) for our, their in pairs):
            return False
        return any(our is not None and our.surely_beats(their) for our, their in pairs)


def pick_variant(variants: Sequence[VariantReport], *, baseline_name: str, prefer: Preference | None) -> Pick:
    """What to ship, if anything does. Without `prefer` nothing is picked: which trade is best isn't ours to say."""
    baseline = next((variant for variant in variants if variant.name == baseline_name), None)
    shipping = [variant for variant in variants if variant.verdict == "ship" and variant is not baseline]
    if baseline is None or not shipping:
        return Pick(prefer=prefer, variant=None, because="no candidate ships")
    changes = shared_changes(shipping, baseline=baseline)
    unit = next((change.unit for change in changes.values()), None)
    size = smallest_batch(variants)
    candidates = [
        _candidate(variant, change=changes.get(variant.name), batch_size=size) for variant in shipping
    ]
    picked = _by_preference(candidates, prefer) if prefer else _no_preference(candidates)
    trades = tuple(_trade(candidate, candidates) for candidate in candidates)
    return picked.model_copy(update={"trades": trades, "quality_unit": unit})


def _no_preference(candidates: Sequence[_Candidate]) -> Pick:
    """Where only one ships there is nothing to prefer."""
    if len(candidates) == 1:
        name = candidates[0].variant.name
        return Pick(prefer=None, variant=name, because="the only candidate that ships")
    return Pick(prefer=None, variant=None, because="several ship and the recipe names no preference")


def _by_preference(candidates: Sequence[_Candidate], prefer: Preference) -> Pick:
    measured = [(one.variant.name, scale) for one in candidates if (scale := one.on(prefer)) is not None]
    if not measured:
        text = f"{_WORDS[prefer]}: measured of no candidate that ships"
        return Pick(prefer=prefer, variant=None, because=text)
    name, best = measured[0]
    for other, scale in measured[1:]:
        if scale.beats(best):
            name, best = other, scale
    others = [(other, scale) for other, scale in measured if other != name]
    tied = tuple(other for other, scale in others if scale.value == best.value)
    close = tuple(other for other, scale in others if other not in tied and not best.surely_beats(scale))
    return Pick(
        prefer=prefer,
        variant=name,
        because=f"{_WORDS[prefer]} {best.text}{_beside(tied, close, of=len(measured))}",
        tied=tied,
        within_noise=close,
    )


def _beside(tied: Sequence[str], close: Sequence[str], *, of: int) -> str:
    """What must be known of a pick: ties, and differences that the noise may have made."""
    notes = []
    if tied:
        notes.append(f"the same as {' and '.join(tied)}; the first in the recipe is named")
    if close:
        notes.append(f"{' and '.join(close)} within noise of it")
    if not notes:
        return ", the best of those that ship" if of > 1 else ""
    return f" ({'; '.join(notes)})"


def _trade(candidate: _Candidate, candidates: Sequence[_Candidate]) -> Trade:
    better = (one.variant.name for one in candidates if one is not candidate and one.surely_beats(candidate))
    memory = candidate.variant.loaded_memory
    return Trade(
        variant=candidate.variant.name,
        decode_tokens_per_s=candidate.speed.value if candidate.speed else None,
        resident_bytes=memory.weight_bytes_resident if memory and candidate.memory else None,
        quality=candidate.quality.value if candidate.quality else None,
        beaten_by=next(better, None),
    )


# --- the scales ------------------------------------------------------------------------------------------


def _candidate(variant: VariantReport, *, change: QualityChange | None, batch_size: int | None) -> _Candidate:
    return _Candidate(
        variant=variant,
        speed=_speed(variant, batch_size),
        memory=_memory(variant),
        quality=None if change is None else _quality(change),
        price=_price(variant),
    )


def _reading(variant: VariantReport, batch_size: int | None) -> Reading | None:
    try:
        return None if batch_size is None else rate(variant, batch_size=batch_size, metric="decode")
    except UnmeasuredError:
        return None


def _speed(variant: VariantReport, batch_size: int | None) -> _Scale | None:
    reading = _reading(variant, batch_size)
    if reading is None:
        return None
    low, high = reading.interval or (reading.value, reading.value)
    text = f"{reading.value:.4g} tok/s at batch size {batch_size}"
    return _Scale(value=reading.value, low=low, high=high, text=text)


def _memory(variant: VariantReport) -> _Scale | None:
    """Exact: storages are counted, not sampled."""
    memory = variant.loaded_memory
    size = memory.weight_bytes_resident if memory else 0
    if size <= 0:
        return None
    return _Scale(value=size, low=size, high=size, text=f"{size / 1e6:,.1f} MB", less_is_better=True)


def _quality(change: QualityChange) -> _Scale:
    low = change.value if change.low is None else change.low
    high = change.value if change.high is None else change.high
    return _Scale(value=change.value, low=low, high=high, text=f"{change.value:+.3g} {change.unit}")


def _price(variant: VariantReport) -> _Scale | None:
    """$/1M output tokens, with the spread of the rate that it comes from."""
    try:
        reading = price(variant)
    except UnmeasuredError:
        return None
    assert variant.cost is not None, "price has looked"
    low, high = reading.interval or (reading.value, reading.value)
    return _Scale(
        value=reading.value,
        low=low,
        high=high,
        text=f"${reading.value:.4g} at batch size {variant.cost.batch_size}",
        less_is_better=True,
    )
