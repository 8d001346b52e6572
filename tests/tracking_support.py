"""Log reports to SQLite stores, here or from another process, and read them back.

>>> full_report().variants[1].name
'int8'
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from pipeline.measured import StageFailure
from pipeline.results import Finding, MetricScore, Report
from pipeline.tracking import TrackResult, track
from tests import result_builders as build

ROOT = Path(__file__).parent.parent


def log(report: Report, database: Path, *, run_folder: Path, **fields: Any) -> TrackResult:
    return track(
        report,
        run_folder=run_folder,
        tracking_uri=f"sqlite:///{database}",
        artifacts_folder=None,
        **fields,
    )


def client(uri: str | Path) -> Any:
    """An MLflow client to read back with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{uri}" if isinstance(uri, Path) else uri)


def runs(database: Path) -> list[Any]:
    reader = client(database)
    experiment = reader.get_experiment_by_name("pipeline")
    return [] if experiment is None else list(reader.search_runs([experiment.experiment_id]))


def by_name(database: Path) -> dict[str, Any]:
    return {run.info.run_name: run for run in runs(database)}


def full_report(**fields: Any) -> Report:
    """Baseline, a candidate that ships and one that fails, with samples and a name MLflow refuses."""
    scores = {"acc,none": MetricScore(score=0.75, stderr=None, higher_is_better=True)}
    tasks = {
        name: build.task(
            values=values,
            metrics=scores | {"f1": MetricScore(score=None, stderr=None, higher_is_better=True)},
        )
        for name, values in (("fp16", (1.0, 0.0)), ("int8", (1.0, 1.0)))
    }
    finding = Finding(rule="min_speedup", outcome="pass", observed=2.0, limit=1.5, unit="x", because="fast")
    failure = StageFailure(stage="speed", reason="failed", message="worker died")
    return build.report(
        build.variant_report(build.variant("fp16", quality=build.quality(tasks["fp16"]))),
        build.variant_report(
            build.variant("int8", quality=build.quality(tasks["int8"])), findings=(finding,)
        ),
        build.variant_report(build.variant("int4", speed=None, failures=(failure,)), verdict="error"),
        **fields,
    )


LOG_FROM_A_PROCESS = """
import sys
from pathlib import Path
from pipeline.errors import Interrupted
from pipeline.results import Report
from pipeline.tracking import track
report = Report.model_validate_json(Path(sys.argv[1]).read_text())
try:
    result = track(
        report, run_folder=Path(sys.argv[2]), tracking_uri=sys.argv[3], artifacts_folder=None
    )
except Interrupted as stop:
    sys.exit(stop.exit_code)
print(result.to_json())
sys.exit(0 if result.tracked else 9)
"""


def start_logging(report: Report, database: Path, folder: Path) -> subprocess.Popen[str]:
    """Log from another process; its run folder is `folder`."""
    path = database.parent / f"report-{report.digest()[:8]}.json"
    path.write_text(report.to_json(), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-c", LOG_FROM_A_PROCESS, str(path), str(folder), f"sqlite:///{database}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
