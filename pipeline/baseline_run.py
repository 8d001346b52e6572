"""An earlier run as the baseline: each variant is judged beside what it was then, by the same rules. Pure.

So a pull request is gated against the main branch's last run. What may differ is code, quantizers and settings; where
the machine, a library that measures, or the model is another one, every rule's finding is `missing` with that reason.

    earlier = earlier_variants(before, provenance=now, model="Qwen/Qwen3.6-27B", names=("fp16", "int8"))
    judge_beside(rules, earlier=earlier, baseline_name="fp16", variants=results)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.results import Report, VariantResults

MEASURING_PACKAGES = (
    *("torch", "transformers", "xllamacpp", "vllm"),
    *("bitsandbytes", "optimum-quanto", "torchao", "lm-eval"),
)
"""Libraries of engines, quantizers and the harness: another version may compute, or take, something else."""


def earlier_variants(
    before: Report, *, provenance: Mapping[str, Any], model: str | None, names: Sequence[str]
) -> dict[str, VariantResults | str]:
    """For each name the earlier run's results, or why they can't be a baseline, as a sentence."""
    reasons = differences(before, provenance=provenance, model=model)
    if reasons:
        refusal = f"the baseline run isn't comparable, then vs now: {'; '.join(reasons)}"
        return dict.fromkeys(names, refusal)
    known = ", ".join(variant.name for variant in before.variants)
    return {
        name: before.variant(name) or f"the baseline run has no variant {name}; it has {known}"
        for name in names
    }


def differences(before: Report, *, provenance: Mapping[str, Any], model: str | None) -> tuple[str, ...]:
    """What makes measurements of the earlier run and of now incomparable; empty when nothing does."""
    then = before.provenance
    found = []
    if before.interrupted:
        found.append("the run was interrupted")
    if before.model_id != model:
        found.append(f"model {before.model_id} vs {model}")
    machines = [one.get("device_fingerprint") for one in (then, provenance)]
    if None in machines or machines[0] != machines[1]:
        found.append(f"machine {_machine(then)} vs {_machine(provenance)}")
    packages = [_mapping(one, "packages") for one in (then, provenance)]
    versions = ((name, *(one.get(name) for one in packages)) for name in MEASURING_PACKAGES)
    found += [f"{name} {old or 'none'} vs {new or 'none'}" for name, old, new in versions if old != new]
    return tuple(found)


def _machine(provenance: Mapping[str, Any]) -> str:
    """Name and fingerprint, which tells machines of one name apart."""
    name = _mapping(provenance, "device").get("name") or "unknown"
    fingerprint = provenance.get("device_fingerprint")
    return f"{name} ({str(fingerprint)[:12] if fingerprint else 'no fingerprint'})"


def _mapping(provenance: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = provenance.get(name)
    return found if isinstance(found, Mapping) else {}
