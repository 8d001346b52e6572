"""Parameters, weight bytes and KV cache bytes from a config alone, against counts known by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pipeline.block_weights import MatrixKind
from pipeline.footprint import (
    cached_shape_facts,
    kv_bytes,
    kv_bytes_per_token,
    shape_facts,
    weight_bytes,
    weight_reads,
)
from pipeline.kv_cache import cache_shape_from_config
from pipeline.plugins import plugin_classes
from pipeline.quantizers.base import Quantizer, StoredBytes, group_wise
from tests.model_configs import (
    GPT2_SMALL,
    TINY,
    TINY_EXPERTS,
    TINY_GPT2,
    TINY_LLAMA,
    architecture,
    published,
)
from tests.quantizer_samples import every_quantizer
from tests.tiny_models import write_llama


class Bits:
    """A quantizer that stores `bits` a weight and an FP16 scale for each group of a row."""

    quantizable: ClassVar[frozenset[MatrixKind]] = frozenset(("linear", "conv1d", "experts"))

    def __init__(self, bits: int, group_size: int | None = None) -> None:
        self.bits, self.group_size = bits, group_size

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        scale_bytes = 2 if self.group_size else 0
        return group_wise(
            out_features, in_features, bits=self.bits, group_size=self.group_size, scale_bytes=scale_bytes
        )

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:
        del float_bytes
        return self.predicted_parts(out_features, in_features)

    @property
    def other_bytes_per_weight(self) -> float:
        return 2.0

    def table_bytes_per_weight(self, columns: int, *, is_head: bool) -> float | None:
        del columns, is_head
        return None


FP16, INT8, INT4 = Bits(16), Bits(8), Bits(4, 128)


def test_a_tied_head_is_counted_once() -> None:
    small = shape_facts(GPT2_SMALL)
    assert (small.parameters, small.tied, small.head_weights) == (124_439_808, True, 0)
    assert small.parameters * 4 == 497_759_232
    assert shape_facts({**TINY_GPT2, "n_positions": 128}).parameters == 172_288
    llama = shape_facts(TINY_LLAMA)
    assert llama.parameters == 56_256
    assert weight_bytes(llama, quantizer=FP16).on_disk == 112_512


class QuantizedTables(Bits):
    """Embedding in half a byte a weight, the head in one."""

    def table_bytes_per_weight(self, columns: int, *, is_head: bool) -> float | None:
        del columns
        return 1.0 if is_head else 0.5


def test_tables_that_are_quantized_too_count_at_their_own_width() -> None:
    untied = shape_facts({**TINY_LLAMA, "tie_word_embeddings": False})
    tied = shape_facts({**TINY_LLAMA, "tie_word_embeddings": True})
    for facts, saved in (
        (untied, 1.5 * untied.embedding_weights + untied.head_weights),
        (tied, tied.embedding_weights),
    ):
        assert facts.embedding_weights > 0
        plain, own = (weight_bytes(facts, quantizer=kind(16)) for kind in (Bits, QuantizedTables))
        assert plain.on_disk - own.on_disk == saved
        assert plain.resident - own.resident == saved


def test_an_untied_embedding_is_resident_but_not_read() -> None:
    assert published("qwen3.6-27b").parameters == 26_895_998_464
    assert (
        published("qwen3.6-27b").embedding_weights == published("qwen3.6-27b").head_weights == 1_271_398_400
    )
    stored = weight_bytes(published("qwen3.6-27b"), quantizer=FP16)
    assert stored.on_disk == stored.resident == 2 * 26_895_998_464
    assert stored.read_per_token == 2 * (26_895_998_464 - 1_271_398_400)
    assert stored.bits_per_weight == 16


def test_a_tied_embedding_is_read_as_the_head() -> None:
    assert published("gemma-3-27b-it").parameters == 27_009_346_304
    assert (published("gemma-3-27b-it").embedding_weights, published("gemma-3-27b-it").tied) == (
        1_409_630_208,
        True,
    )
    stored = weight_bytes(published("gemma-3-27b-it"), quantizer=FP16)
    assert stored.read_per_token == stored.on_disk == 54_018_692_608


@pytest.mark.parametrize(
    ("weights", "gigabytes"), [(27 * 10**9, (54.0, 27.0, 13.5)), (671 * 10**9, (1342, 671, 335.5))]
)
def test_bits_times_weights_are_the_bytes_without_scales(weights: int, gigabytes: tuple[float, ...]) -> None:
    sizes = [Bits(bits).predicted_parts(1, weights).total for bits in (16, 8, 4)]
    assert tuple(size / 1e9 for size in sizes) == gigabytes
    assert [size <= 512e9 for size in sizes] == [weights < 256e9, weights < 512e9, True]


def test_gigabytes_and_gibibytes_are_told_apart() -> None:
    assert round(Bits(16).predicted_parts(1, 27 * 10**9).total / 2**30, 2) == 50.29


def test_512_gb_hold_deepseek_v3_at_four_bits_only() -> None:
    facts = published("deepseek-v3")
    on_disk = [weight_bytes(facts, quantizer=each).on_disk for each in (FP16, INT8, INT4)]
    assert on_disk[0] == 2 * 671_026_404_352
    assert [size < 512e9 for size in on_disk] == [False, False, True]


@every_quantizer
def test_the_parts_of_the_stored_bytes_add_up(quantizer: Quantizer) -> None:
    for name in ("qwen3.6-27b", "mixtral-8x7b"):
        stored = weight_bytes(published(name), quantizer=quantizer)
        parts = stored.parts
        assert parts.total == stored.on_disk
        assert parts.unquantized == quantizer.other_bytes_per_weight * (
            published(name).parameters - published(name).linear_weights
        )
        scales = parts.scales + parts.zero_points + parts.codebooks + parts.metadata
        assert (scales == 0) == (quantizer.kind == "native")


def test_fewer_bits_mean_fewer_bytes_and_the_head_stays_at_sixteen() -> None:
    sizes = [weight_bytes(published("qwen3.6-27b"), quantizer=quantizer) for quantizer in (FP16, INT8, INT4)]
    assert sizes[0].on_disk > sizes[1].on_disk > sizes[2].on_disk
    assert sizes[0].on_disk / sizes[2].on_disk < 4
    assert 4.125 < sizes[2].bits_per_weight < 6
    assert sizes[1].on_disk == published("qwen3.6-27b").linear_weights + 2 * (
        published("qwen3.6-27b").parameters - published("qwen3.6-27b").linear_weights
    )


def test_a_token_reads_only_the_routed_experts() -> None:
    facts = shape_facts(TINY_EXPERTS)
    assert facts.parameters == 70_144
    experts = 4 * 3 * 64 * 32
    dense = facts.linear_weights - experts
    assert facts.linear_weights_read_per_token == dense + experts // 2
    read = [round(weight_reads(facts, quantizer=FP16).bytes(batch)) for batch in (1, 2, 1000)]
    assert read[0] == 2 * facts.weights_read_per_token
    assert read[1] == read[0] + 2 * experts // 4  # two tokens touch 4·(1 − ½²) = 3 of 4 experts on average
    assert read[2] == 2 * (facts.parameters - facts.embedding_weights)


def test_a_step_of_many_tokens_reads_every_expert_and_one_token_its_own() -> None:
    facts = published("deepseek-v3")
    reads = weight_reads(facts, quantizer=FP16)
    assert reads.bytes(1) == 2 * facts.weights_read_per_token
    assert sum(expert.routed for expert in reads.experts) == 58 * 8 * 2
    assert {expert.count // expert.routed for expert in reads.experts} == {32}
    one_step = [reads.bytes(tokens) for tokens in (1, 2, 64, 2048)]
    assert one_step == sorted(one_step)
    assert one_step[-1] == pytest.approx(2 * (facts.parameters - facts.embedding_weights), rel=1e-9)
    touched = 2 * facts.parts.experts * (1 - (1 - 8 / 256) ** 64)
    assert reads.bytes(64) == pytest.approx(reads.dense_bytes + touched, rel=1e-12)
    with pytest.raises(ValueError, match="at least 1"):
        reads.bytes(0)


def test_a_dense_model_reads_the_same_bytes_at_every_batch() -> None:
    assert (
        published("gemma-3-27b-it").linear_weights_read_per_token
        == published("gemma-3-27b-it").linear_weights
    )
    assert weight_reads(published("gemma-3-27b-it"), quantizer=FP16).bytes(32) == 54_018_692_608


def test_latent_attention_caches_576_values_a_token_and_layer() -> None:
    facts = published("deepseek-v3")
    assert kv_bytes_per_token(facts) == 61 * 576 * 2
    assert kv_bytes(facts, 8192, element_bytes=1) == 8192 * 61 * 576


def test_a_hybrid_models_linear_layers_keep_a_constant_state() -> None:
    facts = published("qwen3.6-27b")
    assert kv_bytes_per_token(facts) == 65_536
    assert facts.cache is not None
    assert (facts.cache.growing_layers, facts.cache.state_layers) == (16, 48)
    inputs, matrices = 48 * 10_240 * 4, 48 * 48 * 128 * 128 * 4
    state = 2 * inputs + matrices
    assert kv_bytes(facts, 0) == state
    assert kv_bytes(facts, 32_768) == 2 * 2**30 + state
    assert kv_bytes(facts, 32_768, element_bytes=4) == 4 * 2**30 + 4 * inputs + matrices


def test_a_hybrid_s_cache_follows_its_interval_or_its_list_of_layers() -> None:
    """A quarter of the bytes that as many full layers take."""
    by_interval = architecture("qwen3.6-27b")
    assert (by_interval["full_attention_interval"], "layer_types" in by_interval) == (4, False)
    kinds = [*["linear_attention"] * 3, "full_attention"] * 16
    by_list = {name: value for name, value in by_interval.items() if name != "full_attention_interval"}
    hybrid = shape_facts({**by_list, "layer_types": kinds})
    assert hybrid.cache == published("qwen3.6-27b").cache
    full = shape_facts({**by_list, "layer_types": ["full_attention"] * 64})
    assert (kv_bytes_per_token(hybrid), kv_bytes_per_token(full)) == (65_536, 262_144)
    assert kv_bytes(full, 32_768) == 8 * 2**30


def test_an_fp8_cache_halves_what_grows_and_leaves_constant_states_alone() -> None:
    hybrid = published("qwen3.6-27b")
    state = kv_bytes(hybrid, 0)
    assert state is not None
    assert kv_bytes(hybrid, 0, element_bytes=1) == state
    assert kv_bytes(hybrid, 32_768, element_bytes=1) == 2**30 + state
    windowed = published("gemma-3-27b-it")
    assert kv_bytes(windowed, 8192, element_bytes=1) == (kv_bytes(windowed, 8192) or 0) / 2


def test_windowed_layers_stop_growing_at_the_window() -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    few_experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    facts = shape_facts(
        {
            **{"model_type": "gpt_oss", **TINY, **heads, **few_experts},
            "num_hidden_layers": 36,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        }
    )
    assert kv_bytes(facts, 128) == 73_728 * 128
    assert kv_bytes(facts, 4096) == 155_713_536
    assert kv_bytes_per_token(facts) == 18 * 2048


def test_gemma_grows_in_one_layer_of_six() -> None:
    per_layer = 2 * 16 * 128 * 2
    assert kv_bytes_per_token(published("gemma-3-27b-it")) == 10 * per_layer
    assert kv_bytes(published("gemma-3-27b-it"), 8192) == 10 * per_layer * 8192 + 52 * per_layer * 1024


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


def test_the_config_alone_gives_the_same_cache_as_a_forward_pass() -> None:
    from transformers import AutoConfig

    for name, facts in (
        ("qwen3.6-27b", published("qwen3.6-27b")),
        ("gemma-3-27b-it", published("gemma-3-27b-it")),
    ):
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
