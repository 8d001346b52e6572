"""K types: llama.cpp's own quantizer, called as a program or as a package, and its files beside this project's."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.architecture import shape_facts
from pipeline.checkpoint import check_earned_label
from pipeline.errors import StageError
from pipeline.footprint import weight_bytes
from pipeline.gguf_file import GGUF_NAME, read_gguf
from pipeline.llama_quantize import PROGRAM, quantize_file, tool_problems
from pipeline.quantizers.gguf import Gguf
from pipeline.stage_keys import quantize_key
from pipeline.store import file_sha256
from tests.gguf_samples import SOURCE, difference, llama, manifest_of
from tests.tiny_gguf import needs_llama_cpp


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `llama-quantize` that copies its input and writes down what it was asked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / PROGRAM
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n'
        "while [ $# -gt 4 ]; do shift; done\n"
        'case "$3" in Q5_K_S) echo "no such mixture" >&2; exit 3;; esac\ncp "$1" "$2"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path / "asked"


def test_the_tool_gets_both_files_the_mixture_and_the_importance_matrix(
    fake_program: Path, tmp_path: Path
) -> None:
    (tmp_path / "matrix").write_bytes(b"")
    (tmp_path / "in").write_bytes(b"weights")
    matrix = tmp_path / "matrix"
    quantize_file(tmp_path / "in", tmp_path / "made", mixture="Q4_K_M", importance_matrix=matrix)
    assert (tmp_path / "made").read_bytes() == b"weights"
    asked = fake_program.read_text().split()
    assert asked[:5] == ["--imatrix", str(matrix), str(tmp_path / "in"), str(tmp_path / "made"), "Q4_K_M"]


@pytest.mark.usefixtures("fake_program")
def test_what_the_tool_says_when_it_fails_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"weights")
    with pytest.raises(StageError, match=r"failed \(exit code 3\): no such mixture"):
        quantize_file(tmp_path / "in", tmp_path / "made", mixture="Q5_K_S", importance_matrix=None)


def test_without_the_tool_check_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "matrix").write_bytes(b"")
    (problem,) = tool_problems(tmp_path / "matrix")
    assert PROGRAM in problem.what
    assert "llama.cpp" in problem.fix
    (problem,) = tool_problems(tmp_path / "missing")
    assert "llama-imatrix" in problem.fix


STAND_IN = """
import ctypes, shutil
class Settings(ctypes.Structure):
    _fields_ = [("nthread", ctypes.c_int32), ("ftype", ctypes.c_int)]
def llama_model_quantize_default_params():
    return Settings(nthread=0, ftype=7)
def llama_model_quantize(source, target, settings):
    if settings._obj.ftype != 15 or settings._obj.nthread < 1:
        return 5
    return 0 if shutil.copyfile(source, target) else 1
"""


def test_without_the_program_the_python_package_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    (tmp_path / "in").write_bytes(b"weights")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tool_problems(None) == ()
    note = quantize_file(tmp_path / "in", tmp_path / "made", mixture="Q4_K_M", importance_matrix=None)
    assert note.startswith("K types by llama-cpp-python ")
    assert (tmp_path / "made").read_bytes() == b"weights"
    with pytest.raises(StageError, match="failed"):
        quantize_file(tmp_path / "in", tmp_path / "other", mixture="Q6_K", importance_matrix=None)


needs_program = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not on the PATH")


@needs_program
@needs_llama_cpp
@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_0"])
def test_a_file_is_the_one_that_llama_cpp_s_own_quantizer_makes(name: str, tmp_path: Path, out: Path) -> None:
    import gguf as reference

    source = llama(tmp_path / "wide", hidden_size=256, intermediate_size=288, tie_word_embeddings=False)
    Gguf(type="f16").quantize(source, out, device="cpu")
    command = [PROGRAM, str(out / GGUF_NAME), str(tmp_path / "theirs.gguf"), name.upper(), "1"]
    subprocess.run(command, check=True, capture_output=True)
    Gguf.model_validate({"type": name}).quantize(source, out, device="cpu")
    found = []
    for path in (out / GGUF_NAME, tmp_path / "theirs.gguf"):
        header, content = read_gguf(path), path.read_bytes()
        begins = {entry.name: int(entry.data_offset) for entry in reference.GGUFReader(path).tensors}
        data = {
            tensor: (info.dtype, content[begins[tensor] : begins[tensor] + info.size_bytes])
            for tensor, info in header.tensors.items()
        }
        found.append((header.metadata, data))
    assert found[0] == found[1]


@needs_program
@pytest.mark.parametrize("name", ["q4_k_m", "q6_k"])
def test_k_types_by_llama_cpp_s_own_tool(name: str, tmp_path: Path, out: Path) -> None:
    source = llama(tmp_path / "wide", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    quantizer = Gguf.model_validate({"type": name})
    quantizer.quantize(source, out, device="cpu")
    manifest = manifest_of(out, quantizer)
    check_earned_label(manifest, quantizer=quantizer)
    assert manifest.coverage.share == 1.0
    assert difference(quantizer.load(out, device="cpu", compute_dtype="float32"), source) < 0.5
    facts = shape_facts(json.loads((source / "config.json").read_text("utf-8")))
    predicted = weight_bytes(facts, quantizer=quantizer).on_disk
    assert manifest.weight_bytes_on_disk == pytest.approx(predicted, rel=0.05)


@pytest.mark.usefixtures("fake_program")
def test_another_program_in_the_same_place_makes_another_checkpoint_and_is_named(tmp_path: Path) -> None:
    program = tmp_path / "bin" / PROGRAM
    k_type, blocks = Gguf(type="q4_k_m"), Gguf(type="q4_0")
    before = [quantize_key(source=SOURCE, quantizer=one) for one in (k_type, blocks)]
    program.write_text(program.read_text() + 'echo "main: build = 9000 (0abc123)" >&2\n')
    after = [quantize_key(source=SOURCE, quantizer=one) for one in (k_type, blocks)]
    assert (before[0] != after[0], before[1] == after[1]) == (True, True)
    (tmp_path / "in").write_bytes(b"weights")
    note = quantize_file(tmp_path / "in", tmp_path / "made", mixture="Q4_K_M", importance_matrix=None)
    assert note == f"K types by {PROGRAM} build 9000 (0abc123), SHA-256 {file_sha256(program)}"


def test_an_importance_matrix_is_for_k_types_and_named_from_the_root() -> None:
    with pytest.raises(ValidationError, match="importance_matrix is for K types"):
        Gguf(type="q4_0", importance_matrix="/data/matrix.gguf")
    with pytest.raises(ValidationError, match="must be an absolute path or begin with ~"):
        Gguf(type="q4_k_m", importance_matrix="matrix.gguf")


def test_another_importance_matrix_in_the_same_place_makes_another_checkpoint(tmp_path: Path) -> None:
    matrix = tmp_path / "matrix.gguf"
    quantizer = Gguf(type="q4_k_m", importance_matrix=str(matrix))
    keys = set()
    for content in (b"one", b"two"):
        matrix.write_bytes(content)
        keys.add(quantize_key(source=SOURCE, quantizer=quantizer))
    assert len(keys) == 2
