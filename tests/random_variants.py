"""Variants of random weights for tests: seven small architectures, and the tensors of a loaded model in plain parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.checkpoint import write_manifest
from pipeline.quantizers.base import Quantizer
from pipeline.random_weights import random_manifest, write_random_variant
from pipeline.results import CheckpointManifest, SourceRecord

SOURCE = SourceRecord(model="tiny", revision=None, files=())
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True, **SIZES},
    "llama, not tied": {"model_type": "llama", "tie_word_embeddings": False, **SIZES},
    "gpt2": {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 2},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 8, **SIZES},
    "mixture of experts": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **SIZES,
    },
    "hybrid": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        **SIZES,
    },
    "router with a buffer": {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        "num_key_value_heads": 4,
    },
}


def write(config: dict[str, Any], folder: Path, *, quantizer: Quantizer, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    write_random_variant(config, out=folder, seed=seed, quantizer=quantizer)
    return folder


def made(config: dict[str, Any], folder: Path, *, quantizer: Quantizer, seed: int = 0) -> CheckpointManifest:
    """The same with its manifest, as the stage writes it."""
    write(config, folder, quantizer=quantizer, seed=seed)
    manifest = random_manifest(folder, quantizer=quantizer, source=SOURCE)
    write_manifest(folder, manifest)
    return manifest


def load(folder: Path, *, quantizer: Quantizer, compute_dtype: str = "float32") -> Any:
    return quantizer.load(folder, device="cpu", compute_dtype=compute_dtype)


def tensors_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of a model in its plain parts: packed data, scales, offsets, codebooks."""
    for module_name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            yield from plain_parts(f"{module_name}.{name}", tensor)


def plain_parts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(f"{name}.{part}", getattr(tensor, part))
        return
    yield name, tensor
    if getattr(tensor, "SCB", None) is not None:
        yield f"{name}.SCB", tensor.SCB
    if getattr(tensor, "quant_state", None) is not None:
        state = tensor.quant_state.as_dict(packed=True)
        yield from ((f"{name}.{part}", value) for part, value in state.items())
