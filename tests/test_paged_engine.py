"""The simulated scheduler against transformers' real one: what is in each step, which no clock can blur."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.simulation import Request, Serving, replay
from pipeline.step_times import MeasuredSteps
from pipeline.traffic import Lognormal, Uniform, poisson_requests
from scripts.compare_simulation import WrittenSteps, equal_steps
from scripts.paged_engine import PagedEngine
from tests.tiny_models import write_llama

SERVING = Serving(max_batch_tokens=48, max_sequences=6, block_tokens=16, cache_blocks=256)
ONE_SECOND = MeasuredSteps(seconds={"step": 1.0}, samples=1, median_error=0.0, p90_error=0.0, total_error=0.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedEngine]:
    folder = write_llama(tmp_path_factory.mktemp("tiny") / "llama")
    with PagedEngine(folder, serving=SERVING, threads=1) as running:
        yield running


def burst(seed: int) -> list[Request]:
    """Requests that are there at once, some of them longer than a step's token budget."""
    drawn = poisson_requests(
        1.0, prompt=Lognormal(median=12, p95=90, max=120), new=Uniform(low=1, high=20), count=40, seed=seed
    )
    return [Request(0.0, one.prompt_tokens, one.new_tokens) for one in drawn]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_real_engine_puts_the_same_tokens_into_every_step(engine: PagedEngine, seed: int) -> None:
    requests = burst(seed)
    written = WrittenSteps(ONE_SECOND)
    simulated = replay(requests, serving=SERVING, step_times=written)
    real = engine.serve(requests, seed=seed)
    assert len(real.steps) == simulated.steps == len(written.steps)
    assert equal_steps(written.steps, real.steps) == simulated.steps
    assert real.replay.prefill_tokens == simulated.prefill_tokens


def test_the_real_engine_gives_every_request_its_tokens_in_order_of_time(engine: PagedEngine) -> None:
    requests = poisson_requests(
        200.0, prompt=Uniform(low=1, high=40), new=Uniform(low=1, high=9), count=20, seed=4
    )
    found = engine.serve(requests, seed=4).replay
    assert (found.arrival_s <= found.start_s).all()
    assert (found.start_s < found.first_token_s).all()
    assert (found.first_token_s <= found.end_s).all()
    assert ((found.first_token_s == found.end_s) == (found.new_tokens == 1)).all()
    result = found.result()
    assert result.output_tokens == sum(one.new_tokens for one in requests)
    assert result.mean_batch is not None
    assert 1 <= result.mean_batch <= SERVING.max_sequences
