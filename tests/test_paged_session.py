"""Continuous batching with the library's paged cache, against the static batch of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline.engines.base import ServedStep
from pipeline.engines.transformers import Transformers, TransformersSession
from pipeline.errors import StageError
from pipeline.measure import random_prompts
from pipeline.paged_session import PagedSession
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.native import Native
from pipeline.scheduler import Serving
from tests.quantizer_samples import EVERY, Written, name_of
from tests.test_engine_transformers import generated, model, session
from tests.tiny_models import write_llama

NEW_TOKENS = 12
LIMITS = Serving(max_batch_tokens=16, max_sequences=4, block_tokens=4, cache_blocks=64)
LENGTHS = (12, 1, 30, 5, 17, 8)
"""More prompts than sequences at once, some longer than a step's tokens."""


def prompts(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[list[int]]:
    return [
        random_prompts(batch_size=1, prompt_tokens=length, vocabulary_tokens=300, seed=seed + place)[0]
        for place, length in enumerate(lengths)
    ]


def alone(running: TransformersSession, asked: Sequence[list[int]]) -> dict[int, tuple[int, ...]]:
    """What the static session says to each prompt by itself."""
    return {
        place: tuple(generated(running, [prompt], new_tokens=NEW_TOKENS)[0])
        for place, prompt in enumerate(asked)
    }


def drained(serving: PagedSession) -> list[ServedStep]:
    steps = []
    while (step := serving.step()) is not None:
        steps.append(step)
    return steps


def served(
    serving: PagedSession, asked: Sequence[list[int]], *, new_tokens: int = NEW_TOKENS
) -> list[ServedStep]:
    for place, prompt in enumerate(asked):
        serving.submit(place, prompt, new_tokens=new_tokens)
    return drained(serving)


# --- tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("share_prefixes", [False, True])
def test_every_request_gets_the_tokens_that_it_gets_alone_in_a_static_batch(
    architecture: str, share_prefixes: bool
) -> None:
    running = session(model(architecture))
    expected = alone(running, prompts())
    with running.serving(LIMITS, share_prefixes=share_prefixes) as serving:
        served(serving, prompts())
        assert serving.answers == expected
    assert alone(running, prompts()) == expected, "the model is given back as it was"


def test_requests_join_and_leave_between_any_two_steps() -> None:
    running = session(model("llama"))
    expected = alone(running, prompts())
    with running.serving(LIMITS, share_prefixes=False) as serving:
        for place, prompt in enumerate(prompts()):
            serving.submit(place, prompt, new_tokens=NEW_TOKENS)
            serving.step()
        drained(serving)
        assert serving.answers == expected


def test_eager_attention_serves_and_comes_back() -> None:
    loaded = model("llama")
    loaded.set_attn_implementation("eager")
    running = session(loaded)
    expected = alone(running, prompts())
    with running.serving(LIMITS, share_prefixes=False) as serving:
        assert (
            serving.execution == "eager, paged cache, eager attention over gathered pages, no shared prefixes"
        )
        served(serving, prompts())
        assert serving.answers == expected
    assert loaded.config._attn_implementation == "eager"
    assert alone(running, prompts()) == expected


def test_no_end_of_sequence_token_ends_a_request() -> None:
    loaded = model("llama")
    running = session(loaded)
    expected = alone(running, prompts([9]))
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id = expected[0][3]
    with running.serving(LIMITS, share_prefixes=False) as serving:
        served(serving, prompts([9]))
        assert serving.answers == expected


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("paged")
    return Written(write_llama(folder / "source", dtype="float32", initializer_range=0.5), folder)


@pytest.mark.parametrize("quantizer", EVERY, ids=name_of)
def test_quantized_models_are_served_like_any_other(written: Written, quantizer: Quantizer) -> None:
    running = Transformers(compute_dtype="float32").open(
        written(quantizer), quantizer=quantizer, device="cpu"
    )
    expected = alone(running, prompts())
    limits = LIMITS
    if isinstance(quantizer, Bitsandbytes) and quantizer.type == "int8":
        # LLM.int8 keeps whole columns in 16 bit when any token of the step has an outlier there.
        limits = LIMITS.model_copy(update={"max_sequences": 1, "max_batch_tokens": max(LENGTHS)})
    with running.serving(limits, share_prefixes=False) as serving:
        served(serving, prompts())
        assert serving.answers == expected


def test_half_precision_is_served_at_its_own_arithmetic(written: Written) -> None:
    """Tokens may differ from the static batch's where two logits round to the same number."""
    bf16 = Native(dtype="bf16")
    running = Transformers().open(written(bf16), quantizer=bf16, device="cpu")
    expected = alone(running, prompts())
    with running.serving(LIMITS, share_prefixes=False) as serving:
        served(serving, prompts())
        pool = serving.memory().kv_cache_bytes
        assert {place: answer[0] for place, answer in serving.answers.items()} == {
            place: answer[0] for place, answer in expected.items()
        }
    with session(model("llama")).serving(LIMITS, share_prefixes=False) as wide:
        assert wide.memory().kv_cache_bytes == 2 * (pool or 0)


# --- steps -----------------------------------------------------------------------------------------------


def test_each_step_says_what_it_computed() -> None:
    """Prompts of 10 and 9 tokens, 16 a step: the second one goes through in two pieces."""
    with session(model("llama")).serving(LIMITS, share_prefixes=False) as serving:
        steps = served(serving, prompts([10, 9]), new_tokens=3)
    assert steps == [
        ServedStep((0,), 16, 0, 0, 55 + 21, 0, (0, 1)),
        ServedStep((0, 1), 3, 1, 10 + 6, 11 + (18 + 6), 0, ()),
        ServedStep((0, 1), 0, 2, 11 + 9, 12 + 10, 0, ()),
        ServedStep((1,), 0, 1, 10, 11, 0, ()),
    ]


def test_every_token_asked_for_is_produced_once() -> None:
    with session(model("llama")).serving(LIMITS, share_prefixes=False) as serving:
        steps = served(serving, prompts())
    produced = [request for step in steps for request in step.produced]
    assert {request: produced.count(request) for request in produced} == dict.fromkeys(
        range(len(LENGTHS)), NEW_TOKENS
    )
    assert all(len(set(step.produced)) == len(step.produced) for step in steps)
    assert sorted(request for step in steps for request in step.started) == list(range(len(LENGTHS)))
    assert sum(step.prefill_tokens for step in steps) == sum(LENGTHS)


def test_a_small_cache_preempts_and_computes_again_without_changing_a_token() -> None:
    small = LIMITS.model_copy(update={"cache_blocks": 14})
    running = session(model("llama"))
    expected = alone(running, prompts())
    with running.serving(small, share_prefixes=False) as serving:
        steps = served(serving, prompts())
        assert serving.answers == expected
    assert sum(step.preempted for step in steps) > 0
    assert sum(step.prefill_tokens for step in steps) > sum(LENGTHS)
    produced = [request for step in steps for request in step.produced]
    assert len(produced) == NEW_TOKENS * len(LENGTHS)
    assert sorted(request for step in steps for request in step.started) == list(range(len(LENGTHS)))


def test_a_shared_prefix_is_computed_once_and_forgotten_on_demand() -> None:
    prefix = prompts([32])[0]
    first, second = ([*prefix, *rest] for rest in prompts([5, 7], seed=50))
    limits = LIMITS.model_copy(update={"max_batch_tokens": 64})
    running = session(model("llama"))
    expected = alone(running, [first, second])
    with running.serving(limits, share_prefixes=True) as serving:

        def computed(request: int, prompt: list[int]) -> int:
            serving.submit(request, prompt, new_tokens=NEW_TOKENS)
            return sum(step.prefill_tokens for step in drained(serving))

        assert (computed(0, first), computed(1, second)) == (37, 7)
        assert serving.answers == expected
        serving.forget()
        assert serving.answers == {}
        assert (computed(1, second), computed(0, first)) == (39, 5)
        assert serving.answers == expected
    with running.serving(limits, share_prefixes=False) as serving:
        assert (computed(0, first), computed(1, second)) == (37, 39)


def test_forgetting_drops_what_waits_and_what_runs() -> None:
    running = session(model("llama"))
    expected = alone(running, prompts())
    with running.serving(LIMITS, share_prefixes=True) as serving:
        for place, prompt in enumerate(prompts(seed=90)):
            serving.submit(place, prompt, new_tokens=NEW_TOKENS)
        serving.step()
        serving.submit(99, [1, 2, 3], new_tokens=NEW_TOKENS)
        serving.forget()
        assert serving.step() is None
        served(serving, prompts())
        assert serving.answers == expected


# --- memory ----------------------------------------------------------------------------------------------


def test_the_pool_holds_its_blocks_and_two_of_scratch_until_it_is_closed() -> None:
    running = session(model("llama"))
    block_bytes = 4 * 2 * (2 * 16) * 4
    serving = running.serving(LIMITS, share_prefixes=False)
    assert serving.memory().kv_cache_bytes == (64 + 2) * block_bytes
    assert serving.memory().weight_bytes_resident == running.memory().weight_bytes_resident
    serving.close()
    assert serving.memory().kv_cache_bytes is None
    serving.close()
    assert generated(running, prompts([4]), new_tokens=2)


def test_a_pool_that_never_fits_is_out_of_memory() -> None:
    running = session(model("llama"))
    huge = LIMITS.model_copy(update={"cache_blocks": 10**12})
    with pytest.raises(MemoryError, match="Memory footprint"):
        running.serving(huge, share_prefixes=False)
    assert generated(running, prompts([4]), new_tokens=2)


# --- refusals --------------------------------------------------------------------------------------------


def test_a_model_whose_cache_cannot_be_paged_is_refused_and_still_runs() -> None:
    running = session(model("qwen3_5_text"))
    with pytest.raises(StageError, match=r"can't page the cache of a 'qwen3_5_text' model.*linear_attention"):
        running.serving(LIMITS, share_prefixes=False)
    assert generated(running, prompts([4]), new_tokens=2)


def test_a_model_that_does_not_know_the_paged_cache_is_refused() -> None:
    import torch
    from transformers import AutoModelForCausalLM, FalconConfig

    with torch.random.fork_rng(devices=[]):
        falcon = AutoModelForCausalLM.from_config(
            FalconConfig(vocab_size=300, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        )
    with pytest.raises(StageError, match="can't page the cache of a 'falcon' model"):
        session(falcon.eval()).serving(LIMITS, share_prefixes=False)


def test_blocks_smaller_than_the_library_allows_are_refused() -> None:
    tiny = LIMITS.model_copy(update={"block_tokens": 2})
    with pytest.raises(StageError, match="page_size must be at least 4"):
        session(model("llama")).serving(tiny, share_prefixes=False)


def test_a_request_that_could_never_end_is_refused_when_it_comes() -> None:
    with session(model("llama")).serving(LIMITS, share_prefixes=False) as serving:
        serving.submit(0, [1] * 200, new_tokens=57)
        with pytest.raises(StageError, match=r"request 1 of 200 \+ 58 tokens never fits.*64 blocks of 4"):
            serving.submit(1, [1] * 200, new_tokens=58)


def test_logits_that_stop_being_finite_are_refused() -> None:
    loaded = model("llama")
    with session(loaded).serving(LIMITS, share_prefixes=False) as serving:
        serving.submit(0, [1, 2, 3], new_tokens=9)
        assert serving.step() is not None
        loaded.model.norm.weight.data[3] = float("nan")
        with pytest.raises(StageError, match="not finite"):
            serving.step()


def test_what_the_library_only_notes_down_is_raised() -> None:
    """It fails a request whose settings it doesn't know, and says so in its output alone."""
    with session(model("llama")).serving(LIMITS, share_prefixes=False) as serving:
        serving.submit(0, [1, 2, 3], new_tokens=9)
        serving._manager.input_queue.queue[0].logit_processor_kwargs["no_such_setting"] = 1
        with pytest.raises(StageError, match=r"request 0 failed: .*no_such_setting"):
            serving.step()


def test_a_cache_that_is_full_for_good_is_out_of_memory() -> None:
    with session(model("llama")).serving(LIMITS, share_prefixes=False) as serving:
        serving.submit(0, [1] * 200, new_tokens=9)
        serving._manager.input_queue.queue[0].remaining_prefill_tokens.extend([1] * 200)
        with pytest.raises(MemoryError, match="no sequence can give way"):
            drained(serving)


# --- what is relied on -----------------------------------------------------------------------------------


def test_the_library_still_has_what_is_used_of_its_inside() -> None:
    """Not part of its public interface: a new version may move any of it."""
    running = session(model("llama"))
    with running.serving(LIMITS, share_prefixes=True) as serving:
        manager, processor = serving._manager, serving._processor
        serving.submit(0, [1, 2, 3], new_tokens=2)
        serving.step()
        (entry,) = processor.inputs_and_outputs.requests_in_batch
        used = {
            manager: ("_create_batch_processor", "add_request", "destroy", "input_queue", "output_router"),
            manager.output_router: ("output_queue",),
            processor: ("prepare_next_batch", "_generation_step", "update_batch", "reset", "cache"),
            processor.inputs_and_outputs: ("requests_in_batch",),
            processor.cache: ("cache_tensor", "use_prefix_sharing", "reset"),
            entry: ("state", "query_length", "has_new_token"),
        }
        state = ("request_id", "position_offset", "initial_tokens")
        missing = [
            f"{type(one).__name__}.{name}"
            for one, names in [*used.items(), (entry.state, state)]
            for name in names
            if not hasattr(one, name)
        ]
        assert not missing, f"transformers {version('transformers')} has moved {', '.join(missing)}"
        assert manager.continuous_batching_config.use_async_batching is False
        assert manager._generation_thread is None, "steps are taken here, not in a thread of the library"
        assert (entry.query_length, entry.state.position_offset, entry.has_new_token) == (3, 3, True)


MODEL = Path(__file__).resolve().parent.parent / ".assets" / "models" / "smollm2-135m-instruct"


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="the demo's model is not here: run `make assets`")
def test_a_real_model_says_the_same_in_continuous_and_static_batches() -> None:
    stored = Native(dtype="fp16")
    running = Transformers(compute_dtype="float32").open(MODEL, quantizer=stored, device="cpu")
    expected = alone(running, prompts())
    limits = Serving(max_batch_tokens=32, max_sequences=4, block_tokens=16, cache_blocks=16)
    with running.serving(limits, share_prefixes=True) as serving:
        served(serving, prompts())
        assert serving.answers == expected
    assert alone(running, prompts()) == expected
