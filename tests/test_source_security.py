"""Files from elsewhere can't run code, fill the memory or carry secrets out."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import check_source
from pipeline.errors import PipelineError, PrerequisiteError, RecipeError
from pipeline.model_source import read_config, source_problems
from pipeline.recipe import load_recipe
from tests.tiny_models import write_llama

RECIPE = """\
model: %s
precisions: [fp16, int8]
speed: {}
gate: [{kind: max_memory, fraction: 0.6}]
"""


def recipe(folder: Path, model: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE % model, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    return str(caught.value)


# --- checkpoints -----------------------------------------------------------------------------------------


class Mark:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "weights.ckpt"])
def test_a_pickle_checkpoint_is_refused_unread(tmp_path: Path, name: str) -> None:
    folder = write_llama(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    marker = tmp_path / "it-ran"
    (folder / name).write_bytes(pickle.dumps(Mark(marker)))
    with pytest.raises(PipelineError, match="safetensors"):
        check_source(folder)
    problems = source_problems(load_recipe(recipe(tmp_path, str(folder))))
    assert len(problems) == 1
    assert "safetensors" in problems[0].what
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists(), "unpickling it would have run code"


def test_a_pickle_beside_safetensors_stays_unread(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    marker = tmp_path / "it-ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Mark(marker)))
    assert check_source(folder).dtype == "float16"
    assert not source_problems(load_recipe(recipe(tmp_path, str(folder))))
    assert not marker.exists()


def test_a_config_that_names_code_of_its_own_runs_none(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model", auto_map={"AutoModelForCausalLM": "evil.Model"})
    marker = tmp_path / "it-ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")
    loaded = load_recipe(recipe(tmp_path, str(folder)))
    architecture = read_config(loaded)
    assert architecture is not None
    source_problems(loaded)
    assert not marker.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_config_that_is_no_object_is_refused_by_name(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(PrerequisiteError, match=r"config\.json"):
        read_config(load_recipe(recipe(tmp_path, str(folder))))


# --- recipes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/object/new:os.system", "!shell"]
)
def test_a_tag_that_would_build_an_object_is_refused(tmp_path: Path, tag: str) -> None:
    marker = tmp_path / "it-ran"
    said = refusal(tmp_path, f"{RECIPE % 'a/b'}workload: {tag} ['touch {marker}']\n")
    assert "line 5: workload: the tag" in said
    assert "not allowed" in said
    assert not marker.exists()


@pytest.mark.parametrize("tag", ["!!binary", "!!set", "!!timestamp", "!!python/name:os.system", "!!pairs"])
def test_only_plain_data_is_read(tmp_path: Path, tag: str) -> None:
    body = "{a: null}" if tag == "!!set" else "[]" if tag == "!!pairs" else "YQ=="
    assert "is not allowed" in refusal(tmp_path, f"{RECIPE % 'a/b'}workload: {tag} {body}\n")


@pytest.mark.parametrize("loop", ["&x [*x]", "&x {prompt_tokens: *x}", "&x [[[*x]]]"])
def test_an_alias_of_itself_is_refused(tmp_path: Path, loop: str) -> None:
    assert "an alias that contains itself" in refusal(tmp_path, f"{RECIPE % 'a/b'}workload: {loop}\n")


def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
    start = time.monotonic()
    said = refusal(tmp_path, "\n".join(lines))
    assert "more than 20000 values" in said
    assert time.monotonic() - start < 5


def test_an_alias_used_twice_is_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: a/b\nprecisions: [fp16, int8]\nspeed: {batch_sizes: &sizes [1]}\ncapacity: {context_tokens: 99}\n"
        "gate: &gate [{kind: max_memory, fraction: 0.6}]\n",
        encoding="utf-8",
    )
    assert load_recipe(path).recipe.gate[0].kind == "max_memory"


@pytest.mark.parametrize("value", [None, "", "/tmp/${X}"])
def test_an_environment_variable_is_refused_by_name_set_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("MODEL_FOLDER", raising=False)
    else:
        monkeypatch.setenv("MODEL_FOLDER", value)
    said = refusal(tmp_path, RECIPE % "${MODEL_FOLDER}/tiny")
    assert "line 1: model" in said
    assert "(${MODEL_FOLDER})" in said
    assert "not expanded" in said


def test_a_message_can_t_steer_the_terminal(tmp_path: Path) -> None:
    said = refusal(tmp_path, f'{RECIPE % "a/b"}"key\\e[2J": "\\e]0;title\\a"\n')
    assert "\x1b" not in said
    assert "\x07" not in said
