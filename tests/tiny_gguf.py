"""Tiny Llamas as GGUF files, written tensor by tensor without a converter and without a tokenizer.

folder = write_gguf(tmp_path / "tiny", model=llama(), type="q8_0")
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.llama_library import library_problems

UNUSABLE = "; ".join(problem.what for problem in library_problems(device="cpu"))
needs_llama_cpp = pytest.mark.skipif(bool(UNUSABLE), reason=UNUSABLE)
"""Skips where llama.cpp's library is missing, of another version, or built for another processor."""

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def llama(**settings: Any) -> Any:
    """Two layers in FP32, weights far from zero, so that greedy decoding visits many tokens."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            LlamaConfig(**{**sizes, **settings}), dtype=torch.float32
        ).eval()


def write_gguf(folder: Path, *, model: Any, type: str = "f32") -> Path:  # noqa: A002  (the quantizer's word)
    """A checkpoint folder with `model.gguf` and config; matrices in `type`, norms in FP32."""
    import gguf

    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    kind = getattr(gguf.GGMLQuantizationType, type.upper())
    for name, values in _tensors(model):
        stored = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """GGUF's names and values; a tied head isn't stored, rotary heads have their halves interleaved."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        place = name.removesuffix(".weight")
        values = tensor.numpy()
        if place == "lm_head" and config.tie_word_embeddings:
            continue
        if place in _WHOLE:
            yield f"{_WHOLE[place]}.weight", values
            continue
        layer, part = place.removeprefix("model.layers.").split(".", 1)
        if count := heads.get(part.rpartition(".")[2]):
            halves = values.reshape(count, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        yield f"blk.{layer}.{_PARTS[part]}.weight", values
