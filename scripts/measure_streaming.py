"""Quantizes a synthetic checkpoint of any size and measures what that takes: memory, seconds, GB/s, resuming.

The checkpoint has the shape of a Llama, random BF16 weights and shards of about 2 GB. Each quantizer runs in a
process of its own, in alternation with plain reading and writing of the same bytes (the source read, as much
written as the quantizer wrote, brought to the disk file by file); what of the source the system had cached is
dropped before each. Peak anonymous memory is RssAnon of the process, seen from outside every 10 ms: pages of
mapped files, which the system takes back when it likes, aren't in it. At last a run is killed half way and gone
on with. Writes `streaming.json` and `streaming.md` to FOLDER and prints the page.

    python -m scripts.measure_streaming FOLDER [--gigabytes 20] [--quantizers fp16 int8-quanto] [--repeats 3]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from pipeline.checkpoint import hash_files
from pipeline.hardware import detect
from pipeline.measured import Distribution
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.dynamic_int8 import DynamicInt8
from pipeline.quantizers.gguf import Gguf
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.quantizers.torchao import Torchao
from pipeline.results import FileRecord
from pipeline.store import JOURNAL_NAME
from pipeline.tensorfile import tensors
from pipeline.text_table import markdown_table
from pipeline.values import Value
from pipeline.weights import copy_side_files
from scripts.compared_times import say
from scripts.fetch_demo_model import MODEL_FOLDER
from scripts.random_checkpoint import write_random_llama

QUANTIZERS: dict[str, Quantizer] = {
    "bf16": Native(dtype="bf16"),
    "fp16": Native(dtype="fp16"),
    "int8-quanto": Quanto(weights="int8"),
    "int4-quanto": Quanto(weights="int4"),
    "fp8-quanto": Quanto(weights="fp8"),
    "int8-torchao": Torchao(weights="int8"),
    "int8-dynamic": DynamicInt8(),
    "q8_0-gguf": Gguf(type="q8_0"),
    "q4_0-gguf": Gguf(type="q4_0"),
}
"""GGUF is one file, which a killed run begins anew; its converter wants a tokenizer, the demo model's here."""
SAMPLE_S = 0.01
CHUNK_BYTES = 8_388_608
FREE_BYTES = 1_000_000_000
WORKING_SETS = 1.2
HEADER = (
    *("quantizer", "read GB", "written GB", "peak GB", "limit GB", "s", "GB/s", "plain s", "plain GB/s"),
    *("time ÷ plain", "runs", "resumed: files kept", "s"),
)


class Quantized(Value):
    """One run of one quantizer; `imported_bytes` is the anonymous memory before it began."""

    seconds: float
    imported_bytes: int
    peak_bytes: int


class Resumed(Value):
    """A run that was killed and gone on with; `same_files` says whether it made what an unbroken one makes."""

    files: int
    files_kept: int
    seconds: float
    same_files: bool


class Streaming(Value):
    """One quantizer: all runs, and the plain ones between them. `working_set_bytes` is of the largest tensor:
    as it is read and as it is written."""

    quantizer: str
    read_bytes: int
    written_bytes: int
    working_set_bytes: int
    runs: tuple[Quantized, ...]
    seconds: Distribution
    plain_seconds: Distribution
    ratio: Distribution
    resumed: Resumed | None

    @property
    def peak_bytes(self) -> int:
        """The worst run's."""
        return max(run.peak_bytes for run in self.runs)

    @property
    def limit_bytes(self) -> float:
        """What the peak may be, whatever the checkpoint's size."""
        return WORKING_SETS * self.working_set_bytes + FREE_BYTES

    @property
    def holds(self) -> bool:
        """Whether memory stays within the limit and a killed run makes the same files."""
        same_files = self.resumed is None or self.resumed.same_files
        return self.peak_bytes <= self.limit_bytes and same_files


class Measured(Value):
    """Everything that was measured, and on what."""

    device: str
    threads: int
    versions: dict[str, str]
    shards: int
    layers: int
    rows: tuple[Streaming, ...]


def measure(
    work: Path, *, gigabytes: float, names: Sequence[str], device: str, repeats: int
) -> Iterator[Measured]:
    """Make the checkpoint in `work` and run the quantizers on it; what is known so far, after each of them."""
    source = work / "source"
    say(f"making a checkpoint of {gigabytes:g} GB")
    config = write_random_llama(source, size_bytes=int(gigabytes * 1e9))
    if any(QUANTIZERS[name].kind == "gguf" for name in names):
        copy_side_files(MODEL_FOLDER, source)
    rows: list[Streaming] = []
    for name in names:
        rows.append(_streaming(name, source, work, device=device, repeats=repeats))
        yield Measured(
            device=detect().name if device == detect().kind else device,
            threads=_threads(),
            versions={name: version(name) for name in ("torch", "safetensors", "optimum-quanto", "torchao")},
            shards=len(list(source.glob("*.safetensors"))),
            layers=config["num_hidden_layers"],
            rows=tuple(rows),
        )


def _streaming(name: str, source: Path, work: Path, *, device: str, repeats: int) -> Streaming:
    read = {tensor: info.size_bytes for tensor, info in tensors(source).items()}
    runs, plain = [], []
    unbroken: tuple[FileRecord, ...] = ()
    written_bytes = largest_bytes = 0
    for repeat in range(repeats):
        say(f"{name}: run {repeat + 1} of {repeats}")
        with _folder(work) as out:
            runs.append(_quantize(name, source, out, device=device))
            sizes = [info.size_bytes for info in QUANTIZERS[name].stored_tensors(out).values()]
            written_bytes, largest_bytes = sum(sizes), max(sizes)
            unbroken = unbroken or hash_files(out)
        say(f"{name}: plain reading and writing of the same bytes")
        with _folder(work) as out:
            plain.append(_read_and_write(source, out, written_bytes=written_bytes))
    resumed = None
    if QUANTIZERS[name].kind != "gguf":
        say(f"{name}: killed half way and gone on with")
        with _folder(work) as out:
            resumed = _resumed(name, source, out, device=device, unbroken=unbroken)
    return Streaming(
        quantizer=name,
        read_bytes=sum(read.values()),
        written_bytes=written_bytes,
        working_set_bytes=max(read.values()) + largest_bytes,
        runs=tuple(runs),
        seconds=Distribution.of([run.seconds for run in runs]),
        plain_seconds=Distribution.of(plain),
        ratio=Distribution.of([run.seconds / one for run, one in zip(runs, plain, strict=True)]),
        resumed=resumed,
    )


# --- one run ---------------------------------------------------------------------------------------------


def _quantize(name: str, source: Path, out: Path, *, device: str) -> Quantized:
    _drop_cached(source)
    with _child(name, source, out, device=device) as process:
        assert process.stdout is not None
        process.stdout.readline()  # everything is imported
        watched = _Watched(process.pid)
        seconds = float(process.stdout.readline())
        return Quantized(seconds=seconds, imported_bytes=watched.first_bytes, peak_bytes=watched.finished())


def _resumed(name: str, source: Path, out: Path, *, device: str, unbroken: tuple[FileRecord, ...]) -> Resumed:
    files = len(list(source.glob("*.safetensors")))
    with _child(name, source, out, device=device) as process:
        while process.poll() is None and _finished_files(out) < files // 2:
            time.sleep(SAMPLE_S)
        process.kill()
    kept = _finished_files(out)
    run = _quantize(name, source, out, device=device)
    return Resumed(files=files, files_kept=kept, seconds=run.seconds, same_files=hash_files(out) == unbroken)


def _finished_files(out: Path) -> int:
    with suppress(OSError, ValueError):
        return len(json.loads((out / JOURNAL_NAME).read_text("utf-8"))["files"])
    return 0


@contextmanager
def _child(name: str, source: Path, out: Path, *, device: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-m", "scripts.measure_streaming", "--child", name, source, out, device]
    with subprocess.Popen(list(map(str, arguments)), stdout=subprocess.PIPE, text=True) as process:
        yield process
    if process.returncode > 0:
        raise RuntimeError(f"{name}: quantizing failed with status {process.returncode}")


def _run_child(name: str, source: str, out: str, device: str) -> None:
    """What the process does: import, say so, quantize, say how long that took, and wait to be looked at."""
    for library in ("torch", "transformers.modeling_utils", "optimum.quanto", "torchao.quantization"):
        with suppress(ModuleNotFoundError):  # whatever this quantizer needs is told when it begins
            importlib.import_module(library)
    print("ready", flush=True)
    start = time.perf_counter()
    QUANTIZERS[name].quantize(Path(source), Path(out), device=device)
    print(time.perf_counter() - start, flush=True)


class _Watched:
    """Anonymous memory of another process: the first value and, when it is `finished`, the largest."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/status")
        self.first_bytes = self._peak_bytes = self._anonymous_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def finished(self) -> int:
        self._ends.set()
        self._thread.join()
        return self._peak_bytes

    def _watch(self) -> None:
        while not self._ends.wait(SAMPLE_S):
            self._peak_bytes = max(self._peak_bytes, self._anonymous_bytes())

    def _anonymous_bytes(self) -> int:
        with suppress(OSError):
            for line in self._path.read_text("ascii").splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        return 0


def _read_and_write(source: Path, out: Path, *, written_bytes: int) -> float:
    """Seconds to read all of the source and write so much, in proportion, file by file."""
    _drop_cached(source)
    files = sorted(source.glob("*.safetensors"))
    read_bytes = sum(path.stat().st_size for path in files)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    start = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as reader, (out / path.name).open("wb", buffering=0) as writer:
            while count := reader.readinto(buffer):
                writer.write(buffer[: min(CHUNK_BYTES, count * written_bytes // read_bytes)])
            os.fsync(writer.fileno())
    return time.perf_counter() - start


def _drop_cached(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # only pages that are on the disk can be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


@contextmanager
def _folder(work: Path) -> Iterator[Path]:
    out = Path(tempfile.mkdtemp(dir=work))
    try:
        yield out
    finally:
        shutil.rmtree(out)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


# --- the page --------------------------------------------------------------------------------------------


def page(found: Measured) -> str:
    """The measurement as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    return "\n\n".join(
        (
            "# Quantizing tensor by tensor",
            f"A Llama of {found.layers} layers with random BF16 weights in {found.shards} files, on {found.device}, "
            f"{found.threads} thread(s); {versions}. GB are 10^9 bytes. Peak: anonymous memory of the whole process, "
            f"libraries included; limit: {WORKING_SETS} × the largest tensor as read and as written + 1 GB. GB/s "
            "are of bytes read. Plain: the same bytes read and written without looking at them, in alternation; the "
            "ratio is taken run by run. Medians.",
            markdown_table(HEADER, _rows(found.rows), text_columns=("quantizer", "resumed: files kept")),
        )
    )


def _rows(rows: Sequence[Streaming]) -> list[tuple[str, ...]]:
    return [
        (
            row.quantizer,
            f"{row.read_bytes / 1e9:.2f}",
            f"{row.written_bytes / 1e9:.2f}",
            f"{row.peak_bytes / 1e9:.2f}" + ("" if row.peak_bytes <= row.limit_bytes else " (missed)"),
            f"{row.limit_bytes / 1e9:.2f}",
            f"{row.seconds.median:.1f}",
            f"{row.read_bytes / 1e9 / row.seconds.median:.3f}",
            f"{row.plain_seconds.median:.1f}",
            f"{row.read_bytes / 1e9 / row.plain_seconds.median:.3f}",
            f"{row.ratio.median:.2f}",
            str(len(row.runs)),
            *_resumed_cells(row.resumed),
        )
        for row in rows
    ]


def _resumed_cells(resumed: Resumed | None) -> tuple[str, str]:
    if resumed is None:
        return "begins anew", "–"
    made = "the same bytes" if resumed.same_files else "OTHER BYTES"
    return f"{resumed.files_kept} of {resumed.files}, {made}", f"{resumed.seconds:.1f}"


def main() -> int:
    """0 when every quantizer stays within the limit and resumes to the same bytes, else 1."""
    if sys.argv[1:2] == ["--child"]:
        _run_child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--quantizers", nargs="+", choices=QUANTIZERS, default=list(QUANTIZERS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where the checkpoints lie for a while; twice their size")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work or arguments.folder) as work:
        for found in measure(
            Path(work),
            gigabytes=arguments.gigabytes,
            names=arguments.quantizers,
            device=arguments.device,
            repeats=arguments.repeats,
        ):
            # After each quantizer: one takes many minutes, and a stopped run has still measured the others.
            (arguments.folder / "streaming.json").write_text(found.to_json() + "\n", encoding="utf-8")
            (arguments.folder / "streaming.md").write_text(page(found) + "\n", encoding="utf-8")
    print(page(found))
    return 0 if all(row.holds for row in found.rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
