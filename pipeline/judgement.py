"""All that is decided of a run's results: verdicts, their reasons, what to pick. Pure.

A run and `gate`, which judges a stored one again, both come here, so that the same results get the same answer.

    judged = judge_run(rules, variants=results, baseline_name="fp16", prefer="fastest", provenance=facts, ...)
    report.model_copy(update=judged.fields())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.baseline_run import earlier_variants
from pipeline.gate import judge_all, judge_beside
from pipeline.pick import pick_variant
from pipeline.pick_results import Pick, Preference
from pipeline.results import BaselineRun, VariantReport, VariantResults, Verdict
from pipeline.rules.base import Rule
from pipeline.stored_reports import StoredRun
from pipeline.values import Value


class Judgement(Value):
    """What a report says beside its measured figures."""

    variants: tuple[VariantReport, ...]
    verdict: Verdict
    because: tuple[str, ...]
    pick: Pick
    baseline_run: BaselineRun | None = None

    def fields(self) -> dict[str, Any]:
        """By the names that they have in a report."""
        return {name: getattr(self, name) for name in type(self).model_fields}


def judge_run(
    rules: Sequence[Rule],
    *,
    variants: Sequence[VariantResults],
    baseline_name: str,
    prefer: Preference | None,
    provenance: Mapping[str, Any],
    model: str | None,
    interrupted: bool,
    before: StoredRun | None = None,
    missing: Mapping[str, Sequence[str]] | None = None,
) -> Judgement:
    """Judge by `rules`, beside the namesakes of `before` where it is given. An interrupted run is an error.

    `provenance` and `model` are this run's; `missing` says what the results lack of what was declared. Raises
    ValueError when two variants share a name.
    """
    if before is None:
        reports, verdict, because = judge_all(
            rules, baseline_name=baseline_name, variants=variants, missing=missing
        )
    else:
        names = [variant.name for variant in variants]
        reports, verdict, because = judge_beside(
            rules,
            earlier=earlier_variants(before.report, provenance=provenance, model=model, names=names),
            baseline_name=baseline_name,
            variants=variants,
            missing=missing,
        )
    beside = None if before is None else _baseline_run(before)
    notes = (*(["the run was interrupted"] if interrupted else []), *([beside.text] if beside else []))
    picked = () if interrupted else reports
    return Judgement(
        variants=reports,
        verdict="error" if interrupted else verdict,
        because=(*notes, *because),
        pick=pick_variant(picked, baseline_name=baseline_name, prefer=prefer),
        baseline_run=beside,
    )


def _baseline_run(before: StoredRun) -> BaselineRun:
    git = before.report.provenance.get("git")
    commit = git.get("commit") if isinstance(git, Mapping) else None
    return BaselineRun(
        name=before.name,
        started_at=before.report.started_at,
        recipe_digest=before.report.recipe_digest,
        commit=None if commit is None else str(commit),
    )
