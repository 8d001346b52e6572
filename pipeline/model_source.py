"""Where a recipe's weights and architecture come from: a local folder, the hub, or a config and a seed.

config = read_config(loaded)                       # for planning; no weight is touched
problems = source_problems(loaded)                 # for the preflight
folder = trained_folder(loaded)                    # downloads from the hub if need be
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint import check_source
from pipeline.errors import PipelineError, PrerequisiteError, RecipeError
from pipeline.recipe import LoadedRecipe
from pipeline.results import FileRecord, Problem, SourceRecord
from pipeline.store import Store
from pipeline.weights import SIDE_SUFFIXES

_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "*.txt")


@dataclass(frozen=True)
class Architecture:
    """A transformers config and the file it was read from."""

    config: dict[str, Any]
    source: str


def read_config(loaded: LoadedRecipe) -> Architecture | None:
    """The architecture: the recipe's own `model.config`, else the local folder's, else the hub cache's; or None."""
    model = loaded.recipe.model
    if model.config is not None:
        return _read_json(loaded.resolve(model.config), named_by=f"{loaded.path}: model.config")
    if model.is_local:
        path = loaded.resolve(model.id) / "config.json"
        return _read_json(path, named_by=f"{loaded.path}: model") if path.is_file() else None
    cached = _cached_file(model.id, model.revision, "config.json")
    return _read_json(cached, named_by=model.id) if cached else None


def source_problems(loaded: LoadedRecipe) -> tuple[Problem, ...]:
    """What keeps the weights from being read; empty when they can be."""
    model = loaded.recipe.model
    if model.weights == "random":
        return ()
    if not model.is_local:
        meant = f"./{model.id}" if loaded.resolve(model.id).is_dir() else ""
        return _hub_problems(model.id, model.revision, meant=meant)
    folder = loaded.resolve(model.id)
    if folder.exists() and not folder.is_dir():
        return (Problem(what=f"the model {folder} is not a folder", fix="name the folder it lies in"),)
    if not folder.is_dir():
        hint = (
            "run `make assets`"
            if ".assets" in folder.parts
            else "put a transformers checkpoint (config.json, safetensors) there"
        )
        return (Problem(what=f"the model folder {folder} does not exist", fix=hint),)
    try:
        check_source(folder)
    except PipelineError as error:
        return (Problem(what=str(error), fix="use the original 16-bit safetensors checkpoint"),)
    return ()


def hub_is_offline() -> bool:
    """Whether HF_HUB_OFFLINE tells the hub's client not to try, in any of the spellings that it takes."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def trained_folder(loaded: LoadedRecipe) -> Path:
    """The folder with the weights; a hub model is downloaded into the hub's own cache first."""
    model = loaded.recipe.model
    if model.is_local:
        return loaded.resolve(model.id)
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model.id, revision=model.revision, allow_patterns=list(_HUB_FILES)))
    except Exception as error:
        raise PrerequisiteError(
            f"{model.id} could not be downloaded: {type(error).__name__}: {error}; "
            "the same command goes on where the download stopped"
        ) from error
    check_source(folder)
    return folder


def fetch_description(loaded: LoadedRecipe) -> None:
    """Bring a hub model's config and tokenizer (not its weights) into the hub's cache, where the hub can be reached.

    Where it can't, nothing happens: `source_problems` says so.
    """
    model = loaded.recipe.model
    if model.is_local or model.config is not None or hub_is_offline():
        return
    if _cached_file(model.id, model.revision, "config.json"):
        return
    from huggingface_hub import snapshot_download

    small = [f"*{suffix}" for suffix in SIDE_SUFFIXES]
    with suppress(Exception):
        snapshot_download(model.id, revision=model.revision, allow_patterns=small)


def source_record(loaded: LoadedRecipe, folder: Path, *, store: Store) -> SourceRecord:
    """Name, revision and hash of every file that decides what the model is."""
    model = loaded.recipe.model
    names = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix in (".safetensors", *SIDE_SUFFIXES)
    )
    files = tuple(
        FileRecord(name=path.name, size_bytes=path.stat().st_size, sha256=store.file_digest(path))
        for path in names
    )
    # A hub snapshot's folder is named after the commit that a branch name stood for.
    revision = model.revision if model.is_local else folder.name
    return SourceRecord(model=model.id, revision=revision, files=files)


def random_source_record(loaded: LoadedRecipe) -> SourceRecord:
    """The source of random weights: a name and no file."""
    return SourceRecord(model=loaded.recipe.model.id, revision=loaded.recipe.model.revision, files=())


def _hub_problems(model_id: str, revision: str | None, *, meant: str = "") -> tuple[Problem, ...]:
    """`meant` is how to write the folder of that name beside the recipe, where there is one."""
    if _cached_file(model_id, revision, "config.json") and _weights_cached(model_id, revision):
        return ()
    if hub_is_offline():
        reason = "HF_HUB_OFFLINE is set"
    else:
        refusal = _hub_refusal(model_id, revision)
        if refusal is None:
            return ()
        reason = refusal
    fix = (
        f"run `hf download {model_id}` where the hub can be reached and set HF_HOME to that cache, "
        "or name a local folder"
    )
    if meant:
        fix = f"did you mean the folder beside the recipe? write model: {meant}; else {fix}"
    return (
        Problem(
            what=f"the weights of {model_id} are not in the local cache and can't be fetched: {reason}",
            fix=fix,
        ),
    )


def _hub_refusal(model_id: str, revision: str | None) -> str | None:
    """Why the hub gives no such model, or None when it does; waits a few seconds at most.

    Asked with the standard library: the hub client's own errors are those of whichever HTTP package it uses.
    """
    from huggingface_hub import constants, get_token

    address = f"{constants.ENDPOINT}/api/models/{model_id}" + (f"/revision/{revision}" if revision else "")
    request = urllib.request.Request(address)
    if token := get_token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=5):
            return None
    except urllib.error.HTTPError as error:
        hint = " (a gated or private model needs HF_TOKEN)" if error.code in (401, 403, 404) else ""
        return f"the hub answered {error.code}{hint}"
    except OSError as error:
        return f"the hub can't be reached ({error})"


def _cached_file(model_id: str, revision: str | None, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model_id, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _weights_cached(model_id: str, revision: str | None) -> bool:
    single = _cached_file(model_id, revision, "model.safetensors")
    index = _cached_file(model_id, revision, "model.safetensors.index.json")
    if single or index is None:
        return single is not None
    shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    return all(_cached_file(model_id, revision, shard) for shard in shards)


def _read_json(path: Path, *, named_by: str) -> Architecture:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{named_by}: no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise PrerequisiteError(f"{named_by}: {path} can't be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise PrerequisiteError(f"{named_by}: {path} must hold a JSON object, a transformers config")
    return Architecture(config=content, source=str(path))
