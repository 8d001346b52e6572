"""How well the speed stage repeats itself: the whole stage several times, and the spread of its figures.

The checkpoints are made once; every run measures the device's bandwidth, loads every variant into a process of its
own and times it anew. What is judged is what a report would show: decode rate, TTFT and the achieved share of the
measured bandwidth. A figure whose coefficient of variation over the runs is above the limit must have been marked
noisy by the stage itself in most of them, or it claims more than it knows. Writes `spread.json` and `spread.md` to
FOLDER.

    python -m scripts.measure_spread FOLDER [--runs 5] [--recipe recipes/smollm2-speed.yaml]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from pipeline.commands import store_from_environment
from pipeline.measured import Distribution
from pipeline.recipe import load_recipe
from pipeline.run_state import RunState, prepare
from pipeline.runner import run_stages
from pipeline.speed_results import SpeedRow, SpeedStageResult
from pipeline.speed_stage import measure_speed
from pipeline.text_table import markdown_table
from pipeline.values import Value

LIMIT_PERCENT = 3.0
HEADER = (
    *("variant", "test", "batch", "figure", "unit", "median", "CV % over runs", "median CV % within a run"),
    *("noisy in", "every run"),
)


class Spread(Value):
    """One figure of one shape over all runs; `noisy_runs` are those that the stage marked so."""

    variant: str
    test: str
    batch_size: int
    figure: str
    unit: str
    over_runs: Distribution
    within_run_cv_percent: float
    noisy_runs: int

    @property
    def honest(self) -> bool:
        """Whether the spread is within the limit, or most runs said that they are noisy."""
        return self.over_runs.cv_percent <= LIMIT_PERCENT or 2 * self.noisy_runs > len(self.over_runs.samples)


class Spreads(Value):
    """All figures, and the bandwidth that each run measured."""

    model: str
    device: str
    threads: int | None
    versions: dict[str, str]
    bandwidth_gb_per_s: Distribution
    drift_percent: tuple[float | None, ...]
    figures: tuple[Spread, ...]
    missing: tuple[str, ...]
    """Rows that some run couldn't measure: nothing may be said of them."""

    @property
    def holds(self) -> bool:
        """Whether every row was measured in every run and every figure is honest."""
        return bool(self.figures) and not self.missing and all(one.honest for one in self.figures)


def measure(recipe: Path, *, runs: int) -> Spreads:
    """Quantize once, then run the speed stage `runs` times."""
    store = store_from_environment()
    store.prepare()
    with store.lock():
        state = prepare(load_recipe(recipe), store=store, progress_stream=sys.stderr)
        # Without its sections a run ends after the checkpoints.
        only_quantize = {"speed": None, "serving": None, "capacity": None, "quality": None}
        made = replace(state, recipe=state.recipe.model_copy(update=only_quantize))
        run_stages(made)
        results = [_run(made, state=state, number=number) for number in range(1, runs + 1)]
    return Spreads(
        model=state.recipe.model.id,
        device=state.device.name,
        threads=state.device.threads,
        versions={name: version(name) for name in ("torch", "transformers")},
        bandwidth_gb_per_s=Distribution.of([one.device.read_bandwidth_bytes_per_s / 1e9 for one in results]),
        drift_percent=tuple(one.variants[state.recipe.baseline].drift_percent for one in results),
        figures=tuple(_spreads(results)),
        missing=tuple(_missing(results, [variant.name for variant in state.recipe.ordered()])),
    )


def _run(made: RunState, *, state: RunState, number: int) -> SpeedStageResult:
    assert state.recipe.speed is not None
    return measure_speed(
        {variant.name: made.runnable(variant) for variant in state.recipe.ordered()},
        manifests=made.manifests,
        facts=state.ready.facts,
        baseline=state.recipe.baseline,
        spec=state.recipe.speed,
        workload=state.recipe.workload,
        cache_bytes=state.speed_cache_bytes(state.recipe.ordered()),
        device=state.device,
        log=state.log,
        progress=lambda text: _say(f"run {number}: {text}"),
    )


FIGURES: dict[str, tuple[str, Callable[[SpeedRow], float | None], Callable[[SpeedRow], Distribution | None]]]
FIGURES = {
    "decode": ("tok/s", lambda row: row.decode_tokens_per_s, lambda row: row.tpot_s),
    "bandwidth share": ("", lambda row: row.bandwidth_share, lambda row: row.tpot_s),
    "TTFT": ("ms", lambda row: row.ttft_s.median * 1e3 if row.ttft_s else None, lambda row: row.ttft_s),
}


def _missing(results: Sequence[SpeedStageResult], names: Sequence[str]) -> Iterator[str]:
    for number, result in enumerate(results, 1):
        for name in names:
            if name not in result.variants:
                yield f"run {number}: {name}: {result.failures[name].message}"
                continue
            for row in result.variants[name].rows:
                if row.outcome != "measured":
                    yield f"run {number}: {name}, {row.name}: {row.outcome}: {row.because}"


def _spreads(results: Sequence[SpeedStageResult]) -> list[Spread]:
    """Figures that every run has; of prefills alone the TTFT only, since they decode nothing."""
    found = []
    for name, first in results[0].variants.items():
        for place in range(len(first.rows)):
            rows = [one.variants[name].rows[place] for one in results if name in one.variants]
            for figure in FIGURES:
                spread = _spread(name, rows, figure=figure)
                if spread and len(spread.over_runs.samples) == len(results):
                    found.append(spread)
    return found


def _spread(variant: str, rows: Sequence[SpeedRow], *, figure: str) -> Spread | None:
    unit, value_of, samples_of = FIGURES[figure]
    values = [value for row in rows if row.outcome == "measured" and (value := value_of(row)) is not None]
    within = [samples.cv_percent for row in rows if (samples := samples_of(row))]
    if not values:
        return None
    return Spread(
        variant=variant,
        test=rows[0].name,
        batch_size=rows[0].batch_size,
        figure=figure,
        unit=unit,
        over_runs=Distribution.of(values),
        within_run_cv_percent=statistics.median(within),
        noisy_runs=sum(row.noisy for row in rows),
    )


# --- the page --------------------------------------------------------------------------------------------


def page(found: Spreads) -> str:
    """The spreads as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    bandwidth = found.bandwidth_gb_per_s
    drifts = ", ".join("–" if drift is None else f"{drift:+.1f} %" for drift in found.drift_percent)
    silent = [one for one in found.figures if not one.honest]
    missing = "".join(f"\n- {one}" for one in found.missing)
    judged = (
        f"{len(silent)} of {len(found.figures)} figures spread more than {LIMIT_PERCENT:g} % over the runs "
        "without being marked noisy in most of them"
        if silent
        else f"every figure spreads at most {LIMIT_PERCENT:g} % over the runs, or was marked noisy"
    )
    return "\n\n".join(
        (
            "# The speed stage, run again and again",
            f"{found.model} on {found.device}, {found.threads} thread(s); {versions}. "
            f"{len(bandwidth.samples)} runs of the whole stage; each measured its own read bandwidth: "
            f"{', '.join(f'{one:.1f}' for one in bandwidth.samples)} GB/s (CV {bandwidth.cv_percent:.1f} %). "
            f"Drift of the baseline within each run: {drifts}.",
            f"Verdict: {judged}." + (f" Not measured:\n{missing}" if missing else ""),
            markdown_table(
                HEADER, _rows(found.figures), text_columns=("test", "figure", "unit", "every run")
            ),
        )
    )


def _rows(figures: Sequence[Spread]) -> list[tuple[str, ...]]:
    return [
        (
            one.variant,
            one.test,
            str(one.batch_size),
            one.figure,
            one.unit,
            f"{one.over_runs.median:.4g}",
            f"{one.over_runs.cv_percent:.1f}" + ("" if one.honest else " (not marked)"),
            f"{one.within_run_cv_percent:.1f}",
            f"{one.noisy_runs} of {len(one.over_runs.samples)}",
            ", ".join(f"{value:.4g}" for value in one.over_runs.samples),
        )
        for one in figures
    ]


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> int:
    """0 when every figure is within the limit or was marked, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--recipe", type=Path, default=Path("recipes") / "smollm2-speed.yaml")
    arguments = parser.parse_args()
    found = measure(arguments.recipe, runs=arguments.runs)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "spread.json").write_text(found.to_json() + "\n", encoding="utf-8")
    (arguments.folder / "spread.md").write_text(page(found) + "\n", encoding="utf-8")
    print(page(found))
    return 0 if found.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
