"""`no_regression` finds what was promoted last by asking the registry, whichever machine promoted it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.commands import judge_again, promote_run
from pipeline.errors import UsageError
from pipeline.promoted import PromotedBefore, last_promoted
from pipeline.promoted_registry import ask_registry
from pipeline.store import Store
from tests import result_builders as build
from tests.promotion_support import shipped_run
from tests.tracking_support import client, log

NAME = "tiny.tiny--model"


@pytest.fixture(scope="module")
def first_promotion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run was promoted once; making the tables takes seconds."""
    place = tmp_path_factory.mktemp("first")
    assert log(build.report(), place / "mlflow.db", run_folder=place / "none", experiment="first").tracked
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
        environment.setenv("PIPELINE_STORE", str(place / "store"))
        environment.delenv("HF_TOKEN", raising=False)
        promote_run(shipped_run(place), "int8", alias="shippable", push=None)
    return place


@pytest.fixture
def elsewhere(first_promotion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine: the same registry, a store that saw nothing promoted."""
    shutil.copy(first_promotion / "mlflow.db", tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    return tmp_path


def asked() -> PromotedBefore:
    return ask_registry(recipe="recipes/tiny.yaml", model="tiny/model")


def test_the_registry_gives_what_the_promoting_store_kept(first_promotion: Path, elsewhere: Path) -> None:
    kept = last_promoted(Store(first_promotion / "store"), recipe="recipes/tiny.yaml", model="tiny/model")
    found = asked()
    assert found.not_asked == ""
    same_time = {"promoted_at": kept["shippable"].promoted_at}
    assert found.versions["shippable"].model_copy(update=same_time) == kept["shippable"]
    assert last_promoted(Store(elsewhere / "store"), recipe="recipes/tiny.yaml", model="tiny/model") == {}


def test_a_run_of_another_machine_is_judged_beside_the_registered_version(
    first_promotion: Path, elsewhere: Path
) -> None:
    rules = elsewhere / "rules.yaml"
    rules.write_text(
        "model: tiny/model\nprecisions: [fp16, int8]\nspeed: {}\nworkload: {prompt_tokens: 8, new_tokens: 4}\n"
        "gate:\n  - {kind: no_regression, slower_percent: null}\n",
        encoding="utf-8",
    )
    again = judge_again(first_promotion / "run", rules=rules)
    variant = again.variant("int8")
    assert variant is not None
    assert [one.outcome for one in variant.findings] == ["pass"]
    assert "int8 promoted as version 1 on " in variant.findings[0].because


def test_an_alias_that_nobody_has_gives_nothing_and_a_missing_database_is_not_made(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask_registry(recipe="recipes/other.yaml", model="tiny/model") == PromotedBefore()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{elsewhere}/none/mlflow.db")
    assert asked() == PromotedBefore()
    assert not (elsewhere / "none").exists()


def test_a_registry_out_of_reach_is_a_reason_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://alice:s3cr3t@127.0.0.1:9")
    found = asked()
    assert found.versions == {}
    assert "couldn't be asked" in found.not_asked
    assert "s3cr3t" not in found.not_asked


def test_a_version_that_somebody_else_registered_is_refused_by_name(elsewhere: Path) -> None:
    writer = client(elsewhere / "mlflow.db")
    other = writer.create_model_version(NAME, source=(elsewhere / "weights").as_uri())
    writer.set_registered_model_alias(NAME, "shippable", str(other.version))
    with pytest.raises(
        UsageError, match=r"tiny\.tiny--model version 2 \(shippable\): wasn't registered by promote"
    ):
        asked()


@pytest.mark.usefixtures("first_promotion")
def test_figures_changed_after_the_promotion_are_no_baseline(elsewhere: Path) -> None:
    reader = client(elsewhere / "mlflow.db")
    version = reader.get_model_version_by_alias(NAME, "shippable")
    where = reader.get_run(version.tags["parent_run_id"]).info.artifact_uri.removeprefix("file://")
    file = Path(where, "report.json")
    before = file.read_text("utf-8")
    content = json.loads(before)
    content["seconds"] += 1
    file.write_text(json.dumps(content), encoding="utf-8")
    try:
        with pytest.raises(UsageError, match="isn't the one that was promoted; promote again"):
            asked()
    finally:
        file.write_text(before, encoding="utf-8")
