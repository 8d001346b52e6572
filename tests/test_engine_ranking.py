"""Which pair decodes fastest here, measured on a small model and kept for the short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.best_paths import ENGINE_RANKING, PAIRS, EngineRanking, Pair, ranking_key
from pipeline.engine_ranking import measure_ranking, usable_pairs
from pipeline.engines.llama_cpp import LlamaCpp
from pipeline.engines.transformers import Transformers
from pipeline.errors import PrerequisiteError, StageError
from pipeline.hardware import detect
from pipeline.progress import silent
from pipeline.quantizers.gguf import Gguf
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.store import Store
from tests.tiny_models import write_fallback_tokenizer, write_llama

CPU = detect().model_copy(update={"kind": "cpu"})
PLAIN = Pair(Native(dtype="fp16"), Transformers(compute_dtype="float32"))
INT8 = Pair(Quanto(weights="int8"), Transformers(compute_dtype="float32"))
GGUF = Pair(Gguf(type="q8_0"), LlamaCpp())
needs_llama_cpp = pytest.mark.skipif(bool(LlamaCpp().check(device="cpu")), reason="needs xllamacpp")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.prepare()
    return store


@needs_llama_cpp
def test_pairs_are_timed_in_alternation_and_the_ranking_is_kept_for_this_machine(
    tmp_path: Path, store: Store
) -> None:
    model = write_llama(tmp_path / "small")  # without a tokenizer, so that GGUF can't store it
    said: list[str] = []
    pairs = {"fp16": (PLAIN,), "int8": (GGUF, INT8)}
    ranking = measure_ranking(model, pairs=pairs, device=CPU, store=store, progress=said.append)
    rates = {one.name: one.decode_tokens_per_s for ranked in ranking.pairs.values() for one in ranked}
    assert list(rates) == [PLAIN.name, INT8.name, GGUF.name], "what failed comes last"
    assert all(rate is not None and rate > 0 for rate in (rates[PLAIN.name], rates[INT8.name]))
    assert rates[GGUF.name] is None
    assert any(line.startswith(f"{GGUF.name}: not ranked: ") for line in said)
    assert store.get(ENGINE_RANKING, ranking_key(CPU), EngineRanking) == ranking
    assert not list((store.root / "checkpoints").iterdir())


@needs_llama_cpp
def test_where_no_pair_can_store_the_model_nothing_is_ranked(tmp_path: Path, store: Store) -> None:
    model = write_llama(tmp_path / "small")
    with pytest.raises(
        StageError, match=r"no pair of quantizer and engine could store it; see .*doctor\.log"
    ):
        measure_ranking(model, pairs={"int8": (GGUF,)}, device=CPU, store=store, progress=silent)
    assert store.get(ENGINE_RANKING, ranking_key(CPU), EngineRanking) is None


def test_the_pairs_are_those_of_the_device_that_can_store_the_model(tmp_path: Path) -> None:
    model = write_fallback_tokenizer(write_llama(tmp_path / "small"))
    found = usable_pairs(model, device=CPU)
    assert set(found) == set(PAIRS["cpu"])
    assert all(set(pairs) <= set(PAIRS["cpu"][precision]) for precision, pairs in found.items())
    assert Pair(Native(dtype="fp16"), Transformers()) in found["fp16"]


def test_a_device_without_pairs_and_a_folder_without_a_model_are_refused(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "small")
    with pytest.raises(PrerequisiteError, match="no pairs of quantizer and engine are known for mps"):
        usable_pairs(model, device=CPU.model_copy(update={"kind": "mps"}))
    with pytest.raises(PrerequisiteError, match="nothing: no such folder"):
        usable_pairs(tmp_path / "nothing", device=CPU)
