"""What holds decode back on a CPU: one thread beside all of them, each against what as many threads just read.

Where memory is the limit, one thread reaches about its plain read rate, and a second one adds little. Where
instructions are (unpacking and multiplying the weights), one thread stays well under what it could read, and the rate
grows with the threads. Both in alternation, on the same file. Writes `decode-limits.json` and `decode-limits.md` to
FOLDER and prints the page.

    python -m scripts.decode_limits FOLDER --gguf FILE [FILE …] [--repeats 5]

Where the kernels spend their time: `perf record -e cpu-clock` around this command, then `perf report --sort symbol`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.engines.llama_cpp import LlamaCppSession
from pipeline.errors import PipelineError, UsageError
from pipeline.gguf_file import read_gguf
from pipeline.hardware import detect, measure_device_speed, usable_threads
from pipeline.llama_library import load_library
from pipeline.llama_model import LlamaModel
from pipeline.measure import random_prompts, time_generation
from pipeline.measured import Distribution
from pipeline.text_table import markdown_table
from pipeline.values import Value
from scripts.compared_times import say, write_comparison

NEW_TOKENS = 32


class Limit(Value):
    """Decode of one file by so many threads, and the plain read rate of as many, repeat by repeat."""

    variant: str
    threads: int
    bytes_per_step: int
    bytes_per_s: Distribution
    read_share: Distribution


class Limits(Value):
    """Everything that was measured, and on what."""

    device: str
    llama_cpp: str
    read_bytes_per_s: dict[str, Distribution]
    rows: tuple[Limit, ...]


def measure(files: Sequence[Path], *, repeats: int) -> Limits:
    """Every file with one thread and with all. Raises UsageError where there is only one."""
    if usable_threads() < 2:
        raise UsageError("this process may use one thread only; there is nothing to compare")
    counts = (1, usable_threads())
    read: dict[int, list[float]] = {threads: [] for threads in counts}
    rows = []
    for file in files:
        rates: dict[int, list[tuple[float, float]]] = {threads: [] for threads in counts}
        model = LlamaModel(load_library(), file, on_gpu=False)
        for repeat in range(-1, repeats):  # the first one warms up
            say(f"{file.parent.name}/{file.name}: repeat {repeat + 1}")
            for threads in counts if repeat % 2 else counts[::-1]:
                reads = _read_bytes_per_s(threads)
                session = LlamaCppSession(model, threads=threads, vocabulary_tokens=model.vocabulary_tokens)
                rate = _bytes_per_step(file) * _steps_per_s(session, seed=3000 + repeat)
                session.release()
                if repeat >= 0:
                    read[threads].append(reads)
                    rates[threads].append((rate, rate / reads))
        rows += [
            Limit(
                variant=f"{file.parent.name}/{file.name}",
                threads=threads,
                bytes_per_step=_bytes_per_step(file),
                bytes_per_s=Distribution.of([rate for rate, _ in found]),
                read_share=Distribution.of([share for _, share in found]),
            )
            for threads, found in rates.items()
        ]
    return Limits(
        device=detect().name,
        llama_cpp=load_library().version(),
        read_bytes_per_s={str(threads): Distribution.of(found) for threads, found in read.items()},
        rows=tuple(rows),
    )


def _bytes_per_step(file: Path) -> int:
    """The weights that a step reads: all but an embedding table that isn't the head, too."""
    tensors = read_gguf(file).tensors
    untied = "output.weight" in tensors
    return sum(
        tensor.size_bytes for name, tensor in tensors.items() if not (untied and name == "token_embd.weight")
    )


def _read_bytes_per_s(threads: int) -> float:
    import torch

    torch.set_num_threads(threads)
    return measure_device_speed("cpu", dtypes=()).read_bandwidth_bytes_per_s


def _steps_per_s(session: LlamaCppSession, *, seed: int) -> float:
    prompts = random_prompts(
        batch_size=1, prompt_tokens=1, vocabulary_tokens=session.vocabulary_tokens, seed=seed
    )
    session.prefill(prompts, new_tokens=NEW_TOKENS)  # makes the context and touches it
    trace = time_generation(session, prompts=prompts, new_tokens=NEW_TOKENS, clock=time.perf_counter)
    return NEW_TOKENS / trace.token_times_s[-1]


def page(found: Limits) -> str:
    """The table as Markdown, with what more threads gained in the last column."""
    alone = {row.variant: row.bytes_per_s.median for row in found.rows if row.threads == 1}
    reads = ", ".join(
        f"{1e-9 * rate.median:.1f} GB/s by {threads}" for threads, rate in found.read_bytes_per_s.items()
    )
    rows = [
        (
            row.variant,
            str(row.threads),
            f"{1e-9 * row.bytes_per_step:.3f}",
            f"{1e-9 * row.bytes_per_s.median:.1f}",
            f"{row.read_share.median:.2f}",
            f"{row.read_share.lower_quartile:.2f} … {row.read_share.upper_quartile:.2f}",
            f"{row.bytes_per_s.median / alone[row.variant]:.2f}",
        )
        for row in found.rows
    ]
    header = ("file", "threads", "GB a step", "GB/s", "share of reading", "quartiles", "× one thread")
    return "\n\n".join(
        (
            "# What holds decode back",
            f"{found.device}, {found.llama_cpp}; decode at batch 1, {NEW_TOKENS} steps from an empty cache, beside the "
            f"plain read rate of as many threads, measured right before ({reads}, medians over "
            f"{len(found.rows[0].bytes_per_s.samples)} repeats a file).",
            markdown_table(header, rows, text_columns=("file",)),
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or the exit code of what went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    try:
        found = measure(given.gguf, repeats=given.repeats)
    except PipelineError as error:
        say(f"error: {error}")
        return error.exit_code
    write_comparison(given.folder, "decode-limits", found, page=page(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
