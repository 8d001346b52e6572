"""What device this is, what its data sheet promises, and what it really reads and computes per second.

Plans use the data-sheet table or the host; results stand beside bandwidth and FLOP/s measured in the same
stage, because a rented, throttled or shared device is not its data sheet. torch is imported only to measure
or when a GPU is there.

>>> named("h100-sxm").bandwidth_bytes_per_s
3350000000000.0
>>> detect().memory_bytes >= available_memory_bytes()
True
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.data_sheet import DATA_SHEET, HOST, Device, nearest_device, sheet_of
from pipeline.errors import PrerequisiteError, UsageError
from pipeline.processor import processor_entry
from pipeline.speed_results import DeviceSpeed, MachineState
from pipeline.values import digest

__all__ = [
    "DATA_SHEET",
    "Device",
    "MachineState",
    "available_memory_bytes",
    "detect",
    "fingerprint",
    "last_level_cache_bytes",
    "machine_state",
    "measure_device_speed",
    "memory_limit_bytes",
    "named",
    "throttle_reasons",
    "with_measured",
]

ROOT = Path("/")
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""torch's names of the types whose FLOP/s can be measured, and the data sheets'."""
BANDWIDTH_SECONDS, MATMUL_SECONDS = 1.2, 3.0
"""Time to measure for: the bandwidth; the matrix products of all types together."""
LARGEST_MATRIX = 8192
READ_CACHES, MOST_READ_BYTES = 8, 4 * 2**30
"""The read buffer is so many last-level caches that next to nothing of it comes out of them."""


def named(name: str) -> Device:
    """The device of that name in the data-sheet table, or this machine's for `host`.

    Raises UsageError with the nearest name.
    """
    if name == HOST:
        return detect()
    if name in DATA_SHEET:
        return DATA_SHEET[name]
    near = nearest_device(name)
    hint = f" (did you mean {near!r}?)" if near else ""
    raise UsageError(f"hardware {name!r} is unknown{hint}; known: {', '.join((HOST, *DATA_SHEET))}")


def detect() -> Device:
    """The first GPU that torch can use, else the CPU. Imports torch only where a GPU is present."""
    if not _gpu_present():
        return _cpu()
    import torch

    if not torch.cuda.is_available():
        return _cpu("operating system; a GPU is present, but this torch can't use it")
    return _gpu(torch.cuda.get_device_properties(0))


def fingerprint(device: Device) -> str:
    """Digest of what makes two measurements comparable: name, memory, threads, cache, and whether memory comes in huge
    pages (`GLIBC_TUNABLES`), which is worth a tenth and more of the decode rate. Equal in every run."""
    machine = device.model_copy(update={"bandwidth_bytes_per_s": None, "peak_flops_per_s": {}, "source": ""})
    # A price measures nothing, and keys of stored results hold this digest: a new price must not void them.
    described = machine.model_dump(mode="json", exclude={"dollars_per_hour", "price_source"})
    tuned = os.environ.get("GLIBC_TUNABLES")
    return digest({**described, "glibc_tunables": tuned} if tuned else described)


def with_measured(device: Device, speed: DeviceSpeed) -> Device:
    """`device` with measured figures in place of published ones; peaks of unmeasured types are kept."""
    peaks = {SHORT_NAMES[dtype]: flops for dtype, flops in speed.matmul_flops_per_s.items()}
    return device.model_copy(
        update={
            "bandwidth_bytes_per_s": speed.read_bandwidth_bytes_per_s,
            "peak_flops_per_s": {**device.peak_flops_per_s, **peaks},
            "source": f"measured here; memory: {device.source}",
        }
    )


def available_memory_bytes(device: Device | None = None, *, root: Path = ROOT) -> int:
    """Memory that this process can still take on `device` (default: the CPU).

    On a CPU what is free or reclaimable, within the control group; on a GPU what its driver reports free.
    """
    if device is not None and device.kind == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    import psutil

    free_bytes = int(psutil.virtual_memory().available)
    in_groups = [limit - used for limit, used in _control_groups(root)]
    return max(0, min([free_bytes, *in_groups]))


def memory_limit_bytes(*, root: Path = ROOT) -> int | None:
    """The smallest memory limit of the control groups around this process; None where there is none."""
    return min((limit for limit, _ in _control_groups(root)), default=None)


def machine_state(device: Device) -> MachineState:
    """Clocks, load and throttling now; the GPU's figures need the `nvidia-ml-py` package."""
    import psutil

    frequency = psutil.cpu_freq()
    gpu = _gpu_state() if device.kind == "cuda" else {}
    return MachineState(
        cpu_frequency_mhz=float(frequency.current) if frequency else None,
        load_average_1_minute=os.getloadavg()[0],
        **gpu,
    )


def measure_device_speed(device: str, *, dtypes: Sequence[str]) -> DeviceSpeed:
    """Measure what `device` ("cpu" or "cuda") reads and computes per second, within about 5 s.

    Bandwidth is the best sample of reading a buffer of at least eight last-level caches (CPU, all of torch's
    threads), or of copying one (GPU, read and write counted). FLOP/s are the best square matrix product of
    each of `dtypes` ("float32", "bfloat16", "float16"), grown until the time is used up, since a CPU without
    half-precision arithmetic is a hundred times slower at those.
    """
    if unknown := [dtype for dtype in dtypes if dtype not in SHORT_NAMES]:
        raise UsageError(f"can't measure FLOP/s of {', '.join(unknown)}; allowed: {', '.join(SHORT_NAMES)}")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise PrerequisiteError("device 'cuda': torch finds no usable GPU here; measure on 'cpu' instead")
    bandwidth = _copy_bandwidth() if device == "cuda" else _read_bandwidth()
    flops = {
        dtype: _matmul_flops(device, getattr(torch, dtype), seconds=MATMUL_SECONDS / len(dtypes))
        for dtype in dtypes
    }
    return DeviceSpeed(read_bandwidth_bytes_per_s=bandwidth, matmul_flops_per_s=flops)


def _gpu_present() -> bool:
    devices = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return devices or shutil.which("nvidia-smi") is not None


def _gpu(properties: Any) -> Device:
    sheet = sheet_of(properties.name)
    return Device(
        name=properties.name,
        kind="cuda",
        memory_bytes=properties.total_memory,
        threads=usable_threads(),
        last_level_cache_bytes=getattr(properties, "L2_cache_size", None) or None,
        bandwidth_bytes_per_s=sheet.bandwidth_bytes_per_s if sheet else None,
        peak_flops_per_s=sheet.peak_flops_per_s if sheet else {},
        source=f"driver; speeds: {sheet.source}" if sheet else "driver",
        dollars_per_hour=sheet.dollars_per_hour if sheet else None,
        price_source=sheet.price_source if sheet else "",
    )


def _cpu(source: str = "operating system") -> Device:
    import psutil

    limit_bytes = memory_limit_bytes()
    total_bytes = int(psutil.virtual_memory().total)
    return Device(
        name=_cpu_name(),
        kind="cpu",
        memory_bytes=total_bytes if limit_bytes is None else min(total_bytes, limit_bytes),
        threads=usable_threads(),
        last_level_cache_bytes=last_level_cache_bytes(),
        bandwidth_bytes_per_s=None,
        source=source,
    )


def _cpu_name() -> str:
    return processor_entry("model name") or platform.processor() or platform.machine()


def usable_threads() -> int:
    """Threads that computing uses: the CPUs this process may run on, or fewer when OMP_NUM_THREADS says so."""
    allowed = _allowed_cpus()
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(allowed, int(wanted)) if wanted.isdigit() and int(wanted) > 0 else allowed


def _allowed_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_level_cache_bytes(*, root: Path = ROOT) -> int | None:
    """Bytes of the machine's last-level caches, each counted once; None where Linux doesn't list them."""
    caches: dict[tuple[int, str], int] = {}
    for index in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            facts = {
                name: (index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
            }
        except OSError:  # a CPU that is offline, or a virtual one that hides its caches
            continue
        units = {"K": 2**10, "M": 2**20, "G": 2**30}
        size = int(facts["size"].rstrip("KMG")) * units.get(facts["size"][-1:], 1)
        caches[int(facts["level"]), facts["shared_cpu_list"]] = size
    if not caches:
        return None
    last = max(level for level, _ in caches)
    return sum(size for (level, _), size in caches.items() if level == last)


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, use without reclaimable file cache) of every limited memory control group around us, in bytes.

    Both versions: memory.max (v2) and memory.limit_in_bytes (v1), where "no limit" is a huge number. Inside
    a container the path of /proc/self/cgroup may lie outside what is mounted; then only parents are found.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in [group, *group.parents]:
            yield from _limited_group(root / mount / folder, *names)


def _limited_group(folder: Path, limit: str, used: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    try:
        limit_text, used_text = (folder / limit).read_text().strip(), (folder / used).read_text()
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # the root group has no such files; a container may not let us read its parents
        return
    if limit_text != "max" and int(limit_text) < 2**60:
        yield int(limit_text), int(used_text) - int(statistics.get(reclaimable, 0))


def _gpu_state() -> dict[str, Any]:
    """NVML's view of the first GPU; empty without the package or without an NVIDIA driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "gpu_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu_memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "gpu_temperature_celsius": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_throttled_by": throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
    except nvml.NVMLError:
        return {}
    finally:
        nvml.nvmlShutdown()


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Names of NVML's throttle bits (nvml.h, nvmlClocksThrottleReasons); idleness and set clocks are none."""
    names = {
        0x04: "software power cap",
        0x08: "hardware slowdown",
        0x20: "software thermal slowdown",
        0x40: "hardware thermal slowdown",
        0x80: "hardware power brake",
    }
    return tuple(name for bit, name in names.items() if mask & bit)


def _best_s(action: Callable[[], object], *, seconds: float) -> float:
    """The shortest of at least two runs within about `seconds`; the first one only warms up."""
    action()
    best = float("inf")
    runs, end = 0, time.perf_counter() + seconds
    while runs < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def _read_bandwidth() -> float:
    """Bytes per second that torch's threads read, best of a sum over one stream and a product of two."""
    import torch

    buffer_bytes = READ_CACHES * (last_level_cache_bytes() or 32 * 2**20)
    buffer_bytes = min(buffer_bytes, MOST_READ_BYTES, available_memory_bytes() // 4)
    values = torch.ones(buffer_bytes // 4, dtype=torch.float32)
    first, second = values.chunk(2)
    reads = (values.sum, lambda: torch.dot(first, second[: first.numel()]))
    best_s = min(_best_s(read, seconds=BANDWIDTH_SECONDS / 2) for read in reads)
    return values.nbytes / best_s


def _copy_bandwidth() -> float:
    """Bytes per second that a GPU reads and writes while it copies a buffer, both counted."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    source = torch.ones(min(2**30, free_bytes // 8) // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return 2 * source.nbytes / _best_s(copy, seconds=BANDWIDTH_SECONDS)


def _matmul_flops(device: str, dtype: Any, *, seconds: float) -> float:
    """Best FLOP/s (2·n³ a product) over square matrices that double until the time is used up."""
    import torch

    best, n, end = 0.0, 64, time.perf_counter() + min(seconds, MATMUL_SECONDS / 2)
    while True:
        left, right = (torch.ones((n, n), dtype=dtype, device=device) for _ in range(2))

        # As a linear layer multiplies: on CPUs its 16-bit kernel is another, faster one than that of `a @ b`.
        def multiply(left: Any = left, right: Any = right) -> None:
            torch.nn.functional.linear(left, right)
            if device == "cuda":
                torch.cuda.synchronize()

        best_s = _best_s(multiply, seconds=0)
        best = max(best, 2 * n**3 / best_s)
        # A doubled matrix takes eight times as long, three times over (one warm-up, two runs).
        if n >= LARGEST_MATRIX or time.perf_counter() + 3 * 8 * best_s > end:
            return best
        n *= 2
