"""Times the simulation on a million requests, light to overloaded, and prints a Markdown table.

python -m scripts.time_simulation [REQUESTS]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from pipeline.simulation import Serving, replay
from pipeline.step_times import RooflineSteps
from pipeline.text_table import markdown_table
from pipeline.traffic import Lognormal, Traffic

SERVING = Serving(max_batch_tokens=8192, max_sequences=256, block_tokens=16, cache_blocks=30_000)
PROMPT = Lognormal(median=800, p95=3000, max=8192)
ANSWER = Lognormal(median=200, p95=800, max=2048)
RATES_PER_S = (1.0, 5.0, 10.0, 18.0, 40.0)


@dataclass(frozen=True)
class DenseWeights:
    """Every step reads all of them."""

    weight_bytes: float

    def bytes(self, tokens: int) -> float:  # noqa: ARG002 (dense: the same for any number)
        """Bytes of all weights."""
        return self.weight_bytes


STEP_TIMES = RooflineSteps(
    # A dense 8B model of 16 bits with grouped-query attention (32 layers, 8 heads of 128), on an H100.
    weights=DenseWeights(16e9),
    kv_bytes_per_token=2 * 2 * 32 * 8 * 128,
    flops_per_token=16e9,
    flops_per_pair=4 * 32 * 32 * 128,
    bandwidth_bytes_per_s=3.35e12,
    peak_flops_per_s=989e12,
    bandwidth_efficiency=0.8,
    flops_efficiency=0.6,
    overhead_s=5e-4,
)
HEADER = (
    *("requests/s", "overloaded", "mean batch", "TTFT p99 s", "steps", "drawing s", "simulating s"),
    "simulated requests/s",
)


def main(count: int) -> None:
    """Draw and simulate `count` requests at each rate."""
    rows = []
    for rate in RATES_PER_S:
        begin = time.perf_counter()
        requests = Traffic(requests_per_s=rate, prompt_tokens=PROMPT, new_tokens=ANSWER).requests(
            count, seed=1
        )
        drawn = time.perf_counter()
        result = replay(requests, serving=SERVING, step_times=STEP_TIMES).result()
        seconds = time.perf_counter() - drawn
        assert result.ttft_s is not None
        rows.append(
            (
                f"{rate:g}",
                "yes" if result.overloaded else "no",
                f"{result.mean_batch:.1f}",
                f"{result.ttft_s.p99:.3g}",
                f"{result.steps:,}",
                f"{drawn - begin:.1f}",
                f"{seconds:.1f}",
                f"{count / seconds:,.0f}",
            )
        )
        sys.stderr.write(f"{rate:g} requests/s: {seconds:.1f} s\n")
    print(markdown_table(HEADER, rows))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
