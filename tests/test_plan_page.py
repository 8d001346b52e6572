"""The plan's page: one file with every variant's figures, nothing fetched, nothing run, every name escaped."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser

import pytest

from pipeline.fleet import FleetSize, Targets
from pipeline.plan_page import headline, plan_page
from pipeline.plan_values import Advice, FleetPlan, Plan, TrafficPlan, VariantPlan, WhatIf
from pipeline.reconciliation import reconcile
from pipeline.scheduler import Serving
from pipeline.simulation import Percentiles
from tests.plan_builders import hardware, plan, unknown_device_plan, variant
from tests.result_builders import speed, speed_row
from tests.result_builders import variant as measured_variant

VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = (
    "<script>alert(1)</script>",
    r"$\mathdefault{x}$",
    "a_^b {",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
)


class Page(HTMLParser):
    """Elements, attributes and texts of a page; fails on an element closed out of turn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(text for text in self.texts if text)


def waits(median: float) -> Percentiles:
    return Percentiles(count=3000, mean=median, p50=median, p90=2 * median, p95=2.5 * median, p99=3 * median)


TRAFFIC = TrafficPlan(
    requests_per_s=4.0,
    trace=None,
    trace_requests=None,
    mean_sequence_tokens=900.0,
    targets=Targets(ttft_s=1.0, percentile=95),
)


def fleet(devices: int | None) -> FleetPlan:
    if devices is None:
        size = FleetSize(
            devices=None, reason="the TTFT target of 0.1 s is below the 0.4 s that requests take"
        )
        return FleetPlan(
            size=size, serving=None, dollars_per_month=None, step_times="roofline", median_error=None
        )
    size = FleetSize(
        devices=devices,
        load=0.72,
        mean_batch=14.2,
        output_tokens_per_s=1830.0,
        ttft_s=waits(0.4),
        tpot_s=waits(0.02),
        latency_s=waits(5.1),
        target_ttft_s=1.0,
        target_tpot_s=0.05,
    )
    serving = Serving(max_batch_tokens=2048, max_sequences=256, block_tokens=16, cache_blocks=10_000)
    return FleetPlan(
        size=size, serving=serving, dollars_per_month=2920.0, step_times="measured", median_error=0.04
    )


def full_plan() -> Plan:
    """A plan with everything that a page can show."""
    bf16 = variant("bf16", fleet=fleet(2))
    int4 = variant("int4", precision="int4", fleet=fleet(None))
    results = measured_variant("fp16", speed=speed(rows=(speed_row(1), speed_row(8, decode=100.0))))
    return plan(
        bf16.model_copy(update={"measured": reconcile(bf16, results)}),
        int4,
        variant("huge", copies=6),
        advice=(
            Advice(step="batching", gain=31.25, text="bf16: 126 requests at once share each weight read"),
        ),
        what_ifs=(WhatIf(change="+50 % bandwidth", decode_gain=1.5, prefill_gain=1.0, answer_gain=1.4),),
        notes=("all documents are used",),
        traffic=TRAFFIC,
        latency_limit_s=0.02,
        measured_run="runs/one",
    )


@cache
def full_page() -> str:
    return plan_page(full_plan())


@cache
def default_page() -> str:
    return plan_page(plan())


# --- a page of its own -----------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_holds_its_plots() -> None:
    page = Page(full_page())
    assert page.counts["svg"] == page.counts["figure"] == page.counts["figcaption"] == 4
    assert page.counts["h1"] == 1


def test_nothing_is_fetched_and_nothing_runs() -> None:
    html = full_page()
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & page.counts.keys()
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("href", "src"):
            assert value.startswith("#"), value
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))


def test_the_same_plan_gives_the_same_page() -> None:
    assert plan_page(full_plan()) == full_page()


def test_ids_are_unique() -> None:
    ids = Counter(value for _, name, value in Page(full_page()).attributes if name == "id")
    assert [one for one, times in ids.items() if times > 1] == []


def test_every_plot_has_a_name_and_a_caption_that_says_what_to_read_off_it() -> None:
    page = Page(full_page())
    names = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(names) == 4
    assert all("card-80" in name for name in names)
    for words in (
        "On the slope it is limited by memory",
        "Hollow points don't fit",
        "Crosses are what was measured",
    ):
        assert words in page.text


# --- the figures -----------------------------------------------------------------------------------------


def test_every_variant_and_its_figures_are_in_the_table() -> None:
    text = Page(default_page()).text
    for one in plan().variants:
        assert one.name in text
        for shown in (
            f"{one.decode_ceiling_tokens_per_s:,.1f}",
            f"{one.dollars_per_million_output_tokens:,.3f}",
            f"{one.max_batch} × KV",
            f"{one.weight_bytes_resident / 1e9:,.2f}",
        ):
            assert shown in text, (one.name, shown)


def test_the_headline_says_what_fits_what_is_fastest_and_what_is_cheapest() -> None:
    assert headline(full_plan()) == (
        "bf16 and int4 fit on card-80 with one sequence of 4,096 tokens; huge doesn't fit.",
        "One request alone: int4 decodes at most 392.0 tokens/s, bf16 99.5.",
        "Cheapest at the limit: int4 at batch 163 within 20 ms a token, $0.037 per million output tokens, "
        "15,029 tokens/s in all.",
    )


def test_many_variants_are_counted_in_the_headline_not_named() -> None:
    whole = plan(*(variant(f"v{index}") for index in range(12)))
    assert headline(whole)[0] == "12 of 12 variants fit on card-80 with one sequence of 4,096 tokens."


def test_nothing_that_fits_leaves_only_that_to_say() -> None:
    huge: VariantPlan = variant("huge", copies=6)
    assert headline(plan(huge)) == ("huge doesn't fit on card-80 with one sequence of 4,096 tokens.",)
    text = Page(plan_page(plan(huge))).text
    assert "Counting devices by memory alone, huge takes 2." in text
    assert "nothing fits that could have a price" in text


def test_a_fleet_shows_its_devices_waits_and_price_or_why_there_is_none() -> None:
    text = Page(full_page()).text
    assert "4 requests/s with TTFT ≤ 1000 ms for 95 % of them" in text
    assert "TTFT p50 / p95 / p99" in text
    assert "400.0 / 1,000.0 / 1,200.0" in text
    assert "20.0 / 50.0 / 60.0" in text
    assert "2,920" in text
    assert "measured, fitted within 4 %" in text
    assert "none" in text
    assert "the TTFT target of 0.1 s is below" in text


def test_measured_figures_stand_beside_planned_ones_and_in_the_roofline() -> None:
    html = full_page()
    text = Page(html).text
    assert "Planned and measured by runs/one" in text
    assert "decode at batch 8, at most" in text
    assert "measured-0-8" in html


def test_advice_what_ifs_and_notes_are_shown() -> None:
    text = Page(full_page()).text
    for shown in ("batching, 31.25 ×", "126 requests at once", "+50 % bandwidth", "all documents are used"):
        assert shown in text


def test_sections_without_content_are_left_out() -> None:
    text = Page(default_page()).text
    for title in ("Fleet for the traffic", "What pays", "Planned and measured", "Notes"):
        assert title not in text


def test_assumptions_and_sources_are_told() -> None:
    text = Page(default_page()).text
    for shown in ("the mean depth of 1,074 tokens", "0.9 of the device's memory", "card-80: a data sheet"):
        assert shown in text
    assert "price, $2.00 an hour: a price list" in text


def test_of_an_unknown_device_there_is_memory_and_the_reason_for_the_rest() -> None:
    page = Page(plan_page(unknown_device_plan()))
    assert page.counts["svg"] == 1
    assert "The memory bandwidth of card-80 isn't known" in page.text
    assert "Whether a variant fits can't be told" in page.text
    assert "None" not in page.text


# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_every_text_of_a_plan_is_escaped(name: str) -> None:
    one = variant(
        name,
        quantizer=name,
        fleet=fleet(None).model_copy(update={"size": FleetSize(devices=None, reason=name)}),
    )
    html = plan_page(
        plan(
            one,
            hardware=hardware(name=name, source=name, price_source=name),
            model=name,
            recipe=name,
            notes=(name,),
            traffic=TRAFFIC.model_copy(update={"requests_per_s": None, "trace": name, "trace_requests": 7}),
            advice=(Advice(step="batching", gain=2.0, text=name),),
            what_ifs=(WhatIf(change=name, decode_gain=1.0, prefill_gain=1.0, answer_gain=1.0),),
            measured_run=name,
        )
    )
    page = Page(html)
    assert not {"script", "img"} & page.counts.keys()
    assert not any(attribute == "onerror" for _, attribute, _ in page.attributes)
    assert page.text.count(name) >= 12, "it is there as it was written"
