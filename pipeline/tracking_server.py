"""MLflow's pages on the store of this folder, opened where the last run's variants stand side by side.

with dashboard(tracking_uri=None, port=5000) as served:
    print(served.comparison or served.address)
    served.wait()
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO
from urllib.parse import quote, urlsplit

from pipeline.errors import Interrupted, StageError, UsageError
from pipeline.interruption import first_signal_interrupts
from pipeline.tracking import EXPERIMENT
from pipeline.tracking_store import (
    OpenStore,
    TrackingStore,
    expected_errors,
    open_store,
    redact,
    store_error,
    tracking_store,
)

HOST = "127.0.0.1"
PAGES = "workflowType=machine_learning"
"""The pages for runs with metrics; without it MLflow shows those for traces first."""
START_PATIENCE_S = 90.0
STOP_PATIENCE_S = 10.0


@dataclass
class Dashboard:
    """Pages being served; `runs` are those of the experiment and `comparison` that of the last run's variants.

    Both are None while no run is logged. `process` is None where the server is somebody else's.
    """

    address: str
    runs: str | None
    comparison: str | None
    run_id: str | None
    process: subprocess.Popen[bytes] | None = None

    def wait(self) -> None:
        """Until Ctrl-C, SIGTERM or the server's own end, which is an error. Returns at once without a process."""
        if self.process is not None and (code := self.process.wait()) != 0:
            raise StageError(f"the MLflow server ended by itself with exit code {code}")


@contextlib.contextmanager
def dashboard(*, tracking_uri: str | None, port: int) -> Iterator[Dashboard]:
    """Serve the store's pages on this machine only, and stop when the block is left, however it is left.

    With the address of a server as tracking URI its own pages are meant and nothing is started. Raises UsageError for
    a port in use, StageError where the store or the server doesn't answer.
    """
    store = tracking_store(tracking_uri)
    if not store.is_server:
        _refuse_taken(port)
    found = _last_comparison(store)
    if store.is_server:
        yield _dashboard(without_login(store.uri).rstrip("/"), found)
        return
    with tempfile.TemporaryFile() as log:
        process = _start(store, port=port, log=log)
        try:
            address = f"http://{HOST}:{port}"
            _wait_until_it_answers(address, process, log, store=store)
            served = _dashboard(address, found)
            served.process = process
            yield served
        finally:
            _stop(process)


def serve_pages(*, port: int, say: Callable[[str], None], as_json: bool, in_browser: bool) -> None:
    """The `dashboard` command: tell the addresses, serve until Ctrl-C or SIGTERM, which end it in good order."""
    ended = contextlib.suppress(Interrupted, KeyboardInterrupt)
    with first_signal_interrupts(), ended, dashboard(tracking_uri=None, port=port) as served:
        told = {
            "address": served.address,
            "runs": served.runs,
            "comparison": served.comparison,
            "run_id": served.run_id,
        }
        nothing = "no run is logged yet"
        lines = [
            f"MLflow: {served.address}",
            f"runs: {served.runs or nothing}",
            f"last run's variants: {served.comparison or nothing}",
        ]
        say(json.dumps(told) if as_json else "\n".join(lines))
        if in_browser:
            webbrowser.open(served.comparison or served.address)
        served.wait()


@dataclass(frozen=True)
class _LastRun:
    """The last run of a recipe, and paths of pages behind `ADDRESS/#/`."""

    run_id: str
    runs: str
    comparison: str | None


def _dashboard(address: str, last: _LastRun | None) -> Dashboard:
    if last is None:
        return Dashboard(address, None, None, None)
    comparison = None if last.comparison is None else f"{address}/#/{last.comparison}"
    return Dashboard(address, f"{address}/#/{last.runs}", comparison, last.run_id)


def comparison_path(run_ids: Sequence[str], *, experiment_id: str) -> str:
    """Path of MLflow's page that compares runs, behind `ADDRESS/#/`."""
    runs, experiments = (quote(json.dumps(ids)) for ids in (list(run_ids), [experiment_id]))
    return f"compare-runs?runs={runs}&experiments={experiments}&{PAGES}"


def without_login(address: str) -> str:
    """An address that a browser can be sent to: user and password are asked for there, and are no part of a link.

    >>> without_login("https://alice:s3cr3t@host:5000/mlflow")
    'https://host:5000/mlflow'
    """
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _last_comparison(store: TrackingStore) -> _LastRun | None:
    """The last run of a recipe and the pages that show it; None where nothing is logged."""
    try:
        with open_store(store) as opened:
            return _last_run(opened)
    except expected_errors() as error:
        raise StageError(store_error(error, store)) from None


def _last_run(opened: OpenStore) -> _LastRun | None:
    client = opened.client
    experiment = opened.ask(lambda: client.get_experiment_by_name(EXPERIMENT))
    if experiment is None:
        return None
    place = str(experiment.experiment_id)
    found = opened.ask(
        lambda: client.search_runs(
            [place], "tags.`pipeline.part` = 'run'", max_results=1, order_by=["attributes.start_time DESC"]
        )
    )
    if not found:
        return None
    run_id = str(found[0].info.run_id)
    children = opened.ask(
        lambda: client.search_runs(
            [place], f"tags.`mlflow.parentRunId` = '{run_id}'", order_by=["attributes.start_time ASC"]
        )
    )
    opened.stop.obey()
    ids = [str(child.info.run_id) for child in children]
    comparison = comparison_path(ids, experiment_id=place) if ids else None
    return _LastRun(run_id, f"experiments/{place}/runs?{PAGES}", comparison)


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(
                f"--port {port}: can't be used on {HOST} ({reason}); name another port, 0 to 65535"
            ) from None


def _start(store: TrackingStore, *, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """MLflow's server in a group of processes of its own, so that all of its workers can be stopped."""
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        HOST,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    environment = {
        **os.environ,
        # The command line is seen by everybody on the machine; a URI may hold a password.
        "MLFLOW_BACKEND_STORE_URI": store.uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    environment.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.Popen(
        command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
    )


def _wait_until_it_answers(
    address: str, process: subprocess.Popen[bytes], log: IO[bytes], *, store: TrackingStore
) -> None:
    deadline = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{address}/health", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.3)
    log.seek(0)
    said = redact(log.read().decode("utf-8", errors="replace"), uri=store.uri).strip().splitlines()[-3:]
    raise StageError(f"the MLflow server didn't start: {' / '.join(said) or 'it said nothing'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server with its workers: asked first, then forced."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_PATIENCE_S)
            return
