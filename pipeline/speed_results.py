"""What the speed stage measures: rows of shapes, memory, the device's limits. Units stand in the names.

>>> SpeedShape(batch_size=1, prompt_tokens=4096, new_tokens=64, test="depth").name
'tg64 @ d4096'
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.measured import Distribution, Outcome, StageFailure
from pipeline.values import Value

SpeedTest = Literal["batch", "prefill", "depth"]
"""What a row is for: static batches of the workload, prompt lengths, or depths of context, both at batch 1."""


class SpeedShape(Value):
    """What one row of the speed stage runs: `batch_size` prompts of `prompt_tokens`, `new_tokens` for each.

    With `chunk_tokens` the prompts go through the model in pieces of at most so many tokens, None for whole ones.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    test: SpeedTest = "batch"
    chunk_tokens: int | None = None

    @property
    def name(self) -> str:
        """The test in llama-bench's words: pp512 (prefill), tg64 @ d4096 (decode at a depth), pp512+tg64 (both)."""
        if self.test == "prefill":
            chunks = f" in chunks of {self.chunk_tokens}" if self.chunk_tokens else ""
            return f"pp{self.prompt_tokens}{chunks}"
        if self.test == "depth":
            return f"tg{self.new_tokens} @ d{self.prompt_tokens}"
        return f"pp{self.prompt_tokens}+tg{self.new_tokens}"


class ExecutionChoice(Value):
    """Which of an engine's ways to run one shape was kept before it was timed, and why.

    `speedup` is TPOT of `plain` ÷ TPOT of `other`, in alternation; `compile_s` what the first run of `other` took
    longer than later ones. Both are None where it never got so far.
    """

    plain: str
    other: str
    kept: str
    outcome: Literal["compared", "differs", "failed", "unfinished"]
    because: str = ""
    compile_s: float | None = None
    speedup: float | None = None

    @property
    def text(self) -> str:
        """One line for people."""
        if self.speedup is None:
            return f"ran {self.kept}: {self.other} {self.because}"
        return (
            f"ran {self.kept}: {self.other} decodes {self.speedup:.2f} x as fast as {self.plain}; its first run took "
            f"{self.compile_s:.1f} s longer, which is in no figure"
        )


class SpeedRow(SpeedShape):
    """One shape of one variant; rows exist for shapes that failed, too.

    Prefill rates count prompt tokens only, decode rates count tokens after the first only.
    `decode_tokens_per_s` is the aggregate of the batch, `..._per_request` one sequence's share of it.
    `bandwidth_share` is of the measured bandwidth, `sheet_bandwidth_share` of the published one;
    `prefill_flops_share` is the prompts' FLOPs ÷ TTFT ÷ the FLOP/s measured at the type of the arithmetic.
    `joules_per_output_token` is the energy of a whole repeat, prefill and decode, ÷ the tokens it produced.
    `choice` is there where the engine had more than one way to run the shape.
    """

    outcome: Outcome
    because: str = ""
    ttft_s: Distribution | None = None
    tpot_s: Distribution | None = None
    itl_p50_s: float | None = None
    itl_p90_s: float | None = None
    itl_p99_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_tokens_per_s_per_request: float | None = None
    produced_tokens: int | None = None
    bytes_read_per_step: int | None = None
    bandwidth_share: float | None = None
    sheet_bandwidth_share: float | None = None
    prefill_flops_share: float | None = None
    peak_memory_bytes: int | None = None
    warmup_s: tuple[float, ...] = ()
    noisy: bool = False
    joules_per_output_token: Distribution | None = None
    choice: ExecutionChoice | None = None


class MemoryResult(Value):
    """Bytes of one loaded variant. Resident bytes sum live storages once each, inner tensors included."""

    weight_bytes_on_disk: int
    weight_bytes_resident: int
    weight_bytes_read_per_token: int
    kv_cache_bytes: int | None
    peak_bytes: int
    process_bytes_before_load: int
    process_bytes_after_load: int
    allocator_reserved_bytes: int | None = None


class SpeedResult(Value):
    """What the speed stage measured of one variant.

    `measured_break_even_batch` is how many single streams the best batch is worth, `free_lunch_batch` up to which
    batch a step costs next to nothing more; see `measure.break_even_batch` and `measure.free_lunch_batch`.
    `timed_in_turn` says whether the variants took turns, None in records from before it was kept. `drift_percent` is
    how much longer the baseline's tokens took when it was timed again at the end: with the baseline alone where they
    took turns, with every variant where they were timed one after the other.
    """

    engine: str
    device: str
    compute_dtype: str
    execution: str
    rows: tuple[SpeedRow, ...]
    memory: MemoryResult
    timed_in_turn: bool | None = None
    drift_percent: float | None = None
    measured_break_even_batch: float | None = None
    free_lunch_batch: int | None = None
    notes: tuple[str, ...] = ()

    def of(self, test: SpeedTest) -> tuple[SpeedRow, ...]:
        """The rows of one test, in the recipe's order."""
        return tuple(row for row in self.rows if row.test == test)

    def row(self, batch_size: int) -> SpeedRow | None:
        """The workload's row of one batch size, if it was asked for."""
        return next((row for row in self.of("batch") if row.batch_size == batch_size), None)


class DeviceSpeed(Value):
    """Limits of the device measured in the same speed stage."""

    read_bandwidth_bytes_per_s: float
    matmul_flops_per_s: dict[str, float]


class MachineState(Value):
    """Clocks, load and throttling at one moment; None where the machine doesn't tell."""

    cpu_frequency_mhz: float | None
    load_average_1_minute: float | None
    gpu_clock_mhz: int | None = None
    gpu_memory_clock_mhz: int | None = None
    gpu_temperature_celsius: int | None = None
    gpu_power_w: float | None = None
    gpu_throttled_by: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be known of figures taken until then: with clocks held back they are too low, not void."""
        if not self.gpu_throttled_by:
            return ()
        return (f"the GPU was throttled at the end of the stage: {', '.join(self.gpu_throttled_by)}",)


class SpeedStageResult(Value):
    """The speed stage over the whole set of variants; `failures` tells which variants have no result."""

    device: DeviceSpeed
    machine_before: MachineState
    machine_after: MachineState
    alternated: bool
    variants: dict[str, SpeedResult]
    failures: dict[str, StageFailure] = Field(default_factory=dict)
