"""torchao's types: the files that transformers writes, read back the same, and counted whole."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.coverage import coverage, model_layout, stored_sizes
from pipeline.engines.transformers import Transformers
from pipeline.errors import CheckpointError
from pipeline.live_tensors import resident_bytes
from pipeline.quantizers.base import StoredBytes
from pipeline.quantizers.torchao import Torchao
from pipeline.tensorfile import tensors
from pipeline.weights import quiet_transformers
from tests.quantizer_samples import GATE, SINGLE, Written, dense, edited, logits
from tests.tiny_models import write_llama, write_moe

ON_CPU = ("int8", "int8_dynamic", "fp8")
INT4 = Torchao(weights="int4")
on_cpu = pytest.mark.parametrize("weights", ON_CPU)


def torchao(weights: str) -> Torchao:
    return Torchao.model_validate({"weights": weights})


def settings(weights: str) -> Any:
    """torchao's own config, as a user of transformers would write it."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
    )
    from transformers import TorchAoConfig

    made = {
        "int8": Int8WeightOnlyConfig(set_inductor_config=False),
        "int8_dynamic": Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
        "fp8": Float8WeightOnlyConfig(set_inductor_config=False),
    }
    return TorchAoConfig(quant_type=made[weights])


def by_transformers(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **more).eval()


def metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        return dict(opened.metadata())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    return Written(write_llama(folder / "source", dtype="bfloat16"), folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


# --- files -----------------------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_and_metadata_are_those_that_transformers_saves(
    weights: str, dtype: str, tied: bool, tmp_path: Path, out: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    source = write_llama(tmp_path / "source", dtype=dtype, tie_word_embeddings=tied, attention_bias=True)
    torchao(weights).quantize(source, out, device="cpu")
    with quiet_transformers():
        by_transformers(source, quantization_config=settings(weights)).save_pretrained(tmp_path / "theirs")
    ours, theirs = load_file(out / SINGLE), load_file(tmp_path / "theirs" / SINGLE)
    theirs.pop("lm_head.weight", None) if tied else None
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name
    said, expected = metadata(out / SINGLE), metadata(tmp_path / "theirs" / SINGLE)
    for name in json.loads(said.pop("tensor_names")):
        assert json.loads(said[name]) == json.loads(expected[name]), name
    config = json.loads((out / "config.json").read_text("utf-8"))
    theirs_config = json.loads((tmp_path / "theirs" / "config.json").read_text("utf-8"))
    assert config["quantization_config"] == theirs_config["quantization_config"]


@on_cpu
def test_transformers_reads_the_shards_as_they_are(weights: str, tmp_path: Path, out: Path) -> None:
    import torch

    source = write_llama(
        tmp_path / "source",
        dtype="bfloat16",
        num_hidden_layers=3,
        shard_bytes=60_000,
        tie_word_embeddings=False,
    )
    quantizer = torchao(weights)
    quantizer.quantize(source, out, device="cpu")
    assert len(list(out.glob("*.safetensors"))) > 2
    ours = quantizer.load(out, device="cpu", compute_dtype="bfloat16")
    assert torch.equal(logits(ours), logits(by_transformers(out)))


def test_a_weight_of_several_blocks_is_quantized_as_if_it_were_whole() -> None:
    import torch
    from torchao.quantization import quantize_

    weight = torch.randn(1030, 2048, generator=torch.Generator().manual_seed(0))
    for weights in ON_CPU:
        layer = torch.nn.Linear(2048, 1030, bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(layer, settings(weights).quant_type)
        made = torch.nn.Linear(2048, 1030, bias=False, device="meta")
        plain = torch.nn.Linear(2048, 1030, bias=False)
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        torchao(weights).pack(plain, made, name="layer")
        expected: Any = layer.weight
        found: Any = made.weight
        for part in expected.__tensor_flatten__()[0]:
            pair = [getattr(tensor, part).view(torch.uint8) for tensor in (found, expected)]
            assert torch.equal(*pair), (weights, part)


def test_rows_whose_fp8_scale_underflows_leave_the_others_alone(
    written: Written, tmp_path: Path, out: Path
) -> None:
    import torch

    def shrink(weights: dict[str, Any]) -> None:
        weights[GATE][3] = 0

    fp8 = torchao("fp8")
    fp8.quantize(edited(written.source, tmp_path / "edited", shrink), out, device="cpu")
    before = dense(fp8.load(written(fp8), device="cpu", compute_dtype="float32"), GATE)
    after = dense(fp8.load(out, device="cpu", compute_dtype="float32"), GATE)
    assert not bool(after[3].any())
    assert torch.equal(after[4:], before[4:])


def test_experts_stay_as_they_are_and_the_notes_say_that_the_model_was_loaded_whole(
    tmp_path: Path, out: Path
) -> None:
    notes = torchao("int8").quantize(write_moe(tmp_path / "source"), out, device="cpu")
    assert any("in memory as a whole" in note for note in notes)
    share = coverage(tensors(out), layout=model_layout(out), quantizer=torchao("int8")).share
    assert 0 < share < 0.95


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "asked"), [("int8", "fp8"), ("int8", "int8_dynamic"), ("fp8", "int4")])
def test_a_checkpoint_of_another_type_is_refused_with_both(saved: str, asked: str, written: Written) -> None:
    with pytest.raises(CheckpointError, match=f"saved as {saved}, the recipe says {asked}"):
        torchao(asked).load(written(torchao(saved)), device="cpu", compute_dtype="float32")


def test_a_scale_that_is_missing_is_told_by_its_weight(written: Written, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(written(torchao("int8")), tmp_path / "broken")
    weights, said = load_file(folder / SINGLE), metadata(folder / SINGLE)
    del weights[GATE.replace(".weight", "._weight_scale")]
    save_file(weights, folder / SINGLE, metadata=said)
    with pytest.raises(CheckpointError, match=rf"in no file, such as {GATE}"):
        torchao("int8").load(folder, device="cpu", compute_dtype="float32")


def test_files_that_do_not_say_what_their_tensors_are_is_refused(written: Written, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(written(torchao("int8")), tmp_path / "broken")
    save_file(load_file(folder / SINGLE), folder / SINGLE)
    with pytest.raises(CheckpointError, match="don't say how torchao's tensors are put together"):
        torchao("int8").load(folder, device="cpu", compute_dtype="float32")


def test_an_fp8_model_computes_in_every_type(written: Written) -> None:
    """What transformers loads multiplies in the stored type only."""
    fp8 = torchao("fp8")
    exact = logits(fp8.load(written(fp8), device="cpu", compute_dtype="float32"))
    for compute_dtype in ("float16", "bfloat16"):
        found = logits(fp8.load(written(fp8), device="cpu", compute_dtype=compute_dtype))
        assert float((found.float() - exact).abs().max()) < 0.01


# --- sizes -----------------------------------------------------------------------------------------------


def test_inner_tensors_are_counted_and_not_the_size_that_the_library_says(written: Written) -> None:
    linear, rows = 36_864, 64 + 32 + 32 + 64 + 128 + 128 + 64
    plain = 112_512 - 2 * linear
    for weights, row_bytes in (("int8", 5), ("int8_dynamic", 5), ("fp8", 4)):
        model: Any = torchao(weights).load(written(torchao(weights)), device="cpu", compute_dtype="bfloat16")
        rotary = sum(buffer.nbytes for buffer in model.buffers())
        assert resident_bytes(model) - rotary == plain + linear + row_bytes * rows
        assert model.get_memory_footprint() - rotary == 112_512


@pytest.mark.parametrize(
    ("out_features", "in_features", "expected"),
    [
        (4096, 4096, StoredBytes(packed=8_388_608, scales=2 * 131_072, zero_points=2 * 131_072)),
        (2048, 5632, StoredBytes(packed=2048 * 6144 // 2, scales=2 * 2048 * 48, zero_points=2 * 2048 * 48)),
        (1001, 1024, StoredBytes(packed=1008 * 512, scales=2 * 1008 * 8, zero_points=2 * 1008 * 8)),
        (100, 1000, StoredBytes(packed=200_000)),
    ],
)
def test_int4_is_counted_with_the_rows_that_it_is_filled_up_to(
    out_features: int, in_features: int, expected: StoredBytes
) -> None:
    assert INT4.predicted_parts(out_features, in_features) == expected
    assert INT4.resident_parts(out_features, in_features, float_bytes=4) == expected


@pytest.mark.parametrize(("in_features", "group"), [(4096, 128), (2880, 64), (1056, 32), (1000, None)])
def test_int4_groups_divide_the_row(in_features: int, group: int | None) -> None:
    assert INT4.group_weights(in_features) == group
    assert torchao("int8").group_weights(in_features) is None


def test_int4_tensors_are_read_as_one_weight_with_its_groups() -> None:
    name = "model.layers.0.mlp.gate_proj"
    (weight,) = INT4.stored_weights(
        {
            f"{name}._weight_qdata": ("I32", (512, 32, 32, 4)),
            f"{name}._weight_scale_and_zero": ("BF16", (32, 4096, 2)),
        }
    )
    assert weight.name == f"{name}.weight"
    assert (weight.elements, weight.group_size, weight.quantized) == (4096 * 4096, 128, True)
    assert weight.stored_bytes == INT4.predicted_bytes(4096, 4096)


# --- devices ---------------------------------------------------------------------------------------------


def test_int4_is_refused_on_a_cpu_with_what_to_take_instead() -> None:
    (problem,) = INT4.check(device="cpu")
    assert "can't be made or run on a CPU" in problem.what
    assert "gguf q4_0" in problem.fix
    assert INT4.check(device="cuda") == INT4.check(device="cuda:1") == ()


@pytest.mark.gpu
def test_int4_quantizes_loads_and_runs_on_a_gpu_as_counted(tmp_path: Path, out: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("NO CUDA DEVICE HERE: torchao int4 was NOT tested")
    source = write_llama(tmp_path / "source", dtype="bfloat16", hidden_size=256, intermediate_size=1056)
    INT4.quantize(source, out, device="cuda")
    layout = model_layout(out)
    found = stored_sizes(tensors(out), layout=layout, quantizer=INT4)
    assert found.blocks == sum(INT4.predicted_bytes(*shape) for shape in layout.linear.values())
    assert coverage(tensors(out), layout=layout, quantizer=INT4).share == 1.0
    with Transformers().open(out, quantizer=INT4, device="cuda") as session:
        first = session.prefill([[3, 17, 40, 5]], new_tokens=4)
        assert all(math.isfinite(token) for token in [*first, *session.decode_step()])
