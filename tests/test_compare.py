"""Runs side by side and over time: what changed, what moved beyond noise, and what is refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.errors import UsageError
from pipeline.history_page import history_page
from pipeline.measured import Distribution
from pipeline.results import Report, VariantReport
from pipeline.run_changes import run_changes
from pipeline.run_history import RunHistory, history_text, run_history
from pipeline.run_moves import Move, ratio_interval, run_moves
from pipeline.stored_reports import StoredRun, find_runs
from tests import result_builders as build
from tests.browser import opened_browser

MACHINE = {"device_fingerprint": "a" * 64, "device": {"name": "box"}, "packages": {"torch": "2.13.0"}}


def int8(*, step_s: float = 0.025, spread: float = 0.02, right: int = 80, **fields: Any) -> VariantReport:
    """A candidate whose batch of one takes `step_s` a token, with five repeats spread by a share of it."""
    samples = [step_s * (1 + spread * place) for place in (-1, -0.5, 0, 0.5, 1)]
    row = build.speed_row(1, 1 / step_s, tpot_s=Distribution.of(samples))
    answers = build.task(values=[1.0] * right + [0.0] * (100 - right))
    results = build.variant("int8", speed=build.speed("int8", rows=[row]), quality=build.quality(answers))
    return build.variant_report(results.model_copy(update=fields))


def a_run(*variants: VariantReport, at: int = 1, **fields: Any) -> Report:
    values = {
        "provenance": MACHINE,
        "started_at": f"2026-01-{at:02}T03:04:05+00:00",
        "resolved_recipe": {"model": {"id": "tiny/model"}, "gate": [{"kind": "min_speedup", "factor": 1.5}]},
    }
    chosen = variants or (int8(),)
    return build.report(build.variant_report(build.variant("fp16")), *chosen, **{**values, **fields})


def by_metric(before: Report, after: Report) -> dict[str, Move]:
    return {move.name.removeprefix("int8 "): move for move in run_moves(before, after)}


def stored(folder: Path, report: Report) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    return folder


def runs(*reports: Report) -> tuple[StoredRun, ...]:
    return tuple(
        StoredRun(name=f"run-{at}", file=Path(f"run-{at}"), report=one) for at, one in enumerate(reports)
    )


# --- what moved ------------------------------------------------------------------------------------------

DECODE = "speed.batch_1.decode_tokens_per_s"


def test_equal_runs_moved_nothing() -> None:
    assert run_moves(a_run(), a_run(at=2)) == ()


def test_a_rate_moved_when_quartiles_are_apart_and_the_ratio_s_interval_leaves_1_out() -> None:
    move = by_metric(a_run(), a_run(int8(step_s=0.030)))[DECODE]
    assert move.outcome == "moved"
    assert move.change_percent == pytest.approx(-100 / 6)
    assert "quartiles apart" in move.because
    assert "ratio" in move.because


def test_a_rate_whose_quartiles_meet_is_within_noise() -> None:
    assert by_metric(a_run(), a_run(int8(step_s=0.02505)))[DECODE].outcome == "within noise"


def test_quartiles_apart_of_too_few_repeats_are_within_noise() -> None:
    def twice(first: float, second: float) -> VariantReport:
        row = build.speed_row(1, 40.0, tpot_s=Distribution.of([first, second]))
        return build.variant_report(build.variant("int8", speed=build.speed("int8", rows=[row])))

    before = a_run(twice(0.025, 0.026))
    slower = build.speed_row(1, 37.0, tpot_s=Distribution.of([0.0265, 0.0275]))
    after = a_run(build.variant_report(build.variant("int8", speed=build.speed("int8", rows=[slower]))))
    move = by_metric(before, after)[DECODE]
    assert (move.outcome, "too few repeats" in move.because) == ("within noise", True)


@pytest.mark.parametrize("repeats", [3, 5, 10])
def test_the_ratio_s_interval_leaves_out_1_in_five_percent_of_runs_without_a_difference(repeats: int) -> None:
    draw = random.Random(repeats)
    wrong = 0
    for _ in range(1000):
        first, second = ([draw.lognormvariate(0, 0.03) for _ in range(repeats)] for _ in range(2))
        low, high = ratio_interval(first, second)
        wrong += not low <= 1 <= high
    assert wrong / 1000 < 0.07


def test_the_ratio_s_interval_holds_the_true_ratio() -> None:
    low, high = ratio_interval([1.0, 1.01, 0.99], [2.0, 2.02, 1.98])
    assert 1.9 < low < 2 < high < 2.1
    assert ratio_interval([1.0, 1.0], [2.0, 2.0]) == pytest.approx((2.0, 2.0))


def test_answers_are_paired_by_document() -> None:
    before, worse = a_run(int8(right=90)), a_run(int8(right=60))
    move = by_metric(before, worse)["quality.piqa.acc"]
    assert (move.outcome, "without 0" in move.because) == ("moved", True)
    slightly = by_metric(before, a_run(int8(right=89)))["quality.piqa.acc"]
    assert (slightly.outcome, "holds 0" in slightly.because) == ("within noise", True)


def test_answers_to_another_task_are_not_compared() -> None:
    other = build.quality(build.task(values=[1.0] * 60 + [0.0] * 40, task_hash="edited"))
    move = by_metric(a_run(int8(right=90)), a_run(int8(quality=other)))["quality.piqa.acc"]
    assert (move.outcome, "task_hash" in move.because) == ("not comparable", True)


def test_perplexity_is_paired_by_document_too() -> None:
    first, second = (
        a_run(int8(quality=build.quality(task)))
        for task in (
            perplexity(230.0, 345.0, 300.0, 280.0),
            perplexity(232.1, 347.0, 302.2, 281.9),
        )
    )
    move = by_metric(first, second)["quality.passages.token_perplexity"]
    assert (move.outcome, "without 0" in move.because) == ("moved", True)


def perplexity(*nats: float) -> Any:
    from pipeline.results import MetricScore

    tokens = 100 * len(nats)
    score = MetricScore(score=2.718281828 ** (sum(nats) / tokens), stderr=None, higher_is_better=False)
    return build.rolling_task(nats=nats, metrics={"token_perplexity": score})


def test_bytes_are_counted_so_any_difference_is_one() -> None:
    larger = build.memory("int8", weight_bytes_resident=500_000_001)
    move = by_metric(a_run(), a_run(int8(memory=larger)))["memory.weight_bytes_resident"]
    assert (move.outcome, move.because) == ("moved", "counted, not sampled")


def test_a_figure_that_was_measured_once_only_differs() -> None:
    taller = build.memory("int8", peak_bytes=600_000_000)
    assert by_metric(a_run(), a_run(int8(memory=taller)))["memory.peak_bytes"].outcome == "noise unknown"


@pytest.mark.parametrize("fingerprint", ["b" * 64, None])
def test_times_of_another_machine_are_not_compared_but_bytes_and_answers_are(fingerprint: str | None) -> None:
    elsewhere = {**MACHINE, "device_fingerprint": fingerprint}
    manifest = build.manifest("int8", weight_bytes_on_disk=400_000_000)
    after = a_run(int8(step_s=0.05, right=40, checkpoint=manifest), provenance=elsewhere)
    moves = by_metric(a_run(), after)
    assert moves[DECODE].outcome == "not comparable"
    assert moves["checkpoint.weight_bytes_on_disk"].outcome == "moved"
    assert moves["quality.piqa.acc"].outcome == "moved"


def test_a_row_that_became_void_vanished() -> None:
    void = build.speed("int8", rows=[build.speed_row(1, 40.0, outcome="void")])
    move = by_metric(a_run(), a_run(int8(speed=void)))[DECODE]
    assert (move.outcome, move.after, move.because) == ("vanished", None, "now: void")


# --- what changed ----------------------------------------------------------------------------------------


def changes(before: Report, after: Report) -> dict[str, tuple[str | None, str | None]]:
    return {change.what: (change.before, change.after) for change in run_changes(before, after)}


def test_versions_hardware_recipe_weights_and_tasks_are_told() -> None:
    provenance = {
        "packages": {"torch": "2.14.0"},
        "device": {"name": "other", "bandwidth_bytes_per_s": 1.0},
        "device_fingerprint": "b" * 64,
        "git": {"commit": "c" * 40, "dirty": True},
    }
    recipe = {"model": {"id": "tiny/model"}, "gate": [{"kind": "min_speedup", "factor": 1.2}]}
    file = build.manifest("int8").files[0].model_copy(update={"sha256": "1" * 64})
    task = build.task(values=[1.0] * 80 + [0.0] * 20, task_hash="edited")
    other = int8(checkpoint=build.manifest("int8", files=(file,)), quality=build.quality(task))
    found = changes(a_run(), a_run(other, provenance=provenance, resolved_recipe=recipe))
    assert found["packages.torch"] == ("2.13.0", "2.14.0")
    assert found["device.name"] == ("box", "other")
    assert found["device_fingerprint"] == ("a" * 12, "b" * 12)
    assert found["git.commit"] == (None, "c" * 12)
    assert found["recipe.gate[min_speedup].factor"] == ("1.5", "1.2")
    assert found["piqa task_hash"] == ("task", "edited")
    assert found.keys() >= {"int8 weights"}
    assert not [what for what in found if "bandwidth" in what or what.startswith("fp16")]


def test_one_more_variant_is_one_change_of_the_list_and_none_of_the_others() -> None:
    def recipe(*names: str) -> dict[str, Any]:
        return {"model": {"id": "tiny/model"}, "variants": [{"name": name} for name in names]}

    extra = build.variant_report(build.variant("int4"))
    before = a_run(int8(), resolved_recipe=recipe("fp16", "int8"))
    found = changes(before, a_run(extra, int8(), resolved_recipe=recipe("fp16", "int4", "int8")))
    assert found == {
        "recipe.variants[int4].name": (None, "int4"),
        "variants": ("fp16, int8", "fp16, int4, int8"),
    }


def test_a_key_without_a_value_is_no_change() -> None:
    recipe = {"model": {"id": "tiny/model"}, "gate": [{"kind": "min_speedup", "factor": 1.5}], "prefer": None}
    assert changes(a_run(), a_run(resolved_recipe=recipe)) == {}


# --- over time -------------------------------------------------------------------------------------------


def history(*steps_s: float) -> RunHistory:
    return run_history(runs(*(a_run(int8(step_s=step), at=at + 1) for at, step in enumerate(steps_s))))


def test_a_series_marks_the_run_from_which_on_it_is_another_figure() -> None:
    series = next(
        one
        for one in history(0.025, 0.025, 0.035, 0.035).series
        if one.name == DECODE and one.variant == "int8"
    )
    assert [point.value for point in series.points] == pytest.approx([40, 40, 1 / 0.035, 1 / 0.035])
    assert [point.moved for point in series.points] == [False, False, True, False]


def test_a_run_without_a_variant_is_a_gap_not_a_zero() -> None:
    middle = a_run(build.variant_report(build.variant("int4")), at=2)
    series = run_history(runs(a_run(at=1), middle, a_run(at=3))).series
    points = next(one.points for one in series if one.name == DECODE and one.variant == "int8")
    assert [point.value for point in points] == [pytest.approx(40), None, pytest.approx(40)]


def test_the_text_tells_changes_moves_and_the_table_over_time() -> None:
    after = {**MACHINE, "packages": {"torch": "2.14.0"}}
    last = a_run(int8(step_s=0.035), at=3, provenance=after)
    text = history_text(run_history(runs(a_run(at=1), a_run(at=2), last)))
    assert "1 → 2, what changed:\n  nothing that is known of" in text
    assert "packages.torch  2.13.0  →  2.14.0" in text
    assert "over time (* apart from the run before by more than noise)" in text
    row = [line for line in text.splitlines() if line.split()[:2] == ["int8", DECODE]][-1]
    assert row.split()[-3:] == ["40", "40", "28.571*"]


def test_the_page_is_one_file_that_fetches_nothing_and_escapes_names() -> None:
    nasty = build.variant("int8").model_copy(update={"name": "<script>x</script>"})
    named = build.variant_report(nasty)
    page = history_page(run_history(runs(a_run(named, at=1), a_run(named, at=2), a_run(named, at=3))))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count('role="img"') == 2, "one trend for each variant"
    assert "http://" not in page.replace("http-equiv", "")
    assert "https://" not in page


@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_the_page_without_a_complaint_a_request_or_sideways_scrolling(
    tmp_path: Path, width: int
) -> None:
    file = tmp_path / "trend.html"
    file.write_text(history_page(history(0.025, 0.035)), encoding="utf-8")
    with opened_browser() as browser:
        page = browser.open(file.as_uri(), width=width)
        assert page.requested == [file.as_uri()]
        assert page.complaints == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('svg').length") == 2


def test_the_page_of_a_history_is_the_same_bytes_each_time() -> None:
    assert history_page(history(0.025, 0.035)) == history_page(history(0.025, 0.035))


# --- what is refused -------------------------------------------------------------------------------------


def test_one_run_is_refused() -> None:
    with pytest.raises(UsageError, match="needs two runs, only run-0 is there"):
        run_history(runs(a_run()))


def test_runs_of_two_models_are_refused() -> None:
    other = a_run(at=2, resolved_recipe={"model": {"id": "another/model"}})
    with pytest.raises(UsageError, match="several models"):
        run_history(runs(a_run(), other))


def test_runs_without_a_shared_variant_are_refused() -> None:
    alone = build.report(build.variant_report(build.variant("bf16")), provenance=MACHINE)
    model = {"model": {"id": "tiny/model"}}
    first, second = a_run(), alone.model_copy(update={"resolved_recipe": model})
    with pytest.raises(UsageError, match="share a variant"):
        run_history(runs(first, second))


def test_a_run_named_twice_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path / "a", a_run())
    with pytest.raises(UsageError, match="named twice"):
        find_runs((folder, folder / "report.json"))


# --- the command -----------------------------------------------------------------------------------------


def test_a_store_stands_for_its_runs_of_the_newest_model_in_order_of_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "store"
    stored(root / "runs" / "b-later", a_run(at=2))
    stored(root / "runs" / "c-first", a_run(at=1))
    stored(root / "runs" / "other", a_run(at=1, resolved_recipe={"model": {"id": "another/model"}}))
    broken = stored(root / "runs" / "broken", a_run())
    (broken / "report.json").write_text("{", encoding="utf-8")
    assert main(["compare", str(root), "--json"]) == 0
    found = RunHistory.model_validate_json(capsys.readouterr().out)
    assert [run.name for run in found.runs] == ["c-first", "b-later"]
    assert any("another/model" in reason for reason in found.left_out)
    assert any("broken" in reason for reason in found.left_out)
    assert main(["compare", str(root / "runs")]) == 0


def test_compare_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [stored(tmp_path / name, a_run(at=at)) for at, name in ((1, "a"), (2, "b"))]
    page = tmp_path / "trend.html"
    assert main(["compare", *map(str, folders), "--page", str(page)]) == 0
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert f"page: {page}" in capsys.readouterr().err
    assert main(["compare", *map(str, folders), "--page", str(tmp_path)]) == 2
    assert "is no regular file" in capsys.readouterr().err


# --- an earlier run as the baseline ----------------------------------------------------------------------

GATE = [
    {"kind": "min_speedup", "factor": 0.95},
    {"kind": "max_memory", "fraction": 1.02},
    {"kind": "max_quality_drop", "points": 30},
]


def gated(
    tmp_path: Path, before: Report, after: Report, capsys: pytest.CaptureFixture[str]
) -> tuple[int, Report]:
    earlier = before.model_copy(update={"started_at": "2025-12-31T03:04:05+00:00"})
    for name, report in (("main", earlier), ("pull", after)):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        stored(tmp_path / name, report)
    arguments = ["gate", str(tmp_path / "pull"), "--baseline-run", str(tmp_path / "main"), "--json"]
    code = main(arguments)
    return code, Report.model_validate_json(capsys.readouterr().out)


def run_of(step_s: float, *, right: int = 80, **fields: Any) -> Report:
    recipe = {"model": {"id": "tiny/model"}, "gate": GATE}
    first = build.variant("fp16", quality=build.quality(build.task(values=[1.0] * 85 + [0.0] * 15)))
    values = {"provenance": MACHINE, "resolved_recipe": recipe, **fields}
    return build.report(build.variant_report(first), int8(step_s=step_s, right=right), **values)


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "empty-store"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def test_each_variant_is_judged_beside_its_namesake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = gated(tmp_path, run_of(0.025), run_of(0.025), capsys)
    assert (code, report.verdict) == (0, "ship")
    assert report.baseline_run is not None
    assert report.baseline_run.name == "main"
    assert "judged beside the run main" in report.because[0]
    found = report.variant("int8")
    assert found is not None
    assert [one.outcome for one in found.findings] == ["pass"] * 3
    assert found.findings[0].observed == pytest.approx(1.0), "beside int8, not beside fp16"


def test_a_pull_request_that_slows_a_variant_down_does_not_ship(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = gated(tmp_path, run_of(0.025), run_of(0.030), capsys)
    assert (code, report.verdict) == (1, "no-ship")
    outcomes = {one.name: one.verdict for one in report.variants}
    assert outcomes == {"fp16": "ship", "int8": "no-ship"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another machine": ({"provenance": {**MACHINE, "device_fingerprint": "b" * 64}}, "machine box"),
    "no fingerprint": ({"provenance": {"packages": MACHINE["packages"]}}, "no fingerprint"),
    "another engine": (
        {"provenance": {**MACHINE, "packages": {"torch": "2.12.0"}}},
        "torch 2.12.0 vs 2.13.0",
    ),
    "an interrupted run": ({"interrupted": True}, "interrupted"),
    "another model": ({"resolved_recipe": {"model": {"id": "x/y"}}}, "model x/y vs tiny/model"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_baseline_run_that_does_not_compare_is_missing_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    fields, reason = REFUSED[why]
    code, report = gated(tmp_path, run_of(0.025, **fields), run_of(0.025), capsys)
    assert (code, report.verdict) == (4, "error")
    findings = [finding for variant in report.variants for finding in variant.findings]
    assert {finding.outcome for finding in findings} == {"missing"}
    assert all(reason in finding.because for finding in findings)


def test_other_task_files_are_missing_for_the_rules_that_need_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_of(0.025)
    edited = build.quality(build.task(values=[1.0] * 80 + [0.0] * 20, task_hash="edited"))
    changed = tuple(variant.model_copy(update={"quality": edited}) for variant in before.variants)
    code, report = gated(tmp_path, before.model_copy(update={"variants": changed}), run_of(0.025), capsys)
    assert code == 4
    found = {one.rule: one for one in report.variants[1].findings}
    assert found["min_speedup"].outcome == "pass"
    assert found["max_quality_drop"].outcome == "missing"
    assert "task_hash" in found["max_quality_drop"].because


def test_a_variant_that_the_baseline_run_does_not_have_never_ships(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_of(0.025)
    code, report = gated(
        tmp_path, before.model_copy(update={"variants": before.variants[:1]}), run_of(0.025), capsys
    )
    assert code == 4
    assert "has no variant int8; it has fp16" in report.variants[1].findings[0].because


def test_a_baseline_run_that_is_not_there_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: some/model\nprecisions: [fp16, int8]\nspeed: {}\ngate: [{kind: max_memory, fraction: 0.6}]\n",
        "utf-8",
    )
    assert main(["run", str(recipe), "--baseline-run", str(tmp_path / "none")]) == 2
    assert "can't be read" in capsys.readouterr().err
