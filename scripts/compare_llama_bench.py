"""Checks this project's clock beside llama.cpp's own `llama-bench`: the same file, the same quantity, tg within 2 %.

Both decode as many tokens from an empty cache (tg) and process a prompt of the same length (pp), in an order that
changes with every repeat, so that a drifting machine is fair to both. Writes `llama-bench.json` and `llama-bench.md`
to FOLDER and prints the page.

    python -m scripts.compare_llama_bench FOLDER --llama-bench PATH --gguf FILE [FILE …] [--repeats 9] [--threads N]

`llama-bench` comes with llama.cpp's releases and packages, or is built from its source. The same version as the library
that is timed lies in xllamacpp's source package, under `thirdparty/llama.cpp`:

    cmake -S llama.cpp -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target llama-bench

A processor with more than AVX2 runs other kernels in a native build than in the wheel that is timed here: build with
`-DGGML_NATIVE=OFF` to compare the same ones. The page names both versions; different ones may differ in kernels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.engines.llama_cpp import LlamaCppSession
from pipeline.errors import CheckpointError, PipelineError, StageError, UsageError
from pipeline.gguf_file import read_gguf
from pipeline.hardware import detect, usable_threads
from pipeline.llama_library import load_library
from pipeline.llama_model import LlamaModel
from pipeline.measure import random_prompts, time_generation
from pipeline.values import Value
from scripts.compared_times import Compared, missed, ratio_table, say, verdict, write_comparison

LIMIT, PREFILL_LIMIT = 0.02, 0.05
PROMPT_TOKENS, NEW_TOKENS = 128, 64


class Comparison(Value):
    """Everything that was compared, and on what."""

    device: str
    threads: int
    ours: str
    llama_bench: str
    figures: tuple[Compared, ...]


class Rates(NamedTuple):
    """Tokens per second of decode and prefill; `build` says which llama-bench it was."""

    decode: float
    prefill: float
    build: str = ""


def check_given(files: Sequence[Path], *, llama_bench: Path, threads: int, repeats: int) -> None:
    """Raises UsageError for what can't be measured, before anything is."""
    for option, value in (("--repeats", repeats), ("--threads", threads)):
        if value < 1:
            raise UsageError(f"{option} must be at least 1, is {value}")
    if shutil.which(llama_bench) is None:
        found = "isn't an executable program" if llama_bench.exists() else "doesn't exist"
        raise UsageError(f"--llama-bench {llama_bench}: {found}; give the path of llama.cpp's llama-bench")
    for file in files:
        try:
            read_gguf(file)
        except CheckpointError as error:
            raise UsageError(f"--gguf {error}") from error


def compare(files: Sequence[Path], *, llama_bench: Path, threads: int, repeats: int) -> Comparison:
    """Every file in turn. Raises UsageError as `check_given` does, and StageError when llama-bench fails."""
    check_given(files, llama_bench=llama_bench, threads=threads, repeats=repeats)
    found: list[Compared] = []
    build = ""
    for file in files:
        pairs = []
        for repeat in range(-1, repeats):  # the first one warms up
            say(f"{file.name}: repeat {repeat + 1}")
            bench = None if repeat % 2 else _bench(llama_bench, file, threads=threads)
            ours = _ours(file, threads=threads, seed=2000 + repeat)
            bench = bench or _bench(llama_bench, file, threads=threads)
            build = bench.build
            pairs.append((ours, bench))
        found += _figures(f"{file.parent.name}/{file.name}", pairs[1:])
    return Comparison(
        device=detect().name,
        threads=threads,
        ours=load_library().version(),
        llama_bench=build,
        figures=tuple(found),
    )


def _figures(variant: str, pairs: Sequence[tuple[Rates, Rates]]) -> Iterator[Compared]:
    decode = [(ours.decode, bench.decode) for ours, bench in pairs]
    prefill = [(ours.prefill, bench.prefill) for ours, bench in pairs]
    yield Compared.of(
        decode, variant=variant, batch_size=1, test=f"tg{NEW_TOKENS}", figure="decode", limit=LIMIT
    )
    yield Compared.of(
        prefill,
        variant=variant,
        batch_size=1,
        test=f"pp{PROMPT_TOKENS}",
        figure="prefill",
        limit=PREFILL_LIMIT,
    )


def _ours(file: Path, *, threads: int, seed: int) -> Rates:
    """In a process of its own, as llama-bench is and as every variant of a run is.

    Where the weights happen to lie in memory is worth some percent of what memory bounds. One process that loaded and
    freed F16 weights forty times decoded at 0.95 of llama-bench's rate, new ones at 1.00 (docs/log.md); the reason was
    not looked for.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_rates, file, threads=threads, seed=seed).result()


def _rates(file: Path, *, threads: int, seed: int) -> Rates:
    """A prompt of one token is the first of as many steps as llama-bench makes from an empty cache."""
    model = LlamaModel(load_library(), file, on_gpu=False)
    session = LlamaCppSession(model, threads=threads, vocabulary_tokens=model.vocabulary_tokens)
    decode_s = _seconds(session, prompt_tokens=1, new_tokens=NEW_TOKENS, seed=seed)
    prefill_s = _seconds(session, prompt_tokens=PROMPT_TOKENS, new_tokens=1, seed=seed)
    session.release()
    return Rates(decode=NEW_TOKENS / decode_s, prefill=PROMPT_TOKENS / prefill_s)


def _seconds(session: LlamaCppSession, *, prompt_tokens: int, new_tokens: int, seed: int) -> float:
    """Of the whole generation. The context is made and warm before, as llama-bench does it."""
    prompts = random_prompts(
        batch_size=1, prompt_tokens=prompt_tokens, vocabulary_tokens=session.vocabulary_tokens, seed=seed
    )
    session.prefill(prompts, new_tokens=new_tokens)
    trace = time_generation(session, prompts=prompts, new_tokens=new_tokens, clock=time.perf_counter)
    return trace.token_times_s[-1]


def _bench(llama_bench: Path, file: Path, *, threads: int) -> Rates:
    command = [str(llama_bench), "-m", str(file), "-p", str(PROMPT_TOKENS), "-n", str(NEW_TOKENS)]
    command += ["-r", "1", "-t", str(threads), "-o", "json", "-ngl", "0", *_unmapped(llama_bench)]
    said = _output(command)
    try:
        rows: list[dict[str, Any]] = json.loads(said)
        rates = {"decode" if row["n_gen"] else "prefill": float(row["avg_ts"]) for row in rows}
        return Rates(**rates, build=f"build {rows[0]['build_number']} ({rows[0]['build_commit']})")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise StageError(
            f"{llama_bench}: its JSON isn't what is known of llama-bench ({error!r}): {said[:200]!r}"
        ) from error


def _output(command: Sequence[str]) -> str:
    """What it prints on standard output. Raises StageError when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise StageError(
            f"{command[0]} can't be run: {error.strerror}; is it built for this system?"
        ) from error
    if done.returncode:
        raise StageError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()[-500:]}")
    return done.stdout


def _unmapped(llama_bench: Path) -> list[str]:
    """The option that reads weights into memory, as the engine does: newer versions name it otherwise."""
    return ["-lm", "none"] if "--load-mode" in _output((str(llama_bench), "--help")) else ["-mmp", "0"]


def page(found: Comparison) -> str:
    """The comparison as Markdown."""
    return "\n\n".join(
        (
            "# This project's clock beside `llama-bench`",
            f"On {found.device}, {found.threads} thread(s); ours {found.ours}, llama-bench {found.llama_bench}. Both "
            "decode the same number of tokens from an empty cache and process prompts of the same length from the same "
            "file, in alternation. Ratio: ours ÷ llama-bench, median and quartiles over the repeats; limit "
            f"± {100 * LIMIT:.0f} % for decode, {100 * PREFILL_LIMIT:.0f} % for prefill: {verdict(found.figures)}.",
            ratio_table(found.figures, unit="tok/s", other="llama-bench"),
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every figure is within the limit, 1 when not, else the exit code of what went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=usable_threads())
    given = parser.parse_args(arguments)
    try:
        found = compare(
            given.gguf, llama_bench=given.llama_bench, threads=given.threads, repeats=given.repeats
        )
    except PipelineError as error:
        say(f"error: {error}")
        return error.exit_code
    write_comparison(given.folder, "llama-bench", found, page=page(found))
    return 1 if missed(found.figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
