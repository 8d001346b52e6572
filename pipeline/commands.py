"""What each command does, as functions that programs can call.

outcome = run_recipe(Path("recipes/demo.yaml"), stream=sys.stderr)
outcome.exit_code, outcome.report.verdict
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

from pydantic import TypeAdapter, ValidationError

from pipeline.baseline_run import differences
from pipeline.declared import missing_results
from pipeline.errors import Interrupted, PipelineError, StageError, UsageError
from pipeline.examination import Examination, examine
from pipeline.figures import figures_csv
from pipeline.gate import exit_code
from pipeline.hardware import detect
from pipeline.history_page import history_page
from pipeline.hub_upload import hub_token, upload_checkpoint
from pipeline.interruption import first_signal_interrupts
from pipeline.judgement import judge_run
from pipeline.junit import junit_xml
from pipeline.page_file import page_file, write_page_file
from pipeline.pick_results import Preference
from pipeline.plan_page import plan_page
from pipeline.plan_values import Plan
from pipeline.planning import expand_here, plan_beside_results, plan_recipe
from pipeline.preflight import Preflight, preflight
from pipeline.promoted import Alias, PromotedBefore, last_promoted, machine_of
from pipeline.promoted_registry import ask_registry
from pipeline.promotion import Promotion, promote
from pipeline.provenance import collect
from pipeline.recipe import load_recipe
from pipeline.recipe_sections import AnyRule
from pipeline.report import comparison_table, make_report, markdown
from pipeline.report_page import report_page
from pipeline.results import Report, VariantReport, VariantResults
from pipeline.rules.base import Rule
from pipeline.rules.no_regression import NoRegression, with_promoted
from pipeline.run_history import RunHistory, run_history
from pipeline.run_results import variant_results
from pipeline.run_state import RunState, prepare
from pipeline.runner import run_stages
from pipeline.serving_tables import serving_csv
from pipeline.speed_columns import speed_csv
from pipeline.step_summary import append_step_summary, workflow_commands
from pipeline.store import Store, write_atomically
from pipeline.stored_reports import StoredRun, find_runs, load_report, sealed, stored_run
from pipeline.tracked_labels import run_key
from pipeline.tracking import TrackResult, track

_STOPPED = TrackResult(run_id=None, tracked=False, because="stopped while logging")


@dataclass(frozen=True)
class RunOutcome:
    """A finished run: its report, what to print and what to exit with."""

    report: Report
    json_line: str
    table: str
    exit_code: int


def store_from_environment() -> Store:
    """The store that `PIPELINE_STORE` names, by default `.pipeline/` here."""
    return Store(Path(os.environ.get("PIPELINE_STORE") or ".pipeline").absolute())


def run_recipe(path: Path, *, stream: TextIO, baseline_run: Path | None = None) -> RunOutcome:
    """The whole line. Raises RecipeError or PrerequisiteError before any work; later failures are verdicts.

    With `baseline_run` each variant is judged beside its namesake of that run.
    """
    started, start = datetime.datetime.now(datetime.UTC), time.monotonic()
    loaded = load_recipe(path)
    before = stored_run(baseline_run) if baseline_run else None
    store = store_from_environment()
    store.prepare()
    promoted = promoted_for(loaded.recipe.gate, recipe=path, model=loaded.recipe.model.id, store=store)
    with store.lock(), first_signal_interrupts() as disarm:
        state = prepare(loaded, store=store, progress_stream=stream)
        _tell_of_differences(before, state)
        run_stages(state)
        disarm()  # what is measured is reported, whatever signal comes now
        report = make_report(
            loaded,
            recipe=state.recipe,
            rules=with_promoted(state.recipe.gate, promoted=promoted, machine=state.machine),
            variants=variant_results(state),
            device=state.speed.device if state.speed else None,
            provenance=_provenance(state),
            started_at=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - start,
            interrupted=state.interrupted,
            before=before,
        )
        # Written before anything else is made of it: what took hours doesn't depend on what takes a second.
        written = _write_report(report, state)
        report = _beside_its_plan(report, state)
        written = written and _write_report(report, state)
        if written:
            state.progress.say(f"report: {state.folder / 'report.json'}")
            state.progress.say(write_page(report, folder=state.folder))
    show_in_ci(report, stream=stream)
    tracked = _track_quietly(report, state)
    seconds = time.monotonic() - start
    code = exit_code(report.verdict) if written else StageError.exit_code
    return RunOutcome(
        report=report,
        json_line=_json_line(report, state=state, written=written, tracked=tracked, seconds=seconds),
        table=comparison_table(report),
        exit_code=Interrupted.exit_code if report.interrupted or tracked is _STOPPED else code,
    )


def _beside_its_plan(report: Report, state: RunState) -> Report:
    """The report with planned figures beside measured ones; what can't be planned is said, and costs nothing."""
    try:
        return plan_beside_results(
            state.loaded, recipe=state.recipe, device=state.device, report=report, store=state.store
        )
    except PipelineError as error:
        state.progress.say(f"no plan beside the results: {error}")
        return report


def _write_report(report: Report, state: RunState) -> bool:
    """Whether the report is on disk; where it isn't, its table and JSON line still tell what was measured."""
    try:
        write_report(report, folder=state.folder, recipe_text=state.loaded.text)
    except StageError as error:
        state.progress.say(f"NO REPORT: {error}")
        return False
    return True


def _tell_of_differences(before: StoredRun | None, state: RunState) -> None:
    """What will refuse every comparison with the baseline run, said before hours of work instead of after."""
    if before is None:
        return
    found = differences(before.report, provenance=_provenance(state), model=state.recipe.model.id)
    if found:
        state.progress.say(f"{before.name} can't be the baseline, then vs now: {'; '.join(found)}")


def show_in_ci(report: Report, *, stream: TextIO) -> None:
    """In a GitHub job: the report in the step's summary, what doesn't pass as annotations. Elsewhere nothing."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        problem = append_step_summary(markdown(report), file=Path(summary))
        lines = workflow_commands(report) if os.environ.get("GITHUB_ACTIONS") == "true" else ()
        for line in (*lines, *([problem] if problem else [])):
            print(line, file=stream, flush=True)


def write_page(report: Report, *, folder: Path) -> str:
    """`report.html` in the run's folder, and what to say of it.

    Whatever goes wrong with the page costs neither the other files nor the verdict.
    """
    page = folder / "report.html"
    try:
        write_atomically(page, report_page(report))
    except Exception as error:  # noqa: BLE001  a drawing library may say anything
        return f"no report.html: {type(error).__name__}: {error}"
    return f"page: {page}"


def write_report(report: Report, *, folder: Path, recipe_text: str) -> None:
    """Everything a reader needs, each file written whole or not at all."""
    write_atomically(folder / "recipe.yaml", recipe_text)
    write_atomically(
        folder / "resolved-recipe.json", json.dumps(report.resolved_recipe, indent=2, ensure_ascii=False)
    )
    write_atomically(folder / "report.md", markdown(report))
    write_atomically(folder / "junit.xml", junit_xml(report))
    write_atomically(folder / "figures.csv", figures_csv(report))
    write_atomically(folder / "speed.csv", speed_csv(report))
    if any(variant.serving for variant in report.variants):
        write_atomically(folder / "serving.csv", serving_csv(report))
    write_atomically(folder / "report.json", sealed(report).to_json())


def _provenance(state: RunState) -> dict[str, Any]:
    facts = collect(repository=Path.cwd())
    return {**facts, "device": state.device.model_dump(mode="json")}


def _track_quietly(report: Report, state: RunState) -> TrackResult:
    try:
        result = track_report(report, folder=state.folder)
    except Interrupted:
        result = _STOPPED
    if not result.tracked:
        state.progress.say(
            f"not logged to MLflow: {result.because}; later: python -m pipeline track {state.folder}"
        )
    return result


def track_report(report: Report, *, folder: Path) -> TrackResult:
    """Log to the MLflow store that `MLFLOW_TRACKING_URI` names, by default the SQLite file in `mlruns/`."""
    return track(report, run_folder=folder, tracking_uri=None, artifacts_folder=None, note=markdown(report))


def _json_line(
    report: Report, *, state: RunState, written: bool, tracked: TrackResult, seconds: float
) -> str:
    line: dict[str, Any] = {
        "recipe": report.recipe,
        "recipe_digest": report.recipe_digest,
        "verdict": report.verdict,
        "verdicts": {
            variant.name: variant.verdict
            for variant in report.variants
            if variant.name != report.baseline or report.baseline_run
        },
        "pick": report.pick.variant if report.pick else None,
        "front": report.pick.front if report.pick else (),
        "report": str(state.folder / "report.json") if written else None,
        "mlflow_run_id": tracked.run_id,
        "reused_stages": state.reused,
        "seconds": round(seconds, 1),
    }
    if not tracked.tracked:
        line["tracked"] = False
    return json.dumps(line)


# --- plan, check -----------------------------------------------------------------------------------------


def plan_for(path: Path, *, hardware: str | None, page: Path | None) -> Plan:
    """Plan for the recipe's hardware, or for `hardware`, and write it as an HTML page, too. Loads no weight."""
    file = None if page is None else page_file(page)
    plan = plan_recipe(path, hardware=hardware, store=store_from_environment())
    if file is not None:
        write_page_file(file, plan_page(plan), option=f"--html {page}")
    return plan


def check_recipe(path: Path) -> Preflight:
    """Validate and look for everything a run needs; nothing is run."""
    loaded = load_recipe(path)
    device, store = detect(), store_from_environment()
    recipe = expand_here(loaded, device=device, store=store)
    return preflight(loaded, recipe=recipe, device=device, store=store)


# --- stored reports --------------------------------------------------------------------------------------


def judge_again(
    path: Path, *, rules: Path | None, baseline_run: Path | None = None, page: Path | None = None
) -> Report:
    """The stored results under the report's own rules or those of another recipe; nothing is measured.

    With `baseline_run` each variant is judged beside its namesake of that run; `page` is the report as HTML.
    """
    file = None if page is None else page_file(page)
    report = load_report(path)
    other = load_recipe(rules).recipe if rules else None
    gate = other.gate if other else _stored_rules(report, path)
    before = None if baseline_run is None else _another_run(baseline_run, than=report)
    promoted = promoted_for(
        gate, recipe=Path(report.recipe), model=report.model_id, store=store_from_environment()
    )
    try:
        judged = judge_run(
            with_promoted(gate, promoted=promoted, machine=machine_of(report.provenance)),
            variants=tuple(_results_of(variant) for variant in report.variants),
            baseline_name=report.baseline,
            prefer=other.prefer if other else _stored_preference(report),
            provenance=report.provenance,
            model=report.model_id,
            interrupted=report.interrupted,
            before=before,
            missing=_missing_results(report, path),
        )
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    judged_by = {"gate": [rule.model_dump(mode="json") for rule in gate]}
    resolved = {**report.resolved_recipe, **judged_by, **({"prefer": other.prefer} if other else {})}
    told = {**judged.fields(), "because": (*_of_other_rules(rules), *judged.because)}
    again = sealed(report.model_copy(update={**told, "resolved_recipe": resolved}))
    if file is not None:
        write_page_file(file, report_page(again), option=f"--html {page}")
    return again


def _missing_results(report: Report, path: Path) -> dict[str, tuple[str, ...]]:
    try:
        return missing_results(report)
    except TypeError as error:
        raise UsageError(
            f"{path}: resolved_recipe is no recipe of this version ({error}); restore the file, or run the recipe again"
        ) from None


def _of_other_rules(rules: Path | None) -> tuple[str, ...]:
    """A page that shows the run's recipe must not pass for its verdict."""
    return (
        ()
        if rules is None
        else (f"judged again by the gate of {rules.name}, not by that of the run's recipe",)
    )


def _another_run(path: Path, *, than: Report) -> StoredRun:
    """The baseline run. Beside itself every run ships, so that a wrong path in a job would pass for ever."""
    found = stored_run(path)
    if run_key(found.report) == run_key(than):
        raise UsageError(f"--baseline-run {path}: is the very run that is judged; name an earlier one")
    return found


def _stored_preference(report: Report) -> Preference | None:
    """What the run's recipe preferred; an unknown word is none."""
    wanted = report.resolved_recipe.get("prefer")
    return next((word for word in get_args(Preference) if word == wanted), None)


def compare_runs(paths: Sequence[Path], *, page: Path | None) -> RunHistory:
    """Runs side by side and over time, and as a page; see `run_history.run_history`. A store stands for its runs."""
    file = None if page is None else page_file(page, option="--page")
    runs, unread = find_runs(paths)
    history = run_history(runs, unread=unread)
    if file is not None:
        write_page_file(file, history_page(history), option=f"--page {page}")
    return history


def _stored_rules(report: Report, path: Path) -> tuple[Any, ...]:
    adapter: TypeAdapter[tuple[Any, ...]] = TypeAdapter(tuple[AnyRule, ...])
    try:
        return adapter.validate_json(json.dumps(report.resolved_recipe.get("gate")))
    except ValidationError:
        raise UsageError(
            f"{path}: resolved_recipe.gate holds no rules of this version; name a recipe with --rules"
        ) from None


def _results_of(variant: VariantReport) -> VariantResults:
    fields = {name: getattr(variant, name) for name in VariantResults.model_fields if name != "validity"}
    return VariantResults(**fields)


def promoted_for(rules: Sequence[Rule], *, recipe: Path, model: str | None, store: Store) -> PromotedBefore:
    """What was promoted before of this recipe and model, where a rule compares with it.

    The registry's word goes before the store's: another machine may have promoted since, or moved an alias back.
    """
    if not any(isinstance(rule, NoRegression) for rule in rules):
        return PromotedBefore()
    kept = last_promoted(store, recipe=str(recipe), model=model)
    asked = ask_registry(recipe=str(recipe), model=model)
    return asked.model_copy(update={"versions": {**kept, **asked.versions}})


def promote_run(path: Path, variant: str, *, alias: Alias, push: str | None) -> Promotion:
    """Register a stored run's variant that ships; see `promotion.promote`. `push` is a repository on the Hub."""
    if push is not None:
        hub_token(push)
    report, store = load_report(path), store_from_environment()
    store.prepare()
    done = promote(
        report,
        variant,
        judged=judge_again(path, rules=None),
        run_folder=path if path.is_dir() else path.parent,
        store=store,
        alias=alias,
        note=markdown(report),
    )
    if push is None:
        return done
    message = f"{done.name} version {done.version}: {done.variant}, {done.verdict}"
    url = upload_checkpoint(Path(done.checkpoint_folder), repository=push, message=message)
    return done.model_copy(update={"pushed_to": url})


def track_run(path: Path) -> TrackResult:
    """Log a stored run to MLflow; the same run twice is logged once."""
    report = load_report(path)
    return track_report(report, folder=path if path.is_dir() else path.parent)


# --- doctor ---------------------------------------------------------------------------------------------


def examine_machine(*, engines_on: Path | None, stream: TextIO) -> Examination:
    """What this machine is, measured now; see `examination.examine`."""
    store = store_from_environment()
    store.prepare()
    return examine(
        store=store, progress=lambda text: print(text, file=stream, flush=True), engines_on=engines_on
    )
