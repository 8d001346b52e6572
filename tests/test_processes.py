"""Workers that are killed, exit, print garbage or run out of memory; parents that are killed or interrupted.

Every case runs a real worker process. What a library might do to it is put into a `sitecustomize` module on
the worker's path, which Python runs before anything else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.alternation import TurnResult
from pipeline.engines.transformers import Transformers
from pipeline.errors import StageError
from pipeline.processes import Worker, WorkerError, WorkerTurn, run_stage
from pipeline.quantizers.native import Native
from pipeline.random_weights import write_random_variant
from pipeline.results import CheckpointManifest, SourceRecord
from pipeline.speed_results import SpeedShape
from pipeline.stages import RandomVariantRequest, RunnableCheckpoint, SpeedRequest
from tests.small_disks import mounted_disk
from tests.tiny_models import write_llama
from tests.worker_processes import workers

ROOT = Path(__file__).parent.parent
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}

Library = Callable[[str], None]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Code that every worker runs when its interpreter starts."""

    def install(code: str) -> None:
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(code, "utf-8")
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return install


def request_for(out: Path, **config: object) -> RandomVariantRequest:
    """The lightest stage that does real work: count a tiny model's weights."""
    return RandomVariantRequest(
        config={**CONFIG, **config},
        seed=0,
        source=SourceRecord(model="tiny", revision=None, files=()),
        quantizer=Native(dtype="fp16"),
        out=str(out),
    )


def make(tmp_path: Path, *, log: Path | None = None) -> CheckpointManifest:
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    return run_stage(
        "random-weights",
        request_for(out),
        CheckpointManifest,
        log=log or tmp_path / "log",
        progress=lambda _: None,
    )


def refused(tmp_path: Path) -> WorkerError:
    with pytest.raises(WorkerError) as refusal:
        make(tmp_path)
    assert workers() == []
    return refusal.value


def wait_until(condition: Callable[[], bool], *, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


# --- how a worker ends -----------------------------------------------------------------------------------


def test_a_worker_that_is_killed_most_likely_ran_out_of_memory(tmp_path: Path, library: Library) -> None:
    library("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    error = refused(tmp_path)
    assert error.reason == "out_of_memory"
    assert "killed (signal 9)" in str(error)


def test_a_worker_that_leaves_without_a_word_has_failed_with_its_status(
    tmp_path: Path, library: Library
) -> None:
    library("import os; os._exit(3)")
    error = refused(tmp_path)
    assert error.reason == "failed"
    assert str(error) == f"the process ended with status 3; see {tmp_path / 'log'}"


def test_a_worker_that_crashes_has_failed_with_its_signal(tmp_path: Path, library: Library) -> None:
    library("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    error = refused(tmp_path)
    assert (error.reason, error.crashed) == ("failed", True)
    assert "by signal 11" in str(error)


def test_a_worker_that_was_told_to_end_has_not_crashed(tmp_path: Path, library: Library) -> None:
    """Whoever sent the signal, it says nothing of the memory that the worker would have needed."""
    library("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    error = refused(tmp_path)
    assert (error.reason, error.crashed) == ("failed", False)
    assert "told to end from outside (signal 15)" in str(error)


def test_a_worker_that_ends_well_without_a_result_has_failed(tmp_path: Path, library: Library) -> None:
    library("import os; os._exit(0)")
    error = refused(tmp_path)
    assert error.reason == "failed"
    assert "without a result" in str(error)


def test_memory_that_the_system_refuses_is_out_of_memory(tmp_path: Path) -> None:
    fp16 = Native(dtype="fp16")
    folder = tmp_path / "huge"
    folder.mkdir()
    write_random_variant({**CONFIG, "vocab_size": 2**31 - 1}, out=folder, seed=0, quantizer=fp16)
    with pytest.raises(WorkerError) as refusal:
        turn_of(folder, tmp_path)
    assert workers() == []
    assert refusal.value.reason == "out_of_memory"
    assert "DefaultCPUAllocator" in str(refusal.value)


def test_a_bug_is_a_failure_in_its_own_words_and_its_traceback_is_in_the_log(
    tmp_path: Path, library: Library
) -> None:
    library("import pipeline.random_weights as broken; broken.write_random_variant = None")
    error = refused(tmp_path)
    assert error.reason == "failed"
    assert "TypeError: 'NoneType' object is not callable" in str(error)
    assert "Traceback" in (tmp_path / "log").read_text("utf-8")


# --- what libraries do -----------------------------------------------------------------------------------


def test_what_libraries_print_goes_to_the_log_and_not_into_the_protocol(
    tmp_path: Path, library: Library
) -> None:
    library(
        "import atexit, os\n"
        "print('printed before anything', flush=True)\n"
        "os.write(1, b'\\xff\\xfe not text\\n{\"event\": 3}\\n[]\\n')\n"
        "atexit.register(lambda: os.write(1, b'written at the very end\\n'))\n"
    )
    assert make(tmp_path).parameters > 0
    log = (tmp_path / "log").read_text("utf-8")
    assert "written at the very end" in log
    assert "printed before anything" in log


def test_a_log_on_a_full_disk_costs_lines_and_not_the_work(tmp_path: Path, library: Library) -> None:
    library(
        "import sys\n"
        "class Talks:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'transformers':\n"
        "            for stream in (sys.stderr, sys.stdout):\n"
        "                print('a line ' * 9000, file=stream, flush=True)\n"
        "sys.meta_path.insert(0, Talks())\n"
    )
    with mounted_disk(tmp_path / "disk", kibibytes=16) as disk:
        assert make(tmp_path, log=disk / "log").parameters > 0
        with pytest.raises(StageError, match=rf"disk is full: {disk / 'log'} .*; free space"):
            make(tmp_path, log=disk / "log")
    assert workers() == []


def test_no_worker_and_no_temporary_folder_is_left(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("import os; os._exit(3)")
    places = tmp_path / "places"
    places.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(places))
    refused(tmp_path)
    assert list(places.iterdir()) == []


def test_a_log_that_cannot_be_written_is_told_as_a_failed_stage(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(StageError, match=rf"could not be started.*{tmp_path / 'log'}"):
        make(tmp_path)
    assert workers() == []


# --- a variant that takes turns --------------------------------------------------------------------------


def shape(batch_size: int) -> SpeedShape:
    return SpeedShape(batch_size=batch_size, prompt_tokens=8, new_tokens=3)


def turn_of(folder: Path, tmp_path: Path) -> WorkerTurn:
    checkpoint = RunnableCheckpoint(
        folder=str(folder), quantizer=Native(dtype="fp16"), engine=Transformers(), device="cpu"
    )
    request = SpeedRequest(checkpoint=checkpoint)
    return WorkerTurn(request, log=tmp_path / "log", progress=lambda _: None)


def test_a_worker_ignores_ctrl_c_and_when_killed_loses_one_turn_and_is_loaded_anew(tmp_path: Path) -> None:
    with turn_of(write_llama(tmp_path / "tiny"), tmp_path) as turn:
        (worker,) = workers()
        assert turn.run(shape(1), seed=1).outcome == "measured"
        worker.send_signal(signal.SIGINT)
        assert turn.run(shape(2), seed=2).outcome == "measured"
        worker.kill()
        lost = turn.run(shape(4), seed=3)
        assert lost == TurnResult(outcome="out_of_memory", because=lost.because)
        assert "killed" in lost.because
        assert turn.run(shape(1), seed=4).outcome == "measured"
        assert len(workers()) == 1
    assert workers() == []


def test_a_variant_that_cannot_be_loaded_leaves_no_worker(tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        turn_of(tmp_path, tmp_path)
    assert workers() == []


def test_an_interruption_while_a_worker_works_ends_the_worker(tmp_path: Path, library: Library) -> None:
    library("import time; time.sleep(60)")

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert workers() == []


# --- a parent that is killed -----------------------------------------------------------------------------

PARENT = """
import sys
from pathlib import Path
from pipeline.stages import RandomVariantRequest
from pipeline.processes import run_stage
from pipeline.results import CheckpointManifest
request = RandomVariantRequest.model_validate_json({request!r})
log = Path(sys.argv[1]).parent / "log"
run_stage("random-weights", request, CheckpointManifest, log=log, progress=lambda _: None)
"""


@pytest.mark.parametrize("seconds_after_start", [0.0, 2.5])
def test_a_killed_parent_leaves_no_worker_however_young_the_worker_is(
    tmp_path: Path, library: Library, seconds_after_start: float
) -> None:
    """At first the worker is still starting, and can't have asked to die with its parent."""
    pid_file = tmp_path / "pid"
    library(
        "import os, sys, time\n"
        "if 'pipeline.worker' in sys.orig_argv:\n"
        f"    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(1.0)\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    large = request_for(out, num_hidden_layers=10_000).model_dump_json()
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(request=large), str(out)], cwd=ROOT, stdout=subprocess.PIPE
    ) as parent:
        assert wait_until(lambda: pid_file.is_file() and bool(pid_file.read_text()))
        worker = psutil.Process(int(pid_file.read_text()))
        time.sleep(seconds_after_start)
        assert worker.is_running()
        os.kill(parent.pid, signal.SIGKILL)
    assert wait_until(lambda: not worker.is_running(), seconds=5)
    assert not (out / "manifest.json").exists()


def test_a_worker_uses_its_own_process_group(tmp_path: Path, library: Library) -> None:
    """So that Ctrl-C on the terminal reaches the parent alone, which decides what it stops."""
    library("import time; time.sleep(60)")
    with Worker("random-weights", request_for(tmp_path), log=tmp_path / "log"):
        (worker,) = workers()
        assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)
    assert workers() == []
