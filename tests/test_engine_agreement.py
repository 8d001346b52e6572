"""Two engines on one file: how far apart they are, and what too far means for the gate."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest

from pipeline.comparison import UnmeasuredError, comparable_quality
from pipeline.engine_agreement import (
    GREEDY_PROMPT_TOKENS,
    GREEDY_TOKENS,
    Observed,
    compare,
    observe,
    text_tokens,
)
from pipeline.engines.transformers import Transformers
from pipeline.errors import StageError
from pipeline.quantizers.native import Native
from pipeline.results import MAX_ENGINE_KL_NATS, MAX_ENGINE_KL_P99_NATS, EngineAgreement
from tests.result_builders import quality, task, variant
from tests.tiny_models import write_llama


def observed(*rows: tuple[float, ...], greedy: tuple[int, ...] = (1, 2, 3)) -> Observed:
    return Observed(logits=numpy.array(rows, dtype=numpy.float32), greedy=greedy)


def compared(one: Observed, other: Observed) -> EngineAgreement:
    return compare(one, other, reference_engine="transformers", engine="other")


def test_an_engine_agrees_with_itself_whatever_is_added_to_its_logits() -> None:
    one = observed((0.0, 1.0, 2.0), (5.0, -1.0, 0.5))
    shifted = Observed(logits=one.logits + 7, greedy=one.greedy)
    found = compared(one, shifted)
    assert found.kl_mean_nats == pytest.approx(0, abs=1e-6)
    assert (found.same_top1_share, found.same_greedy_tokens, found.greedy_tokens) == (1.0, 3, 3)
    assert found.holds


def test_divergence_is_that_of_the_other_as_the_reference_sees_it() -> None:
    even, skewed = (0.0, 0.0), (math.log(9.0), 0.0)
    found = compared(observed(even, even), observed(skewed, even))
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert found.kl_mean_nats == pytest.approx(expected / 2, rel=1e-5)
    assert found.kl_p99_nats == pytest.approx(0.99 * expected, rel=1e-5)
    assert not found.holds


def test_greedy_tokens_count_up_to_the_first_that_differs() -> None:
    found = compared(observed((1.0, 0.0), greedy=(1, 2, 3, 4)), observed((1.0, 0.0), greedy=(1, 2, 9, 4)))
    assert found.same_greedy_tokens == 2


def test_rows_that_pad_a_vocabulary_are_left_out() -> None:
    found = compared(observed((1.0, 0.0)), observed((1.0, 0.0, 50.0)))
    assert found.kl_mean_nats == pytest.approx(0, abs=1e-7)


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(StageError, match="transformers or other are not finite"):
        compared(observed((1.0, 0.0)), observed((math.nan, 0.0)))


def test_the_transformers_engine_hands_out_what_the_model_computes(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    out = tmp_path / "fp32"
    out.mkdir()
    quantizer = Native(dtype="fp32")
    quantizer.quantize(folder, out, device="cpu")
    with Transformers().open(out, quantizer=quantizer, device="cpu") as session:
        tokens = text_tokens(out, vocabulary_tokens=session.vocabulary_tokens)
        found = observe(session, tokens=tokens)
        first = session.prefill([list(tokens[:GREEDY_PROMPT_TOKENS])], new_tokens=1)
    assert found.logits.shape[0] == len(tokens)
    assert len(found.greedy) == GREEDY_TOKENS
    assert found.greedy[0] == first[0] == found.logits[GREEDY_PROMPT_TOKENS - 1].argmax()


def test_engines_that_differ_at_few_positions_differ() -> None:
    even, skewed = (0.0, 0.0), (4.0, 0.0)
    found = compared(observed(*[even] * 150), observed(*[skewed] * 5, *[even] * 145))
    assert found.kl_mean_nats < MAX_ENGINE_KL_NATS
    assert found.kl_p99_nats > MAX_ENGINE_KL_P99_NATS
    assert not found.holds


def test_quality_of_a_model_that_is_not_the_one_timed_counts_as_unmeasured() -> None:
    def arm(name: str, kl_nats: float, *, p99_nats: float = 0.0) -> object:
        agreement = EngineAgreement(
            engine="llama_cpp",
            reference_engine="transformers",
            text_tokens=100,
            kl_mean_nats=kl_nats,
            kl_p99_nats=p99_nats,
            same_top1_share=0.5,
            greedy_tokens=32,
            same_greedy_tokens=3,
        )
        return variant(name, quality=quality(task("piqa"), agreement=agreement))

    assert comparable_quality(variant("fp16", quality=quality(task("piqa"))), arm("int8", 0.004))  # type: ignore[arg-type]
    with pytest.raises(UnmeasuredError, match=r"different models: llama_cpp against transformers"):
        comparable_quality(variant("fp16", quality=quality(task("piqa"))), arm("int8", 0.3))  # type: ignore[arg-type]
    with pytest.raises(UnmeasuredError, match=r"0\.05 nats in the mean and 0\.5 at p99 are rounding"):
        comparable_quality(
            variant("fp16", quality=quality(task("piqa"))),
            arm("int8", 0.004, p99_nats=0.6),  # type: ignore[arg-type]
        )
