"""What a run has, sorted by variant: results, failures, and what an interruption kept from starting.

results = variant_results(state)
"""

from __future__ import annotations

from pipeline.recipe import VariantSpec
from pipeline.results import CostResult, StageFailure, VariantResults
from pipeline.roofline import dollars_per_million_tokens
from pipeline.runner import RunState, failure


def variant_results(state: RunState) -> tuple[VariantResults, ...]:
    """What is known of every variant, the baseline first."""
    return tuple(_variant_results(state, variant) for variant in state.recipe.ordered())


def _variant_results(state: RunState, variant: VariantSpec) -> VariantResults:
    name = variant.name
    speed = state.speed.variants.get(name) if state.speed else None
    folder = state.checkpoints.get(name)
    return VariantResults(
        name=name,
        precision=variant.quantizer.precision,
        required=variant.required,
        quantizer=variant.quantizer.model_dump(mode="json"),
        checkpoint=state.manifests.get(name),
        checkpoint_folder=str(folder.resolve()) if folder else None,
        speed=speed,
        memory=speed.memory if speed else None,
        capacity=state.capacity.get(name),
        quality=state.quality.get(name),
        cost=_cost(state, name),
        failures=tuple(state.failures.get(name, ())) + _unreached(state, name),
    )


def _unreached(state: RunState, name: str) -> tuple[StageFailure, ...]:
    """Stages that an interruption kept from starting."""
    if not state.interrupted:
        return ()
    told = {failure.stage for failure in state.failures.get(name, ())}
    has = {
        "quantize": name in state.manifests,
        "speed": state.recipe.speed is None or (state.speed is not None and name in state.speed.variants),
        "capacity": state.recipe.capacity is None or name in state.capacity,
        "quality": state.recipe.quality is None or name in state.quality,
    }
    return tuple(
        failure(stage, "interrupted", "the run was stopped before this stage")
        for stage, done in has.items()
        if not done and stage not in told
    )


def _cost(state: RunState, name: str) -> CostResult | None:
    speed = state.speed.variants.get(name) if state.speed else None
    price = state.recipe.cost.dollars_per_hour if state.recipe.cost else None
    rates = [
        (row.decode_tokens_per_s, row.batch_size)
        for row in (speed.rows if speed else ())
        if row.outcome == "measured" and row.decode_tokens_per_s
    ]
    if price is None or not rates:
        return None
    rate, batch_size = max(rates)
    return CostResult(
        dollars_per_hour=price,
        batch_size=batch_size,
        dollars_per_million_output_tokens=dollars_per_million_tokens(rate, dollars_per_hour=price),
    )
