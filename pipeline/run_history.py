"""Runs side by side and over time: what changed from each to the next, what moved beyond noise, and the main figures.

history = run_history(runs)
print(history_text(history))
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.errors import UsageError
from pipeline.figures import Figure, Section, variant_figures
from pipeline.results import Report, VariantReport
from pipeline.run_changes import Change, run_changes, verdict_changes
from pipeline.run_moves import Move, run_moves
from pipeline.scores import shown_metric
from pipeline.stored_reports import StoredRun
from pipeline.text_table import figure_cell, text_table
from pipeline.values import Value

MOST_RUNS_IN_A_TABLE = 8
"""A terminal has room for so many columns; the page and the JSON hold all."""


class ComparedRun(Value):
    """One run, by the name of its folder."""

    name: str
    file: str
    started_at: str
    recipe: str
    recipe_digest: str
    verdict: str
    machine: str
    commit: str | None


class Step(Value):
    """From one run to the next: places in `RunHistory.runs`, causes, verdicts and figures."""

    before: int
    after: int
    changes: tuple[Change, ...]
    verdicts: tuple[Change, ...]
    moves: tuple[Move, ...]


class Point(Value):
    """A figure in one run; without a value it wasn't measured there. `moved`: apart from the run before."""

    run: int
    value: float | None
    low: float | None = None
    high: float | None = None
    moved: bool = False


class Series(Value):
    """One main figure of one variant over all runs."""

    variant: str
    section: Section
    metric: str
    unit: str
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """SECTION.METRIC."""
        return f"{self.section}.{self.metric}"


class RunHistory(Value):
    """Runs of one model in the order of their starts; `left_out` says which others were found, and why not."""

    model: str | None
    runs: tuple[ComparedRun, ...]
    steps: tuple[Step, ...]
    series: tuple[Series, ...]
    left_out: tuple[str, ...] = ()


def run_history(runs: Sequence[StoredRun], *, unread: Sequence[str] = ()) -> RunHistory:
    """Compare each run with the next. Raises UsageError where there is nothing to compare.

    The runs that were named must be of one model; those found in a store are left out where they are of another one.
    """
    model, chosen, others = _of_one_model(runs)
    if len(chosen) < 2:
        found = f"only {chosen[0].name} is there" if chosen else "no run is there"
        raise UsageError(
            f"compare needs two runs, {found}; name another report.json or run folder, or a store with several"
            + "".join(f"\n  left out: {reason}" for reason in (*others, *unread))
        )
    pairs = list(enumerate(itertools.pairwise(chosen)))
    if not any(_shared(before.report, after.report) for _, (before, after) in pairs):
        names = "; ".join(f"{run.name}: {', '.join(v.name for v in run.report.variants)}" for run in chosen)
        raise UsageError(f"compare: no two neighbouring runs share a variant ({names})")
    steps = tuple(_step(place, before.report, after.report) for place, (before, after) in pairs)
    return RunHistory(
        model=model,
        runs=tuple(_compared(run) for run in chosen),
        steps=steps,
        series=tuple(_series(chosen, steps)),
        left_out=(*others, *unread),
    )


def _of_one_model(runs: Sequence[StoredRun]) -> tuple[str | None, list[StoredRun], list[str]]:
    """The model of the named runs, or of the newest; its runs; and a line for each of the others."""
    named = [run for run in runs if run.named]
    models = list(dict.fromkeys(run.report.model_id for run in named))
    if len(models) > 1:
        of = "; ".join(f"{run.name}: {run.report.model_id}" for run in named)
        raise UsageError(f"compare: runs of several models don't compare ({of}); name runs of one")
    model = models[0] if models else (runs[-1].report.model_id if runs else None)
    chosen = [run for run in runs if run.report.model_id == model]
    others = [f"{run.name}: a run of {run.report.model_id}" for run in runs if run.report.model_id != model]
    return model, chosen, others


def _shared(before: Report, after: Report) -> bool:
    return any(before.variant(variant.name) is not None for variant in after.variants)


def _step(place: int, before: Report, after: Report) -> Step:
    return Step(
        before=place,
        after=place + 1,
        changes=run_changes(before, after),
        verdicts=verdict_changes(before, after),
        moves=run_moves(before, after),
    )


def _compared(run: StoredRun) -> ComparedRun:
    report = run.report
    git, device = report.provenance.get("git"), report.provenance.get("device")
    commit = git.get("commit") if isinstance(git, dict) else None
    fingerprint = str(report.provenance.get("device_fingerprint") or "?")
    return ComparedRun(
        name=run.name,
        file=str(run.file),
        started_at=report.started_at,
        recipe=report.recipe,
        recipe_digest=report.recipe_digest,
        verdict=report.verdict,
        machine=f"{device.get('name') if isinstance(device, dict) else '?'} ({fingerprint[:6]})",
        commit=None if commit is None else str(commit),
    )


# --- the main figures over time --------------------------------------------------------------------------


def _series(runs: Sequence[StoredRun], steps: Sequence[Step]) -> Iterator[Series]:
    """For each variant, in the newest run's order first: decode, TTFT, memory, capacity, price, each task's metric."""
    names = dict.fromkeys(variant.name for run in reversed(runs) for variant in run.report.variants)
    moved = {(step.after, move.name) for step in steps for move in step.moves if move.outcome == "moved"}
    for name in names:
        found = [_by_name(run.report.variant(name)) for run in runs]
        variants = [variant for run in runs if (variant := run.report.variant(name)) is not None]
        for metric in dict.fromkeys(metric for variant in variants for metric in _main(variant)):
            figures = [by_name.get(metric) for by_name in found]
            shown = next((one for one in figures if one is not None and one.value is not None), None)
            if shown is not None:
                yield Series(
                    variant=name,
                    section=shown.section,
                    metric=shown.metric,
                    unit=shown.unit,
                    points=tuple(
                        _point(place, one, moved=(place, f"{name} {metric}") in moved)
                        for place, one in enumerate(figures)
                    ),
                )


def _by_name(variant: VariantReport | None) -> dict[str, Figure]:
    return {figure.name: figure for figure in variant_figures(variant)} if variant else {}


def _main(variant: VariantReport) -> Iterator[str]:
    """Names of a variant's main figures."""
    rows = variant.speed.of("batch") if variant.speed else ()
    for row in rows[:1]:
        yield f"speed.batch_{row.batch_size}.decode_tokens_per_s"
        yield f"speed.batch_{row.batch_size}.ttft_s"
    yield from ("memory.weight_bytes_resident", "capacity.measured_sequences")
    yield "cost.dollars_per_million_output_tokens"
    for task, result in variant.quality.tasks.items() if variant.quality else ():
        yield f"quality.{task}.{shown_metric(result)}"


def _point(place: int, figure: Figure | None, *, moved: bool) -> Point:
    if figure is None or figure.value is None:
        return Point(run=place, value=None)
    return Point(run=place, value=figure.value, low=figure.low, high=figure.high, moved=moved)


# --- for a terminal --------------------------------------------------------------------------------------


def history_text(history: RunHistory) -> str:
    """The runs, then each step, then (from three runs on) the main figures over time; `*` moved beyond noise."""
    rows = [
        (
            str(place + 1),
            run.name,
            run.started_at,
            run.recipe_digest[:8],
            run.verdict,
            run.machine,
            _commit(run),
        )
        for place, run in enumerate(history.runs)
    ]
    header = ("", "run", "started", "recipe", "verdict", "machine", "commit")
    parts = [f"{len(history.runs)} runs of {history.model}, in the order of their starts"]
    parts.append(text_table(header, rows, text_columns=header))
    parts += [_step_text(step) for step in history.steps]
    if len(history.runs) > 2:
        parts.append(_series_text(history))
    parts += [f"left out: {reason}" for reason in history.left_out]
    return "\n\n".join(parts)


def _commit(run: ComparedRun) -> str:
    return (run.commit or "–")[:8]


def _step_text(step: Step) -> str:
    title = f"{step.before + 1} → {step.after + 1}"
    changed = [
        (one.what, one.before or "–", "→", one.after or "–") for one in (*step.changes, *step.verdicts)
    ]
    lines = [f"{title}, what changed:"]
    lines += [_indented(_columns(changed))] if changed else ["  nothing that is known of"]
    lines += [f"{title}, what moved beyond noise:", _moves_text(step.moves)]
    return "\n".join(lines)


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Left-aligned columns; a long value doesn't push the others apart."""
    widths = [min(40, max(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _moves_text(moves: Sequence[Move]) -> str:
    rows = [
        (
            *(move.variant, f"{move.section}.{move.metric}"),
            *(value_cell(move.before), value_cell(move.after), move.unit),
            figure_cell(move.change_percent, "+.1f"),
            move.because,
        )
        for move in moves
        if move.outcome == "moved"
    ]
    header = ("variant", "metric", "before", "after", "unit", "change %", "how it is known")
    table = (
        text_table(header, rows, text_columns=("metric", "unit", "how it is known")) if rows else "nothing"
    )
    return _indented("\n".join((table, *rest(moves))))


def rest(moves: Sequence[Move]) -> Iterator[str]:
    """What isn't beyond noise: how many figures, and why some can't be compared, each reason once."""
    noise = sum(move.outcome == "within noise" for move in moves)
    unknown = sum(move.outcome == "noise unknown" for move in moves)
    if noise or unknown:
        yield f"{noise} more differ within noise, {unknown} were measured once, so that their noise isn't known"
    sampled = noise + sum(move.outcome == "moved" and "counted" not in move.because for move in moves)
    expected = round(0.05 * sampled)
    if expected:
        yield f"of {sampled} sampled figures that differ about {expected} would by chance alone (95 % intervals)"
    for outcome in ("appeared", "vanished"):
        found = [f"{move.variant} {move.section}" for move in moves if move.outcome == outcome]
        for whose, count in Counter(found).items():
            yield f"{whose}: {_figures(count)} {'only now' if outcome == 'appeared' else 'no more'}"
    reasons = Counter(move.because for move in moves if move.outcome == "not comparable")
    yield from (f"{_figures(count)} not comparable: {reason}" for reason, count in reasons.items())


def _figures(count: int) -> str:
    return f"{count} figure{'s' if count != 1 else ''}"


def value_cell(value: float | None) -> str:
    """Whole numbers whole, others with five digits."""
    if value is None:
        return "–"
    return f"{int(value):,}" if value.is_integer() and abs(value) < 2**53 else f"{value:.5g}"


def _series_text(history: RunHistory) -> str:
    last = range(max(0, len(history.runs) - MOST_RUNS_IN_A_TABLE), len(history.runs))
    rows = [
        (
            *(series.variant, series.name, series.unit),
            *(value_cell(series.points[at].value) + ("*" if series.points[at].moved else "") for at in last),
        )
        for series in history.series
    ]
    header = ("variant", "metric", "unit", *(str(at + 1) for at in last))
    title = "over time (* apart from the run before by more than noise):"
    return f"{title}\n{_indented(text_table(header, rows, text_columns=('metric', 'unit')))}"
