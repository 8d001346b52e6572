"""What ends up in MLflow, in which state, and what happens when the store is away, locked or refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pipeline.results import MetricScore
from pipeline.tracked_labels import run_key
from pipeline.tracking import track
from pipeline.tracking_store import owner_tags
from tests import result_builders as build
from tests.tracking_support import ROOT, by_name, client, full_report, log, runs, start_logging


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with its tables made; making them takes seconds, copying them nothing."""
    folder = tmp_path_factory.mktemp("tracking")
    result = log(build.report(), folder / "mlflow.db", run_folder=folder / "none", experiment="first")
    assert result.tracked, result.because
    return folder / "mlflow.db"


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> Path:
    """This test's own copy of the store."""
    return Path(shutil.copy(empty_database, tmp_path / "mlflow.db"))


# --- what is logged -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logged(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds `full_report`, to read only."""
    folder = tmp_path_factory.mktemp("logged")
    database = Path(shutil.copy(empty_database, folder / "mlflow.db"))
    run_folder = folder / "run"
    (run_folder / "plots").mkdir(parents=True)
    (run_folder / "report.json").write_text("{}", encoding="utf-8")
    (run_folder / "plots" / "speed.svg").write_text("<svg/>", encoding="utf-8")
    result = log(full_report(verdict="error"), database, run_folder=run_folder, note="| int8 | ship |")
    assert result.tracked, result.because
    return database


def test_a_run_has_a_child_for_each_variant(logged: Path) -> None:
    found = by_name(logged)
    assert set(found) == {"tiny", "fp16", "int8", "int4"}
    parents = {name: run.data.tags.get("mlflow.parentRunId") for name, run in found.items()}
    parent = found["tiny"].info.run_id
    assert parents == {"tiny": None, "fp16": parent, "int8": parent, "int4": parent}
    statuses = {name: run.info.status for name, run in found.items()}
    assert statuses == {"tiny": "FAILED", "fp16": "FINISHED", "int8": "FINISHED", "int4": "FAILED"}
    assert found["tiny"].info.end_time - found["tiny"].info.start_time == 90_000


def test_tags_params_and_metrics_of_a_child_are_those_of_its_variant(logged: Path) -> None:
    child = by_name(logged)["int8"]
    assert child.data.tags["finding.min_speedup"] == "pass"
    assert child.data.params["quantizer.kind"] == "quanto"
    assert child.data.metrics["quality.piqa.acc_none"] == 0.75
    assert "quality.piqa.f1" not in child.data.metrics


def test_the_files_of_the_run_are_artifacts_under_their_own_paths(logged: Path) -> None:
    reader, run_id = client(logged), by_name(logged)["tiny"].info.run_id
    assert {file.path for file in reader.list_artifacts(run_id)} == {"report.json", "plots"}
    assert [file.path for file in reader.list_artifacts(run_id, "plots")] == ["plots/speed.svg"]


def test_series_keep_every_batch_size_as_a_step(logged: Path) -> None:
    run_id = by_name(logged)["int8"].info.run_id
    history = client(logged).get_metric_history(run_id, "speed.decode_tokens_per_s")
    assert [(point.step, point.value) for point in history] == [(1, 40.0), (8, 160.0)]


def test_verdict_and_note_are_tags_and_no_verdict_is_a_metric(logged: Path) -> None:
    found = by_name(logged)
    assert found["tiny"].data.tags["verdict"] == "error"
    assert found["tiny"].data.tags["verdict.int4"] == "error"
    assert found["tiny"].data.tags["mlflow.note.content"] == "| int8 | ship |"
    assert all("verdict" not in name for run in found.values() for name in run.data.metrics)


def test_samples_are_a_table_on_the_variants_run_with_the_baselines_answers(
    logged: Path, tmp_path: Path
) -> None:
    child = by_name(logged)["int8"]
    path = client(logged).download_artifacts(child.info.run_id, "samples/piqa.json", str(tmp_path))
    table = json.loads(Path(path).read_text(encoding="utf-8"))
    assert table["columns"] == ["document", "change", "acc", "baseline acc"]
    assert table["data"] == [["piqa-1", "gained", 1.0, 0.0], ["piqa-0", "", 1.0, 1.0]]
    listed = json.loads(child.data.tags["mlflow.loggedArtifacts"])
    assert listed == [{"path": "samples/piqa.json", "type": "table"}]


def test_the_tasks_documents_are_inputs_of_parent_and_children(logged: Path) -> None:
    found = by_name(logged)
    for name in ("tiny", "fp16", "int8"):
        (dataset,) = [one.dataset for one in found[name].inputs.dataset_inputs]
        assert (dataset.name, json.loads(dataset.profile)["num_rows"]) == ("piqa", 2)
    assert not found["int4"].inputs.dataset_inputs


def test_more_metrics_than_a_batch_takes_are_all_logged(database: Path, tmp_path: Path) -> None:
    scores = {f"m{i}": MetricScore(score=float(i), stderr=None, higher_is_better=True) for i in range(1500)}
    variant = build.variant("int8", quality=build.quality(build.task(metrics=scores, primary_metric="m0")))
    report = build.report(build.variant_report(build.variant("fp16")), build.variant_report(variant))
    assert log(report, database, run_folder=tmp_path / "none").tracked
    metrics = by_name(database)["int8"].data.metrics
    assert sum(name.startswith("quality.piqa.m") for name in metrics) == 1500


# --- states ---------------------------------------------------------------------------------------------


def test_a_report_logged_twice_is_one_run(database: Path, tmp_path: Path) -> None:
    first, second = (log(full_report(), database, run_folder=tmp_path / "none") for _ in range(2))
    assert (second.tracked, second.run_id) == (True, first.run_id)
    assert len(runs(database)) == 4
    other = log(full_report(seconds=91.0), database, run_folder=tmp_path / "none")
    assert other.run_id != first.run_id


def test_a_log_that_was_cut_short_is_completed_in_the_same_run(database: Path, tmp_path: Path) -> None:
    first = log(full_report(), database, run_folder=tmp_path / "none")
    editor = client(database)
    editor.delete_tag(first.run_id, "pipeline.complete")
    editor.set_terminated(first.run_id, "KILLED")
    second = log(full_report(), database, run_folder=tmp_path / "none")
    assert second.run_id == first.run_id
    found = by_name(database)
    assert len(runs(database)) == 4
    assert found["tiny"].info.status == "FINISHED"
    history = client(database).get_metric_history(found["int8"].info.run_id, "speed.decode_tokens_per_s")
    assert len(history) == 2


def test_runs_that_a_dead_process_left_running_are_ended(database: Path, tmp_path: Path) -> None:
    log(full_report(), database, run_folder=tmp_path / "none")
    editor = client(database)
    experiment = editor.get_experiment_by_name("pipeline").experiment_id
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = owner_tags()
    dead = editor.create_run(experiment, tags={**mine, "pipeline.pid": str(gone.pid)})
    alive = editor.create_run(experiment, tags=mine)
    foreign = editor.create_run(experiment, tags={**mine, "pipeline.host": "elsewhere", "pipeline.pid": "1"})
    log(full_report(seconds=91.0), database, run_folder=tmp_path / "none")
    states = [editor.get_run(run.info.run_id).info.status for run in (dead, alive, foreign)]
    assert states == ["KILLED", "RUNNING", "RUNNING"]


def status_in(database: Path, status: str) -> int:
    with sqlite3.connect(database) as connection:
        (count,) = connection.execute("select count(*) from runs where status = ?", (status,)).fetchone()
    connection.close()
    return int(count)


def test_a_database_that_was_half_made_is_told_with_what_mends_it(database: Path, tmp_path: Path) -> None:
    log(full_report(), database, run_folder=tmp_path / "none")
    half = database.with_name("half.db")  # MLflow looks at the tables of a file once a process
    half.write_bytes(database.read_bytes())
    with sqlite3.connect(half) as connection:  # as a kill between two of MLflow's migrations leaves it
        connection.execute("update alembic_version set version_num = '451aebb31d03'")
    connection.close()
    result = log(full_report(), half, run_folder=tmp_path / "none")
    assert not result.tracked
    assert f"mlflow db upgrade 'sqlite:///{half}'" in result.because
    assert f"remove {half}" in result.because


def test_sigterm_while_logging_leaves_no_run_running(database: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for index in range(3_000):
        (folder / f"{index}.txt").touch()
    process = start_logging(full_report(), database, folder)
    deadline = time.monotonic() + 40
    while not status_in(database, "RUNNING") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert (status_in(database, "RUNNING"), status_in(database, "KILLED")) == (0, 1)


def test_an_exception_while_logging_marks_the_runs_failed(database: Path, tmp_path: Path) -> None:
    report = full_report()
    bad = report.variants[1].model_copy(update={"quantizer": None})
    with pytest.raises(AttributeError):
        log(
            report.model_copy(update={"variants": (report.variants[0], bad)}),
            database,
            run_folder=tmp_path / "none",
        )
    assert {name: run.info.status for name, run in by_name(database).items()} == {
        "tiny": "FAILED",
        "fp16": "FINISHED",
        "int8": "FAILED",
    }


# --- stores that are away, locked or new --------------------------------------------------------------


def test_a_server_that_is_away_costs_seconds_and_tells_no_password(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    uri = "http://alice:s3cr3t@127.0.0.1:9/"
    result = track(build.report(), run_folder=tmp_path, tracking_uri=uri, artifacts_folder=None)
    assert time.monotonic() - started < 60
    assert (result.tracked, result.run_id) == (False, None)
    assert "Connection refused" in result.because
    printed = capfd.readouterr()
    assert "s3cr3t" not in result.because + printed.out + printed.err + caplog.text


class Refusing(BaseHTTPRequestHandler):
    """A server whose every answer is an error that says why."""

    def do_GET(self) -> None:
        body = json.dumps({"error_code": "INTERNAL_ERROR", "message": "no space left for experiments"})
        self.send_response(500)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def refusing_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_the_server_said_is_told_and_not_only_that_it_was_retried(
    refusing_server: str, tmp_path: Path
) -> None:
    result = track(build.report(), run_folder=tmp_path, tracking_uri=refusing_server, artifacts_folder=None)
    assert not result.tracked
    assert "the server answers 500: no space left for experiments" in result.because


def test_a_database_that_is_none_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database, " * 100, encoding="utf-8")
    result = log(build.report(), tmp_path / "mlflow.db", run_folder=tmp_path / "none")
    assert not result.tracked
    assert "file is not a database" in result.because


def test_a_locked_database_is_waited_for(database: Path, tmp_path: Path) -> None:
    holder = sqlite3.connect(database, check_same_thread=False, isolation_level=None)
    holder.execute("begin exclusive")
    release = threading.Timer(3.0, holder.rollback)
    release.start()
    result = log(build.report(), database, run_folder=tmp_path / "none")
    release.join()
    holder.close()
    assert result.tracked, result.because
    assert len(runs(database)) == 3


def test_the_environment_and_signal_handlers_are_put_back(database: Path, tmp_path: Path) -> None:
    before = (dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    log(build.report(), database, run_folder=tmp_path / "none")
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.slow
def test_two_processes_may_create_the_same_store_at_once(tmp_path: Path) -> None:
    database = tmp_path / "new" / "mlflow.db"
    database.parent.mkdir()
    processes = [start_logging(full_report(seconds=s), database, tmp_path / "none") for s in (90.0, 91.0)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len(runs(database)) == 8


# --- the documentation ----------------------------------------------------------------------------------


def test_every_search_of_the_docs_is_one_that_mlflow_takes(logged: Path) -> None:
    reader = client(logged)
    experiment = reader.get_experiment_by_name("pipeline").experiment_id
    sections = (ROOT / "docs" / "mlflow.md").read_text("utf-8").split("\n## ")
    asked = dict.fromkeys(("Searches", "The registry"), 0)
    for section in sections:
        title = section.splitlines()[0]
        for line in section.splitlines():
            found = re.match(r"\| [^|]+ \| (?:``(.+?)``|`(.+?)`) \|$", line)
            if title not in asked or found is None or "filter_string" in line:
                continue
            query = found[1] or found[2]
            if title == "Searches":
                reader.search_runs([experiment], query)
            else:
                reader.search_model_versions(query)
            asked[title] += 1
    assert asked["Searches"] >= 15
    assert asked["The registry"] == 5


LOG_TOGETHER = """
import sys
from pathlib import Path
from pipeline.tracking import track
from tests.tracking_support import client, full_report
me, database, meeting, rounds = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
client(f"sqlite:///{database}").search_experiments()
for turn in range(rounds):
    (meeting / f"{turn}-{me}").touch()
    while len(list(meeting.glob(f"{turn}-*"))) < 2:
        pass
    result = track(
        full_report(seconds=100.0 + turn),
        run_folder=meeting / "none",
        tracking_uri=f"sqlite:///{database}",
        artifacts_folder=None,
    )
    print(result.tracked, result.because)
"""


@pytest.mark.slow
def test_two_processes_that_log_one_report_at_the_same_moment_log_it_once(
    database: Path, tmp_path: Path
) -> None:
    arguments = [str(database), str(tmp_path), "3"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOG_TOGETHER, me, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for me in "ab"
    ]
    told = [process.communicate(timeout=240)[0].splitlines() for process in processes]
    for turn in zip(*told, strict=True):
        assert any(one.startswith("True logged to") for one in turn), told
    assert Counter(run.info.run_name for run in runs(database)) == {
        "tiny": 3,
        "fp16": 3,
        "int8": 3,
        "int4": 3,
    }


def test_a_complete_run_is_found_though_an_unfinished_one_of_the_same_report_is_there(
    database: Path, tmp_path: Path
) -> None:
    report = full_report()
    logged = log(report, database, run_folder=tmp_path / "none")
    writer = client(database)
    tags = {"pipeline.part": "run", "pipeline.run_key": run_key(report)}
    left = writer.create_run(writer.get_run(logged.run_id).info.experiment_id, start_time=1, tags=tags)
    writer.set_terminated(left.info.run_id, "KILLED")
    assert log(report, database, run_folder=tmp_path / "none").run_id == logged.run_id
    assert len(runs(database)) == 5
