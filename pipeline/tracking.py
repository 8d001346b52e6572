"""Log a finished report to MLflow: one parent run for the recipe's run, one child for each variant.

It runs after the report is on disk, doesn't raise because a server is away, never changes a verdict, and can be
repeated: the same report always ends in the same run.

    result = track(report, run_folder=folder, tracking_uri=None, artifacts_folder=None)
    print(result.run_id if result.tracked else result.because, file=sys.stderr)
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.errors import Interrupted, UsageError
from pipeline.provenance import host_digest
from pipeline.results import Report, VariantReport, VariantResults
from pipeline.tracked_inputs import sample_tables, variant_datasets
from pipeline.tracked_labels import (
    end_ms,
    run_key,
    run_params,
    run_status,
    run_tags,
    start_ms,
    variant_params,
    variant_status,
    variant_tags,
)
from pipeline.tracked_values import (
    LONGEST_PARAM,
    LONGEST_TAG,
    METRICS_PER_BATCH,
    PARAMS_PER_BATCH,
    TrackedMetric,
    batches,
    legal_name,
    shortened,
    split_finite,
    variant_metrics,
)
from pipeline.tracking_store import (
    OpenStore,
    expected_errors,
    open_store,
    owner_is_alive,
    owner_tags,
    store_error,
    tracking_store,
)
from pipeline.values import Value

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Answer = TypeVar("Answer")

EXPERIMENT = "pipeline"
CONTESTS = 5
"""How often two processes that begin to log one report at the same moment may withdraw."""


class TrackResult(Value):
    """Whether the report is in MLflow, under which run, and why not."""

    run_id: str | None
    tracked: bool
    because: str


class _Contested(Exception):  # noqa: N818  (a turn of events, caught here)
    """Another process has begun to log the same report."""


@dataclass
class _Session:
    """One conversation with a tracking store; `open_runs` are those that must not be left RUNNING."""

    opened: OpenStore
    experiment_id: str
    report: Report
    run_key: str
    open_runs: list[str] = field(default_factory=list)

    @property
    def client(self) -> MlflowClient:
        """For what is called in `ask`."""
        return self.opened.client

    def ask(self, call: Callable[[], Answer]) -> Answer:
        """One call of the store, unless a stop was requested; waits for locks."""
        return self.opened.ask(call)


def track(
    report: Report,
    *,
    run_folder: Path,
    tracking_uri: str | None,
    artifacts_folder: Path | None,
    experiment: str = EXPERIMENT,
    note: str = "",
) -> TrackResult:
    """Log the report, its files and every variant; a report that is there already isn't logged again.

    `tracking_uri` None means MLFLOW_TRACKING_URI, else the SQLite file `mlruns/mlflow.db` of the current
    folder. `note` is Markdown for the run's page. Raises Interrupted on Ctrl-C and SIGTERM, after marking
    the unfinished runs KILLED; whatever keeps the store from being used gives `tracked=False`.
    """
    try:
        store = tracking_store(tracking_uri, artifacts_folder=artifacts_folder)
    except UsageError as error:
        return TrackResult(run_id=None, tracked=False, because=str(error))
    try:
        with open_store(store) as opened:
            return _track(report, opened=opened, run_folder=run_folder, experiment=experiment, note=note)
    except expected_errors() as error:
        return TrackResult(run_id=None, tracked=False, because=store_error(error, store))


def _track(
    report: Report,
    *,
    opened: OpenStore,
    run_folder: Path,
    experiment: str,
    note: str,
) -> TrackResult:
    location = opened.store.artifact_location
    experiment_id = opened.ask(lambda: _experiment_id(opened.client, experiment, location))
    session = _Session(opened, experiment_id, report, run_key=run_key(report))
    _close_stale_runs(session)
    for _ in range(CONTESTS):
        known = _known_run(session)
        if known is not None and known.data.tags.get("pipeline.complete") == "true":
            return TrackResult(run_id=known.info.run_id, tracked=True, because="logged before; nothing added")
        if known is not None and known.info.status == "RUNNING":
            owner = f"process {known.data.tags.get('pipeline.pid')} on {known.data.tags.get('pipeline.host')}"
            because = f"{owner} is logging this report now"
            return TrackResult(run_id=known.info.run_id, tracked=False, because=because)
        try:
            run_id = _log_everything(session, known, run_folder=run_folder, note=note)
        except _Contested:
            # The other may have withdrawn as well: whoever wakes first begins, and the later one sees that.
            time.sleep(random.uniform(0.2, 3))
        else:
            return TrackResult(run_id=run_id, tracked=True, because=f"logged to {opened.store.shown}")
    return TrackResult(run_id=None, tracked=False, because="others are logging this report now")


def _log_everything(session: _Session, known: Run | None, *, run_folder: Path, note: str) -> str:
    try:
        run_id = _log_run(session, known, run_folder=run_folder, note=note)
        baseline = session.report.variant(session.report.baseline)
        for variant in session.report.variants:
            _log_variant(session, variant, parent_id=run_id, baseline=baseline)
        _end(session, run_id, run_status(session.report))
        session.ask(lambda: session.client.set_tag(run_id, "pipeline.complete", "true"))
    except Interrupted:
        _end_open_runs(session, "KILLED")
        raise
    except _Contested:
        raise
    except BaseException:
        _end_open_runs(session, "FAILED")
        raise
    return run_id


def _log_run(session: _Session, known: Run | None, *, run_folder: Path, note: str) -> str:
    report = session.report
    tags = {
        **run_tags(report),
        "pipeline.part": "run",
        "mlflow.source.name": report.recipe,
        "mlflow.source.type": "LOCAL",
    }
    if note:
        tags["mlflow.note.content"] = note
    run_id = _start(session, known, name=Path(report.recipe).stem, tags=tags)
    if known is None:
        _withdraw_if_contested(session, run_id)
    metrics = []
    if report.device is not None:
        bandwidth = report.device.read_bandwidth_bytes_per_s
        metrics.append(TrackedMetric("device.read_bandwidth_bytes_per_s", bandwidth))
    _log_values(session, run_id, metrics=metrics, params=run_params(report), tags=tags)
    _log_datasets(session, run_id, report.variants)
    _log_files(session, run_id, run_folder)
    return run_id


def _log_variant(
    session: _Session, variant: VariantReport, *, parent_id: str, baseline: VariantReport | None
) -> None:
    name = legal_name(variant.name)
    known = _find(
        session, f"tags.`mlflow.parentRunId` = '{parent_id}' and tags.`pipeline.variant` = '{name}'"
    )
    tags = {
        **variant_tags(variant, baseline_name=session.report.baseline),
        "pipeline.part": "variant",
        "pipeline.variant": name,
        "mlflow.parentRunId": parent_id,
    }
    run_id = _start(session, known, name=variant.name, tags=tags)
    _log_values(
        session,
        run_id,
        metrics=variant_metrics(variant, baseline=baseline),
        params=variant_params(variant, report=session.report),
        tags=tags,
    )
    _log_datasets(session, run_id, (variant,))
    _log_samples(session, run_id, variant, baseline=baseline)
    _end(session, run_id, variant_status(variant))


def _log_samples(
    session: _Session, run_id: str, variant: VariantReport, *, baseline: VariantReport | None
) -> None:
    """`samples/TASK.json`: a table of the task's documents, which the run's page shows as one."""
    tables = sample_tables(variant, baseline=baseline)
    if not tables:
        return
    with tempfile.TemporaryDirectory(prefix="samples-") as folder:
        for task, table in tables.items():
            Path(folder, f"{legal_name(task)}.json").write_text(json.dumps(table), encoding="utf-8")
        _log_files(session, run_id, Path(folder), under="samples")
    listed = [{"path": f"samples/{legal_name(task)}.json", "type": "table"} for task in sorted(tables)]
    session.ask(lambda: session.client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps(listed)))


def _log_datasets(session: _Session, run_id: str, variants: Sequence[VariantResults]) -> None:
    """What the variants were asked, as the run's inputs; the same input twice is one."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    datasets = dict.fromkeys(dataset for variant in variants for dataset in variant_datasets(variant))
    inputs = [
        DatasetInput(
            Dataset(
                name=one.name, digest=one.digest, source_type="local", source=one.source, profile=one.profile
            ),
            [InputTag("mlflow.data.context", "eval")],
        )
        for one in datasets
    ]
    if inputs:
        session.ask(lambda: session.client.log_inputs(run_id, datasets=inputs))


def _log_files(session: _Session, run_id: str, folder: Path, *, under: str = "") -> None:
    """Every file of `folder` (none when it isn't there), one by one, so that a stop is obeyed in between."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            inside = (Path(under) / path.relative_to(folder)).parent.as_posix()
            place = None if inside == "." else inside
            session.opened.stop.obey()
            session.client.log_artifact(run_id, str(path), place)


# --- status ---------------------------------------------------------------------------------------------


def _end(session: _Session, run_id: str, status: str) -> None:
    session.ask(lambda: session.client.set_terminated(run_id, status, end_time=end_ms(session.report)))
    session.open_runs.remove(run_id)


def _end_open_runs(session: _Session, status: str) -> None:
    """Leave no run RUNNING; gives up at the first refusal, for the store may be what failed."""
    os.environ.update(MLFLOW_HTTP_REQUEST_MAX_RETRIES="0", MLFLOW_HTTP_REQUEST_TIMEOUT="5")
    expected = expected_errors()
    for run_id in reversed(session.open_runs):
        try:
            session.client.set_terminated(run_id, status)
        except expected:
            return  # the next `track` on this machine finds the run by its tags and ends it


def _close_stale_runs(session: _Session) -> None:
    """End runs that a dead process of this machine left RUNNING."""
    here = f"attributes.status = 'RUNNING' and tags.`pipeline.host` = '{host_digest()}'"
    found = session.ask(lambda: session.client.search_runs([session.experiment_id], here))
    for run in found:
        if not owner_is_alive(run.data.tags):
            session.client.set_terminated(run.info.run_id, "KILLED")


# --- the store ------------------------------------------------------------------------------------------


def _experiment_id(client: MlflowClient, name: str, artifact_location: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=artifact_location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        raise MlflowException(f"the experiment {name!r} is deleted; restore it: mlflow experiments restore")
    return str(found.experiment_id)


def _known_run(session: _Session) -> Run | None:
    """The parent run of this report: the complete one, else the oldest."""
    found = session.ask(lambda: session.client.search_runs([session.experiment_id], _parents_of(session)))
    return min(
        found,
        key=lambda run: (run.data.tags.get("pipeline.complete") != "true", run.info.start_time),
        default=None,
    )


def _parents_of(session: _Session) -> str:
    return f"tags.`pipeline.run_key` = '{session.run_key}' and tags.`pipeline.part` = 'run'"


def _withdraw_if_contested(session: _Session, run_id: str) -> None:
    """Delete this new run and raise _Contested where another process made one of the same report at the same moment.

    A store has no lock that all of its users can hold. But each makes its run before it looks, so of two at least one
    sees the other's.
    """
    found = session.ask(lambda: session.client.search_runs([session.experiment_id], _parents_of(session)))
    if any(run.info.run_id != run_id for run in found):
        session.ask(lambda: session.client.delete_run(run_id))
        session.open_runs.remove(run_id)
        raise _Contested


def _find(session: _Session, condition: str) -> Run | None:
    """The oldest run of the experiment for which `condition` holds."""
    runs = session.ask(
        lambda: session.client.search_runs(
            [session.experiment_id], condition, max_results=1, order_by=["attributes.start_time ASC"]
        )
    )
    return runs[0] if runs else None


def _start(session: _Session, known: Run | None, *, name: str, tags: Mapping[str, str]) -> str:
    """Create the run, or take up one that was left unfinished."""
    owner = {**owner_tags(), "pipeline.run_key": session.run_key}
    if known is not None:
        run_id = str(known.info.run_id)
        session.open_runs.append(run_id)
        # The owner first: a RUNNING run of a dead owner is one that others end.
        _log_values(session, run_id, metrics=(), params={}, tags=owner)
        session.ask(lambda: session.client.update_run(run_id, status="RUNNING"))
        return run_id
    identity = {key: value for key, value in tags.items() if key.startswith(("pipeline.", "mlflow.parent"))}
    run = session.ask(
        lambda: session.client.create_run(
            session.experiment_id,
            start_time=start_ms(session.report),
            tags={**identity, **owner},
            run_name=name,
        )
    )
    session.open_runs.append(run.info.run_id)
    return str(run.info.run_id)


def _log_values(
    session: _Session,
    run_id: str,
    *,
    metrics: Sequence[TrackedMetric],
    params: Mapping[str, str],
    tags: Mapping[str, str],
) -> None:
    """In batches of what MLflow accepts at once; non-finite metrics become tags."""
    from mlflow.entities import Metric, Param, RunTag

    finite, not_finite = split_finite(metrics)
    points = [Metric(each.name, each.value, end_ms(session.report), each.step) for each in finite]
    pairs = [Param(key, shortened(value, LONGEST_PARAM)) for key, value in params.items()]
    labels = [RunTag(key, shortened(value, LONGEST_TAG)) for key, value in {**tags, **not_finite}.items()]
    for batch in batches(points, METRICS_PER_BATCH):
        _send(session, run_id, metrics=batch)
    for batch in batches(pairs, PARAMS_PER_BATCH):
        _send(session, run_id, params=batch)
    for batch in batches(labels, PARAMS_PER_BATCH):
        _send(session, run_id, tags=batch)


def _send(session: _Session, run_id: str, **batch: Any) -> None:
    session.ask(lambda: session.client.log_batch(run_id, synchronous=True, **batch))
