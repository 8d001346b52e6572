"""Decode of one sequence on one GPU beside the memory's bandwidth, by path: 16, 8 and 4 bits, shapes of 8 B and 27 B.

A step reads every weight once; bytes read ÷ (seconds a step × measured bandwidth) is the share of the roof that a path
reaches, and GOALS are the shares wanted of the best path. Weights are random and made on the device. Each path is a
variant of the speed stage, so that its figures are those of any run: exact lengths, warm-ups, alternation where all fit
together, raw samples kept. Writes `gpu-decode.json` and `gpu-decode.md` to FOLDER and prints the page.

    python -m scripts.gpu_decode FOLDER [--recipes recipes/8b-random.yaml …] [--only int4 "bf16, eager" …]
        [--prompt-tokens 512] [--new-tokens 128] [--repeats 5] [--min-seconds 1]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.architecture import shape_facts
from pipeline.engines.base import Engine
from pipeline.engines.transformers import Transformers
from pipeline.engines.vllm import Vllm
from pipeline.footprint import kv_bytes
from pipeline.hardware import Device, detect
from pipeline.measured import Distribution
from pipeline.model_source import random_source_record, read_config
from pipeline.packages import installed_versions
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.quantizers.torchao import Torchao
from pipeline.recipe import load_recipe
from pipeline.recipe_sections import SpeedSpec, Workload
from pipeline.results import CheckpointManifest
from pipeline.speed_results import SpeedRow, SpeedStageResult
from pipeline.speed_stage import measure_speed
from pipeline.stages import RandomVariantRequest, RunnableCheckpoint, random_variant
from pipeline.text_table import markdown_table
from pipeline.values import Value

ROOT = Path(__file__).resolve().parent.parent
RECIPES = (ROOT / "recipes" / "8b-random.yaml", ROOT / "recipes" / "27b-random.yaml")
GOALS = {"bf16": 0.70, "int8": 0.55, "fp8": 0.55, "int4": 0.45}
"""Shares of the measured bandwidth at batch 1. gpt-fast on an A100-80GB reached 0.685, 0.52 and 0.42 of the data
sheet's with BF16, INT8 and INT4 (github.com/pytorch-labs/gpt-fast, README)."""
QUANTIZERS: tuple[Quantizer, ...] = (
    Native(dtype="bf16"),
    Torchao(weights="int8"),
    Quanto(weights="int8"),
    Bitsandbytes(type="int8"),
    Torchao(weights="fp8"),
    Quanto(weights="fp8"),
    Torchao(weights="int4"),
    Quanto(weights="int4"),
    Bitsandbytes(type="nf4"),
)
PACKAGES = ("torch", "transformers", "torchao", "optimum-quanto", "bitsandbytes", "vllm")
EAGER = "eager"
HEADER = (
    *("path", "tok/s", "TPOT ms", "CV %", "GB a step", "GB/s", "share %", "goal %", "verdict"),
    *("of eager", "how it ran"),
)


class Decoded(Value):
    """One path's decode at batch 1; figures are None where `because` says why there are none.

    `share` is of the bandwidth measured in the same stage; `of_eager` is tok/s ÷ that of the same weights run eagerly.
    """

    path: str
    precision: str
    because: str = ""
    execution: str = ""
    tokens_per_s: float | None = None
    tpot_s: Distribution | None = None
    noisy: bool = False
    bytes_read_per_step: int | None = None
    share: float | None = None
    of_eager: float | None = None

    @property
    def goal(self) -> float:
        """The share that its precision should reach."""
        return GOALS[self.precision]

    @property
    def verdict(self) -> str:
        """met, missed, or why neither can be said, which is so of a noisy figure too."""
        if self.share is None:
            return self.because or "no share"
        if self.noisy:
            return "noisy"
        return "met" if self.share >= self.goal else "missed"


class ModelTable(Value):
    """All paths of one shape; no bandwidth was measured where none of them can run here."""

    model: str
    read_bandwidth_bytes_per_s: float | None
    alternated: bool
    drift_percent: float | None
    paths: tuple[Decoded, ...]

    def best(self, precision: str) -> Decoded | None:
        """The path with the largest share, one that reaches its goal before any that is noisy."""
        measured = [one for one in self.paths if one.precision == precision and one.share is not None]
        return max(measured, key=lambda one: (one.verdict == "met", one.share or 0.0), default=None)

    @property
    def missed(self) -> tuple[str, ...]:
        """Precisions among the paths whose best one doesn't reach its goal, or that none was measured of."""
        wanted = dict.fromkeys(one.precision for one in self.paths)
        best = {precision: self.best(precision) for precision in wanted}
        return tuple(name for name, one in best.items() if one is None or one.verdict != "met")


class Table(Value):
    """Everything that was measured, and on what."""

    device: str
    sheet_bandwidth_bytes_per_s: float | None
    versions: dict[str, str]
    prompt_tokens: int
    new_tokens: int
    models: tuple[ModelTable, ...]


class Candidate(NamedTuple):
    """A path to decode: who stores the weights, and how they run."""

    name: str
    quantizer: Quantizer
    engine: Engine


def candidates(only: Sequence[str] = ("",)) -> Iterator[Candidate]:
    """Every path whose name begins with one of `only`: eager, compiled and through vLLM, where random weights can."""
    return (one for one in _every_candidate() if one.name.startswith(tuple(only)))


def _every_candidate() -> Iterator[Candidate]:
    for quantizer in QUANTIZERS:
        precision = quantizer.precision
        stored = precision if quantizer.kind == "native" else f"{precision} {quantizer.kind}"
        eager = Transformers(compute_dtype="bfloat16", compile="never")
        yield Candidate(f"{stored}, {EAGER}", quantizer, eager)
        if quantizer.compilable:
            compiled = Transformers(compute_dtype="bfloat16", compile="always")
            yield Candidate(f"{stored}, compiled", quantizer, compiled)
        if quantizer.kind == "native":  # vLLM makes no other random weights
            yield Candidate(f"{stored}, vllm", quantizer, Vllm(compute_dtype="bfloat16"))


def measure(
    recipe: Path, *, only: Sequence[str], spec: SpeedSpec, workload: Workload, device: Device, folder: Path
) -> ModelTable:
    """All paths of a recipe's random model; variants and logs go to `folder`. Raises what loading the recipe raises."""
    loaded = load_recipe(recipe)
    architecture = read_config(loaded)
    assert architecture is not None, "recipes of random weights name a config"
    facts = shape_facts(architecture.config)
    manifests: dict[str, CheckpointManifest] = {}
    checkpoints: dict[str, RunnableCheckpoint] = {}
    refused: list[Decoded] = []
    for one in candidates(only):
        problems = one.quantizer.check(device=device.kind) + one.engine.check(device=device.kind)
        problems += one.engine.needs(one.quantizer)
        if problems:
            because = "; ".join(problem.what for problem in problems)
            refused.append(Decoded(path=one.name, precision=one.quantizer.precision, because=because))
            continue
        out = folder / one.name.replace(", ", "-").replace(" ", "-")
        out.mkdir(parents=True)
        request = RandomVariantRequest(
            config=architecture.config,
            seed=loaded.recipe.model.seed,
            source=random_source_record(loaded),
            quantizer=one.quantizer,
            out=str(out),
        )
        manifests[one.name] = random_variant(request, progress=lambda _: None)
        checkpoints[one.name] = RunnableCheckpoint(
            folder=str(out), quantizer=one.quantizer, engine=one.engine, device=device.kind
        )
    if not checkpoints:
        return ModelTable(
            model=loaded.recipe.model.id,
            read_bandwidth_bytes_per_s=None,
            alternated=False,
            drift_percent=None,
            paths=tuple(refused),
        )
    stage = measure_speed(
        checkpoints,
        manifests=manifests,
        facts=facts,
        baseline=next(iter(checkpoints)),
        spec=spec,
        workload=workload,
        cache_bytes=len(checkpoints) * (kv_bytes(facts, workload.prompt_tokens + workload.new_tokens) or 0),
        device=device,
        log=folder / "stages.log",
        progress=_say,
    )
    return _table(loaded.recipe.model.id, stage, checkpoints=checkpoints, refused=refused)


def _table(
    model: str,
    stage: SpeedStageResult,
    *,
    checkpoints: Mapping[str, RunnableCheckpoint],
    refused: Sequence[Decoded],
) -> ModelTable:
    eager = {
        name.removesuffix(EAGER): rate
        for name, result in stage.variants.items()
        if name.endswith(EAGER) and (rate := result.rows[0].decode_tokens_per_s)
    }
    paths = []
    for name, checkpoint in checkpoints.items():
        precision = checkpoint.quantizer.precision
        if name in stage.failures:
            failure = stage.failures[name]
            because = f"{failure.reason.replace('_', ' ')}: {failure.message}"
            paths.append(Decoded(path=name, precision=precision, because=because))
            continue
        result = stage.variants[name]
        row = result.rows[0]
        beside = eager.get(name[: name.rindex(", ") + 2])
        paths.append(_decoded(name, precision, row, execution=result.execution, eager_tokens_per_s=beside))
    first = stage.variants.get(next(iter(checkpoints)))
    return ModelTable(
        model=model,
        read_bandwidth_bytes_per_s=stage.device.read_bandwidth_bytes_per_s,
        alternated=stage.alternated,
        drift_percent=first.drift_percent if first else None,
        paths=(*paths, *refused),
    )


def _decoded(
    name: str, precision: str, row: SpeedRow, *, execution: str, eager_tokens_per_s: float | None
) -> Decoded:
    rate = row.decode_tokens_per_s if row.outcome == "measured" else None
    return Decoded(
        path=name,
        precision=precision,
        because="" if row.outcome == "measured" else f"{row.outcome}: {row.because}",
        execution=execution,
        tokens_per_s=rate,
        tpot_s=row.tpot_s if rate else None,
        noisy=row.noisy,
        bytes_read_per_step=row.bytes_read_per_step,
        share=row.bandwidth_share if rate else None,
        of_eager=rate / eager_tokens_per_s if rate and eager_tokens_per_s else None,
    )


# --- the page --------------------------------------------------------------------------------------------


def page(table: Table) -> str:
    """The table as Markdown, a missed goal as missed."""
    versions = ", ".join(f"{name} {number}" for name, number in table.versions.items())
    sheet = table.sheet_bandwidth_bytes_per_s
    on_sheet = "" if sheet is None else f" (data sheet: {sheet / 1e9:,.0f} GB/s)"
    parts = [
        "# Decode of one sequence beside the memory's bandwidth",
        f"{table.device}; {versions}. Random weights, batch 1, {table.prompt_tokens} prompt tokens and "
        f"{table.new_tokens} new ones. Share: bytes that a step reads (weights as they lie in memory, and the KV cache "
        f"at the middle of the answer) ÷ TPOT ÷ the read bandwidth measured in the same stage{on_sheet}. Goals are for "
        "the best path of a precision.",
    ]
    for model in table.models:
        parts += [
            f"## {model.model}",
            _how_measured(model),
            markdown_table(
                HEADER, [_cells(one) for one in model.paths], text_columns=("verdict", "how it ran")
            ),
            "\n".join(_verdicts(model)),
        ]
    return "\n\n".join(parts)


def _how_measured(model: ModelTable) -> str:
    if model.read_bandwidth_bytes_per_s is None:
        return "No path can run here, so nothing was measured."
    how = "in alternation" if model.alternated else "one after the other"
    drift = (
        ""
        if model.drift_percent is None
        else f"; first path again: {model.drift_percent:+.1f} % time a token"
    )
    return f"Measured bandwidth {model.read_bandwidth_bytes_per_s / 1e9:,.1f} GB/s; paths timed {how}{drift}."


def _cells(one: Decoded) -> tuple[str, ...]:
    tpot, read = one.tpot_s, one.bytes_read_per_step
    return (
        one.path,
        _figure(one.tokens_per_s, ".1f") + ("~" if one.noisy else ""),
        _figure(1e3 * tpot.median if tpot else None, ".3f"),
        _figure(tpot.cv_percent if tpot else None, ".1f"),
        _figure(read and read / 1e9, ".3f"),
        _figure(read / tpot.median / 1e9 if read and tpot else None, ".1f"),
        _figure(one.share and 100 * one.share, ".1f"),
        f"{100 * one.goal:.0f}",
        one.verdict,
        _figure(one.of_eager, ".2f"),
        one.execution,
    )


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _verdicts(model: ModelTable) -> Iterator[str]:
    for precision in dict.fromkeys(one.precision for one in model.paths):
        best = model.best(precision)
        if best is None:
            yield f"- {precision}: not measured on any path"
        else:
            judged = "too noisy to judge" if best.verdict == "noisy" else f"goal {best.verdict}"
            yield (
                f"- {precision}: {judged}: {100 * (best.share or 0):.2f} % by {best.path}, at least "
                f"{100 * best.goal:.0f} % wanted"
            )


def _names() -> str:
    return "; ".join(one.name for one in candidates())


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the best path of every precision reaches its goal for every model, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", type=Path, nargs="+", default=list(RECIPES))
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names of paths")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--min-seconds", type=float, default=1.0)
    given = parser.parse_args(arguments)
    if not any(candidates(given.only)):
        parser.error(f"--only {' '.join(given.only)}: no such path; there are: {_names()}")
    device = detect()
    models = []
    for recipe in given.recipes:
        with tempfile.TemporaryDirectory() as folder:
            models.append(
                measure(
                    recipe,
                    only=given.only,
                    spec=SpeedSpec(repeats=given.repeats, min_seconds=given.min_seconds),
                    workload=Workload(prompt_tokens=given.prompt_tokens, new_tokens=given.new_tokens),
                    device=device,
                    folder=Path(folder),
                )
            )
    table = Table(
        device=device.name,
        sheet_bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        versions=installed_versions(PACKAGES),
        prompt_tokens=given.prompt_tokens,
        new_tokens=given.new_tokens,
        models=tuple(models),
    )
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "gpu-decode.json").write_text(table.to_json() + "\n", encoding="utf-8")
    (given.folder / "gpu-decode.md").write_text(page(table) + "\n", encoding="utf-8")
    print(page(table))
    return 1 if any(model.missed for model in models) else 0


if __name__ == "__main__":
    raise SystemExit(main())
