"""A run on disk whose int8 ships, with a real checkpoint folder, to be promoted.

>>> shipped_run.__name__
'shipped_run'
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checkpoint import hash_files, write_manifest
from pipeline.gate import judge_all
from pipeline.results import Report, VariantResults
from pipeline.rules.max_memory import MaxMemory
from pipeline.rules.max_quality_drop import MaxQualityDrop
from tests import result_builders as build

RULES = (MaxMemory(fraction=0.6), MaxQualityDrop(points=2.0))
ANSWERS = build.paired_answers(both_right=380, lost=1, gained=2, both_wrong=117)


def checkpoint(folder: Path, precision: str = "int8", **fields: Any) -> VariantResults:
    """A variant whose checkpoint is a finished folder of small files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights of " + precision.encode())
    manifest = build.manifest(precision, files=hash_files(folder))
    write_manifest(folder, manifest)
    named = {"quantizer": {"kind": "quanto", "weights": precision}, "checkpoint": manifest}
    return build.variant(precision, **{**named, "checkpoint_folder": str(folder), **fields})


def quality(answers: list[float], name: str = "piqa") -> Any:
    """One task with these right (1.0) and wrong (0.0) answers."""
    return build.quality(build.task(name, values=answers))


def shipped_run(place: Path, *, model: str = "tiny/model", rules: Any = RULES, **fields: Any) -> Path:
    """The folder of a run of fp16 and int8; `fields` replace those of the report."""
    variants = (
        build.variant("fp16", quality=quality(ANSWERS[0])),
        checkpoint(place / "checkpoints" / "int8", quality=quality(ANSWERS[1])),
    )
    return written(place / "run", report_of(variants, model=model, rules=rules, **fields))


def report_of(variants: tuple[VariantResults, ...], *, model: str, rules: Any, **fields: Any) -> Report:
    """The report of these variants, judged by `rules`."""
    reports, verdict, because = judge_all(rules, baseline_name="fp16", variants=variants)
    gate = [rule.model_dump(mode="json") for rule in rules]
    return build.report(
        *reports,
        **{
            "resolved_recipe": {"model": {"id": model}, "gate": gate},
            "verdict": verdict,
            "because": because,
            **fields,
        },
    )


def written(folder: Path, report: Report) -> Path:
    """The report as a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    (folder / "recipe.yaml").write_text("model: tiny/model\n", encoding="utf-8")
    return folder
