"""Where runs are tracked, and how it is talked to: URI, secrets, signals, locks, owners, patience.

>>> redact("no route to http://alice:s3cr3t@host:5000/api", uri="http://alice:s3cr3t@host:5000")
'no route to http://***@host:5000/api'
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from pipeline import provenance
from pipeline.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from mlflow import MlflowClient

Answer = TypeVar("Answer")

SERVERS = ("http", "https")
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")

ENVIRONMENT = {
    # A server that is away may cost a minute, not the hours that seven doubling retries of 120 s add up to.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "12",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "PGCONNECT_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # "View run …" lines would stand in standard output, which is for data.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Set while logging, unless the user has set them."""


@dataclass(frozen=True)
class TrackingStore:
    """A tracking URI that MLflow accepts. Print `shown`, never `uri`: that one may hold a password."""

    uri: str
    artifact_location: str | None
    """Of a new experiment; None leaves it to the server."""
    lock: Path | None = None
    """Held while the tables of a SQLite file are created: two processes doing so at once break it."""

    @property
    def database(self) -> Path | None:
        """The SQLite file, if it is one."""
        return _sqlite_path(self.uri) if self.lock is not None else None

    @property
    def shown(self) -> str:
        """The URI without user and password."""
        return redact(self.uri, uri=self.uri)

    @property
    def is_server(self) -> bool:
        """Whether it is reached over HTTP."""
        return urlsplit(self.uri).scheme in SERVERS


def tracking_store(tracking_uri: str | None, *, artifacts_folder: Path | None = None) -> TrackingStore:
    """The store of `tracking_uri`, else of MLFLOW_TRACKING_URI, else `mlruns/mlflow.db` here.

    Raises UsageError for a folder, which MLflow no longer accepts as a store, and for unknown schemes.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd()}/mlruns/mlflow.db"
    location = artifacts_folder.resolve().as_uri() if artifacts_folder is not None else None
    if uri == "databricks" or urlsplit(uri).scheme in SERVERS:
        return TrackingStore(uri, location)
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme not in DATABASES:
        raise UsageError(_refusal(uri, scheme))
    if scheme != "sqlite":
        return TrackingStore(uri, location or (Path.cwd() / "mlruns" / "artifacts").as_uri())
    database = _sqlite_path(uri)
    return TrackingStore(
        uri, location or (database.parent / "artifacts").as_uri(), database.with_name(f"{database.name}.lock")
    )


def _sqlite_path(uri: str) -> Path:
    path = uri.partition(":///")[2].partition("?")[0]
    if not path or path == ":memory:":
        raise UsageError(f"tracking URI {uri!r}: name a file, as in sqlite:///{Path.cwd()}/mlruns/mlflow.db")
    return Path(path).resolve()


def _refusal(uri: str, scheme: str) -> str:
    shown = redact(uri, uri=uri)
    if scheme not in ("", "file"):
        known = ", ".join((*DATABASES, *SERVERS))
        return f"tracking URI {shown!r}: unknown scheme {scheme!r}; allowed are {known}"
    folder = Path(unquote(urlsplit(uri).path) if scheme == "file" else uri).resolve()
    return (
        f"tracking URI {shown!r} is a folder, which MLflow no longer accepts as a store; "
        f"use sqlite:///{folder}/mlflow.db (artifacts stay files) or the http(s) address of a server"
    )


def redact(text: str, *, uri: str) -> str:
    """`text` without credentials; the password of `uri` is hidden wherever it stands, encoded or not."""
    try:
        password = urlsplit(uri).password or ""
    except ValueError:
        password = ""
    text = provenance.redact(text)
    for secret in {password, unquote(password)} - {""}:
        text = text.replace(secret, "***")
    return text


def server_message(body: str) -> str:
    """The message in a server's JSON error, or the body as it is."""
    try:
        found = json.loads(body)
    except ValueError:
        return body
    return str(found.get("message", body)) if isinstance(found, dict) else body


@contextmanager
def default_environment() -> Iterator[None]:
    """`ENVIRONMENT` for as long as the block runs; what the user has set stays, and all is put back."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


@contextmanager
def quiet() -> Iterator[None]:
    """Hide other packages' chatter: table creation, retries, and deprecations that only they can mend."""
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic", "urllib3")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclass
class StopRequest:
    """Whether Ctrl-C or SIGTERM came."""

    made: bool = False

    def obey(self) -> None:
        """Raise Interrupted when a stop was requested."""
        if self.made:
            raise Interrupted("stopped while talking to MLflow; what a run has measured is in its report")


@contextmanager
def stop_between_calls() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request that is obeyed between two calls of the store.

    An exception in the middle of a database call would leave its transaction open and the file locked, so
    that the run couldn't even be marked as killed. The second signal raises KeyboardInterrupt at once.
    """
    request = StopRequest()

    def stop(*_: object) -> None:
        if request.made:
            raise KeyboardInterrupt
        request.made = True

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def file_lock(path: Path | None) -> Iterator[None]:
    """Hold an exclusive lock on `path`, created when needed; goes on without it after a minute."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60
    with path.open("w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)
        yield


def owner_tags() -> dict[str, str]:
    """Which process logs a run, so that a later one can tell whether it still lives."""
    import psutil

    return {
        "pipeline.host": provenance.host_digest(),
        "pipeline.pid": str(os.getpid()),
        # A process id is given again after a while; with its start it is unique.
        "pipeline.process_started": str(int(psutil.Process().create_time())),
    }


def owner_is_alive(tags: Mapping[str, str]) -> bool:
    """Whether the process of a run's `owner_tags` still runs on this machine."""
    import psutil

    try:
        started = int(psutil.Process(int(tags["pipeline.pid"])).create_time())
    except (KeyError, ValueError, psutil.NoSuchProcess):
        return False
    except psutil.AccessDenied:
        return True
    return abs(started - int(tags.get("pipeline.process_started", started))) <= 1


# --- talking to it ---------------------------------------------------------------------------------------


LOCK_PATIENCE_S = 45.0
"""How long a locked SQLite file, or another process creating its tables, is waited for."""

SIGN_IN = "(user and password: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD)"

TRANSIENT = ("database is locked", "already exists", "duplicate column", "no such table")
"""What SQLite says while another process writes, or while it creates the tables."""


def expected_errors() -> tuple[type[Exception], ...]:
    """What a store that is away, locked, full, refused or without its driver raises."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError, CommandError, OSError, ModuleNotFoundError)


def remedy(said: str, store: TrackingStore) -> str:
    """What mends a missing driver, a database of another MLflow, or one whose making was killed half way."""
    said = said.lower()
    if "no module named 'psycopg'" in said:
        return "; install the driver, pip install 'psycopg[binary]'"
    if "out-of-date database schema" not in said:
        return ""
    # It says so of a newer schema, too.
    made = f"; if an older MLflow made it: mlflow db upgrade '{store.shown}'; if a newer one did: install that version"
    if store.lock is None:
        return made
    return f"{made}; if its making was interrupted, it holds no run: remove {_sqlite_path(store.uri)}"


def ask_server(store: TrackingStore) -> None:
    """Ask an HTTP server something cheap before anything else.

    MLflow's own client turns repeated 5xx answers into "too many 500 error responses" and drops what the
    server said (mlflow/mlflow#6169); this request keeps the answer's text.
    """
    if not store.is_server:
        return
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    answer = http_request(
        get_default_host_creds(store.uri),
        "/api/2.0/mlflow/experiments/get",
        "GET",
        max_retries=1,
        timeout=10,
        raise_on_status=False,
        params={"experiment_id": "0"},
    )
    if answer.history:
        # What is sent with POST would arrive as GET.
        raise MlflowException(
            f"it redirects to {urlsplit(answer.url).scheme}://{urlsplit(answer.url).netloc}: name that"
        )
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        raise MlflowException(f"the server answers 401: {server_message(answer.text)} {SIGN_IN}")
    # Somebody who may not see the default experiment (403) may have experiments of their own; 404: it was deleted.
    if answer.status_code not in (HTTPStatus.OK, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
        raise MlflowException(f"the server answers {answer.status_code}: {server_message(answer.text)}")
    if answer.status_code == HTTPStatus.OK and '"experiment"' not in answer.text:
        raise MlflowException(f"what answers there is no MLflow server: {answer.text[:100]!r}")


@dataclass(frozen=True)
class OpenStore:
    """A store that answers, while its block lasts."""

    store: TrackingStore
    client: MlflowClient
    stop: StopRequest

    def ask(self, call: Callable[[], Answer]) -> Answer:
        """One call, unless a stop was requested; waits for locks."""
        return patiently(call, stop=self.stop)


@contextmanager
def open_store(store: TrackingStore) -> Iterator[OpenStore]:
    """Talk to the store, MLflow kept quiet, Ctrl-C and SIGTERM obeyed between calls. Raises `expected_errors`."""
    with default_environment(), quiet(), stop_between_calls() as stop:
        ask_server(store)
        yield OpenStore(store, patiently(lambda: open_client(store), stop=stop), stop)


def store_error(error: Exception, store: TrackingStore) -> str:
    """Which store it was and what it said, on one line and without secrets, and what mends it."""
    said = redact(" ".join(str(error).split()), uri=store.uri)[:600] or type(error).__name__
    return f"MLflow at {store.shown}: {said}{remedy(said, store)}"


def open_client(store: TrackingStore) -> MlflowClient:
    """A client of the store; the tables of a new SQLite file are made by one process at a time."""
    from mlflow import MlflowClient
    from mlflow.store.db import utils

    # Ten tries with doubling pauses would take minutes; no environment variable shortens them.
    utils.MAX_RETRY_COUNT = 3
    with file_lock(store.lock):
        return MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)


def patiently(call: Callable[[], Answer], *, stop: StopRequest) -> Answer:
    """Call again while another process holds the SQLite file or creates its tables, for a bounded time."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    expected = expected_errors()
    while True:
        stop.obey()
        try:
            return call()
        except expected as error:
            said = str(error).lower()
            if time.monotonic() >= deadline or not any(words in said for words in TRANSIENT):
                raise
            time.sleep(0.5)
