"""Parameters, tags, status and times of a report's runs in an experiment tracker, with legal names. Pure.

Parameters say what was asked for and made, tags what came of it: verdicts, findings and why.

    tags = run_tags(report)
    tags["verdict"], run_status(report)  # 'no-ship', 'FINISHED'
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from pipeline.readings import engines_apart
from pipeline.results import FindingOutcome, Report, VariantReport, VariantResults
from pipeline.tracked_values import LONGEST_TAG, legal_name, shortened
from pipeline.values import digest

_WORSE: tuple[FindingOutcome, ...] = ("pass", "inconclusive", "fail", "missing")
"""Later ones decide the verdict before earlier ones."""


def run_params(report: Report) -> dict[str, str]:
    """Parameters of the whole run."""
    params = {
        "recipe_digest": report.recipe_digest,
        "recipe": report.recipe,
        "model": _model(report),
        "seed": _recipe_seed(report),
        "baseline": report.baseline,
        **{f"versions.{name}": version for name, version in _versions(report).items()},
    }
    return _texts(params)


def variant_params(variant: VariantResults, *, report: Report) -> dict[str, str]:
    """Parameters of one variant: the recipe's, its precision and every quantizer field."""
    versions = dict(_versions(report))
    if variant.checkpoint is not None:
        versions |= variant.checkpoint.versions
    params: dict[str, Any] = {
        "recipe_digest": report.recipe_digest,
        "model": _model(report),
        "seed": variant.quality.seed if variant.quality is not None else _recipe_seed(report),
        "precision": variant.precision,
        "engine": variant.speed.engine if variant.speed is not None else None,
        "ratios_across_engines": engines_apart(report.variant(report.baseline), variant),
        "device": variant.speed.device if variant.speed is not None else None,
        "compute_dtype": variant.speed.compute_dtype if variant.speed is not None else None,
        **{f"quantizer.{name}": value for name, value in variant.quantizer.items()},
        **{f"versions.{name}": version for name, version in versions.items()},
    }
    return _texts(params)


def run_tags(report: Report) -> dict[str, str]:
    """Tags of the whole run."""
    tags = {
        "verdict": report.verdict,
        "baseline": report.baseline,
        "interrupted": str(report.interrupted).lower(),
    }
    git = report.provenance.get("git")
    if isinstance(git, Mapping) and git.get("commit"):
        tags |= {"mlflow.source.git.commit": git["commit"], "git_dirty": str(bool(git.get("dirty"))).lower()}
    tags |= {f"verdict.{variant.name}": variant.verdict for variant in report.variants}
    return _texts(tags)


def variant_tags(variant: VariantReport, *, baseline_name: str) -> dict[str, str]:
    """Tags of one variant: verdict, role and the outcome of every rule, with the reasons as a note.

    A rule that stands twice in the gate has one tag, its worst outcome. `void.TASK` says why a task has no scores.
    """
    tags = {
        "verdict": variant.verdict,
        "role": "baseline" if variant.name == baseline_name else "candidate",
        "required": str(variant.required).lower(),
        "precision": variant.precision,
    }
    for finding in sorted(variant.findings, key=lambda one: _WORSE.index(one.outcome)):
        tags[f"finding.{finding.metric}"] = finding.outcome
    for task, result in variant.quality.tasks.items() if variant.quality else ():
        if result.void is not None:
            tags[f"void.{task}"] = shortened(result.void, LONGEST_TAG)
    lines = [f"- {finding.name}: **{finding.outcome}**: {finding.because}" for finding in variant.findings]
    lines += [f"- {failure.stage} {failure.reason}: {failure.message}" for failure in variant.failures]
    lines += [f"- {note}" for note in variant.validity]
    if lines:
        tags["mlflow.note.content"] = "\n".join(lines)
    return _texts(tags)


def run_key(report: Report) -> str:
    """What makes a report the same one again, also to later releases: fields that hold their default don't count.

    Nor does the seal of its file, which a report that was just made hasn't got yet.
    """
    return digest(report.model_dump(mode="json", exclude_defaults=True, exclude={"content_sha256"}))


def promotion_key(report: Report, variant: str, checkpoint_digest: str) -> str:
    """What makes a promotion the same one again: the report, the variant, the digest of its files."""
    return digest([run_key(report), variant, checkpoint_digest])


def start_ms(report: Report) -> int:
    """Start of the run, milliseconds since 1970; a time without zone is UTC."""
    started = datetime.fromisoformat(report.started_at)
    return int((started if started.tzinfo else started.replace(tzinfo=UTC)).timestamp() * 1000)


def end_ms(report: Report) -> int:
    """End of the run; also the time of every metric, so that a repeated log adds no second point."""
    return start_ms(report) + int(report.seconds * 1000)


def run_status(report: Report) -> Literal["FINISHED", "FAILED", "KILLED"]:
    """FINISHED for a verdict that was reached, whichever; FAILED for an error; KILLED when interrupted."""
    if report.interrupted:
        return "KILLED"
    return "FAILED" if report.verdict == "error" else "FINISHED"


def variant_status(variant: VariantReport) -> Literal["FINISHED", "FAILED", "KILLED"]:
    """FAILED when a stage failed, KILLED when one was interrupted."""
    if any(failure.reason == "interrupted" for failure in variant.failures):
        return "KILLED"
    return "FAILED" if variant.failures else "FINISHED"


def _model(report: Report) -> str | None:
    model = report.resolved_recipe.get("model")
    return model.get("id") if isinstance(model, Mapping) else model


def _recipe_seed(report: Report) -> int | None:
    quality = report.resolved_recipe.get("quality")
    return quality.get("seed") if isinstance(quality, Mapping) else None


def _versions(report: Report) -> Mapping[str, str]:
    for name in ("versions", "packages"):
        found = report.provenance.get(name)
        if isinstance(found, Mapping):
            return found
    return {}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Legal keys and texts of whatever is known."""
    return {
        legal_name(name): str(value)
        for name, value in values.items()
        if value is not None and str(value) != ""
    }
