"""What a precision of the short form means on this machine: the fastest pair that runs the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.best_paths import (
    ENGINE_RANKING,
    PAIRS,
    EngineRanking,
    Pair,
    RankedPair,
    Wanted,
    best_ways,
    ranking_key,
)
from pipeline.engines.llama_cpp import LlamaCpp
from pipeline.engines.transformers import Transformers
from pipeline.hardware import Device, detect
from pipeline.planning import best_for, plan_recipe
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.quanto import Quanto
from pipeline.recipe import load_recipe
from pipeline.store import Store
from tests.tiny_models import write_fallback_tokenizer, write_llama

CPU = Device(
    name="a CPU",
    kind="cpu",
    memory_bytes=8 * 2**30,
    threads=2,
    last_level_cache_bytes=None,
    bandwidth_bytes_per_s=None,
    source="test",
)
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
needs_llama_cpp = pytest.mark.skipif(
    bool(LlamaCpp().check(device="cpu")) or detect().kind != "cpu",
    reason="needs xllamacpp on a machine without a GPU",
)
QUANTO = Pair(Quanto(weights="int8"), Transformers())


def ranked(**rates: float | None) -> EngineRanking:
    """INT8 pairs by name and decode rate."""
    pairs = tuple(RankedPair(name=name, decode_tokens_per_s=rate) for name, rate in rates.items())
    return EngineRanking(measured_at="2026-01-01 00:00 UTC", model="small", pairs={"int8": pairs})


def kinds(ways: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (way.quantizer.kind, way.engine.kind) for name, way in ways.items()}


def wanted(*precisions: str, config: dict[str, Any] = LLAMA, **fields: Any) -> Wanted:
    return Wanted(**{"precisions": precisions, "config": config, "weights": "trained", **fields})


@needs_llama_cpp
def test_on_a_cpu_llama_cpp_runs_every_precision_that_it_has() -> None:
    names = ("fp16", "bf16", "int8", "int4")
    assert kinds(best_ways(CPU, wanted(*names), ranking=None)) == dict.fromkeys(names, ("gguf", "llama_cpp"))


@needs_llama_cpp
def test_one_engine_runs_all_precisions_so_that_their_speeds_compare() -> None:
    found = kinds(best_ways(CPU, wanted("fp16", "fp8", "int8"), ranking=None))
    assert found == {"fp16": ("native", "transformers"), "int8": ("dynamic_int8", "transformers")}


@needs_llama_cpp
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (wanted("fp16", "int8", weights="random"), "random weights"),
        (wanted("fp16", "int8", config={"model_type": "nosuch"}), "never seen to come back"),
        (wanted("fp16", "int8", serving=True), "no continuous batching"),
    ],
)
def test_what_llama_cpp_cannot_do_takes_the_next_pair_and_says_why(asked: Wanted, reason: str) -> None:
    found = best_ways(CPU, asked, ranking=None)
    assert kinds(found)["int8"] == ("dynamic_int8", "transformers")
    assert "gguf q8_0 on llama_cpp passed over" in found["int8"].because
    assert reason in found["int8"].because
    assert "docs/results" not in found["int8"].because


@needs_llama_cpp
def test_what_was_measured_on_this_machine_decides() -> None:
    fast = ranked(**{QUANTO.name: 20.0, "gguf q8_0 on llama_cpp": 10.0})
    way = best_ways(CPU, wanted("int8"), ranking=fast)["int8"]
    assert way.quantizer == QUANTO.quantizer
    assert "the fastest of 2 measured on this machine (20 tok/s with small" in way.because


@needs_llama_cpp
def test_a_runner_up_is_not_called_the_fastest() -> None:
    rates = ranked(**{QUANTO.name: 10.0, "gguf q8_0 on llama_cpp": 20.0})
    way = best_ways(CPU, wanted("int8", weights="random"), ranking=rates)["int8"]
    assert "number 2 of 2 measured on this machine (10 tok/s" in way.because


@needs_llama_cpp
def test_a_pair_that_failed_when_measured_comes_last() -> None:
    failed = ranked(**{"gguf q8_0 on llama_cpp": None})
    way = best_ways(CPU, wanted("int8"), ranking=failed)["int8"]
    assert way.quantizer.kind == "dynamic_int8"


def test_names_tell_pairs_of_one_device_apart() -> None:
    assert Pair(Bitsandbytes(type="nf4", double_quant=True), Transformers()).name == (
        "bitsandbytes nf4 on transformers"
    )
    for by_precision in PAIRS.values():
        for pairs in by_precision.values():
            assert len({pair.name for pair in pairs}) == len(pairs)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_fallback_tokenizer(write_llama(tmp_path / "model"))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: ./model\nprecisions: [fp16, int8]\nworkload: {prompt_tokens: 64}\nspeed: {}\n"
        "gate: [{kind: min_speedup, factor: 1}]\n",
        "utf-8",
    )
    return path


@needs_llama_cpp
def test_the_store_s_ranking_reaches_the_plan_which_says_what_was_chosen(
    recipe: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    store.prepare()
    native = RankedPair(name="native fp16 on transformers", decode_tokens_per_s=20.0)
    ranking = ranked(**{QUANTO.name: 20.0})
    ranking = ranking.model_copy(update={"pairs": {**ranking.pairs, "fp16": (native,)}})
    store.put(ENGINE_RANKING, ranking_key(detect()), ranking)
    plan = plan_recipe(recipe, hardware=None, store=store)
    assert [variant.engine for variant in plan.variants] == ["transformers", "transformers"]
    assert any(
        note.startswith("int8 is quanto int8 on transformers: the fastest of 1") for note in plan.notes
    )
    assert any(
        note.startswith("fp16 is native fp16 on transformers: the fastest of 1") for note in plan.notes
    )


def test_a_plan_for_another_device_has_that_device_s_defaults(recipe: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.prepare()
    plan = plan_recipe(recipe, hardware="h100-sxm", store=store)
    assert [variant.engine for variant in plan.variants] == ["transformers", "transformers"]


@needs_llama_cpp
def test_an_engine_that_the_recipe_names_comes_before_what_is_best(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text("utf-8").replace("speed: {}", "speed: {engine: {kind: transformers}}")
    recipe.write_text(text, "utf-8")
    store = Store(tmp_path / "store")
    store.prepare()
    loaded = load_recipe(recipe)
    expanded = loaded.recipe.expand(device="cpu", best=best_for(loaded, device=detect(), store=store))
    assert [variant.quantizer.kind for variant in expanded.variants] == ["native", "dynamic_int8"]
