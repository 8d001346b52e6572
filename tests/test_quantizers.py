"""The contract of every quantizer kind, and its sizes: predicted, written, and in the right order."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from pipeline.architecture import shape_facts
from pipeline.checkpoint import model_layout, tensors
from pipeline.coverage import coverage, stored_sizes
from pipeline.footprint import unreached_weights, weight_bytes
from pipeline.live_tensors import resident_bytes
from pipeline.plugins import kinds, plugin_class, plugin_classes
from pipeline.quantizers.base import Quantizer, StoredBytes, group_wise
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.dynamic_int8 import DynamicInt8
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto, effective_group_size
from pipeline.quantizers.torchao import Torchao
from tests.quantizer_samples import (
    EVERY,
    OF_OTHER_FILES,
    PACKAGE,
    WITH_CONV1D,
    Written,
    edited,
    every_quantizer,
    name_of,
    quantizing,
)
from tests.tiny_models import write_gpt2, write_llama, write_moe

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
    values += [sample for sample in (*EVERY, *OF_OTHER_FILES) if sample.kind == kind]
    assert values, "a kind without a default needs a sample"
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


@pytest.mark.parametrize(
    ("bits", "group_size", "scale_bytes", "zero_point_bytes", "expected_bytes"),
    [
        (16, None, 0, 0, 33_554_432),
        (8, None, 2, 0, 16_785_408),
        (8, None, 4, 0, 16_793_600),
        (4, 128, 2, 0, 8_650_752),
        (4, 128, 2, 2, 8_912_896),
        (4, 64, 2, 0, 8_912_896),
    ],
)
def test_bytes_of_a_4096_square_weight_by_group(
    bits: int, group_size: int | None, scale_bytes: int, zero_point_bytes: int, expected_bytes: int
) -> None:
    stored = group_wise(
        4096,
        4096,
        bits=bits,
        group_size=group_size,
        scale_bytes=scale_bytes,
        zero_point_bytes=zero_point_bytes,
    )
    assert stored.packed == 4096 * 4096 * bits // 8
    assert stored.total == expected_bytes


def test_a_row_that_groups_do_not_divide_ends_in_a_group_of_its_own() -> None:
    stored = group_wise(10, 4304, bits=4, group_size=32, scale_bytes=2)
    assert stored.scales == 10 * 135 * 2
    assert stored.packed == 10 * 4304 // 2


def test_int4_bytes_of_a_row_that_128_does_not_divide() -> None:
    assert effective_group_size(288) == 96
    stored = Quanto(weights="int4").predicted_parts(32, 288)
    assert stored == StoredBytes(packed=4_608, scales=96 * 2, zero_points=96 * 2)


def test_int4_packs_groups_in_pairs_and_fills_the_last() -> None:
    import torch
    from optimum.quanto import qint4
    from optimum.quanto.tensor import MaxOptimizer, quantize_weight

    for rows, columns in ((3, 64), (3, 192), (5, 192), (3, 384)):
        group = effective_group_size(columns)
        weight = torch.linspace(-1, 1, rows * columns).reshape(rows, columns)
        scale, shift = MaxOptimizer()(weight, qtype=qint4, axis=0, group_size=group)
        packed = quantize_weight(weight, qtype=qint4, axis=0, scale=scale, shift=shift, group_size=group)
        found = Quanto(weights="int4").predicted_parts(rows, columns)
        assert found.packed == packed._data._data.nbytes, (rows, columns)
        assert found.scales == 2 * scale.numel()


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


ODD_SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 288}  # groups of 96
EVEN_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
}  # groups of 128, for which quanto has a kernel


@every_quantizer
@pytest.mark.parametrize("sizes", [ODD_SIZES, EVEN_SIZES], ids=["odd", "even"])
def test_predicted_resident_bytes_are_those_of_the_live_tensors(
    quantizer: Quantizer, sizes: dict[str, Any], tmp_path: Path, out: Path
) -> None:
    source = write_llama(tmp_path / "source", **sizes)
    quantizer.quantize(source, out, device="cpu")
    facts = shape_facts(json.loads((source / "config.json").read_text("utf-8")))
    for compute_dtype, compute_bytes in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        model: Any = quantizer.load(out, device="cpu", compute_dtype=compute_dtype)
        predicted = weight_bytes(facts, quantizer=quantizer, compute_bytes=compute_bytes).resident
        rotary = sum(buffer.nbytes for name, buffer in model.named_buffers() if "inv_freq" in name)
        assert resident_bytes(model) - rotary == predicted, compute_dtype


@pytest.mark.parametrize("quantizer", [EVERY[1], *WITH_CONV1D], ids=name_of)
def test_predicted_resident_bytes_hold_for_transposed_weights(
    quantizer: Quantizer, tmp_path: Path, out: Path
) -> None:
    source = write_gpt2(tmp_path / "source")
    quantizer.quantize(source, out, device="cpu")
    facts = shape_facts(json.loads((source / "config.json").read_text("utf-8")))
    found = resident_bytes(quantizer.load(out, device="cpu", compute_dtype="float32"))
    assert found == weight_bytes(facts, quantizer=quantizer, compute_bytes=4).resident


def test_weights_computed_in_fp32_are_held_in_it_but_packed_ones_stay_packed(written: Written) -> None:
    facts = shape_facts(json.loads((written.source / "config.json").read_text("utf-8")))
    native = weight_bytes(facts, quantizer=Native(dtype="bf16"), compute_bytes=4)
    assert (native.on_disk, native.resident) == (112_512, 225_024)
    assert weight_bytes(facts, quantizer=Native(dtype="bf16")).resident == 112_512
    packed = weight_bytes(facts, quantizer=Quanto(weights="int8"), compute_bytes=4)
    assert packed.resident - packed.on_disk == 2 * 19_392 + 2 * packed.parts.scales // 2 + 7 * 2 * 4


@quantizing
@pytest.mark.parametrize("write", [write_llama, write_gpt2, write_moe])
def test_a_quantizer_reaches_the_weights_it_says_and_no_others(
    quantizer: Quantizer, write: Callable[[Path], Path], tmp_path: Path, out: Path
) -> None:
    source = write(tmp_path / "source")
    quantizer.quantize(source, out, device="cpu")
    found = coverage(tensors(out), layout=model_layout(out), quantizer=quantizer)
    facts = shape_facts(json.loads((source / "config.json").read_text("utf-8")))
    left = unreached_weights(facts, quantizer=quantizer)
    assert found.linear_weights - found.quantized_weights == left
    assert (found.share < quantizer.minimum_coverage) == (left > 0)


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


def test_only_what_quantizes_activations_multiplies_integers() -> None:
    assert {quantizer for quantizer in (*EVERY, DynamicInt8()) if quantizer.integer_arithmetic} == {
        Bitsandbytes(type="int8"),
        DynamicInt8(),
        Torchao(weights="int8_dynamic"),
    }


@pytest.mark.parametrize("write", [write_llama, write_moe], ids=["streamed", "as a whole"])
def test_scales_that_quanto_had_to_raise_are_counted_in_the_notes(
    write: Callable[..., Path], tmp_path: Path, out: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"

    def shrink(weights: dict[str, Any]) -> None:
        weights[name][4:6] = 1e-6

    source = edited(write(tmp_path / "source", dtype="float16"), tmp_path / "edited", shrink)
    notes = Quanto(weights="int8").quantize(source, out, device="cpu")
    assert notes[0] == "2 scales below the smallest 16-bit number were raised to it"
