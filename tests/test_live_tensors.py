"""Bytes of tensors that really are in memory, each storage once, and the process's own memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.gate import dequantized_at_load
from pipeline.live_tensors import device_types, resident_bytes
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from tests import result_builders as build
from tests.tiny_models import write_gpt2, write_llama

ROOT = Path(__file__).parent.parent


def stored(folder: Path, quantizer: Quantizer) -> Path:
    out = folder / quantizer.precision
    out.mkdir()
    quantizer.quantize(folder, out, device="cpu")
    return out


def loaded(folder: Path, quantizer: Quantizer, *, compute_dtype: str = "float16") -> Any:
    return quantizer.load(folder, device="cpu", compute_dtype=compute_dtype)


def rotary_bytes(model: Any) -> int:
    """Tables that are computed, not stored: buffers outside of the state dictionary."""
    kept = {tensor.data_ptr() for tensor in model.state_dict().values()}
    found = {tensor.data_ptr(): tensor.nbytes for tensor in model.buffers() if tensor.data_ptr() not in kept}
    return sum(found.values())


def test_int4_weights_are_counted_with_scales_and_shifts_and_not_at_their_logical_size(
    tmp_path: Path,
) -> None:
    source = write_llama(tmp_path / "tiny")
    out = stored(source, Quanto(weights="int4"))
    model = loaded(out, Quanto(weights="int4"))
    assert resident_bytes(model) - rotary_bytes(model) == 59_292
    assert model.get_memory_footprint() > 100_000  # what the library says: the size before quantizing


def test_sixteen_bit_weights_are_counted_once_although_head_and_embedding_are_tied(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "tiny")
    model = loaded(stored(source, Native(dtype="fp16")), Native(dtype="fp16"))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert resident_bytes(model) - rotary_bytes(model) == 112_512


def test_tied_gpt2_weights_are_counted_once(tmp_path: Path) -> None:
    source = write_gpt2(tmp_path / "gpt2")
    model = loaded(stored(source, Native(dtype="fp16")), Native(dtype="fp16"))
    named_twice = sum(tensor.numel() for tensor in model.state_dict().values())
    assert resident_bytes(model) == 2 * 172_288
    assert named_twice == 236_288


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("double_quant", [False, True])
def test_codebooks_and_block_scales_are_counted(tmp_path: Path, double_quant: bool) -> None:
    source = write_llama(tmp_path / "tiny")
    quantizer = Bitsandbytes(type="nf4", double_quant=double_quant)
    model = loaded(stored(source, quantizer), quantizer)
    linear = 36_864
    blocks = linear // 64
    plain = 112_512 - 2 * linear + linear // 2
    scales = resident_bytes(model) - rotary_bytes(model) - plain
    assert scales >= blocks * (1 if double_quant else 4)
    assert scales < 10_000


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_scales_and_codebook_of_scales_are_counted(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "tiny")
    quantizer = Bitsandbytes(type="nf4", double_quant=True)
    model = loaded(stored(source, quantizer), quantizer)
    held = {}
    for module in model.modules():
        nested = getattr(getattr(module, "quant_state", None), "state2", None)
        for tensor in (nested.absmax, nested.code) if nested is not None else ():
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert sum(held.values()) >= 1_024  # a codebook of 256 FP32 values
    linear = 36_864
    of_weights = linear // 64 + 7 * (16 + 1) * 4  # block scales; a codebook and an offset for each layer
    plain = 112_512 - 2 * linear + linear // 2
    assert resident_bytes(model) - rotary_bytes(model) == plain + of_weights + sum(held.values())


def test_a_model_that_is_expanded_at_load_is_measured_expanded_and_flagged(tmp_path: Path) -> None:
    import torch

    source = write_llama(tmp_path / "tiny")
    quantizer = Quanto(weights="int4")
    out = stored(source, quantizer)
    model = loaded(out, quantizer)
    assert resident_bytes(model) <= 1.5 * 59_292
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "QLinear":
                plain = torch.nn.Linear(child.in_features, child.out_features, bias=False)
                plain.weight.data = child.weight.dequantize()
                setattr(module, name, plain)
    expanded = resident_bytes(model)
    assert expanded - rotary_bytes(model) == 112_512
    memory = build.memory("int4", weight_bytes_on_disk=59_292, weight_bytes_resident=expanded)
    manifest = build.manifest("int4", weight_bytes_on_disk=59_292)
    (said,) = dequantized_at_load(build.variant("int4", memory=memory, checkpoint=manifest))
    assert "dequantized at load" in said


def test_what_is_on_the_meta_device_takes_no_memory_but_is_told() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(8, 8, device="meta"))
    assert resident_bytes(model) == 32
    assert device_types(model) == {"cpu", "meta"}


def test_views_of_one_storage_count_as_the_whole_storage_once() -> None:
    import torch

    whole = torch.zeros(100)
    model = torch.nn.Module()
    model.first, model.second = torch.nn.Parameter(whole[:10]), torch.nn.Parameter(whole[50:])
    assert resident_bytes(model) == 400


MEASURED = """
from pipeline.process_memory import peak_resident_bytes, reset_peak_resident_bytes, resident_bytes_now
before, peak_before = resident_bytes_now(), peak_resident_bytes()
block = bytearray(200 * 2**20)
during, peak_during = resident_bytes_now(), peak_resident_bytes()
del block
after, lowered = resident_bytes_now(), reset_peak_resident_bytes()
print(during - before, peak_during - before, after - before, lowered, peak_resident_bytes() - before)
"""


def test_the_peak_of_a_process_is_in_bytes_and_apart_from_what_it_holds_now() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    during, peak, after, lowered, peak_after_reset = done.stdout.split()
    assert int(during) == pytest.approx(209_715_200, rel=0.02)
    assert int(peak) == pytest.approx(209_715_200, rel=0.02)
    assert int(after) < 20_000_000
    if lowered == "True":
        assert int(peak_after_reset) < 20_000_000
