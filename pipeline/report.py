"""From results to what people and programs read: `report.json`, `report.md`, the table on the terminal.

report = make_report(loaded, recipe=expanded, variants=results, ...)
print(comparison_table(report))
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeline.capacity_tables import capacity_markdown, capacity_notes
from pipeline.distribution_tables import distribution_markdown
from pipeline.judgement import judge_run
from pipeline.pick_tables import pick_markdown, pick_text
from pipeline.quality_tables import documents_cell, quality_markdown
from pipeline.readings import decode_rate, engines_apart, smallest_batch
from pipeline.recipe import ExpandedRecipe, LoadedRecipe
from pipeline.reconciliation import HEADER, TEXT_COLUMNS, table_rows
from pipeline.results import QualityResult, Report, VariantReport, VariantResults
from pipeline.rules.base import Rule
from pipeline.scores import VOID, group_scores, has_void, shown_metric
from pipeline.serving_tables import serving_markdown, serving_notes
from pipeline.speed_columns import speed_markdown
from pipeline.speed_results import DeviceSpeed, SpeedRow
from pipeline.speed_tables import length_tables, sweep_notes
from pipeline.stored_reports import StoredRun
from pipeline.text_table import figure_cell, markdown_line, markdown_table, text_table

ON_DISK, ACROSS = "‡", "†"
"""Marks of cells: bytes of files, where none in memory were measured; a ratio of two engines' speeds."""
_MARK = {"pass": "ok", "fail": "FAIL", "inconclusive": "undecided", "missing": "MISSING"}


def make_report(
    loaded: LoadedRecipe,
    *,
    recipe: ExpandedRecipe,
    rules: Sequence[Rule] | None = None,
    variants: tuple[VariantResults, ...],
    device: DeviceSpeed | None,
    provenance: dict[str, Any],
    started_at: str,
    seconds: float,
    interrupted: bool,
    before: StoredRun | None = None,
) -> Report:
    """Judge the variants by the recipe's gate. An interrupted run's verdict is never better than error.

    `rules` are the gate's, where some of them compare with a promoted version and have it beside them. With `before`
    each variant is judged beside its namesake of that run.
    """
    judged = judge_run(
        recipe.gate if rules is None else rules,
        variants=variants,
        baseline_name=recipe.baseline,
        prefer=recipe.prefer,
        provenance=provenance,
        model=recipe.model.id,
        interrupted=interrupted,
        before=before,
    )
    return Report(
        recipe=str(loaded.path),
        recipe_digest=loaded.recipe.digest(),
        resolved_recipe=recipe.model_dump(mode="json"),
        started_at=started_at,
        seconds=seconds,
        provenance=provenance,
        device=device,
        baseline=recipe.baseline,
        interrupted=interrupted,
        **judged.fields(),
    )


# --- the comparison --------------------------------------------------------------------------------------


def comparison_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Header and one row a variant: the triple speed, memory, quality beside the baseline."""
    baseline = report.variant(report.baseline)
    tasks = _shown_tasks(report)
    sizes = list(
        dict.fromkeys(
            row.batch_size
            for variant in report.variants
            if variant.speed
            for row in variant.speed.of("batch")
        )
    )
    header = ["variant", "verdict", "weights MB", "mem ×", "bits/w", "TTFT ms"]
    header += [f"tok/s b{size}" for size in sizes]
    least = smallest_batch(report.variants)
    header += [f"speed × b{least}"] if sizes else []
    header += ["max seqs", *(_task_title(report, task) for task in tasks)]
    rows = []
    for variant in report.variants:
        row = [variant.name + ("" if variant.required else " (optional)"), _verdict_cell(variant, report)]
        row += _memory_cells(variant, baseline)
        row += _speed_cells(variant, baseline, sizes)
        row.append(_capacity_cell(variant))
        row += [_score_cell(variant, task) for task in tasks]
        rows.append(row)
    return header, rows


def _shown_tasks(report: Report) -> list[str]:
    """Groups, and the tasks of none: every task has a row in the report's table of tasks."""
    found = [variant.quality for variant in report.variants if variant.quality]
    grouped = {task for quality in found for tasks in quality.groups.values() for task in tasks}
    alone = (task for quality in found for task in quality.tasks if task not in grouped)
    return list(dict.fromkeys((*(name for quality in found for name in quality.groups), *alone)))


def _verdict_cell(variant: VariantReport, report: Report) -> str:
    return "baseline" if variant.name == report.baseline and variant.verdict == "ship" else variant.verdict


def _memory_cells(variant: VariantReport, baseline: VariantReport | None) -> list[str]:
    """Resident weights; where those weren't measured the bytes on disk, which are marked."""
    held, mark = [_resident(one) for one in (variant, baseline)], ""
    if held[0] is None:
        held, mark = [_on_disk(one) for one in (variant, baseline)], ON_DISK
    shown, base = held
    return [
        figure_cell(shown / 1e6, ".1f") + mark if shown else "–",
        figure_cell(shown / base, ".2f") + mark if shown and base else "–",
        figure_cell(variant.checkpoint.bits_per_weight if variant.checkpoint else None, ".2f"),
    ]


def _resident(variant: VariantReport | None) -> int | None:
    return variant.loaded_memory.weight_bytes_resident if variant and variant.loaded_memory else None


def _on_disk(variant: VariantReport | None) -> int | None:
    return variant.checkpoint.weight_bytes_on_disk if variant and variant.checkpoint else None


def _speed_cells(variant: VariantReport, baseline: VariantReport | None, sizes: list[int]) -> list[str]:
    """TTFT and the ratio to the baseline are of the smallest batch."""
    if not sizes:
        return ["–"]
    rows = {size: variant.speed.row(size) if variant.speed else None for size in sizes}
    first = rows[min(sizes)]
    ttft = first.ttft_s.median * 1e3 if first and first.outcome == "measured" and first.ttft_s else None
    rate, base = (decode_rate(one, min(sizes)) for one in (variant, baseline))
    ratio = figure_cell(rate / base, ".2f") + _across(variant, baseline) if rate and base else "–"
    return [figure_cell(ttft, ".0f"), *(_rate(rows[size]) for size in sizes), ratio]


def _across(variant: VariantReport, baseline: VariantReport | None) -> str:
    return ACROSS if engines_apart(baseline, variant) else ""


def _rate(row: SpeedRow | None) -> str:
    if row is None:
        return "–"
    if row.outcome != "measured":
        return {"out_of_memory": "OOM", "void": "void", "failed": "failed"}[row.outcome]
    return figure_cell(row.decode_tokens_per_s, ".1f") + ("~" if row.noisy else "")


def _capacity_cell(variant: VariantReport) -> str:
    if variant.capacity is None:
        return "–"
    more = "+" if variant.capacity.limited_by == "ceiling" else ""
    return figure_cell(variant.capacity.measured_sequences, "d") + more


def _task_title(report: Report, task: str) -> str:
    for variant in report.variants:
        if variant.quality and task in variant.quality.tasks:
            return f"{task} {shown_metric(variant.quality.tasks[task])}"
    return task


def _score_cell(variant: VariantReport, task: str) -> str:
    result = variant.quality.tasks.get(task) if variant.quality else None
    if variant.quality and task in variant.quality.groups:
        return _group_cell(variant.quality, task)
    if result is None:
        return "–"
    if result.void is not None:
        return VOID
    metric = result.metrics[shown_metric(result)]
    if metric.score is not None and metric.score > 1:
        return figure_cell(metric.score, ".4g")
    error = f" ± {metric.stderr:.3f}" if metric.stderr is not None else ""
    return figure_cell(metric.score, ".3f") + error + documents_cell(result)


def _group_cell(quality: QualityResult, group: str) -> str:
    _, score = group_scores(quality).get(group, ("", None))
    if score is None:
        return VOID if has_void(quality, group) else "–"
    error = "" if score.weighted_stderr is None else f" ± {score.weighted_stderr:.3f}"
    return f"{score.weighted:.3f}{error}"


def comparison_table(report: Report) -> str:
    """The comparison for a terminal, with the gate's findings below it."""
    header, rows = comparison_rows(report)
    lines = [text_table(header, rows), ""]
    findings = [
        (f"{variant.name}: {finding.name}", _MARK[finding.outcome], finding.because)
        for variant in report.variants
        for finding in variant.findings
    ]
    width = max((len(name) for name, _, _ in findings), default=0)
    lines += [f"{name.ljust(width)}  {mark.ljust(9)}  {because}" for name, mark, because in findings]
    lines += [f"{variant.name}: note: {note}" for variant in report.variants for note in variant.validity]
    lines += [
        f"{variant.name}: {failure.stage} {failure.reason}: {failure.message}"
        for variant in report.variants
        for failure in variant.failures
    ]
    lines += (
        ["~ noisy: spread over the recipe's limit even when measured twice"] if _any_noisy(report) else []
    )
    lines += marks_explained(report)
    beside = [report.baseline_run.text] if report.baseline_run else []
    return "\n".join([*lines, "", *beside, *pick_text(report), f"verdict: {report.verdict}"])


def _any_noisy(report: Report) -> bool:
    return any(row.noisy for variant in report.variants if variant.speed for row in variant.speed.of("batch"))


def marks_explained(report: Report) -> list[str]:
    """What the marks in the comparison mean, where they stand there."""
    baseline = report.variant(report.baseline)
    unmeasured = any(_resident(one) is None and _on_disk(one) is not None for one in report.variants)
    across = [f"{one.name} {apart}" for one in report.variants if (apart := engines_apart(baseline, one))]
    return [
        *([f"{ON_DISK} bytes on disk: in memory they weren't measured"] if unmeasured else []),
        *(
            [f"{ACROSS} speed across engines, whose difference is in it: {'; '.join(across)}"]
            if across
            else []
        ),
    ]


# --- Markdown --------------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """The report as Markdown: verdict with its reasons first, then the comparison, findings, provenance."""
    header, rows = comparison_rows(report)
    parts = [
        f"# {report.verdict}: {markdown_line(report.model_id or report.recipe)}",
        "\n".join(f"- {markdown_line(reason)}" for reason in report.because),
        markdown_table(header, rows, text_columns=("verdict",)),
        "\n".join(f"- {line}" for line in marks_explained(report)),
        pick_markdown(report),
        "## Findings",
        markdown_table(
            ("variant", "rule", "outcome", "observed", "limit", "unit", "because"),
            [
                (
                    variant.name,
                    finding.name,
                    finding.outcome,
                    figure_cell(finding.observed, ".4g"),
                    figure_cell(finding.limit, ".4g"),
                    finding.unit,
                    finding.because,
                )
                for variant in report.variants
                for finding in variant.findings
            ],
            text_columns=("rule", "outcome", "unit", "because"),
        ),
    ]
    notes = [
        f"- {markdown_line(f'{variant.name}: {note}')}"
        for variant in report.variants
        for note in variant_notes(variant)
    ]
    if notes:
        parts += ["## Notes", "\n".join(notes)]
    for heading, text in figure_sections(report).items():
        parts += [f"## {heading}", text]
    parts += ["## Provenance", _provenance(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def figure_sections(report: Report) -> dict[str, str]:
    """Every measured figure as Markdown tables, by heading; what wasn't measured is left out, but for speed."""
    sections = {
        "Planned and measured": _planned_markdown(report),
        "Quality": quality_markdown(report),
        "Distribution on held text": distribution_markdown(report),
        "Speed": _speed_markdown(report),
        "Serving": serving_markdown(report),
        "Capacity": capacity_markdown(report),
        "Cost": _cost_markdown(report),
    }
    return {heading: text for heading, text in sections.items() if text}


def variant_notes(variant: VariantReport) -> list[str]:
    """What must be known of a variant's figures: how they were made, what is void or noisy, what failed."""
    notes = list(variant.validity)
    if variant.checkpoint:
        notes += variant.checkpoint.notes
    if variant.speed:
        notes.append(
            f"{variant.speed.engine}: {variant.speed.execution}, computes in {variant.speed.compute_dtype}"
        )
        notes += [*variant.speed.notes, *sweep_notes(variant.speed)]
        notes += [
            f"{row.name}, batch {row.batch_size}, {row.outcome}: {row.because}"
            for row in variant.speed.rows
            if row.because
        ]
        if variant.speed.drift_percent is not None:
            notes.append(f"baseline repeated at the end: {variant.speed.drift_percent:+.1f} % time a token")
    if variant.serving:
        notes += serving_notes(variant.serving)
    if variant.capacity:
        notes += capacity_notes(variant.capacity)
    if variant.quality:
        notes.append(
            f"quality computed in {variant.quality.compute_dtype} at batch size {variant.quality.batch_size}"
        )
        notes += [variant.quality.agreement.text] if variant.quality.agreement else []
        notes += variant.quality.notes
        notes += variant.quality.distribution.notes if variant.quality.distribution else ()
        notes += [f"{name}: {note}" for name, task in variant.quality.tasks.items() for note in task.notes]
    return [*notes, *(f"{failure.stage} {failure.reason}: {failure.message}" for failure in variant.failures)]


def _planned_markdown(report: Report) -> str:
    """What was planned from shapes and the device's measured limits, beside what came out."""
    rows = table_rows((variant.name, variant.planned) for variant in report.variants)
    return markdown_table(HEADER, rows, text_columns=TEXT_COLUMNS) if rows else ""


def _speed_markdown(report: Report) -> str:
    table = speed_markdown(report)
    if not table:
        return "Not measured."
    limits = report.device
    beside = f"Measured read bandwidth {limits.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s." if limits else ""
    return "\n\n".join(part for part in (table, beside, length_tables(report)) if part)


def _cost_markdown(report: Report) -> str:
    rows = [
        (
            variant.name,
            figure_cell(cost.dollars_per_million_input_tokens, ".4g"),
            figure_cell(cost.input_batch_size, "d"),
            figure_cell(cost.dollars_per_million_output_tokens, ".4g"),
            figure_cell(cost.batch_size, "d"),
            figure_cell(cost.dollars_per_hour, ".4g"),
        )
        for variant in report.variants
        if (cost := variant.cost)
    ]
    header = ("variant", "$/1M input tokens", "at batch", "$/1M output tokens", "at batch", "$/h")
    return markdown_table(header, rows) if rows else ""


def _provenance(report: Report) -> str:
    return "```json\n" + json.dumps(report.provenance, indent=2, ensure_ascii=False) + "\n```"
