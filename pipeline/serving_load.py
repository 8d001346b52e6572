"""What the serving stage serves: the requests of a recipe, and the engine's limits for them. Pure.

Lengths and arrivals are those of the recipe's `traffic`, as the fleet's simulation has them; without it every
request is the workload's.

    load = serving_load(recipe, trace=())
    load.limits(concurrency=4)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.fleet import Targets
from pipeline.recipe import ExpandedRecipe
from pipeline.recipe_sections import TrafficSpec
from pipeline.scheduler import Serving
from pipeline.serving_results import ServingCell
from pipeline.traffic import Request, Traffic
from pipeline.values import Value

CACHED_REQUESTS = 3
"""Requests a repeat that find the prefix in the cache, after the one that put it there."""

PREFIX_NEW_TOKENS = 2
"""Of each of them."""


class ServingLoad(Value):
    """Requests in order, their limits on the engine, and what counts as a good answer.

    `cells` are the rows to run, `prefix_tokens` the prefix that is to be cached. Arrivals count from the first one.
    """

    requests: tuple[Request, ...]
    cells: tuple[ServingCell, ...]
    prefix_tokens: int | None
    block_tokens: int
    max_batch_tokens: int
    targets: Targets
    seed: int

    def limits(self, *, concurrency: int) -> Serving:
        """Room for the `concurrency` largest requests at once: the cache never makes one wait or begin again."""
        blocks = sorted(
            (self._blocks(one.prompt_tokens + one.new_tokens) for one in self.requests), reverse=True
        )
        return self._serving(concurrency, cache_blocks=sum(blocks[:concurrency]))

    @property
    def most_cached_tokens(self) -> int:
        """What the largest paged cache of the cells holds."""
        limits = [self.limits(concurrency=cell.concurrency) for cell in self.cells]
        return max(one.cache_blocks * one.block_tokens for one in limits)

    def prefix_limits(self) -> Serving:
        """One request of the prefix at a time, with room for what the earlier ones left in the cache."""
        blocks = self._blocks((self.prefix_tokens or 0) + self.fresh_tokens + PREFIX_NEW_TOKENS)
        return self._serving(1, cache_blocks=blocks * (1 + CACHED_REQUESTS))

    @property
    def fresh_tokens(self) -> int:
        """What follows the prefix in a prompt: as much as a mean prompt has."""
        return max(1, round(sum(one.prompt_tokens for one in self.requests) / len(self.requests)))

    @property
    def longest_tokens(self) -> int:
        """The longest sequence of the stage, in a padded batch too."""
        padded = max(
            max(one.prompt_tokens for one in batch) + max(one.new_tokens for one in batch)
            for cell in self.cells
            if cell.mode == "static"
            for batch in in_batches(self.requests, cell.concurrency)
        )
        prefixed = self.prefix_tokens + self.fresh_tokens + PREFIX_NEW_TOKENS if self.prefix_tokens else 0
        return max(padded, prefixed)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _serving(self, max_sequences: int, *, cache_blocks: int) -> Serving:
        return Serving(
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=max_sequences,
            block_tokens=self.block_tokens,
            cache_blocks=cache_blocks,
        )


def in_batches(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    """Static batches in order; the last one may be smaller."""
    for first in range(0, len(requests), size):
        yield requests[first : first + size]


def serving_load(recipe: ExpandedRecipe, *, trace: Sequence[Request]) -> ServingLoad | None:
    """The load of a recipe; None without a `serving` section. `trace` is that of `traffic.trace`, whole."""
    spec = recipe.serving
    if spec is None:
        return None
    traffic = recipe.traffic or TrafficSpec()
    requests = _requests(recipe, trace=trace)
    closed = [
        ServingCell(mode=mode, load="closed", concurrency=size)
        for size in spec.concurrency
        for mode in ("static", "continuous")
    ]
    opened = [_open_cell(requests, traffic=recipe.traffic)] if recipe.traffic else []
    return ServingLoad(
        requests=requests,
        cells=(*closed, *opened),
        prefix_tokens=spec.prefix_tokens,
        block_tokens=traffic.block_tokens,
        max_batch_tokens=traffic.max_batch_tokens,
        targets=traffic.targets,
        seed=traffic.seed,
    )


def _requests(recipe: ExpandedRecipe, *, trace: Sequence[Request]) -> tuple[Request, ...]:
    spec, traffic = recipe.serving, recipe.traffic
    assert spec is not None
    if traffic is None:
        one = Request(0.0, recipe.workload.prompt_tokens, recipe.workload.new_tokens)
        return (one,) * spec.requests
    if traffic.trace:
        return _from_the_first(trace[: spec.requests])
    assert traffic.requests_per_s is not None
    assert traffic.prompt_tokens is not None
    assert traffic.new_tokens is not None
    drawn = Traffic(
        requests_per_s=traffic.requests_per_s,
        prompt_tokens=traffic.prompt_tokens,
        new_tokens=traffic.new_tokens,
    )
    return _from_the_first(drawn.requests(spec.requests, seed=traffic.seed))


def _from_the_first(requests: Sequence[Request]) -> tuple[Request, ...]:
    return tuple(
        Request(one.arrival_s - requests[0].arrival_s, one.prompt_tokens, one.new_tokens) for one in requests
    )


def _open_cell(requests: Sequence[Request], *, traffic: TrafficSpec) -> ServingCell:
    """All that the traffic allows at once; a trace's rate is that of the requests taken from it."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    traced = (len(requests) - 1) / span_s if span_s > 0 else None
    return ServingCell(
        mode="continuous",
        load="open",
        concurrency=min(traffic.max_sequences, len(requests)),
        offered_requests_per_s=traffic.requests_per_s or traced,
    )
