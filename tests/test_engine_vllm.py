"""Engine `vllm` on a stand-in for vLLM's own calls: tokens, steps, cache, limits and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.device_runtime import CpuRuntime
from pipeline.energy import Unmetered
from pipeline.engines.base import ServingSession
from pipeline.engines.vllm import KNOWN_SERIES, Vllm
from pipeline.errors import StageError
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.gguf import Gguf
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.quantizers.torchao import Torchao
from pipeline.random_weights import write_random_variant
from pipeline.scheduler import Serving
from pipeline.serving_measure import serve_continuously
from pipeline.speed_results import SpeedShape
from pipeline.stages import take_turn
from pipeline.traffic import Request
from pipeline.vllm_session import VllmServing, VllmSession
from tests.model_configs import TINY_LLAMA
from tests.scripted_vllm import LAYER_BLOCK_BYTES, LAYERS, VOCABULARY, WEIGHT_BYTES, LLMEngine, library

BLOCK_BYTES = LAYERS * LAYER_BLOCK_BYTES
PROMPTS = [[5, 9, 33], [7, 8, 9, 10, 20], [40]]
LIMITS = Serving(max_batch_tokens=8, max_sequences=4, block_tokens=4, cache_blocks=64)


def expected(prompt: list[int], new_tokens: int) -> list[int]:
    """The stand-in's model, without any schedule: each token is the sum of all before it."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(sum(tokens) % VOCABULARY)
    return tokens[len(prompt) :]


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return path


def opened(path: Path, *, started: list[LLMEngine] | None = None, **made: Any) -> VllmSession:
    fields = {name: made.pop(name) for name in ("max_batch_tokens", "max_sequences") if name in made}
    return Vllm.model_validate(fields).start(
        library(started=started, **made),
        folder(path),
        quantizer=Native(dtype="bf16"),
        runtime=CpuRuntime(),
    )


def generated(session: VllmSession, prompts: list[list[int]], *, new_tokens: int = 6, **named: Any) -> Any:
    steps = [session.prefill(prompts, new_tokens=new_tokens, **named)]
    steps += [session.decode_step() for _ in range(new_tokens - 1)]
    return [list(sequence) for sequence in zip(*steps, strict=True)]


# --- static batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "chunk_tokens"), [(64, None), (9, None), (5, None), (64, 1), (64, 3)])
def test_tokens_do_not_depend_on_how_prompts_are_cut(
    tmp_path: Path, budget: int, chunk_tokens: int | None
) -> None:
    session = opened(tmp_path / "c", max_batch_tokens=budget)
    wanted = [expected(prompt, 6) for prompt in PROMPTS]
    for _ in range(2):
        assert generated(session, PROMPTS, chunk_tokens=chunk_tokens) == wanted
    assert generated(session, PROMPTS[:1]) == wanted[:1]


@pytest.mark.parametrize("budget", [64, 5])
def test_every_decode_step_computes_one_token_of_every_sequence(tmp_path: Path, budget: int) -> None:
    computed: list[int] = []
    session = opened(tmp_path / "c", max_batch_tokens=budget, on_step=computed.append)
    session.prefill(PROMPTS, new_tokens=6)
    prefill_steps = len(computed)
    for _ in range(5):
        session.decode_step()
    assert computed[prefill_steps:] == [3] * 5, "also the last one, of sequences that were ahead"


def test_a_batch_is_timed_like_any_engine_s(tmp_path: Path) -> None:
    ticks = itertools.count()
    shape = SpeedShape(batch_size=2, prompt_tokens=8, new_tokens=5)
    turn = take_turn(
        opened(tmp_path / "c"), shape=shape, seed=1, clock=lambda: float(next(ticks)), meter=Unmetered("none")
    )
    assert turn.trace is not None
    assert (turn.trace.produced_tokens, turn.trace.token_times_s) == (10, (1.0, 2.0, 3.0, 4.0, 5.0))


def test_the_cache_counts_what_sequences_hold_and_the_peak_forgets_the_rest_of_the_pool(
    tmp_path: Path,
) -> None:
    session = opened(tmp_path / "c")
    assert session.memory().weight_bytes_resident == WEIGHT_BYTES
    assert session.memory().kv_cache_bytes is None
    generated(session, [[1] * 8, [2] * 8], new_tokens=3)  # 10 tokens each are in the cache, in 3 blocks of 4
    memory = session.memory()
    assert memory.kv_cache_bytes == 2 * 3 * BLOCK_BYTES
    session.release()
    assert session.memory().kv_cache_bytes is None
    held = session.engine.most_held_blocks
    assert (held, session.engine.held_blocks) == (0, 0)


def test_a_batch_that_does_not_fit_into_the_cache_is_out_of_memory(tmp_path: Path) -> None:
    session = opened(tmp_path / "c", num_blocks=7)  # six blocks of four tokens
    assert len(generated(session, [[1] * 8, [2] * 8], new_tokens=4)) == 2
    for prompts in ([[1] * 8, [2] * 8, [3] * 8, [4] * 8], [[1] * 8, [2] * 8, [3] * 6]):
        with pytest.raises(
            MemoryError, match=r"sequences don't fit into vLLM's cache of 6 blocks of 4 tokens"
        ):
            generated(session, prompts, new_tokens=8)
    assert len(generated(session, [[1] * 8], new_tokens=4)) == 1, "the next batch runs"


def test_batches_beyond_what_vllm_was_started_for_are_refused(tmp_path: Path) -> None:
    session = opened(tmp_path / "c", max_sequences=2)
    with pytest.raises(
        StageError, match=r"a batch of 3: .*started for 2 sequences; raise engine.max_sequences"
    ):
        session.prefill(PROMPTS, new_tokens=2)
    session = opened(tmp_path / "d", max_batch_tokens=2)
    with pytest.raises(StageError, match=r"no room for prompts in steps of 2 tokens; raise engine.max_batch"):
        session.prefill(PROMPTS, new_tokens=2)


def test_two_tokens_in_one_step_are_not_taken_for_one(tmp_path: Path) -> None:
    started: list[LLMEngine] = []
    session = opened(tmp_path / "c", started=started)
    started[0].gives_two_tokens = True
    with pytest.raises(StageError, match="2 tokens in one step"):
        session.prefill([[1, 2]], new_tokens=2)


@pytest.mark.parametrize("tokens", [[11], [3, 4], [1, 2, 3, 4, 5, 6, 7]])
def test_logits_stand_in_the_order_of_the_tokens(tmp_path: Path, tokens: list[int]) -> None:
    session = opened(tmp_path / "c", max_batch_tokens=8)
    with pytest.raises(StageError, match=r"raise engine\.max_batch_tokens"):
        session.logits([1] * 9)
    found = session.logits(tokens)
    assert found.shape == (len(tokens), VOCABULARY)
    assert found.argmax(axis=1).tolist() == [total % VOCABULARY for total in itertools.accumulate(tokens)]


# --- continuous batching ---------------------------------------------------------------------------------


def answers(serving: ServingSession) -> list[list[int]]:
    assert isinstance(serving, VllmServing)
    return [list(serving.answers[number]) for number in sorted(serving.answers)]


def serve(serving: ServingSession, prompts: list[list[int]], *, new_tokens: int) -> list[Any]:
    for number, prompt in enumerate(prompts):
        serving.submit(number, prompt, new_tokens=new_tokens)
    steps = []
    while (step := serving.step()) is not None:
        steps.append(step)
    return steps


def test_served_requests_get_the_tokens_of_static_batches_and_every_step_is_counted(tmp_path: Path) -> None:
    session = opened(tmp_path / "c")
    with session.serving(LIMITS, share_prefixes=False) as serving:
        steps = serve(serving, PROMPTS, new_tokens=4)
        assert answers(serving) == [expected(prompt, 4) for prompt in PROMPTS]
    assert sum(step.prefill_tokens for step in steps) == 9
    assert sum(step.decode_sequences for step in steps) == 3 * 3
    assert [step.started for step in steps[:2]] == [(0, 1), (2,)], "eight tokens a step"
    assert [number for step in steps for number in step.produced].count(1) == 4
    assert steps[0].pairs == 3 * 4 // 2 + 5 * 6 // 2
    assert steps[1].cached_tokens == 3 + 5
    assert sum(step.preempted for step in steps) == 0
    assert generated(session, PROMPTS) == [expected(prompt, 6) for prompt in PROMPTS]


def test_limits_of_a_load_hold_and_end_with_it(tmp_path: Path) -> None:
    computed: list[int] = []
    session = opened(tmp_path / "c", on_step=computed.append)
    limits = LIMITS.model_copy(update={"max_sequences": 1, "max_batch_tokens": 4})
    with session.serving(limits, share_prefixes=False) as serving:
        steps = serve(serving, PROMPTS, new_tokens=2)
    assert max(computed) <= 4
    assert {len(step.produced) for step in steps} <= {0, 1}
    computed.clear()
    session.prefill(PROMPTS, new_tokens=2)
    assert computed == [9]


def test_a_sequence_that_gave_its_blocks_back_is_counted_when_it_comes_again(tmp_path: Path) -> None:
    session = opened(tmp_path / "c", num_blocks=6)
    limits = LIMITS.model_copy(update={"cache_blocks": 5})
    with session.serving(limits, share_prefixes=False) as serving:
        steps = serve(serving, [[1] * 7, [2] * 7], new_tokens=8)
        assert answers(serving) == [expected([1] * 7, 8), expected([2] * 7, 8)]
    assert sum(step.preempted for step in steps) > 0
    assert sum(step.prefill_tokens for step in steps) > 14, "what was lost is computed again"


def test_a_served_load_is_complete_under_the_serving_clock(tmp_path: Path) -> None:
    ticks = itertools.count()
    requests = [Request(0.0, len(prompt), 3) for prompt in PROMPTS]
    with opened(tmp_path / "c").serving(LIMITS, share_prefixes=False) as serving:
        trace = serve_continuously(
            serving, requests, prompts=PROMPTS, concurrency=2, clock=lambda: float(next(ticks))
        )
        memory = serving.memory()
    assert all(request.finished for request in trace.requests)
    assert trace.output_tokens == 9
    assert memory.kv_cache_bytes == 64 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"max_sequences": 300, "max_batch_tokens": 300},
            StageError,
            r"max_sequences 300: .* raise engine.max_seq",
        ),
        (
            {"max_batch_tokens": 9000},
            StageError,
            r"max_batch_tokens 9000: .* 8192; raise engine.max_batch_tokens",
        ),
        ({"cache_blocks": 65}, MemoryError, r"a cache of 260 tokens: vLLM's has room for 256"),
    ],
)
def test_limits_beyond_the_engine_s_are_refused(
    tmp_path: Path, change: dict[str, int], error: type[Exception], says: str
) -> None:
    session = opened(tmp_path / "c")
    with pytest.raises(error, match=says):
        session.serving(LIMITS.model_copy(update=change), share_prefixes=False)


def test_prefixes_are_never_shared(tmp_path: Path) -> None:
    session = opened(tmp_path / "c")
    with pytest.raises(StageError, match="without prefix caching"):
        session.serving(LIMITS, share_prefixes=True)
    with (
        session.serving(LIMITS, share_prefixes=False) as serving,
        pytest.raises(StageError, match="never fits"),
    ):
        serving.submit(0, [1] * 250, new_tokens=20)


# --- the engine ------------------------------------------------------------------------------------------


def test_it_is_started_for_timing(tmp_path: Path) -> None:
    started: list[LLMEngine] = []
    session = opened(tmp_path / "c", started=started, max_batch_tokens=64)
    arguments = started[0].arguments
    assert (arguments.enable_prefix_caching, arguments.async_scheduling) == (False, False)
    assert (arguments.dtype, arguments.load_format, arguments.max_num_batched_tokens) == (
        "bfloat16",
        "auto",
        64,
    )
    assert session.vocabulary_tokens == VOCABULARY
    assert "no step scheduled ahead" in session.execution


def test_random_weights_are_vllm_s_own_and_only_plain_ones(tmp_path: Path) -> None:
    out = tmp_path / "random"
    out.mkdir()
    started: list[LLMEngine] = []
    write_random_variant(TINY_LLAMA, out=out, seed=0, quantizer=Native(dtype="bf16"))
    made = library(started=started)
    Vllm().start(made, out, quantizer=Native(dtype="bf16"), runtime=CpuRuntime())
    assert started[0].arguments.load_format == "dummy"
    with pytest.raises(StageError, match="random weights of torchao"):
        Vllm().start(made, out, quantizer=Torchao(weights="int8"), runtime=CpuRuntime())


def test_logits_that_are_not_finite_are_found_when_it_opens(tmp_path: Path) -> None:
    made = library()
    build: Callable[..., Any] = made.build

    def broken(arguments: Any) -> LLMEngine:
        engine: LLMEngine = build(arguments)
        compute = engine.model.compute_logits
        engine.model.compute_logits = lambda sums: compute(sums) / 0.0  # type: ignore[method-assign]
        return engine

    nan = type(made)(**{**vars(made), "build": broken})
    with pytest.raises(StageError, match="not finite"):
        Vllm().start(nan, folder(tmp_path / "c"), quantizer=Native(dtype="bf16"), runtime=CpuRuntime())


def test_a_device_that_it_can_not_use_is_told_before_anything_is_imported(tmp_path: Path) -> None:
    (problem,) = Vllm().check(device="cpu")
    assert problem.what == "engine vllm runs on CUDA devices only, not on 'cpu'"
    with pytest.raises(StageError, match="CUDA devices only"):
        Vllm().open(folder(tmp_path / "c"), quantizer=Native(dtype="bf16"), device="cpu")
    for missing in Vllm().check(device="cuda"):
        assert missing.fix == f"pip install 'vllm=={KNOWN_SERIES}.*'"


def test_it_says_what_it_reads_and_what_it_does_not() -> None:
    for quantizer in (Native(dtype="fp16"), Torchao(weights="fp8"), Bitsandbytes(type="nf4")):
        assert Vllm().refuses(quantizer) is None
    assert "use engine transformers" in (Vllm().refuses(Quanto(weights="int8")) or "")
    assert "use engine llama_cpp" in (Vllm().refuses(Gguf(type="q8_0")) or "")
    assert Vllm().needs(Native(dtype="bf16")) == ()
    for problem in Vllm().needs(Bitsandbytes(type="nf4")):
        assert problem.fix == "pip install vllm-bnb-plugin"
