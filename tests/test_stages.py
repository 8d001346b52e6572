"""The stages themselves, in this process: what counts as out of memory, the search for the largest batch,
and capacity, on scripted sessions and on a tiny model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.transformers import Transformers
from pipeline.errors import CheckpointError, StageError
from pipeline.footprint import kv_bytes, shape_facts
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.recipe import SpeedSpec, Workload
from pipeline.results import SourceRecord
from pipeline.scripted_engine import ScriptedSession
from pipeline.speed_results import SpeedShape
from pipeline.speed_stage import mean_kv_bytes, read_per_token_resident, timed_shapes
from pipeline.stages import (
    CapacityRequest,
    QuantizeRequest,
    RunnableCheckpoint,
    SpeedOpened,
    SpeedRequest,
    SpeedSession,
    capacity,
    capacity_of,
    is_out_of_memory,
    largest_that_fits,
    quantize,
)
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


# --- the largest that fits -------------------------------------------------------------------------------


def test_the_search_finds_the_limit_wherever_it_starts() -> None:
    for ceiling in (*range(1, 14), 40):
        for start in range(1, ceiling + 1):
            for limit in range(1, ceiling + 3):
                tried: list[int] = []

                def fits(count: int, *, limit: int = limit, tried: list[int] = tried) -> bool:
                    tried.append(count)
                    return count <= limit

                found = largest_that_fits(fits, start=start, ceiling=ceiling)
                assert found == min(limit, ceiling), (ceiling, start, limit)
                assert len(set(tried)) == len(tried), "nothing is tried twice"
                assert all(1 < count <= ceiling for count in tried), "one is known to fit"
                distance = abs(min(limit, ceiling) - start)
                assert len(tried) <= 2 * math.log2(distance + 1) + 3, (ceiling, start, limit, tried)


def test_a_right_guess_needs_two_probes() -> None:
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= 5000

    assert largest_that_fits(fits, start=5000, ceiling=10**6) == 5000
    assert tried == [5000, 5001]


# --- capacity on a scripted session ----------------------------------------------------------------------


def request(**fields: Any) -> CapacityRequest:
    """32 tokens a sequence, 8 of them new, on a device whose peak is all that counts."""
    checkpoint = RunnableCheckpoint(
        folder="nowhere", quantizer=Native(dtype="fp16"), engine=Transformers(), device="cuda"
    )
    settings: dict[str, Any] = {
        "checkpoint": checkpoint,
        "context_tokens": 32,
        "new_tokens": 8,
        "budget_bytes": 10_000,
        "budget_source": "recipe",
        "max_sequences": 64,
        "kv_bytes_per_sequence_predicted": 320,
        **fields,
    }
    return CapacityRequest(**settings)


def holder(**fields: Any) -> ScriptedSession:
    return ScriptedSession(weight_bytes=1000, kv_bytes_per_token=10, **fields)


def test_capacity_is_what_the_budget_leaves_beside_the_weights() -> None:
    found = capacity_of(holder(), request=request(), progress=quiet)
    assert found.weight_bytes_resident == 1000
    assert found.kv_bytes_per_sequence == 310  # the last token is never cached
    assert found.predicted_sequences == 28
    assert found.measured_sequences == 29
    assert found.limited_by == "memory"
    assert found.because == "30 sequences need 10,300 B, the budget is 10,000 B"
    assert {probe.sequences: probe.outcome for probe in found.probes}[29] == "measured"


def test_every_probe_runs_the_whole_prompt_and_all_new_tokens() -> None:
    session = holder()
    capacity_of(session, request=request(), progress=quiet)
    warm_up, *batches = session.prompts
    assert len(warm_up) == 1
    assert {len(prompt) for batch in batches for prompt in batch} == {24}
    assert session.calls.count("decode_step") == 1 + 7 * len(batches)


def test_memory_that_runs_out_late_in_decoding_is_no_fit() -> None:
    session = holder(failure=MemoryError(), fails_at_step=50)
    wanted = request(context_tokens=64, new_tokens=60, budget_bytes=10**9)
    found = capacity_of(session, request=wanted, progress=quiet)
    assert found.measured_sequences == 0
    assert found.limited_by == "memory"
    assert found.probes[0].outcome == "out_of_memory"
    assert "MemoryError" in found.because


@pytest.mark.parametrize("error", [ValueError("shapes differ"), KeyError("layer")])
def test_a_bug_in_a_probe_fails_the_stage_with_its_own_message(error: Exception) -> None:
    with pytest.raises(
        StageError, match=rf"holding 1 sequences failed: {type(error).__name__}: .*{error.args[0]}"
    ):
        capacity_of(holder(failure=error, fails_at_step=3), request=request(), progress=quiet)


def test_a_budget_smaller_than_the_weights_holds_nothing_and_is_never_negative() -> None:
    found = capacity_of(holder(), request=request(budget_bytes=500), progress=quiet)
    assert (found.predicted_sequences, found.measured_sequences) == (0, 0)
    assert found.because == "1 sequences need 1,310 B, the budget is 500 B"
    assert len(found.probes) == 1


@pytest.mark.parametrize("budget", range(0, 4000, 177))
def test_no_budget_gives_a_negative_capacity(budget: int) -> None:
    found = capacity_of(holder(), request=request(budget_bytes=budget), progress=quiet)
    assert found.measured_sequences == max(0, (budget - 1000) // 310)
    assert (found.predicted_sequences or 0) >= 0


def test_the_recipes_ceiling_is_named_as_what_ended_the_search() -> None:
    found = capacity_of(holder(), request=request(budget_bytes=10**9, max_sequences=7), progress=quiet)
    assert found.measured_sequences == 7
    assert found.limited_by == "ceiling"
    assert "max_sequences (7)" in found.because


def test_without_a_predicted_cache_the_first_probe_shows_its_size() -> None:
    found = capacity_of(holder(), request=request(kv_bytes_per_sequence_predicted=None), progress=quiet)
    assert found.kv_bytes_per_sequence_predicted is None
    assert found.predicted_sequences == 29
    assert found.measured_sequences == 29


# --- on a tiny model -------------------------------------------------------------------------------------


def runnable(folder: Path, **engine: Any) -> RunnableCheckpoint:
    return RunnableCheckpoint(
        folder=str(folder),
        quantizer=Native(dtype="fp16"),
        engine=Transformers.model_validate(engine),
        device="cpu",
    )


def test_capacity_of_a_real_model_stays_within_its_budget(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = write_llama(tmp_path / "tiny")
    facts = shape_facts(AutoConfig.from_pretrained(folder).to_dict())
    per_sequence = kv_bytes(facts, 64, element_bytes=4)
    assert per_sequence == 16_384
    wanted = request(
        checkpoint=runnable(folder, compute_dtype="float32"),
        context_tokens=64,
        budget_bytes=8 * 2**20,
        max_sequences=128,
        kv_bytes_per_sequence_predicted=per_sequence,
    )
    found = capacity(wanted, progress=quiet)
    assert found.kv_bytes_per_sequence == 63 * 256
    assert found.predicted_sequences == (found.budget_bytes - found.weight_bytes_resident) // per_sequence
    assert found.measured_sequences is not None
    assert 1 <= found.measured_sequences <= 128
    for probe in found.probes:
        assert probe.peak_bytes is not None
        assert (probe.peak_bytes <= found.budget_bytes) == (probe.outcome == "measured")
    smaller = capacity(wanted.model_copy(update={"budget_bytes": 100_000}), progress=quiet)
    assert (smaller.measured_sequences, smaller.predicted_sequences) == (0, 0)


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


def test_a_decode_step_reads_the_cache_of_the_middle_step() -> None:
    deep = SpeedShape(batch_size=1, prompt_tokens=100, new_tokens=9, test="depth")
    assert mean_kv_bytes(108 * 10, deep) == 1045
