"""Plans: right figures for a 27B model on data-sheet devices, and honest gaps where a figure isn't known."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.data_sheet import DATA_SHEET, Device
from pipeline.errors import RecipeError
from pipeline.footprint import ShapeFacts, shape_facts
from pipeline.plan import make_plan
from pipeline.plan_text import plan_table
from pipeline.plan_values import Plan, VariantPlan
from pipeline.recipe import LoadedRecipe, load_recipe

ROOT = Path(__file__).parent.parent
BIG = ROOT / "recipes" / "27b.yaml"
PUBLISHED_FIELDS = {
    *("recipe", "model", "hardware", "parameters", "workload_class", "advice", "variants"),
    *("hardware.name", "hardware.memory_bytes", "hardware.bandwidth_bytes_per_s"),
    *("hardware.peak_flops_per_s", "hardware.ops_per_byte", "hardware.source"),
    *("parameters.total", "parameters.embedding", "parameters.head"),
}
PUBLISHED_VARIANT_FIELDS = {
    *("name", "precision", "weight_bytes_on_disk", "weight_bytes_resident", "bytes_read_per_token"),
    *("kv_bytes_per_token", "kv_bytes_at_context", "fits", "max_batch", "decode_ceiling_tokens_per_s"),
    *("prefill_ceiling_tokens_per_s", "break_even_batch", "dollars_per_million_output_tokens"),
}


@pytest.fixture(scope="module")
def facts() -> ShapeFacts:
    config = ROOT / "recipes" / "architectures" / "qwen3.6-27b.json"
    return shape_facts(json.loads(config.read_text("utf-8")))


def plan_for(loaded: LoadedRecipe, device: Device, facts: ShapeFacts, *, fleet: bool = False) -> Plan:
    recipe = loaded.recipe.expand(device=device.kind)
    if not fleet:  # the simulation takes longer than the rest
        recipe = recipe.model_copy(update={"traffic": None})
    return make_plan(loaded, recipe=recipe, device=device, facts=facts)


@pytest.fixture(scope="module")
def plan(facts: ShapeFacts) -> Plan:
    return plan_for(load_recipe(BIG), DATA_SHEET["h100-sxm"], facts)


def variant(plan: Plan, name: str) -> VariantPlan:
    return next(variant for variant in plan.variants if variant.name == name)


def changed(folder: Path, *changes: tuple[str, str]) -> LoadedRecipe:
    """The 27B recipe with some of its text replaced."""
    text = BIG.read_text("utf-8").replace("architectures/", f"{BIG.parent}/architectures/")
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


# --- the 27B model on an 80 GB card ----------------------------------------------------------------------


def test_the_published_fields_are_there(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    for field in PUBLISHED_FIELDS:
        found: Any = data
        for part in field.split("."):
            assert part in found, field
            found = found[part]
    for entry in data["variants"]:
        assert entry.keys() >= PUBLISHED_VARIANT_FIELDS
    assert Plan.model_validate_json(plan.to_json()) == plan


def test_sixteen_bit_weights_take_two_bytes_each(plan: Plan) -> None:
    baseline = variant(plan, "bf16")
    assert plan.parameters["total"] == 26_895_998_464
    assert baseline.weight_bytes_resident == baseline.weight_bytes_on_disk == 53_791_996_928
    assert baseline.bits_per_weight == 16
    assert plan.parameters["embedding"] == plan.parameters["head"] == 1_271_398_400
    assert baseline.bytes_read_per_token == 2 * (26_895_998_464 - 1_271_398_400)


def test_the_parts_of_the_model_add_up(plan: Plan) -> None:
    parts = plan.parameters
    split = ("embedding", "head", "attention", "mlp", "experts", "norms", "vision", "other")
    assert parts["total"] == sum(parts[name] for name in split)
    assert parts["linear"] < parts["attention"] + parts["mlp"]


def test_the_device_s_ratio_of_operations_to_bytes_is_the_break_even_batch_at_sixteen_bits(
    plan: Plan,
) -> None:
    assert plan.hardware.ops_per_byte["fp16"] == pytest.approx(989e12 / 3.35e12, rel=2e-3)
    assert variant(plan, "bf16").break_even_batch == pytest.approx(295, abs=1)


def test_one_request_decodes_no_faster_than_its_bytes_can_be_read(plan: Plan) -> None:
    baseline = variant(plan, "bf16")
    ceiling = baseline.decode_ceiling_tokens_per_s
    assert ceiling is not None
    without_cache = 3.35e12 / baseline.bytes_read_per_token
    assert 0.98 * without_cache < ceiling < without_cache, "the cache is read too"


def test_fewer_bits_are_fewer_bytes_more_sequences_and_a_higher_ceiling(plan: Plan) -> None:
    found = [variant(plan, name) for name in ("bf16", "int8", "int4")]
    assert [v.precision for v in found] == ["bf16", "int8", "int4"]
    for wide, narrow in itertools.pairwise(found):
        assert narrow.weight_bytes_resident < wide.weight_bytes_resident
        assert narrow.weight_bytes_on_disk < wide.weight_bytes_on_disk
        assert (narrow.max_batch or 0) > (wide.max_batch or 0)
        assert (narrow.decode_ceiling_tokens_per_s or 0) > (wide.decode_ceiling_tokens_per_s or 0)
        assert narrow.kv_bytes_per_token == wide.kv_bytes_per_token


def test_a_variant_s_limits_are_those_of_the_arithmetic_it_multiplies_in(plan: Plan) -> None:
    bf16, int8, int4 = (variant(plan, name) for name in ("bf16", "int8", "int4"))
    assert [v.arithmetic_type for v in (bf16, int8, int4)] == ["fp16", "int8", "fp16"]
    assert int4.ttft_floor_s == bf16.ttft_floor_s, "weight-only: turned into 16 bits first"
    assert int8.ttft_floor_s == pytest.approx((bf16.ttft_floor_s or 0) * 989 / 1979), (
        "LLM.int8 multiplies INT8"
    )
    assert int4.break_even_batch == pytest.approx(
        295.2 * int4.bytes_read_per_token / bf16.bytes_read_per_token, rel=1e-3
    )


def test_thirty_two_bits_are_multiplied_at_their_own_peak(facts: ShapeFacts, tmp_path: Path) -> None:
    wide = changed(tmp_path, ("precisions: [bf16, int8, int4]", "precisions: [bf16, fp32, int4]"))
    found = plan_for(wide, DATA_SHEET["h100-sxm"], facts)
    sixteen, thirty_two = variant(found, "bf16"), variant(found, "fp32")
    assert thirty_two.arithmetic_flops_per_s == 67e12
    assert thirty_two.ttft_floor_s == pytest.approx((sixteen.ttft_floor_s or 0) * 989 / 67)


def test_a_batch_touches_more_experts_than_a_token_so_a_mixture_breaks_even_later() -> None:
    config = json.loads((ROOT / "recipes" / "architectures" / "mixtral-8x7b.json").read_text("utf-8"))
    loaded = load_recipe(ROOT / "recipes" / "671b.yaml")
    entry = variant(plan_for(loaded, DATA_SHEET["h100-sxm"], shape_facts(config)), "bf16")
    assert entry.break_even_batch is not None
    all_weights_over_active = 46_702_792_704 / 12_750_000_000
    assert entry.break_even_batch == pytest.approx(295.2 * all_weights_over_active, rel=0.01)


def test_the_cache_of_a_hybrid_model_grows_in_its_attention_layers_only(plan: Plan) -> None:
    baseline = variant(plan, "bf16")
    assert baseline.kv_bytes_per_token == 65_536
    constant = (baseline.kv_bytes_at_context or 0) - 8192 * 65_536
    assert 0 < constant < 0.3 * 8192 * 65_536
    budget = int(0.9 * 80e9)
    assert plan.budget_bytes == budget
    room = budget - baseline.weight_bytes_resident
    assert baseline.max_batch == room // (baseline.kv_bytes_at_context or 1)


def test_doubling_the_price_doubles_the_cost_and_no_price_means_no_cost(
    plan: Plan, facts: ShapeFacts, tmp_path: Path
) -> None:
    device = DATA_SHEET["h100-sxm"]
    dear = plan_for(changed(tmp_path, ("dollars_per_hour: 3.50", "dollars_per_hour: 7")), device, facts)
    for cheap, costly in zip(plan.variants, dear.variants, strict=True):
        assert costly.dollars_per_million_output_tokens == pytest.approx(
            2 * (cheap.dollars_per_million_output_tokens or 0)
        )
    priced = plan_for(changed(tmp_path, ("cost: {dollars_per_hour: 3.50}\n", "")), device, facts)
    assert priced.hardware.dollars_per_hour == device.dollars_per_hour, "the data sheet's price stands in"
    unpriced = device.model_copy(update={"dollars_per_hour": None})
    unpriced_recipe = changed(tmp_path, ("cost: {dollars_per_hour: 3.50}\n", ""))
    free = plan_for(unpriced_recipe, unpriced, facts, fleet=True)
    for entry in free.variants:
        assert entry.dollars_per_million_output_tokens is None
        assert entry.dollars_per_million_input_tokens is None
        assert entry.fleet is not None
        assert entry.fleet.dollars_per_month is None


# --- other devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DATA_SHEET))
def test_every_device_of_the_data_sheets_can_be_planned_for(facts: ShapeFacts, name: str) -> None:
    device = DATA_SHEET[name]
    found = plan_for(load_recipe(BIG), device, facts)
    assert found.hardware.name == name
    for entry in found.variants:
        assert entry.decode_ceiling_tokens_per_s is not None
        assert (entry.break_even_batch is None) == (not device.peak_flops_per_s)
        assert entry.fits == ((entry.max_batch or 0) >= 1)
        fits_alone = entry.weight_bytes_resident + (entry.kv_bytes_at_context or 0) <= found.budget_bytes
        assert entry.fits == fits_alone


def test_what_does_not_fit_has_no_sequence_and_no_price(facts: ShapeFacts) -> None:
    baseline = variant(plan_for(load_recipe(BIG), DATA_SHEET["l4"], facts), "bf16")
    assert (baseline.fits, baseline.max_batch) == (False, 0)
    assert baseline.dollars_per_million_output_tokens is None


def test_an_unknown_bandwidth_leaves_ceilings_unknown_not_zero(facts: ShapeFacts) -> None:
    device = Device(
        name="some machine",
        kind="cpu",
        memory_bytes=10**11,
        threads=8,
        last_level_cache_bytes=None,
        bandwidth_bytes_per_s=None,
        source="operating system",
    )
    found = plan_for(load_recipe(BIG), device, facts)
    for entry in found.variants:
        assert entry.decode_ceiling_tokens_per_s is None
        assert entry.prefill_ceiling_tokens_per_s is None
        assert entry.break_even_batch is None
        assert entry.dollars_per_million_output_tokens is None
        assert entry.fits is not None, "memory is known"
    assert found.workload_class is None
    assert "?" in plan_table(found)


def test_an_unknown_cache_is_said_not_guessed(facts: ShapeFacts) -> None:
    unknown = facts.model_copy(update={"cache": None, "cache_unavailable": "layers of kind 'odd'"})
    found = plan_for(load_recipe(BIG), DATA_SHEET["h100-sxm"], unknown)
    assert all((v.fits, v.max_batch, v.kv_bytes_per_token) == (None, None, None) for v in found.variants)
    assert any("estimate unavailable: layers of kind 'odd'" in note for note in found.notes)
    assert "estimate unavailable" in plan_table(found)


def test_a_cache_with_windows_says_what_is_taken_and_what_whole_contexts_would_need() -> None:
    """18 of 36 layers look back at 128 tokens; a token takes 2,048 B a layer."""
    config = {
        **{"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300},
        **{"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 36},
        **{"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 128},
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    }
    windowed = shape_facts(config)
    loaded = load_recipe(BIG)

    def notes_at(context_tokens: int) -> list[str]:
        recipe = loaded.recipe.expand(device="cuda").model_copy(update={"traffic": None})
        assert recipe.capacity is not None
        capacity = recipe.capacity.model_copy(update={"context_tokens": context_tokens})
        recipe = recipe.model_copy(update={"capacity": capacity})
        found = make_plan(loaded, recipe=recipe, device=DATA_SHEET["h100-sxm"], facts=windowed)
        return [note for note in found.notes if note.startswith("KV cache")]

    (note,) = notes_at(4096)
    assert "18 layers are taken to keep no more than their window (128 tokens): 155,713,536 B" in note
    assert "reserves the whole context for them, too, needs 301,989,888 B" in note
    assert notes_at(128) == []


# --- advice and notes ------------------------------------------------------------------------------------


def test_the_shape_of_the_workload_is_named(plan: Plan, facts: ShapeFacts, tmp_path: Path) -> None:
    assert plan.workload_class == "decode-heavy"
    summary = changed(tmp_path, ("new_tokens: 256", "new_tokens: 2"))
    assert plan_for(summary, DATA_SHEET["h100-sxm"], facts).workload_class == "prefill-heavy"


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("context_tokens: 8192", "context_tokens: 300000", "capacity.context_tokens is 300000"),
        (
            "prompt_tokens: 2048",
            "prompt_tokens: 300000",
            "workload.prompt_tokens + workload.new_tokens is 300256",
        ),
        ("p95: 2500, max: 6000", "p95: 2500, max: 300000", "traffic (longest request) is 302000"),
        ("[1, 8, 32]", "[1, 8, 32], prompt_tokens: [512, 262145]", "speed.prompt_tokens is 262145"),
        (
            "[1, 8, 32]",
            "[1, 8, 32], context_tokens: [262000]",
            "speed.context_tokens + workload.new_tokens is 262256",
        ),
    ],
)
def test_sequences_beyond_the_model_s_limit_are_refused(
    before: str, after: str, key: str, facts: ShapeFacts, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="longer than the model's limit of 262144") as caught:
        plan_for(changed(tmp_path, (before, after)), DATA_SHEET["h100-sxm"], facts, fleet=True)
    assert key in str(caught.value)


def test_the_table_shows_every_variant_with_its_units(plan: Plan) -> None:
    table = plan_table(plan)
    assert "53.79" in table
    assert "26,895,998,464 parameters" in table
    for name in (
        "bf16",
        "int8",
        "int4",
        "weights in memory",
        "one request ≤",
        "fits",
        "What pays",
    ):
        assert name in table
    assert all(line == line.rstrip() for line in table.splitlines())


def test_planning_is_repeatable(plan: Plan, facts: ShapeFacts) -> None:
    assert plan_for(load_recipe(BIG), DATA_SHEET["h100-sxm"], facts) == plan


# --- what-ifs and advice ---------------------------------------------------------------------------------


def test_arithmetic_leaves_decoding_alone_bandwidth_and_bytes_do_not(plan: Plan) -> None:
    gains = {what.change: what for what in plan.what_ifs}
    assert gains["+50 % FLOP/s"].decode_gain == 1
    assert gains["+50 % FLOP/s"].prefill_gain == pytest.approx(1.5)
    assert gains["+50 % bandwidth"].decode_gain == pytest.approx(1.5)
    assert gains["+50 % bandwidth"].prefill_gain == 1
    halved = gains["all weights in 8 bits"].decode_gain
    assert 1.97 < halved < 2, "twice, but for the KV cache that stays as it is"


def test_advice_comes_as_batching_quantization_hardware_each_with_its_gain(plan: Plan) -> None:
    steps = [one.step for one in plan.advice]
    assert steps == sorted(steps, key=["batching", "quantization", "hardware"].index)
    assert set(steps) == {"batching", "quantization", "hardware"}
    assert all(one.gain > 1 for one in plan.advice)
    batching = plan.advice[0]
    baseline = variant(plan, "bf16")
    by_size = {batch.batch_size: batch for batch in baseline.batches}
    assert baseline.best_batch is not None
    assert batching.gain == pytest.approx(by_size[baseline.best_batch].tokens_per_s / by_size[1].tokens_per_s)
    int8 = next(one for one in plan.advice if one.text.startswith("int8"))
    ceilings = [variant(plan, name).decode_ceiling_tokens_per_s or 0 for name in ("int8", "bf16")]
    assert int8.gain == pytest.approx(ceilings[0] / ceilings[1])


def test_a_bigger_card_is_advised_only_if_it_holds_the_baseline(facts: ShapeFacts) -> None:
    found = plan_for(load_recipe(BIG), DATA_SHEET["l4"], facts)
    cards = [one.text for one in found.advice if one.step == "hardware"]
    assert cards
    assert not any("holds 0" in text for text in cards)
    assert not any("rtx-4090" in text for text in cards), "24 GB hold no 54 GB"
    assert any("3 of l4 hold it by memory alone" in note for note in found.notes)


def test_a_quantizer_that_passes_over_experts_is_noted(tmp_path: Path) -> None:
    mixtral = json.loads((ROOT / "recipes" / "architectures" / "mixtral-8x7b.json").read_text("utf-8"))
    text = BIG.read_text("utf-8").replace(
        "architectures/qwen3.6-27b.json", f"{ROOT}/recipes/architectures/mixtral-8x7b.json"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    found = plan_for(load_recipe(path), DATA_SHEET["h100-sxm"], shape_facts(mixtral))
    assert any("int8" in note and "of the block weights as they are" in note for note in found.notes)


# --- capacity --------------------------------------------------------------------------------------------


def test_pages_hold_more_sequences_than_reserved_contexts_and_headroom_costs_some(plan: Plan) -> None:
    for entry in plan.variants:
        found = entry.capacity
        assert found is not None
        assert found.block_tokens == 16
        assert found.mean_sequence_tokens == 2048 + 256
        assert entry.max_batch is not None
        assert found.paged > entry.max_batch
        assert found.contiguous_without_headroom > entry.max_batch
        assert found.paged_without_headroom > found.paged


def test_the_memory_for_caches_grows_by_what_quantizing_saves(plan: Plan) -> None:
    baseline, int8 = variant(plan, "bf16"), variant(plan, "int8")
    assert baseline.kv_budget_gain == 1
    saved = baseline.weight_bytes_resident - int8.weight_bytes_resident
    assert int8.kv_budget_bytes == baseline.kv_budget_bytes + saved
    assert int8.kv_budget_gain == pytest.approx(int8.kv_budget_bytes / baseline.kv_budget_bytes)


def test_weights_beyond_the_memory_leave_no_cache_and_count_the_devices_they_need(facts: ShapeFacts) -> None:
    baseline = variant(plan_for(load_recipe(BIG), DATA_SHEET["l4"], facts), "bf16")
    assert (baseline.kv_budget_bytes, baseline.kv_budget_gain, baseline.best_batch) == (0, None, 0)
    assert baseline.devices_to_hold == 3, "53.8 GB and one sequence on cards of which 21.6 GB are used"


def test_half_a_terabyte_holds_671_billion_parameters_at_four_bits_only() -> None:
    config = json.loads((ROOT / "recipes" / "architectures" / "deepseek-v3.json").read_text("utf-8"))
    loaded = load_recipe(ROOT / "recipes" / "671b.yaml")
    found = plan_for(loaded, DATA_SHEET["m3-ultra-512gb"], shape_facts(config))
    assert {entry.name: entry.fits for entry in found.variants} == {"bf16": False, "fp8": False, "int4": True}
    assert [round(entry.weight_bytes_on_disk / 1e9) for entry in found.variants][:2] == [1342, 673]


def test_a_sequence_that_exceeds_what_the_weights_leave_is_told(facts: ShapeFacts, tmp_path: Path) -> None:
    long = changed(tmp_path, ("context_tokens: 8192", "context_tokens: 262144"))
    card = DATA_SHEET["h100-sxm"].model_copy(update={"memory_bytes": 70 * 10**9})
    found = plan_for(long, card, facts)
    assert (variant(found, "bf16").fits, variant(found, "bf16").max_batch) == (False, 0)
    assert any("one sequence of 262144 tokens takes 17.33 GB" in note for note in found.notes)
    assert variant(found, "int8").fits


# --- fleets ----------------------------------------------------------------------------------------------


def test_a_tighter_limit_and_more_traffic_need_more_devices(facts: ShapeFacts, tmp_path: Path) -> None:
    device = DATA_SHEET["h100-sxm"]

    def devices(*changes: tuple[str, str]) -> list[int]:
        fleets = [
            entry.fleet for entry in plan_for(changed(tmp_path, *changes), device, facts, fleet=True).variants
        ]
        assert all(fleet and fleet.size.devices for fleet in fleets)
        return [fleet.size.devices for fleet in fleets if fleet and fleet.size.devices]

    loose, tight = devices(), devices(("tpot_s: 0.04", "tpot_s: 0.025"))
    more = devices(("requests_per_s: 10", "requests_per_s: 40"))
    assert all(few <= many for few, many in zip(loose, tight, strict=True))
    assert tight[0] > loose[0], "the baseline's steps are the slowest"
    assert all(few < many for few, many in zip(loose, more, strict=True))


def test_what_no_number_of_devices_can_do_has_a_reason(facts: ShapeFacts, tmp_path: Path) -> None:
    impossible = changed(tmp_path, ("ttft_s: 1.5", "ttft_s: 0.01"))
    for entry in plan_for(impossible, DATA_SHEET["h100-sxm"], facts, fleet=True).variants:
        assert entry.fleet is not None
        assert entry.fleet.size.devices is None
        assert "the TTFT target of 0.01 s is below" in entry.fleet.size.reason
    small = plan_for(load_recipe(BIG), DATA_SHEET["l4"], facts, fleet=True).variants[0]
    assert small.fleet is not None
    assert "don't fit into the memory budget" in small.fleet.size.reason


def test_a_month_costs_devices_by_hours_by_price(facts: ShapeFacts) -> None:
    for entry in plan_for(load_recipe(BIG), DATA_SHEET["h100-sxm"], facts, fleet=True).variants:
        assert entry.fleet is not None
        assert entry.fleet.size.devices is not None
        assert entry.fleet.dollars_per_month == pytest.approx(entry.fleet.size.devices * 3.5 * 730)
