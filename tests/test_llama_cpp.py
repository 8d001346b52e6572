"""llama.cpp's steps against transformers' on the same weights, its bytes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.capacity_probe import CapacityRequest
from pipeline.capacity_stage import measure_capacity
from pipeline.engines.llama_cpp import LlamaCpp, LlamaCppSession
from pipeline.engines.transformers import TransformersSession
from pipeline.errors import CheckpointError, StageError
from pipeline.footprint import kv_bytes, shape_facts
from pipeline.llama_library import KNOWN_VERSION, load_library
from pipeline.process_memory import private_bytes_now, private_memory_limit
from pipeline.quantizers.gguf import Gguf
from pipeline.quantizers.native import Native
from pipeline.speed_results import SpeedShape
from pipeline.stages import QualityStageRequest, RunnableCheckpoint, SpeedRequest, SpeedSession, quality
from tests.gguf_samples import llama as gguf_source
from tests.quality_tasks import CHOICES, questions, request_for, write_task
from tests.tiny_gguf import llama, needs_llama_cpp, write_gguf

pytestmark = needs_llama_cpp
NEW_TOKENS = 20
PROMPTS = [
    [5, 9, 33, 77, 2, 6, 100, 40, 3, 11, 12, 13],
    [7, 8, 9, 10, 20, 30, 40, 50, 60, 70, 80, 90],
    [3, 1, 4, 1, 5],
]


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("f32"), model=model)


@pytest.fixture
def session(folder: Path) -> LlamaCppSession:
    return opened(folder)


def opened(folder: Path) -> LlamaCppSession:
    return LlamaCpp(threads=1).open(folder, quantizer=Gguf(type="f16"), device="cpu")


def generated(
    session: Any, prompts: Any, *, new_tokens: int = NEW_TOKENS, chunk_tokens: int | None = None
) -> list[list[int]]:
    """[sequence][new token]."""
    steps = [session.prefill(prompts, new_tokens=new_tokens, chunk_tokens=chunk_tokens)]
    steps += [session.decode_step() for _ in range(new_tokens - 1)]
    return [list(sequence) for sequence in zip(*steps, strict=True)]


def by_transformers(model: Any) -> TransformersSession:
    return TransformersSession(model, cache="dynamic", compute_dtype="float32", vocabulary_tokens=300)


def test_greedy_tokens_are_those_of_transformers_alone_and_in_a_batch(
    model: Any, session: LlamaCppSession
) -> None:
    expected = [generated(by_transformers(model), [prompt])[0] for prompt in PROMPTS]
    assert len({token for sequence in expected for token in sequence}) > 8
    assert [generated(session, [prompt])[0] for prompt in PROMPTS] == expected
    assert generated(session, PROMPTS) == expected


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 12, 100])
def test_a_prompt_in_chunks_gives_the_tokens_of_the_whole_one(
    session: LlamaCppSession, chunk_tokens: int
) -> None:
    assert generated(session, PROMPTS, chunk_tokens=chunk_tokens) == generated(session, PROMPTS)


def test_logits_of_all_positions_are_those_of_transformers(model: Any, session: LlamaCppSession) -> None:
    import numpy

    expected = by_transformers(model).logits(PROMPTS[0])
    found = session.logits(PROMPTS[0])
    assert found.shape == expected.shape
    # The cache rounds keys and values to 11 bits.
    assert numpy.abs(found - expected).max() < 0.005 * numpy.abs(expected).max()
    assert session.memory().kv_cache_bytes is None


def test_eight_bit_weights_change_logits_a_little_and_less_than_four_bit_ones(
    model: Any, session: LlamaCppSession, tmp_path: Path
) -> None:
    import numpy

    expected = session.logits(PROMPTS[0])
    spread = float(expected.std())
    off = {}
    for name in ("f16", "q8_0", "q4_0"):
        found = opened(write_gguf(tmp_path / name, model=model, type=name)).logits(PROMPTS[0])
        off[name] = float(numpy.sqrt(numpy.mean((found - expected) ** 2))) / spread
    assert off["f16"] < 0.005 < off["q8_0"] < 0.1 < off["q4_0"] < 1


@pytest.mark.parametrize("new_tokens", [4, 300])
def test_the_cache_has_the_predicted_bytes_in_whole_pieces_and_says_how_much_is_filled(
    model: Any, session: LlamaCppSession, new_tokens: int
) -> None:
    facts = shape_facts(model.config.to_dict())
    generated(session, PROMPTS[:2], new_tokens=new_tokens)
    memory = session.memory()
    reserved = LlamaCpp().cache_tokens(12 + new_tokens)
    assert reserved % 256 == 0
    assert memory.kv_cache_bytes == 2 * (kv_bytes(facts, reserved, element_bytes=2) or 0)
    # The last token isn't cached.
    assert memory.kv_bytes_filled == 2 * (kv_bytes(facts, 12 + new_tokens - 1, element_bytes=2) or 0)


def test_unequal_sequences_fill_what_each_of_them_holds(model: Any, session: LlamaCppSession) -> None:
    session.prefill(PROMPTS, new_tokens=2)
    facts = shape_facts(model.config.to_dict())
    assert session.memory().kv_bytes_filled == kv_bytes(facts, 12 + 12 + 5, element_bytes=2)


def test_a_released_batch_holds_no_cache_and_a_new_one_starts_afresh(session: LlamaCppSession) -> None:
    first = generated(session, PROMPTS[:1])
    generated(session, PROMPTS[1:])
    assert generated(session, PROMPTS[:1]) == first
    session.release()
    assert session.memory().kv_cache_bytes is None
    assert generated(session, PROMPTS[:1]) == first


def test_memory_of_a_shape_is_made_once_and_used_again(session: LlamaCppSession) -> None:
    generated(session, PROMPTS[:2])
    made = session._context
    generated(session, [PROMPTS[1], PROMPTS[0]])
    assert session._context is made
    generated(session, PROMPTS[:1])
    assert session._context is not made


def test_weights_are_counted_once_each(model: Any, session: LlamaCppSession) -> None:
    assert session.memory().weight_bytes_resident == 4 * sum(p.numel() for p in model.parameters())


def test_a_weight_that_is_not_a_number_ends_in_an_error(tmp_path: Path) -> None:
    broken = llama()
    broken.model.layers[0].mlp.up_proj.weight.data[3, 5] = float("nan")
    session = opened(write_gguf(tmp_path / "nan", model=broken))
    with pytest.raises(StageError, match="not finite"):
        session.prefill(PROMPTS, new_tokens=2)


def test_more_tokens_than_there_is_room_for_is_an_error_that_says_so(session: LlamaCppSession) -> None:
    with pytest.raises(StageError, match="256 a sequence"):
        generated(session, PROMPTS[:1], new_tokens=8) and [session.decode_step() for _ in range(256)]


def test_more_sequences_than_llama_cpp_holds_is_an_error_that_says_so(session: LlamaCppSession) -> None:
    with pytest.raises(StageError, match="at most 256 sequences"):
        session.prefill([[1, 2]] * 257, new_tokens=2)


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    generated(opened(folder), PROMPTS)
    assert capfd.readouterr() == ("", "")


def test_execution_says_what_ran(session: LlamaCppSession) -> None:
    assert KNOWN_VERSION in session.execution
    assert "1 thread(s)" in session.execution
    assert "F16 KV cache" in session.execution
    assert load_library().features() in session.execution


# --- what it refuses -------------------------------------------------------------------------------------


def test_only_gguf_checkpoints_run(folder: Path) -> None:
    assert LlamaCpp().refuses(Gguf(type="q8_0")) is None
    assert "use quantizer gguf" in (LlamaCpp().refuses(Native(dtype="fp16")) or "")
    with pytest.raises(StageError, match="GGUF"):
        LlamaCpp().open(folder, quantizer=Native(dtype="fp16"), device="cpu")


def test_a_missing_or_damaged_file_is_named_with_the_reason(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.gguf"):
        opened(tmp_path)
    (tmp_path / "model.gguf").write_bytes((folder / "model.gguf").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"model\.gguf: llama\.cpp can't load it: .+"):
        opened(tmp_path)


def test_a_gpu_is_refused_where_the_wheel_has_none() -> None:
    if load_library().functions.llama_supports_gpu_offload():
        pytest.skip("the installed wheel runs on GPUs")
    problems = LlamaCpp().check(device="cuda")
    assert len(problems) == 1
    assert "CPU only" in problems[0].what
    assert "github.com/xorbitsai/xllamacpp" in problems[0].fix


def test_more_threads_than_there_are_is_a_problem() -> None:
    assert LlamaCpp().check(device="cpu") == ()
    (problem,) = LlamaCpp(threads=100_000).check(device="cpu")
    assert "100000" in problem.what


# --- in the stages ---------------------------------------------------------------------------------------


@pytest.mark.skipif(private_bytes_now() is None, reason="this system tells no private memory")
def test_memory_that_is_refused_is_out_of_memory_and_the_session_lives_on(session: LlamaCppSession) -> None:
    expected = generated(session, PROMPTS)
    session.release()
    with (
        pytest.raises(MemoryError, match=r"failed to allocate|bad_alloc"),
        private_memory_limit((private_bytes_now() or 0) + 1_000_000),
    ):
        session.prefill([[1, 2, 3]] * 256, new_tokens=8_000)  # more than a heap has left over
    session.release()
    assert generated(session, PROMPTS) == expected


def runnable(folder: Path) -> RunnableCheckpoint:
    return RunnableCheckpoint(
        folder=str(folder), quantizer=Gguf(type="f16"), engine=LlamaCpp(threads=1), device="cpu"
    )


def test_a_turn_of_the_speed_stage_is_measured(folder: Path) -> None:
    worker = SpeedSession(SpeedRequest(checkpoint=runnable(folder)))
    result = worker.run(SpeedShape(batch_size=3, prompt_tokens=40, new_tokens=5), seed=1)
    assert result.because == ""
    assert result.trace is not None
    assert result.trace.produced == (3,) * 5
    assert result.memory is not None
    assert (result.memory.kv_bytes_filled or 0) < (result.memory.kv_cache_bytes or 0)


@pytest.mark.skipif(private_bytes_now() is None, reason="this system tells no private memory")
@pytest.mark.parametrize(("prompt_tokens", "sequences"), [(30, 8), (200, 10)])
def test_capacity_is_found_near_the_prediction(prompt_tokens: int, sequences: int, tmp_path: Path) -> None:
    """The smallest cache there is, deep enough to outweigh llama.cpp's books (some MB, and under 1 kB a token).

    Prompts of 200 tokens fill a piece of 512 at the third sequence: work buffers grow no further.
    """
    folder = write_gguf(tmp_path / "deep", model=llama(num_hidden_layers=32, num_key_value_heads=4))
    checkpoint = runnable(folder)
    predicted = checkpoint.engine.predicted_peak(folder, prompt_tokens=prompt_tokens, new_tokens=2)
    cache_bytes = 256 * 32 * 2 * 64 * 2
    assert predicted.bytes_per_sequence_between(sequences, sequences + 1) == pytest.approx(
        cache_bytes, rel=0.1
    )
    request = CapacityRequest(
        checkpoint=checkpoint,
        context_tokens=prompt_tokens + 2,
        new_tokens=2,
        budget_bytes=opened(folder).memory().weight_bytes_resident + predicted.bytes_at(sequences),
        budget_source="recipe",
        max_sequences=16,
        kv_bytes_per_sequence_predicted=cache_bytes,
    )
    result = measure_capacity(request, log=tmp_path / "log", progress=lambda _: None)
    assert result.kv_bytes_per_sequence == cache_bytes
    assert result.predicted_sequences == sequences
    assert result.limited_by == "memory"
    assert result.measured_sequences is not None
    assert abs(result.measured_sequences - sequences) <= 3
    assert result.peak_bytes_per_sequence is not None
    assert result.peak_bytes_per_sequence == pytest.approx(result.peak_bytes_per_sequence_predicted, rel=0.1)


def test_the_search_ends_at_the_most_sequences_that_llama_cpp_runs(folder: Path, tmp_path: Path) -> None:
    request = CapacityRequest(
        checkpoint=runnable(folder),
        context_tokens=4,
        new_tokens=2,
        budget_bytes=10**9,
        budget_source="recipe",
        max_sequences=1000,
        kv_bytes_per_sequence_predicted=None,
    )
    result = measure_capacity(request, log=tmp_path / "log", progress=lambda _: None)
    assert (result.measured_sequences, result.limited_by) == (256, "ceiling")
    assert result.because == "engine llama_cpp runs at most 256 sequences at once"


# --- quality ---------------------------------------------------------------------------------------------


def test_quality_is_scored_after_the_timed_engine_has_agreed_with_the_one_that_scores(tmp_path: Path) -> None:
    quantizer, out = Gguf(type="q8_0"), tmp_path / "out"
    out.mkdir()
    quantizer.quantize(gguf_source(tmp_path / "source", initializer_range=0.2), out, device="cpu")
    write_task(tmp_path, "quiz", CHOICES, questions(3))
    asked = QualityStageRequest(
        checkpoint=RunnableCheckpoint(
            folder=str(out), quantizer=quantizer, engine=LlamaCpp(threads=1), device="cpu"
        ),
        compute_dtype="float32",
        quality=request_for(tmp_path, "quiz"),
    )
    told: list[str] = []
    result = quality(asked, progress=told.append)
    assert (result.engine, result.tasks["quiz"].documents) == ("transformers", 3)
    agreement = result.agreement
    assert agreement is not None
    assert agreement.holds, agreement.text
    assert (agreement.engine, agreement.reference_engine) == ("llama_cpp", "transformers")
    assert 0 < agreement.kl_mean_nats < 0.01
    stages = ["loading tasks", "loading into llama_cpp", "loading", "comparing llama_cpp with transformers"]
    assert told[:4] == stages


def test_an_engine_that_cannot_open_a_checkpoint_costs_no_evaluation(folder: Path, tmp_path: Path) -> None:
    """The file can't even be read by transformers: it isn't touched before the timed engine has failed."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.gguf").write_bytes(b"GGUF")
    write_task(tmp_path, "quiz", CHOICES, questions(3))
    asked = QualityStageRequest(
        checkpoint=RunnableCheckpoint(
            folder=str(broken), quantizer=Gguf(type="f16"), engine=LlamaCpp(threads=1), device="cpu"
        ),
        compute_dtype="float32",
        quality=request_for(tmp_path, "quiz"),
    )
    told: list[str] = []
    with pytest.raises(CheckpointError):
        quality(asked, progress=told.append)
    assert told == ["loading tasks", "loading into llama_cpp"]
