"""Joules from counters: wrap-around, several packages, refusals, counters that stand still or tick too slowly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.energy import Unmetered, energy_meter, joules_of_work, nvml_meter, rapl_meter
from pipeline.measure import Ceilings, GenerationTrace, Work, summarise
from pipeline.scripted_engine import ScriptedSession
from pipeline.speed_results import SpeedRow, SpeedShape
from pipeline.stages import take_turn

RANGE_UJ = 262_143_328_850
"""`max_energy_range_uj` as Linux shows it: 2³² counts of 2⁻¹⁴ J."""


class Tree:
    """A powercap tree under `root` whose counters tests set."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "sys/class/powercap"
        self.folder.mkdir(parents=True)

    def zone(self, zone: str, *, name: str, energy_uj: int, range_uj: int = RANGE_UJ) -> None:
        folder = self.folder / zone
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.set(zone, energy_uj=energy_uj)

    def set(self, zone: str, *, energy_uj: int | str) -> None:
        (self.folder / zone / "energy_uj").write_text(f"{energy_uj}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_joules_between_two_readings_are_those_of_every_package(tree: Tree) -> None:
    tree.zone("intel-rapl:0", name="package-0", energy_uj=1_000_000)
    tree.zone("intel-rapl:1", name="package-1", energy_uj=7_000_000)
    meter = energy_meter("cpu", root=tree.root)
    assert meter.source == "energy: RAPL's counters of 2 processor packages"
    before = meter.read_joules()
    tree.set("intel-rapl:0", energy_uj=3_500_000)
    tree.set("intel-rapl:1", energy_uj=7_250_000)
    after = meter.read_joules()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(2.75)


def test_parts_of_a_package_and_the_platform_around_it_are_not_counted_again(tree: Tree) -> None:
    for zone, name in (
        *(("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram")),
        *(("intel-rapl:1", "psys"), ("intel-rapl-mmio:0", "package-0")),
    ):
        tree.zone(zone, name=name, energy_uj=0)
    meter = rapl_meter(root=tree.root)
    assert meter.read_joules() == 0
    for folder in tree.folder.iterdir():
        tree.set(folder.name, energy_uj=4_000_000)
    assert meter.read_joules() == pytest.approx(4.0)


def test_a_counter_that_starts_again_at_nought_loses_nothing(tree: Tree) -> None:
    tree.zone("intel-rapl:0", name="package-0-die-0", energy_uj=RANGE_UJ - 600_000)
    tree.zone("intel-rapl:1", name="package-0-die-1", energy_uj=0, range_uj=65_532_610_987)
    meter = rapl_meter(root=tree.root)
    before = meter.read_joules()
    tree.set("intel-rapl:0", energy_uj=400_000)
    tree.set("intel-rapl:1", energy_uj=2_000_000)
    after = meter.read_joules()
    assert joules_of_work(meter, before_joules=before, after_joules=after, seconds=1.0) == pytest.approx(3.0)


def test_a_machine_without_the_tree_or_without_packages_in_it_says_so(tmp_path: Path) -> None:
    meter = rapl_meter(root=tmp_path)
    assert meter.read_joules() is None
    assert meter.source == "energy not measured: no processor package in /sys/class/powercap"
    tree = Tree(tmp_path)
    tree.zone("intel-rapl:0", name="psys", energy_uj=0)
    assert rapl_meter(root=tmp_path).read_joules() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file, so nothing is refused")
def test_a_counter_that_only_root_may_read_is_missing_and_named(tree: Tree) -> None:
    tree.zone("intel-rapl:0", name="package-0", energy_uj=5)
    (tree.folder / "intel-rapl:0/energy_uj").chmod(0)
    meter = energy_meter("cpu", root=tree.root)
    assert meter.read_joules() is None
    assert "only root may read" in meter.source
    assert "intel-rapl:0/energy_uj" in meter.source


@pytest.mark.parametrize("spoilt", ["", "unknown"])
def test_one_unreadable_package_makes_the_sum_missing_and_later_readings_go_on(
    tree: Tree, spoilt: str
) -> None:
    tree.zone("intel-rapl:0", name="package-0", energy_uj=0)
    tree.zone("intel-rapl:1", name="package-1", energy_uj=0)
    meter = rapl_meter(root=tree.root)
    tree.set("intel-rapl:0", energy_uj=1_000_000)
    tree.set("intel-rapl:1", energy_uj=spoilt)
    assert meter.read_joules() is None, "half of the machine is no figure for the machine"
    tree.set("intel-rapl:1", energy_uj=3_000_000)
    assert meter.read_joules() == pytest.approx(4.0)
    tree.set("intel-rapl:1", energy_uj=spoilt)
    assert rapl_meter(root=tree.root).read_joules() is None


# --- a piece of work -------------------------------------------------------------------------------------


class Ticking:
    """A meter whose counter is updated every tenth of a second."""

    source, tick_s = "a counter", 0.1

    def read_joules(self) -> float | None:
        return 0.0


@pytest.mark.parametrize(
    ("before", "after", "seconds", "joules"),
    [
        (10.0, 35.0, 1.0, 25.0),
        (10.0, 10.0, 1.0, None),  # stands still
        (10.0, 9.0, 1.0, None),  # was reset
        (10.0, 35.0, 0.9, None),  # fewer than ten updates
        (None, 35.0, 1.0, None),
        (10.0, None, 1.0, None),
        (0.0, 35.0, 1.0, 35.0),  # a counter may start at nought
    ],
)
def test_work_has_joules_only_when_the_counter_can_tell(
    before: float | None, after: float | None, seconds: float, joules: float | None
) -> None:
    found = joules_of_work(Ticking(), before_joules=before, after_joules=after, seconds=seconds)
    assert found == joules


def test_a_device_without_a_counter_reads_nothing() -> None:
    meter = energy_meter("mps")
    assert meter == Unmetered("mps devices have no counter that is known here")
    assert meter.read_joules() is None


class Scripted:
    """A meter that gives `readings` one after the other and notes each among the session's calls."""

    source, tick_s = "a counter", 0.001

    def __init__(self, session: ScriptedSession, readings: list[float | None]) -> None:
        self._session, self._readings = session, readings

    def read_joules(self) -> float | None:
        self._session.calls.append("read_joules")
        return self._readings.pop(0)


def turn(*readings: float | None, new_tokens: int = 3) -> tuple[GenerationTrace, list[str]]:
    session = ScriptedSession()
    result = take_turn(
        session,
        shape=SpeedShape(batch_size=2, prompt_tokens=8, new_tokens=new_tokens),
        seed=1,
        clock=session.clock,
        meter=Scripted(session, list(readings)),
    )
    assert result.trace is not None
    return result.trace, session.calls


def row(*traces: GenerationTrace, new_tokens: int = 3) -> SpeedRow:
    return summarise(
        traces,
        shape=SpeedShape(batch_size=2, prompt_tokens=8, new_tokens=new_tokens),
        warmup_s=(),
        work=Work(bytes_read_per_step=None, prefill_flops=None),
        ceilings=Ceilings(
            read_bandwidth_bytes_per_s=None,
            sheet_bandwidth_bytes_per_s=None,
            matmul_flops_per_s=None,
            fastest_flops_per_s=None,
            last_level_cache_bytes=None,
        ),
        peak_memory_bytes=None,
        max_cv_percent=5.0,
    )


def test_the_counter_is_read_before_and_after_the_timed_region_and_never_in_it() -> None:
    trace, calls = turn(100.0, 112.0)
    assert trace.energy_j == 12.0
    readings = [place for place, call in enumerate(calls) if call == "read_joules"]
    assert readings == [0, len(calls) - 1]
    assert calls[-2] == "clock"


def test_a_row_s_joules_a_token_are_those_of_whole_repeats_by_all_tokens_of_the_batch() -> None:
    traces = [turn(0.0, joules)[0] for joules in (12.0, 24.0, 18.0)]
    found = row(*traces).joules_per_output_token
    assert found is not None
    assert found.samples == (2.0, 4.0, 3.0)
    assert found.median == 3.0


def test_one_repeat_without_joules_or_no_decode_leaves_the_row_without() -> None:
    metered, unmetered = turn(0.0, 12.0)[0], turn(5.0, 5.0)[0]
    assert unmetered.energy_j is None
    assert row(metered, unmetered).joules_per_output_token is None
    assert row(turn(None, 12.0)[0]).joules_per_output_token is None
    prefill, _ = turn(0.0, 12.0, new_tokens=1)
    assert row(prefill, new_tokens=1).joules_per_output_token is None


# --- NVML ------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    """What NVML's calls raise."""


class Nvml:
    """NVML's interface to two GPUs; `counters_mj` None is a GPU without a counter."""

    NVMLError = NvmlError

    def __init__(self, counters_mj: dict[str, int | None], *, driver: bool = True) -> None:
        self.counters_mj, self._driver = counters_mj, driver

    def nvmlInit(self) -> None:  # noqa: N802  (NVML's name)
        if not self._driver:
            raise NvmlError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.counters_mj:
            raise NvmlError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        counter_mj = self.counters_mj[handle]
        if counter_mj is None:
            raise NvmlError("Not Supported")
        return counter_mj


def test_a_gpu_counts_millijoules_and_the_gpu_that_computes_is_read() -> None:
    nvml = Nvml({"GPU-idle": 5_000, "GPU-busy": 1_000_000})
    meter = nvml_meter(nvml, uuid="GPU-busy")
    before = meter.read_joules()
    nvml.counters_mj = {"GPU-idle": 6_000, "GPU-busy": 1_350_500}
    after = meter.read_joules()
    assert joules_of_work(meter, before_joules=before, after_joules=after, seconds=1.0) == pytest.approx(
        350.5
    )
    assert "NVML" in meter.source


@pytest.mark.parametrize(
    ("nvml", "because"),
    [
        (Nvml({}, driver=False), "NVML: Driver Not Loaded"),
        (Nvml({"GPU-other": 1}), "NVML: Not Found"),
        (Nvml({"GPU-here": None}), "this GPU has no energy counter"),
    ],
)
def test_a_gpu_that_can_t_be_read_is_missing_with_the_reason(nvml: Nvml, because: str) -> None:
    meter = nvml_meter(nvml, uuid="GPU-here")
    assert meter.read_joules() is None
    assert meter.source == f"energy not measured: {because}"


def test_a_gpu_that_stops_answering_is_missing_and_no_crash() -> None:
    nvml = Nvml({"GPU-here": 1_000})
    meter = nvml_meter(nvml, uuid="GPU-here")
    nvml.counters_mj["GPU-here"] = None
    assert meter.read_joules() is None
