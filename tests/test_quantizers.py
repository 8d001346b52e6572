"""The contract of every quantizer kind, and its sizes: predicted, written, and in the right order."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from pydantic import ValidationError

from pipeline.checkpoint import model_layout, tensors
from pipeline.coverage import coverage, stored_sizes
from pipeline.plugins import kinds, plugin_class, plugin_classes
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto, effective_group_size
from tests.quantizer_samples import EVERY, PACKAGE, Written, every_quantizer, name_of, quantizing
from tests.tiny_models import write_llama

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4", "fp8", "fp4")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    return Written(write_llama(folder / "source"), folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


# --- the contract, for every kind found ------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_exactly_one_kind_answers_for_a_precision_on_a_device(precision: str, device: str) -> None:
    answers = [
        found
        for quantizer in plugin_classes(PACKAGE)
        if (found := quantizer.default_for(precision, device=device)) is not None
    ]
    assert len(answers) == 1
    assert answers[0].precision == precision


@pytest.mark.parametrize("kind", kinds(PACKAGE))
def test_every_kind_is_its_files_name_and_survives_json(kind: str) -> None:
    quantizer_class = cast("type[Quantizer]", plugin_class(PACKAGE, kind))
    assert quantizer_class.default_for("int3", device="cpu") is None
    values = [
        found
        for precision in PRECISIONS
        for device in ("cpu", "cuda")
        if (found := quantizer_class.default_for(precision, device=device)) is not None
    ]
    assert values, "a kind without a default needs a test of its own here"
    for value in values:
        assert value.kind == kind
        assert quantizer_class.model_validate(value.manifest_block()) == value
        assert value.check(device="cpu") == ()


def test_checking_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from pipeline.plugins import plugin_classes\n"
        f"for kind in plugin_classes({PACKAGE!r}):\n"
        "    for precision in ('fp16', 'int8', 'int4', 'fp8', 'fp4'):\n"
        "        value = kind.default_for(precision, device='cpu')\n"
        "        assert value is None or not value.check(device='cpu')\n"
        "heavy = {'torch', 'transformers', 'optimum', 'bitsandbytes', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@quantizing
def test_a_device_without_kernels_is_a_problem_found_by_check(quantizer: Quantizer) -> None:
    assert any("mps" in problem.what for problem in quantizer.check(device="mps"))


def test_defaults_differ_by_device_only_for_int8() -> None:
    assert Quanto.default_for("int8", device="cpu") == Quanto(weights="int8")
    assert Bitsandbytes.default_for("int8", device="cuda") == Bitsandbytes(type="int8")
    for device in ("cpu", "cuda"):
        assert Bitsandbytes.default_for("int4", device=device) == Bitsandbytes(type="nf4", double_quant=True)
        assert Quanto.default_for("fp8", device=device) == Quanto(weights="fp8")


def test_settings_that_contradict_each_other_or_do_not_exist_are_refused() -> None:
    with pytest.raises(ValidationError, match="double_quant is for nf4 and fp4"):
        Bitsandbytes(type="int8", double_quant=True)
    with pytest.raises(ValidationError, match="blocksize"):
        Bitsandbytes.model_validate({"type": "nf4", "blocksize": 48})


# --- sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantizer", "expected_bytes"),
    [
        (Native(dtype="fp16"), 33_554_432),
        (Quanto(weights="int8"), 16_785_408),
        (Quanto(weights="fp8"), 16_785_408),
        (Bitsandbytes(type="int8"), 16_793_600),
        (Quanto(weights="int4"), 8_912_896),
        (Bitsandbytes(type="nf4"), 8_388_608 + 262_144 * 4 + 150),
        (Bitsandbytes(type="nf4", double_quant=True), 8_388_608 + 262_144 + 1024 * 4 + 1024 + 64 + 168),
    ],
    ids=lambda value: name_of(value) if isinstance(value, Quantizer) else "",
)
def test_predicted_bytes_of_a_4096_square_weight(quantizer: Quantizer, expected_bytes: int) -> None:
    assert quantizer.predicted_bytes(4096, 4096) == expected_bytes


def test_int4_bytes_of_a_row_that_128_does_not_divide() -> None:
    assert effective_group_size(288) == 96
    assert Quanto(weights="int4").predicted_bytes(32, 288) == 4_608 + 96 * 2 + 96 * 2


@pytest.mark.parametrize(
    ("in_features", "group"),
    [
        *((64, None), (128, None), (192, 96), (256, 128), (288, 96), (768, 128)),
        *((1000, None), (2880, 96), (4096, 128), (4304, None)),
    ],
)
def test_the_group_size_that_quanto_picks(in_features: int, group: int | None) -> None:
    assert effective_group_size(in_features) == group


@every_quantizer
def test_predicted_bytes_are_those_in_the_file(quantizer: Quantizer, tmp_path: Path, out: Path) -> None:
    source = write_llama(tmp_path / "wide", hidden_size=192, intermediate_size=288)
    quantizer.quantize(source, out, device="cpu")
    layout = model_layout(out)
    predicted = sum(quantizer.predicted_bytes(*shape) for shape in layout.linear.values())
    found = stored_sizes(tensors(out), layout=layout, quantizer=quantizer)
    others = layout.parameters - sum(math.prod(shape) for shape in layout.linear.values())
    assert found.blocks == pytest.approx(predicted, rel=0.01)
    assert found.total == pytest.approx(predicted + others * quantizer.other_bytes_per_weight, rel=0.01)


def test_effective_groups_stand_in_the_coverage_layer_by_layer(tmp_path: Path, out: Path) -> None:
    source = write_llama(tmp_path / "wide", hidden_size=192, intermediate_size=288)
    quantizer = Quanto(weights="int4")
    quantizer.quantize(source, out, device="cpu")
    groups = coverage(tensors(out), layout=model_layout(out), quantizer=quantizer).groups
    assert groups == dict.fromkeys(model_layout(out).linear, 96)


def test_fewer_bits_mean_fewer_bytes(written: Written) -> None:
    def size(quantizer: Quantizer) -> int:
        return sum(info.size_bytes for info in tensors(written(quantizer)).values())

    sixteen = size(Native(dtype="fp16"))
    for int8, int4 in ((EVERY[3], EVERY[4]), (EVERY[6], EVERY[7]), (EVERY[6], EVERY[8])):
        assert sixteen / 4 < size(int4) < size(int8) < sixteen < size(Native(dtype="fp32"))
