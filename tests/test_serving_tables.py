"""Serving in the report, in serving.csv, as tracked metrics and as prices; recipes and machines that can't serve."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands import write_report
from pipeline.engines.base import SessionMemory
from pipeline.errors import RecipeError
from pipeline.fleet import Targets
from pipeline.hardware import detect
from pipeline.preflight import Preflight, preflight
from pipeline.recipe import json_schema, load_recipe
from pipeline.report import comparison_table, markdown
from pipeline.results import Report, VariantReport
from pipeline.run_results import cost_of
from pipeline.scheduler import Serving
from pipeline.scripted_serving import ScriptedModel, ScriptedServing
from pipeline.serving_measure import PrefixTrace, prompts_of, serve_continuously, serve_statically
from pipeline.serving_results import ServingCell, ServingResult, ServingRow
from pipeline.serving_summary import gain_over_static, summarise_prefix, summarise_serving
from pipeline.serving_tables import COLUMNS, serving_csv, serving_markdown
from pipeline.store import Store
from pipeline.stored_reports import sealed
from pipeline.tracked_values import variant_metrics
from pipeline.traffic import Request
from tests import result_builders as build
from tests.tiny_models import write_llama

REQUESTS = (Request(0.0, 2, 3), Request(0.0, 2, 1), Request(0.0, 2, 2))
LOST = ServingRow(
    mode="continuous", load="closed", concurrency=8, outcome="out_of_memory", because="no room | at all"
)


def rows() -> tuple[ServingRow, ServingRow]:
    """Static and continuous batches of two: 1.2 and 2 output tokens a second, in steps of 1 s."""
    prompts = prompts_of(REQUESTS, vocabulary_tokens=1000, seed=1)
    limits = Serving(max_batch_tokens=8, max_sequences=2, block_tokens=4, cache_blocks=16)
    model, session = ScriptedModel(), ScriptedServing(limits)
    static = serve_statically(model, REQUESTS, prompts=prompts, batch_size=2, clock=model.clock)
    continuous = serve_continuously(session, REQUESTS, prompts=prompts, concurrency=2, clock=session.clock)
    settings: dict[str, Any] = {
        "targets": Targets(ttft_s=1.0, tpot_s=0.5),
        "memory": SessionMemory(
            weight_bytes_resident=0, kv_cache_bytes=5, peak_bytes=70_000_000, reserved_bytes=None
        ),
        "warmup_s": (3.0,),
        "max_cv_percent": 5.0,
    }
    first, second = (
        ServingCell.model_validate({"mode": mode, "load": "closed", "concurrency": 2})
        for mode in ("static", "continuous")
    )
    gain = gain_over_static([continuous], [static])
    return (
        summarise_serving([static], cell=first, **settings),
        summarise_serving([continuous], cell=second, gain=gain, **settings),
    )


def serving(**fields: Any) -> ServingResult:
    prefix = PrefixTrace(ttft_s=(0.2, 0.05, 0.05), computed_tokens=(40, 8, 8), produced=(2, 2, 2))
    defaults: dict[str, Any] = {
        "engine": "transformers",
        "device": "cpu",
        "compute_dtype": "float32",
        "static_execution": "eager",
        "continuous_execution": "paged",
        "rows": (*rows(), LOST),
        "prefix": summarise_prefix([prefix], prefix_tokens=32, fresh_tokens=8, max_cv_percent=5.0),
    }
    return ServingResult(**{**defaults, **fields})


def report(**fields: Any) -> Report:
    """A baseline that was not served and an int8 that was, at $3.6 an hour."""
    found = serving(**fields)
    cost = cost_of(None, found, dollars_per_hour=3.6)
    variant = build.variant("int8", serving=found, cost=cost)
    return plain(build.variant_report(build.variant("fp16")), build.variant_report(variant))


def plain(*variants: VariantReport) -> Report:
    """Those variants, or two that were not served."""
    return build.report(*variants, resolved_recipe={"model": {"id": "tiny/model"}})


def lines(found: Report) -> list[dict[str, str]]:
    assert {len(line) for line in csv.reader(io.StringIO(serving_csv(found)))} == {len(COLUMNS)}
    return list(csv.DictReader(io.StringIO(serving_csv(found))))


# --- Markdown --------------------------------------------------------------------------------------------


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, its own header first."""
    block = text.split(heading, 1)[1].strip().split("\n\n")[0]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()]
    return [found[0], *found[2:]]


def test_static_and_continuous_stand_in_one_table_with_the_gain() -> None:
    header, static, continuous, lost = table(markdown(report()), "## Serving\n")
    cells = dict(zip(header, continuous, strict=True))
    assert [cells[name] for name in ("variant", "mode", "load", "at once")] == [
        "int8",
        "continuous",
        "closed",
        "2",
    ]
    assert [cells[name] for name in ("requests/s", "output tok/s", "gain")] == ["1", "2.0", "1.67"]
    assert [cells[name] for name in ("TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms")] == [
        "1000.0",
        "1000.0",
        "1000.00",
    ]
    assert [cells[name] for name in ("ITL p99 ms", "latency p99 s")] == ["1000.00", "2.98"]
    assert cells["goodput/s"] == "0.333 (33 %)", "only the request of one token has no TPOT to miss"
    # $3.6 an hour are $0.001 a second: 2 tokens.
    assert (cells["$/1M output"], cells["$/1M input"]) == ("500", "500")
    assert dict(zip(header, static, strict=True))["gain"] == "–"
    assert lost[5] == "OOM"
    assert set(lost[6:]) == {"–"}


def test_where_the_time_goes_stands_in_a_table_of_its_own() -> None:
    header, _, continuous, _ = table(markdown(report()), "### Where the time goes\n")
    cells = dict(zip(header, continuous, strict=True))
    assert [cells[name] for name in ("waiting %", "prefill %", "decode %")] == ["0.0", "50.0", "50.0"]
    assert [cells[name] for name in ("steps", "mean batch", "preempted", "peak MB")] == [
        "3",
        "2.00",
        "0",
        "70",
    ]


def test_the_cached_prefix_shows_what_was_computed_and_what_it_saved() -> None:
    header, row = table(markdown(report()), "### Prefill from a cached prefix\n")
    cells = dict(zip(header, row, strict=True))
    assert [cells[name] for name in ("prefix", "fresh", "computed cold", "computed cached", "reused")] == [
        *("32", "8", "40", "8", "32")
    ]
    assert [cells[name] for name in ("cold TTFT ms", "cached TTFT ms", "times faster")] == [
        "200.0",
        "50.0",
        "4.00",
    ]


def test_a_void_prefix_shows_its_counts_no_times_and_its_reason() -> None:
    trace = PrefixTrace(ttft_s=(0.2, 0.2), computed_tokens=(40, 40), produced=(2, 2))
    text = markdown(
        report(prefix=summarise_prefix([trace], prefix_tokens=32, fresh_tokens=8, max_cv_percent=5.0))
    )
    _, row = table(text, "### Prefill from a cached prefix\n")
    assert row == ["int8", "void", "32", "8", "40", "40", "0", "–", "–", "–"]
    assert "int8: serving: cached prefix, void: no prefix was reused" in text


def test_noise_and_overload_are_marked_and_reasons_are_among_the_notes() -> None:
    noisy = rows()[1].model_copy(update={"noisy": True, "load": "open", "overloaded": True})
    text = markdown(report(rows=(noisy, LOST)))
    assert table(text, "## Serving\n")[1][5] == "2.0~ overloaded"
    assert "- int8: serving: continuous, 8 at once, out of memory: no room | at all" in text
    assert "- int8: serving: static: eager; continuous: paged" in text


def test_a_run_without_serving_has_no_section_and_the_terminal_s_table_stays_as_it_is() -> None:
    assert serving_markdown(plain()) == ""
    assert "## Serving" not in markdown(plain())
    assert comparison_table(report()).splitlines()[0] == comparison_table(plain()).splitlines()[0]


# --- serving.csv -----------------------------------------------------------------------------------------


def test_the_columns_have_the_words_of_vllm_s_bench_and_no_mixed_total() -> None:
    wanted = {"request_throughput", "output_throughput", "request_goodput", "duration", "max_concurrency"}
    wanted |= {
        f"{figure}_{time}_ms"
        for figure in ("mean", "median", "p99")
        for time in ("ttft", "tpot", "itl", "e2el")
    }
    assert wanted <= set(COLUMNS)
    assert "total_token_throughput" not in COLUMNS


def test_the_figures_in_serving_csv_are_those_of_the_report() -> None:
    static, continuous, lost = lines(report())
    assert [static["mode"], continuous["mode"], lost["outcome"]] == ["static", "continuous", "out_of_memory"]
    assert float(continuous["output_throughput"]) == 2.0
    assert float(continuous["request_throughput"]) == 1.0
    assert float(continuous["gain_over_static"]) == pytest.approx(2 / 1.2)
    assert (continuous["total_input_tokens"], continuous["total_output_tokens"]) == ("6", "6")
    assert float(continuous["mean_ttft_ms"]) == 1000.0
    assert float(continuous["p99_e2el_ms"]) == pytest.approx(2980.0)
    assert float(continuous["request_goodput"]) == pytest.approx(1 / 3)
    assert float(continuous["dollars_per_million_output_tokens"]) == pytest.approx(500.0)
    assert continuous["noisy"] == "false"
    assert lost["output_throughput"] == lost["median_itl_ms"] == lost["duration"] == ""
    assert lost["because"] == "no room | at all"


def test_what_a_spreadsheet_would_compute_is_made_text() -> None:
    assert lines(report(rows=(LOST.model_copy(update={"because": "=1+1"}),)))[0]["because"] == "'=1+1"


def test_serving_csv_lies_beside_the_report_when_something_was_served(tmp_path: Path) -> None:
    for name, found in (("with", report()), ("without", plain())):
        (tmp_path / name).mkdir()
        write_report(found, folder=tmp_path / name, recipe_text="model: x\n")
    assert (tmp_path / "with" / "serving.csv").read_text("utf-8") == serving_csv(report())
    assert not (tmp_path / "without" / "serving.csv").exists()
    stored = Report.model_validate_json((tmp_path / "with" / "report.json").read_bytes())
    assert stored == sealed(report())


# --- metrics and prices ----------------------------------------------------------------------------------


def test_metrics_are_series_over_concurrency_of_measured_rows_only() -> None:
    variant = report().variants[1]
    metrics = {(one.name, one.step): one.value for one in variant_metrics(variant, baseline=None)}
    assert metrics["serving.continuous_output_tokens_per_s", 2] == 2.0
    assert metrics["serving.static_output_tokens_per_s", 2] == pytest.approx(1.2)
    assert metrics["serving.continuous_gain", 2] == pytest.approx(2 / 1.2)
    assert metrics["serving.continuous_ttft_p99_s", 2] == 1.0
    assert metrics["serving.continuous_goodput_share", 2] == pytest.approx(1 / 3)
    assert metrics["serving.prefix_times_faster", 0] == pytest.approx(4.0)
    assert metrics["cost.serving_continuous_dollars_per_million_output_tokens", 2] == pytest.approx(500.0)
    assert not [step for name, step in metrics if name.startswith("serving.") and step == 8]


def test_prices_are_those_of_each_measured_row() -> None:
    cost = cost_of(None, serving(), dollars_per_hour=3.6)
    assert cost is not None
    assert cost.dollars_per_million_output_tokens is None, "no speed was measured"
    assert [(one.mode, one.concurrency) for one in cost.serving] == [("static", 2), ("continuous", 2)]
    assert [one.dollars_per_million_output_tokens for one in cost.serving] == pytest.approx(
        [1e6 / 1200, 500.0]
    )
    assert cost_of(None, serving(), dollars_per_hour=None) is None
    assert cost_of(None, serving(rows=(LOST,)), dollars_per_hour=3.6) is None


# --- recipes and machines --------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "model": "./llama",
    "variants": [{"name": "fp16"}, {"name": "fp32"}],
    "workload": {"prompt_tokens": 100, "new_tokens": 8},
    "speed": {},
    "serving": {"concurrency": [1, 4], "requests": 8},
    "gate": [{"kind": "max_memory", "fraction": 1.5}],
}
TRAFFIC: dict[str, Any] = {"requests_per_s": 1, "prompt_tokens": 100, "new_tokens": 8}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **changes}), "utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"serving": {"requests": 6}}, "serving: 8 are never under way at once of serving.requests: 6"),
        (
            {"serving": {"concurrency": [2, 9], "requests": 8}},
            "serving.concurrency[1]: 9 are never under way at once of serving.requests: 8",
        ),
        (
            {
                "serving": {"concurrency": [4]},
                "traffic": {**TRAFFIC, "max_batch_tokens": 3, "max_sequences": 2},
            },
            "serving.concurrency[0]: 4 sequences decode a token each, more than a step's 3",
        ),
        ({"serving": {"concurrency": [2, 2]}}, "serving.concurrency[1]: 2 stands twice"),
        ({"serving": {"concurrency": 4}}, "serving.concurrency: expected a list, found 4; write [4]"),
        ({"serving": {"concurrency": []}}, "serving.concurrency: is empty"),
        ({"serving": {"prefix_tokens": 15}}, "serving.prefix_tokens: 15 tokens fill no block of 16"),
        ({"serving": {"repeats": 2}}, "serving.repeats: should be greater than or equal to 3; found 2"),
        ({"serving": {"request": 8}}, "serving.request: unknown key; did you mean 'requests'?"),
        ({"serving": {"requests": "all"}}, "serving.requests: should be a valid integer; found 'all'"),
    ],
)
def test_a_serving_section_that_can_not_be_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(written(tmp_path, **changes))
    assert "1 problem\n" in str(refused.value)
    assert fault in str(refused.value)


def test_the_schema_for_editors_knows_the_section() -> None:
    section = json_schema()["$defs"]["ServingSpec"]["properties"]
    assert set(section) == {"concurrency", "requests", "repeats", "max_cv_percent", "prefix_tokens"}


def looked_at(folder: Path, **changes: Any) -> Preflight:
    loaded = load_recipe(written(folder, **changes))
    device = detect()
    store = Store(folder / "store")
    return preflight(loaded, recipe=loaded.recipe.expand(device=device.kind), device=device, store=store)


def test_sequences_longer_than_the_model_s_context_are_refused_before_any_work(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")  # 512 tokens at most
    assert looked_at(tmp_path).problems == ()
    ready = looked_at(tmp_path, serving={"requests": 8, "prefix_tokens": 480})
    (problem,) = ready.problems
    assert "serving runs sequences of 582 tokens" in problem.what
    assert "limit of 512" in problem.what
    assert "serving.prefix_tokens" in problem.fix
    long = {**TRAFFIC, "new_tokens": 450}
    (problem,) = looked_at(tmp_path, traffic=long).problems
    assert "serving runs sequences of 550 tokens" in problem.what


def test_a_trace_must_be_there_and_hold_enough_requests(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    (problem,) = looked_at(tmp_path, traffic={"trace": "few.jsonl"}).problems
    assert "few.jsonl: no such file" in problem.what
    lines = [{"arrival_s": place, "prompt_tokens": 5, "new_tokens": 2} for place in range(8)]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, lines[:5])), "utf-8")
    (problem,) = looked_at(tmp_path, traffic={"trace": "few.jsonl"}).problems
    assert problem.what == "few.jsonl holds 5 requests; serving.requests asks for 8"
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    ready = looked_at(tmp_path, traffic={"trace": "few.jsonl"})
    assert ready.problems == ()
    assert ready.load is not None
    assert len(ready.load.requests) == 8


def test_pages_that_transformers_doesn_t_make_are_refused_before_any_work(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    (problem,) = looked_at(tmp_path, traffic={**TRAFFIC, "block_tokens": 2}).problems
    assert problem.what.startswith("traffic.block_tokens is 2; ")
    assert problem.fix == "set traffic.block_tokens to 4 or more"
