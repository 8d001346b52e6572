"""A plan for a recipe file: its device and trace found, and the newest run of it set beside, if it is this one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.data_sheet import DATA_SHEET, Device
from pipeline.errors import RecipeError
from pipeline.hardware import detect, fingerprint
from pipeline.measured import Distribution
from pipeline.plan_text import plan_table
from pipeline.plan_values import Plan
from pipeline.planning import MEASURED_DEVICE, best_for, plan_recipe
from pipeline.recipe import load_recipe
from pipeline.serving_results import ServingResult, ServingRow
from pipeline.speed_results import DeviceSpeed, SpeedRow
from pipeline.step_times import MeasuredSteps
from pipeline.store import Store
from tests import result_builders as results
from tests.tiny_models import write_llama

ROOT = Path(__file__).parent.parent
RECIPE = """\
model: ./tiny
precisions: [fp16, int8]
workload: {prompt_tokens: 40, new_tokens: 10}
speed: {batch_sizes: [1, 4]}
capacity: {context_tokens: 64}
gate: [{kind: max_memory, fraction: 0.9}]
"""
TRAFFIC = "traffic: {requests_per_s: 1, prompt_tokens: 30, new_tokens: 8}\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@pytest.fixture
def store(tmp_path: Path, shapes: Path) -> Store:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "shapes").symlink_to(shapes)
    return Store(tmp_path / "store")


def recipe(folder: Path, model: Path, text: str = RECIPE) -> Path:
    if not (folder / "tiny").exists():
        (folder / "tiny").symlink_to(model)
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def row(batch_size: int) -> SpeedRow:
    """Timed as if a step took 10 ms and each prompt token or sequence 1 ms more."""
    return results.speed_row(
        batch_size,
        prompt_tokens=40,
        new_tokens=10,
        ttft_s=Distribution.of([0.010 + 0.001 * 40 * batch_size]),
        tpot_s=Distribution.of([0.010 + 0.001 * batch_size]),
    )


def keep_run(
    store: Store,
    path: Path,
    *,
    name: str = "20260101-1-recipe",
    device: Device | None = None,
    served: ServingResult | None = None,
    **fields: object,
) -> Path:
    """A stored report of a run of that recipe on this machine (or `device`)."""
    pieces = row(1).model_copy(
        update={"test": "prefill", "prompt_tokens": 400, "chunk_tokens": 40, "ttft_s": Distribution.of([9.0])}
    )
    speed = results.speed("fp16", rows=(row(1), row(4), pieces))
    file = load_recipe(path)
    loaded, best = file.recipe, best_for(file, device=detect(), store=store)
    report = results.report(
        results.variant_report(results.variant("fp16", speed=speed, serving=served)),
        results.variant_report(results.variant("int8", speed=results.speed("int8", rows=(row(1),)))),
        recipe_digest=loaded.digest(),
        resolved_recipe=loaded.expand(
            device=(device or detect()).kind, best={} if device else best
        ).model_dump(mode="json"),
        provenance={"device": (device or detect()).model_dump(mode="json")},
        **fields,
    )
    folder = store.root / "runs" / name
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    return folder


def planned(path: Path, store: Store, hardware: str | None = None) -> Plan:
    return plan_recipe(path, hardware=hardware, store=store)


def test_the_newest_run_of_this_recipe_on_this_machine_stands_beside(
    model: Path, store: Store, tmp_path: Path
) -> None:
    path = recipe(tmp_path, model)
    keep_run(store, path, name="20260101-000000-recipe")
    newest = keep_run(store, path, name="20260102-000000-recipe")
    found = planned(path, store)
    assert found.measured_run == str(newest)
    figures = {one.figure for one in found.variants[0].measured}
    assert "weights resident" in figures


@pytest.mark.parametrize(
    "why", ["another recipe", "another machine", "interrupted", "damaged", "other version"]
)
def test_another_run_is_no_measurement_of_this_plan(
    why: str, model: Path, store: Store, tmp_path: Path
) -> None:
    path = recipe(tmp_path, model)
    elsewhere = detect().model_copy(update={"name": "another CPU"})
    folder = keep_run(
        store,
        path,
        device=elsewhere if why == "another machine" else None,
        interrupted=why == "interrupted",
    )
    report = folder / "report.json"
    if why == "another recipe":
        path = recipe(tmp_path, model, RECIPE.replace("prompt_tokens: 40", "prompt_tokens: 41"))
    elif why == "damaged":
        report.write_bytes(report.read_bytes()[:-20])
    elif why == "other version":
        report.write_text(
            json.dumps({**json.loads(report.read_text("utf-8")), "format_version": 99}), "utf-8"
        )
    found = planned(path, store)
    assert found.measured_run is None
    assert all(variant.measured == () for variant in found.variants)


def test_a_run_on_the_planned_card_is_found_by_the_name_that_its_driver_reports(
    model: Path, store: Store, tmp_path: Path
) -> None:
    path = recipe(tmp_path, model, RECIPE + "hardware: h100-sxm\n")
    card = DATA_SHEET["h100-sxm"].model_copy(
        update={"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85 * 10**9}
    )
    folder = keep_run(store, path, device=card)
    assert planned(path, store).measured_run == str(folder)
    assert planned(path, store, hardware="l4").measured_run is None


def test_a_fleet_uses_step_times_where_a_run_can_tell_them(model: Path, store: Store, tmp_path: Path) -> None:
    path = recipe(tmp_path, model, RECIPE + TRAFFIC)
    keep_run(store, path)
    limits = DeviceSpeed(read_bandwidth_bytes_per_s=2e10, matmul_flops_per_s={"float32": 1e11})
    store.put(MEASURED_DEVICE, fingerprint(detect()), limits)
    fp16, int8 = planned(path, store).variants
    assert fp16.fleet is not None
    assert fp16.fleet.step_times == "measured"
    assert fp16.fleet.size.unloaded_tpot_s == pytest.approx(0.011, rel=0.02), "10 ms a step, 1 ms a sequence"
    assert int8.fleet is not None
    assert int8.fleet.step_times == "roofline", "one batch size can't tell a step's cost from a sequence's"
    notes = [note for note in planned(path, store).notes if "extrapolated" in note]
    assert len(notes) == 1
    assert "batches of 1, 4, prompts of 40 tokens" in notes[0]


def test_steps_of_continuous_batching_tell_a_fleet_more_than_static_batches(
    model: Path, store: Store, tmp_path: Path
) -> None:
    path = recipe(tmp_path, model, RECIPE + TRAFFIC + "serving: {concurrency: [6], requests: 8}\n")
    steps = MeasuredSteps(
        seconds={"step": 0.02}, samples=1234, median_error=0.04, p90_error=0.1, total_error=0.0
    )
    cell = ServingRow(mode="continuous", load="closed", concurrency=6, outcome="measured", requests=8)
    served = ServingResult(
        engine="transformers",
        device="cpu",
        compute_dtype="float32",
        static_execution="eager",
        continuous_execution="paged",
        rows=(cell,),
        step_times=steps,
    )
    keep_run(store, path, served=served)
    limits = DeviceSpeed(read_bandwidth_bytes_per_s=2e10, matmul_flops_per_s={"float32": 1e11})
    store.put(MEASURED_DEVICE, fingerprint(detect()), limits)
    fp16 = planned(path, store).variants[0]
    assert fp16.fleet is not None
    assert fp16.fleet.size.unloaded_tpot_s == pytest.approx(0.020), "not the 11 ms of the static batches"
    notes = [note for note in planned(path, store).notes if "extrapolated" in note]
    assert "1,234 measured steps of continuous batching, of up to 6 sequences (median error 4 %)" in notes[0]


def test_traffic_prices_and_rules_can_change_without_a_new_run(
    model: Path, store: Store, tmp_path: Path
) -> None:
    path = recipe(tmp_path, model, RECIPE + TRAFFIC)
    folder = keep_run(store, path)
    changed = RECIPE.replace("fraction: 0.9", "fraction: 0.5") + TRAFFIC.replace(
        "requests_per_s: 1", "requests_per_s: 2"
    )
    path = recipe(tmp_path, model, changed + "cost: {dollars_per_hour: 1}\n")
    assert planned(path, store).measured_run == str(folder)


def test_a_trace_is_read_relative_to_the_recipe(model: Path, store: Store, tmp_path: Path) -> None:
    lines = [{"arrival_s": float(place), "prompt_tokens": 20 + place, "new_tokens": 5} for place in range(20)]
    (tmp_path / "day.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    path = recipe(tmp_path, model, RECIPE + "hardware: l4\ntraffic: {trace: day.jsonl}\n")
    found = planned(path, store)
    assert found.traffic is not None
    assert (found.traffic.trace, found.traffic.trace_requests) == ("day.jsonl", 20)
    assert found.traffic.mean_sequence_tokens == 20 + 19 / 2 + 5
    assert all(variant.fleet and variant.fleet.size.devices == 1 for variant in found.variants)
    (tmp_path / "day.jsonl").unlink()
    with pytest.raises(RecipeError, match=r"day\.jsonl: no such file"):
        planned(path, store)


def test_a_device_file_of_a_recipe_lies_beside_it_and_that_of_the_flag_here(
    model: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "name: {}\nmemory_bytes: 1e9\nbandwidth_bytes_per_s: 1e11\nsource: a test\n"
    (tmp_path / "box.yaml").write_text(text.format("box-of-the-recipe"), encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    (here / "box.yaml").write_text(text.format("box-of-the-flag"), encoding="utf-8")
    monkeypatch.chdir(here)
    path = recipe(tmp_path, model, RECIPE + "hardware: ./box.yaml\n")
    assert planned(path, store).hardware.name == "box-of-the-recipe"
    assert planned(path, store, hardware="./box.yaml").hardware.name == "box-of-the-flag"


def test_planning_twice_says_the_same(model: Path, store: Store, tmp_path: Path) -> None:
    path = recipe(tmp_path, model, RECIPE + TRAFFIC + "hardware: l4\n")
    plans: Sequence[Plan] = [planned(path, store) for _ in range(2)]
    assert plans[0].to_json() == plans[1].to_json()
    assert Plan.model_validate_json(plans[0].to_json()) == plans[0]


def test_the_plan_in_the_documentation_is_the_one_that_is_printed(store: Store) -> None:
    page = (ROOT / "docs" / "planning.md").read_text("utf-8")
    shown = page.split("```text\n", 1)[1].split("```", 1)[0].rstrip()
    assert shown == plan_table(planned(ROOT / "recipes" / "27b.yaml", store)).replace(f"{ROOT}/", "")
