"""Measures which quantizer and engine decode fastest on this machine, on a small model, for each precision.

Every pair that runs here stores the model and is timed by the speed stage, all in alternation: the same clock and the
same rules as in a run. What comes out is kept by machine and decides what a recipe's short form means there.

    ranking = measure_ranking(Path("models/small"), device=detect(), store=store, progress=print)
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.best_paths import ENGINE_RANKING, PAIRS, EngineRanking, Pair, RankedPair, lacks, ranking_key
from pipeline.checkpoint import check_source
from pipeline.errors import PrerequisiteError, StageError
from pipeline.footprint import cached_shape_facts, kv_bytes
from pipeline.hardware import Device
from pipeline.processes import run_stage
from pipeline.progress import silent
from pipeline.recipe_sections import SpeedSpec, Workload
from pipeline.results import CheckpointManifest, SourceRecord
from pipeline.speed_results import SpeedStageResult
from pipeline.speed_stage import measure_speed
from pipeline.stages import Progress, QuantizeRequest, RunnableCheckpoint
from pipeline.store import Store
from pipeline.tensorfile import read_json

WORKLOAD = Workload(prompt_tokens=64, new_tokens=32)
SPEED = SpeedSpec(batch_sizes=(1,), warmup=1, repeats=5)


def measure_ranking(source: Path, *, device: Device, store: Store, progress: Progress) -> EngineRanking:
    """Rank the pairs on the 16-bit model in `source`, and keep the ranking in `store`, which is prepared and held.

    Takes disk for every pair's checkpoint while it runs. Raises PrerequisiteError or CheckpointError for a source
    that can't be used, StageError when nothing could be timed.
    """
    check_source(source)
    config = read_json(source / "config.json")
    pairs = _usable_pairs(device, config=config, source=source)
    log = store.root / "doctor.log"
    # Named like an unfinished checkpoint, so that the next run removes what a killed one left.
    checkpoints = store.root / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-engines-", dir=checkpoints) as folder:
        stored = _stored(pairs, source, Path(folder), device=device, log=log, progress=progress)
        if not stored:
            raise StageError(f"{source}: no pair of quantizer and engine could store it; see {log}")
        facts = cached_shape_facts(config, cache_folder=store.root / "shapes")
        tokens = WORKLOAD.prompt_tokens + WORKLOAD.new_tokens
        timed = measure_speed(
            {name: one.runnable for name, one in stored.items()},
            manifests={name: one.manifest for name, one in stored.items()},
            facts=facts,
            baseline=next(iter(stored)),
            spec=SPEED,
            workload=WORKLOAD,
            cache_bytes=len(stored) * (kv_bytes(facts, tokens, element_bytes=4) or 0),
            device=device,
            log=log,
            progress=progress,
        )
    ranking = EngineRanking(
        measured_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        model=source.resolve().name,
        pairs=_ranked(pairs, timed, device=device),
    )
    store.put(ENGINE_RANKING, ranking_key(device), ranking)
    return ranking


class _Stored(NamedTuple):
    """A pair's checkpoint."""

    runnable: RunnableCheckpoint
    manifest: CheckpointManifest


def _usable_pairs(device: Device, *, config: Mapping[str, Any], source: Path) -> list[Pair]:
    """Every pair of the device once that lacks nothing and can store the model.

    Raises PrerequisiteError for a device without pairs.
    """
    known = PAIRS.get(device.kind)
    if not known:
        raise PrerequisiteError(f"no pairs of quantizer and engine are known for {device.kind}")
    every = {pair.name: pair for pairs in known.values() for pair in pairs}
    return [
        pair
        for pair in every.values()
        if not any(lacks(pair, device=device, config=config, weights="trained", folder=source))
    ]


def _stored(
    pairs: list[Pair], source: Path, folder: Path, *, device: Device, log: Path, progress: Progress
) -> dict[str, _Stored]:
    """The pairs that could store the model, by name."""
    found = {}
    for number, pair in enumerate(pairs):
        progress(f"{pair.name}: quantizing")
        out = folder / str(number)
        out.mkdir()
        try:
            manifest = _quantized(pair, source, out=out, device=device, log=log)
        except StageError as error:
            progress(f"{pair.name}: not ranked: {error}")
            continue
        runnable = RunnableCheckpoint(
            folder=str(out), quantizer=pair.quantizer, engine=pair.engine, device=device.kind
        )
        found[pair.name] = _Stored(runnable, manifest)
    return found


def _quantized(pair: Pair, source: Path, *, out: Path, device: Device, log: Path) -> CheckpointManifest:
    request = QuantizeRequest(
        source_folder=str(source),
        source=SourceRecord(model=source.name, revision=None, files=()),
        quantizer=pair.quantizer,
        device=device.kind,
        out=str(out),
    )
    return run_stage("quantize", request, CheckpointManifest, log=log, progress=silent)


def _ranked(
    pairs: list[Pair], timed: SpeedStageResult, *, device: Device
) -> dict[str, tuple[RankedPair, ...]]:
    """By precision, the fastest first; one that failed comes last, without a rate."""
    rates: dict[str, float | None] = {}
    for pair in pairs:
        result = timed.variants.get(pair.name)
        row = result.row(1) if result else None
        rates[pair.name] = row.decode_tokens_per_s if row and row.outcome == "measured" else None
    tried = {pair.name for pair in pairs}
    return {
        precision: tuple(
            sorted(
                (
                    RankedPair(name=pair.name, decode_tokens_per_s=rates[pair.name])
                    for pair in candidates
                    if pair.name in tried
                ),
                key=lambda one: -(one.decode_tokens_per_s or 0.0),
            )
        )
        for precision, candidates in PAIRS[device.kind].items()
    }
