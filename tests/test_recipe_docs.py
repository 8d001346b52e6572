"""The errors that docs/recipes.md shows are those of the recipe they are shown for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import load_recipe

DOCS = Path(__file__).parent.parent / "docs" / "recipes.md"
BROKEN = """\
model: some/model
precisions: [fp16, int9]
workload: {promt_tokens: 128}
speed: {batch_sizes: [1], repeats: yes}
gate:
  - {kind: max_memory, fraction: 60%}
  - {kind: max_quality_drop, points: 2}
  - {kind: min_speedup, factor: 1.2, batch_size: 8}
  - {kind: min_sped, factor: 1.2}
"""


def test_the_errors_in_the_docs_are_those_of_today(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(BROKEN, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    said = str(caught.value).replace(str(path), "broken.yaml")
    shown = re.search(
        r"```text\n\$ python -m pipeline check broken\.yaml\n(.*?)```", DOCS.read_text("utf-8"), re.S
    )
    assert shown is not None
    assert shown[1].strip() == f"pipeline: {said}"
