"""Against a real MLflow server: logging, promotion, and a server that dies at every point. And our own dashboard."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from pipeline.cli import main
from pipeline.commands import promote_run
from pipeline.errors import StageError, UsageError
from pipeline.tracking import TrackResult, track
from pipeline.tracking_server import comparison_path, dashboard
from tests.mlflow_process import Server, answers, free_port
from tests.promotion_support import shipped_run
from tests.tracking_support import ROOT, client, full_report, log, runs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"))
    running.start()
    yield running
    running.kill()


def experiment_runs(server: Server, experiment: str = "pipeline") -> list[Any]:
    reader = client(server.uri)
    found = reader.get_experiment_by_name(experiment)
    return [] if found is None else list(reader.search_runs([found.experiment_id]))


@pytest.mark.slow
def test_a_real_server_takes_the_same_report_once(server: Server, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")
    first, second = (
        track(
            full_report(),
            run_folder=tmp_path,
            tracking_uri=server.uri,
            artifacts_folder=None,
            experiment="once",
        )
        for _ in range(2)
    )
    assert first.tracked, first.because
    assert second.run_id == first.run_id
    found = experiment_runs(server, "once")
    assert len(found) == 4
    assert [file.path for file in client(server.uri).list_artifacts(first.run_id)] == ["report.json"]
    assert all(len(run.inputs.dataset_inputs) <= 1 for run in found)


@pytest.mark.slow
def test_a_server_registers_a_version_whose_artifacts_tell_where_the_files_are(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    run = shipped_run(tmp_path)
    first, again = (promote_run(run, "int8", alias="shippable", push=None) for _ in range(2))
    assert (first.version, first.added, again.version, again.added) == ("1", True, "1", False)
    reader = client(server.uri)
    version = reader.get_model_version_by_alias(first.name, "shippable")
    assert version.run_id == first.run_id
    assert version.source.startswith("mlflow-artifacts:")
    assert version.tags["checkpoint_folder"] == first.checkpoint_folder
    found = {file.path for file in reader.list_artifacts(first.run_id, "checkpoint")}
    assert found == {f"checkpoint/{name}" for name in ("README.md", "location.json", "manifest.json")}


@pytest.mark.slow
def test_a_server_killed_in_the_middle_gets_the_run_once_when_it_is_back(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    report = full_report(seconds=77.0)
    for index in range(400):
        (tmp_path / f"{index}.txt").write_text(str(index), encoding="utf-8")
    done: list[TrackResult] = []

    def log_it() -> None:
        done.append(
            track(
                report, run_folder=tmp_path, tracking_uri=server.uri, artifacts_folder=None, experiment="cut"
            )
        )

    logging = threading.Thread(target=log_it)
    logging.start()
    while not experiment_runs(server, "cut") and logging.is_alive():
        time.sleep(0.05)
    server.kill()
    logging.join(timeout=120)
    assert [one.tracked for one in done] == [False]
    log_it()
    assert done[-1].tracked is False, "it is still away"
    server.start()
    (left,) = experiment_runs(server, "cut")
    assert left.info.status == "RUNNING"
    # The process that was cut off is this one, which lives: as if it had ended, its mark is taken away.
    client(server.uri).set_tag(left.info.run_id, "pipeline.process_started", "1")
    log_it()
    log_it()
    assert [one.tracked for one in done[-2:]] == [True, True], done[-2:]
    assert {one.run_id for one in done[-2:]} == {left.info.run_id}
    found = experiment_runs(server, "cut")
    assert sorted(run.info.run_name for run in found) == ["fp16", "int4", "int8", "tiny"]
    assert not [run for run in found if run.info.status == "RUNNING"]
    assert len(client(server.uri).list_artifacts(left.info.run_id)) == 400


# --- the dashboard ---------------------------------------------------------------------------------------


def start_dashboard(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own, over the store of `folder`."""
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", "dashboard", "--json", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job started in the background inherits an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.slow
def test_the_dashboard_answers_names_the_last_runs_variants_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    logged = log(full_report(), tmp_path / "mlflow.db", run_folder=tmp_path / "none")
    port = free_port()
    process = start_dashboard(tmp_path, "--port", str(port))
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert told["address"] == f"http://127.0.0.1:{port}"
    assert told["run_id"] == logged.run_id
    assert told["runs"].startswith(f"{told['address']}/#/experiments/")
    asked = parse_qs(urlsplit(urlsplit(told["comparison"]).fragment).query)
    children = {run.info.run_id for run in runs(tmp_path / "mlflow.db")} - {logged.run_id}
    assert set(json.loads(asked["runs"][0])) == children
    assert answers(told["address"])
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out, said) == (0, "", "")
    assert not answers(told["address"])


def test_a_port_in_use_is_refused_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {port}: can't be used"):
            dashboard(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", port=port).__enter__()


def test_a_server_that_is_away_is_told_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://alice:s3cr3t@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert main(["dashboard"]) == StageError.exit_code
    said = capsys.readouterr().err
    assert "Connection refused" in said
    assert "s3cr3t" not in said


def test_the_comparison_names_every_run() -> None:
    path = comparison_path(["a1", "b2"], experiment_id="7")
    assert (
        path
        == "compare-runs?runs=%5B%22a1%22%2C%20%22b2%22%5D&experiments=%5B%227%22%5D&workflowType=machine_learning"
    )
