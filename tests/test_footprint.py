"""Parameters, weight bytes and KV cache bytes from a config alone, against counts known by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PrerequisiteError, RecipeError
from pipeline.footprint import (
    ShapeFacts,
    bytes_read_per_step,
    cached_shape_facts,
    kv_bytes,
    kv_bytes_per_token,
    shape_facts,
    weight_bytes,
)
from pipeline.kv_cache import cache_shape_from_config
from pipeline.plugins import plugin_classes
from tests.tiny_models import write_llama

ARCHITECTURES = Path(__file__).parent.parent / "recipes" / "architectures"
TINY = {
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


class Bits:
    """A quantizer that stores `bits` a weight and an FP16 scale for each group of a row."""

    def __init__(self, bits: int, group_size: int | None = None) -> None:
        self.bits, self.group_size = bits, group_size

    def predicted_bytes(self, out_features: int, in_features: int) -> int:
        groups = math.ceil(in_features / self.group_size) if self.group_size else 0
        return out_features * in_features * self.bits // 8 + 2 * out_features * groups

    @property
    def other_bytes_per_weight(self) -> float:
        return 2.0


FP16, INT8, INT4 = Bits(16), Bits(8), Bits(4, 128)


def architecture(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ARCHITECTURES / f"{name}.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def qwen_27b() -> ShapeFacts:
    return shape_facts(architecture("qwen3.6-27b"))


@pytest.fixture(scope="module")
def gemma_27b() -> ShapeFacts:
    return shape_facts(architecture("gemma-3-27b-it"))


def test_a_tied_head_is_counted_once() -> None:
    small = shape_facts(GPT2_SMALL)
    assert (small.parameters, small.tied, small.head_weights) == (124_439_808, True, 0)
    assert small.parameters * 4 == 497_759_232
    assert shape_facts({**TINY_GPT2, "n_positions": 128}).parameters == 172_288
    llama = shape_facts(TINY_LLAMA)
    assert llama.parameters == 56_256
    assert weight_bytes(llama, quantizer=FP16).on_disk == 112_512


def test_the_parts_add_up_to_the_parameters(qwen_27b: ShapeFacts, gemma_27b: ShapeFacts) -> None:
    for facts in (qwen_27b, gemma_27b, shape_facts(TINY_EXPERTS), shape_facts(TINY_GPT2)):
        parts = facts.linear_weights + facts.embedding_weights + facts.head_weights + facts.other_weights
        assert parts == facts.parameters


def test_an_untied_embedding_is_resident_but_not_read(qwen_27b: ShapeFacts) -> None:
    assert qwen_27b.parameters == 26_895_998_464
    assert qwen_27b.embedding_weights == qwen_27b.head_weights == 1_271_398_400
    stored = weight_bytes(qwen_27b, quantizer=FP16)
    assert stored.on_disk == stored.resident == 2 * 26_895_998_464
    assert stored.read_per_token == 2 * (26_895_998_464 - 1_271_398_400)
    assert stored.bits_per_weight == 16


def test_a_tied_embedding_is_read_as_the_head(gemma_27b: ShapeFacts) -> None:
    assert gemma_27b.parameters == 27_009_346_304
    assert (gemma_27b.embedding_weights, gemma_27b.tied) == (1_409_630_208, True)
    stored = weight_bytes(gemma_27b, quantizer=FP16)
    assert stored.read_per_token == stored.on_disk == 54_018_692_608


def test_learned_positions_are_resident_but_not_read() -> None:
    facts = shape_facts(GPT2_SMALL)
    assert facts.unread_weights == 1024 * 768
    assert facts.weights_read_per_token == facts.parameters - 1024 * 768
    assert facts.linear_weights == 12 * 12 * 768 * 768  # GPT-2's transposed projections are linear weights


def test_fewer_bits_mean_fewer_bytes_and_the_head_stays_at_sixteen(qwen_27b: ShapeFacts) -> None:
    sizes = [weight_bytes(qwen_27b, quantizer=quantizer) for quantizer in (FP16, INT8, INT4)]
    assert sizes[0].on_disk > sizes[1].on_disk > sizes[2].on_disk
    assert sizes[0].on_disk / sizes[2].on_disk < 4
    assert 4.125 < sizes[2].bits_per_weight < 6
    assert sizes[1].on_disk == qwen_27b.linear_weights + 2 * (qwen_27b.parameters - qwen_27b.linear_weights)


def test_a_token_reads_only_the_routed_experts() -> None:
    facts = shape_facts(TINY_EXPERTS)
    assert facts.parameters == 70_144
    experts = 4 * 3 * 64 * 32
    dense = facts.linear_weights - experts
    assert facts.linear_weights_read_per_token == dense + experts // 2
    read = [bytes_read_per_step(facts, quantizer=FP16, batch_size=batch) for batch in (1, 2, 1000)]
    assert read[0] == 2 * facts.weights_read_per_token
    assert read[1] == read[0] + 2 * experts // 4  # two tokens touch 4·(1 − ½²) = 3 of 4 experts on average
    assert read[2] == 2 * (facts.parameters - facts.embedding_weights)


def test_a_dense_model_reads_the_same_bytes_at_every_batch(gemma_27b: ShapeFacts) -> None:
    assert gemma_27b.linear_weights_read_per_token == gemma_27b.linear_weights
    assert bytes_read_per_step(gemma_27b, quantizer=FP16, batch_size=32) == 54_018_692_608


def test_latent_attention_caches_576_values_a_token_and_layer() -> None:
    config = {**architecture_of_deepseek(), "num_hidden_layers": 4}
    facts = shape_facts(config)
    assert kv_bytes_per_token(facts) == 4 * 576 * 2
    assert facts.linear_weights_read_per_token < 0.4 * facts.linear_weights


def architecture_of_deepseek() -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }


def test_a_hybrid_models_linear_layers_keep_a_constant_state(qwen_27b: ShapeFacts) -> None:
    assert kv_bytes_per_token(qwen_27b) == 65_536
    cache = qwen_27b.cache
    assert cache is not None
    assert (cache.growing_layers, cache.state_layers) == (16, 48)
    state = 48 * (10_240 * 4 * 2 + 48 * 128 * 128 * 4)
    assert kv_bytes(qwen_27b, 0) == state
    assert kv_bytes(qwen_27b, 32_768) == 2 * 2**30 + state
    assert kv_bytes(qwen_27b, 32_768, element_bytes=4) == 2 * 2 * 2**30 + 48 * (
        10_240 * 4 * 4 + 48 * 128 * 128 * 4
    )


def test_windowed_layers_stop_growing_at_the_window() -> None:
    facts = shape_facts(
        {
            "model_type": "qwen2",
            **TINY,
            "num_hidden_layers": 36,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "use_sliding_window": True,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        }
    )
    assert kv_bytes(facts, 128) == 73_728 * 128
    assert kv_bytes(facts, 4096) == 155_713_536
    assert kv_bytes_per_token(facts) == 18 * 2048


def test_gemma_grows_in_one_layer_of_six(gemma_27b: ShapeFacts) -> None:
    per_layer = 2 * 16 * 128 * 2
    assert kv_bytes_per_token(gemma_27b) == 10 * per_layer
    assert kv_bytes(gemma_27b, 8192) == 10 * per_layer * 8192 + 52 * per_layer * 1024


def test_predicted_cache_bytes_equal_those_of_a_real_forward_pass() -> None:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, Qwen3_5TextConfig

    sizes = {**TINY, "num_hidden_layers": 4, "head_dim": 16}
    configs = [
        Gemma3TextConfig(**sizes, sliding_window=8, sliding_window_pattern=2),
        Qwen3_5TextConfig(**sizes, linear_num_key_heads=2, linear_num_value_heads=4),
    ]
    for config in configs:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        cache = DynamicCache(config=config)
        with torch.no_grad():
            model(input_ids=torch.arange(20)[None], cache=cache)
            model(input_ids=torch.tensor([[1]]), cache=cache)
        facts = shape_facts(json.loads(config.to_json_string()))
        assert kv_bytes(facts, 21) == cache_storage_bytes(cache), config.model_type


def cache_storage_bytes(cache: Any) -> int:
    """Bytes of the live storages of a cache, states in dicts included."""
    import torch

    found = {}
    for layer in cache.layers:
        for item in vars(layer).values():
            for tensor in item.values() if isinstance(item, dict) else [item]:
                if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                    found[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def test_the_config_alone_gives_the_same_cache_as_a_forward_pass(
    qwen_27b: ShapeFacts, gemma_27b: ShapeFacts
) -> None:
    from transformers import AutoConfig

    for name, facts in (("qwen3.6-27b", qwen_27b), ("gemma-3-27b-it", gemma_27b)):
        derived = cache_shape_from_config(AutoConfig.for_model(**architecture(name)))
        assert derived is not None
        assert facts.cache is not None
        assert derived.model_copy(update={"source": "forward pass"}) == facts.cache


def test_layers_without_any_attention_are_read_from_the_config() -> None:
    config = {"model_type": "qwen3_5_text", **TINY, "layer_types": ["linear_attention"] * 2}
    facts = shape_facts(config)
    assert facts.cache is not None
    assert facts.cache.source == "config"
    assert kv_bytes_per_token(facts) == 0


def test_an_unknown_layer_kind_leaves_the_cache_unknown_instead_of_guessed() -> None:
    facts = shape_facts({**TINY_LLAMA, "layer_types": ["quantum_attention"]})
    assert facts.parameters == 56_256
    assert kv_bytes(facts, 1000) is None
    assert kv_bytes_per_token(facts) is None
    assert "quantum_attention" in facts.cache_unavailable
    known_name = shape_facts({**TINY_LLAMA, "layer_types": ["compressed_sparse_attention"]})
    assert known_name.cache is None
    assert known_name.cache_unavailable


def test_a_vision_tower_is_resident_but_not_read() -> None:
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {"model_type": "gemma3_text", **TINY, "head_dim": 16, "sliding_window": 8}
    both = shape_facts({"model_type": "gemma3", "text_config": text, "vision_config": tower})
    alone = shape_facts(text)
    assert both.parameters > alone.parameters
    assert both.weights_read_per_token == alone.weights_read_per_token
    assert both.cache == alone.cache


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_by_key(change: dict[str, Any], words: str) -> None:
    config = {key: value for key, value in {**TINY_LLAMA, **change}.items() if value is not None}
    with pytest.raises(RecipeError, match=words) as refused:
        shape_facts(config, source="models/tiny/config.json")
    assert "models/tiny/config.json" in str(refused.value)


def test_a_missing_size_is_not_filled_from_another_model() -> None:
    config = {key: value for key, value in TINY_LLAMA.items() if key != "intermediate_size"}
    with pytest.raises(RecipeError, match="missing intermediate_size"):
        shape_facts(config)


def test_an_unknown_architecture_names_the_nearest_one() -> None:
    with pytest.raises(PrerequisiteError, match=r"'lama' is unknown.*nearest: 'llama'"):
        shape_facts({**TINY_LLAMA, "model_type": "lama"})


def test_cached_facts_need_no_torch(tmp_path: Path) -> None:
    first = cached_shape_facts(TINY_LLAMA, cache_folder=tmp_path)
    (entry,) = tmp_path.iterdir()
    program = (
        "import sys, json, pathlib\n"
        "from pipeline.footprint import cached_shape_facts\n"
        "facts = cached_shape_facts(json.loads(sys.argv[1]), cache_folder=pathlib.Path(sys.argv[2]))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print(facts.digest())\n"
    )
    command = [sys.executable, "-c", program, json.dumps(TINY_LLAMA), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == first.digest()
    entry.write_text("{}")
    assert cached_shape_facts(TINY_LLAMA, cache_folder=tmp_path) == first
    assert entry.read_text() != "{}"


def test_another_config_gets_another_cache_entry(tmp_path: Path) -> None:
    cached_shape_facts(TINY_LLAMA, cache_folder=tmp_path)
    wider = cached_shape_facts({**TINY_LLAMA, "intermediate_size": 256}, cache_folder=tmp_path)
    assert wider.linear_weights == 64 * (64 + 32 + 32 + 64) + 3 * 64 * 256
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_predicted_weight_bytes_are_those_of_the_written_checkpoint(precision: str, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    classes = plugin_classes("pipeline.quantizers")
    quantizer = next(q for cls in classes if (q := cls.default_for(precision, device="cpu")) is not None)
    out = tmp_path / "out"
    out.mkdir()
    quantizer.quantize(source, out, device="cpu")
    facts = shape_facts(json.loads((source / "config.json").read_text()))
    stored_bytes = sum(tensor_bytes(file) for file in out.glob("*.safetensors"))
    assert weight_bytes(facts, quantizer=quantizer).on_disk == pytest.approx(stored_bytes, rel=0.001)


def tensor_bytes(file: Path) -> int:
    """Bytes of a safetensors file without its header, whose length stands in the first eight bytes."""
    return file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
