"""What was promoted last, kept in the store: figures that later runs must not fall behind.

`PIPELINE_STORE/promoted/NAME/ALIAS.json` holds the promoted variant's measured results, its samples among them, so
that a later run is compared document by document. NAME is that of the registered model.

>>> registered_name(recipe="recipes/chat.yaml", model="Qwen/Qwen3-8B")
'chat.Qwen--Qwen3-8B'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from pipeline.comparison import UnmeasuredError
from pipeline.errors import UsageError
from pipeline.null_run import TaskNoise, null_noise
from pipeline.results import Report, VariantReport, VariantResults
from pipeline.store import Store, write_atomically
from pipeline.values import Value

Alias = Literal["shippable", "champion"]
ALIASES: tuple[Alias, ...] = get_args(Alias)

_LEFT_OUT = ("serving", "capacity", "null_quality", "cost", "planned", "failures", "validity")
"""Results that no comparison with a later run reads."""


class Promoted(Value):
    """A promoted variant: version `version` of the registered model `name`, and what was measured of it.

    `run_key` is the report's (see `tracked_labels.run_key`). `machine` is the fingerprint of the machine that its speed
    belongs to, None where the report has none. `noise` is what the null run of its run's baseline showed, empty without
    one, None in records from before it was kept.
    """

    format_version: Literal[1] = 1
    name: str
    version: str
    alias: Alias
    promoted_at: str
    run_started_at: str
    run_key: str
    machine: str | None
    results: VariantResults
    noise: tuple[TaskNoise, ...] | None = None


class PromotedBefore(Value):
    """The last promoted version under each alias that has one; `not_asked` says why the registry wasn't asked."""

    versions: dict[Alias, Promoted] = Field(default_factory=dict)
    not_asked: str = ""


def registered_name(*, recipe: str, model: str | None) -> str:
    """Name of the registered model: the recipe's and the model's, without characters that a registry refuses.

    A folder of weights gives its own name, a hub id its owner's and its own: versions of one name are comparable.
    """
    named = model or "model"
    if named.startswith((".", "/", "~")):
        named = PurePosixPath(named).name
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{Path(recipe).stem}.{named.replace('/', '--')}")[:200]


def promoted_of(
    report: Report,
    variant: VariantReport,
    *,
    name: str,
    version: str,
    alias: Alias,
    promoted_at: datetime,
    run_key: str,
) -> Promoted:
    """The variant of that report as a promoted one."""
    return Promoted(
        name=name,
        version=version,
        alias=alias,
        promoted_at=promoted_at.isoformat(timespec="seconds"),
        run_started_at=report.started_at,
        run_key=run_key,
        machine=machine_of(report.provenance),
        results=promoted_results(variant),
        noise=promoted_noise(report),
    )


def machine_of(provenance: Mapping[str, Any]) -> str | None:
    """The machine's fingerprint in a report's provenance."""
    found = provenance.get("device_fingerprint")
    return found if isinstance(found, str) else None


def promoted_results(variant: VariantReport) -> VariantResults:
    """The variant's results as later runs are compared with them."""
    kept = {name: getattr(variant, name) for name in VariantResults.model_fields if name not in _LEFT_OUT}
    return VariantResults(**kept)


def promoted_noise(report: Report) -> tuple[TaskNoise, ...] | None:
    """The noise of the baseline's null run, empty without one; None where its two runs can't be compared."""
    baseline = report.variant(report.baseline)
    try:
        return null_noise(baseline) if baseline is not None else ()
    except UnmeasuredError:
        return None


def keep_promoted(store: Store, promoted: Promoted) -> Path:
    """Make it the last one promoted under its alias."""
    path = _path(store, promoted.name, promoted.alias)
    write_atomically(path, promoted.to_json())
    return path


def last_promoted(store: Store, *, recipe: str, model: str | None) -> dict[Alias, Promoted]:
    """What this store saw promoted last under each alias. Raises UsageError for a file that is no promotion."""
    name = registered_name(recipe=recipe, model=model)
    found: dict[Alias, Promoted] = {}
    for alias in ALIASES:
        path = _path(store, name, alias)
        try:
            found[alias] = Promoted.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValidationError) as error:
            told = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
            raise UsageError(f"{path}: no promoted version of this release: {told}; promote again") from None
    return found


def _path(store: Store, name: str, alias: Alias) -> Path:
    return store.root / "promoted" / name / f"{alias}.json"
