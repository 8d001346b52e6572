"""Variants that don't fit together are timed one after the other, and every one of them says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.engines.transformers import Transformers
from pipeline.hardware import detect
from pipeline.processes import run_stage
from pipeline.progress import silent
from pipeline.quantizers.native import Native
from pipeline.recipe_sections import SpeedSpec, Workload
from pipeline.results import CheckpointManifest, SourceRecord
from pipeline.runner import _is_whole_set
from pipeline.speed_stage import measure_speed
from pipeline.stages import QuantizeRequest, RunnableCheckpoint
from tests.tiny_models import SHORT_SPEED, write_llama


@pytest.mark.slow
def test_what_does_not_fit_together_is_timed_alone_and_holds_the_machine_s_drift(tmp_path: Path) -> None:
    source, out, log = write_llama(tmp_path / "llama"), tmp_path / "fp16", tmp_path / "log"
    out.mkdir()
    request = QuantizeRequest(
        source_folder=str(source),
        source=SourceRecord(model="tiny", revision=None, files=()),
        quantizer=Native(dtype="fp16"),
        device="cpu",
        out=str(out),
    )
    manifest = run_stage("quantize", request, CheckpointManifest, log=log, progress=silent)
    checkpoint = RunnableCheckpoint(
        folder=str(out), quantizer=Native(dtype="fp16"), engine=Transformers(), device="cpu"
    )
    told: list[str] = []
    result = measure_speed(
        {"fp16": checkpoint, "twin": checkpoint},
        manifests={"fp16": manifest, "twin": manifest},
        facts=None,
        baseline="fp16",
        spec=SpeedSpec.model_validate_json(json.dumps(SHORT_SPEED)),
        workload=Workload(prompt_tokens=8, new_tokens=4),
        cache_bytes=10**15,
        device=detect(),
        log=log,
        progress=told.append,
    )
    assert told.count("fp16: loading") == 2, "the baseline is timed again at the end"
    assert result.alternated is False
    assert [one.timed_in_turn for one in result.variants.values()] == [False, False]
    drifts = {one.drift_percent for one in result.variants.values()}
    assert len(drifts) == 1
    assert None not in drifts
    assert _is_whole_set(result)
    lost = {name: one.model_copy(update={"drift_percent": None}) for name, one in result.variants.items()}
    assert not _is_whole_set(result.model_copy(update={"variants": lost}))
