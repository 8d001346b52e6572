"""Tiny random models written as checkpoint folders, with a tokenizer that encodes any English text.

Real architectures at toy sizes, so that every stage of the pipeline runs for real in a second, offline:
a Llama (tied head, 56,256 parameters), a GPT-2 (Conv1D blocks, 172,288) and a Qwen3 mixture of experts
(three-dimensional expert parameters, untied head, 70,144).

    folder = write_llama(tmp_path / "tiny")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.weights import quiet_transformers

# Two-letter merges of common English, so that text is a little shorter than its bytes. "Ġ" is how the
# byte-level alphabet writes a space.
_MERGES = (
    *("Ġt", "Ġa", "Ġo", "Ġs", "Ġw", "Ġi", "Ġb", "Ġc", "Ġf", "Ġp", "Ġm", "Ġd", "Ġh", "Ġl"),
    *("he", "in", "re", "on", "er", "at", "en", "nd", "st", "or", "es", "an", "ti", "te", "is"),
    *("it", "ar", "al", "ou", "ng", "ed", "le", "ve", "as", "ro", "ic", "me"),
)
_SPECIAL = ("<unk>", "<s>", "</s>")

TWO_VARIANTS: dict[str, Any] = {
    "model": "./llama",
    "baseline": "fp16",
    "variants": [{"name": "fp16"}, {"name": "int8", "quantizer": {"kind": "quanto", "weights": "int8"}}],
    "workload": {"prompt_tokens": 8, "new_tokens": 4},
}
"""The beginning of a recipe on a model of `write_llama` in the folder `llama` beside it."""
SHORT_SPEED: dict[str, Any] = {
    "batch_sizes": [1],
    "warmup": 1,
    "repeats": 3,
    "min_seconds": 0,
    "max_cv_percent": 1000,
}
"""The shortest block `speed` that gives quartiles."""


def write_llama(
    folder: Path,
    *,
    dtype: str = "float16",
    seed: int = 0,
    tokenizer_tokens: int = 300,
    shard_bytes: int | None = None,
    **config_overrides: Any,
) -> Path:
    """A one-layer Llama: vocabulary 300, hidden 64, tied head. 112,512 bytes of weights in FP16."""
    from transformers import LlamaConfig

    settings = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config_overrides,
    }
    return _write(LlamaConfig(**settings), folder, dtype, seed, tokenizer_tokens, shard_bytes)


def write_gpt2(
    folder: Path,
    *,
    dtype: str = "float16",
    seed: int = 0,
    tokenizer_tokens: int = 300,
    shard_bytes: int | None = None,
    **config_overrides: Any,
) -> Path:
    """A two-layer GPT-2: vocabulary 1000, width 64, 98,304 weights in Conv1D, tied head."""
    from transformers import GPT2Config

    settings = {
        "vocab_size": 1000,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config_overrides,
    }
    return _write(GPT2Config(**settings), folder, dtype, seed, tokenizer_tokens, shard_bytes)


def write_moe(
    folder: Path,
    *,
    dtype: str = "float16",
    seed: int = 0,
    tokenizer_tokens: int = 256,
    shard_bytes: int | None = None,
    **config_overrides: Any,
) -> Path:
    """A one-layer Qwen3-MoE: four experts kept as three-dimensional parameters, vocabulary 256, untied."""
    from transformers import Qwen3MoeConfig

    settings = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config_overrides,
    }
    return _write(Qwen3MoeConfig(**settings), folder, dtype, seed, tokenizer_tokens, shard_bytes)


def write_mixtral(folder: Path, *, dtype: str = "float16", seed: int = 0) -> Path:
    """A one-layer Mixtral: four experts, vocabulary 300, untied; saved with one matrix an expert."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _write(config, folder, dtype, seed, config.vocab_size, None)


def write_tokenizer(folder: Path, *, tokens: int = 300) -> Path:
    """A byte-level tokenizer of exactly `tokens` ids into `folder`.

    From 259 tokens on every byte has an id; smaller ones know printable ASCII and map the rest to <unk>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if tokens < len(_SPECIAL) + len(alphabet):
        alphabet = [letter for letter in alphabet if letter.isascii() or letter in "ĠĊ"]
    merges = _MERGES[: max(0, tokens - len(_SPECIAL) - len(alphabet))]
    names = [*_SPECIAL, *alphabet, *merges]
    names += [f"<unused{index}>" for index in range(tokens - len(names))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[(pair[0], pair[1]) for pair in merges],
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(folder)
    return folder


def write_fallback_tokenizer(folder: Path, *, tokens: int = 300) -> Path:
    """A tokenizer of exactly `tokens` ids, as the older Llamas have it: words and, for the rest, bytes (<0x0A>).

    llama.cpp's converter knows it by its form; a byte-level one it knows only where a published model has it.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    bytes_alone = [f"<0x{value:02X}>" for value in range(256)]
    letters = ["▁", *"etaoinshrdlucmfwypvbgkjqxz"]
    names = [*_SPECIAL, *bytes_alone, *letters][:tokens]
    names += [f"<unused{index}>" for index in range(tokens - len(names))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(folder)
    return folder


def _write(
    config: Any, folder: Path, dtype: str, seed: int, tokenizer_tokens: int, shard_bytes: int | None
) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    limit = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    with quiet_transformers():
        model.save_pretrained(folder, **limit)
    return write_tokenizer(folder, tokens=min(tokenizer_tokens, config.vocab_size))
