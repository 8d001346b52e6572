"""Plots: points lie on the roof, what doesn't fit is hollow or sticks out, and names are only ever names."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from functools import cache

import pytest

from pipeline.batch_plots import cost_plot, shows_cost, tpot_plot
from pipeline.inline_svg import inline_svg
from pipeline.memory_plot import memory_bars, memory_segments
from pipeline.plan_values import Plan
from pipeline.plot_marks import COLOURS, INKS, MARKERS, colour_of, marker_of, short
from pipeline.results import Reconciliation
from pipeline.roofline_plot import compute_peaks, roof_points, roofline_plot
from tests.plan_builders import (
    BANDWIDTH,
    BUDGET,
    DEPTH,
    PARAMETERS,
    PEAK,
    hardware,
    plan,
    unknown_device_plan,
    variant,
)

HOSTILE = (
    "<script>alert(1)</script>",
    r"$\mathdefault{x}$",
    "a_^b {",
    '" onload="x',
    "\x00\n\x1b",
    "量子化 🙂",
)


def parsed(svg: str | None) -> ElementTree.Element:
    assert svg is not None
    return ElementTree.fromstring(svg)


def part(root: ElementTree.Element, name: str) -> ElementTree.Element:
    found = root.find(f".//g[@id='{name}']")
    assert found is not None, name
    return found


def style_of(root: ElementTree.Element, name: str) -> str:
    """Style of a point's drawn marker."""
    return next(use.get("style", "") for use in part(root, name).iter("use"))


def place(root: ElementTree.Element, name: str) -> tuple[float, float]:
    use = next(part(root, name).iter("use"))
    return float(use.get("x", "")), float(use.get("y", ""))


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter("text")]


def hovers(root: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in root.findall(".//g/title")]


def all_plots(one: Plan) -> list[str]:
    found = [roofline_plot(one), memory_bars(one), cost_plot(one), tpot_plot(one)]
    return [svg for svg in found if svg is not None]


@cache
def default_plots() -> list[str]:
    return all_plots(plan())


def without_price() -> Plan:
    priceless = tuple(
        one.model_copy(
            update={
                "batches": tuple(
                    batch.model_copy(update={"dollars_per_million_output_tokens": None})
                    for batch in one.batches
                )
            }
        )
        for one in plan().variants
    )
    return plan(*priceless, hardware=hardware(dollars_per_hour=None, price_source=""))


# --- points under the roof -------------------------------------------------------------------------------


def test_every_step_lies_on_the_roof_with_its_flops_per_second() -> None:
    whole = plan()
    steps = {(one.variant, one.batch_size): one for one in roof_points(whole)}
    for index, planned in enumerate(whole.variants):
        for batch in planned.batches:
            point = steps[index, batch.batch_size]
            assert point.flops_per_s == pytest.approx(2.0 * PARAMETERS * batch.tokens_per_s)
            assert point.flops_per_s <= PEAK
            assert point.flops_per_s <= point.intensity_flops_per_byte * BANDWIDTH * (1 + 1e-12)


def test_prefill_is_a_point_on_the_flat_roof_at_its_own_intensity() -> None:
    points = [one for one in roof_points(plan()) if one.batch_size is None]
    for point, per_weight in zip(points, (2.0, 1.0, 0.5), strict=True):
        assert point.flops_per_s == PEAK
        assert point.intensity_flops_per_byte == pytest.approx(2 * DEPTH / per_weight, rel=1e-6)


def test_a_prefill_that_reading_limits_lies_on_the_slope() -> None:
    short_prompt = variant("bf16", prefill_intensity_flops_per_byte=50.0)
    points = [one for one in roof_points(plan(short_prompt)) if one.batch_size is None]
    assert [one.flops_per_s for one in points] == [50.0 * BANDWIDTH]


def test_a_roof_names_every_type_that_has_it() -> None:
    whole = plan(variant("fp16"), variant("bf16", arithmetic_type="bf16"))
    (peak,) = compute_peaks(whole)
    assert (peak.types, peak.flops_per_s, peak.ops_per_byte) == (("fp16", "bf16"), PEAK, 200.0)


def test_types_with_peaks_of_their_own_have_roofs_of_their_own() -> None:
    whole = plan(variant("bf16"), variant("int8", arithmetic_type="int8", arithmetic_flops_per_s=2 * PEAK))
    assert [peak.flops_per_s for peak in compute_peaks(whole)] == [PEAK, 2 * PEAK]
    prefills = [one.flops_per_s for one in roof_points(whole) if one.batch_size is None]
    assert prefills == [PEAK, 2 * PEAK]
    found = " ".join(texts(parsed(roofline_plot(whole))))
    assert "arithmetic (fp16): 400 TFLOP/s" in found
    assert "arithmetic (int8): 800 TFLOP/s" in found


def test_a_device_without_peaks_has_a_slope_and_no_roof() -> None:
    slow = variant("bf16", arithmetic_type=None, arithmetic_flops_per_s=None)
    whole = plan(slow, hardware=hardware(peak_flops_per_s={}, ops_per_byte={}))
    assert compute_peaks(whole) == ()
    root = parsed(roofline_plot(whole))
    assert root.find(".//g[@id='roofline-ridge']") is None
    assert any("memory: 2,000 GB/s" in text for text in texts(root))


def test_ridge_and_slope_are_labelled() -> None:
    found = texts(parsed(roofline_plot(plan())))
    assert "ridge: 200 FLOP/byte" in found
    assert "memory: 2,000 GB/s" in found
    assert "arithmetic (fp16): 400 TFLOP/s" in found


def test_points_that_do_not_fit_are_hollow_and_say_so() -> None:
    root = parsed(roofline_plot(plan(variant("bf16"), variant("huge", copies=6))))
    assert "fill: #ffffff" in style_of(root, "roofline-decode-1-8")
    assert f"fill: {colour_of(0).lower()}" in style_of(root, "roofline-decode-0-8")
    assert "doesn't fit" in texts(root)
    assert any(text.startswith("huge, batch 8") and "does not fit" in text for text in hovers(root))


def test_a_measured_step_lies_below_the_roof_by_its_ratio() -> None:
    bf16 = variant("bf16")
    figure = Reconciliation(
        figure="decode at batch 8, at most",
        unit="tok/s",
        batch_size=8,
        predicted=bf16.batches[1].tokens_per_s,
        measured=bf16.batches[1].tokens_per_s / 2,
        because="50 % of the roof by bandwidth",
    )
    root = parsed(roofline_plot(plan(bf16.model_copy(update={"measured": (figure,)}))))
    roof, measured = place(root, "roofline-decode-0-8"), place(root, "roofline-measured-0-8")
    assert measured[0] == pytest.approx(roof[0])
    assert measured[1] > roof[1], "SVG counts downwards"
    assert "measured" in texts(root)
    assert "measured" not in texts(parsed(roofline_plot(plan())))


def test_labels_of_batches_never_lie_on_each_other() -> None:
    root = parsed(roofline_plot(plan(*(variant(f"v{index}", copies=1 + index / 40) for index in range(4)))))
    boxes = []
    for group in root.iter("g"):
        label = group.find("text")
        if label is not None and "8px" in label.get("style", ""):
            width = 4.8 * len(label.text or "")
            right = "end" in label.get("style", "")
            x, y = float(label.get("x", "")), float(label.get("y", ""))
            boxes.append((x - width * right, y - 7, x + width * (not right), y))
    assert len(boxes) > 8
    for index, one in enumerate(boxes):
        for other in boxes[:index]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one, other)


# --- memory ----------------------------------------------------------------------------------------------


def test_the_bar_of_a_variant_is_all_that_it_keeps_in_memory() -> None:
    for one in plan().variants:
        assert one.max_batch is not None
        assert one.kv_bytes_at_context is not None
        total = sum(segment.size_bytes for segment in memory_segments(one))
        assert total == one.weight_bytes_resident + one.max_batch * one.kv_bytes_at_context <= BUDGET


def test_what_a_loaded_model_takes_beyond_its_file_is_a_part_of_the_bar() -> None:
    one = variant("int4", precision="int4", weight_bytes_resident=7_000_000_000)
    weights = [segment.size_bytes for segment in memory_segments(one) if segment.label != "KV cache"]
    assert sum(weights) == 7_000_000_000


def test_what_a_loaded_model_takes_less_than_its_file_is_not_in_the_bar() -> None:
    one = variant("int4", precision="int4", weight_bytes_resident=4_500_000_000)
    weights = [segment.size_bytes for segment in memory_segments(one) if segment.label != "KV cache"]
    assert sum(weights) == 4_500_000_000


def test_a_budget_far_below_the_device_keeps_its_bars_readable() -> None:
    found = texts(parsed(memory_bars(plan(hardware=hardware(memory_bytes=2_000_000_000_000)))))
    assert "budget 72.0 GB (dashed), device 2,000.0 GB beyond this axis" in found
    assert "20.0" in found, "the weights' part is wide enough for its figure"


def test_a_variant_that_does_not_fit_sticks_out_with_one_sequence() -> None:
    huge = variant("huge", copies=6)
    root = parsed(memory_bars(plan(variant("bf16"), huge)))
    assert "48.4 GB too many" in texts(root)
    assert "126 × KV, 0.4 GB left" in texts(root)
    assert sum(segment.size_bytes for segment in memory_segments(huge)) > BUDGET


def test_budget_and_device_are_named_even_beside_a_bar_many_times_as_long() -> None:
    assert {"budget 72.0 GB", "device 80.0 GB"} <= set(texts(parsed(memory_bars(plan()))))
    assert "budget 72.0 GB, device 80.0 GB" in texts(parsed(memory_bars(plan(variant("huge", copies=60)))))


# --- curves ----------------------------------------------------------------------------------------------


def test_cost_is_drawn_where_a_price_is_known_and_the_rate_where_none_is() -> None:
    assert shows_cost(plan())
    assert "$ per 1M tokens" in parsed(cost_plot(plan())).attrib["aria-label"]
    assert not shows_cost(without_price())
    assert "tokens/s" in parsed(cost_plot(without_price())).attrib["aria-label"]


def test_the_best_batch_has_a_ring_and_its_figure() -> None:
    root = parsed(cost_plot(plan()))
    assert place(root, "cost-best-0") == pytest.approx(place(root, "cost-cost-0-126"))
    assert "$0.073 at 126" in texts(root)


def test_batches_over_the_latency_limit_are_hollow() -> None:
    limited = plan(variant("bf16", best_batch=8), latency_limit_s=0.011)
    root = parsed(tpot_plot(limited))
    assert "limit 11 ms" in texts(root)
    assert "fill: #ffffff" in style_of(root, "tpot-tpot-0-32")
    assert "fill: #ffffff" not in style_of(root, "tpot-tpot-0-8")


# --- all of them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_text_and_nothing_else(name: str) -> None:
    whole = plan(variant(name), variant("int4", precision="int4"), hardware=hardware(name=name))
    for svg in all_plots(whole):
        root = parsed(svg)
        assert short(name) in texts(root)
        assert not list(root.iter("script"))
        assert {attribute for element in root.iter() for attribute in element.attrib}.isdisjoint(
            {"onload", "onerror"}
        )


def test_a_plot_fetches_nothing_and_tells_nothing_of_when_and_where_it_was_drawn() -> None:
    for svg in default_plots():
        assert "http" not in svg
        assert "metadata" not in svg
        assert "Created with" not in svg


def test_the_same_plan_is_drawn_the_same_twice() -> None:
    assert all_plots(plan()) == default_plots()


def test_ids_are_unique_across_plots_and_references_lead_to_them() -> None:
    roots = [parsed(svg) for svg in default_plots()]
    ids = [element.attrib["id"] for root in roots for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    for root in roots:
        for element in root.iter():
            for value in element.attrib.values():
                if value.startswith(("#", "url(#")) and "-" in value:
                    assert value.removeprefix("url(").strip("#)") in ids


def test_every_plot_is_an_image_with_a_name() -> None:
    for svg in default_plots():
        root = parsed(svg)
        assert root.attrib["role"] == "img"
        title = root.find("title")
        assert title is not None
        assert title.text == root.attrib["aria-label"]
        assert "card-80" in root.attrib["aria-label"]


def test_figures_that_are_not_known_are_not_drawn() -> None:
    unknown = unknown_device_plan()
    assert roofline_plot(unknown) is cost_plot(unknown) is tpot_plot(unknown) is None
    assert "cache unknown" in texts(parsed(memory_bars(unknown)))


@pytest.mark.parametrize("count", [1, 12])
def test_one_variant_and_twelve_are_drawn_and_told_apart(count: int) -> None:
    names = [f"variant-{index}-with-quite-a-long-name" for index in range(count)]
    whole = plan(*(variant(name, copies=1 + index / 10) for index, name in enumerate(names)))
    for svg in all_plots(whole):
        assert {short(name) for name in names} <= set(texts(parsed(svg)))
    assert len({(colour_of(index), marker_of(index)) for index in range(count)}) == count


def test_a_single_batch_is_drawn() -> None:
    alone = variant("bf16", batches=variant("bf16").batches[:1], best_batch=1)
    assert len(all_plots(plan(alone))) == 4


def test_colours_and_markers_repeat_together_only_after_many_variants() -> None:
    assert len({(colour_of(index), marker_of(index)) for index in range(len(COLOURS) * len(MARKERS))}) == 84


def test_what_is_written_in_a_variant_s_colour_can_be_read_on_white() -> None:
    for ink in INKS:
        channels = [int(ink[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        assert 1.05 / (luminance + 0.05) >= 4.5, ink


def test_drawing_leaves_no_setting_behind() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    inline_svg("some", size_in=(2, 2), title="a title", paint=lambda _: {})
    assert dict(matplotlib.rcParams) == before
