"""The report's page: verdict, triple and plots in one file, nothing fetched, nothing run, every name escaped."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.capacity_results import MemorySplit, PeakPrediction
from pipeline.commands import write_page
from pipeline.gate import judge_all
from pipeline.measured import StageFailure
from pipeline.report import markdown
from pipeline.report_blocks import blocks
from pipeline.report_page import report_page
from pipeline.results import (
    BaselineRun,
    CostResult,
    Finding,
    Reconciliation,
    Report,
    VariantReport,
    VariantResults,
)
from pipeline.rules.base import Rule
from pipeline.rules.max_kl import MaxKl
from pipeline.rules.max_memory import MaxMemory
from pipeline.rules.max_quality_drop import MaxQualityDrop
from pipeline.rules.min_capacity import MinCapacity
from pipeline.rules.min_speedup import MinSpeedup
from tests import result_builders as build
from tests.browser import opened_browser
from tests.test_distribution_rules import held
from tests.test_plan_page import HOSTILE, Page
from tests.test_serving_tables import serving

RULES: tuple[Rule, ...] = (
    MinSpeedup(factor=1.5),
    MaxMemory(fraction=0.6),
    MinCapacity(factor=1.5),
    MaxQualityDrop(points=3),
    MaxKl(mean_nats=0.1),
)


def planned(weights: int) -> tuple[Reconciliation, ...]:
    """The figures that plots show beside measured ones."""
    figures = (("weights resident", "MB", weights / 1e6, weights / 1e6), ("break-even batch", "", 40.0, 6.0))
    return tuple(
        Reconciliation(figure=figure, unit=unit, predicted=predicted, measured=measured, because="")
        for figure, unit, predicted, measured in figures
    )


def capable(sequences: int, *, weights: int) -> dict[str, Any]:
    """A capacity stage with everything that its bars need."""
    split = MemorySplit(
        sequences=sequences,
        weight_bytes=weights,
        kv_cache_bytes=100_000_000 * sequences,
        activation_bytes=20_000_000 * sequences,
        reserve_bytes=None,
        process_bytes=400_000_000,
    )
    peak = PeakPrediction(fixed_bytes=10_000_000, bytes_per_sequence=115_000_000)
    return {"memory": split, "predicted_peak": peak, "weight_bytes_resident": weights}


def arm(
    name: str, *, rates: tuple[float, ...], sequences: int, right: int, kl: float, **fields: Any
) -> VariantResults:
    """A variant with every stage: batches 1, 4 and 8, a task of 400 documents, a held text."""
    rows = [
        build.speed_row(size, rate, bytes_read_per_step=int(build.weight_bytes(name) + 3e7 * size))
        for size, rate in zip((1, 4, 8), rates, strict=False)
    ]
    answers = [1.0] * right + [0.0] * (400 - right)
    weights = build.weight_bytes(name)
    defaults: dict[str, Any] = {
        "speed": build.speed(name, rows=rows, measured_break_even_batch=6.2, free_lunch_batch=4),
        "capacity": build.capacity(sequences, **capable(sequences, weights=weights)),
        "quality": build.quality(
            build.task("piqa", answers), distribution=held([kl, 1.1 * kl, 0.9 * kl, kl], nats=250 + 10 * kl)
        ),
        "planned": planned(weights),
        "serving": serving() if name == "fp16" else None,
    }
    return build.variant(name, **{**defaults, **fields})


def judged(*variants: VariantResults, rules: tuple[Rule, ...] = RULES, **fields: Any) -> Report:
    """The variants under the rules, the first of them the baseline."""
    reports, verdict, because = judge_all(rules, baseline_name=variants[0].name, variants=variants)
    sections: dict[str, Any] = {name: {} for name in ("speed", "capacity", "quality")}
    return build.report(
        *reports,
        verdict=verdict,
        because=because,
        resolved_recipe={"model": {"id": "tiny/model"}, **sections},
        **fields,
    )


@cache
def full_report() -> Report:
    """A report with everything that a page can show: one that ships, one that breaks limits, one that failed."""
    cost = CostResult(
        dollars_per_hour=3.5,
        batch_size=8,
        dollars_per_million_output_tokens=4.86,
        input_batch_size=8,
        dollars_per_million_input_tokens=0.32,
    )
    void = build.speed_row(8, None, outcome="void", because="more than the memory can read")
    slow = build.speed(rows=[build.speed_row(1, 11.0, noisy=True), void])
    return judged(
        arm("fp16", rates=(20.0, 70.0, 110.0), sequences=8, right=300, kl=0.0, cost=cost),
        arm("int8", rates=(38.0, 130.0, 200.0), sequences=20, right=301, kl=0.004, serving=serving()),
        arm("int4", rates=(), sequences=30, right=240, kl=0.4, speed=slow, required=False),
        build.variant(
            "fp8",
            required=False,
            **{"speed": None, "memory": None, "capacity": None},
            failures=(StageFailure(stage="speed", reason="failed", message="the worker died of signal 9"),),
        ),
    )


@cache
def full_page() -> str:
    return report_page(full_report())


# --- a page of its own -----------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_every_plot_has_a_name_and_a_caption() -> None:
    page = Page(full_page())
    names = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert page.counts["h1"] == 1
    assert page.counts["svg"] == page.counts["figure"] == page.counts["figcaption"] == len(names) == 11
    for words in (
        "Decode speed at batch 1",
        "under the roof of 30.0 GB/s",
        "ITL of static",
        "quality drop: at most 3 points",
        "Histogram of tokens",
        "Memory in MB",
    ):
        assert any(words in name for name in names), words


def test_nothing_is_fetched_and_nothing_runs() -> None:
    html = full_page()
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "form"} & page.counts.keys()
    assert "default-src 'none'" in html
    for word in ("http:", "https:", "@import", "javascript:"):
        assert word not in html
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("href", "src"):
            assert value.startswith("#"), value
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))


def test_ids_are_unique_and_every_reference_leads_to_one() -> None:
    html = full_page()
    ids = Counter(value for _, name, value in Page(html).attributes if name == "id")
    assert [one for one, times in ids.items() if times > 1] == []
    targets = {*re.findall(r"url\(#([^)]*)\)", html), *re.findall(r'href="#([^"]*)"', html)}
    assert targets
    assert targets <= ids.keys()


def test_the_same_report_gives_the_same_page() -> None:
    assert report_page(build.report()) == report_page(build.report())


# --- what it says ----------------------------------------------------------------------------------------


def test_the_verdict_comes_first_and_the_questions_of_a_reader_are_answered() -> None:
    text = Page(full_page()).text
    start = text[text.index("✓ ship") :]
    assert start.startswith("✓ ship tiny/model")
    for question, answer in (
        ("What ships?", "int8 ships. int4 doesn't ship (optional: told, not counted). fp8 can't be judged"),
        ("Why?", "int8 ships: it keeps every limit (5 of 5)."),
        (
            "",
            "Beside fp16, int8 decodes 1.90 × as fast at batch 1 and takes 0.50 × the memory for its weights.",
        ),
        ("What does it cost?", "fp16: $4.86 a million output tokens at batch 8"),
        ("What limits it?", "fp16: batch 1 decodes 20.0 tok/s, 60 % of the 33 that reading its bytes"),
        ("How sure is it?", "int8: the limit that decides most is that on "),
        ("", "int8: its scores are of 400 documents a task; the differences are of the same ones."),
    ):
        place = start.index(question)
        assert answer in start[place:], answer
    assert start.index("What ships?") < start.index("Every variant beside the baseline")


def test_the_answers_say_what_a_figure_is_and_leave_the_side_to_the_limit() -> None:
    text = Page(full_page()).text
    assert "broken : piqa quality drop 15 points, at most 3 points" in text
    assert "kept : mean KL 0.004 nats, at most 0.1 nats" in text
    assert "In quality, int8: mean KL 0.004 nats (at most 0.1 nats)." in text


def test_quality_that_no_limit_is_about_and_quality_that_was_not_measured_are_told_apart() -> None:
    arms = (
        arm("fp16", rates=(20.0,), sequences=8, right=300, kl=0.0),
        arm("int8", rates=(38.0,), sequences=20, right=301, kl=0.004),
    )
    bare = tuple(build.variant(name) for name in ("fp16", "int8"))
    for variants, said in (
        (arms, "In quality, int8: measured, but no limit of the gate is about it."),
        (bare, "In quality, int8: not measured."),
    ):
        assert said in Page(report_page(judged(*variants, rules=(MaxMemory(fraction=0.6),)))).text


def test_nothing_lost_is_said_in_words() -> None:
    arms = (
        arm("fp16", rates=(20.0,), sequences=8, right=300, kl=0.0),
        arm("int8", rates=(38.0,), sequences=20, right=301, kl=0.004),
    )
    text = Page(report_page(judged(*arms, rules=(MaxQualityDrop(points=3),)))).text
    assert "In quality, int8: nothing that a limit is about got worse." in text


def test_of_many_findings_the_sentence_names_three_and_the_card_all() -> None:
    """Eight tasks that lose forty answers of four hundred, against a limit of three points."""

    def eight(right: int) -> Any:
        return build.quality(
            *(build.task(f"task_{place}", [1.0] * right + [0.0] * (400 - right)) for place in range(8))
        )

    report = judged(
        build.variant("fp16", quality=eight(300)),
        build.variant("int8", quality=eight(260)),
        rules=(MaxQualityDrop(points=3),),
    )
    text = Page(report_page(report)).text
    sentence = text[text.index("int8 doesn't ship: ") :].split(". ")[0]
    assert sentence.count("quality drop") == 3
    assert "and 5 more" in sentence
    assert len(re.findall(r"broken : task_\d quality drop 10 points", text)) == 8


def test_what_stopped_a_variant_is_in_its_sentence_and_stands_first_in_its_card() -> None:
    failure = StageFailure(stage="quantize", reason="failed", message="no source to quantize")
    nothing: dict[str, Any] = {"checkpoint": None, "speed": None, "memory": None, "capacity": None}
    report = judged(build.variant("fp16"), build.variant("int8", failures=(failure,), **nothing))
    text = Page(report_page(report)).text
    assert "int8 can't be judged: 0 of 5 limits kept; quantize failed; missing: " in text
    assert text.index("Checkpoint quantize failed: no source to quantize") < text.index("Speed and cost")


def test_a_machine_that_changed_within_the_run_is_told_before_the_figures() -> None:
    arms = [build.variant(name) for name in ("fp16", "int8")]
    for drift, told in ((-13.9, True), (4.9, False)):
        drifted = build.speed("fp16", drift_percent=drift)
        text = Page(report_page(judged(build.variant("fp16", speed=drifted), arms[1]))).text
        said = "The machine: fp16, timed again at the end, took 13.9 % less time a token"
        assert (said in text) is told


def test_only_the_baseline_was_timed_again_though_each_variant_timed_alone_holds_its_drift() -> None:
    arms = [
        build.variant(name, speed=build.speed(name, timed_in_turn=False, drift_percent=13.9))
        for name in ("fp16", "int8")
    ]
    text = Page(report_page(judged(*arms))).text
    assert text.count("timed again at the end, took") == 1
    assert (
        "fp16, timed again at the end, took 13.9 % more time a token; differences of speed of that size"
        in text
    )


def test_noisy_rates_are_marked_wherever_they_stand() -> None:
    noisy = build.speed("int8", rows=[build.speed_row(1, 38.0, noisy=True)])
    text = Page(report_page(judged(build.variant("fp16"), build.variant("int8", speed=noisy)))).text
    assert "decode, batch 1 tok/s 38.0~ 20.0" in text
    assert "as fast at batch 1 (noisy)" in text
    assert "~: noisy" in text


def test_short_heads_and_marks_of_the_table_are_explained_where_they_are_used() -> None:
    text = Page(full_page()).text
    assert "bits/w: bits stored for a weight, scales, embedding and head among them" in text
    assert "–: not measured" in text
    assert "+: the search's ceiling" not in text, "nothing ended there"


def test_a_folder_gives_its_name_to_the_page_and_the_facts_say_where_it_lies() -> None:
    report = build.report(
        resolved_recipe={"model": {"id": "../models/smol"}},
        provenance={"device": {"name": "EPYC"}, "packages": {"torch": "2.13.0", "vllm": None}},
    )
    text = Page(report_page(report)).text
    assert "✓ ship smol Speed, memory" in text
    assert "Measured on EPYC on 2026-01-02" in text
    assert "model ../models/smol" in text
    assert "vllm" not in text[text.index("Where these figures come from") :].split("Code, packages")[0]


def test_beside_an_earlier_run_the_baseline_has_a_card_and_a_verdict_too() -> None:
    earlier = BaselineRun(name="main", started_at="2026-01-01T00:00:00+00:00", recipe_digest="e" * 64)
    finding = Finding(
        rule="min_speedup", outcome="fail", observed=0.5, limit=0.95, unit="x", because="slower"
    )
    report = build.report(
        build.variant_report(build.variant("fp16"), verdict="no-ship", findings=(finding,)),
        build.variant_report(build.variant("int8")),
        verdict="no-ship",
        baseline_run=earlier,
    )
    text = Page(report_page(report)).text
    assert "What ships? int8 ships. fp16 doesn't ship." in text
    assert "fp16 doesn't ship: 0 of 1 limits kept; broken: speedup 0.5 × (at least 0.95 ×)." in text
    assert "Judged beside the run main of 2026-01-01T00:00:00+00:00" in text


def test_every_finding_stands_there_with_its_sentence_its_limit_and_its_outcome() -> None:
    text = Page(full_page()).text
    for variant in full_report().variants:
        for finding in variant.findings:
            assert " ".join(finding.because.split()) in text, finding
    words = Counter(re.findall(r"\b(kept|broken|undecided|missing)\b : ", text))
    outcomes = Counter(finding.outcome for variant in full_report().variants for finding in variant.findings)
    assert words["kept"] == outcomes["pass"] > 0
    assert words["broken"] == outcomes["fail"] > 0
    assert words["missing"] == outcomes["missing"] > 0


def test_the_triple_stands_beside_the_baseline() -> None:
    text = Page(full_page()).text
    for row in (
        "decode, batch 1 tok/s 38.0 20.0 1.90 ×",
        "weights in memory MB 500.0 1,000.0 0.50 ×",
        "sequences at once 20 8 2.50 ×",
        "piqa acc 0.752 0.750 +0.002",
    ):
        assert row in text, row


def test_every_figure_of_the_markdown_report_is_on_the_page() -> None:
    """The page shows the same tables; a figure is what a cell holds."""
    shown = set(Page(full_page()).texts)
    for block in blocks(markdown(full_report())):
        for row in block.table.rows if block.table else ():
            for column, cell in row:
                known = cell in shown or " ".join(cell.split()) in shown
                assert known or column.label in ("observed", "limit", "rule", "outcome", "unit"), (
                    column.label,
                    cell,
                )


def test_what_is_missing_says_why_and_is_never_shown_as_nought() -> None:
    text = Page(full_page()).text
    assert "speed failed: the worker died of signal 9" in text
    assert "batch 8, void: more than the memory can read" in text
    card = text[text.index("fp8 optional") :]
    assert "weights in memory MB missing 1,000.0 –" in card
    assert "decode, batch 1 tok/s missing 20.0 –" in card


def test_a_section_that_the_recipe_lacks_is_told_and_has_no_plot() -> None:
    bare = build.report(
        build.variant_report(build.variant("fp16", capacity=None)),
        build.variant_report(build.variant("int8", capacity=None)),
        resolved_recipe={"model": {"id": "tiny/model"}, "speed": {}},
    )
    page = Page(report_page(bare))
    assert "quality: the recipe has no quality section" in page.text
    assert "capacity: the recipe has no capacity section" in page.text
    assert "Quality against its limits" not in page.text
    assert "KL divergence" not in page.text


def test_a_run_without_any_result_has_a_page_that_says_so() -> None:
    failure = StageFailure(stage="quantize", reason="failed", message="no source to quantize")
    nothing: dict[str, Any] = {
        "checkpoint": None,
        "speed": None,
        "memory": None,
        "capacity": None,
        "failures": (failure,),
    }
    report = judged(build.variant("fp16", **nothing), build.variant("int8", **nothing))
    page = Page(report_page(report))
    assert page.counts["svg"] == 0
    assert "int8 can't be judged" in page.text
    assert "quantize failed: no source to quantize" in page.text
    assert "None" not in page.text
    assert "nan" not in page.text.lower().split()


def test_an_interrupted_run_says_so_first() -> None:
    report = judged(build.variant("fp16"), build.variant("int8")).model_copy(update={"interrupted": True})
    text = Page(report_page(report)).text
    assert "What ships? The run was interrupted before it was complete." in text


def test_a_plot_that_cannot_be_drawn_costs_nothing_else() -> None:
    """A divergence beyond any number that an axis can show."""
    report = full_report()
    int8 = report.variants[1]
    assert int8.quality is not None
    held_text = int8.quality.distribution
    assert held_text is not None
    window = held_text.windows[0].model_copy(update={"kl_nats": (math.inf,)})
    quality = int8.quality.model_copy(
        update={"distribution": held_text.model_copy(update={"windows": (window,)})}
    )
    broken = (report.variants[0], int8.model_copy(update={"quality": quality}), *report.variants[2:])
    page = Page(report_page(report.model_copy(update={"variants": broken})))
    assert "This plot could not be drawn: OverflowError" in page.text
    assert "int8 ships: it keeps every limit" in page.text
    assert page.counts["svg"] == 10


def test_a_page_that_cannot_be_written_is_told_and_raises_nothing(tmp_path: Path) -> None:
    assert write_page(build.report(), folder=tmp_path) == f"page: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
    told = write_page(build.report(), folder=tmp_path / "report.html")
    assert told.startswith("no report.html: ")


# --- names -----------------------------------------------------------------------------------------------


def hostile_variant(name: str) -> VariantReport:
    """A variant in which every text is that name."""
    finding = Finding(
        rule="max_quality_drop",
        subject=name,
        outcome="fail",
        observed=4.0,
        limit=3.0,
        unit="points",
        because=name,
    )
    failure = StageFailure(stage="speed", reason="failed", message=name)
    results = build.variant(name, "int8", failures=(failure,), validity=(name,))
    return build.variant_report(results, findings=(finding,))


def test_every_text_of_a_report_is_escaped() -> None:
    report = build.report(
        build.variant_report(build.variant("fp16")),
        *(hostile_variant(name) for name in HOSTILE),
        recipe=" ".join(HOSTILE),
        because=HOSTILE,
        resolved_recipe={"model": {"id": " ".join(HOSTILE)}},
        provenance={"git": {"commit": HOSTILE[0]}, "packages": dict(zip(HOSTILE, HOSTILE, strict=True))},
    )
    page = Page(report_page(report))
    assert not {"script", "img"} & page.counts.keys()
    assert not any(attribute == "onerror" for _, attribute, _ in page.attributes)
    for name in HOSTILE:
        assert page.text.count(name) >= 12, "it is there as it was written"


# --- in a browser ----------------------------------------------------------------------------------------


def test_a_browser_shows_it_offline_without_complaints_and_nothing_sticks_out(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(full_page(), encoding="utf-8")
    with opened_browser() as browser:
        for width in (1280, 360):
            page = browser.open(file.as_uri(), width=width, dark=width == 360)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.complaints == []
            assert page.requested == [file.as_uri()]
            assert page.evaluate("document.querySelectorAll('svg').length") == 11
            page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.pdf().startswith(b"%PDF-")
