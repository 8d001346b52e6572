"""What is wrong with a recipe is said at once, each problem on one line with its place and the way out."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, load_recipe

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "recipes" / "demo.yaml"
GOOD = """\
model: some/model
precisions: [fp16, int8]
speed: {batch_sizes: [1, 8]}
capacity: {context_tokens: 256}
quality: {tasks: [piqa], limit: 50}
gate:
  - {kind: max_memory, fraction: 0.6}
"""


def refusal(folder: Path, text: str | bytes) -> str:
    """The message that a recipe of this text is refused with."""
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.exit_code == 2
    assert str(path) in str(caught.value)
    return str(caught.value)


def faults(folder: Path, text: str) -> list[str]:
    """The lines of the refusal after the heading, which counts them."""
    heading, *lines = refusal(folder, text).splitlines()
    assert heading.endswith(f"{len(lines)} problem{'s' if len(lines) != 1 else ''}")
    return [line.strip() for line in lines]


def only_fault(folder: Path, text: str) -> str:
    found = faults(folder, text)
    assert len(found) == 1, found
    return found[0]


def test_the_good_recipe_is_good(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_recipe(path).recipe.precisions == ("fp16", "int8")


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "place", "said"),
    [
        ("limit: 50", "limit: yes", "line 5: quality.limit", "'yes'"),
        ("limit: 50", "limit: true", "line 5: quality.limit", "True"),
        ("limit: 50", "limit: none", "line 5: quality.limit", "'none'"),
        ("limit: 50", "limit: 12:30", "line 5: quality.limit", "'12:30'"),
        ("limit: 50", "limit: 50.5", "line 5: quality.limit", "50.5"),
        ("limit: 50", "limit: '50'", "line 5: quality.limit", "'50'"),
        ("limit: 50", "limit: 0", "line 5: quality.limit", "greater than 0"),
        ("limit: 50", "seed: -1", "line 5: quality.seed", "greater than or equal to 0"),
        ("limit: 50", "seed: 4294967296", "line 5: quality.seed", "less than 4294967296"),
        ("limit: 50", "apply_chat_template: off", "line 5: quality.apply_chat_template", "true or false"),
        ("[piqa]", "piqa", "line 5: quality.tasks", "expected a list, found 'piqa'; write [piqa]"),
        ("[piqa]", "[]", "line 5: quality.tasks", "at least one item"),
        ("[piqa]", "[1]", "line 5: quality.tasks[0]", "expected text, found 1; put it in quotes"),
        ("[1, 8]", "[1, no]", "line 3: speed.batch_sizes[1]", "'no'"),
        ("[1, 8]", "[1], prompt_tokens: [128, 0]", "line 3: speed.prompt_tokens[1]", "greater than 0"),
        ("[1, 8]", "[1], prompt_tokens: []", "line 3: speed.prompt_tokens", "at least one item"),
        ("[1, 8]", "[1], prompt_tokens: 512", "line 3: speed.prompt_tokens", "write [512]"),
        (
            *("[1, 8]", "[1], prefill_chunk_tokens: [256]"),
            *("line 3: speed.prefill_chunk_tokens", "cuts the prompts of speed.prompt_tokens"),
        ),
        (
            *("[1, 8]", "[1], prompt_tokens: [64, 256], prefill_chunk_tokens: [128, 256]"),
            *("line 3: speed.prefill_chunk_tokens[1]", "no prompt of speed.prompt_tokens is longer than 256"),
        ),
        (
            *("[1, 8]", "[1], prompt_tokens: [64], prefill_chunk_tokens: [0]"),
            *("line 3: speed.prefill_chunk_tokens[0]", "greater than 0"),
        ),
        (
            *("[1, 8]", "[1], prompt_tokens: [64], prefill_chunk_tokens: [8, 8]"),
            *("line 3: speed.prefill_chunk_tokens[1]", "8 stands twice"),
        ),
        ("[1, 8]", "[1], context_tokens: [-1]", "line 3: speed.context_tokens[0]", "greater than 0"),
        ("[1, 8]", "[1], context_tokens: [4k]", "line 3: speed.context_tokens[0]", "'4k'"),
        ("[1, 8]", "[1], contxt_tokens: [4]", "line 3: speed.contxt_tokens", "did you mean 'context_tokens'"),
        ("[fp16, int8]", "[fp16, no]", "line 2: precisions[1]", "allowed: fp32, fp16, bf16, int8"),
        ("[fp16, int8]", "[fp16, int9]", "line 2: precisions[1]", "did you mean 'int8'"),
        ("[fp16, int8]", "[fp16, FP16]", "line 2: precisions[1]", "stands twice"),
        ("[fp16, int8]", "[int8, int4]", "line 2: precisions", "16-bit baseline"),
        ("[fp16, int8]", "INT4", "line 2: precisions", "expected a list, found 'INT4'; write [INT4]"),
        ("0.6", "1e9999", "line 7: gate[0].fraction", "'1e9999' is not a finite number"),
        ("0.6", ".nan", "line 7: gate[0].fraction", "'.nan' is not a finite number"),
        ("0.6", "-.inf", "line 7: gate[0].fraction", "'-.inf' is not a finite number"),
        ("0.6", "0,6", "line 7: gate[0]", "6"),
        ("0.6", "'0.6'", "line 7: gate[0].fraction", "'0.6'"),
        ("0.6", "true", "line 7: gate[0].fraction", "True"),
        ("0.6", "0.6, bytes: 7", "line 7: gate[0]", "exactly one of fraction or bytes"),
        ("fraction: 0.6", "of: resident", "line 7: gate[0]", "neither is given"),
        ("model: some/model", "model: {id: a/b, revision: 1234567}", "line 1: model.revision", "1234567"),
        ("model: some/model", "model: {id: a/b, revision: 25921e05}", "line 1: model.revision", "25921e05;"),
        ("model: some/model", "model: [a/b]", "line 1: model", "keys and values"),
        ("model: some/model", "model: {id: a/b, weights: trianed}", "line 1: model.weights", "'trained'"),
        (
            "capacity: {context_tokens: 256}",
            "workload: {prompt_tokens: '4,096'}",
            "line 4: workload",
            "4,096",
        ),
        ("capacity: {context_tokens: 256}", "hardware: h100-xsm", "line 4: hardware", "'h100-sxm'"),
        ("context_tokens: 256", "context_tokens: 64", "line 4: capacity.context_tokens", "new_tokens"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_what_is_allowed(
    tmp_path: Path, before: str, after: str, place: str, said: str
) -> None:
    assert GOOD.count(before) == 1
    found = [line for line in faults(tmp_path, GOOD.replace(before, after)) if line.startswith(place)]
    assert found, "the place is named"
    assert said in found[0]


# --- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "path", "hint"),
    [
        ("quality:", "qualty:", "line 5: qualty: unknown key", "'quality'"),
        ("limit: 50", "limt: 50", "line 5: quality.limt: unknown key", "'limit'"),
        ("fraction:", "fractoin:", "line 7: gate[0].fractoin: unknown key", "'fraction'"),
        ("kind: max_memory", "kind: max_memry", "line 7: gate[0]: unknown kind", "'max_memory'"),
        ("[1, 8]}", "[1], engine: {kind: transfomers}}", "line 3: speed.engine", "'transformers'"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_one(
    tmp_path: Path, before: str, after: str, path: str, hint: str
) -> None:
    found = [line for line in faults(tmp_path, GOOD.replace(before, after)) if line.startswith(path)]
    assert len(found) == 1
    assert hint in found[0]


def test_the_engine_s_and_the_quantizer_s_fields_are_checked_in_their_place(tmp_path: Path) -> None:
    variant = "{name: x, quantizer: {kind: quanto, wieghts: int8}, engine: {kind: transformers, cmpile: 1}}"
    text = GOOD.replace("precisions: [fp16, int8]", f"variants: [{{name: fp16}}, {variant}]")
    found = faults(tmp_path, text)
    assert any(
        line.startswith("line 2: variants[1].quantizer.wieghts: unknown key; did you") for line in found
    )
    assert any(line.startswith("line 2: variants[1].quantizer.weights: is missing") for line in found)
    assert any(line.startswith("line 2: variants[1].engine.cmpile: unknown key") for line in found)


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    assert only_fault(tmp_path, f"{GOOD}capacity: {{context_tokens: 512}}\n") == (
        "line 8: capacity: the key stands twice (first on line 4)"
    )


@pytest.mark.parametrize("key", ["1", "true", "null", "[a, b]", "{a: b}"])
def test_a_key_that_is_not_text_is_refused(tmp_path: Path, key: str) -> None:
    assert "must be plain text" in only_fault(tmp_path, f"{GOOD}? {key}\n: x\n")


def test_merge_keys_are_refused(tmp_path: Path) -> None:
    text = GOOD.replace("speed: {", "speed: &s {") + "workload: {<<: *s}\n"
    assert "merge keys" in only_fault(tmp_path, text)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{kind: max_memory, fraction: 65%}", "found '65%'; write 0.65"),
        ("{kind: max_perplexity_increase, percent: 1.5 %}", "found '1.5 %'; write 1.5"),
    ],
)
def test_a_percent_sign_is_answered_with_the_number_that_the_field_wants(
    tmp_path: Path, rule: str, said: str
) -> None:
    assert only_fault(tmp_path, GOOD.replace("{kind: max_memory, fraction: 0.6}", rule)).endswith(said)


def test_a_format_that_is_no_precision_is_shown_the_way_to_quantizers(tmp_path: Path) -> None:
    assert only_fault(tmp_path, GOOD.replace("int8", "Q4_K_M")).endswith("use 'variants'")
    assert only_fault(tmp_path, GOOD.replace("int8", "int9")).endswith("fp8, fp4)")


# --- the whole at once -----------------------------------------------------------------------------------


def test_schema_errors_and_contradictions_come_in_one_report(tmp_path: Path) -> None:
    text = """\
model: {id: some/model, weights: random}
precisions: [int8, int8]
variants: [{name: fp16}]
hardware: h100
baseline: fp32
quality: {tasks: [piqa], limits: {copa: 5}, limit: many}
evaluaton: {}
gate:
  - {kind: min_speedup, factor: fast}
  - {kind: max_memory}
  - {kind: max_quality_drop, points: 2.0, percent: 3.0}
  - {kind: min_serving_throughput, tokens_per_s: 10.0, concurrency: 2}
"""
    found = "\n".join(faults(tmp_path, text))
    for said in (
        "give either 'precisions' (short form) or 'variants' (long form)",
        "line 1: model.config: random weights need the architecture",
        "line 2: precisions: a 16-bit baseline is needed",
        "line 2: precisions[1]: 'int8' stands twice",
        "line 3: variants: a candidate is needed",
        "line 4: hardware: 'h100' is not a device",
        "line 5: baseline: 'fp32' is not",
        "line 6: quality: random weights have no quality",
        "line 6: quality.limits.copa: 'copa' is not among quality.tasks",
        "line 6: quality.limit: should be a valid integer; found 'many'",
        "line 7: evaluaton: unknown key",
        "line 9: gate[0]: min_speedup needs the section 'speed'",
        "line 9: gate[0].factor: should be a valid number; found 'fast'",
        "line 10: gate[1]: max_memory needs exactly one of",
        "line 11: gate[2]: max_quality_drop needs exactly one of points or percent",
        "line 12: gate[3]: min_serving_throughput needs the section 'serving'",
    ):
        assert said in found


def test_the_report_goes_down_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("0.6", ".nan").replace("limit: 50", "limit: x").replace("[1, 8]", "[0]")
    lines = [int(fault.split()[1].rstrip(":")) for fault in faults(tmp_path, text)]
    assert lines == sorted(lines)
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("before", "after", "echo"),
    [
        # A list whose items are all wrong isn't called empty as well,
        ("fraction: 0.6", "fraction: x", "at least one item"),
        # a threshold that can't be read isn't called missing as well,
        ("fraction: 0.6", "fraction: .nan", "exactly one"),
        # and a variant without quantizer is told once.
        ("precisions: [fp16, int8]", "variants: [{name: fp16}, {name: int8}]", "is missing"),
    ],
)
def test_one_mistake_is_one_problem(tmp_path: Path, before: str, after: str, echo: str) -> None:
    assert echo not in only_fault(tmp_path, GOOD.replace(before, after))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("variants: [{name: fp16}, {name: a}]", "line 2: variants[1].quantizer: 'a' needs a quantizer"),
        ("variants: [{name: fp16}]", "a candidate is needed beside the baseline"),
        ("variants: [{name: int8, quantizer: {kind: quanto, weights: int8}}]", "a 16-bit baseline is needed"),
        ("variants: [{name: fp16}, {name: fp16}]", "the name of an earlier variant"),
        ("variants: [{name: fp16}, {name: bf16, required: false}]", "no candidate is required"),
        ("variants: [{name: fp16}, {name: bf16}]\nbaseline: fp61", "did you mean 'fp16'?"),
        ("variants: [{name: fp16}, {name: fp32}]\nbaseline: fp32", "an ordinary 16-bit variant is needed"),
        ("variants: [{name: ../up}, {name: fp16}]", "may hold letters, digits"),
        ("precisions: [fp16, fp32]\nbaseline: fp32", "an ordinary 16-bit variant is needed"),
        ("", "give either 'precisions' (short form) or 'variants' (long form)"),
    ],
)
def test_what_can_give_no_verdict_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in "\n".join(faults(tmp_path, GOOD.replace("precisions: [fp16, int8]", text)))


# --- files that are no recipe ----------------------------------------------------------------------------


def test_files_that_are_no_recipe_get_a_line_of_their_own_each(tmp_path: Path) -> None:
    texts = (
        "",
        "# nothing but this\n",
        "- a\n",
        "a: 1\n---\nb: 2\n",
        "just words\n",
        "a: [\n",
        b"model: caf\xe9\n",
    )
    messages = [refusal(tmp_path, text) for text in texts]
    for path in (tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        messages.append(str(caught.value))
    assert all("\n" not in message for message in messages)
    assert messages[0] == messages[1], "a comment is as empty as nothing"
    assert len(set(messages)) == len(messages) - 1
    assert "byte 10 (0xe9)" in messages[6]


def test_a_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    for depth in (60, 2_000):
        assert "nests more than 50 levels deep" in refusal(tmp_path, "[" * depth + "]" * depth)


# --- whatever else ---------------------------------------------------------------------------------------

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3.5, 1e300, 10**30, "", "no", "a\nb\x1b[31m", "x" * 5_000, "${HOME}"),
    *("\0", "\ud800", [], [1], ["a", None], {}, {"a": {"b": 1}}),
    *({"kind": "nope"}, {"kind": None}, {"kind": ["x"]}, {"kind": {"a": 1}}),
)


def test_whatever_stands_in_a_recipe_gives_a_recipe_or_a_refusal(tmp_path: Path) -> None:
    data = yaml.safe_load(DEMO.read_text("utf-8"))
    path = tmp_path / "recipe.yaml"
    refused = 0
    for seed in range(300):
        path.write_text(odd_text(data, random.Random(seed)), encoding="utf-8")
        try:
            assert isinstance(load_recipe(path).recipe, Recipe)
        except RecipeError as error:
            refused += 1
            heading, *lines = str(error).split("\n")
            assert heading.endswith("problems" if len(lines) != 1 else "problem")
            assert all(line.startswith("  ") and line.isprintable() and len(line) < 600 for line in lines)
            assert heading.split()[-2] == str(len(lines))
    assert 200 < refused < 300, "most changes are wrong, a few are not"


def odd_text(data: Any, chance: random.Random) -> str:
    """One to three random changes of the data, now and then a key twice, as JSON (which is YAML)."""
    data = copy.deepcopy(data)
    for _ in range(chance.randint(1, 3)):
        places = list(paths(data))
        if not places:
            break
        *parents, last = chance.choice(places)
        holder = data
        for part in parents:
            holder = holder[part]
        if chance.random() < 0.2:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(chance.choice(ODD_VALUES))
    text = json.dumps(data)
    return text.replace("{", '{"gate": 1, "gate": 2, ', 1) if chance.random() < 0.1 else text


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in the data but the top."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


def test_what_stands_twice_is_refused_where_it_would_be_measured_twice(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: ./m\nprecisions: [fp16, int8]\nspeed: {batch_sizes: [1, 4, 1],\n"
        "  prompt_tokens: [512, 512],\n  context_tokens: [64, 8, 64]}\n"
        "quality: {tasks: [piqa, piqa]}\ngate: [{kind: max_memory, fraction: 0.6}]\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "line 3: speed.batch_sizes[2]: 1 stands twice" in str(caught.value)
    assert "line 4: speed.prompt_tokens[1]: 512 stands twice" in str(caught.value)
    assert "line 5: speed.context_tokens[2]: 64 stands twice" in str(caught.value)
    assert "line 6: quality.tasks[1]: 'piqa' stands twice" in str(caught.value)


# --- traffic ---------------------------------------------------------------------------------------------


def traffic(text: str) -> str:
    return f"{GOOD}traffic: {{{text}}}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "requests_per_s: 0, prompt_tokens: 5, new_tokens: 5",
            "traffic.requests_per_s: should be greater than or equal to 0.0001",
        ),
        (
            "requests_per_s: 1, prompt_tokens: 0, new_tokens: 5",
            "traffic.prompt_tokens: should be greater than 0",
        ),
        ("requests_per_s: 1, prompt_tokens: 5", "traffic.new_tokens: is missing; give it, or a trace file"),
        ("requests_per_s: .nan, prompt_tokens: 5, new_tokens: 5", "'.nan' is not a finite number"),
        (
            "requests_per_s: 1, prompt_tokens: 5, new_tokens: {distribution: uniform, low: 9, high: 2}",
            "traffic.new_tokens: low must be at most high, are 9 and 2",
        ),
        (
            "requests_per_s: 1, prompt_tokens: 5, new_tokens: {distribution: unifrom, low: 2, high: 9}",
            "unknown distribution 'unifrom'; did you mean 'uniform'?",
        ),
        ("requests_per_s: 1, prompt_tokens: 5, new_tokens: {low: 2}", "the key 'distribution' is missing"),
        ("trace: a.csv, new_tokens: 5", "traffic.new_tokens: stands beside a trace"),
        ("trace: a.csv, targets: {}", "traffic.targets: holds no limit"),
        (
            "trace: a.csv, targets: {ttft_s: 1, percentile: 100}",
            "percentile: should be less than or equal to 99.9",
        ),
        ("trace: a.csv, max_sequences: 64, max_batch_tokens: 32", "64 sequences decode a token each"),
        ("trace: a.csv, efficiency: {bandwidth: 1.5}", "should be less than or equal to 1; found 1.5"),
        ("trace: a.csv, target: {ttft_s: 1}", "traffic.target: unknown key; did you mean 'targets'?"),
    ],
)
def test_traffic_that_makes_no_sense_is_refused(text: str, words: str, tmp_path: Path) -> None:
    assert words in only_fault(tmp_path, traffic(text))


def test_a_length_can_be_a_number_or_a_distribution(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    lengths = "new_tokens: {distribution: lognormal, median: 100, p95: 300, max: 500}"
    path.write_text(traffic(f"requests_per_s: 2, prompt_tokens: 70, {lengths}"), encoding="utf-8")
    found = load_recipe(path).recipe.traffic
    assert found is not None
    assert found.prompt_tokens is not None
    assert found.prompt_tokens.mean_tokens == 70
    assert found.new_tokens is not None
    assert found.new_tokens.longest_tokens == 500


def test_without_a_precision_whether_it_fits_is_undefined(tmp_path: Path) -> None:
    text = GOOD.replace("precisions: [fp16, int8]\n", "")
    assert "without a precision, a model's size and whether it fits are undefined" in only_fault(
        tmp_path, text
    )


def test_unknown_hardware_names_the_nearest_device_and_the_way_to_add_one(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, GOOD + "hardware: h200\n")
    assert "did you mean 'h200-sxm'?" in fault
    assert "or a device file such as ./my-box.yaml" in fault
