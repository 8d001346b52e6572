"""Addresses at which no MLflow answers: another server, a redirect, a login, silence. Nothing counts as logged."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pipeline.tracking import track
from pipeline.tracking_server import without_login
from pipeline.tracking_store import remedy, tracking_store
from tests import result_builders as build


@pytest.mark.parametrize(
    ("status", "headers", "body", "said"),
    [
        (200, {}, "<html>sign in</html>", "what answers there is no MLflow server: '<html>sign in</html>'"),
        (200, {}, "{}", "what answers there is no MLflow server"),
        (401, {}, "who are you?", "401: who are you? (user and password: MLFLOW_TRACKING_USERNAME"),
        (404, {}, "<html>nothing here</html>", "404"),
        (308, {"Location": "/elsewhere"}, "", "redirects to http://127.0.0.1"),
    ],
)
def test_an_address_that_is_no_mlflow_server_of_ours_is_told_and_nothing_counts_as_logged(
    tmp_path: Path, status: int, headers: dict[str, str], body: str, said: str
) -> None:
    with answering(status, headers, body) as uri:
        result = track(build.report(), run_folder=tmp_path, tracking_uri=uri, artifacts_folder=None)
    assert (result.tracked, result.run_id) == (False, None)
    assert said in result.because


@contextmanager
def answering(status: int, headers: dict[str, str], body: str) -> Iterator[str]:
    """The address of a server that answers every request so; below /elsewhere it says 200 and {}."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            moved = self.path.startswith("/elsewhere")
            self.send_response(200 if moved else status)
            for name, value in ({} if moved else headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"{}" if moved else body.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_a_server_that_takes_the_call_and_never_answers_costs_half_a_minute(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = track(build.report(), run_folder=tmp_path, tracking_uri=uri, artifacts_folder=None)
    assert not result.tracked
    assert "timed out" in result.because


def test_a_link_holds_no_login_and_what_a_browser_needs_stays() -> None:
    assert without_login("http://alice:s3cr3t@[::1]:5000/ml?x=1") == "http://[::1]:5000/ml?x=1"
    assert without_login("http://host") == "http://host"


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("No module named 'psycopg'", "pip install 'psycopg[binary]'"),
        (
            "Detected out-of-date database schema (found version …",
            "mlflow db upgrade 'postgresql://***@h/db'",
        ),
        ("permission denied", ""),
    ],
)
def test_what_mends_a_database_is_told_without_its_password(said: str, fix: str) -> None:
    told = remedy(said, tracking_store("postgresql://alice:s3cr3t@h/db"))
    assert fix in told
    assert bool(fix) == bool(told)
    assert "s3cr3t" not in told
