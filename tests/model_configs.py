"""Model configs that tests measure: tiny ones of several architectures, and the published ones of `recipes/`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.architecture import ShapeFacts, shape_facts

ARCHITECTURES = Path(__file__).parent.parent / "recipes" / "architectures"
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
TINY_LLAMA = {**TINY, "model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True}
TINY_GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000}
GPT2_SMALL = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
TINY_EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}
TINY_DEEPSEEK = {
    "model_type": "deepseek_v3",
    **TINY,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
TINY_HYBRID = {
    "model_type": "qwen3_5_text",
    **TINY,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TINY_GEMMA = {"model_type": "gemma3_text", **TINY, "head_dim": 16, "sliding_window": 8}
TINY_WITH_VISION = {
    "model_type": "gemma3",
    "text_config": TINY_GEMMA,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}


def architecture(name: str) -> dict[str, Any]:
    """The config of `recipes/architectures/NAME.json`."""
    loaded: dict[str, Any] = json.loads((ARCHITECTURES / f"{name}.json").read_text("utf-8"))
    return loaded


@cache
def published(name: str) -> ShapeFacts:
    """Its facts, measured once."""
    return shape_facts(architecture(name))
