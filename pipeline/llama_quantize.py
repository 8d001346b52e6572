"""llama.cpp's own quantizer, for what it alone decides: which matrices of a K mixture get more bits.

It is a program, `llama-quantize`, or a function of the package llama-cpp-python, called in a process of its own; the
wheel that runs models here has neither. Only the program reads importance matrices.

    note = quantize_file(Path("model-bf16.gguf"), Path("model.gguf"), mixture="Q4_K_M", importance_matrix=None)
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pipeline.errors import PrerequisiteError, StageError
from pipeline.gguf_file import FILE_TYPES
from pipeline.packages import installed_version
from pipeline.results import Problem
from pipeline.store import file_sha256

PROGRAM, PACKAGE, DISTRIBUTION = "llama-quantize", "llama_cpp", "llama-cpp-python"
_FIX = (
    f"install llama.cpp so that {PROGRAM} is on the PATH (your system's packages, or a release of "
    "github.com/ggml-org/llama.cpp)"
)
_FUNCTION = """
import ctypes, sys, llama_cpp
source, target, file_type, threads = sys.argv[1:]
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype, settings.nthread = int(file_type), int(threads)
sys.exit(min(1, llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(settings))))
"""


def program_file() -> Path | None:
    """The program that `quantize_file` runs; None where it is not on the PATH."""
    found = shutil.which(PROGRAM)
    return Path(found).resolve() if found else None


def tool_problems(importance_matrix: Path | None) -> tuple[Problem, ...]:
    """Whether the quantizer is there, and the importance matrix with a program that reads it; quick."""
    if importance_matrix is not None and not importance_matrix.is_file():
        return (
            Problem(
                what=f"the importance matrix {importance_matrix} does not exist",
                fix="make it with llama-imatrix on text like yours, or leave importance_matrix out",
            ),
        )
    if program_file():
        return ()
    if importance_matrix is not None:
        return (Problem(what=f"an importance matrix needs {PROGRAM}, not found on the PATH", fix=_FIX),)
    if importlib.util.find_spec(PACKAGE):
        return ()
    return (
        Problem(
            what=f"K types need llama.cpp's own quantizer, and neither {PROGRAM} nor llama-cpp-python is installed",
            fix=f"{_FIX}, or pip install llama-cpp-python (built from source, needs a C++ compiler)",
        ),
    )


def quantize_file(source: Path, target: Path, *, mixture: str, importance_matrix: Path | None) -> str:
    """Quantize a 16-bit or FP32 GGUF; returns which tool did it, in which version.

    Raises PrerequisiteError without a quantizer, StageError when it fails.
    """
    if problems := tool_problems(importance_matrix):
        raise PrerequisiteError(f"{problems[0].what}; fix: {problems[0].fix}")
    threads = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    program = program_file()
    if program:
        matrix = ["--imatrix", str(importance_matrix)] if importance_matrix else []
        command = [str(program), *matrix, str(source), str(target), mixture, threads]
    else:
        command = [
            sys.executable,
            "-c",
            _FUNCTION,
            str(source),
            str(target),
            str(FILE_TYPES[mixture]),
            threads,
        ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not target.is_file():
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        last = "; ".join(said[-2:])[:500] or "it said nothing"
        raise StageError(f"{target}: llama.cpp's quantizer failed (exit code {done.returncode}): {last}")
    return f"K types by {_tool(program, said=done.stdout + done.stderr)}"


def _tool(program: Path | None, *, said: str) -> str:
    """The program with the build that it prints ("main: build = 9000 (abcdef)"), and its digest; or the package."""
    if program is None:
        return f"{DISTRIBUTION} {installed_version(DISTRIBUTION) or 'of unknown version'}"
    build = re.search(r"build = (\d+ \(\w+\))", said)
    return f"{PROGRAM} {f'build {build[1]}' if build else 'of unknown build'}, SHA-256 {file_sha256(program)}"
