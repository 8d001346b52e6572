"""What was promoted last, asked of MLflow's model registry: any machine may have promoted it, or moved the alias back.

    found = ask_registry(recipe="recipes/chat.yaml", model="Qwen/Qwen3-8B")
    found.versions.get("shippable"), found.not_asked

The measured results are read from the report that the promoted version's run holds, and only where they are those
that were promoted: the version's key is made of the report, the variant and the digest of its files.
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import UsageError
from pipeline.promoted import (
    ALIASES,
    Alias,
    Promoted,
    PromotedBefore,
    promoted_of,
    registered_name,
)
from pipeline.stored_reports import load_report
from pipeline.tracked_labels import promotion_key, run_key
from pipeline.tracking_store import (
    OpenStore,
    expected_errors,
    open_store,
    store_error,
    tracking_store,
)

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


def ask_registry(*, recipe: str, model: str | None, tracking_uri: str | None = None) -> PromotedBefore:
    """The version under each alias of the registered model. A registry out of reach is a reason, not an error.

    A SQLite file that isn't there holds nothing, and is not made.
    """
    place = tracking_store(tracking_uri)
    if place.database is not None and not place.database.is_file():
        return PromotedBefore()
    try:
        with open_store(place) as registry:
            return _versions(registry, registered_name(recipe=recipe, model=model))
    except expected_errors() as error:
        return PromotedBefore(not_asked=f"the registry couldn't be asked; {store_error(error, place)}")


def _versions(registry: OpenStore, name: str) -> PromotedBefore:
    models = registry.ask(lambda: registry.client.search_registered_models(f"name = '{name}'", max_results=1))
    held = dict(models[0].aliases) if models else {}
    found: dict[Alias, Promoted] = {}
    for alias in ALIASES:
        if alias in held:
            found[alias] = _promoted(registry, name, held[alias], alias=alias)
    return PromotedBefore(versions=found)


def _promoted(registry: OpenStore, name: str, number: str, *, alias: Alias) -> Promoted:
    """Raises UsageError for a version that `promote` didn't make, or whose report isn't what was promoted."""
    version: ModelVersion = registry.ask(lambda: registry.client.get_model_version(name, number))
    tags = version.tags
    named = f"{version.name} version {version.version} ({alias})"
    parent, variant_name = tags.get("parent_run_id"), tags.get("variant", "")
    if parent is None:
        raise UsageError(f"{named}: wasn't registered by promote; move the alias to a version that was")
    with tempfile.TemporaryDirectory(prefix="promoted-") as folder:
        registry.stop.obey()
        report = load_report(Path(registry.client.download_artifacts(parent, "report.json", folder)))
    variant = report.variant(variant_name)
    digest = tags.get("checkpoint_digest", "")
    if variant is None or promotion_key(report, variant_name, digest) != tags.get("promotion_key"):
        raise UsageError(
            f"{named}: the report of its run {parent} isn't the one that was promoted; promote again"
        )
    return promoted_of(
        report,
        variant,
        name=version.name,
        version=str(version.version),
        alias=alias,
        promoted_at=datetime.fromtimestamp(version.creation_timestamp / 1000, UTC),
        run_key=run_key(report),
    )
