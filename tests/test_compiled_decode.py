"""The compiled decode step makes the eager tokens, keeps its cache, and is chosen only where it pays."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.alternation import TimingPlan, time_in_turn
from pipeline.compiled_decode import CompiledDecode, Forward, with_cuda_graphs
from pipeline.engines.transformers import Transformers, TransformersSession
from pipeline.execution_choice import choose_execution
from pipeline.measure import random_prompts
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.speed_results import ExecutionChoice, SpeedShape
from pipeline.speed_stage import _choice_notes, _execution
from pipeline.stages import RunnableCheckpoint, SpeedRequest, SpeedSession
from tests.test_engine_transformers import PROMPTS, UNEQUAL, generated, model
from tests.tiny_models import write_llama

EAGER, COMPILED = "eager, dynamic cache, sdpa attention", "compiled, static cache, sdpa attention"
SHAPE = SpeedShape(batch_size=2, prompt_tokens=12, new_tokens=8)


def traced(forward: Forward) -> Forward:
    """The real tracing and its guards, without a code generator."""
    import torch

    compiled: Forward = torch.compile(forward, backend="eager")
    return compiled


class Played:
    """A compiler that changes nothing, counts compilations, and takes the script's seconds on a clock of its own."""

    def __init__(self, *, compile_s: float = 30.0, step_s: float = 0.5, eager_step_s: float = 1.0) -> None:
        self.now_s = 0.0
        self.compilations = 0
        self.failure: Exception | None = None
        self.change: Callable[[Any], None] = lambda _output: None
        self._compile_s, self._step_s, self._eager_step_s = compile_s, step_s, eager_step_s

    def __call__(self, forward: Forward) -> Forward:
        self.compilations += 1
        self.now_s += self._compile_s

        def step(*arguments: Any, **named: Any) -> Any:
            if self.failure is not None:
                raise self.failure
            self.now_s += self._step_s - self._eager_step_s  # the forward pass itself takes an eager step
            output = forward(*arguments, **named)
            self.change(output)
            return output

        return step

    def clock(self) -> float:
        return self.now_s

    def session(self, *, only_compiled: bool = False) -> TransformersSession:
        loaded = model("llama")
        loaded.register_forward_hook(lambda *_: setattr(self, "now_s", self.now_s + self._eager_step_s))
        return session(loaded, compiler=self, only_compiled=only_compiled)


def session(
    of: Any, *, compiler: Callable[[Forward], Forward], only_compiled: bool = False
) -> TransformersSession:
    return TransformersSession(
        of,
        cache="dynamic",
        compute_dtype="float32",
        vocabulary_tokens=300,
        compiled=CompiledDecode(of, compiler=compiler),
        only_compiled=only_compiled,
    )


def chosen(
    played: Played, running: TransformersSession, *, shape: SpeedShape = SHAPE
) -> ExecutionChoice | None:
    return choose_execution(running, shape=shape, seed=1, clock=played.clock)


# --- the compiled step itself ----------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning"
)  # torch's own, on importing its compiler
def test_a_compiled_step_makes_the_eager_tokens_also_where_layers_slide() -> None:
    loaded = model("gemma3")
    running = session(loaded, compiler=traced)
    assert running.executions == (EAGER, COMPILED)
    expected, padded = generated(running, PROMPTS), generated(running, UNEQUAL)
    running.run_as(COMPILED)
    assert running.execution == COMPILED
    for _ in range(2):
        assert generated(running, PROMPTS) == expected
    assert generated(running, PROMPTS, chunk_tokens=5) == expected
    assert generated(running, UNEQUAL) == padded
    running.run_as(EAGER)
    assert generated(running, PROMPTS) == expected


@pytest.mark.skipif(shutil.which("g++") is None, reason="NO C++ COMPILER HERE: inductor was NOT tested")
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_torch_s_own_compiler_makes_the_eager_tokens() -> None:
    loaded = model("llama")
    running = session(loaded, compiler=with_cuda_graphs)
    expected = generated(running, PROMPTS)
    running.run_as(COMPILED)
    assert generated(running, PROMPTS) == expected
    assert running.disagreement(PROMPTS, execution=COMPILED, room_tokens=8, steps=8) == ""


def test_a_shape_is_compiled_once_and_its_cache_stays_where_it_is() -> None:
    played = Played()
    running = played.session(only_compiled=True)
    generated(running, PROMPTS, new_tokens=4)
    before = running._cache.layers[0].keys.data_ptr()
    generated(running, PROMPTS[::-1], new_tokens=4)
    assert (running._cache.layers[0].keys.data_ptr(), played.compilations) == (before, 1)
    generated(running, PROMPTS[:1], new_tokens=4)
    assert played.compilations == 2, "another shape, another graph"
    running.release()
    assert running.memory().kv_cache_bytes is None


def test_prompts_are_never_compiled_and_padded_batches_neither() -> None:
    played = Played()
    running = played.session(only_compiled=True)
    running.prefill(PROMPTS, new_tokens=4)
    generated(running, UNEQUAL, new_tokens=4)
    assert played.compilations == 0
    assert played.now_s == 1 + 4


# --- the choice ------------------------------------------------------------------------------------------


def test_the_faster_way_is_kept_and_compilation_counted_apart() -> None:
    played = Played(compile_s=30.0, step_s=0.25)
    running = played.session()
    choice = chosen(played, running)
    assert choice is not None
    assert (choice.kept, choice.outcome, running.execution) == (COMPILED, "compared", COMPILED)
    assert choice.speedup == pytest.approx(4.0)
    assert choice.compile_s == pytest.approx(30.0)
    assert "4.00 x as fast as eager" in choice.text
    assert "first run took 30.0 s longer" in choice.text
    generated(
        running, random_prompts(batch_size=2, prompt_tokens=12, vocabulary_tokens=300, seed=5), new_tokens=8
    )
    assert played.compilations == 1, "the shape that was tried is the one that is timed"


def test_a_compilation_that_makes_steps_slower_is_thrown_away() -> None:
    played = Played(step_s=1.25)
    running = played.session()
    choice = chosen(played, running)
    assert choice is not None
    assert (choice.kept, running.execution) == (EAGER, EAGER)
    assert choice.speedup == pytest.approx(0.8)
    assert running._compiled is not None
    assert running._compiled._cache is None


def test_other_tokens_than_the_eager_ones_are_never_chosen_however_fast() -> None:
    def swap(output: Any) -> None:
        output.logits[..., 7] += 100.0

    played = Played(step_s=0.01)
    played.change = swap
    running = played.session()
    choice = chosen(played, running)
    assert choice is not None
    assert (choice.kept, choice.outcome) == (EAGER, "differs")
    assert choice.because.startswith("token 2 differs")
    assert choice.speedup is None


def test_equally_good_tokens_may_be_swapped_by_rounding() -> None:
    loaded = model("llama")
    head = loaded.get_output_embeddings().weight.data
    head[:] = head[0]  # every token is as good as any other
    played = Played()

    def nudge(output: Any) -> None:
        output.logits[..., 9] += 1e-6 * output.logits.abs().max()

    played.change = nudge
    running = session(loaded, compiler=played)
    assert running.disagreement(PROMPTS, execution=COMPILED, room_tokens=4, steps=4) == ""
    played.change = lambda output: output.logits[..., 9].zero_()
    assert running.disagreement(PROMPTS, execution=COMPILED, room_tokens=4, steps=4) == ""


def test_a_compiler_that_fails_leaves_the_eager_way_and_its_reason() -> None:
    played = Played()
    played.failure = RuntimeError("Triton not found\nand more")
    running = played.session()
    choice = chosen(played, running)
    assert choice is not None
    assert (choice.kept, choice.outcome) == (EAGER, "failed")
    assert choice.text == f"ran {EAGER}: {COMPILED} failed: RuntimeError: Triton not found"
    assert len(generated(running, PROMPTS)) == 2


def test_a_compiler_that_does_not_end_is_given_up() -> None:
    played = Played()
    running = played.session()

    def for_ever(_forward: Forward) -> Forward:
        while True:
            pass

    assert running._compiled is not None
    running._compiled._compiler = for_ever
    choice = choose_execution(running, shape=SHAPE, seed=1, clock=played.clock, limit_s=0.05)
    assert choice is not None
    assert (choice.kept, choice.outcome) == (EAGER, "unfinished")
    assert choice.because == "was not ready after 0 s"


@pytest.mark.parametrize("caught", [True, False])
def test_a_compiler_that_swallows_the_end_of_its_time_is_given_up_too(caught: bool) -> None:
    """Whatever is raised in a compiler may leave it as an error of its own, or not at all."""
    played = Played()
    running = played.session()

    def compiler(forward: Forward) -> Forward:
        try:
            signal.raise_signal(signal.SIGALRM)
        except BaseException as error:
            if caught:
                return forward
            raise RuntimeError("backend compiler failed") from error
        return forward

    assert running._compiled is not None
    running._compiled._compiler = compiler
    choice = choose_execution(running, shape=SHAPE, seed=1, clock=played.clock)
    assert choice is not None
    assert (choice.kept, choice.outcome) == (EAGER, "unfinished")


@pytest.mark.filterwarnings("default")
def test_torch_s_compiler_lets_the_end_of_its_time_through() -> None:
    played = Played()
    running = played.session()

    def backend(_graph: Any, _inputs: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)

    def compiler(forward: Forward) -> Forward:
        import torch

        return torch.compile(forward, backend=backend)

    assert running._compiled is not None
    running._compiled._compiler = compiler
    choice = choose_execution(running, shape=SHAPE, seed=1, clock=played.clock)
    assert choice is not None
    assert (choice.kept, choice.outcome) == (EAGER, "unfinished")


def test_shapes_that_hardly_decode_and_engines_with_one_way_have_no_choice() -> None:
    played = Played()
    running = played.session()
    prefill = SpeedShape(batch_size=1, prompt_tokens=12, new_tokens=1, test="prefill")
    assert chosen(played, running, shape=prefill) is None
    assert (running.execution, played.compilations) == (EAGER, 0)
    assert (
        chosen(
            played,
            TransformersSession(
                model("llama"), cache="dynamic", compute_dtype="float32", vocabulary_tokens=300
            ),
        )
        is None
    )


def test_a_plain_way_that_fails_is_left_to_the_timed_run() -> None:
    played = Played()
    running = played.session()
    running.model.model.norm.weight.data[3] = float("nan")
    assert chosen(played, running) is None
    assert running.execution == EAGER


# --- the engine ------------------------------------------------------------------------------------------


def test_on_a_processor_auto_never_compiles(tmp_path: Any) -> None:
    folder = write_llama(tmp_path / "tiny")
    for engine, executions in (
        (Transformers(), (EAGER,)),
        (Transformers(compile="never"), (EAGER,)),
        (Transformers(compile="always"), (COMPILED,)),
    ):
        running = engine.open(folder, quantizer=Native(dtype="fp16"), device="cpu")
        assert running.executions == executions


def test_what_torch_does_not_compile_is_known_before_it_is_tried() -> None:
    assert Native(dtype="bf16").compilable
    assert Quanto(weights="int8").compilable
    for quantizer in (Quanto(weights="int4"), Bitsandbytes(type="nf4"), Bitsandbytes(type="int8")):
        assert not quantizer.compilable
        assert Transformers().refuses(quantizer) is None
        refusal = Transformers(compile="always").refuses(quantizer)
        assert refusal is not None
        assert "leave engine.compile at auto" in refusal


def test_a_worker_makes_the_choice_once_for_a_shape_and_tells_it_with_every_turn(tmp_path: Any) -> None:
    checkpoint = RunnableCheckpoint(
        folder=str(write_llama(tmp_path / "tiny")),
        quantizer=Native(dtype="fp16"),
        engine=Transformers(compute_dtype="float32"),
        device="cpu",
    )
    worker = SpeedSession(SpeedRequest(checkpoint=checkpoint))
    played = Played(compile_s=0.0)
    worker._session = session(model("llama"), compiler=played)
    plan = TimingPlan(shapes=(SHAPE,), warmup=1, repeats=3, min_seconds=0.0, max_cv_percent=1000.0)
    (timing,) = time_in_turn({"fp16": worker}, plan=plan, progress=lambda _: None)["fp16"]
    first = worker.run(SHAPE, seed=9)
    assert first.choice is not None
    assert first.choice.outcome == "compared"
    assert timing.choice == first.choice
    assert _execution(worker.opened, timing) == first.choice.kept
    assert _choice_notes([timing]) == (f"pp12+tg8, batch 2: {first.choice.text}",)
    one_token = SpeedShape(batch_size=1, prompt_tokens=12, new_tokens=1, test="prefill")
    assert worker.run(one_token, seed=3).choice is None
    assert worker.run(SHAPE, seed=4).choice == first.choice, "not measured again"
