"""The parent's side of distances on held text: the baseline's distribution lies in the store before it is needed.

asked = with_reference(state)
ensure_reference(state, asked)
"""

from __future__ import annotations

from pathlib import Path

from pipeline.distribution_reference import Reference, is_intact
from pipeline.distribution_results import DistributionRequest
from pipeline.processes import run_stage
from pipeline.run_state import RunState
from pipeline.stage_keys import reference_key
from pipeline.stages import ReferenceRequest


def with_reference(state: RunState) -> DistributionRequest | None:
    """What the recipe asks for, with the baseline's distribution named; without one where it has no checkpoint."""
    asked = state.ready.distribution
    if asked is None or state.recipe.baseline not in state.checkpoints:
        return asked
    key = reference_key(
        _request(state, asked), machine=state.machine, manifest=state.manifests[state.recipe.baseline]
    )
    folder = state.store.distribution_folder(key)
    return asked.model_copy(update={"reference": str(folder), "reference_key": key})


def ensure_reference(state: RunState, asked: DistributionRequest | None) -> None:
    """Make what isn't there, isn't whole or was changed. Raises WorkerError as the stage fails."""
    if asked is None or not asked.reference or is_intact(Path(asked.reference), key=asked.reference_key):
        return
    with state.store.new_folder(Path(asked.reference)) as partial:
        request = _request(state, asked).model_copy(update={"out": str(partial)})
        run_stage("reference", request, Reference, log=state.log, progress=state.progress.tell)


def _request(state: RunState, asked: DistributionRequest) -> ReferenceRequest:
    spec, quality = state.recipe.quality, state.ready.quality
    assert spec is not None
    assert quality is not None
    baseline = state.recipe.ordered()[0]
    return ReferenceRequest(
        checkpoint=state.runnable(baseline),
        compute_dtype=state.ready.quality_dtype(spec, folder=state.checkpoints[baseline.name]),
        distribution=asked,
        batch_size=quality.batch_size,
        out="",
    )
