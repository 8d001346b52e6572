"""Sources are refused before any weight is read, and a manifest says what really lies in a folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import (
    build_manifest,
    check_earned_label,
    check_source,
    hash_files,
    model_layout,
    read_manifest,
    tensors,
    verify,
    write_manifest,
)
from pipeline.coverage import coverage
from pipeline.errors import CheckpointError, PrerequisiteError
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.results import CheckpointManifest, SourceRecord
from pipeline.weights import load_pretrained
from tests.tiny_models import write_gpt2, write_llama, write_moe, write_tokenizer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SOURCE = SourceRecord(model="tiny", revision=None, files=())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "sharded", shard_bytes=60_000)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    return lambda folder: shutil.copytree(folder, tmp_path / "copy")


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def quantized(source: Path, out: Path, quantizer: Quantizer) -> CheckpointManifest:
    out.mkdir()
    notes = quantizer.quantize(source, out, device="cpu")
    return build_manifest(
        out, quantizer=quantizer, source=SOURCE, seconds=1.0, peak_memory_bytes=1, notes=notes
    )


# --- sources ---------------------------------------------------------------------------------------------


def test_a_whole_source_tells_its_sizes_type_and_vocabulary(llama: Path) -> None:
    facts = check_source(llama)
    assert facts.weight_bytes == 112_512
    assert (facts.model_type, facts.dtype) == ("llama", "float16")
    assert (facts.vocabulary_tokens, facts.tokenizer_tokens) == (300, 300)
    assert facts.files[SINGLE] == (llama / SINGLE).stat().st_size


def test_shards_are_read_as_one_model(sharded: Path, llama: Path) -> None:
    assert {name: info.shape for name, info in tensors(sharded).items()} == {
        name: info.shape for name, info in tensors(llama).items()
    }
    assert len({info.file for info in tensors(sharded).values()}) == 2


def test_a_missing_shard_is_refused_by_name(sharded: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(sharded)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards present.*model-00002-of-00002.safetensors"):
        check_source(folder)


def test_a_stale_index_beside_complete_files_is_refused(llama: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(llama)
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"w{name}": name for name in names}}))
    with pytest.raises(CheckpointError, match=r"0 of 4 shards.*model\.safetensors instead: index and files"):
        check_source(folder)


def test_an_index_and_a_single_file_together_are_refused(sharded: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(sharded)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / SINGLE)
    with pytest.raises(CheckpointError, match="can't be told"):
        check_source(folder)


def test_an_index_that_places_a_tensor_in_the_wrong_file_is_refused(
    sharded: Path, copy: Callable[[Path], Path]
) -> None:
    folder = copy(sharded)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json disagrees with the files"):
        check_source(folder)


def test_pickled_weights_are_refused_without_being_opened(tmp_path: Path, llama: Path) -> None:
    marker = tmp_path / "marker"
    shutil.copy(llama / "config.json", tmp_path / "config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(
        b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    )
    with pytest.raises(PrerequisiteError, match=r"pickled weights \(pytorch_model.bin\).*safetensors"):
        check_source(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xff\xff\xff\xff\xff\xff\x00" + b"{}", "claims a header"),
        (b"\x02", "not a safetensors file, or truncated"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[]", "not a JSON object"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{{", "corrupt safetensors header"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{}\x00", "longer than its header says"),
    ],
)
def test_a_corrupt_file_is_refused_at_once(
    llama: Path, copy: Callable[[Path], Path], content: bytes, message: str
) -> None:
    folder = copy(llama)
    (folder / SINGLE).write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message):
        check_source(folder)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F16", "shape": [4], "data_offsets": [0, 6]}, "can't have 6 bytes"),
        ({"dtype": "F99", "shape": [3], "data_offsets": [0, 6]}, "corrupt safetensors header at tensor 'w'"),
        ({"dtype": "F16", "shape": [-3], "data_offsets": [0, 6]}, "corrupt safetensors header at tensor 'w'"),
        ({"dtype": "F16", "shape": [3], "data_offsets": [2, 8]}, "hole or overlap"),
        ({"dtype": "F16", "shape": [True], "data_offsets": [0, 2]}, "corrupt safetensors header at tensor"),
        ("nonsense", "corrupt safetensors header at tensor 'w'"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    llama: Path, copy: Callable[[Path], Path], entry: Any, message: str
) -> None:
    folder = copy(llama)
    text = json.dumps({"w": entry}).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 6)
    with pytest.raises(CheckpointError, match=message):
        check_source(folder)


def test_a_truncated_file_is_refused_with_both_sizes(llama: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(llama)
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"truncated: 112,412 bytes.*112,512"):
        check_source(folder)


def test_an_already_quantized_source_is_refused_with_the_method(
    llama: Path, copy: Callable[[Path], Path]
) -> None:
    folder = copy(llama)
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(
        PrerequisiteError, match="already quantized with gptq; a 16-bit baseline is impossible"
    ):
        check_source(folder)


def test_a_tokenizer_with_an_id_beyond_the_embedding_is_refused(
    llama: Path, copy: Callable[[Path], Path]
) -> None:
    folder = write_tokenizer(copy(llama), tokens=301)
    with pytest.raises(CheckpointError, match=r"ids go up to 300 \(301 tokens\).*300 rows"):
        check_source(folder)


@pytest.mark.parametrize(
    "content", [{"model": 3}, {"model": {}}, {"model": {"vocab": {}}, "added_tokens": 1}]
)
def test_a_tokenizer_file_without_a_vocabulary_is_refused_by_name(
    llama: Path, copy: Callable[[Path], Path], content: dict[str, Any]
) -> None:
    folder = copy(llama)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: holds no vocabulary"):
        check_source(folder)


def test_weights_of_another_shape_than_the_config_s_are_told_by_name(
    llama: Path, copy: Callable[[Path], Path]
) -> None:
    folder = copy(llama)
    edit_json(folder / "config.json", intermediate_size=256)
    with pytest.raises(CheckpointError, match=r"tensors of the wrong shape, such as .*mlp"):
        load_pretrained(folder)


def test_an_embedding_wider_than_the_tokenizer_is_fine(tmp_path: Path) -> None:
    facts = check_source(write_llama(tmp_path, vocab_size=320))
    assert (facts.vocabulary_tokens, facts.tokenizer_tokens) == (320, 300)


def test_missing_folder_config_and_weights_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="no such folder"):
        check_source(tmp_path / "nowhere")
    with pytest.raises(PrerequisiteError, match=r"no config\.json"):
        check_source(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        check_source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PrerequisiteError, match="no safetensors file"):
        check_source(tmp_path)


# --- the model's layout ----------------------------------------------------------------------------------


def test_linear_weights_leave_out_embedding_head_and_norms(llama: Path) -> None:
    names = model_layout(llama).linear
    assert len(names) == 7
    assert all(name.endswith("_proj.weight") for name in names)
    assert model_layout(llama).parameters == 56_256


def test_conv1d_weights_count_as_linear_and_a_tied_head_counts_once(gpt2: Path) -> None:
    layout = model_layout(gpt2)
    assert layout.parameters == 172_288
    assert layout.tied
    assert layout.head_weights == 0
    assert len(layout.linear) == 8


def test_experts_kept_as_one_parameter_count_as_linear(moe: Path) -> None:
    layout = model_layout(moe)
    assert layout.parameters == 70_144
    assert layout.module_linear["model.layers.0.mlp.experts.gate_up_proj"] == (4, 64, 64)
    assert layout.linear["model.layers.0.mlp.experts.3.up_proj.weight"] == (32, 64)
    assert (layout.head, layout.head_weights) == ("lm_head.weight", 16_384)


def test_files_that_leave_out_the_inner_models_name_are_matched(gpt2: Path) -> None:
    short = {name.removeprefix("transformer."): info for name, info in tensors(gpt2).items()}
    covered = coverage(short, layout=model_layout(gpt2), quantizer=Quanto(weights="int8"))
    assert covered.linear_weights == 98_304
    assert len(covered.unquantized_names) == 8


# --- manifest --------------------------------------------------------------------------------------------


def test_the_fp16_baseline_is_stored_in_sixteen_bits(llama: Path, tmp_path: Path) -> None:
    manifest = quantized(llama, tmp_path / "out", Native(dtype="fp16"))
    assert manifest.weight_bytes_on_disk == 112_512
    assert manifest.weight_bytes_read_per_token == 112_512
    assert manifest.bits_per_weight == manifest.bits_per_block_weight == 16.0
    check_earned_label(manifest, quantizer=Native(dtype="fp16"))


def test_an_untied_embedding_is_not_read_per_token(moe: Path, tmp_path: Path) -> None:
    manifest = quantized(moe, tmp_path / "out", Native(dtype="fp16"))
    assert manifest.weight_bytes_on_disk - manifest.weight_bytes_read_per_token == 256 * 64 * 2
    assert manifest.parameters == 70_144


def test_a_tied_head_that_was_saved_twice_is_read_once(llama: Path, copy: Callable[[Path], Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy(llama)
    weights = load_file(folder / SINGLE)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / SINGLE)
    manifest = build_manifest(
        folder, quantizer=Native(dtype="fp16"), source=SOURCE, seconds=0.0, peak_memory_bytes=0
    )
    assert manifest.parameters == 56_256
    assert manifest.weight_bytes_on_disk == 112_512 + 38_400
    assert manifest.weight_bytes_read_per_token == 112_512


def test_a_label_that_the_stored_type_contradicts_is_refused(llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"labelled bf16, but 11 of 11.*F16"):
        build_manifest(llama, quantizer=Native(dtype="bf16"), source=SOURCE, seconds=0.0, peak_memory_bytes=0)


def test_stored_int4_bytes_are_packed_data_scales_and_shifts(llama: Path, tmp_path: Path) -> None:
    manifest = quantized(llama, tmp_path / "out", Quanto(weights="int4"))
    assert manifest.weight_bytes_on_disk == 59_292
    assert manifest.coverage.share == 1.0
    assert manifest.coverage.linear_weights == 36_864
    assert set(manifest.coverage.groups.values()) == {64, 128}
    assert 4 < manifest.bits_per_block_weight < 4.5
    check_earned_label(manifest, quantizer=Quanto(weights="int4"))


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_a_quantizer_that_skips_conv1d_earns_no_label(gpt2: Path, tmp_path: Path, weights: str) -> None:
    quantizer = Quanto.model_validate({"weights": weights})
    manifest = quantized(gpt2, tmp_path / "out", quantizer)
    with pytest.raises(CheckpointError, match=r"0 of 98,304 block weights quantized.*c_attn"):
        check_earned_label(manifest, quantizer=quantizer)


def test_bitsandbytes_covers_conv1d(gpt2: Path, tmp_path: Path) -> None:
    quantizer = Bitsandbytes(type="nf4")
    manifest = quantized(gpt2, tmp_path / "out", quantizer)
    assert manifest.coverage.quantized_weights == 98_304
    assert not manifest.coverage.head_quantized
    check_earned_label(manifest, quantizer=quantizer)


@pytest.mark.parametrize("quantizer", [Quanto(weights="int8"), Bitsandbytes(type="nf4")])
def test_experts_left_unquantized_cost_the_label(moe: Path, tmp_path: Path, quantizer: Quantizer) -> None:
    manifest = quantized(moe, tmp_path / "out", quantizer)
    with pytest.raises(CheckpointError, match=r"12,288 of 36,864 block weights.*experts"):
        check_earned_label(manifest, quantizer=quantizer)


def test_a_manifest_reads_back_equal_and_verifies(llama: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(llama)
    manifest = build_manifest(
        folder, quantizer=Native(dtype="fp16"), source=SOURCE, seconds=2.0, peak_memory_bytes=3
    )
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest
    assert [record.name for record in hash_files(folder)] == sorted(path.name for path in llama.iterdir())
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    verify(folder, read_manifest(folder))


def test_verify_names_the_file_that_changed(llama: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(llama)
    manifest = build_manifest(
        folder, quantizer=Native(dtype="fp16"), source=SOURCE, seconds=0.0, peak_memory_bytes=0
    )
    content = bytearray((folder / SINGLE).read_bytes())
    content[-1] ^= 1
    (folder / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed"):
        verify(folder, manifest)
    (folder / SINGLE).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has .* bytes"):
        verify(folder, manifest)
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing"):
        verify(folder, manifest)


def test_a_file_added_later_fails_verification(llama: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(llama)
    manifest = build_manifest(
        folder, quantizer=Native(dtype="fp16"), source=SOURCE, seconds=0.0, peak_memory_bytes=0
    )
    (folder / "extra.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"extra\.json: not in the manifest"):
        verify(folder, manifest)


def test_a_folder_without_manifest_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="isn't a finished checkpoint"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format_version": 1}')
    with pytest.raises(CheckpointError, match="not a manifest of this version"):
        read_manifest(tmp_path)
