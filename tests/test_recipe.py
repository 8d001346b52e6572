"""What a recipe means: scalars, short forms, digests, the JSON schema, and the way back from JSON."""

from __future__ import annotations

import codecs
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, json_schema, load_recipe
from pipeline.yaml_document import parse

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LONG = """
model: {id: some/model, revision: abc123}
baseline: fp16
variants:
  - {name: fp16}
  - {name: int8, quantizer: {kind: quanto, weights: int8}}
  - {name: int4, quantizer: {kind: bitsandbytes, type: nf4}, required: false}
speed: {batch_sizes: [1, 8]}
capacity: {context_tokens: 256}
quality: {tasks: [piqa, "café"], limit: 50}
gate:
  - {kind: min_speedup, batch_size: 8, factor: 1.5}
  - {kind: max_memory, fraction: 0.6}
  - {kind: max_quality_drop, points: 2.0}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str) -> Recipe:
    return load_recipe(write(folder, text)).recipe


# --- scalars ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1e-2", 0.01),
        ("1.0e-3", 0.001),
        ("1e3", 1000.0),
        ("1.e+3", 1000.0),
        (".5", 0.5),
        ("-2.5", -2.5),
        ("1_000", 1000),
        ("295_000_000", 295_000_000),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_numbers_booleans_and_null_are_what_they_look_like(text: str, value: object) -> None:
    found = parse(f"key: {text}").data["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "off",
        "on",
        "yes",
        "y",
        "n",
        "none",
        "NaN",
        "12:30",
        "1:10",
        "0x1F",
        "0o17",
        "2026-11-29",
        "'12'",
    ],
)
def test_what_is_neither_number_nor_boolean_stays_the_text_it_is(text: str) -> None:
    assert parse(f"key: {text}").data["key"] == text.strip("'")


def test_a_comma_in_a_number_outside_brackets_is_text_not_a_list() -> None:
    assert parse("key: 4,096").data["key"] == "4,096"


def test_an_exponent_without_dot_and_sign_is_a_threshold_like_any_other(tmp_path: Path) -> None:
    recipe = load(tmp_path, LONG.replace("points: 2.0", "points: 1e-2"))
    points: Any = recipe.gate[2]
    assert points.points == 0.01
    assert recipe == load(tmp_path, LONG.replace("points: 2.0", "points: 0.01"))


def test_underscores_in_numbers_are_dropped(tmp_path: Path) -> None:
    recipe = load(tmp_path, LONG + "workload: {prompt_tokens: 1_000}\n")
    assert recipe.workload.prompt_tokens == 1000


def test_a_quoted_revision_of_digits_is_kept_to_the_letter(tmp_path: Path) -> None:
    for revision in ("0123456", "25921e05", "1e5"):
        recipe = load(tmp_path, LONG.replace("abc123", f"'{revision}'"))
        assert recipe.model.revision == revision


# --- files -----------------------------------------------------------------------------------------------


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    plain = write(tmp_path, LONG)
    marked = tmp_path / "marked.yaml"
    marked.write_bytes(codecs.BOM_UTF8 + plain.read_bytes())
    assert load_recipe(marked).recipe == load_recipe(plain).recipe


def test_the_locale_does_not_change_how_a_recipe_is_read(tmp_path: Path) -> None:
    marked = tmp_path / "marked.yaml"
    marked.write_bytes(codecs.BOM_UTF8 + LONG.encode())
    program = "import sys, pathlib; from pipeline.recipe import load_recipe as load\n"
    program += "sys.stdout.buffer.write(load(pathlib.Path(sys.argv[1])).recipe.quality.tasks[1].encode())"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(marked)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == "café"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads_and_names_its_baseline_first(path: Path) -> None:
    for device in ("cpu", "cuda"):
        expanded = load_recipe(path).recipe.expand(device=device)
        assert expanded.ordered()[0].name == expanded.baseline
        assert expanded.ordered()[0].quantizer.precision in ("fp16", "bf16")
        assert all(variant.engine for variant in expanded.variants)


# --- short forms -----------------------------------------------------------------------------------------


def test_precisions_in_any_case_expand_to_variants(tmp_path: Path) -> None:
    gate = "gate: [{kind: max_memory, fraction: 0.6}]\nspeed: {}\n"
    recipe = load(tmp_path, f"model: some/model\nprecisions: [FP16, int8, Int4]\n{gate}")
    variants = recipe.expand(device="cpu").variants
    assert [variant.name for variant in variants] == ["fp16", "int8", "int4"]
    assert [variant.quantizer.precision for variant in variants] == ["fp16", "int8", "int4"]
    assert [variant.quantizer.kind for variant in variants] == ["native", "quanto", "bitsandbytes"]


def test_the_model_s_short_form_means_its_id(tmp_path: Path) -> None:
    short = LONG.replace("{id: some/model, revision: abc123}", "some/model")
    long = LONG.replace("{id: some/model, revision: abc123}", "{id: some/model}")
    assert load(tmp_path, short) == load(tmp_path, long)


def test_a_variant_named_after_a_float_type_needs_no_quantizer(tmp_path: Path) -> None:
    long = LONG.replace("{name: fp16}", "{name: fp16, quantizer: {kind: native, dtype: fp16}}")
    assert load(tmp_path, LONG) == load(tmp_path, long)


def test_relative_paths_start_at_the_recipe_s_folder_and_the_home_is_known(tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, LONG))
    assert loaded.resolve("../models/x") == tmp_path.parent / "models" / "x"
    assert loaded.resolve("/models/x") == Path("/models/x")
    assert loaded.resolve("~") == Path.home().resolve()
    with pytest.raises(RecipeError, match="no such user"):
        loaded.resolve("~nobody-of-that-name/x")


# --- digests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("weights: int8", "weights: int4"),
        ("type: nf4", "type: fp4"),
        ("type: nf4", "type: nf4, double_quant: true"),
        ("fraction: 0.6", "fraction: 0.61"),
        ("fraction: 0.6", "fraction: 0.6, of: on_disk"),
        ("points: 2.0", "points: 2.0, tasks: [piqa]"),
        ("factor: 1.5", "factor: 1.5, across_engines: true"),
        ("speed: {batch_sizes", "speed: {engine: {kind: transformers, compute_dtype: float32}, batch_sizes"),
        ("revision: abc123", "revision: abc124"),
        ("limit: 50", "limit: 51"),
    ],
)
def test_one_other_field_is_another_digest(tmp_path: Path, before: str, after: str) -> None:
    assert LONG.count(before) == 1
    one, other = load(tmp_path, LONG), load(tmp_path, LONG.replace(before, after))
    assert one.digest() != other.digest()
    assert one.expand(device="cpu").digest() != other.expand(device="cpu").digest()


def test_comments_order_and_layout_leave_the_digest_as_it_is(tmp_path: Path) -> None:
    flow = "# the same in another layout\n" + json.dumps(yaml.safe_load(LONG))
    block = yaml.safe_dump(yaml.safe_load(LONG), sort_keys=True, default_flow_style=False)
    digests = {load(tmp_path, text).digest() for text in (LONG, flow, block)}
    assert len(digests) == 1


# --- the way back from JSON ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_resolved_recipe_loads_to_what_it_was_made_from(tmp_path: Path, path: Path, device: str) -> None:
    resolved = load_recipe(path).recipe.expand(device=device)
    again = load_recipe(write(tmp_path, resolved.to_json(), "resolved-recipe.json")).recipe
    assert again.expand(device=device) == resolved
    assert again.expand(device="cpu") == again.expand(device="cuda")


def test_numbers_and_letters_survive_the_way_through_json(tmp_path: Path) -> None:
    text = LONG.replace("points: 2.0", "points: 0.5").replace("café", "naïve 語 🚢")
    text += "  - {kind: max_perplexity_increase, percent: 1e-05}\n"
    recipe = load(tmp_path, text.replace("abc123", "'25921e05'"))
    again = load(tmp_path, recipe.expand(device="cpu").to_json())
    assert again.gate == recipe.gate
    assert again.quality == recipe.quality
    assert again.model == recipe.model


# --- JSON schema -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    found = json_schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def test_the_schema_says_which_dialect_it_is(schema: jsonschema.Draft202012Validator) -> None:
    assert jsonschema.validators.validator_for(schema.schema) is jsonschema.Draft202012Validator


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_validates_against_the_schema(
    schema: jsonschema.Draft202012Validator, path: Path
) -> None:
    schema.validate(parse(path.read_text("utf-8")).data)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "some/model"},
        {"model": {"id": "some/model", "weights": "random"}},
        {"variants": [{"name": "FP16"}, {"name": "x", "quantizer": {"kind": "quanto", "weights": "fp8"}}]},
        {"variants": None, "precisions": ["fp16", "INT8"]},
    ],
)
def test_the_schema_knows_the_short_forms(
    schema: jsonschema.Draft202012Validator, change: dict[str, Any]
) -> None:
    schema.validate(changed(change))


@pytest.mark.parametrize(
    "change",
    [
        {"evaluaton": {}},
        {"model": 7},
        {"precisions": ["fp16"]},
        {"variants": None},
        {"variants": None, "precisions": ["fp16", "int9"]},
        {"variants": None, "precisions": "int4"},
        {"variants": [{"name": "int8"}]},
        {"variants": [{"name": "fp16", "quantiser": {}}]},
        {"variants": [{"name": "x", "quantizer": {"kind": "quanto", "weights": "int9"}}]},
        {"variants": [{"name": "x", "quantizer": {"weights": "int8"}}]},
        {"gate": []},
        {"gate": [{"kind": "max_memry", "fraction": 0.6}]},
        {"gate": [{"kind": "max_memory", "fractoin": 0.6}]},
        {"gate": [{"kind": "max_memory", "fraction": "0.6"}]},
        {"gate": [{"fraction": 0.6}]},
        {"speed": {"repeats": 1}},
        {"hardware": "h100-xsm"},
        {"model": {"id": "some/model", "seed": -1}},
    ],
)
def test_what_the_schema_refuses_the_reader_refuses_too(
    tmp_path: Path, schema: jsonschema.Draft202012Validator, change: dict[str, Any]
) -> None:
    data = changed(change)
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(data)
    with pytest.raises(RecipeError):
        load(tmp_path, json.dumps(data))


def changed(change: dict[str, Any]) -> dict[str, Any]:
    """The long recipe's data with keys replaced; None takes a key out."""
    data = {**yaml.safe_load(LONG), **change}
    return {key: value for key, value in data.items() if value is not None}
