"""Small lm-eval tasks over JSON lines, and the request that runs them: real task files, no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.answer_journal import AnswerJournal
from pipeline.quality import QualityRequest, evaluate
from pipeline.results import QualityResult

CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{answers}}",
    "doc_to_target": "{{right}}",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
    ],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "text",
    "metric_list": [
        {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
        {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
        {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
    ],
}
GENERATION = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answers[0]}}",
    "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def questions(count: int) -> list[dict[str, Any]]:
    """`count` different documents with three answers of different lengths; the right one goes round."""
    return [
        {
            "question": f"What comes after the number {index}{' or so' * (index % 5)}?",
            "answers": [f"number {index + 1}", f"the {index * 7} one", "a long and winding answer"],
            "right": index % 3,
        }
        for index in range(count)
    ]


def write_task(
    folder: Path,
    name: str,
    settings: Mapping[str, Any],
    documents: Sequence[Mapping[str, Any]],
    *,
    training: Sequence[Mapping[str, Any]] = (),
    **overrides: Any,
) -> Path:
    """`NAME.yaml` in `folder` over JSON lines in `folder/data`; `${EVAL_DATA}` stands for the latter."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    splits = {"validation": documents, **({"train": training} if training else {})}
    for split, rows in splits.items():
        (data / f"{name}-{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {split: f"${{EVAL_DATA}}/{name}-{split}.json" for split in splits},
            "cache_dir": str(folder / "cache"),
        },
        "validation_split": "validation",
        **({"training_split": "train"} if training else {}),
        **settings,
        "metadata": {"version": 1.0},
        **overrides,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    return path


def request_for(folder: Path, *tasks: str, **overrides: Any) -> QualityRequest:
    """Every task of `tasks` from `folder`, seed 1234, batches of 4."""
    settings: dict[str, Any] = {
        "tasks": tasks,
        "task_folders": (str(folder),),
        "data_folder": str(folder / "data"),
        "limit": None,
        "seed": 1234,
        "batch_size": 4,
        "num_fewshot": None,
        "apply_chat_template": False,
        "max_length_tokens": None,
        "confirm_unsafe_code": False,
        **overrides,
    }
    return QualityRequest(**settings)


def run(
    model: Any,
    checkpoint: Path,
    request: QualityRequest,
    progress: Callable[[str], None] = lambda _: None,
    journal: AnswerJournal | None = None,
) -> QualityResult:
    """`evaluate` on the CPU in FP32."""
    return evaluate(
        model,
        tokenizer_folder=checkpoint,
        request=request,
        compute_dtype="float32",
        device="cpu",
        progress=progress,
        journal=journal,
    )


def load(folder: Path) -> Any:
    """A checkpoint as an FP32 model on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
