"""INT8 through FBGEMM: what is stored, what a product is worth, and what the packed weights take."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CheckpointError
from pipeline.quantizers.dynamic_int8 import DynamicInt8, cpu_problems, packed_bytes
from pipeline.tensorfile import tensors
from tests.quantizer_samples import GATE, NO_FBGEMM, SINGLE, dense
from tests.tiny_models import write_gpt2, write_llama

pytestmark = pytest.mark.skipif(bool(NO_FBGEMM), reason=NO_FBGEMM)

ROOT = Path(__file__).parent.parent
QUANTIZER = DynamicInt8()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dynamic")
    (folder / "out").mkdir()
    QUANTIZER.quantize(write_llama(folder / "source", dtype="bfloat16"), folder / "out", device="cpu")
    return folder / "out"


def layer(weight: Any) -> Any:
    """A linear layer of `weight`, quantized."""
    import torch

    plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    plain.weight = torch.nn.Parameter(weight, requires_grad=False)
    model = Holder(plain)
    QUANTIZER.outline(model, compute_dtype="float32")
    made = model.get_submodule("layer")
    QUANTIZER.pack(plain, made, name="layer")
    return made


def Holder(plain: Any) -> Any:  # noqa: N802  (a class, made where torch is imported)
    """The least that is asked of a model."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = plain

        def get_output_embeddings(self) -> None:
            return None

        def _get_dtype_plan(self, _: Any) -> dict[str, Any]:
            return {}

    return Model()


def drawn(*shape: int, seed: int = 0) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- arithmetic ------------------------------------------------------------------------------------------


def test_a_product_is_that_of_the_stored_weights_to_four_digits() -> None:
    made = layer(drawn(96, 576))
    activations = drawn(3, 5, 576, seed=1)
    exact = activations @ made.unpacked().T
    found = made(activations)
    assert found.shape == (3, 5, 96)
    assert float((found - exact).norm() / exact.norm()) < 1e-3


def test_one_large_token_costs_the_others_nothing() -> None:
    made = layer(drawn(96, 576))
    activations = drawn(6, 576, seed=1)
    alone = made(activations[1:])
    activations[0] *= 1e5
    exact = activations @ made.unpacked().T
    found = made(activations)
    assert bool((found[1:] == alone).all())
    assert float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max()) < 1e-3


def test_a_token_gives_the_same_bits_whatever_it_is_batched_with() -> None:
    made = layer(drawn(70, 200))
    activations = drawn(40, 200, seed=1)
    together = made(activations)
    for count in (1, 2, 7, 31):
        assert bool((made(activations[:count]) == together[:count]).all()), count


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_do_not_overflow_sixteen_bits(sign: float) -> None:
    import torch

    made = layer(torch.ones(16, 4096))
    assert made(torch.full((1, 4096), sign)).tolist() == [[pytest.approx(sign * 4096, rel=1e-6)] * 16]


def test_small_tokens_come_out_small_and_zeros_as_zeros() -> None:
    made = layer(drawn(16, 64))
    activations = drawn(3, 64, seed=1)
    activations[0] = 0
    activations[1] *= 1e-20
    found = made(activations)
    exact = activations @ made.unpacked().T
    assert not bool(found[0].any())
    assert float((found[1] - exact[1]).norm() / exact[1].norm()) < 1e-3


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_activation_that_is_no_number_is_not_hidden(value: str) -> None:
    made = layer(drawn(16, 64))
    activations = drawn(2, 64, seed=1)
    activations[1, 5] = float(value)
    assert not bool(made(activations)[1].isfinite().any())


# --- files -----------------------------------------------------------------------------------------------


def test_int8_weights_and_a_float_scale_a_row_lie_in_the_file_as_they_are(stored: Path) -> None:
    import torch
    from safetensors.torch import load_file

    owner = GATE.removesuffix(".weight")
    found = load_file(stored / SINGLE)
    data, scale = found[f"{owner}.weight_int8"], found[f"{owner}.weight_scale"]
    assert (data.dtype, data.shape) == (torch.int8, (128, 64))
    assert (scale.dtype, scale.shape) == (torch.float32, (128,))
    assert data.abs().amax(dim=1).tolist() == [127] * 128
    model = QUANTIZER.load(stored, device="cpu", compute_dtype="float32")
    assert torch.allclose(dense(model, GATE), data * scale[:, None], rtol=1e-6, atol=0)


def test_conv1d_weights_are_stored_row_by_output(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "out").mkdir()
    source = write_gpt2(tmp_path / "source")
    QUANTIZER.quantize(source, tmp_path / "out", device="cpu")
    before, after = load_file(source / SINGLE), load_file(tmp_path / "out" / SINGLE)
    name = "transformer.h.0.attn.c_attn.weight"
    assert before[name].shape == (64, 192)
    assert after[f"{name}_int8"].shape == (192, 64)
    weight = after[f"{name}_int8"] * after[f"{name}_scale"][:, None]
    assert float((weight.T - before[name].float()).abs().max()) <= float(after[f"{name}_scale"].max())


@pytest.mark.parametrize("part", ["weight_int8", "weight_scale"])
def test_a_part_that_is_missing_is_told_by_its_weight(part: str, stored: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(stored, tmp_path / "broken")
    weights = load_file(folder / SINGLE)
    owner = GATE.removesuffix(".weight")
    del weights[f"{owner}.{part}"]
    save_file(weights, folder / SINGLE)
    with pytest.raises(CheckpointError, match=rf"in no file, such as {owner}"):
        QUANTIZER.load(folder, device="cpu", compute_dtype="float32")


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no place for"):
        QUANTIZER.load(write_llama(tmp_path / "plain"), device="cpu", compute_dtype="float32")


def test_the_file_is_as_large_as_predicted(stored: Path) -> None:
    found = tensors(stored)
    shapes = {name: (info.dtype, info.shape) for name, info in found.items()}
    quantized = [weight for weight in QUANTIZER.stored_weights(shapes) if weight.quantized]
    assert len(quantized) == 7
    assert sum(weight.stored_bytes for weight in quantized) == 36_864 + 4 * 512
    assert QUANTIZER.predicted_bytes(128, 64) == 128 * 64 + 4 * 128


# --- memory ----------------------------------------------------------------------------------------------


def test_packed_weights_fill_whole_blocks_of_the_cpu() -> None:
    rows = 12 * 1536
    avx2, avx512 = frozenset({"avx2"}), frozenset({"avx2", "avx512bw"})
    vnni = avx512 | {"avx512_vnni"}
    assert packed_bytes(1536, 512, flags=avx2) == 1536 * 512 + rows
    assert packed_bytes(1536, 576, flags=avx2) == 1536 * 1024 + rows
    assert packed_bytes(1536, 576, flags=avx512) == 1536 * 768 + rows
    assert packed_bytes(1536, 576, flags=vnni) == 1536 * 1024 + rows
    assert packed_bytes(1000, 512, flags=vnni) == 1008 * 512 + 12_000


def test_what_fills_the_blocks_is_resident_and_not_read() -> None:
    parts = QUANTIZER.resident_parts(1536, 576, float_bytes=4)
    assert (parts.packed, parts.scales) == (1536 * 576, 12 * 1536)
    assert parts.total == packed_bytes(1536, 576)


MEASURED = """
import json, sys, torch
from pipeline.process_memory import resident_bytes_now, return_freed_memory
from tests.test_quantizer_dynamic_int8 import drawn, layer
rows, columns = map(int, sys.argv[1:])
weight = drawn(rows, columns)
layer(weight)
return_freed_memory()
before = resident_bytes_now()
kept = [layer(weight) for _ in range(24)]
return_freed_memory()
print(json.dumps([resident_bytes_now() - before, sum(one.opaque_bytes for one in kept)]))
"""


@pytest.mark.parametrize(("rows", "columns"), [(1536, 576), (1000, 1024)])
def test_the_bytes_that_a_packed_layer_says_are_those_that_the_process_holds(rows: int, columns: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(rows), str(columns)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    held, said = json.loads(done.stdout)
    assert held == pytest.approx(said, rel=0.05)


# --- devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps"])
def test_another_device_is_refused_with_what_to_take_instead(device: str) -> None:
    (problem,) = QUANTIZER.check(device=device)
    assert "x86 CPUs only" in problem.what
    assert "quanto int8" in problem.fix


def test_a_cpu_without_the_instructions_is_refused_with_what_to_take_instead() -> None:
    (arm,) = cpu_problems("aarch64", frozenset())
    assert "aarch64" in arm.what
    (old,) = cpu_problems("x86_64", frozenset({"sse4_2", "avx"}))
    assert "AVX2" in old.what
    assert "torchao int8" in old.fix
    assert cpu_problems("AMD64", frozenset()) == cpu_problems("x86_64", frozenset({"avx2"})) == ()
