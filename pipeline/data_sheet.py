"""What makers publish of the devices people rent and buy: memory, bandwidth, dense peaks.

Figures are those printed, without structured sparsity (which no dense checkpoint uses; sheets that print only
sparse tensor figures are halved). A sheet's GB are taken as 1e9 bytes, so that a plan never promises too much
memory: drivers report up to 7 % more.

>>> DATA_SHEET["h100-sxm"].bandwidth_bytes_per_s
3350000000000.0
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.values import Value


class Device(Value):
    """A device to run models on.

    `memory_bytes` is its own memory: on a CPU the smaller of RAM and the control group's limit, on a GPU the
    card's. `peak_flops_per_s` holds dense peaks by type (fp16, bf16, fp8, int8, fp4), empty where no data
    sheet is known; `threads` are the CPU threads this process may use, None for a device only planned with.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    threads: int | None
    last_level_cache_bytes: int | None
    bandwidth_bytes_per_s: float | None
    peak_flops_per_s: dict[str, float] = Field(default_factory=dict)
    source: str


def _card(
    name: str,
    source: str,
    *,
    memory_gb: float,
    bandwidth_gb_per_s: float,
    cache_mib: int | None,
    half: float,
    fp8: float | None = None,
    int8: float | None = None,
    fp4: float | None = None,
) -> Device:
    """`half` (FP16 and BF16), `fp8`, `int8`, `fp4` are dense peaks in 1e12 operations per second."""
    peaks = {"fp16": half, "bf16": half, "fp8": fp8, "int8": int8, "fp4": fp4}
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=round(memory_gb * 1e9),
        threads=None,
        last_level_cache_bytes=None if cache_mib is None else cache_mib * 2**20,
        bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
        peak_flops_per_s={kind: peak * 1e12 for kind, peak in peaks.items() if peak is not None},
        source=source,
    )


_CARDS = (
    _card(
        "h100-sxm",
        "NVIDIA H100 Tensor Core GPU data sheet, tensor figures halved",
        memory_gb=80,
        bandwidth_gb_per_s=3350,
        cache_mib=50,
        half=989,
        fp8=1979,
        int8=1979,
    ),
    _card(
        "h100-pcie",
        "NVIDIA H100 Tensor Core GPU data sheet, tensor figures halved",
        memory_gb=80,
        bandwidth_gb_per_s=2000,
        cache_mib=50,
        half=756,
        fp8=1513,
        int8=1513,
    ),
    _card(
        "h100-nvl",
        "NVIDIA H100 Tensor Core GPU data sheet, tensor figures halved",
        memory_gb=94,
        bandwidth_gb_per_s=3900,
        cache_mib=50,
        half=835,
        fp8=1671,
        int8=1671,
    ),
    _card(
        "h200-sxm",
        "NVIDIA H200 Tensor Core GPU data sheet, tensor figures halved",
        memory_gb=141,
        bandwidth_gb_per_s=4800,
        cache_mib=50,
        half=989,
        fp8=1979,
        int8=1979,
    ),
    _card(
        "b200",
        "NVIDIA HGX B200 (8 GPUs) specifications, an eighth, dense",
        memory_gb=180,
        bandwidth_gb_per_s=8000,
        cache_mib=None,
        half=2250,
        fp8=4500,
        int8=4500,
        fp4=9000,
    ),
    _card(
        "a100-40gb",
        "NVIDIA A100 Tensor Core GPU data sheet, dense figures",
        memory_gb=40,
        bandwidth_gb_per_s=1555,
        cache_mib=40,
        half=312,
        int8=624,
    ),
    _card(
        "a100-80gb",
        "NVIDIA A100 Tensor Core GPU data sheet (SXM), dense figures",
        memory_gb=80,
        bandwidth_gb_per_s=2039,
        cache_mib=40,
        half=312,
        int8=624,
    ),
    _card(
        "l40s",
        "NVIDIA L40S data sheet, dense figures",
        memory_gb=48,
        bandwidth_gb_per_s=864,
        cache_mib=96,
        half=362,
        fp8=733,
        int8=733,
    ),
    _card(
        "l4",
        "NVIDIA L4 Tensor Core GPU data sheet, tensor figures halved",
        memory_gb=24,
        bandwidth_gb_per_s=300,
        cache_mib=48,
        half=121,
        fp8=242.5,
        int8=242.5,
    ),
    _card(
        "a10",
        "NVIDIA A10 data sheet, dense figures",
        memory_gb=24,
        bandwidth_gb_per_s=600,
        cache_mib=6,
        half=125,
        int8=250,
    ),
    _card(
        "rtx-4090",
        "NVIDIA Ada GPU architecture white paper, dense, FP32 accumulation",
        memory_gb=24,
        bandwidth_gb_per_s=1008,
        cache_mib=72,
        half=165.2,
        fp8=330.3,
        int8=660.6,
    ),
    _card(
        "rtx-5090",
        "NVIDIA RTX Blackwell GPU architecture white paper, dense, FP32 accumulation",
        memory_gb=32,
        bandwidth_gb_per_s=1792,
        cache_mib=96,
        half=209.5,
        fp8=419,
        int8=838,
    ),
    _card(
        "mi300x",
        "AMD Instinct MI300X data sheet, dense figures",
        memory_gb=192,
        bandwidth_gb_per_s=5300,
        cache_mib=256,
        half=1307.4,
        fp8=2614.9,
        int8=2614.9,
    ),
)

DATA_SHEET: dict[str, Device] = {card.name: card for card in _CARDS}

_REPORTED_NAMES = (
    ("H100 PCIe", "h100-pcie"),
    ("H100 NVL", "h100-nvl"),
    ("H100 80GB HBM3", "h100-sxm"),
    ("NVIDIA H200", "h200-sxm"),
    ("NVIDIA B200", "b200"),
    ("A100-SXM4-80GB", "a100-80gb"),
    ("A100-SXM4-40GB", "a100-40gb"),
    ("A100-PCIE-40GB", "a100-40gb"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA L4", "l4"),
    ("NVIDIA A10", "a10"),
    ("GeForce RTX 4090", "rtx-4090"),
    ("GeForce RTX 5090", "rtx-5090"),
    ("MI300X", "mi300x"),
)


def sheet_of(reported_name: str) -> Device | None:
    """The data sheet of a device name as its driver reports it, matched to the end ("NVIDIA A10" is no A100).

    None for unknown cards and for slices of one, whose speed the sheet doesn't give.
    """
    matches = (name for ending, name in _REPORTED_NAMES if reported_name.endswith(ending))
    return next((DATA_SHEET[name] for name in matches), None)
