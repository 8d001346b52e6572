"""Which tracking URIs are taken, what is never printed, and how a stop is obeyed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from pipeline.errors import Interrupted
from pipeline.tracking import track
from pipeline.tracking_store import (
    file_lock,
    owner_is_alive,
    owner_tags,
    redact,
    server_message,
    stop_between_calls,
    tracking_store,
)
from tests import result_builders as build


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "/tmp/mlruns", "mlruns"])
def test_a_folder_is_refused_with_the_form_that_works(uri: str, tmp_path: Path) -> None:
    result = track(build.report(), run_folder=tmp_path, tracking_uri=uri, artifacts_folder=None)
    assert not result.tracked
    assert "is a folder" in result.because
    assert "use sqlite:///" in result.because
    assert result.because.count("/mlflow.db") == 1


def test_an_unknown_scheme_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    result = track(build.report(), run_folder=tmp_path, tracking_uri="ftp://a:b@c/d", artifacts_folder=None)
    assert "unknown scheme 'ftp'; allowed are sqlite" in result.because
    assert "a:b" not in result.because


def test_without_any_uri_the_store_is_a_sqlite_file_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = tracking_store(None)
    assert store.uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    assert store.artifact_location == f"file://{tmp_path}/mlruns/artifacts"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    assert (tracking_store(None).uri, tracking_store(None).artifact_location) == (
        "http://localhost:5000",
        None,
    )
    assert tracking_store("sqlite:////a/b.db").artifact_location == "file:///a/artifacts"


def test_artifacts_go_where_they_are_asked_to_go(tmp_path: Path) -> None:
    store = tracking_store("sqlite:////a/b.db", artifacts_folder=tmp_path / "my artifacts")
    assert store.artifact_location == f"file://{tmp_path}/my%20artifacts"


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("to http://alice:s3cr3t@host:1/ failed", "http://alice:s3cr3t@host:1/"),
        ("password s3cr3t refused", "postgresql://alice:s3cr3t@host/db"),
        ("password p@ss refused: s3cr3t", "postgresql://alice:s3cr3t@host/db"),
        ("at sqlite:////x.db?password=s3cr3t now", "sqlite:////x.db"),
    ],
)
def test_credentials_are_redacted(text: str, uri: str) -> None:
    assert "s3cr3t" not in redact(text, uri=uri)
    assert "alice" not in redact(text, uri=uri)


def test_secrets_of_the_environment_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test123")
    assert redact("token hf_test123", uri="sqlite:////x.db") == "token ***"


def test_a_process_id_that_was_given_again_is_not_taken_for_the_owner() -> None:
    assert owner_is_alive(owner_tags())
    assert not owner_is_alive({**owner_tags(), "pipeline.process_started": "1"})
    assert not owner_is_alive({})


def test_the_name_of_the_host_is_not_stored() -> None:
    assert not [tag for tag in owner_tags().values() if os.uname().nodename in tag]


def test_the_first_signal_is_obeyed_between_calls_and_the_second_at_once() -> None:
    with stop_between_calls() as stop:
        stop.obey()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            stop.obey()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with stop_between_calls():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_lock_excludes_and_is_released(tmp_path: Path) -> None:
    order: list[str] = []
    with file_lock(tmp_path / "new" / "lock"):
        waiting = threading.Thread(target=lambda: take(tmp_path / "new" / "lock", order))
        waiting.start()
        order.append("first")
    waiting.join(timeout=10)
    assert order == ["first", "second"]


def take(path: Path, order: list[str]) -> None:
    with file_lock(path):
        order.append("second")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"message": "no space"}', "no space"),
        ("<h1>Bad gateway</h1>", "<h1>Bad gateway</h1>"),
        ("[1]", "[1]"),
    ],
)
def test_the_servers_own_words_are_kept(body: str, message: str) -> None:
    assert server_message(body) == message
