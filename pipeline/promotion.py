"""From a ship verdict to a registered model version: one checkpoint, by path and hashes, under an alias.

Nothing is copied: the version names the folder, the run that measured it and the digest of every file. Only a
variant that ships is registered, by the stored report and by its own rules now, and only while the files are still
those that were measured. The same promotion twice is one version.

    done = promote(report, "int8", judged=judged, run_folder=folder, store=store, alias="shippable", note="")
    print(done.name, done.version, done.run_id)
"""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from pipeline.checkpoint import CARD_NAME, MANIFEST_NAME, read_manifest, verify
from pipeline.errors import (
    CheckpointError,
    NoShipError,
    PipelineError,
    PrerequisiteError,
    StageError,
    UndecidedError,
    UsageError,
)
from pipeline.model_card import model_card
from pipeline.promoted import (
    Alias,
    Promoted,
    keep_promoted,
    promoted_of,
    registered_name,
)
from pipeline.provenance import host_digest
from pipeline.recipe_sections import AnyQuantizer
from pipeline.results import CheckpointManifest, Report, VariantReport, Verdict
from pipeline.store import Store, write_atomically
from pipeline.tracked_labels import promotion_key, run_key
from pipeline.tracked_values import LONGEST_TAG, legal_name, shortened, variant_metrics
from pipeline.tracking import track
from pipeline.tracking_store import (
    OpenStore,
    expected_errors,
    file_lock,
    open_store,
    store_error,
    tracking_store,
)
from pipeline.values import Value

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

FOLDER = "checkpoint"
"""Where the variant's run keeps manifest and card of what was promoted."""
LONGEST_VERSION_TAG = 5000
_FILES_TAGGED = 60
_TRIPLE = ("speed.batch_1.decode_tokens_per_s", "memory.weight_bytes_resident", "checkpoint.bits_per_weight")

_REFUSALS: dict[Verdict, type[PipelineError]] = {
    "no-ship": NoShipError,
    "inconclusive": UndecidedError,
    "error": StageError,
}


class Promotion(Value):
    """A registered version. `run_id` is the variant's run, `parent_run_id` that of the recipe's run.

    `added` is False where the same promotion had been made before; `source` is what the registry calls the version's
    location: the folder, or with a server, which takes no folder of another machine, the run's copy of its manifest.
    """

    name: str
    version: str
    alias: Alias
    added: bool
    variant: str
    verdict: Verdict
    run_id: str
    parent_run_id: str
    checkpoint_folder: str
    checkpoint_digest: str
    source: str
    card: str
    record: str
    pushed_to: str | None = None


def promote(
    report: Report,
    variant_name: str,
    *,
    judged: Report,
    run_folder: Path,
    store: Store,
    alias: Alias,
    note: str,
    tracking_uri: str | None = None,
    artifacts_folder: Path | None = None,
) -> Promotion:
    """Register the variant's checkpoint, write its card, remember it in the store; the run is tracked if it isn't.

    `judged` is the same report under its own rules now. Raises UsageError for a variant that can't be promoted at
    all, NoShipError, UndecidedError or StageError for a verdict that isn't ship, PrerequisiteError where the
    checkpoint isn't here, CheckpointError where it has changed, StageError where MLflow can't be used.
    """
    variant = shipping_variant(report, variant_name, judged=judged)
    folder, manifest = intact_checkpoint(variant)
    found = track(
        report, run_folder=run_folder, tracking_uri=tracking_uri, artifacts_folder=artifacts_folder, note=note
    )
    if not found.tracked or found.run_id is None:
        raise StageError(f"nothing was promoted, because the run isn't in MLflow: {found.because}")
    card = _write_card(report, variant, folder=folder, run_folder=run_folder)
    place = tracking_store(tracking_uri, artifacts_folder=artifacts_folder)
    lock = store.root / "promoted" / ".lock"
    try:
        with open_store(place) as registry, file_lock(lock):
            done = _register(
                registry,
                report,
                variant,
                parent_run_id=found.run_id,
                folder=folder,
                manifest=manifest,
                alias=alias,
            )
            # Under the same lock: of two promotions at once the last one holds the alias in both places.
            record = _keep(store, _record(report, variant, done))
    except expected_errors() as error:
        raise StageError(f"nothing was promoted; {store_error(error, place)}; promote again later") from None
    return done.model_copy(update={"card": str(card), "record": str(record)})


def promotion_text(done: Promotion) -> str:
    """A few lines for people."""
    lines = [
        f"{done.name} version {done.version} is {done.alias}" + ("" if done.added else " (promoted before)"),
        f"variant {done.variant}, {done.verdict}, run {done.run_id}",
        f"files {done.checkpoint_folder}, digest {done.checkpoint_digest}",
        f"card {done.card}",
    ]
    return "\n".join([*lines, *([f"pushed {done.pushed_to}"] if done.pushed_to else [])])


# --- may it be promoted ----------------------------------------------------------------------------------


def shipping_variant(report: Report, name: str, *, judged: Report) -> VariantReport:
    """The candidate of that name, if it ships by the stored verdict and by its rules now; see `promote`."""
    variant = report.variant(name)
    candidates = [each.name for each in report.variants if each.name != report.baseline]
    if variant is None:
        near = difflib.get_close_matches(name, candidates, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"no variant {name!r} in this run; candidates are {', '.join(candidates)}{hint}")
    if name == report.baseline:
        raise UsageError(
            f"{name!r} is the baseline, which is measured against nothing; candidates are {', '.join(candidates)}"
        )
    if report.interrupted:
        raise StageError("the run was interrupted, so its verdict is none; run the recipe again")
    again = judged.variant(name)
    for verdict, found, when in (
        (variant.verdict, variant, "stored"),
        (again.verdict if again else "error", again, "judged again now"),
    ):
        if verdict != "ship":
            reasons = _reasons(found) or "no finding was stored"
            raise _REFUSALS[verdict](f"{name!r} isn't promoted: its verdict, {when}, is {verdict}: {reasons}")
    if variant.checkpoint is None or variant.checkpoint_folder is None:
        raise UsageError(f"{name!r} has no checkpoint in this report, so there is nothing to promote")
    if variant.checkpoint.random_seed is not None:
        raise UsageError(f"{name!r} has random weights, made from a seed; only trained ones are promoted")
    return variant


def _reasons(variant: VariantReport | None) -> str:
    """What stands in the way, in a few sentences."""
    if variant is None:
        return ""
    found = [f"{one.name} {one.outcome}: {one.because}" for one in variant.findings if one.outcome != "pass"]
    found += [f"{one.stage} {one.reason}: {one.message}" for one in variant.failures]
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def intact_checkpoint(variant: VariantReport) -> tuple[Path, CheckpointManifest]:
    """The variant's folder and manifest, every file hashed again.

    Raises PrerequisiteError when the folder isn't here, CheckpointError when it isn't what was measured.
    """
    assert variant.checkpoint is not None
    assert variant.checkpoint_folder is not None
    folder = Path(variant.checkpoint_folder)
    if not folder.is_dir():
        raise PrerequisiteError(
            f"{folder}: the checkpoint of {variant.name!r} isn't there; promote where the run was made, or run the "
            "recipe again"
        )
    manifest = read_manifest(folder)
    if manifest.content_digest() != variant.checkpoint.content_digest():
        raise CheckpointError(
            f"{folder / MANIFEST_NAME}: describes another checkpoint than the report; run the recipe again"
        )
    verify(folder, variant.checkpoint)
    return folder, manifest


# --- card and record -------------------------------------------------------------------------------------


def _write_card(report: Report, variant: VariantReport, *, folder: Path, run_folder: Path) -> Path:
    """Write the model card beside the weights; it is no part of what the manifest lists."""
    adapter: TypeAdapter[Any] = TypeAdapter(AnyQuantizer)
    try:
        quantizer = adapter.validate_json(json.dumps(variant.quantizer))
    except ValidationError:
        raise UsageError(
            f"{variant.name!r}: {variant.quantizer} is no quantizer of this version; run the recipe again"
        ) from None
    recipe = run_folder / "recipe.yaml"
    text = recipe.read_text("utf-8", errors="replace") if recipe.is_file() else None
    card = folder / CARD_NAME
    try:
        write_atomically(card, model_card(report, variant, loading=quantizer.loading, recipe_text=text))
    except OSError as error:
        raise StageError(f"nothing was promoted: {card} can't be written ({error.strerror})") from None
    return card


def _keep(store: Store, promoted: Promoted) -> Path:
    """Raises StageError that says what is registered already."""
    try:
        return keep_promoted(store, promoted)
    except (OSError, StageError) as error:
        raise StageError(
            f"{promoted.name} version {promoted.version} is {promoted.alias} in the registry, but the store couldn't "
            f"keep its results for no_regression: {error}; promote again"
        ) from None


def _record(report: Report, variant: VariantReport, done: Promotion) -> Promoted:
    return promoted_of(
        report,
        variant,
        name=done.name,
        version=done.version,
        alias=done.alias,
        promoted_at=datetime.now(UTC),
        run_key=run_key(report),
    )


# --- the registry ----------------------------------------------------------------------------------------


def _register(
    registry: OpenStore,
    report: Report,
    variant: VariantReport,
    *,
    parent_run_id: str,
    folder: Path,
    manifest: CheckpointManifest,
    alias: Alias,
) -> Promotion:
    """The version of this report, variant and checkpoint, added unless it is there, with the alias on it."""
    name = registered_name(recipe=report.recipe, model=report.model_id)
    run_id = _variant_run(registry, parent_run_id, variant.name)
    key = promotion_key(report, variant.name, manifest.content_digest())
    version = _version_of(registry, name, key=key)
    added = version is None
    if version is None:
        _log_checkpoint_files(registry, run_id, folder)
        _add_model(registry, name, report)
        source = _source(registry, run_id, folder)
        tags = _version_tags(report, variant, parent_run_id=parent_run_id, folder=folder, manifest=manifest)
        description = _description(report, variant, folder)
        version = registry.ask(
            lambda: registry.client.create_model_version(
                name,
                source=source,
                run_id=run_id,
                tags={**tags, "promotion_key": key},
                description=description,
            )
        )
    number = str(version.version)
    registry.ask(lambda: registry.client.set_registered_model_alias(name, alias, number))
    return Promotion(
        name=name,
        version=number,
        alias=alias,
        added=added,
        variant=variant.name,
        verdict=variant.verdict,
        run_id=run_id,
        parent_run_id=parent_run_id,
        checkpoint_folder=str(folder),
        checkpoint_digest=manifest.content_digest(),
        source=str(version.source),
        card="",
        record="",
    )


def _variant_run(registry: OpenStore, parent_run_id: str, variant: str) -> str:
    """The child run of the variant."""
    from mlflow.exceptions import MlflowException

    parent = registry.ask(lambda: registry.client.get_run(parent_run_id))
    found = registry.ask(
        lambda: registry.client.search_runs(
            [parent.info.experiment_id],
            f"tags.`mlflow.parentRunId` = '{parent_run_id}' and tags.`pipeline.variant` = '{legal_name(variant)}'",
            max_results=1,
        )
    )
    if not found:
        raise MlflowException(f"the run {parent_run_id} has no child {variant!r}; it was deleted there")
    return str(found[0].info.run_id)


def _version_of(registry: OpenStore, name: str, *, key: str) -> ModelVersion | None:
    found: Sequence[ModelVersion] = registry.ask(
        lambda: registry.client.search_model_versions(
            f"name = '{name}' and tags.promotion_key = '{key}'", max_results=1
        )
    )
    return found[0] if found else None


def _add_model(registry: OpenStore, name: str, report: Report) -> None:
    """The registered model, unless it is there; another process may be making it, too."""
    from mlflow.exceptions import MlflowException

    if registry.ask(lambda: registry.client.search_registered_models(f"name = '{name}'", max_results=1)):
        return
    tags = {"recipe": report.recipe, "model": report.model_id or ""}
    try:
        registry.client.create_registered_model(name, tags=tags)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _log_checkpoint_files(registry: OpenStore, run_id: str, folder: Path) -> None:
    """Manifest and card go to the variant's run: the weights stay where they are."""
    for name in (MANIFEST_NAME, CARD_NAME):
        registry.stop.obey()
        registry.client.log_artifact(run_id, str(folder / name), FOLDER)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as place:
        where = Path(place, "location.json")
        where.write_text(json.dumps({"folder": str(folder), "host_digest": host_digest()}), encoding="utf-8")
        registry.client.log_artifact(run_id, str(where), FOLDER)


def _source(registry: OpenStore, run_id: str, folder: Path) -> str:
    """The folder's URI; a server refuses local paths, which could be its own, and gets the run's artifacts."""
    if not registry.store.is_server:
        return folder.resolve().as_uri()
    run = registry.ask(lambda: registry.client.get_run(run_id))
    return f"{run.info.artifact_uri}/{FOLDER}"


def _version_tags(
    report: Report,
    variant: VariantReport,
    *,
    parent_run_id: str,
    folder: Path,
    manifest: CheckpointManifest,
) -> dict[str, str]:
    """What a search of the registry may ask for: verdict, triple, digests, and where the files are."""
    baseline = report.variant(report.baseline)
    figures = {metric.name: metric.value for metric in variant_metrics(variant, baseline=baseline)}
    wanted = [name for name in figures if name in _TRIPLE or name.startswith("quality.")]
    tags = {
        "verdict": variant.verdict,
        "variant": variant.name,
        "precision": variant.precision,
        "quantizer": str(variant.quantizer.get("kind")),
        "recipe_digest": report.recipe_digest,
        "parent_run_id": parent_run_id,
        "checkpoint_digest": manifest.content_digest(),
        "checkpoint_folder": str(folder),
        "host_digest": host_digest(),
        **{name: f"{figures[name]:.6g}" for name in wanted[:_FILES_TAGGED]},
        **{legal_name(f"sha256.{file.name}"): file.sha256 for file in manifest.files[:_FILES_TAGGED]},
    }
    return {name: shortened(value, min(LONGEST_VERSION_TAG, LONGEST_TAG)) for name, value in tags.items()}


def _description(report: Report, variant: VariantReport, folder: Path) -> str:
    findings = "\n".join(f"- {one.name}: {one.because}" for one in variant.findings)
    return shortened(
        f"**{variant.name}** of `{report.recipe}`, measured {report.started_at[:10]}: {variant.verdict}.\n\n"
        f"{findings}\n\nFiles: `{folder}`, hashes in `{FOLDER}/{MANIFEST_NAME}` of the run.",
        LONGEST_VERSION_TAG,
    )
