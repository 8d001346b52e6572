"""What a fleet's simulation is fed with: blocks, states and step times of growing, hybrid and windowed models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.data_sheet import DATA_SHEET
from pipeline.fleet_plan import planned_fleet
from pipeline.footprint import ShapeFacts, shape_facts
from pipeline.plan_values import FleetPlan
from pipeline.recipe import load_recipe
from pipeline.roof import Roof
from pipeline.step_times import RooflineSteps
from pipeline.variant_plan import PlanSetting, roof_of, variant_plan

ROOT = Path(__file__).parent.parent
RECIPE = """\
model: {{id: some/model, config: {config}}}
precisions: [bf16, int4]
workload: {{prompt_tokens: 1000, new_tokens: 200}}
speed: {{batch_sizes: [1]}}
gate: [{{kind: max_memory, fraction: 0.9}}]
traffic: {{requests_per_s: 1, prompt_tokens: 1000, new_tokens: 200, block_tokens: 32}}
"""


def facts(name: str) -> ShapeFacts:
    return shape_facts(json.loads((ROOT / "recipes" / "architectures" / name).read_text("utf-8")))


@pytest.fixture(scope="module")
def llama() -> ShapeFacts:
    return facts("llama-3.1-8b.json")


@pytest.fixture(scope="module")
def hybrid() -> ShapeFacts:
    return facts("qwen3.6-27b.json")


@pytest.fixture(scope="module")
def windowed() -> ShapeFacts:
    return facts("gemma-3-27b-it.json")


def setting(shapes: ShapeFacts, folder: Path, *, device: str = "h100-sxm") -> PlanSetting:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(config=ROOT / "recipes" / "architectures" / "llama-3.1-8b.json"), "utf-8")
    recipe = load_recipe(path).recipe.expand(device="cuda")
    return PlanSetting(recipe=recipe, device=DATA_SHEET[device], facts=shapes, dollars_per_hour=None)


def fleet(found: PlanSetting) -> FleetPlan:
    spec = found.recipe.ordered()[0]
    planned = planned_fleet(found, spec, plan=variant_plan(found, spec, baseline=None), measured=None)
    assert planned is not None
    return planned


def test_all_of_the_room_beside_the_weights_is_blocks_where_every_layer_grows(
    llama: ShapeFacts, tmp_path: Path
) -> None:
    serving = fleet(setting(llama, tmp_path)).serving
    assert serving is not None
    block_bytes = 32 * 2 * 32 * 8 * 128 * 2
    assert serving.cache_blocks == int((0.9 * 80e9 - 2 * 8_030_261_248) // block_bytes)
    assert serving.max_sequences == 256, "nothing has to be set aside for a sequence"
    assert serving.block_tokens == 32


def test_constant_states_are_set_aside_for_the_sequences_that_fit(hybrid: ShapeFacts, tmp_path: Path) -> None:
    serving = fleet(setting(hybrid, tmp_path)).serving
    assert serving is not None
    room = int(0.9 * 80e9) - 2 * 26_895_998_464
    growing, cached = 65_536, 1200
    state = 150_994_944 + 2 * 1_966_080
    assert serving.max_sequences == room // (state + cached * growing)
    assert serving.cache_blocks == (room - serving.max_sequences * state) // (32 * growing)


def test_full_windows_are_constant_and_only_the_other_layers_take_blocks(
    windowed: ShapeFacts, tmp_path: Path
) -> None:
    found = setting(windowed, tmp_path)
    roof = roof_of(found, found.recipe.ordered()[0])
    assert roof is not None
    per_layer = 2 * 16 * 128 * 2
    assert roof.growing_bytes_per_token == 10 * per_layer
    assert roof.constant_bytes(5000) == 52 * 1024 * per_layer
    assert roof.constant_bytes(100) == 52 * 100 * per_layer


def test_a_model_that_leaves_no_room_has_no_fleet(hybrid: ShapeFacts, tmp_path: Path) -> None:
    planned = fleet(setting(hybrid, tmp_path, device="l4"))
    assert (planned.serving, planned.size.devices) == (None, None)
    assert "don't fit" in planned.size.reason


def steps(roof: Roof) -> RooflineSteps:
    assert roof.peak_flops_per_s is not None
    return RooflineSteps(
        weights=roof.reads,
        kv_bytes_per_token=roof.growing_bytes_per_token,
        flops_per_token=roof.block_flops,
        head_flops=roof.head_flops,
        flops_per_pair=roof.flops_per_pair,
        bandwidth_bytes_per_s=roof.bandwidth_bytes_per_s,
        peak_flops_per_s=roof.peak_flops_per_s,
    )


@pytest.mark.parametrize("batch_size", [1, 16, 400])
def test_a_simulated_step_at_full_efficiency_takes_the_roof_s_time(
    batch_size: int, llama: ShapeFacts, tmp_path: Path
) -> None:
    found = setting(llama, tmp_path)
    roof = roof_of(found, found.recipe.ordered()[0])
    assert roof is not None
    cached = 999 * batch_size
    simulated = steps(roof).step_s(
        prefill_tokens=0, decode_sequences=batch_size, cached_tokens=cached, pairs=cached + batch_size
    )
    # The step's own token is attended to, too, but read from no cache yet: a thousandth here.
    assert simulated == pytest.approx(roof.step_s(batch_size, context_tokens=1000), rel=2e-3)


def test_a_simulated_prefill_at_full_efficiency_takes_the_roof_s_time(
    llama: ShapeFacts, tmp_path: Path
) -> None:
    found = setting(llama, tmp_path)
    roof = roof_of(found, found.recipe.ordered()[0])
    assert roof is not None
    simulated = steps(roof).step_s(
        prefill_tokens=1000, decode_sequences=0, cached_tokens=0, pairs=1000 * 1001 // 2
    )
    assert simulated == pytest.approx(roof.prefill_s(1000), rel=1e-9)
