"""What the serving stage measures: the same requests in static batches and continuously batched. Units in the names.

>>> ServingCell(mode="continuous", load="closed", concurrency=4).name
'continuous, 4 at once'
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.measured import Distribution, Outcome, StageFailure
from pipeline.simulation import Percentiles
from pipeline.speed_results import MachineState
from pipeline.step_times import MeasuredSteps
from pipeline.traffic import Request
from pipeline.values import Value

ServingMode = Literal["static", "continuous"]
ServingLoop = Literal["closed", "open"]
"""Closed: a client with so many requests under way that sends the next one when one ends. Open: requests come when
they come."""


class ServingCell(Value):
    """What one row of the serving stage runs.

    `concurrency` is the size of a static batch, the requests that a closed loop has under way, or the most that
    the engine holds at once in an open loop. `offered_requests_per_s` is an open loop's mean rate of arrival.
    """

    mode: ServingMode
    load: ServingLoop
    concurrency: int
    offered_requests_per_s: float | None = None

    @property
    def name(self) -> str:
        """For progress and notes."""
        if self.load == "open":
            rate = self.offered_requests_per_s
            return f"{self.mode}, open loop" + (f" of {rate:.4g} requests/s" if rate else "")
        return f"{self.mode}, {self.concurrency} at once"


class ServedRequest(Value):
    """One request's times in one repeat, in seconds from the repeat's start.

    `arrival_s` is when it was submitted (closed loop), came (open loop) or its batch began (static); `start_s` the
    start of the step that first computed something of it, None where the engine doesn't tell.
    """

    prompt_tokens: int
    new_tokens: int
    arrival_s: float
    start_s: float | None
    first_token_s: float
    end_s: float


class LatencyShares(Value):
    """Of the time from arrival to last token, summed over requests: waiting, in prefill, in decode. They add to 1."""

    waiting: float
    prefill: float
    decode: float


class Goodput(Value):
    """Requests that met every target: a second, over the time of all repeats, and as a share of all."""

    requests_per_s: float
    share: float


class ServingRow(ServingCell):
    """One cell of one variant; rows exist for cells that failed, too.

    Rates are medians over repeats, of tokens that were counted; input and output are never added. Percentiles are
    over the requests (ITL: the gaps) of all repeats. `gain` is continuous ÷ static output tokens a second, repeat by
    repeat, in a continuous row of a closed loop. `mean_batch` is the mean number of sequences that got a token in a
    step, weighted by the step's time: tokens of padding or past a request's end are in no figure. `overloaded`: see
    `simulation.Replay.overloaded`, None where it can't be told or doesn't apply. `repeats` holds the raw times.
    """

    outcome: Outcome
    because: str = ""
    requests: int = 0
    duration_s: Distribution | None = None
    output_tokens_per_s: Distribution | None = None
    input_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    gain: Distribution | None = None
    ttft_s: Percentiles | None = None
    tpot_s: Percentiles | None = None
    itl_s: Percentiles | None = None
    latency_s: Percentiles | None = None
    wait_s: Percentiles | None = None
    latency_shares: LatencyShares | None = None
    goodput: Goodput | None = None
    steps: int | None = None
    mean_batch: float | None = None
    prefill_tokens: int | None = None
    preemptions: int | None = None
    overloaded: bool | None = None
    peak_memory_bytes: int | None = None
    kv_cache_bytes: int | None = None
    warmup_s: tuple[float, ...] = ()
    noisy: bool = False
    repeats: tuple[tuple[ServedRequest, ...], ...] = ()


class PrefixRow(Value):
    """Prefill with a prefix in the cache: requests of one prefix and a fresh rest, one at a time.

    The first of each repeat finds an empty cache (`cold`), the later ones its prefix in it (`cached`).
    `..._computed_tokens` are the prompt tokens that one request's steps really computed, the most of all repeats;
    `reused_tokens` the fewest that a later request didn't have to.
    """

    prefix_tokens: int
    fresh_tokens: int
    outcome: Outcome
    because: str = ""
    cold_ttft_s: Distribution | None = None
    cached_ttft_s: Distribution | None = None
    cold_computed_tokens: int | None = None
    cached_computed_tokens: int | None = None
    reused_tokens: int | None = None
    noisy: bool = False

    @property
    def times_faster(self) -> float | None:
        """Cold ÷ cached TTFT, of the medians."""
        if self.cold_ttft_s is None or self.cached_ttft_s is None:
            return None
        return self.cold_ttft_s.median / self.cached_ttft_s.median


class ServingResult(Value):
    """What the serving stage measured of one variant. `step_times` are fitted to the continuous rows' steps."""

    engine: str
    device: str
    compute_dtype: str
    static_execution: str
    continuous_execution: str
    rows: tuple[ServingRow, ...]
    prefix: PrefixRow | None = None
    step_times: MeasuredSteps | None = None
    notes: tuple[str, ...] = ()

    def row(self, mode: ServingMode, load: ServingLoop, concurrency: int) -> ServingRow | None:
        """The row of a cell, if it was asked for."""
        return next(
            (r for r in self.rows if (r.mode, r.load, r.concurrency) == (mode, load, concurrency)), None
        )


class ServingCost(ServingCell):
    """Price of a million tokens at a cell's measured rates: $/h ÷ (tok/s × 3600 s/h) × 1e6.

    Either price pays for the whole hour: output tokens with their prompts included, or input tokens with their
    answers included. They must not be added.
    """

    dollars_per_million_output_tokens: float
    dollars_per_million_input_tokens: float


class ServingStageResult(Value):
    """The serving stage over the whole set of variants; `failures` tells which variants have no result."""

    machine_before: MachineState
    machine_after: MachineState
    alternated: bool
    requests: tuple[Request, ...]
    variants: dict[str, ServingResult]
    failures: dict[str, StageFailure] = Field(default_factory=dict)
