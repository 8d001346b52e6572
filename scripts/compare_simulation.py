"""Checks the simulation against a real continuous-batching engine on traces it wasn't calibrated with.

Requests of two kinds are served to time the engine's steps, again and again; between two such calibrations a trace of
other lengths, load and seed is served, which is simulated with the step times fitted to its neighbours. So a machine
whose speed drifts is judged by what it was at the time. Where all requests are there at
once, what is in each step doesn't depend on time, so that the schedules are compared step by step too. Writes
`simulation.json` and `simulation.md` to FOLDER and prints the page.

    python -m scripts.compare_simulation FOLDER [--seconds 40] [--threads 1] [--model DIRECTORY]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from pipeline.hardware import detect
from pipeline.simulation import Request, Serving, SimulationResult, replay
from pipeline.step_times import MeasuredSteps, StepSample, Term, fit_step_times
from pipeline.text_table import markdown_table
from pipeline.traffic import Lognormal, Traffic, Uniform
from pipeline.values import Value
from scripts.fetch_demo_model import MODEL_FOLDER
from scripts.paged_engine import EngineRun, PagedEngine

MAX_BATCH_TOKENS, MAX_SEQUENCES, BLOCK_TOKENS = 256, 8, 16
TERMS: tuple[Term, ...] = (
    # `masked_pair`, not `pair`: with SDPA on a CPU the engine puts all sequences of a step side by side and
    # masks what they mustn't see of each other, so every query meets every key.
    *("step", "batched", "prefill_token", "decode_sequence", "cached_token", "masked_pair"),
)
PREEMPTION = (
    "Shown and not judged where the cache is too small: what is simulated is vLLM's rule, by which the youngest "
    "sequence gives way and is the next to be admitted again; this engine takes the youngest of those that lack a "
    "block, puts it at the end of the queue and admits nobody until a sequence ends."
)
MOST_REQUESTS = 2_000
CALIBRATION_SHARE = 0.6
"""Seconds of a calibration, as a share of a trace's."""
LIMITS = {"throughput": 0.15, "p50": 0.20, "p99": 0.35}
CALIBRATIONS = (
    Traffic(requests_per_s=1.0, prompt_tokens=Uniform(low=8, high=400), new_tokens=Uniform(low=1, high=48)),
    Traffic(requests_per_s=1.0, prompt_tokens=Uniform(low=1, high=24), new_tokens=Uniform(low=8, high=48)),
)
"""Prompts on top of deep caches in one, decoding at every batch size in the other."""


class TestTrace(Value):
    """A trace to predict: its lengths, and its rate as a share of the simulated capacity (None: all at once).

    `cache_blocks` may be fewer than the sequences grow to, so that some are preempted; such a trace is shown
    and not judged (`PREEMPTION`).
    """

    __test__ = False  # a name that pytest would otherwise collect

    name: str
    load: float | None
    prompt_tokens: int | Uniform | Lognormal
    new_tokens: int | Uniform | Lognormal
    seed: int
    cache_blocks: int = 512
    judged: bool = True


TRACES = (
    TestTrace(
        name="light, mixed lengths",
        load=0.3,
        prompt_tokens=Lognormal(median=60, p95=220, max=400),
        new_tokens=Lognormal(median=14, p95=40, max=48),
        seed=101,
    ),
    TestTrace(
        name="loaded, short answers",
        load=0.75,
        prompt_tokens=Lognormal(median=40, p95=160, max=400),
        new_tokens=Uniform(low=1, high=12),
        seed=102,
    ),
    TestTrace(
        name="loaded, long answers",
        load=0.75,
        prompt_tokens=Uniform(low=8, high=48),
        new_tokens=Lognormal(median=26, p95=48, max=48),
        seed=103,
    ),
    TestTrace(
        name="burst, mixed lengths",
        load=None,
        prompt_tokens=Lognormal(median=50, p95=300, max=400),
        new_tokens=Lognormal(median=12, p95=40, max=48),
        seed=104,
    ),
    TestTrace(
        name="overload, long prompts",
        load=1.5,
        prompt_tokens=Uniform(low=150, high=400),
        new_tokens=Uniform(low=4, high=24),
        seed=105,
    ),
    TestTrace(
        name="burst, small cache",
        load=None,
        prompt_tokens=Uniform(low=8, high=48),
        new_tokens=Lognormal(median=26, p95=48, max=48),
        seed=106,
        cache_blocks=28,
        judged=False,
    ),
)


class Figure(Value):
    """One predicted figure beside the real one; `limit` is the deviation allowed of it."""

    name: str
    simulated: float
    real: float
    limit: float

    @property
    def ratio(self) -> float:
        """Simulated ÷ real."""
        return self.simulated / self.real

    @property
    def holds(self) -> bool:
        """Whether the prediction is within the limit."""
        return abs(self.ratio - 1) <= self.limit


class Comparison(Value):
    """One trace: simulated, then served.

    `step_error` is the fit's error on this trace's real steps (sum of predicted step times ÷ real − 1): what
    part of a deviation is the machine's speed or the fit, and what the scheduling's. `equal_steps` counts the
    first steps that hold exactly the same in both, of a burst; None for other traces.
    """

    trace: TestTrace
    requests: int
    requests_per_s_offered: float | None
    step_times: MeasuredSteps
    simulated: SimulationResult
    real: SimulationResult
    step_error: float
    equal_steps: int | None
    figures: tuple[Figure, ...]


class Check(Value):
    """Everything the check found."""

    model: str
    processor: str
    threads: int
    versions: dict[str, str]
    comparisons: tuple[Comparison, ...]

    @property
    def missed(self) -> list[str]:
        """The figures beyond their limits."""
        return [
            f"{one.trace.name}: {figure.name} {figure.ratio:.2f}"
            for one in self.comparisons
            for figure in one.figures
            if one.trace.judged and not figure.holds
        ]


def check(model_folder: Path, *, seconds: float, threads: int) -> Check:
    """Serve each trace for about `seconds`, between two calibrations, and predict it from these."""
    comparisons: list[Comparison] = []
    for blocks in sorted({trace.cache_blocks for trace in TRACES}, reverse=True):
        with PagedEngine(model_folder, serving=_serving(blocks), threads=threads) as engine:
            _say("warming up")
            engine.serve(_at_once(CALIBRATIONS[1].requests(8, seed=1)), seed=1)
            calibration = _calibration_requests(engine, seconds=CALIBRATION_SHARE * seconds)
            before = _calibrate(engine, calibration)
            for trace in [trace for trace in TRACES if trace.cache_blocks == blocks]:
                served = _serve(engine, trace, _fit(before), seconds=seconds)
                after = _calibrate(engine, calibration)
                comparisons.append(_compare(served, _fit([*before, *after]), serving=engine.serving))
                before = after
    return Check(
        model=model_folder.name,
        processor=detect().name,
        threads=threads,
        versions={name: version(name) for name in ("torch", "transformers")},
        comparisons=tuple(comparisons),
    )


def _serving(cache_blocks: int) -> Serving:
    return Serving(
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_sequences=MAX_SEQUENCES,
        block_tokens=BLOCK_TOKENS,
        cache_blocks=cache_blocks,
    )


def _calibration_requests(engine: PagedEngine, *, seconds: float) -> list[list[Request]]:
    """Requests that keep the engine at every batch size: a first look, at a few at once, sets their rate."""
    rough = fit_step_times(
        engine.serve(_at_once(CALIBRATIONS[0].requests(12, seed=3)), seed=3).steps,
        terms=("step", "prefill_token", "decode_sequence"),
    )
    found = []
    for place, lengths in enumerate(CALIBRATIONS):
        rate = 0.7 * _capacity(lengths, rough, engine.serving)
        traffic = lengths.model_copy(update={"requests_per_s": rate})
        requests = traffic.requests(MOST_REQUESTS, seed=4 + place)
        found.append(_lasting(requests, rough, engine.serving, seconds=seconds / len(CALIBRATIONS)))
    return found


def _calibrate(engine: PagedEngine, calibration: Sequence[Sequence[Request]]) -> list[StepSample]:
    return [step for requests in calibration for step in engine.serve(requests, seed=2).steps]


def _fit(steps: Sequence[StepSample]) -> MeasuredSteps:
    return fit_step_times(steps, terms=TERMS)


def _at_once(requests: Sequence[Request]) -> list[Request]:
    return [Request(0.0, one.prompt_tokens, one.new_tokens) for one in requests]


class _Served(NamedTuple):
    """A trace's requests, their rate (None: all at once) and what the engine made of them."""

    trace: TestTrace
    requests: list[Request]
    rate: float | None
    run: EngineRun


def _serve(engine: PagedEngine, trace: TestTrace, step_times: MeasuredSteps, *, seconds: float) -> _Served:
    """`step_times` only set the rate and how many requests last so long."""
    serving = engine.serving
    lengths = Traffic(requests_per_s=1.0, prompt_tokens=trace.prompt_tokens, new_tokens=trace.new_tokens)
    rate = _capacity(lengths, step_times, serving) * (trace.load or 1.0)
    requests = lengths.model_copy(update={"requests_per_s": rate}).requests(MOST_REQUESTS, seed=trace.seed)
    if trace.load is None:
        requests = _at_once(requests)
    requests = _lasting(requests, step_times, serving, seconds=seconds)
    _say(f"{trace.name}: {len(requests)} requests")
    return _Served(
        trace, requests, None if trace.load is None else rate, engine.serve(requests, seed=trace.seed)
    )


def _compare(served: _Served, step_times: MeasuredSteps, *, serving: Serving) -> Comparison:
    """The trace simulated with step times that know nothing of its own run."""
    written = WrittenSteps(step_times)
    simulated = replay(served.requests, serving=serving, step_times=written).result()
    real, steps = served.run.replay.result(), served.run.steps
    found = Comparison(
        trace=served.trace,
        requests=len(served.requests),
        requests_per_s_offered=served.rate,
        step_times=step_times,
        simulated=simulated,
        real=real,
        step_error=_step_error(step_times, steps),
        equal_steps=equal_steps(written.steps, steps) if served.rate is None else None,
        figures=_figures(simulated, real),
    )
    ratios = ", ".join(f"{figure.name} {figure.ratio:.2f}" for figure in found.figures)
    _say(f"  step times off by {found.step_error:+.1%}; simulated ÷ real: {ratios}")
    return found


class WrittenSteps:
    """Step times that write down what they are asked for: the schedule, when no request comes in between."""

    def __init__(self, times: MeasuredSteps) -> None:
        self.times = times
        self.steps: list[tuple[int, int, float, float]] = []

    def step_s(self, *, prefill_tokens: int, decode_sequences: int, cached_tokens: int, pairs: int) -> float:
        self.steps.append((prefill_tokens, decode_sequences, cached_tokens, pairs))
        return self.times.step_s(
            prefill_tokens=prefill_tokens,
            decode_sequences=decode_sequences,
            cached_tokens=cached_tokens,
            pairs=pairs,
        )

    def decode_steps_s(self, steps: int, *, sequences: int, cached_tokens: int) -> float:
        """As `times` tells it."""
        for step in range(steps):
            cached = cached_tokens + step * sequences
            self.steps.append((0, sequences, cached, cached + sequences))
        return self.times.decode_steps_s(steps, sequences=sequences, cached_tokens=cached_tokens)


def equal_steps(written: Sequence[tuple[int, int, float, float]], real: Sequence[StepSample]) -> int:
    """How many steps from the first on hold the same prompt tokens, sequences, cached tokens and pairs."""
    held = [(one.prefill_tokens, one.decode_sequences, one.cached_tokens, one.pairs) for one in real]
    for place, (left, right) in enumerate(zip(written, held, strict=False)):
        if left != right:
            return place
    return min(len(written), len(held))


def _capacity(traffic: Traffic, step_times: MeasuredSteps, serving: Serving) -> float:
    """Requests a second that the engine should serve when the queue is never empty."""
    burst = _at_once(traffic.requests(400, seed=9))
    found = replay(burst, serving=serving, step_times=step_times).result().requests_per_s
    assert found is not None
    return found


def _lasting(
    requests: Sequence[Request], step_times: MeasuredSteps, serving: Serving, *, seconds: float
) -> list[Request]:
    """As many of the first requests as should have ended after `seconds`, at least 10."""
    ends_s = replay(requests, serving=serving, step_times=step_times).end_s
    return list(requests[: max(10, int((ends_s < seconds).sum()))])


def _step_error(step_times: MeasuredSteps, steps: Sequence[StepSample]) -> float:
    predicted = sum(
        step_times.step_s(
            prefill_tokens=step.prefill_tokens,
            decode_sequences=step.decode_sequences,
            cached_tokens=int(step.cached_tokens),
            pairs=int(step.pairs),
        )
        for step in steps
    )
    return predicted / sum(step.seconds for step in steps) - 1


def _figures(one: SimulationResult, other: SimulationResult) -> tuple[Figure, ...]:
    rows: list[tuple[str, float | None, float | None, str]] = [
        ("output tokens/s", one.output_tokens_per_s, other.output_tokens_per_s, "throughput"),
        ("requests/s", one.requests_per_s, other.requests_per_s, "throughput"),
    ]
    for name in ("ttft_s", "tpot_s", "latency_s"):
        for percentile in ("p50", "p99"):
            pair = [getattr(getattr(each, name), percentile, None) for each in (one, other)]
            rows.append((f"{name.removesuffix('_s').upper()} {percentile} s", pair[0], pair[1], percentile))
    return tuple(
        Figure(name=name.replace("LATENCY", "latency"), simulated=left, real=right, limit=LIMITS[kind])
        for name, left, right, kind in rows
        if left is not None and right is not None
    )


def table(found: Check) -> str:
    """The comparison as Markdown, a row for each figure of each trace."""
    rows = [
        (
            one.trace.name if place == 0 else "",
            figure.name,
            f"{figure.simulated:.3g}",
            f"{figure.real:.3g}",
            f"{figure.ratio:.2f}",
            _judged(one.trace, figure),
        )
        for one in found.comparisons
        for place, figure in enumerate(one.figures)
    ]
    return markdown_table(
        ("trace", "figure", "simulated", "real", "ratio", "limit"), rows, text_columns=("figure", "limit")
    )


def _judged(trace: TestTrace, figure: Figure) -> str:
    if not trace.judged:
        return "not judged"
    return f"± {figure.limit:.0%}" + ("" if figure.holds else " **missed**")


def page(found: Check) -> str:
    """The Markdown file."""
    paragraphs = [
        "# The simulation beside a real engine",
        f"{found.model} in FP32, {found.threads} thread(s) of {found.processor}; transformers "
        f"{found.versions['transformers']}, torch {found.versions['torch']}. At most {MAX_SEQUENCES} sequences and "
        f"{MAX_BATCH_TOKENS} tokens a step, blocks of {BLOCK_TOKENS} tokens.",
        "Each trace was served between two calibrations by other requests, and predicted from their steps alone: the "
        "machine's speed changes from minute to minute.",
        table(found),
        traces_table(found),
        PREEMPTION,
        "Missed: " + ("; ".join(found.missed) or "none") + ".",
    ]
    return "\n\n".join(paragraphs)


def traces_table(found: Check) -> str:
    """What each trace was, and how well its steps were told."""
    rows = [
        (
            one.trace.name,
            str(one.requests),
            "all at once" if one.requests_per_s_offered is None else f"{one.requests_per_s_offered:.2f}",
            f"{one.real.mean_batch:.1f}",
            f"{one.simulated.preemptions} / {one.real.preemptions}",
            f"{one.simulated.steps} / {one.real.steps}",
            "" if one.equal_steps is None else str(one.equal_steps),
            str(one.step_times.samples),
            f"{one.step_times.median_error:.1%}",
            f"{one.step_error:+.1%}",
        )
        for one in found.comparisons
    ]
    header = (
        *("trace", "requests", "offered requests/s", "mean batch", "preemptions, simulated / real"),
        *("steps, simulated / real", "equal from the first on"),
        *("calibration steps", "their median error", "this trace's step times off by"),
    )
    return markdown_table(header, rows)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> int:
    """0 when every figure is within its limit, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each of the six traces")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    arguments = parser.parse_args()
    found = check(arguments.model, seconds=arguments.seconds, threads=arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "simulation.json").write_text(found.to_json() + "\n", encoding="utf-8")
    (arguments.folder / "simulation.md").write_text(page(found) + "\n", encoding="utf-8")
    print(page(found))
    return 1 if found.missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
