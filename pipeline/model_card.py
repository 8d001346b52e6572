"""The model card of a promoted checkpoint: `README.md` with the measured triple, its limits, and how to load it. Pure.

The head is the Hub's metadata: `model-index` holds every task's scores, so that a repository made of the folder shows
them. Figures are those of the report, with their intervals; nothing is said that wasn't measured.

    text = model_card(report, variant, loading=quantizer.loading, recipe_text=Path("recipe.yaml").read_text())
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pipeline.measured import Distribution
from pipeline.promoted import registered_name
from pipeline.readings import engines_apart, rate_quartiles
from pipeline.results import Report, VariantReport
from pipeline.scores import (
    VOID,
    PairedScore,
    group_scores,
    paired_group,
    paired_scores,
    score_interval,
    score_of,
)
from pipeline.text_table import figure_cell, markdown_line, markdown_table
from pipeline.tracked_labels import run_key

_HASHES_SHOWN = 40


def model_card(report: Report, variant: VariantReport, *, loading: str, recipe_text: str | None) -> str:
    """Markdown behind the Hub's metadata. `loading` is Markdown that says how the files are read.

    `variant` is one with a checkpoint; raises ValueError otherwise.
    """
    if variant.checkpoint is None:
        raise ValueError(f"{variant.name} has no checkpoint")
    parts = [
        f"# {_title(report, variant)}",
        _first_sentence(report, variant),
        "## Measured",
        markdown_table(
            ("figure", variant.name, f"{report.baseline} (baseline)", "change"),
            list(_figures(report, variant)),
            text_columns=("figure", variant.name, f"{report.baseline} (baseline)", "change"),
        ),
        "Speed is the median of repeats with quartiles in brackets, a score has its 95 % interval in brackets; its "
        "change is that on the documents that both answered.",
        "## Limits it was judged by",
        _findings(variant),
        "## What this doesn't say",
        "\n".join(f"- {markdown_line(line)}" for line in _limits(report, variant)),
        "## How to load it",
        loading,
        "## How it was made",
        _making(report, variant, recipe_text),
        "## Files",
        _files(variant),
    ]
    return f"---\n{_metadata(report, variant)}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _title(report: Report, variant: VariantReport) -> str:
    return f"{registered_name(recipe=report.recipe, model=report.model_id)} {variant.name}"


def _is_hub_id(model: str | None) -> bool:
    return model is not None and model.count("/") == 1 and not model.startswith((".", "/", "~"))


def _first_sentence(report: Report, variant: VariantReport) -> str:
    assert variant.checkpoint is not None
    fields = {
        name: value for name, value in variant.quantizer.items() if name != "kind" and value is not None
    }
    how = ", ".join(f"{name} {value}" for name, value in fields.items())
    source = variant.checkpoint.source
    revision = f" at revision `{source.revision}`" if source.revision else ""
    return (
        f"`{source.model}`{revision}, quantized by {variant.quantizer.get('kind')}{f' ({how})' if how else ''} to "
        f"{variant.checkpoint.bits_per_weight:.2f} bits per weight. Measured {report.started_at[:10]} against "
        f"{report.baseline}; the verdict is **{variant.verdict}**."
    )


# --- metadata --------------------------------------------------------------------------------------------


def _metadata(report: Report, variant: VariantReport) -> str:
    """YAML of the Hub's card metadata; specification: github.com/huggingface/hub-docs, modelcard.md."""
    kind = str(variant.quantizer.get("kind"))
    data: dict[str, Any] = {}
    if _is_hub_id(report.model_id):
        data |= {"base_model": report.model_id, "base_model_relation": "quantized"}
    data |= {
        "library_name": "gguf" if kind == "gguf" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantized", variant.precision, kind],
    }
    results = list(_results(variant))
    if results:
        data["model-index"] = [{"name": _title(report, variant), "results": results}]
    # JSON is YAML, too, and has one way to write a text.
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in data.items())


def _results(variant: VariantReport) -> Iterator[dict[str, Any]]:
    """One entry a task, with every score that is finite; a void task has none."""
    for name, task in variant.quality.tasks.items() if variant.quality else ():
        if task.void is not None:
            continue
        metrics = [
            {"type": metric, "name": metric, "value": score.score}
            for metric, score in task.metrics.items()
            if score.score is not None
        ]
        if metrics:
            args = {"num_few_shot": task.num_fewshot, "documents": task.documents, "data": task.data_hash}
            yield {
                "task": {"type": "text-generation", "name": name},
                "dataset": {"type": name, "name": name, "args": args},
                "metrics": metrics,
            }


# --- figures ---------------------------------------------------------------------------------------------


def _figures(report: Report, variant: VariantReport) -> Iterator[tuple[str, ...]]:
    baseline = report.variant(report.baseline)
    yield from _memory_figures(variant, baseline)
    yield from _speed_figures(variant, baseline)
    yield from _quality_figures(variant, baseline)


def _row(
    title: str, after: float | None, before: float | None, spec: str, *, unit: str, spread: str = ""
) -> tuple[str, ...]:
    change = f"× {after / before:.3g}" if after and before else "–"
    shown = [figure_cell(value, spec) for value in (after, before)]
    return (f"{title}, {unit}", f"{shown[0]}{spread}", shown[1], change)


def _memory_figures(variant: VariantReport, baseline: VariantReport | None) -> Iterator[tuple[str, ...]]:
    disk = [
        each.checkpoint.weight_bytes_on_disk if each and each.checkpoint else None
        for each in (variant, baseline)
    ]
    held = [
        each.loaded_memory.weight_bytes_resident if each and each.loaded_memory else None
        for each in (variant, baseline)
    ]
    for title, sizes in (("weights on disk", disk), ("weights in memory", held)):
        after, before = (size / 1e9 if size else None for size in sizes)
        yield _row(title, after, before, ".4g", unit="GB (1e9 bytes)")


def _speed_figures(variant: VariantReport, baseline: VariantReport | None) -> Iterator[tuple[str, ...]]:
    for row in variant.speed.of("batch") if variant.speed else ():
        if row.outcome != "measured":
            continue
        other = baseline.speed.row(row.batch_size) if baseline and baseline.speed else None
        known = other if other and other.outcome == "measured" else None
        shape = f"batch {row.batch_size}, {row.prompt_tokens} + {row.new_tokens} tokens"
        yield _row(
            f"decode, {shape}",
            row.decode_tokens_per_s,
            known.decode_tokens_per_s if known else None,
            ".4g",
            unit="tok/s",
            spread=_quartiles(row.tpot_s, tokens=row.batch_size),
        )
        yield _row(
            f"time to first token, {shape}",
            row.ttft_s.median if row.ttft_s else None,
            known.ttft_s.median if known and known.ttft_s else None,
            ".3g",
            unit="s",
        )


def _quartiles(times: Distribution | None, *, tokens: int) -> str:
    """Quartiles of a rate from those of the times behind it."""
    if times is None or times.lower_quartile <= 0:
        return ""
    low, high = rate_quartiles(times, tokens=tokens)
    return f" [{low:.4g}, {high:.4g}]"


def _quality_figures(variant: VariantReport, baseline: VariantReport | None) -> Iterator[tuple[str, ...]]:
    if variant.quality is None:
        return
    old, paired = baseline.quality if baseline else None, paired_scores(variant, baseline=baseline)
    for name, task in variant.quality.tasks.items():
        metric = task.primary_metric
        title = f"{name} {metric}, {task.documents} documents"
        before = score_of(old.tasks.get(name), metric) if old else None
        if task.void is not None:
            yield title, f"{VOID}: {task.void}", figure_cell(before, ".4g"), "–"
            continue
        interval = score_interval(task, metric)
        spread = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
        yield _score_row(title, score_of(task, metric), before, paired.get((name, metric)), spread=spread)
    groups = group_scores(old) if old else {}
    for name, (metric, score) in group_scores(variant.quality).items():
        before = groups[name][1].weighted if name in groups else None
        both = paired_group(paired, variant.quality.groups[name], metric)
        yield _score_row(f"{name} {metric}, {score.documents} documents", score.weighted, before, both)


def _score_row(
    title: str, after: float | None, before: float | None, both: PairedScore | None, *, spread: str = ""
) -> tuple[str, ...]:
    """The baseline's score and the change are of the documents that both answered, where the two compare."""
    shown = figure_cell(both.before if both else before, ".4g")
    return (
        title,
        f"{figure_cell(after, '.4g')}{spread}",
        shown,
        figure_cell(both.change if both else None, "+.4g"),
    )


# --- judgement and limits --------------------------------------------------------------------------------


def _findings(variant: VariantReport) -> str:
    rows = [(one.name, one.outcome, one.because) for one in variant.findings]
    return markdown_table(("rule", "outcome", "because"), rows, text_columns=("outcome", "because"))


def _limits(report: Report, variant: VariantReport) -> Iterator[str]:
    """What the figures depend on, and what wasn't looked at."""
    device = report.provenance.get("device")
    name = device.get("name") if isinstance(device, dict) else None
    if variant.speed:
        yield (
            f"Speed and memory hold for {name or variant.speed.device} with the engine {variant.speed.engine}, "
            f"computing in {variant.speed.compute_dtype}: {variant.speed.execution}. Another machine, engine or prompt "
            "length gives other figures."
        )
        if engines := engines_apart(report.variant(report.baseline), variant):
            yield (
                f"Ratios of speed are across engines, {engines} for {report.baseline}: they hold the engines' "
                "difference, too."
            )
    else:
        yield "Speed was not measured."
    if variant.quality:
        tasks = ", ".join(variant.quality.tasks) or "no task"
        yield (
            f"Quality was measured on {tasks}, with the engine {variant.quality.engine} in "
            f"{variant.quality.compute_dtype}. Nothing is known of other tasks, languages or longer contexts."
        )
    else:
        yield "Quality was not measured."
    yield from variant.validity
    if variant.checkpoint:
        yield from variant.checkpoint.notes


# --- making, files ---------------------------------------------------------------------------------------


def _making(report: Report, variant: VariantReport, recipe_text: str | None) -> str:
    assert variant.checkpoint is not None
    versions = ", ".join(f"{name} {version}" for name, version in variant.checkpoint.versions.items())
    lines = [
        f"- recipe `{report.recipe}`, digest `{report.recipe_digest}`",
        f"- run of {report.started_at}, key `{run_key(report)}` in the tracker",
        f"- checkpoint digest `{variant.checkpoint.content_digest()}`",
        f"- quantizer `{json.dumps(variant.quantizer)}`",
        f"- {variant.checkpoint.coverage.share:.1%} of the blocks' weights are quantized",
        f"- made with {versions}",
    ]
    text = "\n".join(lines)
    if recipe_text is None:
        return text
    # A recipe may hold such a fence itself, in a comment or a text.
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", f"`{recipe_text}")))
    return f"{text}\n\n{fence}yaml\n{recipe_text.strip()}\n{fence}"


def _files(variant: VariantReport) -> str:
    assert variant.checkpoint is not None
    files = variant.checkpoint.files
    rows = [(one.name, f"{one.size_bytes:,}", f"`{one.sha256}`") for one in files[:_HASHES_SHOWN]]
    table = markdown_table(("file", "bytes", "SHA-256"), rows, text_columns=("SHA-256",))
    rest = len(files) - _HASHES_SHOWN
    return table if rest <= 0 else f"{table}\n\n{rest} more files are listed in manifest.json."
