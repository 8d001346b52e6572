"""Files that the comparison with llama.cpp keeps are taken up only when the same model made all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.gguf_file import GGUF_NAME
from scripts.compare_kl import make_variant
from tests.gguf_samples import llama


def test_a_file_is_kept_for_its_own_model_only(tmp_path: Path) -> None:
    model, out = llama(tmp_path / "model", seed=1), tmp_path / "f16"
    make_variant(model, out, "f16")
    file = out / GGUF_NAME
    first, made = file.read_bytes(), file.stat().st_mtime_ns
    make_variant(model, out, "f16")
    assert file.stat().st_mtime_ns == made, "taken up"
    make_variant(llama(tmp_path / "other", seed=2), out, "f16")
    assert file.read_bytes() != first


def test_a_conversion_that_was_stopped_leaves_nothing_to_take_up(tmp_path: Path) -> None:
    model, out = llama(tmp_path / "model"), tmp_path / "f16"
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="file size"):
        make_variant(model, out, "f16")
    assert not out.exists()
    (model / "model.safetensors").write_bytes(whole)
    make_variant(model, out, "f16")
    assert (out / GGUF_NAME).is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
