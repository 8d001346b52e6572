"""The whole line on a CUDA device: engine, quantizers, paged cache, random weights, counters, a run.

Skipped loudly where there is none. `scripts/gpu_check.sh` runs these and then the large random model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine_agreement import compare, observe
from pipeline.engines.base import Session
from pipeline.engines.transformers import Transformers
from pipeline.engines.vllm import Vllm
from pipeline.execution_choice import choose_execution
from pipeline.hardware import detect, machine_state
from pipeline.paged_session import PagedSession
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.native import Native
from pipeline.results import Report, VariantReport
from pipeline.scheduler import Serving
from pipeline.speed_results import SpeedShape
from pipeline.stages import is_out_of_memory
from tests.quantizer_samples import every_quantizer
from tests.tiny_models import write_llama

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [[5, 9, 17, 33], [40, 41, 42, 43]]
LIMITS = Serving(max_batch_tokens=64, max_sequences=4, block_tokens=16, cache_blocks=32)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _device() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("NO CUDA DEVICE HERE: nothing of CUDA was tested")


def generated(session: Session, *, new_tokens: int = 6) -> list[list[int]]:
    steps = [session.prefill(PROMPTS, new_tokens=new_tokens)]
    steps += [session.decode_step() for _ in range(new_tokens - 1)]
    return [list(sequence) for sequence in zip(*steps, strict=True)]


def served(session: Session, *, share_prefixes: bool = False, new_tokens: int = 6) -> list[list[int]]:
    """The tokens of both prompts by continuous batching."""
    with session.serving(LIMITS, share_prefixes=share_prefixes) as serving:
        assert isinstance(serving, PagedSession)
        for number, prompt in enumerate(PROMPTS):
            serving.submit(number, prompt, new_tokens=new_tokens)
        while serving.step() is not None:
            pass
        return [list(serving.answers[number]) for number in range(len(PROMPTS))]


@every_quantizer
def test_every_quantizer_quantizes_loads_and_runs_on_the_gpu(quantizer: Quantizer, tmp_path: Path) -> None:
    problems, refusal = quantizer.check(device="cuda"), Transformers().refuses(quantizer)
    if problems or refusal:
        pytest.skip(f"NOT TESTED: {'; '.join(problem.what for problem in problems) or refusal}")
    source = write_llama(tmp_path / "tiny", hidden_size=256, intermediate_size=512)
    out = tmp_path / "out"
    out.mkdir()
    quantizer.quantize(source, out, device="cuda")
    session = Transformers(compute_dtype="bfloat16").open(out, quantizer=quantizer, device="cuda")
    with session:
        session.reset_peak()
        tokens = generated(session)
        session.synchronize()
        memory = session.memory()
        assert [len(sequence) for sequence in tokens] == [6, 6]
        assert memory.kv_cache_bytes
        assert memory.reserved_bytes is not None
        assert (
            memory.weight_bytes_resident + memory.kv_cache_bytes <= memory.peak_bytes <= memory.reserved_bytes
        )
        assert [len(answer) for answer in served(session)] == [6, 6]
        assert generated(session) == tokens, "the static session must be what it was before serving"


def test_a_model_computes_the_same_tokens_on_gpu_and_cpu(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "tiny", initializer_range=0.5)
    engine = Transformers(compute_dtype="float32")
    on_gpu = engine.open(folder, quantizer=Native(dtype="fp16"), device="cuda")
    on_cpu = engine.open(folder, quantizer=Native(dtype="fp16"), device="cpu")
    expected = generated(on_cpu)
    assert generated(on_gpu) == expected
    assert served(on_gpu) == expected
    assert served(on_gpu, share_prefixes=True) == expected


@every_quantizer
def test_what_is_compilable_is_chosen_by_measurement_and_makes_the_eager_tokens(
    quantizer: Quantizer, tmp_path: Path
) -> None:
    if not quantizer.compilable or quantizer.check(device="cuda"):
        pytest.skip("this quantizer isn't compiled here")
    source = write_llama(tmp_path / "tiny", hidden_size=256, intermediate_size=512, initializer_range=0.5)
    out = tmp_path / "out"
    out.mkdir()
    quantizer.quantize(source, out, device="cuda")
    session = Transformers(compute_dtype="bfloat16").open(out, quantizer=quantizer, device="cuda")
    eager, compiled = session.executions
    shape = SpeedShape(batch_size=1, prompt_tokens=16, new_tokens=16)
    choice = choose_execution(session, shape=shape, seed=1, clock=time.perf_counter)
    assert choice is not None
    assert (choice.plain, choice.other) == (eager, compiled)
    assert choice.outcome == "compared", choice.text
    assert choice.speedup is not None
    assert session.execution == choice.kept == (compiled if choice.speedup > 1 else eager)


def test_vllm_computes_the_model_that_transformers_does(tmp_path: Path) -> None:
    if problems := Vllm().check(device="cuda"):
        pytest.skip(f"NOT TESTED: {problems[0].what}")
    folder = write_llama(tmp_path / "tiny", hidden_size=256, initializer_range=0.5)
    tokens = list(range(5, 60))
    reference = Transformers().open(folder, quantizer=Native(dtype="fp16"), device="cuda")
    expected = observe(reference, tokens=tokens)
    engine = Vllm(gpu_memory_utilization=0.3)
    with engine.open(folder, quantizer=Native(dtype="fp16"), device="cuda") as session:
        found = observe(session, tokens=tokens)
        assert compare(expected, found, reference_engine="transformers", engine="vllm").holds
        static = generated(session)
        with session.serving(LIMITS, share_prefixes=False) as serving:
            for number, prompt in enumerate(PROMPTS):
                serving.submit(number, prompt, new_tokens=6)
            steps = list(iter(serving.step, None))
        assert sum(len(step.produced) for step in steps if step) == 12
        assert sum(step.prefill_tokens for step in steps if step) == 8
        assert generated(session) == static
        memory = session.memory()
        assert memory.kv_cache_bytes
        assert memory.weight_bytes_resident < memory.peak_bytes


def test_a_gpu_that_is_full_is_out_of_memory_and_no_bug() -> None:
    import torch

    with pytest.raises(torch.OutOfMemoryError) as refused:
        torch.empty(10 * detect().memory_bytes, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(refused.value)


def test_clocks_and_temperature_are_told() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    state = machine_state(detect())
    assert state.gpu_clock_mhz
    assert state.gpu_temperature_celsius


RECIPE: dict[str, Any] = {
    "model": {"id": "tiny", "config": "config.json", "weights": "random"},
    "precisions": ["bf16", "int8", "int4"],
    "workload": {"prompt_tokens": 32, "new_tokens": 16},
    "speed": {"batch_sizes": [1, 4], "prompt_tokens": [64], "warmup": 1, "repeats": 3, "min_seconds": 0},
    "serving": {"concurrency": [1, 4], "requests": 8, "repeats": 3},
    "capacity": {"context_tokens": 64, "max_sequences": 8, "layouts": ["contiguous", "paged"]},
    "gate": [{"kind": "max_memory", "fraction": 1.5}],
}


def test_a_run_with_random_weights_measures_every_stage_on_the_gpu(tmp_path: Path) -> None:
    config = json.loads((ROOT / "recipes" / "architectures" / "llama-3.1-8b.json").read_text())
    small = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, **small, **heads}))
    (tmp_path / "tiny.yaml").write_text(json.dumps(RECIPE))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PIPELINE_STORE": str(tmp_path / "store"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "run", "tiny.yaml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    report = Report.model_validate_json(Path(line["report"]).read_text())
    for variant in report.variants:
        _check_measured(variant)


def _check_measured(variant: VariantReport) -> None:
    assert variant.failures == ()
    assert variant.speed is not None
    assert {row.outcome for row in variant.speed.rows} == {"measured"}
    assert variant.memory is not None
    assert variant.memory.allocator_reserved_bytes
    assert variant.serving is not None
    assert {row.outcome for row in variant.serving.rows} == {"measured"}
    assert variant.capacity is not None
    assert variant.capacity.measured_sequences == 8
