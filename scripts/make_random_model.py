"""Writes a checkpoint of random weights: an architecture's shape with a tokenizer that belongs to another model.

For what must have files, such as GGUF: speed and memory don't depend on what the weights are worth. (Quantizers that
don't need files take `weights: random` in a recipe, which stores nothing.)

    python -m scripts.make_random_model recipes/architectures/llama-1.1b.json FOLDER [--seed 0] [--tokenizer FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pipeline.checkpoint import tokenizer_tokens
from pipeline.errors import CheckpointError
from pipeline.quantizers.native import Native
from pipeline.random_weights import load_random, write_random_variant
from pipeline.tensorfile import read_json
from pipeline.weights import copy_side_files, quiet_transformers
from scripts.fetch_demo_model import MODEL_FOLDER
from scripts.pinned_wheel import SOURCE_FILE, replacing, report_errors


def make_random_model(config: Path, folder: Path, *, tokenizer: Path, seed: int) -> Path:
    """Write BF16 weights drawn by transformers' own initialisation, and the tokenizer's files.

    Raises CheckpointError when the tokenizer has more tokens than the model's embedding rows.
    """
    described = read_json(config)
    rows, tokens = int(described["vocab_size"]), tokenizer_tokens(tokenizer) or 0
    if not 0 < tokens <= rows:
        raise CheckpointError(
            f"{tokenizer}: its tokenizer has {tokens} tokens, {config} says vocab_size {rows}; take a tokenizer with "
            "at most so many"
        )
    quantizer = Native(dtype="bf16")
    with tempfile.TemporaryDirectory() as outline, replacing(folder) as fresh, quiet_transformers():
        write_random_variant(described, out=Path(outline), seed=seed, quantizer=quantizer)
        model = load_random(Path(outline), quantizer=quantizer, device="cpu", compute_dtype="bfloat16")
        model.save_pretrained(fresh, max_shard_size="1GB")  # type: ignore[operator]
        copy_side_files(tokenizer, fresh)
        (fresh / SOURCE_FILE).unlink(missing_ok=True)  # says where the tokenizer's own weights come from
    return folder


def main() -> int:
    """0, or the exit code of what went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, default=MODEL_FOLDER)
    arguments = parser.parse_args()
    return report_errors(
        lambda: make_random_model(
            arguments.config, arguments.folder, tokenizer=arguments.tokenizer, seed=arguments.seed
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
