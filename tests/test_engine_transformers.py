"""The explicit loop against transformers' own `generate`, its bytes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.transformers import PROVEN_STATE, Transformers, TransformersSession
from pipeline.errors import CheckpointError, StageError
from pipeline.footprint import kv_bytes, shape_facts
from pipeline.measure import random_prompts
from pipeline.progress import Tell, silent
from pipeline.quantizers.base import Quantizer, StoredBytes, StoredWeight
from pipeline.quantizers.native import Native
from pipeline.results import Problem
from tests.tiny_models import write_llama, write_tokenizer

NEW_TOKENS = 20
PROMPTS = [[5, 9, 33, 77, 2, 6, 100, 40, 3, 11, 12, 13], [7, 8, 9, 10, 20, 30, 40, 50, 60, 70, 80, 90]]
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def config(architecture: str) -> Any:
    """Weights far from zero, so that greedy decoding visits many tokens."""
    from transformers import (
        BambaConfig,
        Gemma3TextConfig,
        GPT2Config,
        LlamaConfig,
        Qwen3_5TextConfig,
        Qwen3NextConfig,
    )

    if architecture == "llama":
        return LlamaConfig(**SIZES, num_hidden_layers=1, initializer_range=0.5)
    if architecture == "gpt2":
        special = {"bos_token_id": 1, "eos_token_id": 2}
        return GPT2Config(vocab_size=1000, n_embd=64, n_layer=2, n_head=2, initializer_range=0.5, **special)
    if architecture == "gemma3":
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
        return Gemma3TextConfig(
            **SIZES, num_hidden_layers=2, initializer_range=0.5, tie_word_embeddings=False, **layers
        )
    if architecture == "bamba":
        heads = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
        sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
        return BambaConfig(
            **sizes, num_hidden_layers=2, attn_layer_indices=[1], initializer_range=0.5, **heads
        )
    linear = {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "initializer_range": 0.5,
    }
    if architecture == "qwen3_next":
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
        return Qwen3NextConfig(**SIZES, **linear, **experts)
    return Qwen3_5TextConfig(**SIZES, **linear)


def model(architecture: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config(architecture), dtype=torch.float32).eval()


def session(of: Any, *, cache: str = "dynamic") -> TransformersSession:
    return TransformersSession(of, cache=cache, compute_dtype="float32", vocabulary_tokens=300)


def generated(
    session: Any, prompts: Any, *, new_tokens: int = NEW_TOKENS, chunk_tokens: int | None = None
) -> list[list[int]]:
    """[sequence][new token]."""
    steps = [session.prefill(prompts, new_tokens=new_tokens, chunk_tokens=chunk_tokens)]
    steps += [session.decode_step() for _ in range(new_tokens - 1)]
    return [list(sequence) for sequence in zip(*steps, strict=True)]


def by_generate(of: Any, prompts: Any) -> list[list[int]]:
    import torch

    of.generation_config.eos_token_id = None
    found = of.generate(
        torch.tensor(prompts), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, use_cache=True
    )
    tokens: list[list[int]] = found[:, len(prompts[0]) :].tolist()
    return tokens


ARCHITECTURES = pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "qwen3_5_text"])


@ARCHITECTURES
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_are_those_of_generate_alone_and_in_a_batch(architecture: str, cache: str) -> None:
    loaded = model(architecture)
    expected = by_generate(loaded, PROMPTS)
    assert len({token for sequence in expected for token in sequence}) > 8
    running = session(loaded, cache=cache)
    assert generated(running, PROMPTS) == expected
    assert [generated(running, [prompt])[0] for prompt in PROMPTS] == expected


@ARCHITECTURES
@pytest.mark.parametrize("tokens", [4, 31])
def test_the_cache_holds_the_bytes_that_the_footprint_predicts(architecture: str, tokens: int) -> None:
    loaded = model(architecture)
    running = session(loaded)
    generated(running, [[1] * 3, [2] * 3], new_tokens=tokens - 3 + 1)  # the last token isn't cached
    predicted = kv_bytes(shape_facts(loaded.config.to_dict()), tokens, element_bytes=4)
    assert predicted is not None
    assert running.memory().kv_cache_bytes == 2 * predicted


def test_a_static_cache_holds_its_full_length_from_the_start() -> None:
    loaded = model("llama")
    running = session(loaded, cache="static")
    running.prefill([[1, 2, 3]], new_tokens=29)
    assert running.memory().kv_cache_bytes == kv_bytes(
        shape_facts(loaded.config.to_dict()), 32, element_bytes=4
    )


def test_a_released_batch_holds_no_cache_and_a_new_one_starts_afresh() -> None:
    running = session(model("llama"))
    first = generated(running, PROMPTS[:1])
    generated(running, PROMPTS[1:])
    assert generated(running, PROMPTS[:1]) == first
    running.release()
    assert running.memory().kv_cache_bytes is None


def test_decoding_goes_on_past_an_end_of_sequence_token() -> None:
    loaded = model("llama")
    expected = by_generate(loaded, PROMPTS[:1])[0]
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id = expected[5]
    found = generated(session(loaded), PROMPTS[:1])[0]
    assert found == expected
    assert len(found) == NEW_TOKENS


# --- prompts of unequal lengths, prompts in chunks -------------------------------------------------------

UNEQUAL = [PROMPTS[0], PROMPTS[1][:3], [250], PROMPTS[1][:11]]
PROVEN = pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", *PROVEN_STATE])
CACHES = pytest.mark.parametrize("cache", ["dynamic", "static"])


class Watched:
    """What goes into every forward pass of a model: the tokens' shape, and whether a mask does."""

    def __init__(self, of: Any) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.masked: list[bool] = []
        of.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _model: Any, arguments: Any, named: Any) -> None:
        self.shapes.append(tuple(arguments[0].shape))
        self.masked.append("attention_mask" in named or "position_ids" in named)


@PROVEN
@CACHES
def test_padding_never_changes_a_sequence(architecture: str, cache: str) -> None:
    running = session(model(architecture), cache=cache)
    alone = [generated(running, [prompt])[0] for prompt in UNEQUAL]
    assert generated(running, UNEQUAL) == alone
    assert generated(running, UNEQUAL[::-1], chunk_tokens=5) == alone[::-1]


@PROVEN
@CACHES
@pytest.mark.parametrize("chunk_tokens", [1, 5, 11, 12, 100])
def test_a_prompt_in_chunks_gives_the_tokens_of_the_whole(
    architecture: str, cache: str, chunk_tokens: int
) -> None:
    loaded = model(architecture)
    running = session(loaded, cache=cache)
    expected = generated(running, PROMPTS)
    watched = Watched(loaded)
    assert generated(running, PROMPTS, chunk_tokens=chunk_tokens) == expected
    pieces = [shape[1] for shape in watched.shapes[: -NEW_TOKENS + 1]]
    assert sum(pieces) == len(PROMPTS[0])
    assert max(pieces) == min(chunk_tokens, len(PROMPTS[0]))
    assert not any(watched.masked)


def test_prompts_of_one_length_go_through_whole_and_without_a_mask() -> None:
    loaded = model("llama")
    running, watched = session(loaded), Watched(loaded)
    generated(running, UNEQUAL, new_tokens=3)
    assert watched.masked == [True] * 3
    generated(running, PROMPTS, new_tokens=3)
    assert watched.masked[3:] == [False] * 3
    assert watched.shapes[3:] == [(2, 12), (2, 1), (2, 1)]


@pytest.mark.parametrize(
    ("architecture", "prompts", "chunk_tokens"),
    [("bamba", UNEQUAL, None), ("bamba", PROMPTS, 5), ("qwen3_next", UNEQUAL, 1)],
)
def test_a_state_that_padding_or_chunks_would_change_is_refused(
    architecture: str, prompts: Any, chunk_tokens: int | None
) -> None:
    running = session(model(architecture))
    with pytest.raises(StageError, match=rf"'{architecture}' keeps recurrent state.*of one length, whole"):
        running.prefill(prompts, new_tokens=3, chunk_tokens=chunk_tokens)
    assert len(generated(running, PROMPTS)) == 2


# --- from a folder ---------------------------------------------------------------------------------------


def opened(folder: Path, **fields: Any) -> Any:
    quantizer = Native(dtype="fp16")
    return Transformers.model_validate(fields).open(folder, quantizer=quantizer, device="cpu")


@pytest.mark.filterwarnings("ignore:.*generation flags are not valid:UserWarning")
def test_a_shipped_sampling_configuration_does_not_change_the_tokens(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "plain", initializer_range=0.5)
    expected = generated(opened(folder), PROMPTS)
    for settings in (
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": True, "temperature": 5.0, "top_k": 3, "repetition_penalty": 9.0},
        {"eos_token_id": expected[0][1], "min_new_tokens": 3, "max_length": 4},
    ):
        (folder / "generation_config.json").write_text(json.dumps(settings), "utf-8")
        running = opened(folder)
        assert generated(running, PROMPTS) == expected
        assert generated(running, PROMPTS) == expected


def test_the_arithmetic_is_that_of_the_file_unless_the_recipe_says_else(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "tiny")
    running = opened(folder)
    assert running.compute_dtype == "float16"
    assert running.execution == "eager, dynamic cache, sdpa attention"
    wide = opened(folder, compute_dtype="float32", cache="static")
    assert wide.compute_dtype == "float32"
    assert next(wide.model.parameters()).dtype.itemsize == 4
    assert wide.execution == "eager, static cache, sdpa attention"


def test_prompts_never_hold_ids_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "padded", vocab_size=320, tokenizer_tokens=300)
    running = opened(folder)
    assert running.vocabulary_tokens == 300
    prompts = random_prompts(
        batch_size=4, prompt_tokens=100, vocabulary_tokens=running.vocabulary_tokens, seed=1
    )
    assert max(token for prompt in prompts for token in prompt) < 300
    running.prefill(prompts, new_tokens=2)
    running.model.get_output_embeddings().weight.data[310] = 100.0  # may be produced, beyond the tokenizer
    assert isinstance(running.prefill([[310, 319]], new_tokens=2)[0], int)


def test_prompts_never_hold_ids_that_the_embedding_does_not_have(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "narrow", vocab_size=300)
    write_tokenizer(folder, tokens=310)
    assert opened(folder).vocabulary_tokens == 300


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_logits_that_are_not_finite_are_refused(value: str) -> None:
    loaded = model("llama")
    loaded.model.norm.weight.data[3] = float(value)
    with pytest.raises(StageError, match="not finite"):
        session(loaded).prefill(PROMPTS, new_tokens=2)


def test_logits_that_stop_being_finite_while_decoding_are_refused() -> None:
    loaded = model("llama")
    running = session(loaded)
    running.prefill(PROMPTS, new_tokens=4)
    running.decode_step()
    loaded.model.norm.weight.data[3] = float("nan")
    with pytest.raises(StageError, match="not finite"):
        running.decode_step()


class Scattered(Quantizer):
    """Loads a model of which one tensor lies on another device, as an automatic placement leaves it."""

    kind: str = "scattered"

    @property
    def precision(self) -> str:
        return "fp16"

    @classmethod
    def default_for(cls, precision: str, *, device: str) -> None:
        del precision, device

    def check(self, *, device: str) -> tuple[Problem, ...]:
        del device
        return ()

    def quantize(
        self, source_folder: Path, out: Path, *, device: str, progress: Tell = silent
    ) -> tuple[str, ...]:
        del source_folder, out, device, progress
        return ()

    def outline(self, model: Any, *, compute_dtype: str) -> None:
        del model, compute_dtype

    def load_stored(self, folder: Path, *, device: str, compute_dtype: str) -> Any:
        del folder, device, compute_dtype
        import torch

        loaded = model("llama")
        norm = loaded.model.norm
        norm.weight = torch.nn.Parameter(torch.empty(64, device="meta"), requires_grad=False)
        return loaded

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        return StoredBytes(packed=2 * out_features * in_features)

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:
        return StoredBytes(packed=float_bytes * out_features * in_features)

    @property
    def other_bytes_per_weight(self) -> float:
        return 2.0

    def stored_weights(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[StoredWeight, ...]:
        del tensors
        return ()


def test_a_model_of_which_a_part_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "tiny")
    with pytest.raises(StageError, match=r"placed on meta instead of cpu: offloaded"):
        Transformers().open(folder, quantizer=Scattered(), device="cpu")


def test_a_folder_without_all_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_llama(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        opened(folder)


def test_what_the_engine_needs_is_installed_here() -> None:
    assert Transformers().check(device="cpu") == ()


@pytest.mark.gpu
def test_on_a_gpu_tokens_peak_and_reserve_are_those_of_the_device(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("NO CUDA DEVICE HERE: the engine's CUDA path was NOT tested")
    folder = write_llama(tmp_path / "tiny", initializer_range=0.5)
    on_gpu = Transformers(compute_dtype="float32").open(folder, quantizer=Native(dtype="fp16"), device="cuda")
    on_gpu.reset_peak()
    expected = generated(opened(folder, compute_dtype="float32"), PROMPTS)
    assert generated(on_gpu, PROMPTS) == expected
    on_gpu.synchronize()
    memory = on_gpu.memory()
    assert memory.reserved_bytes is not None
    assert memory.weight_bytes_resident <= memory.peak_bytes <= memory.reserved_bytes
    on_gpu.release()
    assert on_gpu.memory().kv_cache_bytes is None
