"""What this machine is and can do, measured now: its limits, its packages, and which engines are fastest on it.

print(examination_text(examine(store=store, progress=print)))
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from pipeline.best_paths import ENGINE_RANKING, EngineRanking, Pair, RankedPair, ranking_key
from pipeline.data_sheet import DATA_SHEET
from pipeline.engine_ranking import measure_ranking, usable_pairs
from pipeline.hardware import Device, detect, fingerprint
from pipeline.planning import MEASURED_DEVICE
from pipeline.processes import run_stage
from pipeline.provenance import collect
from pipeline.speed_results import DeviceSpeed
from pipeline.stages import DeviceSpeedRequest, Progress
from pipeline.store import Store
from pipeline.values import Value


class Examination(Value):
    """`doctor --json`."""

    device: Device
    measured: DeviceSpeed
    packages: dict[str, str | None]
    store: str
    disk_free_bytes: int
    data_sheet_names: tuple[str, ...]
    engines: EngineRanking | None


def examine(*, store: Store, progress: Progress, engines_on: Path | None = None) -> Examination:
    """Measure the device; with a 16-bit model in `engines_on` also which pair decodes it fastest.

    Raises as `usable_pairs` and `measure_ranking` of `engine_ranking` do, and PrerequisiteError while a run uses the
    store.
    """
    device = detect()
    # A folder that can't be used is told before anything is timed.
    pairs = usable_pairs(engines_on, device=device) if engines_on is not None else None
    progress("measuring memory bandwidth and FLOP/s …")
    request = DeviceSpeedRequest(device=device.kind, dtypes=("float32", "bfloat16", "float16"))
    measured = run_stage(
        "device-speed", request, DeviceSpeed, log=store.root / "doctor.log", progress=lambda _: None
    )
    store.put(MEASURED_DEVICE, fingerprint(device), measured)
    return Examination(
        device=device,
        measured=measured,
        packages=collect(repository=Path.cwd())["packages"],
        store=str(store.root),
        disk_free_bytes=shutil.disk_usage(store.root).free,
        data_sheet_names=tuple(sorted(DATA_SHEET)),
        engines=_engines(engines_on, pairs=pairs, device=device, store=store, progress=progress),
    )


def _engines(
    source: Path | None,
    *,
    pairs: Mapping[str, tuple[Pair, ...]] | None,
    device: Device,
    store: Store,
    progress: Progress,
) -> EngineRanking | None:
    """Measured now on the model in `source`, else what was measured before."""
    if source is None or pairs is None:
        return store.get(ENGINE_RANKING, ranking_key(device), EngineRanking)
    with store.lock():
        return measure_ranking(source, pairs=pairs, device=device, store=store, progress=progress)


def examination_text(found: Examination) -> str:
    """The same for people."""
    rows = [
        ("device", f"{found.device.name} ({found.device.kind})"),
        ("memory", f"{found.device.memory_bytes / 1e9:.1f} GB"),
        ("read bandwidth, measured", f"{found.measured.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s"),
        *(
            (f"matrix product, {name}", f"{flops / 1e9:.1f} GFLOP/s")
            for name, flops in found.measured.matmul_flops_per_s.items()
        ),
        *((f"package {name}", version or "missing") for name, version in found.packages.items()),
        ("store", found.store),
        ("disk free", f"{found.disk_free_bytes / 1e9:.1f} GB"),
        ("names for --hardware", ", ".join(["host", *found.data_sheet_names])),
        *_engine_rows(found.engines),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _engine_rows(ranking: EngineRanking | None) -> list[tuple[str, str]]:
    """One row for each pair, the fastest first in its precision."""
    if ranking is None:
        return [
            ("engines", "not measured; `python -m pipeline doctor --engines FOLDER` does, on a small model")
        ]
    head = ("engines measured", f"{ranking.measured_at}, on {ranking.model}")
    return [
        head,
        *(
            (f"  {precision}", f"{one.name}: {_rate(one)}")
            for precision, pairs in ranking.pairs.items()
            for one in pairs
        ),
    ]


def _rate(pair: RankedPair) -> str:
    rate = pair.decode_tokens_per_s
    return "failed" if rate is None else f"{rate:.3g} tok/s decode at batch 1"
