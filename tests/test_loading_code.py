"""The code in a model card loads the files that its quantizer writes, and computes what the pipeline computed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.plugins import kinds
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.dynamic_int8 import DynamicInt8
from pipeline.quantizers.gguf import Gguf
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.quantizers.torchao import Torchao
from tests.quantizer_samples import NO_FBGEMM, PACKAGE, Written, logits, name_of
from tests.tiny_models import write_llama

LOADED = (
    Native(dtype="bf16"),
    Bitsandbytes(type="nf4"),
    Quanto(weights="int8"),
    Quanto(weights="int4"),
    Torchao(weights="int8"),
    *(() if NO_FBGEMM else (DynamicInt8(),)),
)


def code_of(loading: str, folder: Path) -> str:
    """The Python of a card, for the files of `folder` and without a tokenizer, which the tiny model has none of."""
    (code,) = re.findall(r"```python\n(.*?)```", loading, re.DOTALL)
    assert code.count('folder = "."') == 1
    lines = code.replace('folder = "."', f"folder = {str(folder)!r}").splitlines()
    return "\n".join(line for line in lines if not line.startswith("tokenizer = "))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("loading")
    return Written(write_llama(folder / "source", dtype="bfloat16"), folder)


@pytest.mark.parametrize("quantizer", LOADED, ids=name_of)
def test_the_cards_code_gives_the_model_that_was_measured(quantizer: Any, written: Written) -> None:
    folder = written(quantizer)
    names: dict[str, Any] = {}
    exec(code_of(quantizer.loading, folder), names)
    model = names["model"].eval()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    again = quantizer.load(folder, device="cpu", compute_dtype=dtype)
    assert (logits(model).float() - logits(again).float()).abs().max() <= 0.05


def test_every_kind_is_among_those_that_are_tried_or_says_a_program() -> None:
    tried = {quantizer.kind for quantizer in LOADED} | ({"dynamic_int8"} if NO_FBGEMM else set())
    assert tried | {"gguf"} == set(kinds(PACKAGE))
    assert "llama-cli --model model.gguf" in Gguf(type="q8_0").loading
