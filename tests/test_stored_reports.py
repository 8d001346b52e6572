"""A stored report is what a run wrote, whoever names it and however; what was changed by hand decides nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.commands import judge_again, write_report
from pipeline.errors import UsageError
from pipeline.measured import Distribution
from pipeline.recipe import load_recipe
from pipeline.results import Report
from pipeline.run_moves import run_moves
from pipeline.stored_reports import find_runs, load_report, sealed
from tests import result_builders as build

MODEL = {"model": {"id": "tiny/model"}, "gate": [{"kind": "max_memory", "fraction": 0.5}]}


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "empty-store"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def a_run(**fields: Any) -> Report:
    return build.report(**{"resolved_recipe": MODEL, **fields})


def stored(folder: Path, report: Report) -> Path:
    """As a run leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_report(report, folder=folder, recipe_text="model: tiny/model\n")
    return folder


# --- the seal --------------------------------------------------------------------------------------------


def edited(folder: Path, change: Callable[[Any], None]) -> Path:
    file = folder / "report.json"
    data = json.loads(file.read_text("utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


def smaller(data: Any) -> None:
    data["variants"][1]["memory"]["weight_bytes_resident"] -= 1


def a_wider_limit(data: Any) -> None:
    data["resolved_recipe"]["gate"][0]["fraction"] = 0.9


def another_verdict(data: Any) -> None:
    data["verdict"] = "ship"


@pytest.mark.parametrize("change", [smaller, a_wider_limit])
@pytest.mark.parametrize("command", [["gate"], ["track"], ["promote"]])
def test_a_report_that_was_changed_by_hand_decides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], None], command: list[str]
) -> None:
    file = edited(stored(tmp_path / "run", a_run()), change)
    assert main([*command, str(file), *(["int8"] if command == ["promote"] else [])]) == 2
    told = capsys.readouterr().err
    assert f"{file}: was changed after it was written" in told
    assert "restore the file, or run the recipe again" in told


def test_neither_a_verdict_nor_a_seal_can_be_put_in(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run", a_run(verdict="no-ship"))
    kept = (folder / "report.json").read_text("utf-8")
    with pytest.raises(UsageError, match="was changed"):
        load_report(edited(folder, another_verdict))
    (folder / "report.json").write_text(kept, encoding="utf-8")
    with pytest.raises(UsageError, match="was changed"):
        load_report(edited(folder, lambda data: data.update(content_sha256="0" * 64)))


def test_another_layout_of_the_same_content_is_the_same_report(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run", a_run(provenance={"b": 1, "a": {"x": 1e22, "é": -0.0, "n": None}}))
    before = load_report(folder)
    edited(folder, lambda data: data.update({name: data.pop(name) for name in sorted(data)}))
    assert load_report(folder) == before == sealed(a_run(provenance=before.provenance))


def test_reports_from_before_there_was_a_seal_are_read(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run", a_run())
    edited(folder, lambda data: data.pop("content_sha256"))
    assert load_report(folder) == a_run()


def test_what_gate_prints_is_a_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path / "run", a_run(verdict="error"))
    assert main(["gate", str(folder), "--json"]) == 0
    again = tmp_path / "again.json"
    again.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_report(again).verdict == "ship"
    assert judge_again(again, rules=None) == load_report(again)


def test_a_pick_by_other_rules_stands_beside_the_preference_that_made_it(tmp_path: Path) -> None:
    demo = Path(__file__).parent.parent / "recipes" / "demo.yaml"
    text = demo.read_text("utf-8")
    rules = tmp_path / "rules.yaml"
    rules.write_text(text if "\nprefer:" in text else f"{text}\nprefer: smallest\n", encoding="utf-8")
    again = judge_again(stored(tmp_path / "run", a_run()), rules=rules)
    assert again.pick is not None
    assert again.resolved_recipe["prefer"] == again.pick.prefer == load_recipe(rules).recipe.prefer


# --- what is named ---------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_named_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = stored(tmp_path / "good", a_run())
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder" / "report.json").mkdir(parents=True)
    for name in ("none", "loop", "folder", "n" * 300):
        for command in (["gate"], ["compare", str(good)], ["gate", str(good), "--baseline-run"]):
            assert main([*command, str(tmp_path / name)]) == 2
            assert "can't be read (" in capsys.readouterr().err


@pytest.mark.parametrize(
    "part",
    [
        {"speed": {"batch_sizes": 3}},
        {"quality": {"tasks": 3}},
        {"speed": {}, "workload": {"prompt_tokens": [1]}},
    ],
)
def test_a_stored_recipe_that_is_none_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: dict[str, Any]
) -> None:
    quality = build.quality(build.task())
    arms = tuple(build.variant_report(build.variant(name, quality=quality)) for name in ("fp16", "int8"))
    named = [{"name": one.name, "quantizer": one.quantizer} for one in arms]
    recipe = {**MODEL, "variants": named, **part}
    (tmp_path / "report.json").write_text(a_run(variants=arms, resolved_recipe=recipe).to_json(), "utf-8")
    assert main(["gate", str(tmp_path)]) == 2
    assert "resolved_recipe is no recipe of this version" in capsys.readouterr().err


@pytest.mark.parametrize("field", [{"started_at": "yesterday"}, {"seconds": -1.0}])
def test_a_start_that_is_no_time_and_a_negative_duration_are_refused(
    tmp_path: Path, field: dict[str, Any]
) -> None:
    (tmp_path / "report.json").write_text(a_run().model_copy(update=field).to_json(), encoding="utf-8")
    with pytest.raises(UsageError, match=f"is not a report of this version: {next(iter(field))}"):
        load_report(tmp_path)


def test_a_link_to_the_newest_run_is_not_a_second_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first, second = (
        stored(runs / day, a_run(started_at=f"2026-01-{day}T00:00:00+00:00")) for day in ("01", "02")
    )
    (runs / "latest").symlink_to(second)
    found, unread = find_runs((tmp_path,))
    assert [(run.name, run.named) for run in found] == [("01", False), ("02", False)]
    assert unread == ()
    found, _ = find_runs((runs, first, tmp_path))
    assert [(run.name, run.named) for run in found] == [("01", True), ("02", False)]


# --- what pages and baseline runs may be -----------------------------------------------------------------


def test_a_page_never_replaces_a_report_or_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(tmp_path / "run", a_run())
    other = stored(tmp_path / "other", a_run(started_at="2026-02-02T00:00:00+00:00"))
    for name in ("report.json", "recipe.yaml", "report.md"):
        before = (folder / name).read_bytes()
        assert main(["gate", str(folder), "--html", str(folder / name)]) == 2
        assert main(["compare", str(folder), str(other), "--page", str(folder / name)]) == 2
        assert "is a file and no page, and would be lost" in capsys.readouterr().err
        assert (folder / name).read_bytes() == before
    page = tmp_path / "page"
    assert main(["gate", str(folder), "--html", str(page)]) == 0
    assert main(["gate", str(folder), "--html", str(page)]) == 0, "a page replaces a page, whatever its name"


def test_a_run_is_no_baseline_of_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, copy = (stored(tmp_path / name, a_run()) for name in ("run", "copy"))
    for before in (run, copy):
        assert main(["gate", str(run), "--baseline-run", str(before)]) == 2
        assert "is the very run that is judged; name an earlier one" in capsys.readouterr().err


def test_a_page_judged_by_other_rules_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path / "run", a_run())
    rules = tmp_path / "loose.yaml"
    rules.write_text(
        "model: tiny/model\nprecisions: [fp16, int8]\nspeed: {}\nprefer: smallest\n"
        "gate: [{kind: max_memory, fraction: 0.9}]\n",
        encoding="utf-8",
    )
    assert main(["gate", str(folder), "--rules", str(rules), "--json"]) == 0
    report = Report.model_validate_json(capsys.readouterr().out)
    assert report.because[0] == "judged again by the gate of loose.yaml, not by that of the run's recipe"
    assert report.resolved_recipe["prefer"] == "smallest"
    assert report.pick is not None
    assert report.pick.prefer == "smallest"


# --- texts -----------------------------------------------------------------------------------------------


def test_no_text_begins_a_heading_a_list_or_a_table_of_its_own_in_markdown(tmp_path: Path) -> None:
    text = "first <unk>\n# second\n\n- third\n| fourth |"
    int8 = build.variant_report(build.variant("int8", validity=(text,)))
    report = a_run(because=(text,), variants=(build.variant_report(build.variant("fp16")), int8))
    written = (stored(tmp_path / "run", report) / "report.md").read_text("utf-8")
    assert "- first &lt;unk> # second - third | fourth |" in written
    assert not re.findall("^(# second|- third|. fourth)", written, flags=re.MULTILINE)


# --- times that can't be ---------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [[0.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.2]])
def test_times_of_zero_and_less_are_compared_without_a_ratio_and_never_end_a_command(
    tmp_path: Path, samples: list[float]
) -> None:
    def run(name: str, ttft_s: list[float], started_at: str) -> Path:
        row = build.speed_row(1, 40.0, ttft_s=Distribution.of(ttft_s))
        int8 = build.variant_report(build.variant("int8", speed=build.speed("int8", [row])))
        arms = (build.variant_report(build.variant("fp16")), int8)
        machine = {"device_fingerprint": "a" * 64}
        return stored(tmp_path / name, a_run(variants=arms, provenance=machine, started_at=started_at))

    before = run("before", [0.2, 0.21, 0.22], "2026-01-01T00:00:00+00:00")
    after = run("after", samples, "2026-01-02T00:00:00+00:00")
    moves = run_moves(load_report(before), load_report(after))
    outcomes = {move.name: (move.outcome, move.because) for move in moves}
    outcome, because = outcomes["int8 speed.batch_1.ttft_s"]
    assert outcome in ("noise unknown", "within noise")
    assert outcome == "within noise" or "has no ratio" in because
    assert main(["compare", str(before), str(after)]) == 0


def test_a_store_a_recipe_and_a_report_in_each_other_s_place_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, recipe = tmp_path / "store", tmp_path / "r.yaml"
    for name in ("20260101-000000-a", "20260102-000000-b"):
        folder = store / "runs" / name
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(sealed(build.report()).to_json(), "utf-8")
    recipe.write_text("model: m\n", "utf-8")
    run = store / "runs" / "20260102-000000-b"
    for command, said in (
        (["gate", str(store)], f"{store}: holds runs (2); name one of them, for example {run}"),
        (["gate", str(recipe)], f"{recipe}: is a recipe and no report; name a report.json or a run's folder"),
        (
            ["check", str(run / "report.json")],
            f"is the report of a run and no recipe; judge it again with `gate {run}`",
        ),
        (["plan", str(run)], f"name the recipe that it was made with, {run / 'recipe.yaml'}"),
    ):
        assert main(command) == 2
        assert said in capsys.readouterr().err
