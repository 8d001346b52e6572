"""What a config's model has in it: its parts, what a token reads, what attention costs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.architecture import AttentionSpan, ParameterParts, shape_facts
from pipeline.checkpoint import model_layout
from pipeline.errors import PrerequisiteError, RecipeError
from tests.model_configs import (
    GPT2_SMALL,
    TINY,
    TINY_DEEPSEEK,
    TINY_EXPERTS,
    TINY_GEMMA,
    TINY_GPT2,
    TINY_HYBRID,
    TINY_LLAMA,
    TINY_WITH_VISION,
    published,
)
from tests.tiny_models import write_gpt2, write_llama, write_moe

TINY_MIXTRAL = {"model_type": "mixtral", **TINY, "num_local_experts": 4, "num_experts_per_tok": 2}
EVERY_CONFIG: dict[str, dict[str, Any]] = {
    "llama": TINY_LLAMA,
    "gpt2": TINY_GPT2,
    "gemma3 text": TINY_GEMMA,
    "gemma3 with vision": TINY_WITH_VISION,
    "hybrid": TINY_HYBRID,
    "deepseek": TINY_DEEPSEEK,
    "mixtral": TINY_MIXTRAL,
    "qwen3 experts": TINY_EXPERTS,
}
every_config = pytest.mark.parametrize("config", EVERY_CONFIG.values(), ids=EVERY_CONFIG)


# --- parts -----------------------------------------------------------------------------------------------


@every_config
def test_every_parameter_is_in_one_part_and_in_one_kind_of_weight(config: dict[str, Any]) -> None:
    facts = shape_facts(config)
    assert facts.parts.total == facts.parameters
    by_kind = (facts.linear_weights, facts.embedding_weights, facts.head_weights, facts.other_weights)
    assert sum(by_kind) == facts.parameters
    assert (facts.parts.embedding, facts.parts.head) == (facts.embedding_weights, facts.head_weights)
    assert facts.parts.attention > 0
    assert facts.parts.mlp + facts.parts.experts > 0


def test_a_dense_models_parts_are_those_of_its_published_sizes() -> None:
    parts = published("llama-3.1-8b").parts
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert parts == ParameterParts(
        embedding=128_256 * 4096,
        head=128_256 * 4096,
        attention=attention,
        mlp=32 * 3 * 4096 * 14_336,
        experts=0,
        norms=65 * 4096,
        vision=0,
        other=0,
    )
    assert parts.total == 8_030_261_248


def test_gpt2s_biases_lie_with_their_layers_and_learned_positions_apart() -> None:
    parts = shape_facts(GPT2_SMALL).parts
    assert parts.attention == 12 * (4 * 768 * 768 + 4 * 768)
    assert parts.mlp == 12 * (8 * 768 * 768 + 5 * 768)
    assert parts.norms == 25 * 2 * 768
    assert (parts.head, parts.other) == (0, 1024 * 768)


def test_linear_attention_is_attention() -> None:
    parts = published("qwen3.6-27b").parts
    assert parts.mlp == 64 * 3 * 5120 * 17_408
    linear = 48 * (5120 * (10_240 + 6144 + 2 * 48) + 10_240 * 4 + 2 * 48 + 6144 * 5120)
    full = 16 * 5120 * (2 * 24 * 256 + 2 * 4 * 256 + 24 * 256)
    assert parts.attention == linear + full
    assert parts.other == 0


def test_routed_experts_are_told_from_shared_ones_and_from_their_router() -> None:
    parts = published("deepseek-v3").parts
    assert parts.experts == 58 * 256 * 3 * 7168 * 2048
    assert parts.mlp == 58 * 3 * 7168 * 2048 + 3 * 3 * 7168 * 18_432
    assert parts.other == 58 * 256 * 7168
    mixtral = published("mixtral-8x7b").parts
    assert (mixtral.experts, mixtral.mlp) == (32 * 8 * 3 * 4096 * 14_336, 0)
    assert mixtral.other == 32 * 8 * 4096


def test_a_vision_tower_is_a_part_of_its_own_that_decoding_does_not_read() -> None:
    both, alone = shape_facts(TINY_WITH_VISION), shape_facts(TINY_GEMMA)
    assert both.parts.model_copy(update={"vision": 0}) == alone.parts
    assert both.parts.vision == both.parameters - alone.parameters > 0
    assert both.weights_read_per_token == alone.weights_read_per_token
    assert both.cache == alone.cache


@pytest.mark.parametrize(
    ("name", "parameters", "read_per_token"),
    [
        ("llama-2-7b", 6_738_415_616, 6.61e9),
        ("llama-3.3-70b", 70_553_706_496, 69.50e9),
        ("mistral-7b", 7_241_732_096, 7.11e9),
        ("mixtral-8x7b", 46_702_792_704, 12.75e9),
        ("deepseek-v3", 671_026_404_352, 36.63e9),
        ("gemma-3-27b-it", 27_009_346_304, 27.01e9),
    ],
)
def test_published_models_have_their_parameters(name: str, parameters: int, read_per_token: float) -> None:
    assert published(name).parameters == parameters
    assert published(name).weights_read_per_token == pytest.approx(read_per_token, rel=1e-3)


def test_learned_positions_are_resident_but_not_read() -> None:
    facts = shape_facts(GPT2_SMALL)
    assert facts.unread_weights == 1024 * 768
    assert facts.weights_read_per_token == facts.parameters - 1024 * 768
    assert facts.linear_weights == 12 * 12 * 768 * 768  # GPT-2's transposed projections are linear weights


def test_planning_and_coverage_mean_the_same_weights(tmp_path: Path) -> None:
    import json
    import math

    for write in (write_llama, write_gpt2, write_moe):
        folder = write(tmp_path / write.__name__)
        facts = shape_facts(json.loads((folder / "config.json").read_text("utf-8")))
        layout = model_layout(folder)
        for linear in (layout.linear, layout.module_linear):
            assert sum(math.prod(shape) for shape in linear.values()) == facts.linear_weights
        assert layout.parameters == facts.parameters


# --- attention -------------------------------------------------------------------------------------------


def test_attention_costs_two_flops_for_each_element_of_scores_and_values() -> None:
    assert published("llama-3.1-8b").attention == (
        AttentionSpan(window_tokens=None, flops_per_pair=32 * 4 * 32 * 128),
    )
    assert published("deepseek-v3").attention == (
        AttentionSpan(window_tokens=None, flops_per_pair=61 * 2 * 128 * (192 + 128)),
    )


def test_each_window_is_a_span_of_its_own_and_linear_attention_none() -> None:
    assert published("gemma-3-27b-it").attention == (
        AttentionSpan(window_tokens=1024, flops_per_pair=52 * 4 * 32 * 128),
        AttentionSpan(window_tokens=None, flops_per_pair=10 * 4 * 32 * 128),
    )
    assert published("qwen3.6-27b").attention == (
        AttentionSpan(window_tokens=None, flops_per_pair=16 * 4 * 24 * 256),
    )
    alone = {"model_type": "qwen3_5_text", **TINY, "layer_types": ["linear_attention"] * 2}
    assert shape_facts(alone).attention == ()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3 text", "deepseek", "mixtral"])
def test_the_cost_of_attention_is_what_a_forward_pass_counts(name: str) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**EVERY_CONFIG[name], attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    def flops(tokens: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
        return int(counter.get_total_flops())

    # Without a cache every query meets every key (windows are masked), so a pass costs a·t + b·t².
    squared = (flops(32) - 2 * flops(16)) // (32**2 - 2 * 16**2)
    spans = shape_facts(EVERY_CONFIG[name]).attention
    assert spans is not None
    assert sum(span.flops_per_pair for span in spans) == squared


@pytest.mark.parametrize(
    "config",
    [
        {**TINY_LLAMA, "layer_types": ["quantum_attention"]},
        {**TINY_LLAMA, "layer_types": ["compressed_sparse_attention"]},
        {**TINY_LLAMA, "layer_types": ["chunked_attention"], "attention_chunk_size": 8},
    ],
    ids=lambda config: config["layer_types"][0],
)
def test_attention_of_a_kind_that_is_not_known_has_no_cost_instead_of_a_guess(config: dict[str, Any]) -> None:
    assert shape_facts(config).attention is None


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, must be a whole .* 1 to 10,000"),
        ({"vocab_size": 0}, "vocab_size is 0, must be a whole number above 0"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": 64.0}, r"hidden_size is 64\.0"),
        ({"hidden_size": 10**30}, "at most 2,147,483,647"),
        ({"hidden_size": 2**31 - 8, "vocab_size": 2**31 - 1}, "can't build this model"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"rope_theta": float("nan")}, "numbers must be finite"),
        ({"rms_norm_eps": float("inf")}, "numbers must be finite"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"hidden_size": 66}, "not a multiple of the number of attention heads"),
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', must be a list"),
        ({"layer_types": ["full_attention"] * 3}, "num_hidden_layers"),
        ({"text_config": [1]}, r"text_config is \[1\], must be an object"),
        ({"text_config": {"hidden_size": -1}}, r"text_config\.hidden_size is -1"),
        ({"model_type": "bert"}, "'bert' is an encoder here"),
        ({"model_type": None}, "model_type"),
        ({"model_type": 7}, "model_type"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_by_key(change: dict[str, Any], words: str) -> None:
    config = {key: value for key, value in {**TINY_LLAMA, **change}.items() if value is not None}
    with pytest.raises(RecipeError, match=words) as refused:
        shape_facts(config, source="models/tiny/config.json")
    assert "models/tiny/config.json" in str(refused.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {**TINY_DEEPSEEK, "n_routed_experts": 1},
            "num_experts_per_tok is 2, must be at most n_routed_experts, 1",
        ),
        (
            {**TINY_EXPERTS, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5, must be at most num_experts, 4",
        ),
        ({**TINY_MIXTRAL, "num_local_experts": 0}, "num_local_experts is 0"),
        ({**TINY_DEEPSEEK, "kv_lora_rank": -1}, "kv_lora_rank is -1"),
        ({**TINY_HYBRID, "linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
        ({**TINY_GPT2, "n_head": 3}, "can't build this model"),
    ],
)
def test_sizes_of_experts_and_latent_attention_are_checked_too(config: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        shape_facts(config)


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("llama", "intermediate_size", "missing intermediate_size;"),
        ("gpt2", "n_layer", r"missing num_hidden_layers \(or n_layer\);"),
        ("deepseek", "n_routed_experts", "n_routed_experts"),
        ("deepseek", "kv_lora_rank", "missing kv_lora_rank;"),
        ("mixtral", "num_experts_per_tok", "missing num_experts_per_tok;"),
    ],
)
def test_a_missing_size_is_not_filled_from_another_model(name: str, key: str, words: str) -> None:
    config = {held: value for held, value in EVERY_CONFIG[name].items() if held != key}
    with pytest.raises(RecipeError, match=words):
        shape_facts(config)


def test_an_unknown_architecture_names_the_nearest_one() -> None:
    with pytest.raises(PrerequisiteError, match=r"'lama' is unknown.*nearest: 'llama'"):
        shape_facts({**TINY_LLAMA, "model_type": "lama"})
