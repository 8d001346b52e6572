"""Tensors are taken one by one only where the file's names, shapes and values are the model's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.meta_model import empty_model, parse_config
from pipeline.stored_names import match_names
from pipeline.tensorfile import read_json
from tests.quantizer_samples import edited
from tests.tiny_models import write_gpt2, write_llama, write_moe


def matched(folder: Path) -> Any:
    config = parse_config(read_json(folder / "config.json"), source="config.json").config
    return match_names(folder, empty_model(config, source="config.json"))


def changed(tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> Any:
    return matched(edited(write_llama(tmp_path / "source"), tmp_path / "edited", edit))


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False}, {"shard_bytes": 30_000}])
def test_a_model_saved_by_transformers_matches(overrides: dict[str, Any], tmp_path: Path) -> None:
    found = matched(write_llama(tmp_path / "model", **overrides))
    assert (found.because, found.left_out) == (None, frozenset())
    assert matched(write_gpt2(tmp_path / "gpt2")).because is None


def test_experts_that_transformers_fuses_do_not(tmp_path: Path) -> None:
    assert "transformers converts model.layers.0.mlp.experts" in matched(write_moe(tmp_path / "moe")).because


def test_names_without_the_models_prefix_do_not(tmp_path: Path) -> None:
    def shorten(weights: dict[str, Any]) -> None:
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    assert "loads embed_tokens.weight as model.embed_tokens.weight" in changed(tmp_path, shorten).because


def test_a_tied_heads_copy_is_left_out_when_it_is_one(tmp_path: Path) -> None:
    def copy(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    found = changed(tmp_path, copy)
    assert (found.because, found.left_out) == (None, frozenset({"lm_head.weight"}))


def test_a_tied_heads_copy_that_is_none_is_told(tmp_path: Path) -> None:
    def spoil(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1

    assert "lm_head.weight should be model.embed_tokens.weight (tied)" in changed(tmp_path, spoil).because


def test_tensors_too_many_too_few_or_of_another_shape_are_told(tmp_path: Path) -> None:
    import torch

    def add(weights: dict[str, Any]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    def drop(weights: dict[str, Any]) -> None:
        del weights["model.norm.weight"]

    def cut(weights: dict[str, Any]) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"][:32].clone()

    for number, (edit, said) in enumerate(
        (
            (add, "the model has no model.layers.0.self_attn.rotary_emb.inv_freq"),
            (drop, "model.norm.weight of the model is in no file"),
            (cut, "model.norm.weight has another shape"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        assert said in changed(tmp_path / str(number), edit).because
