"""Activations predicted from shapes grow as a model's code makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.activations import predicted_peak
from tests.tiny_models import write_llama


def test_activations_grow_with_the_prompt_and_a_long_answer_leaves_the_cache_alone(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "tiny")

    def each(prompt_tokens: int, new_tokens: int, **settings: Any) -> int:
        return predicted_peak(
            folder,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            **{"compute_dtype": "float32", "static_cache": False, **settings},
        ).bytes_per_sequence

    assert each(400, 8) == pytest.approx(2 * each(200, 4), rel=0.05)
    assert each(400, 8, compute_dtype="float16") == pytest.approx(each(400, 8) / 2, rel=0.1)
    cache = 256 * 407
    assert each(8, 400) == pytest.approx(cache, rel=0.6)
    assert each(400, 8) > 6 * cache
    assert each(200, 200, static_cache=True) > each(200, 200)
