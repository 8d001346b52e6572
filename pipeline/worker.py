"""One stage in a fresh process: request JSON in, result JSON file out.

    python -m pipeline.worker STAGE REQUEST RESULT PARENT_PID

Standard output carries the protocol, one JSON object a line (`progress`, `failure`, and `opened` and `answer` of
stages that stay alive); whatever libraries print goes to standard error. A stage that stays alive is loaded once,
then reads one question a line as JSON, answers each, and ends at end of input.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from pipeline.errors import PipelineError
from pipeline.packages import quiet_torchao
from pipeline.store import write_atomically
from pipeline.values import Value

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run one stage; the exit status is 0 when the result file was written."""
    stage, request_path, result_path, parent_pid = arguments
    protocol = _take_over_stdout()
    _die_with_parent(int(parent_pid))
    _quiet_libraries()

    def emit(event: str, **fields: Any) -> None:
        protocol.write(json.dumps({"event": event, **fields}) + "\n")
        protocol.flush()

    try:
        request = Path(request_path).read_text("utf-8")
        if stage in ("speed", "serving", "capacity"):
            _converse(stage, request, emit)
        else:
            result = _run(stage, request, progress=_throttled(lambda text: emit("progress", text=text)))
            write_atomically(Path(result_path), result.to_json())
    except PipelineError as error:
        emit("failure", reason="failed", message=str(error))
        return error.exit_code
    except Exception as error:  # noqa: BLE001  (the parent needs the reason; the traceback goes to the log)
        from pipeline.stages import first_line, is_out_of_memory

        reason = "out_of_memory" if is_out_of_memory(error) else "failed"
        emit("failure", reason=reason, message=f"{type(error).__name__}: {first_line(error)}")
        traceback.print_exc()
        return 4
    return 0


def _run(stage: str, request: str, *, progress: Callable[[str], None]) -> Value:
    from pipeline import stages

    if stage == "quantize":
        return stages.quantize(stages.QuantizeRequest.model_validate_json(request), progress=progress)
    if stage == "quality":
        return stages.quality(stages.QualityStageRequest.model_validate_json(request), progress=progress)
    if stage == "reference":
        return stages.reference(stages.ReferenceRequest.model_validate_json(request), progress=progress)
    if stage == "random-weights":
        return stages.random_variant(
            stages.RandomVariantRequest.model_validate_json(request), progress=progress
        )
    assert stage == "device-speed", stage
    return stages.device_speed(stages.DeviceSpeedRequest.model_validate_json(request), progress=progress)


def _converse(stage: str, request: str, emit: Callable[..., None]) -> None:
    session = _opened(stage, request)
    emit("opened", opened=session.opened.model_dump(mode="json"))
    for line in sys.stdin:
        emit("answer", answer=session.answer(line).model_dump(mode="json"))


def _opened(stage: str, request: str) -> Any:
    """Something with the facts `opened` and a method that answers questions."""
    if stage == "serving":
        from pipeline import serving_turns

        return serving_turns.ServingWorker(serving_turns.ServingRequest.model_validate_json(request))
    if stage == "capacity":
        from pipeline import capacity_probe

        return capacity_probe.CapacitySession(capacity_probe.CapacityRequest.model_validate_json(request))
    assert stage == "speed", stage
    from pipeline import stages

    return stages.SpeedSession(stages.SpeedRequest.model_validate_json(request))


class _Log(io.TextIOWrapper):
    """Standard error, which is the log: on a full disk a line is lost, not the work of hours that printed it."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def _take_over_stdout() -> TextIO:
    """Keep standard output for the protocol and send everything that libraries print to standard error."""
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    log = os.fdopen(os.dup(2), "wb", buffering=0)
    sys.stdout = sys.stderr = _Log(log, encoding="utf-8", errors="backslashreplace", write_through=True)
    return protocol


def _die_with_parent(parent_pid: int) -> None:
    """A killed parent must not leave a worker that goes on using the device (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the wish was told, and nothing would tell us any more
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interruption stops


def _quiet_libraries() -> None:
    """Progress bars and advice of libraries would drown the log; warnings stay in it."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("once")
    quiet_torchao()


def _throttled(emit: Callable[[str], None], *, interval_s: float = 0.5) -> Callable[[str], None]:
    """At most two messages a second, so that telling about the work doesn't disturb it."""
    last = -interval_s

    def tell(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= interval_s:
            last = now
            emit(text)

    return tell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
