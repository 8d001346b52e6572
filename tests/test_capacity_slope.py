"""What one more sequence takes: measured where the budget ends, beside what was predicted of the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pipeline.capacity_probe import CapacityOpened, CapacityRequest, ProbeQuestion
from pipeline.capacity_results import CapacityProbe, CapacityResult, PeakPrediction
from pipeline.capacity_stage import capacity_of
from pipeline.engines.transformers import Transformers
from pipeline.quantizers.native import Native
from pipeline.stages import RunnableCheckpoint

WEIGHT_BYTES = 220_000_000


class Peaks:
    """A worker whose batches reach the peaks they are told to."""

    def __init__(self, peak: Callable[[int], int], *, budget_bytes: int, predicted: PeakPrediction) -> None:
        self._peak, self._budget_bytes = peak, budget_bytes
        self.opened = CapacityOpened(
            weight_bytes_resident=WEIGHT_BYTES,
            process_bytes=0,
            predicted_peak=predicted,
            limit_bytes=None,
            notes=(),
        )

    def probe(self, question: ProbeQuestion) -> CapacityProbe:
        peak = WEIGHT_BYTES + self._peak(question.sequences)
        return CapacityProbe(
            sequences=question.sequences,
            outcome="measured" if peak <= self._budget_bytes else "out_of_memory",
            peak_bytes=peak,
            kv_cache_bytes=2_900_000 * question.sequences,
        )


def held(
    peak: Callable[[int], int], predicted: PeakPrediction, *, free_bytes: int, ceiling: int
) -> CapacityResult:
    budget = WEIGHT_BYTES + free_bytes

    @contextmanager
    def worker() -> Iterator[Peaks]:
        yield Peaks(peak, budget_bytes=budget, predicted=predicted)

    checkpoint = RunnableCheckpoint(
        folder="nowhere", quantizer=Native(dtype="fp16"), engine=Transformers(), device="cpu"
    )
    request = CapacityRequest(
        checkpoint=checkpoint,
        context_tokens=64,
        new_tokens=16,
        budget_bytes=budget,
        budget_source="recipe",
        max_sequences=ceiling,
        kv_bytes_per_sequence_predicted=2_900_000,
    )
    return capacity_of(worker, request=request, progress=lambda _: None)


def dequantizing(sequences: int) -> int:
    """Up to five sequences a dequantized weight of 8 MB makes the peak, beyond them activations do."""
    return max(8_000_000 + 2_750_000 * sequences, 3_500_000 + 3_540_000 * sequences)


@pytest.mark.parametrize("ceiling", [12, 20, 500])
def test_a_weight_dequantized_on_the_side_is_no_part_of_a_sequence(ceiling: int) -> None:
    predicted = PeakPrediction(fixed_bytes=25_000, bytes_per_sequence=3_540_000)
    found = held(dequantizing, predicted, free_bytes=380_000_000, ceiling=ceiling)
    assert found.measured_sequences == min(ceiling, (380_000_000 - 3_500_000) // 3_540_000)
    assert found.peak_bytes_per_sequence == pytest.approx(3_540_000, rel=0.05)
    assert found.peak_bytes_per_sequence_predicted == 3_540_000
    tried = [probe.sequences for probe in found.probes]
    assert len(set(tried)) == len(tried)


def saturating(sequences: int) -> int:
    """Work buffers grow by 3.6 MB a sequence until five of them fill a piece."""
    return 5_900_000 * sequences + 3_600_000 * min(sequences, 5)


SATURATING = PeakPrediction(
    fixed_bytes=0,
    bytes_per_sequence=9_500_000,
    beyond=PeakPrediction(fixed_bytes=18_000_000, bytes_per_sequence=5_900_000, from_sequences=5),
)


@pytest.mark.parametrize("sequences", [1, 4, 5, 6, 40])
def test_a_prediction_bends_where_work_buffers_stop_growing(sequences: int) -> None:
    peak = saturating(sequences)
    assert SATURATING.bytes_at(sequences) == peak
    assert SATURATING.sequences_within(peak) == sequences
    assert SATURATING.sequences_within(peak - 1) == sequences - 1


@pytest.mark.parametrize(("free_bytes", "ceiling"), [(30_000_000, 99), (150_000_000, 99), (150_000_000, 12)])
def test_a_bent_prediction_foretells_what_is_measured(free_bytes: int, ceiling: int) -> None:
    found = held(saturating, SATURATING, free_bytes=free_bytes, ceiling=ceiling)
    assert found.measured_sequences is not None
    assert found.predicted_sequences is not None
    assert found.measured_sequences == min(ceiling, found.predicted_sequences)
    assert found.peak_bytes_per_sequence == found.peak_bytes_per_sequence_predicted


def test_one_batch_alone_tells_nothing_of_one_more() -> None:
    found = held(saturating, SATURATING, free_bytes=10_000_000, ceiling=99)
    assert found.measured_sequences == 1
    assert found.peak_bytes_per_sequence is None
    assert found.peak_bytes_per_sequence_predicted is None
