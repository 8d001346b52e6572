"""Measures which quantizer and engine decode fastest on this machine, on a small model, for each precision.

Every pair that runs here stores the model and is timed by the speed stage, all in alternation: the same clock and the
same rules as in a run. What comes out is kept by machine and decides what a recipe's short form means there.

    pairs = usable_pairs(Path("models/small"), device=detect())
    ranking = measure_ranking(Path("models/small"), pairs=pairs, device=detect(), store=store, progress=print)
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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


def usable_pairs(source: Path, *, device: Device) -> dict[str, tuple[Pair, ...]]:
    """By precision, the device's pairs that lack nothing here and can store the 16-bit model in `source`.

    Raises PrerequisiteError for a device without pairs, PrerequisiteError or CheckpointError for a source that can't
    be used.
    """
    check_source(source)
    config = read_json(source / "config.json")
    known = PAIRS.get(device.kind)
    if not known:
        raise PrerequisiteError(f"no pairs of quantizer and engine are known for {device.kind}")
    usable = {
        pair: not any(lacks(pair, device=device, config=config, weights="trained", folder=source))
        for pair in _each_once(known)
    }
    return {precision: tuple(pair for pair in pairs if usable[pair]) for precision, pairs in known.items()}


def measure_ranking(
    source: Path,
    *,
    pairs: Mapping[str, tuple[Pair, ...]],
    device: Device,
    store: Store,
    progress: Progress,
) -> EngineRanking:
    """Rank `pairs` (by precision) on the 16-bit model in `source`; the ranking stays in `store`, prepared and held.

    Takes disk for every pair's checkpoint while it runs. Raises StageError when nothing could be timed.
    """
    config = read_json(source / "config.json")
    log = store.root / "doctor.log"
    # Named like an unfinished checkpoint, so that the next run removes what a killed one left.
    checkpoints = store.root / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-engines-", dir=checkpoints) as folder:
        stored = _stored(_each_once(pairs), source, Path(folder), device=device, log=log, progress=progress)
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
        pairs=_ranked(pairs, timed),
    )
    store.put(ENGINE_RANKING, ranking_key(device), ranking)
    return ranking


class _Stored(NamedTuple):
    """A pair's checkpoint."""

    runnable: RunnableCheckpoint
    manifest: CheckpointManifest


def _each_once(pairs: Mapping[str, tuple[Pair, ...]]) -> list[Pair]:
    """Every pair, though several precisions may list it."""
    return list(dict.fromkeys(pair for listed in pairs.values() for pair in listed))


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
    pairs: Mapping[str, tuple[Pair, ...]], timed: SpeedStageResult
) -> dict[str, tuple[RankedPair, ...]]:
    """By precision, the fastest first; one that failed comes last, without a rate."""
    return {
        precision: tuple(
            sorted(
                (RankedPair(name=pair.name, decode_tokens_per_s=_rate(pair, timed)) for pair in listed),
                key=lambda one: -(one.decode_tokens_per_s or 0.0),
            )
        )
        for precision, listed in pairs.items()
    }


def _rate(pair: Pair, timed: SpeedStageResult) -> float | None:
    result = timed.variants.get(pair.name)
    row = result.row(1) if result else None
    return row.decode_tokens_per_s if row and row.outcome == "measured" else None
