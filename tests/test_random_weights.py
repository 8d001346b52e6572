"""Checkpoints of random weights made from a config: complete, of the right size, equal for equal seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import check_source, tensors
from pipeline.errors import PrerequisiteError, RecipeError
from pipeline.random_weights import Written, write_random_checkpoint
from pipeline.weights import load_pretrained

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


def write(config: dict[str, Any], folder: Path, *, seed: int = 0, shard_bytes: int = 10**9) -> Written:
    folder.mkdir()
    return write_random_checkpoint(
        config, out=folder, seed=seed, shard_bytes=shard_bytes, progress=lambda _: None
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_architecture_is_written_whole_and_runs(
    tmp_path: Path, config: dict[str, Any], dtype: str
) -> None:
    import torch

    folder = tmp_path / "random"
    written = write({**config, "dtype": dtype}, folder)
    check_source(folder)
    model: Any = load_pretrained(folder, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == written.parameters
    stored = tensors(folder)
    assert sum(info.elements for info in stored.values()) >= written.parameters
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert bool(torch.isfinite(logits).all())
    assert float(logits.std()) > 0


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    config = CONFIGS["llama, tied"]
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(config, tmp_path / name, seed=seed)
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_shards_hold_what_one_file_would_and_are_indexed(tmp_path: Path) -> None:
    config = CONFIGS["llama, not tied"]
    write(config, tmp_path / "one")
    sharded = write(config, tmp_path / "many", shard_bytes=50_000)
    assert len(sharded.files) > 2
    assert sharded.files[0] == f"model-00001-of-{len(sharded.files):05}.safetensors"
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert {name: (info.dtype, info.shape) for name, info in one.items()} == {
        name: (info.dtype, info.shape) for name, info in many.items()
    }
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text("utf-8"))
    assert set(index["weight_map"]) == set(one)
    assert sorted(path.name for path in (tmp_path / "many").glob("*.safetensors")) == sorted(sharded.files)


def test_weights_are_of_the_size_that_the_architecture_draws(tmp_path: Path) -> None:
    import torch

    config = {**CONFIGS["llama, not tied"], "initializer_range": 0.05}
    write(config, tmp_path / "random")
    model: Any = load_pretrained(tmp_path / "random", dtype=torch.float32)
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.05, rel=0.05)
    assert bool((model.model.norm.weight == 1).all())


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="no_such_model"):
        write({"model_type": "no_such_model"}, tmp_path / "random")


@pytest.mark.parametrize("config", [{}, {"hidden_size": 64}])
def test_a_config_that_names_no_architecture_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="model_type"):
        write(config, tmp_path / "random")
