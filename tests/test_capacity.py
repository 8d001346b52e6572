"""Capacity: the search, probes on scripted sessions, and real workers that are limited, refused memory and killed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from pipeline.capacity_probe import (
    SLACK_BYTES,
    CapacityRequest,
    CapacitySession,
    PagedCache,
    ProbeQuestion,
    overlapping_answer_tokens,
)
from pipeline.capacity_results import CapacityProbe, CapacityResult
from pipeline.capacity_stage import CapacityWorker, capacity_of, is_whole, largest_that_fits, measure_capacity
from pipeline.data_sheet import Device
from pipeline.engines.base import Session
from pipeline.engines.transformers import Transformers
from pipeline.errors import StageError
from pipeline.footprint import kv_bytes, shape_facts
from pipeline.hardware import available_memory_bytes
from pipeline.preflight import Preflight
from pipeline.process_memory import private_bytes_now, private_memory_limit
from pipeline.processes import WorkerError
from pipeline.quantizers.native import Native
from pipeline.recipe import Recipe
from pipeline.recipe_sections import CapacitySpec
from pipeline.scripted_engine import ScriptedSession
from pipeline.scripted_serving import ScriptedModel
from pipeline.stages import RunnableCheckpoint
from tests.tiny_models import write_llama

linux = pytest.mark.skipif(private_bytes_now() is None, reason="this system tells no private memory")


def quiet(_text: str) -> None:
    """No progress."""


# --- the largest that fits -------------------------------------------------------------------------------


@pytest.mark.parametrize("bend", [0, 400])
def test_a_search_that_knows_the_peaks_aims_where_the_budget_ends(bend: int) -> None:
    """Peaks of 1,000 B a sequence, and with `bend` not on a line; the first guess was far too high."""
    tried: list[int] = []

    def peak(count: int) -> int:
        return 5_000 + 1_000 * count + bend * (count % 3)

    def fits(count: int) -> bool:
        tried.append(count)
        return peak(count) <= 109_999

    def between(low: int, high: int) -> int | None:
        if low not in tried or high not in tried:
            return None
        return low + (109_999 - peak(low)) * (high - low) // (peak(high) - peak(low))

    assert fits(1)
    assert fits(2)
    found = largest_that_fits(fits, start=233, ceiling=256, between=between)
    assert found == max(count for count in range(257) if peak(count) <= 109_999)
    assert len(tried) <= 8, tried


def test_the_search_finds_the_limit_wherever_it_starts() -> None:
    for ceiling in (*range(1, 14), 40):
        for start in range(1, ceiling + 1):
            for limit in range(1, ceiling + 3):
                tried: list[int] = []

                def fits(count: int, *, limit: int = limit, tried: list[int] = tried) -> bool:
                    tried.append(count)
                    return count <= limit

                found = largest_that_fits(fits, start=start, ceiling=ceiling)
                assert found == min(limit, ceiling), (ceiling, start, limit)
                assert len(set(tried)) == len(tried), "nothing is tried twice"
                assert all(1 < count <= ceiling for count in tried), "one is known to fit"
                distance = abs(min(limit, ceiling) - start)
                assert len(tried) <= 2 * math.log2(distance + 1) + 3, (ceiling, start, limit, tried)


def test_a_right_guess_needs_two_probes() -> None:
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= 5000

    assert largest_that_fits(fits, start=5000, ceiling=10**6) == 5000
    assert tried == [5000, 5001]


# --- capacity on a scripted session ----------------------------------------------------------------------


def request(**fields: Any) -> CapacityRequest:
    """32 tokens a sequence, 8 of them new, on a device whose peak is all that counts."""
    checkpoint = RunnableCheckpoint(
        folder="nowhere", quantizer=Native(dtype="fp16"), engine=Transformers(), device="cuda"
    )
    settings: dict[str, Any] = {
        "checkpoint": checkpoint,
        "context_tokens": 32,
        "new_tokens": 8,
        "budget_bytes": 10_000,
        "budget_source": "recipe",
        "max_sequences": 64,
        "kv_bytes_per_sequence_predicted": 320,
        **fields,
    }
    return CapacityRequest(**settings)


def holder(**fields: Any) -> ScriptedSession:
    return ScriptedSession(weight_bytes=1000, kv_bytes_per_token=10, **fields)


class InThisProcess:
    """A worker without a process."""

    def __init__(self, request: CapacityRequest, session: Session) -> None:
        self._session = CapacitySession(request, session=session)
        self.opened = self._session.opened

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""

    def probe(self, question: ProbeQuestion) -> CapacityProbe:
        """As JSON, like a real worker's."""
        return self._session.answer(question.to_json())


def searched(session: Session, wanted: CapacityRequest | None = None) -> CapacityResult:
    wanted = wanted or request()
    return capacity_of(lambda: InThisProcess(wanted, session), request=wanted, progress=quiet)


def test_capacity_is_what_the_budget_leaves_beside_the_weights() -> None:
    found = searched(holder())
    assert found.weight_bytes_resident == 1000
    assert found.kv_bytes_per_sequence == 310  # the last token is never cached
    assert found.predicted_sequences == 28
    assert found.measured_sequences == 29
    assert found.limited_by == "memory"
    assert found.because == "30 sequences need 10,300 B, the budget is 10,000 B"
    assert {probe.sequences: probe.outcome for probe in found.probes}[29] == "measured"


def test_every_probe_runs_the_whole_prompt_and_all_new_tokens() -> None:
    session = holder()
    searched(session)
    tiny, warm_up, *batches = session.prompts
    assert [len(prompt) for prompt in tiny] == [2]
    assert sum(len(prompt) for prompt in warm_up) >= 512, "enough for the buffers of libraries"
    assert {len(prompt) for batch in batches for prompt in batch} == {24}
    assert session.calls.count("decode_step") == 2 + 7 * len(batches)


def test_memory_that_runs_out_late_in_decoding_is_no_fit() -> None:
    session = holder(failure=MemoryError(), fails_at_step=50)
    wanted = request(context_tokens=64, new_tokens=60, budget_bytes=10**9)
    found = searched(session, wanted)
    assert found.measured_sequences == 0
    assert found.limited_by == "memory"
    assert found.probes[0].outcome == "out_of_memory"
    assert "MemoryError" in found.because


@pytest.mark.parametrize("error", [ValueError("shapes differ"), KeyError("layer")])
def test_a_bug_in_a_probe_fails_the_stage_with_its_own_message(error: Exception) -> None:
    with pytest.raises(
        StageError, match=rf"holding 1 sequences failed: {type(error).__name__}: .*{error.args[0]}"
    ):
        searched(holder(failure=error, fails_at_step=3))


def test_a_budget_smaller_than_the_weights_holds_nothing_and_is_never_negative() -> None:
    found = searched(holder(), request(budget_bytes=500))
    assert (found.predicted_sequences, found.measured_sequences) == (0, 0)
    assert found.because == "1 sequences need 1,310 B, the budget is 500 B"
    assert len(found.probes) == 1


@pytest.mark.parametrize("budget", range(0, 4000, 177))
def test_no_budget_gives_a_negative_capacity(budget: int) -> None:
    found = searched(holder(), request(budget_bytes=budget))
    assert found.measured_sequences == max(0, (budget - 1000) // 310)
    assert (found.predicted_sequences or 0) >= 0


def test_the_recipes_ceiling_is_named_as_what_ended_the_search() -> None:
    found = searched(holder(), request(budget_bytes=10**9, max_sequences=7))
    assert found.measured_sequences == 7
    assert found.limited_by == "ceiling"
    assert "max_sequences (7)" in found.because


def test_without_a_predicted_cache_the_first_probe_shows_its_size() -> None:
    found = searched(holder(), request(kv_bytes_per_sequence_predicted=None))
    assert found.kv_bytes_per_sequence_predicted is None
    assert found.predicted_sequences == 29
    assert found.measured_sequences == 29


def test_memory_is_split_into_what_filled_it() -> None:
    found = searched(holder())
    assert found.memory is not None
    split = found.memory
    assert (split.sequences, split.weight_bytes, split.kv_cache_bytes) == (29, 1000, 29 * 310)
    assert (split.activation_bytes, split.reserve_bytes) == (0, None)
    assert split.peak_bytes == 1000 + 29 * 310
    assert found.peak_bytes_per_sequence == 310
    assert searched(holder(), request(budget_bytes=500)).memory is None


# --- a paged cache ---------------------------------------------------------------------------------------


def paged(**fields: Any) -> CapacityRequest:
    cache = {"block_tokens": 16, "max_batch_tokens": 256, "kv_bytes_per_sequence_predicted": 320}
    return request(paged=PagedCache.model_validate({**cache, **fields}))


def test_a_paged_cache_holds_whole_blocks_of_every_sequence_and_stands_beside_the_contiguous_one() -> None:
    found = searched(ScriptedModel(kv_bytes_per_token=10), paged())
    assert found.layout == "contiguous"
    assert found.measured_sequences == 64, "this session's static batches take a byte each"
    assert found.paged is not None
    assert found.paged.layout == "paged"
    assert found.paged.measured_sequences == found.paged.predicted_sequences == 10_000 // (2 * 16 * 10)
    assert found.paged.kv_bytes_per_sequence == 320
    assert found.paged.limited_by == "memory"
    assert is_whole(found)


def test_all_sequences_of_a_paged_probe_run_at_the_same_time_and_to_their_full_length() -> None:
    model = ScriptedModel(kv_bytes_per_token=10)
    wanted = paged()
    searched(model, wanted)
    for serving in model.opened:
        count = serving.limits.max_sequences
        answer = overlapping_answer_tokens(wanted, sequences=count)
        assert [len(prompt) for prompt in serving.prompts] == [32 - answer] * count
        assert answer >= wanted.new_tokens
        assert serving.limits.cache_blocks == 2 * count
        assert serving.closed


@pytest.mark.parametrize("sequences", [2, 7, 31, 100])
@pytest.mark.parametrize("max_batch_tokens", [130, 256, 2048])
def test_answers_are_just_long_enough_for_the_last_prompt_to_join(
    sequences: int, max_batch_tokens: int
) -> None:
    wanted = paged(max_batch_tokens=max_batch_tokens).model_copy(update={"context_tokens": 4096})
    answer = overlapping_answer_tokens(wanted, sequences=sequences)
    steps = sequences * (4096 - answer) / (max_batch_tokens - sequences)
    assert steps <= answer - wanted.new_tokens + 1
    assert answer <= wanted.new_tokens + sequences * 4096 / max_batch_tokens + 2


def test_too_few_tokens_a_step_fail_the_paged_layout_alone_and_say_what_to_raise() -> None:
    found = searched(ScriptedModel(kv_bytes_per_token=1), paged(max_batch_tokens=2))
    assert found.measured_sequences == 64
    assert found.paged is not None
    assert found.paged.limited_by == "ceiling", "two sequences can't even be asked for"
    lost = searched(ScriptedModel(kv_bytes_per_token=1, loses=0), paged())
    assert lost.paged is not None
    assert (lost.paged.limited_by, lost.paged.measured_sequences) == ("failure", None)
    assert "at most 0 ran at the same time" in lost.paged.because
    assert not is_whole(lost)


# --- the system's limit ----------------------------------------------------------------------------------


@linux
def test_memory_beyond_a_limit_is_refused_and_afterwards_given() -> None:
    before = private_bytes_now()
    assert before is not None
    with private_memory_limit(before + 100_000_000):
        assert len(bytearray(50_000_000)) == 50_000_000
        with pytest.raises(MemoryError):
            bytearray(400_000_000)
    assert len(bytearray(400_000_000)) == 400_000_000


# --- real workers ----------------------------------------------------------------------------------------


def tiny(tmp_path: Path, **fields: Any) -> CapacityRequest:
    """64 tokens a sequence of a Llama in FP32: 16,128 B of cache each."""
    checkpoint = RunnableCheckpoint(
        folder=str(write_llama(tmp_path / "tiny")),
        quantizer=Native(dtype="fp16"),
        engine=Transformers(compute_dtype="float32"),
        device="cpu",
    )
    settings = {"context_tokens": 64, "budget_bytes": 8 * 2**20, "kv_bytes_per_sequence_predicted": 16_384}
    return request(checkpoint=checkpoint, **{**settings, **fields})


def measured(tmp_path: Path, wanted: CapacityRequest) -> CapacityResult:
    return measure_capacity(wanted, log=tmp_path / "log", progress=quiet)


def test_capacity_of_a_real_model_stays_within_its_budget_and_is_what_was_predicted(tmp_path: Path) -> None:
    from transformers import AutoConfig

    facts = shape_facts(AutoConfig.from_pretrained(write_llama(tmp_path / "facts")).to_dict())
    assert kv_bytes(facts, 64, element_bytes=4) == 16_384
    cache = PagedCache(block_tokens=16, max_batch_tokens=512, kv_bytes_per_sequence_predicted=16_384)
    found = measured(tmp_path, tiny(tmp_path, paged=cache, budget_bytes=30_000_000, max_sequences=400))
    assert found.kv_bytes_per_sequence == 63 * 256
    assert found.measured_sequences is not None
    assert found.predicted_sequences == pytest.approx(found.measured_sequences, rel=0.05)
    assert found.predicted_peak is not None
    assert found.peak_bytes_per_sequence == pytest.approx(found.predicted_peak.bytes_per_sequence, rel=0.05)
    for probe in found.probes:
        assert probe.peak_bytes is not None
        assert (probe.peak_bytes <= found.budget_bytes) == (probe.outcome == "measured")
    assert found.memory is not None
    assert found.memory.sequences == found.measured_sequences
    assert found.memory.process_bytes > 50_000_000, "interpreter and libraries"
    assert found.notes == ()
    assert found.paged is not None
    assert found.paged.measured_sequences is not None
    assert found.paged.measured_sequences > 1
    assert found.paged.kv_bytes_per_sequence == pytest.approx(16_384, rel=0.2)


@linux
def test_a_probe_far_over_the_budget_is_refused_its_memory_and_the_process_lives_on(tmp_path: Path) -> None:
    wanted = tiny(tmp_path)
    with CapacityWorker(wanted, log=tmp_path / "log", progress=quiet) as worker:
        assert worker.opened.limit_bytes is not None
        assert SLACK_BYTES < worker.opened.limit_bytes <= SLACK_BYTES + wanted.budget_bytes
        far_over = worker.probe(ProbeQuestion(sequences=20_000))
        assert far_over.outcome == "out_of_memory"
        assert "llocat" in far_over.because
        assert far_over.peak_bytes is None
        assert worker.probe(ProbeQuestion(sequences=1)).outcome == "measured"


@linux
def test_a_budget_beyond_the_free_memory_is_bounded_by_it_and_says_so(tmp_path: Path) -> None:
    wanted = tiny(tmp_path, budget_bytes=10**15)
    with CapacityWorker(wanted, log=tmp_path / "log", progress=quiet) as worker:
        assert worker.opened.limit_bytes is not None
        assert worker.opened.limit_bytes < 1.5 * available_memory_bytes()
        (note,) = worker.opened.notes
        assert "the budget leaves 1000000.00 GB beside the weights, this machine had" in note


def test_a_budget_that_the_recipe_sets_beyond_the_device_is_the_device_s_memory() -> None:
    device = Device(
        name="box",
        kind="cpu",
        memory_bytes=2_000_000_000,
        bandwidth_bytes_per_s=None,
        peak_flops_per_s={},
        threads=1,
        last_level_cache_bytes=None,
        source="test",
    )
    for named, budget, source in (
        (None, 1_800_000_000, "0.9 × memory of box"),
        (1_000_000_000, 1_000_000_000, "recipe"),
        (24_000_000_000, 2_000_000_000, "memory of box: the recipe names 24.0 GB, more than there is"),
    ):
        spec = CapacitySpec(context_tokens=64, memory_budget_bytes=named)
        recipe = Recipe.model_validate_json(
            '{"model": {"id": "./x"}, "precisions": ["fp16", "int8"], "gate": [{"kind": "min_capacity", "factor": 1}]}'
        ).model_copy(update={"capacity": spec})
        ready = Preflight(
            recipe=recipe.expand(device="cpu"),
            device=device,
            facts=None,
            quality=None,
            load=None,
            problems=(),
        )
        assert ready.capacity_budget(spec) == (budget, source)


Ending = Callable[[str], None]


@pytest.fixture
def large_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ending:
    """What a probe of more than five does to its process; every process leaves a line in `processes`."""

    def end(code: str) -> None:
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            "import os, signal, sys\n"
            "if 'pipeline.worker' in sys.orig_argv:\n"
            f"    open({str(tmp_path / 'processes')!r}, 'a').write('one\\n')\n"
            "    from pipeline.engines.transformers import TransformersSession as Patient\n"
            "    prefill = Patient.prefill\n"
            "    def ends(self, prompts, **settings):\n"
            "        if len(prompts) > 5 and settings['new_tokens'] > 2:\n"
            f"            {code}\n"
            "        return prefill(self, prompts, **settings)\n"
            "    Patient.prefill = ends\n",
            "utf-8",
        )
        root = Path(__file__).parent.parent
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{root}")

    return end


@pytest.mark.parametrize(
    ("code", "because"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process was killed (signal 9)"),
        (
            "os.write(2, b\"terminate called after throwing an instance of 'std::bad_alloc'\\n\"); os.abort()",
            "refused memory and gave up (std::bad_alloc)",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "by signal 11; see"),
    ],
)
def test_a_process_that_dies_of_a_probe_shows_that_it_is_too_large_and_the_search_goes_on(
    tmp_path: Path, large_batches: Ending, code: str, because: str
) -> None:
    large_batches(code)
    found = measured(tmp_path, tiny(tmp_path, budget_bytes=10**9, max_sequences=6))
    assert found.measured_sequences == 5
    assert found.limited_by == "memory"
    assert because in found.because
    lost = [probe for probe in found.probes if probe.outcome == "out_of_memory"]
    assert [probe.sequences for probe in lost] == [6]
    processes = len((tmp_path / "processes").read_text().split())
    still_needed = found.probes[-1].outcome == "measured"
    assert processes == len(lost) + still_needed, "a process is used as long as it lives"


def test_a_crash_on_the_smallest_batch_is_no_lack_of_memory(tmp_path: Path, large_batches: Ending) -> None:
    large_batches("pass")
    site = tmp_path / "site" / "sitecustomize.py"
    site.write_text(
        site.read_text().replace("> 5", "== 1 and len(prompts[0]) > 2").replace("pass", "os.abort()")
    )
    with pytest.raises(StageError, match="holding 1 sequences failed: the process ended by signal 6"):
        measured(tmp_path, tiny(tmp_path))


def test_a_variant_that_cannot_be_loaded_has_no_capacity(tmp_path: Path) -> None:
    wanted = tiny(tmp_path)
    (Path(wanted.checkpoint.folder) / "model.safetensors").unlink()
    with pytest.raises(WorkerError):
        measured(tmp_path, wanted)
