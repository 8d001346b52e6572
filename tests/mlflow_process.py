"""A real MLflow server on a free port that a test can kill and start again on the same store.

>>> free_port() > 0
True
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """Whether there is an answer of 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


class Server:
    """MLflow with a SQLite file and artifacts by proxy; `start` after `kill` serves the same store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Serve, and return once it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "served")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("a") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                cwd=self.folder,
                start_new_session=True,
                env=os.environ | quiet,
            )
        deadline = time.monotonic() + 120
        while not answers(f"{self.uri}/health"):
            assert self._process.poll() is None, (self.folder / "server.log").read_text("utf-8")
            assert time.monotonic() < deadline, "the server doesn't answer"
            time.sleep(0.3)

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30)
            self._process = None
