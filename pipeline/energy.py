"""Joules from the counters that devices keep themselves: NVML's of a GPU, RAPL's of processor packages.

A counter says what the whole package or board has taken, whatever ran on it, idling included. It is read
before and after a piece of work, never during it; only differences mean anything. Without a counter that may
be read the energy is missing, with the reason in `source`.

>>> meter = energy_meter("cpu")
>>> before = meter.read_joules()  # None where the machine doesn't tell
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path("/")
LEAST_TICKS = 10
"""Work during which a counter moves less often than this has no figure: one tick more or less is over 10 %."""
_POWERCAP = "sys/class/powercap"


class EnergyMeter(Protocol):
    """A counter of joules."""

    @property
    def source(self) -> str:
        """What counts and what is counted, in words; or why nothing is."""

    @property
    def tick_s(self) -> float:
        """Longest time between two updates of the counter."""

    def read_joules(self) -> float | None:
        """Joules since some moment before the first reading; None when the counter can't be read now."""


def energy_meter(device: str, *, root: Path = ROOT) -> EnergyMeter:
    """The meter of `device`, the first of its kind ("cpu", "cuda"); one that never reads anything for others."""
    if device == "cuda":
        return _cuda_meter()
    if device == "cpu":
        return rapl_meter(root=root)
    return Unmetered(f"{device} devices have no counter that is known here")


def joules_of_work(
    meter: EnergyMeter, *, before_joules: float | None, after_joules: float | None, seconds: float
) -> float | None:
    """What work of `seconds` took, from the readings around it.

    None when a reading is missing, the counter didn't move, or moved too seldom to tell (`LEAST_TICKS`).
    """
    if before_joules is None or after_joules is None or seconds < LEAST_TICKS * meter.tick_s:
        return None
    taken = after_joules - before_joules
    return taken if taken > 0 else None


@dataclass(frozen=True)
class Unmetered:
    """Stands for a device whose energy can't be read."""

    because: str
    tick_s: float = 0.0

    @property
    def source(self) -> str:
        """The reason."""
        return f"energy not measured: {self.because}"

    def read_joules(self) -> float | None:
        """Nothing."""
        return None


# --- NVIDIA GPUs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NvmlMeter:
    """Millijoules of one GPU since its driver was loaded: `nvmlDeviceGetTotalEnergyConsumption`, Volta and newer.

    Newer GPUs update it every 20 to 100 ms (PETSc's manual, PetscLogGpuEnergyMeter).
    """

    nvml: Any
    handle: Any
    source: str = "energy: NVML's counter of the whole GPU board"
    tick_s: float = 0.1

    def read_joules(self) -> float | None:
        """Joules so far; None when the driver refuses."""
        try:
            return float(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)) / 1000
        except self.nvml.NVMLError:
            return None


def nvml_meter(nvml: Any, *, uuid: str) -> EnergyMeter:
    """The meter of the GPU of that UUID, through the loaded module `pynvml`.

    By UUID, because CUDA_VISIBLE_DEVICES renumbers the devices that a program sees, but not NVML's.
    """
    try:
        nvml.nvmlInit()
        meter = NvmlMeter(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return Unmetered(f"NVML: {error}")
    return Unmetered("this GPU has no energy counter") if meter.read_joules() is None else meter


def _cuda_meter() -> EnergyMeter:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Unmetered("the package nvidia-ml-py is missing")
    import torch

    return nvml_meter(nvml, uuid=f"GPU-{torch.cuda.get_device_properties(0).uuid}")


# --- processors ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Package:
    """One processor package of the powercap tree; its counter starts again at 0 after `range_uj`."""

    folder: Path
    range_uj: int

    def read_uj(self) -> int:
        return int((self.folder / "energy_uj").read_text())


class RaplMeter:
    """Joules of all processor packages, memory modules not included.

    The kernel's powercap tree (Documentation/power/powercap/powercap.rst) gives microjoules that wrap around at
    `max_energy_range_uj`; readings further apart than one turn of it lose whole turns (at 262 kJ and 200 W: 22
    minutes). AMD's processors appear under the same names. The counters move about every millisecond
    (Intel SDM, volume 3B, "RAPL interfaces").
    """

    tick_s = 0.001

    def __init__(self, packages: Sequence[_Package]) -> None:
        self._packages = tuple(packages)
        self._last_uj = [package.read_uj() for package in packages]
        self._total_uj = 0
        count = len(self._packages)
        self.source = f"energy: RAPL's counters of {count} processor package{'s' if count > 1 else ''}"

    def read_joules(self) -> float | None:
        """Joules since this meter was made; None when one of the packages can't be read."""
        try:
            now_uj = [package.read_uj() for package in self._packages]
        except (OSError, ValueError):
            return None
        for package, now, last in zip(self._packages, now_uj, self._last_uj, strict=True):
            self._total_uj += now - last if now >= last else now - last + package.range_uj
        self._last_uj = now_uj
        return self._total_uj / 1e6


def rapl_meter(*, root: Path = ROOT) -> EnergyMeter:
    """The meter of this machine's processor packages, from the powercap tree under `root`."""
    try:
        packages = [
            _Package(folder, range_uj=int((folder / "max_energy_range_uj").read_text()))
            for folder in sorted((root / _POWERCAP).glob("intel-rapl:*"))
            # Cores and graphics are parts of a package; "psys" holds packages and what is around them.
            if (folder / "name").read_text().startswith("package")
        ]
        return RaplMeter(packages) if packages else Unmetered(f"no processor package in /{_POWERCAP}")
    except PermissionError as error:
        return Unmetered(f"only root may read {error.filename}")
    except (OSError, ValueError) as error:
        return Unmetered(f"/{_POWERCAP}: {error}")
