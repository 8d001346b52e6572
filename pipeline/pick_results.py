"""Which variant is the best of those that ship, and which trades none of them beats, as values.

>>> Pick(prefer=None, variant=None, because="no candidate ships").front
()
"""

from __future__ import annotations

from typing import Literal

from pipeline.values import Value

Preference = Literal["cheapest", "fastest", "smallest", "best_quality"]


class Trade(Value):
    """One variant's place among those that ship; what wasn't measured, or can't be true, is None.

    `decode_tokens_per_s` is at the recipe's first batch size; `quality` is against the baseline in the unit that
    `Pick.quality_unit` names, more being better. `beaten_by` is at least as good in all three, and better in one by
    more than its noise; a variant that nobody beats is on the front.
    """

    variant: str
    decode_tokens_per_s: float | None
    resident_bytes: int | None
    quality: float | None
    beaten_by: str | None = None


class Pick(Value):
    """The best variant by the recipe's preference, if it names one, and the trades of all that ship.

    `tied` have exactly the same figure; `within_noise` have intervals that meet the picked one's.
    """

    prefer: Preference | None
    variant: str | None
    because: str
    tied: tuple[str, ...] = ()
    within_noise: tuple[str, ...] = ()
    quality_unit: str | None = None
    trades: tuple[Trade, ...] = ()

    @property
    def front(self) -> tuple[str, ...]:
        """The variants on the Pareto front of decode rate, resident bytes and quality, in the recipe's order."""
        return tuple(trade.variant for trade in self.trades if trade.beaten_by is None)
