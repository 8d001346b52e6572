"""Predictions beside published figures: the page is what the code says, and nobody beats a ceiling."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.roofline import PLAUSIBLE_SHARE
from scripts.compare_published import (
    FIGURES,
    PAGE,
    Comparison,
    Figure,
    Published,
    compare,
    read_published,
    shapes_of,
    tables,
    with_tables,
)


@pytest.fixture(scope="module")
def shapes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@pytest.fixture(scope="module")
def published() -> Published:
    return read_published()


@pytest.fixture(scope="module")
def comparisons(published: Published, shapes_folder: Path) -> list[Comparison]:
    shapes = shapes_of((figure.model for figure in published.figures), cache_folder=shapes_folder)
    return compare(published, shapes=shapes)


def one(comparisons: list[Comparison], source: str, **facts: object) -> Comparison:
    found = [
        comparison
        for comparison in comparisons
        if comparison.figure.source == source
        and all(getattr(comparison.figure, name) == value for name, value in facts.items())
    ]
    assert len(found) == 1
    return found[0]


def test_the_page_shows_what_the_code_predicts_now(
    comparisons: list[Comparison], shapes_folder: Path
) -> None:
    assert comparisons
    page = PAGE.read_text("utf-8")
    assert with_tables(page, tables(cache_folder=shapes_folder)) == page


def test_nobody_is_faster_than_the_ceiling(comparisons: list[Comparison]) -> None:
    faster = [one.figure for one in comparisons if one.share > PLAUSIBLE_SHARE]
    assert not faster
    assert all(one.share > 0.2 for one in comparisons)


def test_all_kinds_engines_and_widths_are_compared(comparisons: list[Comparison]) -> None:
    assert len(comparisons) >= 14
    assert {one.figure.kind for one in comparisons} == {"decode", "prefill", "request"}
    assert {one.class_bits for one in comparisons} == {16, 8, 4}
    sources = " ".join({one.figure.source for one in comparisons})
    assert all(engine in sources for engine in ("gpt-fast", "TensorRT-LLM", "vLLM", "llama.cpp"))
    assert max(one.figure.batch_size for one in comparisons) >= 64


def test_a_known_ceiling_comes_out_right(comparisons: list[Comparison]) -> None:
    found = one(comparisons, "gpt-fast", model="llama-2-7b", format="f16")
    weights_read = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096 + 65 * 4096
    cache = 105 * 32 * 2 * 4096
    assert found.ceiling_tokens_per_s == pytest.approx(2.039e12 / (2 * (weights_read + cache)))
    assert found.share == pytest.approx(0.685, abs=0.005)


def test_a_step_takes_about_as_much_longer_than_its_floor_at_every_precision(
    comparisons: list[Comparison],
) -> None:
    found = [
        one(comparisons, "gpt-fast", model="llama-2-7b", format=stored)
        for stored in ("f16", "gpt-fast int8", "gpt-fast int4 g32")
    ]
    above_ms = [1000 * (comparison.above_floor_s or 0) for comparison in found]
    assert above_ms == pytest.approx([3.0, 3.2, 3.0], abs=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "decode"},
        {"kind": "prefill", "context_tokens": 5},
        {"kind": "request", "prompt_tokens": 5},
        {"kind": "decode", "context_tokens": 5, "seconds": 1.0},
        {"kind": "decode", "context_tokens": 5, "tokens_per_s": -1.0},
    ],
)
def test_a_figure_without_its_lengths_or_with_two_speeds_is_refused(wrong: dict[str, object]) -> None:
    figure = {
        "source": "s",
        "device": "l4",
        "model": "m",
        "format": "f16",
        "because": "b",
        "tokens_per_s": 1.0,
    }
    with pytest.raises(ValueError, match="tokens"):
        Figure.model_validate({**figure, **wrong})


def test_every_name_in_the_file_must_exist(tmp_path: Path) -> None:
    text = FIGURES.read_text("utf-8").replace("device: l40s", "device: l41s", 1)
    path = tmp_path / "figures.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="unknown device: 'l41s'"):
        read_published(path)
