"""Quantized weights: finite, near the source, unchanged by reloading, refused where they can't be."""

from __future__ import annotations

import errno
import json
import logging
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import hash_files, tensors
from pipeline.errors import CheckpointError, StageError
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.quanto_weights import frozen_weight, stored_parts
from pipeline.weights import repaired_generation_config, saving_to, scan_source
from tests.quantizer_samples import (
    EVERY,
    GATE,
    PACKAGE,
    SINGLE,
    WITH_CONV1D,
    Written,
    dense,
    edited,
    every_quantizer,
    logits,
    name_of,
    quantizing,
)
from tests.tiny_models import write_gpt2, write_llama, write_moe


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    return Written(write_llama(folder / "source"), folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and every run sums in the same order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- reloading -------------------------------------------------------------------------------------------


@every_quantizer
def test_the_head_stays_tied_unquantized_and_off_meta_after_loading(
    quantizer: Quantizer, written: Written
) -> None:
    model: Any = quantizer.load(written(quantizer), device="cpu", compute_dtype="float32")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert not model.training
    assert all(tensor.device.type == "cpu" for tensor in [*model.parameters(), *model.buffers()])
    assert "lm_head.weight" not in tensors(written(quantizer))


@every_quantizer
@pytest.mark.parametrize("compute_dtype", ["float32", "float16", "bfloat16"])
def test_every_compute_type_gives_nearly_the_same_logits(
    quantizer: Quantizer, compute_dtype: str, written: Written
) -> None:
    exact = logits(quantizer.load(written(quantizer), device="cpu", compute_dtype="float32"))
    found = logits(quantizer.load(written(quantizer), device="cpu", compute_dtype=compute_dtype))
    assert str(found.dtype) == f"torch.{compute_dtype}"
    assert float((found.float() - exact).abs().max()) < 0.01


def test_a_fresh_process_reloads_what_was_saved(written: Written, tmp_path: Path) -> None:
    expected = {}
    for quantizer in EVERY:
        model = quantizer.load(written(quantizer), device="cpu", compute_dtype="float32")
        expected[str(written(quantizer))] = logits(model).flatten().tolist()
    code = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from pipeline.plugins import plugin_class\n"
        "found = {}\n"
        "for folder, block in json.load(sys.stdin).items():\n"
        f"    quantizer = plugin_class({PACKAGE!r}, block['kind']).model_validate(block)\n"
        "    model = quantizer.load(Path(folder), device='cpu', compute_dtype='float32')\n"
        "    with torch.no_grad():\n"
        "        found[folder] = model(torch.tensor([[3, 17, 40, 5, 99, 120]])).logits.flatten().tolist()\n"
        f"json.dump(found, open({str(tmp_path / 'found.json')!r}, 'w'))\n"
    )
    blocks = {str(written(quantizer)): quantizer.manifest_block() for quantizer in EVERY}
    subprocess.run([sys.executable, "-c", code], input=json.dumps(blocks), text=True, check=True, timeout=120)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == expected.keys()
    for folder, values in expected.items():
        # Equal weights; sums over threads may be taken in another order in another process.
        assert found[folder] == pytest.approx(values, abs=1e-5), folder


@pytest.mark.parametrize("quantizer", [EVERY[2], *EVERY[3:6]], ids=name_of)
def test_fp32_arithmetic_uses_exactly_the_stored_weights(quantizer: Quantizer, written: Written) -> None:
    import torch
    from safetensors.torch import load_file

    stored = load_file(written(quantizer) / SINGLE)
    model = quantizer.load(written(quantizer), device="cpu", compute_dtype="float32")
    weight = dense(model, GATE)
    if quantizer.kind == "native":
        expected = stored[GATE].float()
    elif quantizer.precision == "int4":
        packed = stored[f"{GATE}._data._data"]
        levels = torch.cat((packed & 15, packed >> 4)).float()
        expected = levels * stored[f"{GATE}._scale"].float() - stored[f"{GATE}._shift"].float()
    else:
        expected = stored[f"{GATE}._data"].float() * stored[f"{GATE}._scale"].float()
    assert weight.shape == expected.shape
    assert float((weight - expected).abs().max()) <= 1e-8


@quantizing
def test_quantized_weights_stay_near_the_source(quantizer: Quantizer, written: Written) -> None:
    from safetensors.torch import load_file

    source = load_file(written.source / SINGLE)[GATE].float()
    found = dense(quantizer.load(written(quantizer), device="cpu", compute_dtype="float32"), GATE)
    error = float((found - source).norm() / source.norm())
    assert 0 < error < {"int8": 0.01, "fp8": 0.04, "int4": 0.12, "fp4": 0.2}[quantizer.precision]


def test_a_checkpoint_of_another_setting_is_refused_with_both(written: Written) -> None:
    with pytest.raises(CheckpointError, match=r"saved as qint8, the recipe says int4"):
        Quanto(weights="int4").load(written(Quanto(weights="int8")), device="cpu", compute_dtype="float32")
    with pytest.raises(
        CheckpointError, match=r"saved as nf4, double_quant False.*says nf4, double_quant True"
    ):
        Bitsandbytes(type="nf4", double_quant=True).load(
            written(Bitsandbytes(type="nf4")), device="cpu", compute_dtype="float32"
        )
    with pytest.raises(CheckpointError, match="saved as float16, the recipe says bf16"):
        Native(dtype="bf16").load(written(Native(dtype="fp16")), device="cpu", compute_dtype="float32")


@pytest.mark.parametrize("quantizer", [EVERY[2], EVERY[4], EVERY[7]], ids=name_of)
def test_a_tensor_missing_from_the_file_is_refused(
    quantizer: Quantizer, written: Written, tmp_path: Path
) -> None:
    def drop(weights: dict[str, Any]) -> None:
        del weights["model.norm.weight"]

    folder = edited(written(quantizer), tmp_path / "broken", drop)
    with pytest.raises(CheckpointError, match=r"in no file, such as model\.norm\.weight"):
        quantizer.load(folder, device="cpu", compute_dtype="float32")


def test_one_precision_leaves_nothing_behind_for_the_next(written: Written, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("int8", "int4-after", "int4-alone")]
    for folder, weights in zip(folders, ("int8", "int4", "int4"), strict=True):
        folder.mkdir()
        Quanto.model_validate({"weights": weights}).quantize(written.source, folder, device="cpu")
    assert hash_files(folders[1]) == hash_files(folders[2])


def test_int8_runs_without_a_warning_per_layer(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    quantizer = Bitsandbytes(type="int8")
    with caplog.at_level(logging.WARNING):
        logits(quantizer.load(written(quantizer), device="cpu", compute_dtype="float32"))
    assert not caplog.records


def in_files(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def by_quanto_itself(source: Path, *, quanto_type: str, dtype: str) -> dict[str, Any]:
    """What its own functions make of the whole model in memory, but for a tied head's second name."""
    import torch
    from optimum.quanto import freeze, qtypes, quantize
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    quantize(model, weights=qtypes[quanto_type], exclude="lm_head")
    freeze(model)
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


SOURCES: dict[str, dict[str, Any]] = {
    "tied, FP16": {"hidden_size": 256, "intermediate_size": 320},
    "untied, FP32": {"dtype": "float32", "tie_word_embeddings": False, "intermediate_size": 63},
    "biases, several files": {
        **{"attention_bias": True, "mlp_bias": True, "hidden_size": 256, "intermediate_size": 96},
        "shard_bytes": 100_000,
    },
}


@pytest.mark.parametrize("source", SOURCES)
def test_quanto_tensor_by_tensor_gives_every_bit_of_quanto_on_the_whole_model(
    source: str, tmp_path: Path
) -> None:
    import torch

    folder = write_llama(tmp_path / "source", **SOURCES[source])
    for weights, quanto_type in (("int8", "qint8"), ("int4", "qint4"), ("fp8", "qfloat8_e4m3fn")):
        expected = by_quanto_itself(folder, quanto_type=quanto_type, dtype="float16")
        out = tmp_path / weights
        out.mkdir()
        notes = Quanto.model_validate({"weights": weights}).quantize(folder, out, device="cpu")
        found = in_files(out)
        assert notes == ()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), (
                name
            )


def test_quanto_in_blocks_of_rows_gives_every_bit_of_quanto_at_once() -> None:
    import torch
    from optimum.quanto import qtypes
    from optimum.quanto.nn import QLinear

    draw = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 3_000_000), (3, 2_500_000), (5, 1_000_000), (1025, 4096)):
        weight = torch.randn(rows, columns, generator=draw).to(torch.bfloat16)
        for quanto_type in ("qint8", "qint4", "qfloat8_e4m3fn"):
            with torch.device("meta"):
                plain = torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
            module = QLinear.from_module(plain, weights=qtypes[quanto_type])
            found, _ = stored_parts(weight, module=module, name="a")
            expected: dict[str, Any] = {}
            frozen_weight(weight, module=module, name="a")[0].save_to_state_dict(
                expected, "a.weight.", keep_vars=False
            )
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(
                    found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
                ), (name, rows)


def test_a_mixture_of_experts_is_quantized_as_a_whole_and_says_so(tmp_path: Path, out: Path) -> None:
    notes = Quanto(weights="int8").quantize(write_moe(tmp_path / "moe"), out, device="cpu")
    assert any("in memory as a whole" in note and "experts" in note for note in notes)
    assert "model.layers.0.mlp.experts.gate_up_proj" in in_files(out)


# --- numbers that break quantizers -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@quantizing
def test_zero_and_tiny_rows_stay_finite(quantizer: Quantizer, dtype: str, tmp_path: Path, out: Path) -> None:
    import torch

    rows: dict[str, Any] = {}

    def shrink(weights: dict[str, Any]) -> None:
        weights[GATE][3] = 0
        weights[GATE][4] = torch.linspace(-1e-6, 1e-6, 64)
        weights[GATE][5] = 0.25
        rows.update(before=weights[GATE].clone())

    source = edited(write_llama(tmp_path / "source", dtype=dtype), tmp_path / "edited", shrink)
    quantizer.quantize(source, out, device="cpu")
    model = quantizer.load(out, device="cpu", compute_dtype="float32")
    found = dense(model, GATE)
    assert bool(found.isfinite().all())
    assert float(found[3].abs().max()) == 0.0
    # Double quantization spreads 256 levels over all scales of a weight: below the lowest it can't go.
    allowed = 2e-3 if quantizer.model_dump().get("double_quant") else 3e-7
    assert float((found[4] - rows["before"][4].float()).abs().max()) <= allowed
    assert float((found[5] - 0.25).abs().max()) < 0.001
    assert bool(logits(model).isfinite().all())


def test_large_weights_do_not_overflow_fp8(written: Written, tmp_path: Path, out: Path) -> None:
    import torch

    def enlarge(weights: dict[str, Any]) -> None:
        weights[GATE][7, :4] = torch.tensor([448.0, 464.0, 465.0, 1000.0])

    source = edited(written.source, tmp_path / "edited", enlarge)
    quantizer = Quanto(weights="fp8")
    quantizer.quantize(source, out, device="cpu")
    row = dense(quantizer.load(out, device="cpu", compute_dtype="float32"), GATE)[7]
    assert row[:4].tolist() == pytest.approx([448, 464, 465, 1000], rel=1 / 16)


@every_quantizer
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_non_finite_weight_is_refused_by_layer(
    quantizer: Quantizer, value: float, written: Written, tmp_path: Path, out: Path
) -> None:
    def poison(weights: dict[str, Any]) -> None:
        weights[GATE][2, 5] = value

    source = edited(written.source, tmp_path / "edited", poison)
    with pytest.raises(StageError, match=rf"1 non-finite weight in {GATE}"):
        quantizer.quantize(source, out, device="cpu")


@pytest.fixture(scope="module")
def beyond_fp16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")

    def enlarge(weights: dict[str, Any]) -> None:
        weights[GATE][0, 0] = 70_000.0

    return edited(write_llama(folder / "bf16", dtype="bfloat16"), folder / "edited", enlarge)


@pytest.mark.parametrize("quantizer", [Native(dtype="fp16"), Bitsandbytes(type="int8")], ids=name_of)
def test_a_weight_beyond_fp16_is_refused_with_the_count_and_a_way_out(
    quantizer: Quantizer, beyond_fp16: Path, out: Path
) -> None:
    with pytest.raises(StageError, match=rf"1 weight too large for FP16.*{GATE}.*Use bf16"):
        quantizer.quantize(beyond_fp16, out, device="cpu")


def test_a_weight_beyond_fp16_is_no_matter_for_bf16(beyond_fp16: Path, out: Path) -> None:
    Native(dtype="bf16").quantize(beyond_fp16, out, device="cpu")
    assert scan_source(out).overflows == {GATE: 1}


def test_weights_that_a_cast_flushes_to_zero_are_counted(tmp_path: Path, out: Path) -> None:
    def shrink(weights: dict[str, Any]) -> None:
        weights[GATE][0, :3] = 1e-9

    source = edited(write_llama(tmp_path / "bf16", dtype="bfloat16"), tmp_path / "edited", shrink)
    assert Native(dtype="fp16").quantize(source, out, device="cpu") == (
        "3 weights too small for fp16 became zero",
    )


@quantizing
def test_odd_shapes_round_trip(quantizer: Quantizer, tmp_path: Path, out: Path) -> None:
    source = write_llama(tmp_path / "odd", intermediate_size=63)
    quantizer.quantize(source, out, device="cpu")
    for compute_dtype in ("float32", "bfloat16"):
        model = quantizer.load(out, device="cpu", compute_dtype=compute_dtype)
        assert dense(model, GATE).shape == (63, 64)
        assert bool(logits(model).isfinite().all())


def test_int4_in_bfloat16_runs_where_the_packed_kernel_does_not_fit(tmp_path: Path, out: Path) -> None:
    source = write_llama(tmp_path / "wide", dtype="bfloat16", hidden_size=256, intermediate_size=40)
    Quanto(weights="int4").quantize(source, out, device="cpu")
    exact = logits(Quanto(weights="int4").load(out, device="cpu", compute_dtype="float32"))
    found = logits(Quanto(weights="int4").load(out, device="cpu", compute_dtype="bfloat16"))
    assert float((found.float() - exact).abs().max()) < 0.02


@quantizing
def test_an_fp32_source_keeps_the_rest_in_sixteen_bits(
    quantizer: Quantizer, tmp_path: Path, out: Path
) -> None:
    quantizer.quantize(write_llama(tmp_path / "fp32", dtype="float32"), out, device="cpu")
    assert tensors(out)["model.embed_tokens.weight"].dtype == "F16"


# --- files -----------------------------------------------------------------------------------------------


def test_native_keeps_shards_and_exact_values(tmp_path: Path, out: Path) -> None:
    from safetensors.torch import load_file

    source = write_llama(tmp_path / "sharded", dtype="bfloat16", shard_bytes=60_000)
    Native(dtype="fp32").quantize(source, out, device="cpu")
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert shards == sorted(path.name for path in source.glob("*.safetensors"))
    assert len(shards) == 2
    for shard in shards:
        before = load_file(source / shard)
        after = load_file(out / shard)
        assert before.keys() == after.keys()
        assert all(bool((before[name].float() == after[name]).all()) for name in before)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 225_024
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


@every_quantizer
def test_sampling_flags_that_sampling_off_contradicts_are_dropped_and_noted(
    quantizer: Quantizer, written: Written, tmp_path: Path, out: Path
) -> None:
    from transformers import GenerationConfig

    source = shutil.copytree(written.source, tmp_path / "edited")
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    (source / "generation_config.json").write_text(json.dumps(settings))
    notes = quantizer.quantize(source, out, device="cpu")
    assert any("temperature, top_p" in note for note in notes)
    GenerationConfig.from_pretrained(out).save_pretrained(out)
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2


def test_sampling_flags_stay_where_sampling_is_on() -> None:
    settings = {"do_sample": True, "temperature": 0.6}
    assert repaired_generation_config(settings) == (settings, ())


@every_quantizer
def test_the_tokenizer_goes_with_the_weights(quantizer: Quantizer, written: Written) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (written(quantizer) / name).read_bytes() == (written.source / name).read_bytes()


@pytest.mark.parametrize("quantizer", [EVERY[2], *WITH_CONV1D], ids=name_of)
def test_conv1d_models_load_and_run(quantizer: Quantizer, tmp_path: Path, out: Path) -> None:
    quantizer.quantize(write_gpt2(tmp_path / "gpt2"), out, device="cpu")
    for compute_dtype in ("float32", "float16"):
        model = quantizer.load(out, device="cpu", compute_dtype=compute_dtype)
        assert bool(logits(model).isfinite().all())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_comes_out_as_such(written: Written, out: Path) -> None:
    (out / "config.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        Native(dtype="fp16").quantize(written.source, out, device="cpu")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(out)


def test_a_full_disk_is_recognised_inside_another_librarys_error(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    with pytest.raises(OSError, match="No space left") as caught, saving_to(tmp_path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(SafetensorError, match="another"), saving_to(tmp_path):
        raise SafetensorError("another")
