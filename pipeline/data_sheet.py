"""What makers publish of the devices people rent and buy: memory, bandwidth, dense peaks, and a list price.

Figures are those printed, without structured sparsity (which no dense checkpoint uses; sheets that print only
sparse tensor figures are halved). A sheet's GB are taken as 1e9 bytes, so that a plan never promises too much
memory: drivers report up to 7 % more. What a maker doesn't publish is absent, not estimated.

>>> DATA_SHEET["h100-sxm"].bandwidth_bytes_per_s
3350000000000.0
>>> nearest_device("H200")
'h200-sxm'
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Literal, NamedTuple

from pydantic import Field

from pipeline.values import Value

HOST = "host"
"""The name that stands for the machine this runs on."""


class Device(Value):
    """A device to run models on.

    `memory_bytes` is its own memory: on a CPU the smaller of RAM and the control group's limit, on a GPU the
    card's, on an Apple chip what CPU and GPU share. `peak_flops_per_s` holds dense peaks by type (fp32, fp16,
    bf16, fp8, int8, fp4), empty where none is published; `threads` are the CPU threads this process may use,
    None for a device only planned with. Runs take place on "cpu" and "cuda"; "mps" is planned for only.
    `dollars_per_hour` is an on-demand list price, None where none is known, `price_source` whose and when.
    """

    name: str
    kind: Literal["cpu", "cuda", "mps"]
    memory_bytes: int
    threads: int | None
    last_level_cache_bytes: int | None
    bandwidth_bytes_per_s: float | None
    peak_flops_per_s: dict[str, float] = Field(default_factory=dict)
    source: str
    dollars_per_hour: float | None = None
    price_source: str = ""


_RUNPOD = "RunPod Pods, on demand (runpod.io/pricing, read 2026-10-07)"
_RUNPOD_SECURE = "RunPod Secure Cloud, on demand (runpod.io/pricing, read 2026-11-09)"
_RUNPOD_COMMUNITY = (
    "RunPod Community Cloud, on demand (deploybase.ai/articles/runpod-gpu-pricing, 2026-03-10)"
)
_LAMBDA = "Lambda, on demand (lambda.ai/instances, read 2026-09-20)"
_LAMBDA_OF_8 = "Lambda, on demand, a GPU of an instance of 8 (lambda.ai/instances, read 2026-09-20)"
_MODAL = "Modal, billed by the second (modal.com/pricing, read 2026-05-07)"
_DIGITALOCEAN = "DigitalOcean GPU Droplet, on demand (list price of its API, read 2026-10-08)"

_H100 = (
    "NVIDIA H100 Tensor Core GPU data sheet, tensor figures (printed with sparsity) halved; L2: white paper"
)
_H100_2022 = "NVIDIA H100 data sheet of 2022, tensor figures (printed with sparsity) halved; L2: white paper"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, tensor figures (printed with sparsity) halved; L2: as H100"
_B200 = "NVIDIA Blackwell architecture technical brief and DGX B200 data sheet, HGX column, an eighth, sparse halved"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, dense figures as printed; L2: white paper"
_L40S = "NVIDIA L40S data sheet, the dense one of each printed pair; L2: Ada white paper"
_L4 = (
    "NVIDIA L4 Tensor Core GPU data sheet, tensor figures (printed with sparsity) halved; L2: Ada white paper"
)
_A10 = "NVIDIA A10 data sheet, the dense one of each printed pair; L2: 6 MB of GA102"
_ADA = "NVIDIA Ada GPU architecture white paper, dense, FP32 accumulation (FP16 accumulation: twice FP16 and FP8)"
_RTX_50 = (
    "NVIDIA RTX Blackwell GPU architecture white paper, dense, FP32 accumulation (FP16: twice FP16 and FP8)"
)
_MI300X = "AMD Instinct MI300X data sheet, dense figures as printed, FP32 matrix; cache: Infinity Cache"


class _Memory(NamedTuple):
    gb: float
    gb_per_s: float
    cache_mib: int


def _dense(
    *, fp32: float | None, half: float, fp8: float | None, int8: float, fp4: float | None = None
) -> dict[str, float]:
    """Dense peaks from 1e12 operations per second; `half` is FP16 and BF16, `fp32` without TF32."""
    peaks = {"fp32": fp32, "fp16": half, "bf16": half, "fp8": fp8, "int8": int8, "fp4": fp4}
    return {kind: peak * 1e12 for kind, peak in peaks.items() if peak is not None}


def _card(
    name: str, *, source: str, memory: _Memory, peaks: dict[str, float], price: tuple[float, str]
) -> Device:
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=round(memory.gb * 1e9),
        threads=None,
        last_level_cache_bytes=memory.cache_mib * 2**20,
        bandwidth_bytes_per_s=memory.gb_per_s * 1e9,
        peak_flops_per_s=peaks,
        source=source,
        dollars_per_hour=price[0],
        price_source=price[1],
    )


def _macs(chip: str, *, sizes_gb: tuple[int, ...], gb_per_s: float, source: str) -> tuple[Device, ...]:
    """A chip at each memory size, which its name ends in. Apple prints neither FLOP/s nor cache sizes."""
    return tuple(
        Device(
            name=f"{chip}-{size_gb}gb",
            kind="mps",
            memory_bytes=round(size_gb * 1e9),
            threads=None,
            last_level_cache_bytes=None,
            bandwidth_bytes_per_s=gb_per_s * 1e9,
            source=f"Apple technical specifications, {source}; no FLOP/s published",
        )
        for size_gb in sizes_gb
    )


_CARDS = (
    _card(
        "h100-sxm",
        source=_H100,
        memory=_Memory(gb=80, gb_per_s=3350, cache_mib=50),
        peaks=_dense(fp32=67, half=989, fp8=1979, int8=1979),
        price=(3.99, _RUNPOD_SECURE),
    ),
    _card(
        "h100-pcie",
        source=_H100_2022,
        memory=_Memory(gb=80, gb_per_s=2000, cache_mib=50),
        peaks=_dense(fp32=51, half=756, fp8=1513, int8=1513),
        price=(2.89, _RUNPOD_SECURE),
    ),
    _card(
        "h100-nvl",
        source=_H100,
        memory=_Memory(gb=94, gb_per_s=3900, cache_mib=50),
        peaks=_dense(fp32=60, half=835, fp8=1671, int8=1671),
        price=(3.19, _RUNPOD_SECURE),
    ),
    _card(
        "h200-sxm",
        source=_H200,
        memory=_Memory(gb=141, gb_per_s=4800, cache_mib=50),
        peaks=_dense(fp32=67, half=989, fp8=1979, int8=1979),
        price=(4.59, _RUNPOD),
    ),
    _card(
        "b200",
        source=_B200,
        memory=_Memory(gb=180, gb_per_s=8000, cache_mib=126),
        peaks=_dense(fp32=None, half=2250, fp8=4500, int8=4500, fp4=9000),
        price=(6.79, _RUNPOD),
    ),
    _card(
        "a100-40gb",
        source=_A100,
        memory=_Memory(gb=40, gb_per_s=1555, cache_mib=40),
        peaks=_dense(fp32=19.5, half=312, fp8=None, int8=624),
        price=(1.99, _LAMBDA_OF_8),
    ),
    _card(
        "a100-80gb",
        source=_A100,
        memory=_Memory(gb=80, gb_per_s=2039, cache_mib=40),
        peaks=_dense(fp32=19.5, half=312, fp8=None, int8=624),
        price=(1.79, _RUNPOD_SECURE),
    ),
    _card(
        "a100-80gb-pcie",
        source=_A100,
        memory=_Memory(gb=80, gb_per_s=1935, cache_mib=40),
        peaks=_dense(fp32=19.5, half=312, fp8=None, int8=624),
        price=(1.79, _RUNPOD_SECURE),
    ),
    _card(
        "l40s",
        source=_L40S,
        memory=_Memory(gb=48, gb_per_s=864, cache_mib=96),
        peaks=_dense(fp32=91.6, half=362.05, fp8=733, int8=733),
        price=(1.9512, _MODAL),
    ),
    _card(
        "l4",
        source=_L4,
        memory=_Memory(gb=24, gb_per_s=300, cache_mib=48),
        peaks=_dense(fp32=30.3, half=121, fp8=242.5, int8=242.5),
        price=(0.7992, _MODAL),
    ),
    _card(
        "a10",
        source=_A10,
        memory=_Memory(gb=24, gb_per_s=600, cache_mib=6),
        peaks=_dense(fp32=31.2, half=125, fp8=None, int8=250),
        price=(1.29, _LAMBDA),
    ),
    _card(
        "rtx-4090",
        source=_ADA,
        memory=_Memory(gb=24, gb_per_s=1008, cache_mib=72),
        peaks=_dense(fp32=82.6, half=165.2, fp8=330.3, int8=660.6),
        price=(0.34, _RUNPOD_COMMUNITY),
    ),
    _card(
        "rtx-5090",
        source=_RTX_50,
        memory=_Memory(gb=32, gb_per_s=1792, cache_mib=96),
        peaks=_dense(fp32=104.8, half=209.5, fp8=419, int8=838, fp4=1676),
        price=(0.69, _RUNPOD_COMMUNITY),
    ),
    _card(
        "mi300x",
        source=_MI300X,
        memory=_Memory(gb=192, gb_per_s=5300, cache_mib=256),
        peaks=_dense(fp32=163.4, half=1307.4, fp8=2614.9, int8=2614.9),
        price=(2.59, _DIGITALOCEAN),
    ),
)

_APPLE = (
    *_macs("m1-max", sizes_gb=(64,), gb_per_s=400, source="Mac Studio (2022)"),
    *_macs("m1-ultra", sizes_gb=(128,), gb_per_s=800, source="Mac Studio (2022)"),
    *_macs("m2-max", sizes_gb=(96,), gb_per_s=400, source="Mac Studio (2023)"),
    *_macs("m2-ultra", sizes_gb=(64, 192), gb_per_s=800, source="Mac Studio (2023)"),
    *_macs("m3-max", sizes_gb=(128,), gb_per_s=400, source="MacBook Pro (2023), 40-core GPU"),
    *_macs("m3-ultra", sizes_gb=(96, 256, 512), gb_per_s=819, source="Mac Studio (2025)"),
    *_macs("m4-pro", sizes_gb=(64,), gb_per_s=273, source="Mac mini (2024)"),
    *_macs("m4-max", sizes_gb=(64, 128), gb_per_s=546, source="Mac Studio (2025), 40-core GPU"),
    *_macs("m5-max", sizes_gb=(128,), gb_per_s=614, source="MacBook Pro (2026), 40-core GPU"),
)

DATA_SHEET: dict[str, Device] = {device.name: device for device in (*_CARDS, *_APPLE)}

_REPORTED_NAMES = (
    ("H100 PCIe", "h100-pcie"),
    ("H100 NVL", "h100-nvl"),
    ("H100 80GB HBM3", "h100-sxm"),
    ("NVIDIA H200", "h200-sxm"),
    ("NVIDIA B200", "b200"),
    ("A100-SXM4-80GB", "a100-80gb"),
    ("A100-SXM4-40GB", "a100-40gb"),
    ("A100-PCIE-40GB", "a100-40gb"),
    ("A100 80GB PCIe", "a100-80gb-pcie"),
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


def is_device_file(name: str) -> bool:
    """Whether `name` is the path of a device file rather than a device's name."""
    return "/" in name or name.lower().endswith((".yaml", ".yml"))


def nearest_device(name: str) -> str | None:
    """The name of `host` or of the table that was probably meant by `name`; None when nothing is near.

    Case, punctuation and the maker don't count. A name that begins with what was typed comes first ("H200" is
    the H200, not the B200, which differs in one letter), then one that what was typed begins with
    ("h100-pcie5"), then one that begins with its first words ("m2 ultra 512gb"), or holds it ("4090"), or is
    spelt nearly so.
    """
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in _MAKERS]
    typed = "".join(words)
    if len(typed) < 2:
        return None
    known = {one.replace("-", ""): one for one in (HOST, *DATA_SHEET)}
    starts = ["".join(words[:end]) for end in range(len(words), 0, -1)]
    groups = (
        (one for one in known if one.startswith(typed)),
        (one for one in sorted(known, key=len, reverse=True) if typed.startswith(one)),
        (one for start in starts if len(start) > 1 for one in known if one.startswith(start)),
        (one for one in known if typed in one),
        get_close_matches(typed, known, n=1),
    )
    return next((known[one] for group in groups for one in group), None)


_MAKERS = frozenset({"nvidia", "geforce", "amd", "instinct", "apple"})
