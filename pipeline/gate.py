"""From findings to a verdict. Pure.

Precedence is error > no-ship > inconclusive > ship: a missing measurement makes even a clear failure an
error, because the report is then incomplete. Nothing ever ships by absence: no rules, no findings or no
candidates is an error.

>>> overall(("ship", "inconclusive"))
'inconclusive'
>>> overall(())
'error'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.results import Finding, VariantReport, VariantResults, Verdict
from pipeline.rules.base import Rule

VERDICTS: tuple[Verdict, ...] = ("ship", "inconclusive", "no-ship", "error")
"""From best to worst."""

EXIT_CODES: dict[Verdict, int] = {"ship": 0, "no-ship": 1, "inconclusive": 5, "error": 4}

PRECISION_BITS = {
    **{"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "fp8": 8},
    **{"int6": 6, "int5": 5, "int4": 4, "fp4": 4},
}

BASELINE_PRECISIONS = ("fp16", "bf16")

DEQUANTIZED_RATIO = 1.5
"""Resident ÷ on-disk bytes from which weights count as expanded at load."""

COMPUTE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def exit_code(verdict: Verdict) -> int:
    """What the program exits with: 0 ship, 1 no-ship, 5 inconclusive, 4 error."""
    return EXIT_CODES[verdict]


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst verdict; none at all is an error."""
    return max(verdicts, key=VERDICTS.index, default="error")


def judge(
    rules: Sequence[Rule], *, baseline: VariantResults, candidate: VariantResults
) -> tuple[Verdict, tuple[Finding, ...]]:
    """Judge one candidate against the baseline; labels are checked between these two only."""
    labels = label_order((baseline, candidate), baseline_name=baseline.name)
    return _judge(rules, baseline=baseline, candidate=candidate, labels=labels.get(candidate.name, ()))


def _judge(
    rules: Sequence[Rule], *, baseline: VariantResults, candidate: VariantResults, labels: Sequence[Finding]
) -> tuple[Verdict, tuple[Finding, ...]]:
    findings: list[Finding] = []
    complete = bool(rules) and not baseline.failures and not candidate.failures
    for rule in rules:
        found = rule.judge(baseline=baseline, candidate=candidate)
        complete = complete and bool(found)
        findings += found
    findings += labels
    return _verdict(findings, complete=complete), tuple(findings)


def _verdict(findings: Sequence[Finding], *, complete: bool) -> Verdict:
    outcomes = {finding.outcome for finding in findings}
    if not complete or "missing" in outcomes:
        return "error"
    if "fail" in outcomes:
        return "no-ship"
    return "inconclusive" if "inconclusive" in outcomes else "ship"


def judge_all(
    rules: Sequence[Rule],
    *,
    baseline_name: str,
    variants: Sequence[VariantResults],
    missing: Mapping[str, Sequence[str]] | None = None,
) -> tuple[tuple[VariantReport, ...], Verdict, tuple[str, ...]]:
    """Every variant's report, the verdict of the whole and why, one sentence each.

    The baseline is judged for completeness only; when it isn't complete, nothing can be said of the others.
    `missing` says by variant what its results are known to lack (`declared.missing_results`): an error of it.
    The whole is the worst of the required candidates. Raises ValueError when two variants share a name.
    """
    lacking = missing or {}
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise ValueError(f"two variants share a name: {', '.join(names)}")
    baseline = next((variant for variant in variants if variant.name == baseline_name), None)
    gaps: tuple[str, ...] = (f"{baseline_name}: the baseline has no results",)
    if baseline is not None:
        gaps = (*_gaps(baseline, rules=rules, variants=variants), *lacking.get(baseline_name, ()))
    labels = label_order(variants, baseline_name=baseline_name)
    reports = tuple(
        _report(
            variant,
            rules=rules,
            baseline=baseline,
            complete=not gaps and variant.name not in lacking,
            labels=labels.get(variant.name, ()),
        )
        for variant in variants
    )
    candidates = tuple(report for report in reports if report.name != baseline_name)
    verdict = overall([report.verdict for report in candidates if report.required])
    if gaps:
        verdict = "error"
    told = (*gaps, *(gap for name, some in lacking.items() if name != baseline_name for gap in some))
    return reports, verdict, _because(rules, gaps=told, candidates=candidates)


def judge_beside(
    rules: Sequence[Rule],
    *,
    earlier: Mapping[str, VariantResults | str],
    baseline_name: str,
    variants: Sequence[VariantResults],
    missing: Mapping[str, Sequence[str]] | None = None,
) -> tuple[tuple[VariantReport, ...], Verdict, tuple[str, ...]]:
    """As `judge_all`, but each variant beside its namesake of an earlier run, the baseline too, which then counts.

    `earlier` holds what is known of each name, or why it can't be compared: then every finding is `missing`. Rules on
    held text stay with this run's own baseline, because a distance is measured from it. Only baselines have null runs:
    the noise of either run's is that of every comparison.
    """
    own, _, _ = judge_all(rules, baseline_name=baseline_name, variants=variants, missing=missing)
    baseline = next((variant for variant in variants if variant.name == baseline_name), None)
    labels = label_order(variants, baseline_name=baseline_name)
    lacking = missing or {}
    gaps: tuple[str, ...] = (f"{baseline_name}: the baseline has no results",)
    if baseline is not None:
        gaps = (*_gaps(baseline, rules=rules, variants=variants), *lacking.get(baseline_name, ()))
    noisy = [one for one in (earlier.get(baseline_name), baseline) if isinstance(one, VariantResults)]
    reports = []
    for report, variant in zip(own, variants, strict=True):
        found = earlier.get(variant.name, f"the baseline run has no variant {variant.name}")
        verdict, findings = _beside(
            rules,
            before=found,
            own=baseline,
            noisy=noisy,
            candidate=variant,
            labels=labels.get(variant.name, ()),
        )
        lacks = bool(gaps) or variant.name in lacking
        reports.append(
            report.model_copy(update={"verdict": "error" if lacks else verdict, "findings": findings})
        )
    told = (*gaps, *(gap for name, some in lacking.items() if name != baseline_name for gap in some))
    verdict = "error" if gaps else overall([report.verdict for report in reports if report.required])
    return tuple(reports), verdict, _because(rules, gaps=told, candidates=reports)


def _beside(
    rules: Sequence[Rule],
    *,
    before: VariantResults | str,
    own: VariantResults | None,
    noisy: Sequence[VariantResults],
    candidate: VariantResults,
    labels: Sequence[Finding],
) -> tuple[Verdict, tuple[Finding, ...]]:
    if isinstance(before, str):
        missing = [rule.finding("missing", before, unit="") for rule in rules]
        return "error", (*missing, *labels)
    found: list[Finding] = []
    complete = bool(rules) and not before.failures and not candidate.failures
    for rule in rules:
        baseline = own if rule.quality_blocks else before
        if rule.quality_blocks and own is not None and candidate.name == own.name:
            continue  # its distance from itself
        told = rule.judge(baseline=baseline, candidate=candidate) if baseline else ()
        for one in noisy:
            told = tuple(rule.above_noise(finding, baseline=one) for finding in told)
        complete = complete and bool(told)
        found += told
    told_of = bool(found) or (own is not None and candidate.name == own.name)
    return _verdict([*found, *labels], complete=complete and told_of), (*found, *labels)


def _report(
    variant: VariantResults,
    *,
    rules: Sequence[Rule],
    baseline: VariantResults | None,
    complete: bool,
    labels: Sequence[Finding],
) -> VariantReport:
    findings: tuple[Finding, ...] = ()
    verdict: Verdict = "ship" if complete else "error"
    if baseline is not None and variant.name != baseline.name:
        verdict, findings = _judge(rules, baseline=baseline, candidate=variant, labels=labels)
        verdict = verdict if complete else "error"
    notes = (*variant.validity, *(label.because for label in labels), *dequantized_at_load(variant))
    fields = {name: getattr(variant, name) for name in VariantResults.model_fields}
    fields["validity"] = tuple(dict.fromkeys(notes))
    return VariantReport(**fields, verdict=verdict, findings=findings)


def _gaps(
    baseline: VariantResults, *, rules: Sequence[Rule], variants: Sequence[VariantResults]
) -> tuple[str, ...]:
    """What the baseline lacks: failed stages, and results that a rule needs or that another variant has."""
    gaps = [
        f"{baseline.name}: {failure.stage} {failure.reason.replace('_', ' ')}: {failure.message}"
        for failure in baseline.failures
    ]
    if baseline.precision not in BASELINE_PRECISIONS:
        gaps.append(
            f"{baseline.name}: {baseline.precision} can't be the baseline, a 16-bit variant is needed"
        )
    needed = {stage for rule in rules for stage in rule.needs}
    failed = {failure.stage for failure in baseline.failures}
    for stage in ("speed", "serving", "capacity", "quality"):
        wanted = stage in needed or any(getattr(variant, stage) is not None for variant in variants)
        if wanted and getattr(baseline, stage) is None and stage not in failed:
            gaps.append(f"{baseline.name}: the baseline has no result of the {stage} stage")
    return tuple(gaps)


def _because(
    rules: Sequence[Rule], *, gaps: Sequence[str], candidates: Sequence[VariantReport]
) -> tuple[str, ...]:
    reasons = list(gaps)
    if not rules:
        reasons.append("the gate has no rules")
    if not any(report.required for report in candidates):
        reasons.append("no required candidate was judged")
    for report in candidates:
        optional = "" if report.required else " (optional, not counted)"
        reasons.append(f"{report.name}: {report.verdict}{optional}")
        reasons += (
            f"{report.name}: {failure.stage} {failure.reason.replace('_', ' ')}: {failure.message}"
            for failure in report.failures
        )
        reasons += (
            f"{report.name}: {finding.rule} {finding.outcome}: {finding.because}"
            for finding in report.findings
            if finding.outcome != "pass"
        )
    return tuple(reasons)


# --- labels ---------------------------------------------------------------------------------------------


def label_order(variants: Sequence[VariantResults], *, baseline_name: str) -> dict[str, tuple[Finding, ...]]:
    """Why a variant's precision label isn't earned, by variant name; such a variant doesn't ship.

    Fewer bits must mean fewer bytes on disk than every variant of more bits (else `fail`), and the saving
    against the baseline can't exceed the ratio of the bits (else `missing`: the bytes are miscounted).
    """
    baseline = next((variant for variant in variants if variant.name == baseline_name), None)
    found: dict[str, tuple[Finding, ...]] = {}
    for variant in variants:
        larger = (_not_smaller(variant, other) for other in variants)
        findings = [finding for finding in (_other_label(variant), *larger) if finding is not None]
        if baseline is not None and variant.name != baseline_name:
            findings += _impossible_savings(variant, baseline)
        if findings:
            found[variant.name] = tuple(findings)
    return found


def _other_label(variant: VariantResults) -> Finding | None:
    """A label that isn't the checkpoint's own."""
    if variant.checkpoint is None or variant.checkpoint.precision == variant.precision:
        return None
    return Finding(
        rule="label",
        outcome="fail",
        observed=None,
        limit=None,
        unit="",
        because=f"{variant.name} is labelled {variant.precision}, its checkpoint {variant.checkpoint.precision}",
    )


def _not_smaller(variant: VariantResults, other: VariantResults) -> Finding | None:
    bits, other_bits = (PRECISION_BITS.get(each.precision) for each in (variant, other))
    size, other_size = _disk_bytes(variant), _disk_bytes(other)
    if bits is None or other_bits is None or size is None or other_size is None:
        return None
    if bits >= other_bits or bits >= 16 or size < other_size:
        return None
    return Finding(
        rule="label",
        outcome="fail",
        observed=size,
        limit=other_size,
        unit="bytes",
        because=f"{variant.name} is labelled {variant.precision} but its weights take {size:,} bytes on "
        f"disk, not fewer than the {other_size:,} of {other.name} ({other.precision})",
    )


def _impossible_savings(variant: VariantResults, baseline: VariantResults) -> list[Finding]:
    """Sizes, on disk or in memory, that are smaller than the label's bits allow: a counting error."""
    bits, baseline_bits = (PRECISION_BITS.get(each.precision) for each in (variant, baseline))
    if bits is None or baseline_bits is None or bits > baseline_bits:
        return []
    computes_wide = baseline.speed is not None and baseline.speed.compute_dtype == "float32"
    widest = 32 if computes_wide else baseline_bits
    checks = (
        ("on disk", _disk_bytes(variant), _disk_bytes(baseline), baseline_bits / bits),
        ("in memory", _resident_bytes(variant), _resident_bytes(baseline), widest / bits),
    )
    # Scales, padding and rounding only ever add bytes; 1 % covers buffers that one side doesn't store.
    return [
        Finding(
            rule="label",
            outcome="missing",
            observed=large / small,
            limit=limit,
            unit="x",
            because=f"implausible: {variant.name} is {large / small:.2f} times smaller than {baseline.name} "
            f"{where}, {variant.precision} can't save more than {limit:g} times",
        )
        for where, small, large, limit in checks
        if small is not None and large is not None and large > 1.01 * limit * small
    ]


def dequantized_at_load(variant: VariantResults) -> tuple[str, ...]:
    """A note when the weights take far more memory than disk and the compute type doesn't explain it.

    Weights that stay unquantized are stored at 16 bits and may be held in the wider compute type.
    """
    disk, resident = _disk_bytes(variant), _resident_bytes(variant)
    if disk is None or resident is None or resident <= DEQUANTIZED_RATIO * disk:
        return ()
    if resident <= DEQUANTIZED_RATIO * (disk + _widened_bytes(variant)):
        return ()
    return (
        f"dequantized at load: {resident:,} bytes of weights in memory for {disk:,} on disk "
        f"({resident / disk:.2f} times)",
    )


def _widened_bytes(variant: VariantResults) -> int:
    """Extra bytes of the unquantized weights when they are held in the engine's compute type."""
    if variant.speed is None or variant.checkpoint is None or PRECISION_BITS.get(variant.precision) == 32:
        return 0
    coverage = variant.checkpoint.coverage
    kept = coverage.linear_weights - coverage.quantized_weights + coverage.embedding_weights
    kept += 0 if coverage.head_quantized else coverage.head_weights
    wider = COMPUTE_BYTES.get(variant.speed.compute_dtype, 2) - 2
    return min(kept, variant.checkpoint.parameters) * wider


def _disk_bytes(variant: VariantResults) -> int | None:
    """Bytes of the tensors on disk, where known and above zero."""
    if variant.checkpoint is not None:
        return variant.checkpoint.weight_bytes_on_disk or None
    memory = variant.loaded_memory
    return (memory.weight_bytes_on_disk or None) if memory is not None else None


def _resident_bytes(variant: VariantResults) -> int | None:
    memory = variant.loaded_memory
    return (memory.weight_bytes_resident or None) if memory is not None else None
