"""Only what ships and hasn't changed since becomes a registered version, once, with a card that tools can read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import read_manifest, verify
from pipeline.cli import main
from pipeline.commands import promote_run
from pipeline.errors import NoShipError, StageError
from pipeline.promoted import last_promoted, registered_name
from pipeline.promotion import Promotion
from pipeline.results import Report
from pipeline.store import Store
from pipeline.stored_reports import load_report
from tests import result_builders as build
from tests.promotion_support import checkpoint, report_of, shipped_run, written
from tests.tracking_support import client, log

NAME = "tiny.tiny--model"


@pytest.fixture(scope="session")
def empty_registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with its tables made; making them takes seconds, copying them nothing."""
    folder = tmp_path_factory.mktemp("registry")
    assert log(build.report(), folder / "mlflow.db", run_folder=folder / "none", experiment="first").tracked
    return folder / "mlflow.db"


@pytest.fixture
def place(empty_registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store of runs and a tracking store of its own."""
    shutil.copy(empty_registry, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path


def promoted(run: Path, alias: Any = "shippable") -> Promotion:
    return promote_run(run, "int8", alias=alias, push=None)


# --- what is registered ----------------------------------------------------------------------------------


def test_a_variant_that_ships_becomes_a_version_that_links_to_its_run_its_folder_and_its_hashes(
    place: Path,
) -> None:
    done = promoted(shipped_run(place))
    reader = client(place / "mlflow.db")
    version = reader.get_model_version_by_alias(NAME, "shippable")
    assert (version.name, version.version, version.run_id) == (NAME, 1, done.run_id)
    assert version.source == (place / "checkpoints" / "int8").as_uri()
    assert (version.tags["verdict"], version.tags["precision"]) == ("ship", "int8")
    manifest = read_manifest(Path(done.checkpoint_folder))
    assert version.tags["checkpoint_digest"] == manifest.content_digest()
    assert version.tags["sha256.model.safetensors"] == manifest.files[1].sha256
    assert float(version.tags["memory.weight_bytes_resident"]) == 5e8
    assert float(version.tags["quality.piqa.acc"]) == pytest.approx(382 / 500)
    child = reader.get_run(done.run_id)
    assert child.data.tags["pipeline.variant"] == "int8"
    assert child.data.tags["mlflow.parentRunId"] == done.parent_run_id == version.tags["parent_run_id"]


def test_whoever_asks_the_registry_for_the_alias_gets_the_folder_itself(place: Path) -> None:
    promoted(shipped_run(place))
    uri = client(place / "mlflow.db").get_model_version_download_uri(NAME, "1")
    import mlflow

    assert Path(mlflow.artifacts.download_artifacts(uri)).resolve() == place / "checkpoints" / "int8"


def test_promoting_twice_is_one_version_and_a_new_run_of_it_is_the_next(place: Path) -> None:
    run = shipped_run(place)
    first, again, champion = promoted(run), promoted(run), promoted(run, "champion")
    assert [(one.version, one.added) for one in (first, again, champion)] == [
        ("1", True),
        ("1", False),
        ("1", False),
    ]
    later = load_report(run).model_copy(update={"started_at": "2026-02-02T03:04:05+00:00"})
    second = promoted(written(place / "later", later))
    assert (second.version, second.added) == ("2", True)
    reader = client(place / "mlflow.db")
    aliases = reader.get_registered_model(NAME).aliases
    assert {name: str(version) for name, version in aliases.items()} == {"shippable": "2", "champion": "1"}
    assert promoted(run).version == "1", "an older version can be put back"
    assert str(reader.get_model_version_by_alias(NAME, "shippable").version) == "1"


def test_names_of_recipe_and_model_become_one_that_a_registry_takes() -> None:
    assert registered_name(recipe="recipes/demo.yaml", model="../models/tiny") == "demo.tiny"
    assert registered_name(recipe="a b:c.yaml", model="Org/Model-1.5B") == "a_b_c.Org--Model-1.5B"


def test_what_was_promoted_last_is_kept_with_its_answers(place: Path) -> None:
    done = promoted(shipped_run(place))
    kept = last_promoted(Store(place / "store"), recipe="recipes/tiny.yaml", model="tiny/model")
    assert set(kept) == {"shippable"}
    results = kept["shippable"].results
    assert kept["shippable"].version == done.version
    assert results.quality is not None
    assert len(results.quality.tasks["piqa"].samples) == 500


# --- what is refused -------------------------------------------------------------------------------------


def refused(place: Path, change: Callable[[Report], Report], variant: str = "int8") -> int:
    """Exit code of promoting from a changed report; nothing may have been registered or kept."""
    run = shipped_run(place)
    written(run, change(load_report(run)))
    code = main(["promote", str(run), variant])
    assert not client(place / "mlflow.db").search_registered_models()
    assert not list((place / "store").rglob("*.json"))
    return code


def with_int8(report: Report, **fields: Any) -> Report:
    """The report with other fields of int8."""
    changed = [one.model_copy(update=fields) if one.name == "int8" else one for one in report.variants]
    return report.model_copy(update={"variants": tuple(changed)})


@pytest.mark.parametrize(("verdict", "code"), [("no-ship", 1), ("inconclusive", 5), ("error", 4)])
def test_a_verdict_that_is_not_ship_is_refused_with_its_own_exit_code(
    place: Path, verdict: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(place, lambda report: with_int8(report, verdict=verdict)) == code
    assert f"its verdict, stored, is {verdict}" in capsys.readouterr().err


def test_a_ship_that_its_own_rules_deny_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A verdict edited into the report, or figures that were changed behind it."""
    fat = build.memory("fp16")
    assert refused(place, lambda report: with_int8(report, memory=fat)) == 1
    assert "judged again now, is no-ship: max_memory fail" in capsys.readouterr().err


def test_an_interrupted_run_promotes_nothing(place: Path) -> None:
    assert refused(place, lambda report: report.model_copy(update={"interrupted": True})) == 4


@pytest.mark.parametrize(
    ("variant", "said"), [("int", "did you mean 'int8'?"), ("fp16", "is the baseline"), ("", "no variant ''")]
)
def test_a_variant_that_is_none_is_refused(
    place: Path, variant: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(place, lambda report: report, variant) == 2
    assert said in capsys.readouterr().err


def test_random_weights_and_a_missing_checkpoint_are_refused(place: Path) -> None:
    run = shipped_run(place)
    report = load_report(run)
    int8 = report.variant("int8")
    assert int8 is not None
    assert int8.checkpoint is not None
    seeded = int8.checkpoint.model_copy(update={"random_seed": 7})
    written(run, with_int8(report, checkpoint=seeded))
    assert main(["promote", str(run), "int8"]) == 2
    written(run, with_int8(report, checkpoint_folder=str(place / "gone")))
    assert main(["promote", str(run), "int8"]) == 3


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_that_changed_since_they_were_measured_are_refused(
    place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shipped_run(place)
    path = place / "checkpoints" / "int8" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert main(["promote", str(run), "int8"]) == 4
    assert f"{name}: changed since the manifest was written" in capsys.readouterr().err
    assert not path.with_name("README.md").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link to nowhere", "fifo"])
def test_whatever_was_added_to_the_checkpoint_is_refused(
    place: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shipped_run(place)
    added = place / "checkpoints" / "int8" / "original"
    if kind == "file":
        added.write_bytes(b"x")
    elif kind == "folder":
        added.mkdir()
        (added / "consolidated.pth").write_bytes(b"weights that nobody measured")
    elif kind == "fifo":
        os.mkfifo(added)
    else:
        added.symlink_to("nowhere")
    assert main(["promote", str(run), "int8"]) == 4
    assert f"{added}: not in the manifest" in capsys.readouterr().err


def test_a_card_that_cannot_be_written_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shipped_run(place)
    card = place / "checkpoints" / "int8" / "README.md"
    card.mkdir()
    assert main(["promote", str(run), "int8"]) == 4
    assert f"{card} can't be written" in capsys.readouterr().err
    assert not client(place / "mlflow.db").search_registered_models()


def test_a_store_that_cannot_be_written_is_told_before_anything_is_registered(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shipped_run(place)
    (place / "a-file").write_text("", encoding="utf-8")
    monkeypatch.setenv("PIPELINE_STORE", str(place / "a-file"))
    assert main(["promote", str(run), "int8"]) == 3
    assert "a-file can't be written" in capsys.readouterr().err
    assert not client(place / "mlflow.db").search_registered_models()


def test_what_is_registered_and_could_not_be_kept_says_both(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shipped_run(place)
    kept = place / "store" / "promoted" / NAME / "shippable.json"
    kept.mkdir(parents=True)
    assert main(["promote", str(run), "int8"]) == 4
    told = capsys.readouterr().err
    assert f"{NAME} version 1 is shippable in the registry, but the store couldn't keep" in told
    kept.rmdir()
    assert promoted(run).version == "1"
    assert kept.is_file()


def test_a_folder_that_holds_another_checkpoint_by_now_is_refused(place: Path) -> None:
    run = shipped_run(place)
    folder = place / "checkpoints" / "int8"
    shutil.rmtree(folder)
    checkpoint(folder, "int4")
    assert main(["promote", str(run), "int8"]) == 4


def test_without_mlflow_nothing_is_promoted_and_the_reason_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shipped_run(place)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://alice:s3cr3t@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert main(["promote", str(run), "int8"]) == 4
    said = capsys.readouterr().err
    assert "nothing was promoted, because the run isn't in MLflow" in said
    assert "s3cr3t" not in said
    assert not list((place / "store").rglob("*.json"))


def test_a_gate_of_no_rules_never_promotes(place: Path) -> None:
    variants = (build.variant("fp16"), checkpoint(place / "checkpoints" / "int8"))
    report = report_of(variants, model="tiny/model", rules=())
    run = written(place / "run", with_int8(report, verdict="ship"))
    with pytest.raises(StageError, match="judged again now, is error"):
        promoted(run)


def test_a_verdict_is_that_of_the_variant_and_not_of_its_name(place: Path) -> None:
    run = shipped_run(place)
    report = load_report(run)
    written(run, with_int8(report, verdict="no-ship").model_copy(update={"verdict": "ship"}))
    with pytest.raises(NoShipError):
        promoted(run)


# --- the card --------------------------------------------------------------------------------------------


def test_the_card_is_read_by_the_hubs_own_reader_with_every_score(place: Path) -> None:
    from huggingface_hub import ModelCard

    done = promoted(shipped_run(place))
    card = ModelCard.load(done.card)
    assert (card.data.base_model, card.data.library_name) == ("tiny/model", "transformers")
    (result,) = card.data.eval_results or []
    assert (result.dataset_name, result.metric_type) == ("piqa", "acc")
    assert result.metric_value == pytest.approx(382 / 500)
    assert card.data.model_name == f"{NAME} int8"


def test_the_card_tells_the_triple_with_intervals_the_limits_and_how_to_load(place: Path) -> None:
    text = Path(promoted(shipped_run(place)).card).read_text("utf-8")
    assert "| decode, batch 1, 128 + 32 tokens, tok/s | 40 [" in text
    assert "| weights in memory, GB (1e9 bytes) | 0.5 | 1 | × 0.5 |" in text
    assert "| piqa acc, 500 documents | 0.764 [0.725, 0.799] | 0.762 | +0.002 |" in text
    assert "max_quality_drop piqa | pass" in text
    assert "QuantizedModelForCausalLM.from_pretrained(folder)" in text
    assert "model: tiny/model" in text


def test_the_card_changes_no_hash_and_is_written_anew(place: Path) -> None:
    run = shipped_run(place)
    done = promoted(run)
    folder = Path(done.checkpoint_folder)
    verify(folder, read_manifest(folder))
    Path(done.card).write_text("edited by somebody", encoding="utf-8")
    assert promoted(run).checkpoint_digest == done.checkpoint_digest
    assert Path(done.card).read_text("utf-8").startswith("---\n")
    (folder / "extra.bin").write_bytes(b"x")
    assert main(["promote", str(run), "int8"]) == 4


def test_a_recipe_that_holds_a_fence_stays_in_its_own(place: Path) -> None:
    run = shipped_run(place)
    (run / "recipe.yaml").write_text("model: tiny/model  # as in\n# ```yaml\n```\n# not a heading\n", "utf-8")
    text = Path(promoted(run).card).read_text("utf-8")
    assert text.count("\n````") == 2
    assert "````yaml\nmodel: tiny/model" in text


def test_a_model_from_a_folder_has_no_base_on_the_hub(place: Path) -> None:
    from huggingface_hub import ModelCard

    done = promoted(shipped_run(place, model="../models/tiny"))
    assert ModelCard.load(done.card).data.base_model is None
    assert done.name == "tiny.tiny"


def test_the_json_of_the_command_is_one_value(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shipped_run(place)
    assert main(["promote", str(run), "int8", "--alias", "champion", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["version"], told["alias"], told["added"]) == (NAME, "1", "champion", True)
