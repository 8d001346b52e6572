"""Tiny models that llama.cpp's converter takes, and what the tests ask of their GGUF checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checkpoint import build_manifest
from pipeline.quantizers.gguf import Gguf
from pipeline.results import CheckpointManifest, SourceRecord
from pipeline.weights import load_pretrained
from tests.quantizer_samples import logits
from tests.tiny_models import write_fallback_tokenizer, write_llama

SOURCE = SourceRecord(model="tiny", revision=None, files=())


def llama(folder: Path, *, tokens: int = 300, **settings: Any) -> Path:
    """A tiny Llama whose tokenizer llama.cpp's converter knows."""
    return write_fallback_tokenizer(write_llama(folder, **settings), tokens=tokens)


def manifest_of(folder: Path, quantizer: Gguf) -> CheckpointManifest:
    return build_manifest(folder, quantizer=quantizer, source=SOURCE, seconds=1.0, peak_memory_bytes=1)


def difference(found: Any, source: Path) -> float:
    """Largest difference of the logits to those of the source in FP32."""
    import torch

    exact = load_pretrained(source, dtype=torch.float32, device_map={"": "cpu"})
    return float((logits(found) - logits(exact)).abs().max())
