"""What is different between two runs besides their figures: code, packages, machine, recipe, weights, tasks. Pure.

for change in run_changes(before, after):
    print(change.what, change.before, change.after)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.results import Report, VariantReport
from pipeline.values import Value, digest

SHOWN_DIGITS = 12
"""Of a digest, where a reader only needs to see that it is another one."""
_FACTS = ("python", "operating_system", "device_fingerprint", "gpu_driver", "host_digest")
_BLOCKS = ("git", "packages", "device", "environment")
_NOT_A_CAUSE = frozenset({"bandwidth_bytes_per_s", "peak_flops_per_s", "source"})
"""Of the device: what was measured of it, in each run a little different."""
_TASK_FIELDS = ("task_version", "task_hash", "data_hash", "prompts_hash", "num_fewshot")


class Change(Value):
    """One fact of two runs; None where a run doesn't have it."""

    what: str
    before: str | None
    after: str | None


def run_changes(before: Report, after: Report) -> tuple[Change, ...]:
    """Every difference that may explain others: provenance, recipe, then what variants and tasks both runs have.

    What only one of them has is told by the lists of variants and of tasks.
    """
    pairs = [
        (_provenance(before), _provenance(after)),
        (dict(_leaves("recipe", before.resolved_recipe)), dict(_leaves("recipe", after.resolved_recipe))),
        (_lists(before), _lists(after)),
        _shared(_made(before), _made(after)),
    ]
    return tuple(change for first, second in pairs for change in _differences(first, second))


def verdict_changes(before: Report, after: Report) -> tuple[Change, ...]:
    """Verdicts that are others now: the run's, and those of variants that both runs have."""
    first, second = ({one.name: one.verdict for one in report.variants} for report in (before, after))
    shared = {name: (first[name], second[name]) for name in first if name in second}
    pairs = {
        "verdict": (before.verdict, after.verdict),
        **{f"{n} verdict": pair for n, pair in shared.items()},
    }
    return tuple(Change(what=what, before=old, after=new) for what, (old, new) in pairs.items() if old != new)


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for what in dict.fromkeys((*before, *after)):
        if before.get(what) != after.get(what):
            yield Change(what=what, before=before.get(what), after=after.get(what))


def _provenance(report: Report) -> dict[str, str]:
    facts: dict[str, str] = {}
    for name in _BLOCKS:
        block = report.provenance.get(name)
        for key, value in block.items() if isinstance(block, Mapping) else ():
            if value is not None and key not in _NOT_A_CAUSE:
                facts[f"{name}.{key}"] = _short(str(value))
    for name in _FACTS:
        if report.provenance.get(name) is not None:
            facts[name] = _short(str(report.provenance[name]))
    return facts


def _shared(before: dict[str, str], after: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    both = before.keys() & after.keys()
    return {what: before[what] for what in before if what in both}, {what: after[what] for what in both}


def _leaves(path: str, data: Any) -> Iterator[tuple[str, str]]:
    """Every value of nested blocks and lists by its path; a key without a value says as much as no key.

    Items of a list are called by their name or kind, where that tells them apart: one more moves no other.
    """
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(f"{path}.{key}", value)
    elif isinstance(data, list | tuple):
        for label, value in zip(_labels(data), data, strict=True):
            yield from _leaves(f"{path}[{label}]", value)
    elif data is not None:
        yield path, str(data)


def _labels(items: Sequence[Any]) -> list[str]:
    names = [
        str(one.get("name") or one.get("kind") or "") if isinstance(one, Mapping) else "" for one in items
    ]
    return [name if name and names.count(name) == 1 else str(place) for place, name in enumerate(names)]


def _lists(report: Report) -> dict[str, str]:
    """Which variants there are, and which tasks anybody answered."""
    tasks = dict.fromkeys(task for one in report.variants if one.quality for task in one.quality.tasks)
    return {
        "baseline": report.baseline,
        "variants": ", ".join(variant.name for variant in report.variants) or "none",
        "tasks": ", ".join(tasks) or "none",
    }


def _made(report: Report) -> dict[str, str]:
    """What each variant was made of, and what was asked; of a task, as the first variant that answered was asked."""
    facts: dict[str, str] = {}
    for variant in report.variants:
        facts |= {f"{variant.name} {what}": value for what, value in _variant_facts(variant)}
    for variant in reversed(report.variants):
        for name, task in variant.quality.tasks.items() if variant.quality else ():
            facts |= {f"{name} {field}": _short(str(getattr(task, field))) for field in _TASK_FIELDS}
    return facts


def _variant_facts(variant: VariantReport) -> Iterator[tuple[str, str]]:
    yield "precision", variant.precision
    yield from _leaves("quantizer", variant.quantizer)
    if variant.checkpoint is not None:
        yield "weights", _short(_files(variant.checkpoint.files))
        yield "source", _short(_files(variant.checkpoint.source.files))
    if variant.speed is not None:
        for name in ("engine", "execution", "compute_dtype"):
            yield f"speed {name}", str(getattr(variant.speed, name))


def _files(files: Any) -> str:
    """Digest over the files' own, in the order of their names."""
    return digest(sorted((file.name, file.sha256) for file in files))


def _short(text: str) -> str:
    """A digest's beginning; everything else as it is."""
    is_digest = len(text) in (40, 64) and all(letter in "0123456789abcdef" for letter in text)
    return text[:SHOWN_DIGITS] if is_digest else text
