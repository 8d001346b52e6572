"""What a run has, sorted by variant: results, failures, and what an interruption kept from starting.

results = variant_results(state)
"""

from __future__ import annotations

from pipeline.measured import StageFailure
from pipeline.recipe_sections import VariantSpec
from pipeline.results import CostResult, VariantResults
from pipeline.roofline import dollars_per_million_tokens
from pipeline.run_state import RunState, failure
from pipeline.serving_results import ServingResult
from pipeline.serving_summary import serving_costs
from pipeline.speed_results import SpeedResult


def variant_results(state: RunState) -> tuple[VariantResults, ...]:
    """What is known of every variant, the baseline first."""
    return tuple(_variant_results(state, variant) for variant in state.recipe.ordered())


def _variant_results(state: RunState, variant: VariantSpec) -> VariantResults:
    name = variant.name
    speed = state.speed.variants.get(name) if state.speed else None
    folder = state.checkpoints.get(name)
    price = state.recipe.cost.dollars_per_hour if state.recipe.cost else None
    serving = state.serving.variants.get(name) if state.serving else None
    return VariantResults(
        name=name,
        precision=variant.quantizer.precision,
        required=variant.required,
        quantizer=variant.quantizer.model_dump(mode="json"),
        checkpoint=state.manifests.get(name),
        checkpoint_folder=str(folder.resolve()) if folder else None,
        speed=speed,
        memory=speed.memory if speed else None,
        serving=serving,
        capacity=state.capacity.get(name),
        quality=state.quality.get(name),
        null_quality=state.null_quality if name == state.recipe.baseline else None,
        cost=cost_of(speed, serving, dollars_per_hour=price),
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
        "serving": state.recipe.serving is None
        or (state.serving is not None and name in state.serving.variants),
        "capacity": state.recipe.capacity is None or name in state.capacity,
        "quality": state.recipe.quality is None or _has_quality(state, name),
    }
    return tuple(
        failure(stage, "interrupted", "the run was stopped before this stage")
        for stage, done in has.items()
        if not done and stage not in told
    )


def _has_quality(state: RunState, name: str) -> bool:
    """The baseline's quality is complete with the null run that the recipe asks for."""
    spec = state.recipe.quality
    asked = spec is not None and spec.null_batch_size is not None and name == state.recipe.baseline
    return name in state.quality and (not asked or state.null_quality is not None)


def cost_of(
    speed: SpeedResult | None, serving: ServingResult | None = None, *, dollars_per_hour: float | None
) -> CostResult | None:
    """What a million tokens cost at the best measured rates of the workload; None without a price or any rate."""
    rows = [row for row in (speed.of("batch") if speed else ()) if row.outcome == "measured"]
    decode = max(
        ((row.decode_tokens_per_s, row.batch_size) for row in rows if row.decode_tokens_per_s), default=None
    )
    prefill = max(
        ((row.prefill_tokens_per_s, row.batch_size) for row in rows if row.prefill_tokens_per_s), default=None
    )
    served = serving_costs(serving, dollars_per_hour=dollars_per_hour)
    if dollars_per_hour is None or not (decode or prefill or served):
        return None

    def price(rate: tuple[float, int] | None) -> float | None:
        return dollars_per_million_tokens(rate[0], dollars_per_hour=dollars_per_hour) if rate else None

    return CostResult(
        dollars_per_hour=dollars_per_hour,
        batch_size=decode[1] if decode else None,
        dollars_per_million_output_tokens=price(decode),
        input_batch_size=prefill[1] if prefill else None,
        dollars_per_million_input_tokens=price(prefill),
        serving=served,
    )
