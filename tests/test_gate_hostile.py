"""Reports that must not ship: real ones, each spoilt in one way, judged from their file as `gate` does.

What was measured wrongly, isn't there, belongs to another run or lies beyond a limit by one bit gives no ship and says
why; and what only looks strange, but is true, does ship.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import judge_again
from pipeline.errors import UsageError
from pipeline.measured import Distribution
from pipeline.results import CostResult, QualityResult, VariantReport
from pipeline.roofline import dollars_per_million_tokens
from pipeline.speed_results import DeviceSpeed, SpeedRow
from tests import result_builders as build

RULES: list[dict[str, Any]] = [
    {"kind": "max_memory", "fraction": 0.5},
    {"kind": "min_speedup", "factor": 2.0},
    {"kind": "min_throughput", "tokens_per_s": 40.0},
    {"kind": "min_bandwidth_share", "share": 0.5},
    {"kind": "max_ttft", "seconds": 0.21},
    {"kind": "max_tpot", "seconds": 0.05, "percentile": "p99"},
    {"kind": "max_cost", "dollars_per_million_output_tokens": 7.0},
    {"kind": "max_energy", "joules_per_output_token": 1.5},
    {"kind": "min_capacity", "factor": 2.0},
    {"kind": "max_quality_drop", "points": 3.0, "tasks": ["piqa"]},
    {"kind": "max_perplexity_increase", "percent": 1.0},
    {"kind": "min_score", "score": 0.6, "tasks": ["piqa"]},
    {"kind": "max_length_drift", "percent": 10.0},
]
RIGHT, WRONG = 330, 70
NATS = [230.0 + 7 * (i % 5) for i in range(24)]
LENGTHS = [20.0 + (i % 9) for i in range(24)]


def row(batch_size: int, decode: float) -> SpeedRow:
    return build.speed_row(batch_size, decode, joules_per_output_token=Distribution.of([1.0, 1.1, 1.2]))


def quality(name: str) -> QualityResult:
    """Three tasks: int8 loses 2 of 400 answers and gains 1, perplexity rises by 0.1 %, answers are as long."""
    answers = [1.0] * RIGHT + [0.0] * WRONG
    nats, lengths = NATS, LENGTHS
    if name == "int8":
        answers = [0.0] * 2 + [1.0] * (RIGHT - 2) + [1.0] + [0.0] * (WRONG - 1)
        nats = [one * (1 + 1e-4 + 1e-5 * (i % 3)) for i, one in enumerate(NATS)]
        lengths = [one + (i % 3 - 1) for i, one in enumerate(LENGTHS)]
    written = build.task(
        "recite",
        [1.0] * 24,
        output_type="generate_until",
        output_tokens=Distribution.of(lengths),
        truncated_outputs=0,
    )
    return build.quality(
        build.task("piqa", answers, chance_score=0.5), build.rolling_task("passages", nats), written
    )


def arm(name: str, decode: float) -> VariantReport:
    rate = 4 * decode
    price = dollars_per_million_tokens(rate, dollars_per_hour=3.6)
    return build.variant_report(
        build.variant(
            name,
            speed=build.speed(name, [row(1, decode), row(8, rate)]),
            quality=quality(name),
            cost=CostResult(dollars_per_hour=3.6, batch_size=8, dollars_per_million_output_tokens=price),
        )
    )


@cache
def sound() -> str:
    """A report that ships, as JSON."""
    arms = (arm("fp16", 20.0), arm("int8", 40.0))
    recipe = {
        "model": {"id": "tiny/model"},
        "baseline": "fp16",
        "variants": [{"name": one.name, "quantizer": one.quantizer, "required": True} for one in arms],
        "workload": {"prompt_tokens": 128, "new_tokens": 32},
        "speed": {"batch_sizes": [1, 8]},
        "capacity": {"context_tokens": 1024},
        "quality": {"tasks": ["piqa", "passages", "recite"], "limit": None, "seed": 1234},
        "gate": RULES,
    }
    device = DeviceSpeed(read_bandwidth_bytes_per_s=2e10 / 0.6, matmul_flops_per_s={"float32": 1e11})
    return build.report(*arms, resolved_recipe=recipe, device=device).to_json()


Change = Callable[[Any], None]


def _place(data: Any, path: str) -> tuple[Any, Any]:
    """The container and key that a path such as `int8.speed.rows.0.noisy` names; variants by their name."""
    keys = path.split(".")
    named = {variant["name"]: variant for variant in data["variants"]}
    here = named[keys.pop(0)] if keys[0] in named else data
    for key in keys[:-1]:
        here = here[int(key)] if isinstance(here, list) else here[key]
    return here, int(keys[-1]) if isinstance(here, list) else keys[-1]


def put(path: str, value: Any) -> Change:
    def change(data: Any) -> None:
        here, key = _place(data, path)
        here[key] = value

    return change


def drop(path: str) -> Change:
    def change(data: Any) -> None:
        here, key = _place(data, path)
        del here[key]

    return change


def times(path: str, factor: float) -> Change:
    """A number, or every number of a distribution, multiplied."""

    def change(data: Any) -> None:
        here, key = _place(data, path)
        here[key] = _scaled(here[key], factor)

    return change


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, list):
        return [one * factor for one in value]
    if isinstance(value, dict):
        return {key: one if key == "cv_percent" else _scaled(one, factor) for key, one in value.items()}
    return value * factor


def both(*changes: Change) -> Change:
    def change(data: Any) -> None:
        for one in changes:
            one(data)

    return change


def rule(number: int, **fields: Any) -> Change:
    """Other fields of one rule."""
    return both(*(put(f"resolved_recipe.gate.{number}.{name}", value) for name, value in fields.items()))


def judged(tmp_path: Path, text: str) -> tuple[str, str]:
    """The verdict and everything that is said for it; "refused" where the file is no report."""
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    try:
        report = judge_again(path, rules=None)
    except UsageError as error:
        return "refused", str(error)
    assert report.verdict == "error" or all(
        variant.verdict in ("ship", report.verdict) for variant in report.variants if variant.required
    )
    return report.verdict, "\n".join(report.because)


def spoilt(change: Change) -> str:
    data = copy.deepcopy(json.loads(sound()))
    change(data)
    return json.dumps(data)


ROW, BASE = "int8.speed.rows.0", "fp16.speed.rows.0"
PIQA, BASE_PIQA = "int8.quality.tasks.piqa", "fp16.quality.tasks.piqa"

REFUSED: dict[str, tuple[Change, str]] = {
    # numbers that are none
    "a rate that is NaN": (put(f"{ROW}.decode_tokens_per_s", math.nan), "finite number"),
    "an infinite rate": (put(f"{ROW}.decode_tokens_per_s", math.inf), "finite number"),
    "a rate as text": (put(f"{ROW}.decode_tokens_per_s", "40.0"), "valid number"),
    "a score as text": (put(f"{PIQA}.metrics.acc.score", "0.82"), "valid number"),
    "a score that is NaN": (put(f"{PIQA}.metrics.acc.score", math.nan), "finite number"),
    "an answer that is NaN": (put(f"{PIQA}.samples.3.metrics.acc", math.nan), "finite number"),
    "an answer as text": (put(f"{PIQA}.samples.3.metrics.acc", "1.0"), "valid number"),
    "an answer as a boolean": (put(f"{PIQA}.samples.3.metrics.acc", True), "valid number"),
    "bytes as text": (put("int8.memory.weight_bytes_resident", "1"), "valid integer"),
    "bytes that fit no count": (put("int8.memory.weight_bytes_resident", 10**30), "too large"),
    "a list for a number": (put("int8.capacity.measured_sequences", [20]), "valid integer"),
    "an infinite energy": (put(f"{ROW}.joules_per_output_token.median", -math.inf), "finite number"),
    # what isn't there
    "no rate": (put(f"{ROW}.decode_tokens_per_s", None), "decode rate at batch size 1 was not measured"),
    "no score": (put(f"{PIQA}.metrics.acc.score", None), "not a finite number"),
    "no metric": (put(f"{PIQA}.metrics", {}), "has no metric acc"),
    "an answer without its metric": (
        both(put(f"{PIQA}.samples.3.metrics", {}), put(f"{PIQA}.metrics.acc.score", (RIGHT - 2) / 399)),
        "1 of 400 documents of the candidate have no acc",
    ),
    "no time to first token": (put(f"{ROW}.ttft_s", None), "time to first token was not measured"),
    "no time per token": (put(f"{ROW}.tpot_s", None), "was not measured"),
    "no percentile": (put(f"{ROW}.itl_p99_s", None), "p99 of the gaps between tokens was not measured"),
    "no share": (put(f"{ROW}.bandwidth_share", None), "no share of the bandwidth"),
    "no energy": (put(f"{ROW}.joules_per_output_token", None), "energy was not measured"),
    "no price": (put("int8.cost", None), "no price was worked out"),
    "no speed": (put("int8.speed", None), "the speed stage gave no result"),
    "no capacity": (put("int8.capacity", None), "the capacity stage gave no result"),
    "no quality": (put("int8.quality", None), "the quality stage gave no result"),
    "no memory at all": (both(put("int8.memory", None), put("int8.speed", None)), "memory was not measured"),
    "no rows": (put("int8.speed.rows", []), "not among the measured batch sizes (none)"),
    "one row lost that no rule reads": (drop("int8.speed.rows.1"), "no speed row of batch size 8"),
    "no tasks": (put("int8.quality.tasks", {}), "no result of the candidate"),
    "one task lost": (drop("int8.quality.tasks.piqa"), "piqa: no result of the candidate"),
    "one task lost in both arms": (
        both(
            drop("int8.quality.tasks.recite"),
            drop("fp16.quality.tasks.recite"),
            drop("resolved_recipe.gate.12"),
        ),
        "no result of the task recite, which the recipe asks for",
    ),
    "a stage lost that no rule reads": (
        both(put("int8.capacity", None), put("fp16.capacity", None), drop("resolved_recipe.gate.8")),
        "no result of the capacity stage, and no failure",
    ),
    "no documents": (
        both(
            *(put(f"{one}.samples", []) for one in (PIQA, BASE_PIQA)),
            *(put(f"{one}.documents", 0) for one in (PIQA, BASE_PIQA)),
        ),
        "no documents",
    ),
    "no rules": (put("resolved_recipe.gate", []), "the gate has no rules"),
    "rules that are none": (put("resolved_recipe.gate", None), "holds no rules"),
    "a rule of an unknown kind": (put("resolved_recipe.gate", [{"kind": "ship_it"}]), "holds no rules"),
    "no variants": (put("variants", []), "the baseline has no results"),
    "the baseline alone": (lambda data: data["variants"].pop(1), "int8: the recipe's variant has no results"),
    "the candidate alone": (lambda data: data["variants"].pop(0), "fp16: the baseline has no results"),
    "a required variant lost, another ships": (
        lambda data: data["resolved_recipe"]["variants"].append({"name": "int4", "required": True}),
        "int4: the recipe's variant has no results",
    ),
    "an unknown key": (put(f"{ROW}.decode_tokens_per_sec", 40.0), "Extra inputs"),
    "a key lost": (drop("int8.speed.engine"), "Field required"),
    # partial failures
    "a stage that failed": (
        put("int8.failures", [{"stage": "quality", "reason": "failed", "message": "worker died"}]),
        "quality failed: worker died",
    ),
    "a stage of the baseline that failed": (
        put("fp16.failures", [{"stage": "speed", "reason": "out_of_memory", "message": "no room"}]),
        "speed out of memory: no room",
    ),
    "an interrupted run": (put("interrupted", True), ""),
    "a void row": (both(put(f"{ROW}.outcome", "void"), put(f"{ROW}.because", "clock")), "void: clock"),
    "a row out of memory": (put(f"{ROW}.outcome", "out_of_memory"), "out of memory"),
    "a void task": (put(f"{PIQA}.void", "12 prompts are empty"), "void, 12 prompts are empty"),
    "logits that are not finite": (put("int8.quality.logits_finite", False), "logits are not finite"),
    "fewer tokens than asked for": (put(f"{ROW}.produced_tokens", 31), "31 tokens were produced"),
    "a capacity search that failed": (
        put("int8.capacity.limited_by", "failure"),
        "capacity was not measured",
    ),
    "a variant made optional": (put("int8.required", False), "no required candidate was judged"),
    # what can't be true
    "no bytes": (put("int8.memory.weight_bytes_resident", 0), "implausible"),
    "negative bytes": (put("int8.memory.weight_bytes_resident", -5), "implausible"),
    "one byte": (put("int8.memory.weight_bytes_resident", 1), "can't save more than 2 times"),
    "no seconds": (times(f"{ROW}.ttft_s", 0.0), "implausible, a time to first token of 0.0 s"),
    "negative seconds": (times(f"{ROW}.tpot_s", -1.0), "implausible, a time per token"),
    "a median outside its samples": (put(f"{ROW}.ttft_s.median", 1e-9), "implausible, a time to first token"),
    "quartiles the wrong way round": (
        put(f"{ROW}.tpot_s.lower_quartile", 0.9),
        "implausible, a time per token",
    ),
    "no samples": (put(f"{ROW}.tpot_s.samples", []), "implausible, a time per token"),
    "ten times the roof, told": (
        put(f"{ROW}.bandwidth_share", 6.0),
        "6.00 times the measured memory bandwidth",
    ),
    "ten times the roof, untold": (
        both(times(f"{ROW}.decode_tokens_per_s", 10), times(f"{ROW}.tpot_s", 0.1)),
        "mean a memory of",
    ),
    "ten times the roof, in every row": (
        both(
            *(times(f"int8.speed.rows.{n}.decode_tokens_per_s", 10) for n in (0, 1)),
            *(times(f"int8.speed.rows.{n}.tpot_s", 0.1) for n in (0, 1)),
        ),
        "mean a memory of",
    ),
    "a rate that its times deny": (times(f"{ROW}.decode_tokens_per_s", 3), "implausible, its times say"),
    "percentiles that fall": (put(f"{ROW}.itl_p99_s", 0.001), "implausible, gaps of"),
    "a prefill over the arithmetic": (
        put(f"{ROW}.prefill_flops_share", 1.2),
        "1.20 times the measured FLOP/s",
    ),
    "no joules": (times(f"{ROW}.joules_per_output_token", 0.0), "implausible, 0.0 J a token"),
    "a price that its rate denies": (put("int8.cost.dollars_per_million_output_tokens", 0.01), "come to $"),
    "another hour's price": (put("int8.cost.dollars_per_hour", 0.1), "different prices"),
    "a score that its answers deny": (put(f"{PIQA}.metrics.acc.score", 0.99), "its 400 documents come to"),
    "a score that rose by 16 points": (
        both(
            *(put(f"{PIQA}.samples.{n}.metrics.acc", 1.0) for n in range(400)),
            *(put(f"{BASE_PIQA}.samples.{n}.metrics.acc", float(n < 300)) for n in range(400)),
            put(f"{PIQA}.metrics.acc.score", 1.0),
            put(f"{BASE_PIQA}.metrics.acc.score", 0.75),
        ),
        "implausible, acc rose",
    ),
    "more sequences than memory holds": (put("int8.capacity.measured_sequences", 200), "of a budget of"),
    "two rows of a batch size": (
        lambda data: data["variants"][1]["speed"]["rows"].append(data["variants"][1]["speed"]["rows"][0]),
        "two rows of that batch size",
    ),
    "an answer of negative length": (
        put("int8.quality.tasks.recite.output_tokens.samples.0", -3.0),
        "-3 tokens",
    ),
    "a positive log-likelihood": (
        put("int8.quality.tasks.passages.samples.0.metrics.log_likelihood_nats", 4.0),
        "positive log-likelihood",
    ),
    "the baseline's own log-likelihoods": (
        lambda data: data["variants"][1]["quality"]["tasks"].update(
            passages=data["variants"][0]["quality"]["tasks"]["passages"]
        ),
        "equals the baseline's to the last bit",
    ),
    # a direction that was swapped
    "direction swapped in the candidate": (put(f"{PIQA}.metrics.acc.higher_is_better", False), "implausible"),
    "direction swapped in both, and a loss": (
        both(
            *(put(f"{one}.metrics.acc.higher_is_better", False) for one in (PIQA, BASE_PIQA)),
            *(put(f"{PIQA}.samples.{n}.metrics.acc", 0.0) for n in range(40)),
            put(f"{PIQA}.metrics.acc.score", (RIGHT - 39) / 400),
        ),
        "less acc is better, but it is a share of right answers",
    ),
    # a baseline of another run
    "a baseline of another limit": (put("fp16.quality.limit", 50), "limit 50 vs None"),
    "both of another limit than the recipe's": (
        both(put("fp16.quality.limit", 50), put("int8.quality.limit", 50)),
        "evaluated with limit 50, the recipe's is None",
    ),
    "a baseline of other shots": (put(f"{BASE_PIQA}.num_fewshot", 5), "num_fewshot 5 vs 0"),
    "a baseline of another seed": (put("fp16.quality.seed", 7), "seed 7 vs 1234"),
    "another task file": (put(f"{BASE_PIQA}.task_hash", "old"), "task_hash 'old' vs 'task'"),
    "other prompts": (put(f"{BASE_PIQA}.prompts_hash", "old"), "prompts_hash 'old' vs 'prompts'"),
    "other data": (put(f"{BASE_PIQA}.data_hash", "old"), "data_hash 'old' vs 'data'"),
    "another document": (put(f"{BASE_PIQA}.samples.3.doc_hash", "other"), "1 of 400 documents differ"),
    "a document lost": (
        both(drop(f"{BASE_PIQA}.samples.3"), put(f"{BASE_PIQA}.documents", 399)),
        "399 vs 400 documents",
    ),
    "another chat template": (put("fp16.quality.chat_template_hash", "c"), "chat_template_hash 'c' vs None"),
    "another tokenizer": (put("fp16.quality.tokenizer_hash", "t"), "tokenizer_hash 't' vs 'tokenizer'"),
    "another engine in quality": (put("fp16.quality.engine", "llama_cpp"), "engine 'llama_cpp'"),
    "another harness": (put("fp16.quality.harness_version", "0.4.9"), "harness_version '0.4.9' vs '0.4.13'"),
    "another version of torch": (put("fp16.checkpoint.versions.torch", "2.9.1"), "torch 2.9.1 vs 2.13.0"),
    "another machine, by its name": (put("fp16.speed.device", "Xeon"), "different devices: Xeon and cpu"),
    "another machine, by its bandwidth": (
        both(*(times(f"fp16.speed.rows.{n}.bandwidth_share", 0.8) for n in (0, 1))),
        "they are of another stage or machine",
    ),
    "another engine": (put("fp16.speed.engine", "llama_cpp"), "different engines"),
    "another workload": (put(f"{BASE}.prompt_tokens", 64), "different workloads: 64+32"),
    "both of another workload than the recipe's": (
        put("resolved_recipe.workload", {"prompt_tokens": 512, "new_tokens": 32}),
        "timed with prompt_tokens 128, the recipe's workload has 512",
    ),
    "another context length": (put("fp16.capacity.context_tokens", 64), "different context_tokens"),
    "another memory budget": (put("fp16.capacity.budget_bytes", 10**10), "different budget_bytes"),
    "another baseline than the recipe's": (put("resolved_recipe.baseline", "bf16"), "baseline is bf16"),
    "a baseline that is quantized": (put("fp16.precision", "int8"), "can't be the baseline"),
    "a label that is another checkpoint's": (
        put("int8.precision", "int4"),
        "labelled int4, its checkpoint int8",
    ),
    "a checkpoint of another quantizer": (
        put("resolved_recipe.variants.1.quantizer", {"kind": "quanto", "weights": "int4"}),
        "was made by the quantizer",
    ),
    "a variant that the recipe doesn't have": (
        put("resolved_recipe.variants.1.name", "q8"),
        "q8: the recipe's variant",
    ),
    "a baseline at chance": (
        both(
            *(
                put(f"{one}.samples.{n}.metrics.acc", float(n % 2))
                for one in (PIQA, BASE_PIQA)
                for n in range(400)
            ),
            *(put(f"{one}.metrics.acc.score", 0.5) for one in (PIQA, BASE_PIQA)),
        ),
        "the baseline is at chance",
    ),
    # undecided
    "noise across the limit": (put(f"{ROW}.noisy", True), "spread reaches across the limit"),
    "a search of the baseline that ended at its ceiling": (
        put("fp16.capacity.limited_by", "ceiling"),
        "undecided",
    ),
    "a drop that the documents can't exclude": (rule(9, points=0.5), "undecided against the limit of 0.5"),
    "a perplexity that the documents can't exclude": (
        times("int8.quality.tasks.passages.samples.0.metrics.log_likelihood_nats", 1.2),
        "undecided against the limit of 1 %",
    ),
    # one bit beyond the limit
    "a fraction one bit too large": (rule(0, fraction=math.nextafter(0.5, 0)), "max_memory fail"),
    "one byte too many": (put("int8.memory.weight_bytes_resident", 500_000_001), "max_memory fail"),
    "a speed-up one bit too small": (rule(1, factor=math.nextafter(2.0, 3)), "min_speedup fail"),
    "a rate one bit too small": (rule(2, tokens_per_s=math.nextafter(40.0, 41)), "min_throughput fail"),
    "a first token one bit too late": (rule(4, seconds=math.nextafter(0.21, 0)), "max_ttft fail"),
    "a factor of capacity one bit too small": (rule(8, factor=math.nextafter(2.0, 3)), "min_capacity fail"),
    "a factor of capacity across engines": (
        both(put("fp16.speed.engine", "llama_cpp"), rule(1, across_engines=True)),
        "min_capacity missing: different engines, llama_cpp for the baseline and transformers for the candidate",
    ),
    "one sequence too few": (put("int8.capacity.measured_sequences", 19), "min_capacity fail"),
    "a rate that rounds to the limit": (
        both(
            put(f"{ROW}.decode_tokens_per_s", 39.999999),
        ),
        "min_speedup fail",
    ),
    "a null run that the recipe asks for and isn't there": (
        put("resolved_recipe.quality.null_batch_size", 4),
        "fp16: no null run, which the recipe asks for",
    ),
    # plainly too much
    "answers that got longer by half": (
        times("int8.quality.tasks.recite.output_tokens.samples", 1.5),
        "beyond ±10 %",
    ),
    "a floor that isn't reached": (rule(11, score=0.95), "surely under the floor"),
    "a floor that isn't surely reached": (rule(11, score=0.82), "undecided against the floor"),
}
"""Name → what is changed, and what is said of it."""


def test_the_set_is_large_and_its_report_ships_as_it_is(tmp_path: Path) -> None:
    assert len(REFUSED) >= 100
    assert judged(tmp_path, sound()) == ("ship", "int8: ship")


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_spoilt_ships_and_the_reason_is_told(tmp_path: Path, name: str) -> None:
    change, reason = REFUSED[name]
    verdict, said = judged(tmp_path, spoilt(change))
    assert verdict in ("refused", "error", "no-ship", "inconclusive")
    assert reason in said


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "NaN", '"ship"', "{", "\x00"])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    assert judged(tmp_path, text)[0] == "refused"


def test_a_verdict_that_was_written_into_the_file_counts_for_nothing(tmp_path: Path) -> None:
    change = both(
        put("verdict", "ship"), put("int8.verdict", "ship"), put("int8.findings", []), rule(0, fraction=0.4)
    )
    assert judged(tmp_path, spoilt(change))[0] == "no-ship"


def with_a_failed_int4(data: Any) -> None:
    """An optional variant, declared and without any result."""
    failed: dict[str, Any] = {
        "required": False,
        "speed": None,
        "memory": None,
        "checkpoint": None,
        "capacity": None,
    }
    report = build.variant_report(build.variant("int4", **failed), verdict="error")
    data["resolved_recipe"]["variants"].append({"name": "int4", "required": False})
    data["variants"].append(json.loads(report.to_json()))


SHIPS: dict[str, Change] = {
    "two runs in another order": lambda data: data["variants"].reverse(),
    "other text encodings of the same numbers": put(f"{ROW}.decode_tokens_per_s", 4.0e1),
    "another version of the tokenizers' package": both(
        put("fp16.checkpoint.versions.tokenizers", "0.22"), put("int8.checkpoint.versions.tokenizers", "0.23")
    ),
    "a library that only one quantizer needs": put("int8.checkpoint.versions.bitsandbytes", "0.50"),
    "an optional variant that failed": with_a_failed_int4,
    "noise that stays on one side": both(
        put(f"{ROW}.noisy", True),
        *(rule(1, factor=1.5), rule(2, tokens_per_s=20.0), rule(4, seconds=0.3)),
    ),
    "other engines where the rule allows them": both(
        put("fp16.speed.engine", "llama_cpp"), rule(1, across_engines=True), rule(8, across_engines=True)
    ),
    "answers in another order": lambda data: data["variants"][1]["quality"]["tasks"]["piqa"][
        "samples"
    ].reverse(),
    "a verdict of error written into the file": both(put("verdict", "error"), put("int8.verdict", "error")),
    "a drop judged in percent of the score": lambda data: data["resolved_recipe"]["gate"].__setitem__(
        9, {"kind": "max_quality_drop", "percent": 4.0, "tasks": ["piqa"]}
    ),
    "a candidate that is slightly better": both(
        put(f"{PIQA}.samples.0.metrics.acc", 1.0), put(f"{PIQA}.metrics.acc.score", (RIGHT) / 400)
    ),
    "memory one byte under the limit": put("int8.memory.weight_bytes_resident", 499_999_999),
}


@pytest.mark.parametrize("name", SHIPS)
def test_what_only_looks_strange_ships(tmp_path: Path, name: str) -> None:
    verdict, said = judged(tmp_path, spoilt(SHIPS[name]))
    assert verdict == "ship", said
