"""The stages themselves, in this process: what counts as out of memory, speed and checkpoints, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.transformers import Transformers
from pipeline.errors import CheckpointError, StageError
from pipeline.footprint import shape_facts, weight_reads
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.recipe_sections import SpeedSpec, Workload
from pipeline.results import SourceRecord
from pipeline.speed_results import SpeedShape
from pipeline.speed_stage import mean_kv_bytes, read_per_token_resident, timed_shapes, touched_share
from pipeline.stages import (
    QuantizeRequest,
    RunnableCheckpoint,
    SpeedOpened,
    SpeedRequest,
    SpeedSession,
    is_out_of_memory,
    quantize,
)
from pipeline.store import JOURNAL_NAME
from tests import result_builders as build
from tests.tiny_models import write_gpt2, write_llama, write_moe


def quiet(_text: str) -> None:
    """No progress."""


# --- out of memory or not --------------------------------------------------------------------------------


def gpu_out_of_memory() -> Exception:
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def refused_by_the_allocator() -> Exception:
    """What torch really says on a CPU: sixteen exabytes are on no machine."""
    import torch

    with pytest.raises(RuntimeError) as refusal:
        torch.empty(2**62, dtype=torch.int8)
    return refusal.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_memory_that_ran_out_is_recognised_on_every_device(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_the_exceptions_that_torch_raises_are_recognised() -> None:
    assert is_out_of_memory(gpu_out_of_memory())
    assert is_out_of_memory(refused_by_the_allocator())


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory is not what a ValueError means"),
        KeyError("attention"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x64 and 32x64)"),
        IndexError("index out of range in self"),
        OSError(28, "No space left on device"),
    ],
)
def test_plain_bugs_are_not_taken_for_memory_that_ran_out(error: Exception) -> None:
    assert not is_out_of_memory(error)


# --- speed on a tiny model --------------------------------------------------------------------------------


def runnable(folder: Path, **engine: Any) -> RunnableCheckpoint:
    return RunnableCheckpoint(
        folder=str(folder),
        quantizer=Native(dtype="fp16"),
        engine=Transformers.model_validate(engine),
        device="cpu",
    )


def shape(batch_size: int) -> SpeedShape:
    return SpeedShape(batch_size=batch_size, prompt_tokens=16, new_tokens=4)


def test_lengths_and_depths_are_timed_after_the_workload_s_batches_and_named_as_people_know_them() -> None:
    workload = Workload(prompt_tokens=32, new_tokens=16)
    spec = SpeedSpec(batch_sizes=(1, 8), prompt_tokens=(128, 2048), context_tokens=(4096,))
    shapes = timed_shapes(spec, workload=workload)
    assert [one.name for one in shapes] == ["pp32+tg16", "pp32+tg16", "pp128", "pp2048", "tg16 @ d4096"]
    assert [one.batch_size for one in shapes] == [1, 8, 1, 1, 1]
    assert [one.new_tokens for one in shapes] == [16, 16, 1, 1, 16]
    assert timed_shapes(SpeedSpec(batch_sizes=(1, 8)), workload=workload) == shapes[:2]


def test_prompts_longer_than_a_chunk_are_timed_whole_and_then_in_chunks() -> None:
    spec = SpeedSpec(prompt_tokens=(128, 256, 2048), prefill_chunk_tokens=(256, 1024))
    shapes = timed_shapes(spec, workload=Workload())[1:]
    assert [(one.name, one.chunk_tokens) for one in shapes] == [
        *(("pp128", None), ("pp256", None), ("pp2048", None)),
        *(("pp2048 in chunks of 256", 256), ("pp2048 in chunks of 1024", 1024)),
    ]
    assert {(one.batch_size, one.new_tokens, one.test) for one in shapes} == {(1, 1, "prefill")}


def test_a_turn_sends_the_prompt_through_in_the_shape_s_chunks(tmp_path: Path) -> None:
    session = SpeedSession(SpeedRequest(checkpoint=runnable(write_llama(tmp_path / "tiny"))))
    seen: list[int] = []
    session._session.model.register_forward_pre_hook(  # type: ignore[attr-defined]
        lambda _model, arguments: seen.append(arguments[0].shape[1])
    )
    whole = SpeedShape(batch_size=1, prompt_tokens=20, new_tokens=1, test="prefill")
    for chunk_tokens in (None, 8):
        result = session.run(whole.model_copy(update={"chunk_tokens": chunk_tokens}), seed=1)
        assert result.trace is not None
        assert (result.trace.prompt_tokens, result.trace.produced_tokens) == (20, 1)
    assert seen == [20, 8, 8, 4]


def test_a_speed_session_reports_what_it_holds_and_times_exact_lengths(tmp_path: Path) -> None:
    session = SpeedSession(SpeedRequest(checkpoint=runnable(write_llama(tmp_path / "tiny"))))
    assert session.opened.compute_dtype == "float16"
    assert 112_512 <= session.opened.weight_bytes_resident < 113_000
    result = session.run(shape(3), seed=1)
    assert result.trace is not None
    assert result.memory is not None
    assert (result.trace.batch_size, result.trace.prompt_tokens, result.trace.produced_tokens) == (3, 16, 12)
    assert result.memory.kv_cache_bytes == 3 * 19 * 128
    failed = session.run(shape(0), seed=1)  # a batch that can't be run is a result, and the next one runs
    assert failed.outcome == "failed"
    assert session.run(shape(1), seed=2).outcome == "measured"


def test_a_model_whose_logits_are_not_finite_has_no_speed(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_llama(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    session = SpeedSession(SpeedRequest(checkpoint=runnable(folder)))
    result = session.run(shape(1), seed=0)
    assert result.outcome == "failed"
    assert "not finite" in result.because


# --- quantize --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_gpt2, write_moe])
def test_a_label_that_the_bytes_do_not_earn_is_refused(tmp_path: Path, write: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    wanted = QuantizeRequest(
        source_folder=str(write(tmp_path / "source")),
        source=SourceRecord(model="tiny", revision=None, files=()),
        quantizer=Quanto(weights="int8"),
        device="cpu",
        out=str(out),
    )
    with pytest.raises((CheckpointError, StageError), match=r"int8|quanti"):
        quantize(wanted, progress=quiet)
    assert not (out / "manifest.json").exists()
    assert not (out / JOURNAL_NAME).exists()


def test_a_quantized_checkpoint_ends_with_its_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    wanted = QuantizeRequest(
        source_folder=str(write_llama(tmp_path / "source")),
        source=SourceRecord(model="tiny", revision=None, files=()),
        quantizer=Quanto(weights="int4"),
        device="cpu",
        out=str(out),
    )
    manifest = quantize(wanted, progress=quiet)
    assert manifest.weight_bytes_on_disk == 59_292
    assert manifest.coverage.share == 1.0
    assert (out / "manifest.json").is_file()
    assert not (out / JOURNAL_NAME).exists()


def test_a_checkpoint_made_in_two_goes_has_the_digest_of_one_made_in_one_and_says_so(tmp_path: Path) -> None:
    source, quantizer = write_llama(tmp_path / "source", shard_bytes=40_000), Quanto(weights="int8")
    made = {}
    for name in ("one", "two"):
        out = tmp_path / name
        out.mkdir()
        if name == "two":  # weights and journal without a manifest, as a stage leaves them that is killed
            quantizer.quantize(source, out, device="cpu")
        told: list[str] = []
        wanted = QuantizeRequest(
            source_folder=str(source),
            source=SourceRecord(model="tiny", revision=None, files=()),
            quantizer=quantizer,
            device="cpu",
            out=str(out),
        )
        made[name] = quantize(wanted, progress=told.append)
        assert any("0.00 GB" in text for text in told)
    assert made["one"].notes == ()
    assert made["two"].notes[0].startswith("resumed: 4 of 4 files")
    assert made["one"].content_digest() == made["two"].content_digest()


# --- what a decode step reads ----------------------------------------------------------------------------


def test_weights_that_grow_at_load_are_read_at_the_size_they_have_in_memory() -> None:
    opened = SpeedOpened(
        compute_dtype="float16",
        execution="scripted",
        weight_bytes_resident=1600,
        process_bytes_before_load=0,
        process_bytes_after_load=0,
        peak_load_bytes=0,
        energy_source="energy not measured: scripted",
    )
    manifest = build.manifest("int4", weight_bytes_on_disk=400, weight_bytes_read_per_token=300)
    assert read_per_token_resident(opened, manifest) == 1200


def test_a_step_reads_only_the_experts_that_its_tokens_touch(tmp_path: Path) -> None:
    """Two of four experts a token; two tokens touch 4·(1 − ½²) = 3 of them on average."""
    experts, dense = (
        shape_facts(json.loads((write(tmp_path / write.__name__) / "config.json").read_text("utf-8")))
        for write in (write_moe, write_llama)
    )
    reads = weight_reads(experts, quantizer=Native(dtype="fp16"))
    every = experts.parameters - experts.embedding_weights
    expert = 3 * 64 * 32
    assert touched_share(reads, tokens=1) * every == pytest.approx(every - 2 * expert)
    assert touched_share(reads, tokens=2) * every == pytest.approx(every - expert)
    assert touched_share(reads, tokens=1000) == pytest.approx(1.0)
    assert touched_share(weight_reads(dense, quantizer=Native(dtype="fp16")), tokens=1) == 1.0


def test_a_decode_step_reads_the_cache_of_the_middle_step() -> None:
    deep = SpeedShape(batch_size=1, prompt_tokens=100, new_tokens=9, test="depth")
    assert mean_kv_bytes(108 * 10, deep) == 1045
