"""Real result values for tests: plausible defaults, every field can be replaced by keyword.

>>> variant("int8").checkpoint.weight_bytes_on_disk
500000000
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.capacity_results import CapacityResult
from pipeline.measured import Distribution
from pipeline.results import (
    CheckpointManifest,
    Coverage,
    FileRecord,
    MetricScore,
    QualityResult,
    Report,
    Sample,
    SourceRecord,
    TaskResult,
    VariantReport,
    VariantResults,
)
from pipeline.speed_results import DeviceSpeed, MemoryResult, SpeedResult, SpeedRow

PARAMETERS = 500_000_000
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5, "fp8": 1.0, "fp4": 0.5}
"""Stored bytes of one weight, scales left out."""


def weight_bytes(precision: str) -> int:
    """Bytes of the builders' model at a precision."""
    return int(PARAMETERS * BYTES[precision])


def manifest(precision: str = "fp16", **fields: Any) -> CheckpointManifest:
    """A checkpoint of half a billion weights, all of them block weights."""
    size = weight_bytes(precision)
    quantized = PARAMETERS if BYTES[precision] < 2 else 0
    defaults: dict[str, Any] = {
        "precision": precision,
        "quantizer": {"kind": "none" if BYTES[precision] >= 2 else "quanto", "weights": precision},
        "source": SourceRecord(model="tiny/model", revision=None, files=()),
        "files": (FileRecord(name="model.safetensors", size_bytes=size + 1000, sha256="0" * 64),),
        "parameters": PARAMETERS,
        "coverage": Coverage(
            linear_weights=PARAMETERS,
            quantized_weights=quantized,
            head_weights=0,
            head_quantized=False,
            embedding_weights=0,
        ),
        "weight_bytes_on_disk": size,
        "weight_bytes_read_per_token": size,
        "bits_per_weight": 8 * size / PARAMETERS,
        "bits_per_block_weight": 8 * size / PARAMETERS,
        "seconds": 1.0,
        "peak_memory_bytes": 2 * size,
        "versions": {"torch": "2.13.0"},
    }
    return CheckpointManifest(**{**defaults, **fields})


def memory(precision: str = "fp16", **fields: Any) -> MemoryResult:
    """Weights held as they are stored, with a small KV cache on top."""
    size = weight_bytes(precision)
    defaults: dict[str, Any] = {
        "weight_bytes_on_disk": size,
        "weight_bytes_resident": size,
        "weight_bytes_read_per_token": size,
        "kv_cache_bytes": 10_000_000,
        "peak_bytes": size + 50_000_000,
        "process_bytes_before_load": 400_000_000,
        "process_bytes_after_load": 400_000_000 + size,
    }
    return MemoryResult(**{**defaults, **fields})


def speed_row(batch_size: int = 1, decode: float | None = 20.0, **fields: Any) -> SpeedRow:
    """A measured row; `decode` is the batch's aggregate rate in tokens a second. Its steps read 20 GB/s."""
    step_s = batch_size / decode if decode else 0.05
    defaults: dict[str, Any] = {
        "batch_size": batch_size,
        "prompt_tokens": 128,
        "new_tokens": 32,
        "outcome": "measured",
        "ttft_s": Distribution.of([0.20, 0.21, 0.22]),
        "tpot_s": Distribution.of([step_s * 0.98, step_s, step_s * 1.02]),
        "itl_p50_s": step_s,
        "itl_p90_s": step_s,
        "itl_p99_s": step_s,
        "prefill_tokens_per_s": 128 * batch_size / 0.21,
        "decode_tokens_per_s": decode,
        "decode_tokens_per_s_per_request": decode / batch_size if decode else None,
        "produced_tokens": 32 * batch_size,
        "bytes_read_per_step": round(2e10 * step_s),
        "bandwidth_share": 0.6,
        "peak_memory_bytes": 1_100_000_000,
    }
    return SpeedRow(**{**defaults, **fields})


def speed(precision: str = "fp16", rows: Sequence[SpeedRow] | None = None, **fields: Any) -> SpeedResult:
    """Batch sizes 1 and 8; the rate of a batch of one is inverse to the bytes of a weight."""
    decode = 40.0 / BYTES[precision]
    defaults: dict[str, Any] = {
        "engine": "transformers",
        "device": "cpu",
        "compute_dtype": "bfloat16",
        "execution": "eager, dynamic cache",
        "rows": tuple(rows) if rows is not None else (speed_row(1, decode), speed_row(8, 4 * decode)),
        "memory": memory(precision),
        "drift_percent": 0.4,
    }
    return SpeedResult(**{**defaults, **fields})


def capacity(sequences: int | None = 10, **fields: Any) -> CapacityResult:
    """A search that memory ended."""
    defaults: dict[str, Any] = {
        "context_tokens": 1024,
        "budget_bytes": 6_000_000_000,
        "budget_source": "recipe",
        "weight_bytes_resident": 1_000_000_000,
        "kv_bytes_per_sequence": 100_000_000,
        "kv_bytes_per_sequence_predicted": 100_000_000,
        "predicted_sequences": sequences,
        "measured_sequences": sequences,
        "limited_by": "memory",
    }
    return CapacityResult(**{**defaults, **fields})


def task(name: str = "piqa", values: Sequence[float] = (1.0, 0.0), **fields: Any) -> TaskResult:
    """A multiple-choice task; document i has hash `NAME-i` and `acc` of `values[i]`."""
    samples = tuple(
        Sample(doc_hash=f"{name}-{index}", metrics={"acc": float(value)})
        for index, value in enumerate(values)
    )
    score = sum(values) / len(values) if values else None
    defaults: dict[str, Any] = {
        "task": name,
        "output_type": "multiple_choice",
        "task_version": "1.0",
        "task_hash": "task",
        "prompts_hash": "prompts",
        "data_hash": "data",
        "num_fewshot": 0,
        "documents": len(samples),
        "truncated_prompts": 0,
        "primary_metric": "acc",
        "metrics": {"acc": MetricScore(score=score, stderr=None, higher_is_better=True)},
        "samples": samples,
    }
    return TaskResult(**{**defaults, **fields})


def paired_answers(
    *, both_right: int, lost: int, gained: int, both_wrong: int
) -> tuple[list[float], list[float]]:
    """Right (1.0) and wrong (0.0) answers of baseline and candidate with that paired table."""
    baseline = [1.0] * (both_right + lost) + [0.0] * (gained + both_wrong)
    candidate = [1.0] * both_right + [0.0] * lost + [1.0] * gained + [0.0] * both_wrong
    return baseline, candidate


def rolling_task(
    name: str = "passages", nats: Sequence[float] = (230.0, 345.0), tokens: int = 100, **fields: Any
) -> TaskResult:
    """A perplexity task; document i has log-likelihood −`nats[i]` over `tokens` tokens."""
    samples = tuple(
        Sample(
            doc_hash=f"{name}-{index}",
            metrics={
                "log_likelihood_nats": -float(value),
                "words": 80.0,
                "utf8_bytes": 400.0,
                "tokens": float(tokens),
            },
        )
        for index, value in enumerate(nats)
    )
    defaults: dict[str, Any] = {
        "output_type": "loglikelihood_rolling",
        "documents": len(samples),
        "primary_metric": "word_perplexity",
        "metrics": {"word_perplexity": MetricScore(score=20.0, stderr=None, higher_is_better=False)},
        "samples": samples,
    }
    return task(name, **{**defaults, **fields})


def quality(*tasks: TaskResult, **fields: Any) -> QualityResult:
    """Tasks measured on one engine."""
    defaults: dict[str, Any] = {
        "engine": "transformers",
        "device": "cpu",
        "compute_dtype": "float32",
        "batch_size": 8,
        "seed": 1234,
        "limit": None,
        "chat_template_hash": None,
        "tokenizer_hash": "tokenizer",
        "adds_bos_token": False,
        "harness_version": "0.4.13",
        "tasks": {result.task: result for result in tasks},
        "logits_finite": True,
    }
    return QualityResult(**{**defaults, **fields})


def variant(name: str = "int8", precision: str | None = None, **fields: Any) -> VariantResults:
    """A variant with checkpoint, speed, memory and capacity; the precision is the name unless given."""
    precision = precision or name
    block = manifest(precision)
    defaults: dict[str, Any] = {
        "name": name,
        "precision": precision,
        "required": True,
        "quantizer": block.quantizer,
        "checkpoint": block,
        "speed": speed(precision),
        "memory": memory(precision),
        "capacity": capacity(int(20 / BYTES[precision])),
    }
    return VariantResults(**{**defaults, **fields})


def variant_report(results: VariantResults, **fields: Any) -> VariantReport:
    """The variant's results with a verdict, `ship` unless given."""
    values = {name: getattr(results, name) for name in VariantResults.model_fields}
    return VariantReport(**{**values, "verdict": "ship", "findings": (), **fields})


def report(*variants: VariantReport, **fields: Any) -> Report:
    """A report of a run of 90 seconds; without variants a baseline fp16 and an int8 that ships."""
    chosen = variants or (variant_report(variant("fp16")), variant_report(variant("int8")))
    defaults: dict[str, Any] = {
        "recipe": "recipes/tiny.yaml",
        "recipe_digest": "d" * 64,
        "resolved_recipe": {"model": "tiny/model", "quality": {"seed": 1234}},
        "started_at": "2026-01-02T03:04:05+00:00",
        "seconds": 90.0,
        "provenance": {"packages": {"torch": "2.13.0", "transformers": "5.24.0"}},
        "device": DeviceSpeed(read_bandwidth_bytes_per_s=3e10, matmul_flops_per_s={"float32": 1.4e11}),
        "baseline": chosen[0].name,
        "verdict": "ship",
        "because": ("int8: ship",),
        "variants": chosen,
    }
    return Report(**{**defaults, **fields})
