"""GGUF checkpoints: exact where they claim to be, counted by the model's names, refused where they can't be made."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pipeline.architecture import shape_facts
from pipeline.checkpoint import check_earned_label, model_layout
from pipeline.errors import CheckpointError, StageError
from pipeline.footprint import weight_bytes
from pipeline.gguf_conversion import encode_rows, head_type, matrix_type
from pipeline.gguf_converter import known_architectures, overwritten_files
from pipeline.gguf_file import GGUF_NAME, read_gguf
from pipeline.quantizers.base import StoredBytes
from pipeline.quantizers.gguf import Gguf
from tests.gguf_samples import difference, llama, manifest_of
from tests.quantizer_samples import GATE, edited
from tests.tiny_gguf import needs_llama_cpp
from tests.tiny_models import write_fallback_tokenizer, write_llama, write_mixtral

FLOATS = (Gguf(type="f16"), Gguf(type="bf16"))
BLOCKS = (
    *(Gguf(type="q8_0"), Gguf(type="q5_1"), Gguf(type="q5_0")),
    *(Gguf(type="q4_1"), Gguf(type="q4_0")),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("gguf") / "source")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- what is in the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_16_bit_file_holds_the_very_weights_of_a_16_bit_source(
    tied: bool, tmp_path: Path, out: Path
) -> None:
    source = llama(tmp_path / "source", tie_word_embeddings=tied, num_hidden_layers=2)
    quantizer = Gguf(type="f16")
    quantizer.quantize(source, out, device="cpu")
    model: Any = quantizer.load(out, device="cpu", compute_dtype="float32")
    assert difference(model, source) < 1e-6
    assert not model.training
    assert not hasattr(model.config, "quantization_config")


@needs_llama_cpp
def test_fewer_bits_are_farther_from_the_source_and_smaller(source: Path, tmp_path: Path) -> None:
    errors, sizes = {}, {}
    for quantizer in BLOCKS:
        folder = tmp_path / quantizer.type
        folder.mkdir()
        quantizer.quantize(source, folder, device="cpu")
        model = quantizer.load(folder, device="cpu", compute_dtype="float32")
        errors[quantizer.type], sizes[quantizer.type] = (
            difference(model, source),
            (folder / GGUF_NAME).stat().st_size,
        )
    assert errors["q8_0"] < 0.01 < errors["q4_0"] < 0.2
    assert errors["q8_0"] < min(errors["q5_0"], errors["q5_1"])
    assert sizes["q4_0"] < sizes["q4_1"] < sizes["q5_0"] < sizes["q5_1"] < sizes["q8_0"]


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
@needs_llama_cpp
def test_blocks_are_byte_for_byte_those_of_the_reference(name: str) -> None:
    import gguf
    import numpy

    rows = numpy.random.default_rng(0).standard_normal((64, 96), dtype=numpy.float32)
    rows[3] = 0.0
    rows[4, 32:64] = 1e-9
    expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
    assert encode_rows(rows, type_name=name).tobytes() == expected.tobytes()


def test_bf16_rounds_as_torch_does() -> None:
    import numpy
    import torch

    rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    expected = rows.to(torch.bfloat16).view(torch.uint8).numpy()
    assert numpy.array_equal(encode_rows(rows.numpy(), type_name="BF16"), expected)


@pytest.mark.parametrize(
    "shape",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False, "num_hidden_layers": 2, "dtype": "bfloat16"},
        {"hidden_size": 256, "intermediate_size": 288},
        {"intermediate_size": 100},
    ],
    ids=["tied", "untied", "wide", "odd"],
)
@needs_llama_cpp
def test_predicted_bytes_are_those_in_the_file(shape: dict[str, Any], tmp_path: Path) -> None:
    source = llama(tmp_path / "source", **shape)
    facts = shape_facts(json.loads((source / "config.json").read_text("utf-8")))
    for quantizer in (*FLOATS, *BLOCKS):
        out = tmp_path / quantizer.type
        out.mkdir()
        quantizer.quantize(source, out, device="cpu")
        manifest = manifest_of(out, quantizer)
        predicted = weight_bytes(facts, quantizer=quantizer)
        assert predicted.on_disk == manifest.weight_bytes_on_disk
        assert predicted.read_per_token == manifest.weight_bytes_read_per_token
        assert predicted.resident == predicted.on_disk
        header_bytes = (out / GGUF_NAME).stat().st_size - predicted.on_disk
        assert 0 < header_bytes < 20_000


@pytest.mark.parametrize("quantizer", BLOCKS, ids=lambda value: value.type)
@needs_llama_cpp
def test_every_block_weight_is_quantized_and_counted_by_the_models_names(
    quantizer: Gguf, source: Path, out: Path
) -> None:
    quantizer.quantize(source, out, device="cpu")
    manifest = manifest_of(out, quantizer)
    check_earned_label(manifest, quantizer=quantizer)
    assert manifest.coverage.share == 1.0
    assert manifest.coverage.groups == dict.fromkeys(model_layout(out).linear, 32)
    assert manifest.coverage.groups[GATE] == 32
    assert manifest.precision == {"8": "int8", "5": "int5", "4": "int4"}[quantizer.type[1]]


@needs_llama_cpp
def test_the_head_keeps_more_bits_and_norms_stay_fp32(tmp_path: Path, out: Path) -> None:
    source = llama(tmp_path / "source", hidden_size=256, tie_word_embeddings=False)
    notes = Gguf(type="q4_0").quantize(source, out, device="cpu")
    types = {name: info.dtype for name, info in Gguf(type="q4_0").stored_tensors(out).items()}
    assert types["lm_head.weight"] == "Q6_K"
    assert types["model.embed_tokens.weight"] == types[GATE] == "Q4_0"
    assert types["output_norm.weight"] == "F32"
    assert "Q6_K" in notes[0]
    assert "F32" in notes[0]


@needs_llama_cpp
def test_the_config_says_the_type_that_weights_are_computed_in(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", dtype="bfloat16")
    for name, dtype in (("f16", "float16"), ("q8_0", "bfloat16")):
        out = tmp_path / name
        out.mkdir()
        Gguf.model_validate({"type": name}).quantize(source, out, device="cpu")
        assert json.loads((out / "config.json").read_text("utf-8"))["dtype"] == dtype


def test_types_fall_back_as_llama_cpp_s_own_quantizer_lets_them() -> None:
    assert [matrix_type("Q4_0", columns) for columns in (64, 72)] == ["Q4_0", "F16"]
    assert [matrix_type("Q4_K", columns) for columns in (256, 576, 72)] == ["Q4_K", "Q5_0", "F16"]
    assert [head_type("Q4_0", columns) for columns in (2048, 576, 72)] == ["Q6_K", "Q8_0", "F16"]
    assert [head_type(name, 2048) for name in ("F16", "Q8_0")] == ["F16", "Q8_0"]


def test_a_tied_head_that_the_source_saved_twice_is_written_once(
    source: Path, tmp_path: Path, out: Path
) -> None:
    def save_twice(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    twice = edited(source, tmp_path / "twice", save_twice)
    quantizer = Gguf(type="f16")
    quantizer.quantize(twice, out, device="cpu")
    assert "output.weight" not in read_gguf(out / GGUF_NAME).tensors
    assert difference(quantizer.load(out, device="cpu", compute_dtype="float32"), source) < 1e-6


@needs_llama_cpp
def test_experts_that_lie_in_one_tensor_are_counted_one_by_one(tmp_path: Path, out: Path) -> None:
    source = write_fallback_tokenizer(write_mixtral(tmp_path / "mixtral"), tokens=300)
    quantizer = Gguf(type="q8_0")
    quantizer.quantize(source, out, device="cpu")
    manifest = manifest_of(out, quantizer)
    assert manifest.coverage.share == 1.0
    assert sum(".experts." in name for name in manifest.coverage.groups) == 3 * 4
    facts = shape_facts(json.loads((source / "config.json").read_text("utf-8")))
    assert weight_bytes(facts, quantizer=quantizer).on_disk == manifest.weight_bytes_on_disk


def test_a_mixtral_that_transformers_cannot_read_back_says_so(tmp_path: Path, out: Path) -> None:
    source = write_fallback_tokenizer(write_mixtral(tmp_path / "mixtral"), tokens=300)
    Gguf(type="f16").quantize(source, out, device="cpu")
    with pytest.raises(StageError, match=r"transformers can't read .*quanto"):
        Gguf(type="f16").load(out, device="cpu", compute_dtype="float32")


# --- sizes without a file --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (Gguf(type="f16"), StoredBytes(packed=33_554_432)),
        (Gguf(type="q8_0"), StoredBytes(packed=16_777_216, scales=1_048_576)),
        (Gguf(type="q5_1"), StoredBytes(packed=10_485_760, scales=1_048_576, zero_points=1_048_576)),
        (Gguf(type="q4_0"), StoredBytes(packed=8_388_608, scales=1_048_576)),
        (Gguf(type="q6_k"), StoredBytes(packed=12_582_912, scales=1_179_648)),
    ],
    ids=lambda value: value.type if isinstance(value, Gguf) else "",
)
def test_predicted_parts_of_a_4096_square_weight(quantizer: Gguf, expected: StoredBytes) -> None:
    assert quantizer.predicted_parts(4096, 4096) == expected


def test_mixtures_lie_between_their_types() -> None:
    def bits(quantizer: Gguf) -> float:
        return 8 * quantizer.predicted_bytes(4096, 4096) / 4096**2

    four_s, four_m = bits(Gguf(type="q4_k_s")), bits(Gguf(type="q4_k_m"))
    assert 4.5 < four_s < four_m < 5 < bits(Gguf(type="q5_k_s")) < bits(Gguf(type="q5_k_m")) < 6
    assert Gguf(type="q4_k_m").precision == "int4"
    assert Gguf(type="q4_k_m").predicted_bytes(64, 72) == 64 * 72 * 2


def test_only_blocks_are_multiplied_as_integers() -> None:
    assert not any(quantizer.integer_arithmetic for quantizer in FLOATS)
    assert all(quantizer.integer_arithmetic for quantizer in BLOCKS)


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", [Gguf(type="f16"), Gguf(type="q4_0")], ids=lambda value: value.type)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@needs_llama_cpp
def test_a_weight_that_is_no_number_is_refused_by_name(
    quantizer: Gguf, value: float, source: Path, tmp_path: Path, out: Path
) -> None:
    def spoil(weights: dict[str, Any]) -> None:
        weights[GATE][3, 5] = value

    bad = edited(source, tmp_path / "bad", spoil)
    with pytest.raises(StageError, match=r"blk\.0\.ffn_gate\.weight: 1 non-finite"):
        quantizer.quantize(bad, out, device="cpu")


@needs_llama_cpp
def test_weights_beyond_fp16_are_refused_where_they_would_become_infinite(tmp_path: Path, out: Path) -> None:
    import torch

    def enlarge(weights: dict[str, Any]) -> None:
        weights[GATE][0, 0] = 70_000.0

    source = edited(llama(tmp_path / "plain", dtype="bfloat16"), tmp_path / "large", enlarge)
    for quantizer in (Gguf(type="f16"), Gguf(type="q4_1")):
        with pytest.raises(
            StageError, match=r"ffn_gate\.weight: holds 70\d+, which is too large .* Use bf16"
        ):
            quantizer.quantize(source, out, device="cpu")
    bf16 = Gguf(type="bf16")
    bf16.quantize(source, out, device="cpu")
    model: Any = bf16.load(out, device="cpu", compute_dtype="float32")
    assert model.get_parameter(GATE)[0, 0] == torch.tensor(70_000.0).bfloat16().float()


@needs_llama_cpp
def test_rows_that_are_not_whole_blocks_stay_fp16_and_lose_the_label(tmp_path: Path, out: Path) -> None:
    source = llama(tmp_path / "odd", hidden_size=72, num_attention_heads=4, intermediate_size=100)
    quantizer = Gguf(type="q4_0")
    notes = quantizer.quantize(source, out, device="cpu")
    assert "F16" in notes[0]
    with pytest.raises(CheckpointError, match=r"0 of .* block weights quantized .*'int4' needs 95%"):
        check_earned_label(manifest_of(out, quantizer), quantizer=quantizer)


def test_a_matrix_of_another_16_bit_type_refuses_the_label(source: Path, out: Path) -> None:
    Gguf(type="bf16").quantize(source, out, device="cpu")
    with pytest.raises(CheckpointError, match="labelled fp16, but 8 of 11 tensors are stored otherwise"):
        manifest_of(out, Gguf(type="f16"))
    with pytest.raises(CheckpointError, match=r"general\.file_type is 32, for f16 it is 1"):
        Gguf(type="f16").load(out, device="cpu", compute_dtype="float32")


def test_an_architecture_that_the_converter_does_not_know_is_told_before_and_refused(
    source: Path, tmp_path: Path, out: Path
) -> None:
    config = json.loads((source / "config.json").read_text("utf-8"))
    assert Gguf(type="q8_0").model_problems(config, weights="trained") == ()
    unknown = {**config, "architectures": ["PerceptronForCausalLM"]}
    (problem,) = Gguf(type="q8_0").model_problems(unknown, weights="trained")
    assert "PerceptronForCausalLM" in problem.what
    assert "quanto" in problem.fix
    folder = shutil.copytree(source, tmp_path / "unknown")
    (folder / "config.json").write_text(json.dumps(unknown))
    with pytest.raises(StageError, match=r"doesn't know the architecture PerceptronForCausalLM; use"):
        Gguf(type="q8_0").quantize(folder, out, device="cpu")


def test_the_known_architectures_are_the_converters(source: Path) -> None:
    del source  # the converter imports torch, which the fixture has done
    from conversion import TEXT_MODEL_MAP

    assert known_architectures() == frozenset(TEXT_MODEL_MAP)


def test_random_weights_are_refused_before_a_run(source: Path) -> None:
    config = json.loads((source / "config.json").read_text("utf-8"))
    (problem,) = Gguf(type="q4_0").model_problems(config, weights="random")
    assert "folder" in problem.fix


def test_a_tokenizer_that_cannot_be_read_is_a_problem_until_its_file_changes(
    source: Path, tmp_path: Path
) -> None:
    config = json.loads((source / "config.json").read_text("utf-8"))
    folder = write_llama(tmp_path / "broken")
    path = folder / "tokenizer.json"
    whole = path.read_text("utf-8")
    content = json.loads(whole)
    content["model"]["merges"] = [["no", "such"]]
    path.write_text(json.dumps(content), "utf-8")
    for _ in range(2):
        (problem,) = Gguf(type="q8_0").model_problems(config, weights="trained", folder=folder)
        assert str(path) in problem.what
        assert "can't be read as a tokenizer" in problem.what
        assert "fetch the tokenizer's files again" in problem.fix
    path.write_text(whole, "utf-8")
    (problem,) = Gguf(type="q8_0").model_problems(config, weights="trained", folder=folder)
    assert "way of splitting text" in problem.what


def test_a_tokenizer_of_an_unknown_kind_is_told_before_and_refused(
    source: Path, tmp_path: Path, out: Path
) -> None:
    config = json.loads((source / "config.json").read_text("utf-8"))
    assert Gguf(type="q8_0").model_problems(config, weights="trained", folder=source) == ()
    source = write_llama(tmp_path / "bytes")
    (problem,) = Gguf(type="q8_0").model_problems(config, weights="trained", folder=source)
    assert "tokenizer" in problem.what
    with pytest.raises(StageError, match=r"doesn't recognise this tokenizer's way of splitting text"):
        Gguf(type="q8_0").quantize(source, out, device="cpu")


def test_a_tokenizer_with_fewer_tokens_than_the_embedding_has_rows_is_refused(
    tmp_path: Path, out: Path
) -> None:
    source = llama(tmp_path / "short", tokens=290)
    with pytest.raises(CheckpointError, match="290 tokens for an embedding of 300 rows"):
        Gguf(type="q8_0").quantize(source, out, device="cpu")


def test_a_folder_with_another_tokenizer_than_its_gguf_is_refused(source: Path, out: Path) -> None:
    quantizer = Gguf(type="f16")
    quantizer.quantize(source, out, device="cpu")
    tokenizer = json.loads((out / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["t"], vocabulary["e"] = vocabulary["e"], vocabulary["t"]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="the two tokenizers differ"):
        quantizer.load(out, device="cpu", compute_dtype="float32")


def test_a_gguf_without_a_tensor_of_the_model_is_refused(source: Path, out: Path) -> None:
    quantizer = Gguf(type="f16")
    quantizer.quantize(source, out, device="cpu")
    config = json.loads((out / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"9 tensors of the model are not in model\.gguf"):
        quantizer.load(out, device="cpu", compute_dtype="float32")


def test_a_gguf_with_more_than_the_model_is_refused(tmp_path: Path, out: Path) -> None:
    source = llama(tmp_path / "two", num_hidden_layers=2)
    quantizer = Gguf(type="f16")
    quantizer.quantize(source, out, device="cpu")
    config = json.loads((out / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match="a part of the file isn't read"):
        quantizer.load(out, device="cpu", compute_dtype="float32")


# --- a quiet converter, and the right one ----------------------------------------------------------------


@needs_llama_cpp
def test_the_converter_prints_nothing_and_leaves_no_trace(
    source: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (list(sys.argv), logging.getLogger("hf-to-gguf").level, logging.getLogger("gguf").level)
    Gguf(type="q4_0").quantize(source, out, device="cpu")
    assert capfd.readouterr() == ("", "")
    assert (list(sys.argv), logging.getLogger("hf-to-gguf").level, logging.getLogger("gguf").level) == before
    assert sorted(path.name for path in out.iterdir()) == [
        *("config.json", "generation_config.json", "model.gguf", "tokenizer.json", "tokenizer_config.json")
    ]


@needs_llama_cpp
def test_progress_is_told_in_bytes_and_ends_with_all_of_them(source: Path, out: Path) -> None:
    told: list[str] = []
    Gguf(type="q4_0").quantize(source, out, device="cpu", progress=told.append)
    done, _, total = told[-1].partition(" of ")
    assert total.startswith(done)


def test_a_gguf_package_that_another_distribution_overwrote_is_noticed(tmp_path: Path) -> None:
    def record(name: str, content: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(content)}"

    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "same.py").write_bytes(b"x = 1\n")
    (tmp_path / "gguf" / "older.py").write_bytes(b"x = 0\n")
    info = tmp_path / "converter-1.0.dist-info"
    info.mkdir()
    names = ("gguf/same.py", "gguf/older.py", "gguf/gone.py", "other/older.py")
    (info / "RECORD").write_text("\n".join(record(name, b"x = 1\n") for name in names))
    assert overwritten_files(metadata.Distribution.at(info)) == ("gguf/older.py", "gguf/gone.py")


@needs_llama_cpp
def test_everything_is_there_to_write_every_type_but_k_types() -> None:
    assert all(quantizer.check(device="cpu") == () for quantizer in (*FLOATS, *BLOCKS))
