"""What the page's answers say of two engines and of a budget."""

from __future__ import annotations

from pipeline.report_answers import answers
from pipeline.results import EngineAgreement
from tests import result_builders as build


def told(question: str) -> str:
    agreement = EngineAgreement(
        engine="llama_cpp",
        reference_engine="transformers",
        text_tokens=184,
        kl_mean_nats=0.0027,
        kl_p99_nats=0.01,
        same_top1_share=0.973,
        greedy_tokens=32,
        same_greedy_tokens=17,
    )
    quality = build.quality(build.task("piqa", [1.0, 0.0])).model_copy(update={"agreement": agreement})
    report = build.report(
        build.variant_report(build.variant("fp16")),
        build.variant_report(build.variant("int8", quality=quality)),
    )
    return next(" ".join(one.lines) for one in answers(report) if one.question == question)


def test_what_is_timed_and_scored_by_two_engines_says_how_far_these_are_apart() -> None:
    assert (
        "int8: timed and scored by two engines, llama_cpp against transformers on 184 tokens of the same file: KL "
        "0.0027 nats in the mean and 0.01 at p99" in told("How sure is it?")
    )


def test_sequences_are_held_by_a_budget() -> None:
    assert "a budget of 6,000 MB holds 20 sequences of 1,024 tokens" in told("What limits it?")
