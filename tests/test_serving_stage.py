"""The serving stage: its load, the order of turns, what failures cost, and the real engine through the worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.transformers import Transformers
from pipeline.fleet import Targets
from pipeline.hardware import detect
from pipeline.measured import Distribution
from pipeline.quantizers.native import Native
from pipeline.recipe import ExpandedRecipe, load_recipe
from pipeline.recipe_sections import ServingSpec
from pipeline.results import CheckpointManifest
from pipeline.scripted_serving import ScriptedModel
from pipeline.serving_load import ServingLoad, serving_load
from pipeline.serving_results import ServingCell, ServingResult, ServingRow
from pipeline.serving_stage import measure_serving, serve_in_turn, serving_result
from pipeline.serving_turns import ServingOpened, ServingQuestion, ServingTurnResult, ServingTurns
from pipeline.stage_keys import serving_key
from pipeline.stages import RunnableCheckpoint
from pipeline.traffic import Request
from tests import result_builders as build
from tests.tiny_models import write_llama
from tests.worker_processes import workers

REQUESTS = (Request(0.0, 2, 3), Request(0.5, 2, 1), Request(4.0, 2, 2))
OPENED = ServingOpened(compute_dtype="float32", execution="scripted, static cache")


def cells(*sizes: int, arrivals: bool = False) -> tuple[ServingCell, ...]:
    closed = [
        ServingCell(mode=mode, load="closed", concurrency=size)
        for size in sizes
        for mode in ("static", "continuous")
    ]
    opened = [
        ServingCell(mode="continuous", load="open", concurrency=2, offered_requests_per_s=0.5)
        for _ in range(arrivals)
    ]
    return (*closed, *opened)


def load(*sizes: int, arrivals: bool = False, **fields: Any) -> ServingLoad:
    settings: dict[str, Any] = {
        "requests": REQUESTS,
        "cells": cells(*(sizes or (2,)), arrivals=arrivals),
        "prefix_tokens": None,
        "block_tokens": 4,
        "max_batch_tokens": 8,
        "targets": Targets(),
        "seed": 7,
        **fields,
    }
    return ServingLoad(**settings)


class Turn:
    """A scripted model behind the worker's own code; `log` gets (name, mode, load, size, seed, warm-up)."""

    def __init__(
        self,
        name: str,
        served: ServingLoad,
        log: list[tuple[Any, ...]],
        *,
        model: ScriptedModel | None = None,
    ) -> None:
        self.name, self.log, self.model = name, log, model or ScriptedModel()
        self.turns = ServingTurns(
            self.model, load=served, clock=self.model.clock, wait_until=self.model.clock.wait_until
        )

    def run(self, question: ServingQuestion) -> ServingTurnResult:
        cell = question.cell
        place = (cell.mode, cell.load, cell.concurrency) if cell else ("prefix", "", 0)
        self.log.append((self.name, *place, question.seed, question.warmup))
        return self.turns.run(question)


def spec(**fields: Any) -> ServingSpec:
    return ServingSpec.model_validate({"repeats": 3, **fields})


def measured(
    served: ServingLoad, *, model: ScriptedModel | None = None, **fields: Any
) -> tuple[ServingResult, Turn]:
    """One scripted variant through all turns, as a result."""
    turn = Turn("fp16", served, [], model=model)
    timings = serve_in_turn({"fp16": turn}, load=served, spec=spec(**fields), progress=lambda _: None)
    result = serving_result(
        timings["fp16"], opened=OPENED, load=served, spec=spec(**fields), engine="scripted", device="cpu"
    )
    return result, turn


def the_row(result: ServingResult, *place: Any) -> ServingRow:
    found = result.row(*place)
    assert found is not None
    return found


# --- turns -----------------------------------------------------------------------------------------------


def test_static_and_continuous_alternate_in_every_repeat_of_every_variant() -> None:
    served = load(1, 2, arrivals=True, prefix_tokens=8)
    log: list[tuple[Any, ...]] = []
    turns = {name: Turn(name, served, log) for name in ("fp16", "int8")}
    told: list[str] = []
    serve_in_turn(turns, load=served, spec=spec(), progress=told.append)
    order = [entry[:4] for entry in log]
    pair = [
        (name, mode, "closed", size)
        for size in (1, 2)
        for _ in range(4)
        for name in turns
        for mode in ("static", "continuous")
    ]
    opened = [(name, "continuous", "open", 2) for _ in range(4) for name in turns]
    prefixed = [(name, "prefix", "", 0) for _ in range(4) for name in turns]
    assert order == [*pair, *opened, *prefixed]
    assert [entry[5] for entry in log[:16]] == [True] * 4 + [False] * 12, (
        "the first turn of each is a warm-up"
    )
    assert told[:2] == ["fp16: static, 1 at once, warm-up", "fp16: continuous, 1 at once, warm-up"]
    assert told[-1] == "int8: cached prefix, repeat 3"


def test_both_modes_serve_the_same_prompts_and_every_repeat_has_fresh_ones() -> None:
    served = load(1, 2)
    log: list[tuple[Any, ...]] = []
    turn = Turn("fp16", served, log)
    serve_in_turn({"fp16": turn}, load=served, spec=spec(), progress=lambda _: None)
    seeds = [entry[4] for entry in log]
    assert seeds[::2] == seeds[1::2], "static and continuous share a seed"
    assert len(set(seeds[::2])) == 8
    prompts = [prompt for session in turn.model.opened for prompt in session.prompts]
    assert len(prompts) == 8 * len(REQUESTS)
    assert len(set(prompts)) == len(prompts)


def test_the_figures_of_a_row_are_those_of_its_timed_repeats() -> None:
    """As in the hand-computed case of `test_serving_measure`: 6 tokens in 3 s against 5 s."""
    result, _ = measured(load(2))
    continuous, static = the_row(result, "continuous", "closed", 2), the_row(result, "static", "closed", 2)
    assert continuous.output_tokens_per_s == Distribution.of([2.0] * 3)
    assert static.output_tokens_per_s is not None
    assert static.output_tokens_per_s.median == pytest.approx(1.2)
    assert continuous.gain is not None
    assert continuous.gain.samples == pytest.approx((2 / 1.2,) * 3)
    assert static.gain is None
    assert continuous.warmup_s == (3.0,)
    assert static.warmup_s == (5.0,)
    assert result.continuous_execution == "scripted, paged cache"


def test_requests_keep_their_arrivals_in_the_open_loop_but_for_the_warm_up() -> None:
    """A from 0 to 3; B comes at 0.5, is sent at 1 and ends at 2; C comes at 4 and ends at 6."""
    result, _ = measured(load(2, arrivals=True))
    opened = the_row(result, "continuous", "open", 2)
    assert opened.warmup_s == (3.0,), "all of them as fast as they can be"
    assert opened.duration_s == Distribution.of([6.0] * 3)
    assert opened.latency_s is not None
    assert opened.latency_s.mean == pytest.approx((3.0 + 1.5 + 2.0) / 3)
    assert opened.gain is None


def test_a_noisy_cell_is_measured_again_with_its_partner_before_it_is_marked() -> None:
    class Slowing(ScriptedModel):
        def prefill(self, *args: Any, **kwargs: Any) -> list[int]:
            self._prefill_s *= 1.3
            return super().prefill(*args, **kwargs)

    result, turn = measured(load(2), model=Slowing())
    static, continuous = the_row(result, "static", "closed", 2), the_row(result, "continuous", "closed", 2)
    assert static.noisy
    assert not continuous.noisy
    assert len(turn.log) == 2 * (1 + 6)
    assert [len(row.repeats) for row in (static, continuous)] == [6, 6]


# --- failures --------------------------------------------------------------------------------------------


def test_a_paged_cache_that_does_not_fit_is_a_row_and_the_others_run() -> None:
    """Two requests of 5 and 4 tokens need 2 + 1 blocks of 4; one needs 2."""
    result, turn = measured(load(1, 2), model=ScriptedModel(most_blocks=2))
    lost = the_row(result, "continuous", "closed", 2)
    assert (lost.outcome, lost.because) == ("out_of_memory", "MemoryError: 3 blocks don't fit")
    assert lost.output_tokens_per_s is None
    assert the_row(result, "static", "closed", 2).outcome == "measured"
    assert the_row(result, "continuous", "closed", 1).outcome == "measured"
    assert [entry[:4] for entry in turn.log].count(("fp16", "continuous", "closed", 2)) == 1, (
        "not tried again"
    )


def test_a_static_batch_that_does_not_fit_is_a_row_without_a_gain_beside_it() -> None:
    result, _ = measured(load(1, 2), model=ScriptedModel(most_sequences=1))
    assert the_row(result, "static", "closed", 2).outcome == "out_of_memory"
    assert the_row(result, "continuous", "closed", 2).outcome == "measured"
    assert the_row(result, "continuous", "closed", 2).gain is None
    assert the_row(result, "continuous", "closed", 1).gain is not None


def test_static_batches_that_only_fit_alone_have_the_paged_cache_closed() -> None:
    class Crowded(ScriptedModel):
        def prefill(self, *args: Any, **kwargs: Any) -> list[int]:
            if any(not session.closed for session in self.opened):
                raise MemoryError("no room beside a paged cache")
            return super().prefill(*args, **kwargs)

    result, turn = measured(load(2), model=Crowded())
    assert {row.outcome for row in result.rows} == {"measured"}
    assert len(turn.model.opened) == 4
    # Whenever the cache is opened in a timed turn the load is served once before the clock counts.
    assert [len(session.prompts) for session in turn.model.opened] == [3, 6, 6, 6]


def test_a_paged_cache_stays_open_over_the_repeats_and_is_closed_before_static_warm_ups() -> None:
    _, turn = measured(load(1, 2))
    assert len(turn.model.opened) == 2
    assert turn.model.opened[0].closed


def test_an_engine_that_fails_in_the_middle_is_a_failed_row() -> None:
    result, _ = measured(load(2), model=ScriptedModel(failure=ValueError("broken"), fails_at_step=5))
    row = the_row(result, "continuous", "closed", 2)
    assert (row.outcome, row.because) == ("failed", "ValueError: broken")


def test_a_prefix_that_was_reused_is_measured_in_every_repeat() -> None:
    result, _ = measured(load(2, prefix_tokens=8), model=ScriptedModel(s_per_prompt_token=0.1))
    prefix = result.prefix
    assert prefix is not None
    assert prefix.outcome == "measured"
    assert (prefix.prefix_tokens, prefix.fresh_tokens, prefix.reused_tokens) == (8, 2, 8)
    assert prefix.cold_ttft_s is not None
    assert prefix.cached_ttft_s is not None
    # 10 tokens go through steps of 8: two steps, 1 s for 10 tokens.
    assert prefix.cold_ttft_s.samples == pytest.approx((3.0,) * 3)
    assert prefix.cached_ttft_s.samples == pytest.approx((1.2,) * 9)


def test_a_prefix_that_an_engine_does_not_keep_is_void() -> None:
    result, _ = measured(load(2, prefix_tokens=8), model=ScriptedModel(reuses=False))
    assert result.prefix is not None
    assert result.prefix.outcome == "void"
    assert result.prefix.because.startswith("no prefix was reused")


# --- the load --------------------------------------------------------------------------------------------


def recipe(folder: Path, **sections: Any) -> ExpandedRecipe:
    content = {
        "model": "some/model",
        "precisions": ["fp16", "int8"],
        "speed": {},
        "gate": [{"kind": "max_memory", "fraction": 0.6}],
        **sections,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(content), "utf-8")
    return load_recipe(path).recipe.expand(device="cpu")


def loaded(folder: Path, *, trace: tuple[Request, ...] = (), **sections: Any) -> ServingLoad:
    found = serving_load(recipe(folder, **sections), trace=trace)
    assert found is not None
    return found


def test_without_traffic_every_request_is_the_workload_s_and_there_is_no_open_loop(tmp_path: Path) -> None:
    found = loaded(tmp_path, serving={"requests": 9}, workload={"prompt_tokens": 100, "new_tokens": 5})
    assert found.requests == (Request(0.0, 100, 5),) * 9
    assert [(cell.mode, cell.concurrency) for cell in found.cells] == [
        (mode, size) for size in (1, 4, 8) for mode in ("static", "continuous")
    ]
    assert (found.max_batch_tokens, found.block_tokens, found.fresh_tokens) == (2048, 16, 100)
    assert serving_load(recipe(tmp_path), trace=()) is None


def test_traffic_gives_lengths_arrivals_limits_and_targets(tmp_path: Path) -> None:
    traffic = {
        "requests_per_s": 2,
        "prompt_tokens": {"distribution": "uniform", "low": 10, "high": 90},
        "new_tokens": 4,
        "targets": {"ttft_s": 0.5},
        "max_batch_tokens": 64,
        "max_sequences": 3,
    }
    found = loaded(tmp_path, serving={"requests": 9, "concurrency": [2]}, traffic=traffic)
    assert len({one.prompt_tokens for one in found.requests}) > 3
    assert {one.new_tokens for one in found.requests} == {4}
    assert found.requests[0].arrival_s == 0.0
    assert found.requests[-1].arrival_s > 0
    assert found.targets.ttft_s == 0.5
    assert found.cells[-1] == ServingCell(
        mode="continuous", load="open", concurrency=3, offered_requests_per_s=2.0
    )
    assert found == loaded(tmp_path, serving={"requests": 9, "concurrency": [2]}, traffic=traffic)


def test_a_trace_gives_its_first_requests_counted_from_the_first_one(tmp_path: Path) -> None:
    trace = tuple(Request(100.0 + place, 10 + place, 2) for place in range(9))
    found = loaded(
        tmp_path,
        serving={"requests": 5, "concurrency": [1]},
        traffic={"trace": "trace.jsonl"},
        trace=trace,
    )
    assert [(one.arrival_s, one.prompt_tokens) for one in found.requests] == [
        (float(place), 10 + place) for place in range(5)
    ]
    assert found.cells[-1].offered_requests_per_s == 1.0


def test_the_cache_has_room_for_the_largest_requests_that_can_be_there_at_once() -> None:
    lengths = ((30, 10), (5, 5), (16, 16), (1, 1))
    served = load(2, requests=tuple(Request(0.0, *pair) for pair in lengths), block_tokens=16)
    assert served.limits(concurrency=1).cache_blocks == 3
    assert served.limits(concurrency=2).cache_blocks == 5
    assert served.limits(concurrency=4).cache_blocks == 7
    assert served.longest_tokens == 40
    padded = load(2, requests=(Request(0.0, 30, 1), Request(0.0, 1, 20)))
    assert padded.longest_tokens == 50, "in one batch the short prompt is padded to 30 and goes on for 20"


# --- the key ---------------------------------------------------------------------------------------------


def key(**changes: Any) -> str:
    settings: dict[str, Any] = {
        "machine": "here",
        "load": load(2),
        "spec": spec(),
        "variants": {"fp16": (build.manifest(), {"kind": "transformers"})},
        **changes,
    }
    return serving_key(**settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": "elsewhere"},
        {"load": load(2, seed=8)},
        {"load": load(2, prefix_tokens=8)},
        {"load": load(2, targets=Targets(ttft_s=1.0))},
        {"load": load(2, requests=REQUESTS[:2])},
        {"load": load(1, 2)},
        {"spec": spec(repeats=4)},
        {"variants": {"fp16": (build.manifest("int8"), {"kind": "transformers"})}},
        {"variants": {"fp16": (build.manifest(), {"kind": "transformers", "cache": "static"})}},
    ],
)
def test_the_key_changes_with_whatever_the_result_depends_on(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()
    assert key() == key()


# --- the real engine -------------------------------------------------------------------------------------


def runnable(folder: Path) -> RunnableCheckpoint:
    return RunnableCheckpoint(
        folder=str(folder), quantizer=Native(dtype="fp32"), engine=Transformers(), device="cpu"
    )


def test_a_tiny_model_is_served_through_workers_of_its_own(tmp_path: Path) -> None:
    requests = tuple(Request(0.02 * place, 5 + 3 * place, 2 + place % 3) for place in range(6))
    served = load(1, 3, arrivals=True, requests=requests, prefix_tokens=32, max_batch_tokens=256)
    folders = {name: write_llama(tmp_path / name, dtype="float32", seed=7) for name in ("a", "b")}
    missing = runnable(tmp_path / "missing")
    manifests: dict[str, CheckpointManifest] = {name: build.manifest() for name in (*folders, "missing")}
    told: list[str] = []
    result = measure_serving(
        {**{name: runnable(folder) for name, folder in folders.items()}, "missing": missing},
        manifests={
            name: one.model_copy(update={"weight_bytes_on_disk": 200_000}) for name, one in manifests.items()
        },
        load=served,
        spec=spec(max_cv_percent=1000),
        cache_bytes=0,
        device=detect(),
        log=tmp_path / "log",
        progress=told.append,
    )
    assert list(result.failures) == ["missing"]
    assert (result.failures["missing"].stage, result.failures["missing"].reason) == ("serving", "failed")
    assert list(result.variants) == ["a", "b"]
    for name, variant in result.variants.items():
        assert {row.outcome for row in variant.rows} == {"measured"}, (
            name,
            [row.because for row in variant.rows],
        )
        assert [len(row.repeats) for row in variant.rows] == [3] * 5
        for row in variant.rows:
            assert [one.new_tokens for one in row.repeats[0]] == [one.new_tokens for one in requests]
            assert row.latency_shares is not None
            assert sum(row.latency_shares.model_dump().values()) == pytest.approx(1.0)
            assert row.prefill_tokens == sum(one.prompt_tokens for one in requests)
        one_at_a_time = the_row(variant, "continuous", "closed", 1)
        assert one_at_a_time.mean_batch is not None
        assert one_at_a_time.mean_batch == pytest.approx(1.0)
        assert one_at_a_time.gain is not None
        assert variant.prefix is not None
        assert variant.prefix.outcome == "measured", variant.prefix.because
        assert variant.prefix.reused_tokens == 32
    assert "b: continuous, open loop of 0.5 requests/s, repeat 3" in told


def test_a_worker_that_dies_is_loaded_anew_for_the_next_turn(tmp_path: Path) -> None:
    from pipeline.serving_stage import ServingProcess
    from pipeline.serving_turns import ServingRequest

    served = load(1, requests=REQUESTS[:1], max_batch_tokens=32)
    folder = write_llama(tmp_path / "llama", dtype="float32")
    request = ServingRequest(checkpoint=runnable(folder), load=served)
    question = ServingQuestion(cell=served.cells[1], seed=1)
    with ServingProcess(request, log=tmp_path / "log", progress=lambda _: None) as process:
        assert process.run(question).outcome == "measured"
        (worker,) = workers()
        worker.kill()
        lost = process.run(question)
        assert (lost.outcome, lost.trace) == ("out_of_memory", None)
        assert process.run(question).outcome == "measured"
