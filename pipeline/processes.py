"""The parent's side of `worker`: start a stage in a fresh process, hear its progress, take its result.

    manifest = run_stage("quantize", request, CheckpointManifest, log=log, progress=print)

The parent blocks on the worker's pipe, so that it sleeps while the worker is timed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pipeline.alternation import TurnResult
from pipeline.errors import StageError
from pipeline.speed_results import SpeedShape
from pipeline.stages import Progress, SpeedOpened, SpeedQuestion, SpeedRequest
from pipeline.store import telling_of_full_disk
from pipeline.values import AnyValue, Value

_Reason = Literal["failed", "out_of_memory"]
_BAD_ALLOC = b"std::bad_alloc"
"""What C++ says on standard error before it aborts because an allocation was refused."""
_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
    signal.SIGSYS,
}
"""What code does to its own process. Any other signal but SIGKILL is somebody's wish that it end."""


class WorkerError(StageError):
    """A worker gave no result; `reason` says whether memory ran out, `crashed` whether its own code ended it."""

    def __init__(self, message: str, *, reason: _Reason, crashed: bool = False) -> None:
        super().__init__(message)
        self.reason, self.crashed = reason, crashed


class Worker:
    """A running worker process; use it in a `with` block, which ends the process in every case."""

    def __init__(self, stage: str, request: Value, *, log: Path) -> None:
        """Raises StageError when the system lets no process, log or temporary file be made."""
        self._log = log
        with contextlib.ExitStack() as undo:
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="pipeline-worker-")
                undo.callback(self._folder.cleanup)
                self.result_path = Path(self._folder.name) / "result.json"
                self._process = self._start(stage, request)
            except OSError as error:
                reason: _Reason = "out_of_memory" if error.errno == errno.ENOMEM else "failed"
                message = f"the process of stage {stage} could not be started: {error}"
                raise WorkerError(message, reason=reason) from error
            undo.pop_all()

    def _start(self, stage: str, request: Value) -> subprocess.Popen[str]:
        request_path = self.result_path.with_name("request.json")
        request_path.write_text(request.to_json(), encoding="utf-8")
        with telling_of_full_disk(self._log), self._log.open("a", encoding="utf-8") as log_file:
            log_file.write(f"=== {stage}\n")
            log_file.flush()
            self._log_start = log_file.tell()
            arguments = [stage, str(request_path), str(self.result_path), str(os.getpid())]
            return subprocess.Popen(
                [sys.executable, "-m", "pipeline.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                encoding="utf-8",
                errors="backslashreplace",
                env=_environment(),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):  # a line that a dead worker never read
                    pipe.close()
        self._folder.cleanup()

    def send(self, message: dict[str, Any]) -> None:
        """One line to the worker; a worker that has died shows at the next `wait_for`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def wait_for(self, event: str, *, progress: Progress) -> dict[str, Any]:
        """The next message of that kind; progress is passed on. Raises WorkerError when the worker ends first."""
        assert self._process.stdout is not None
        failure: dict[str, Any] = {}
        for line in self._process.stdout:
            message = self._message(line)
            if message["event"] == event:
                return dict(message)
            if message["event"] == "progress":
                progress(message["text"])
            elif message["event"] == "failure":
                failure = message
        status = self._process.wait()
        if event == "end" and status == 0:
            return {}
        raise self._failed(failure, status)

    def _message(self, line: str) -> dict[str, Any]:
        """A line of the protocol; what was printed before the worker took over its output goes to the log."""
        try:
            message = json.loads(line)
            if isinstance(message["event"], str):
                return dict(message)
        except (ValueError, TypeError, LookupError):
            pass
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log_file:
            log_file.write(line)
        return {"event": ""}

    def _failed(self, failure: dict[str, Any], status: int) -> WorkerError:
        if failure:
            return WorkerError(failure["message"], reason=failure["reason"])
        if status == -signal.SIGKILL:
            message = "the process was killed (signal 9): most likely the system ran out of memory"
            return WorkerError(message, reason="out_of_memory")
        if status == -signal.SIGABRT and _BAD_ALLOC in self._last_words():
            message = "the process was refused memory and gave up (std::bad_alloc)"
            return WorkerError(message, reason="out_of_memory", crashed=True)
        crashed = -status in _CRASHES
        if status < 0 and not crashed:
            message = f"the process was told to end from outside (signal {-status}); see {self._log}"
            return WorkerError(message, reason="failed")
        what = f"by signal {-status}" if crashed else f"with status {status}"
        return WorkerError(f"the process ended {what}; see {self._log}", reason="failed", crashed=crashed)

    def _last_words(self) -> bytes:
        """The end of what it wrote into the log."""
        try:
            with self._log.open("rb") as log_file:
                log_file.seek(max(self._log_start, self._log.stat().st_size - 4096))
                return log_file.read()
        except OSError:
            return b""


def run_stage(stage: str, request: Value, kind: type[AnyValue], *, log: Path, progress: Progress) -> AnyValue:
    """Run a stage to its end in a fresh process. Raises WorkerError with the worker's own reason."""
    with Worker(stage, request, log=log) as worker:
        worker.wait_for("end", progress=progress)
        try:
            result = worker.result_path.read_bytes()
        except FileNotFoundError:
            message = f"the process of stage {stage} ended without a result; see {log}"
            raise WorkerError(message, reason="failed") from None
        return kind.model_validate_json(result)


class Conversation(Worker):
    """A stage that stays loaded in its own process and answers questions, one at a time."""

    def __init__(self, stage: str, request: Value, *, log: Path, progress: Progress) -> None:
        """Returns once it is loaded; `opened` is what the stage tells of itself. Raises WorkerError."""
        super().__init__(stage, request, log=log)
        try:
            self.opened_json = json.dumps(self.wait_for("opened", progress=progress)["opened"])
        except BaseException:
            self.__exit__()
            raise

    def ask(self, question: Value, kind: type[AnyValue], *, progress: Progress) -> AnyValue:
        """The answer to one question. Raises WorkerError when the worker ends instead."""
        self.send(question.model_dump(mode="json"))
        answer = self.wait_for("answer", progress=progress)["answer"]
        return kind.model_validate_json(json.dumps(answer))


class WorkerTurn(Conversation):
    """A variant loaded in its own process, run when it has the turn; see `alternation.Turn`."""

    def __init__(self, request: SpeedRequest, *, log: Path, progress: Progress) -> None:
        self._load = partial(super().__init__, "speed", request, log=log, progress=progress)
        self._load()
        self._alive = True
        self.opened = SpeedOpened.model_validate_json(self.opened_json)

    def run(self, shape: SpeedShape, *, seed: int) -> TurnResult:
        """One generation; a worker that dies of it gives a failed result, and is loaded anew for the next one."""
        question = SpeedQuestion(shape=shape, seed=seed)
        try:
            if not self._alive:
                self._load()
                self._alive = True
            return self.ask(question, TurnResult, progress=lambda _: None)
        except WorkerError as error:
            self._alive = False
            self.__exit__()
            return TurnResult(outcome=error.reason, because=str(error))


def _environment() -> dict[str, str]:
    """The worker finds this package wherever the parent was started, and nothing is sent to stdout late."""
    package_root = str(Path(__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    joined = f"{package_root}{os.pathsep}{path}" if path else package_root
    return {**os.environ, "PYTHONPATH": joined, "PYTHONUNBUFFERED": "1"}
