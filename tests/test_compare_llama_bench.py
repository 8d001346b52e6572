"""The comparison with llama-bench: what is wrong with what it is given is one message, and a failing bench another."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compare_llama_bench import main
from tests.tiny_gguf import llama, needs_llama_cpp, write_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny"), model=llama()) / "model.gguf"


def bench(folder: Path, *, script: str) -> Path:
    """A program in llama-bench's place."""
    program = folder / "llama-bench"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def compared(folder: Path, *more: str, program: Path, file: Path) -> int:
    return main([str(folder / "out"), "--llama-bench", str(program), "--gguf", str(file), *more])


def test_a_wrong_path_of_llama_bench_is_a_mistake(
    tmp_path: Path, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(tmp_path, program=tmp_path / "nowhere", file=gguf) == 2
    assert "nowhere: doesn't exist; give the path" in capsys.readouterr().err
    assert compared(tmp_path, program=gguf, file=gguf) == 2
    assert "model.gguf: isn't an executable program" in capsys.readouterr().err


def test_a_missing_or_other_file_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = bench(tmp_path, script="exit 0")
    assert compared(tmp_path, program=program, file=tmp_path / "gone.gguf") == 2
    assert "--gguf" in (said := capsys.readouterr().err)
    assert "gone.gguf: no such file" in said
    assert compared(tmp_path, program=program, file=program) == 2
    assert "llama-bench" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--repeats", "--threads"])
def test_numbers_below_one_are_a_mistake(
    option: str, tmp_path: Path, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(tmp_path, option, "0", program=bench(tmp_path, script="exit 0"), file=gguf) == 2
    assert f"{option} must be at least 1, is 0" in capsys.readouterr().err


@needs_llama_cpp
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo broken >&2; exit 3", "failed (3): broken"),
        ("echo no json", "isn't what is known of llama-bench"),
        ("echo '[]'", "isn't what is known of llama-bench"),
    ],
)
def test_a_bench_that_fails_ends_in_a_message(
    script: str, said: str, tmp_path: Path, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = bench(tmp_path, script=script)
    assert compared(tmp_path, "--threads", "1", program=program, file=gguf) == 4
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
