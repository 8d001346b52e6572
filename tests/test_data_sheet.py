"""The table of devices: what its figures must satisfy, and how a name finds its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.data_sheet import DATA_SHEET, Device, nearest_device, sheet_of
from pipeline.text_table import markdown_table

ROOT = Path(__file__).parent.parent
GPUS = {name: device for name, device in DATA_SHEET.items() if device.kind == "cuda"}
APPLE = {name: device for name, device in DATA_SHEET.items() if device.kind == "mps"}
PEAKS = ("fp32", "fp16", "fp8", "int8", "fp4")


def test_the_table_holds_what_people_rent_and_buy() -> None:
    assert GPUS.keys() | APPLE.keys() == DATA_SHEET.keys()
    assert GPUS.keys() == {
        *(
            "h100-sxm",
            "h100-pcie",
            "h100-nvl",
            "h200-sxm",
            "b200",
            "a100-40gb",
            "a100-80gb",
            "a100-80gb-pcie",
        ),
        *("l40s", "l4", "a10", "rtx-4090", "rtx-5090", "mi300x"),
    }
    assert {"m1-max-64gb", "m2-ultra-192gb", "m3-max-128gb", "m3-ultra-512gb", "m4-max-128gb"} <= APPLE.keys()


def test_the_h100_reproduces_the_published_break_even() -> None:
    h100 = DATA_SHEET["h100-sxm"]
    assert h100.bandwidth_bytes_per_s == 3.35e12
    assert h100.peak_flops_per_s["fp16"] / h100.bandwidth_bytes_per_s == pytest.approx(295, abs=0.5)
    assert DATA_SHEET["h200-sxm"].bandwidth_bytes_per_s == 4.8e12


@pytest.mark.parametrize("name", sorted(GPUS))
def test_a_cards_peaks_are_dense_and_grow_as_its_types_shrink(name: str) -> None:
    card = GPUS[name]
    peaks = card.peak_flops_per_s
    assert peaks["bf16"] == peaks["fp16"]
    narrow = 2 if not name.startswith("rtx") else 4
    assert peaks["int8"] / peaks["fp16"] == pytest.approx(narrow, rel=0.03)
    if "fp8" in peaks:
        assert peaks["fp8"] / peaks["fp16"] == pytest.approx(2, rel=0.03)
    assert peaks.get("fp32", 0) <= 0.51 * peaks["fp16"]
    assert 10 < peaks["fp16"] / (card.bandwidth_bytes_per_s or 1) < 450
    assert 24e9 <= card.memory_bytes <= 192e9


@pytest.mark.parametrize("name", sorted(DATA_SHEET))
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    device = DATA_SHEET[name]
    assert re.match("NVIDIA|AMD|Apple", device.source)
    assert device.bandwidth_bytes_per_s
    assert (device.dollars_per_hour is None) == (device.price_source == "")
    assert device.price_source == "" or re.search(r"202[56]-\d\d-\d\d", device.price_source)


@pytest.mark.parametrize("name", sorted(APPLE))
def test_what_apple_does_not_publish_is_missing(name: str) -> None:
    device = APPLE[name]
    assert device.peak_flops_per_s == {}
    assert device.last_level_cache_bytes is None
    assert device.dollars_per_hour is None
    assert device.memory_bytes == int(re.sub(r".*-(\d+)gb", r"\1", name)) * 10**9


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("h200", "h200-sxm"),
        ("H100_SXM", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("h100-sxm5", "h100-sxm"),
        ("H100-80GB", "h100-sxm"),
        ("4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("mi300", "mi300x"),
        ("m3-ultra", "m3-ultra-96gb"),
        ("m2 ultra 512gb", "m2-ultra-64gb"),
        ("hots", "host"),
        ("l40-s", "l40s"),
        ("quantum-annealer", None),
        ("a", None),
        ("", None),
    ],
)
def test_the_name_that_was_probably_meant_is_found(typed: str, meant: str | None) -> None:
    assert nearest_device(typed) == meant


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A10G", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_a_drivers_name_finds_its_own_sheet_only(reported: str, name: str | None) -> None:
    sheet = sheet_of(reported)
    assert (sheet.name if sheet else None) == name


def table_of_devices() -> str:
    header = ("device", "GB", "GB/s", *(f"{kind} TFLOP/s" for kind in PEAKS), "$/h", "sources")
    return markdown_table(header, [row(device) for device in DATA_SHEET.values()], text_columns=("sources",))


def row(device: Device) -> tuple[str, ...]:
    peaks = (device.peak_flops_per_s.get(kind) for kind in PEAKS)
    assert device.bandwidth_bytes_per_s is not None
    return (
        f"`{device.name}`",
        f"{device.memory_bytes / 1e9:g}",
        f"{device.bandwidth_bytes_per_s / 1e9:g}",
        *("–" if peak is None else f"{peak / 1e12:g}" for peak in peaks),
        "–" if device.dollars_per_hour is None else f"{device.dollars_per_hour:.2f}",
        f"{device.source}. {device.price_source}".rstrip(". ") + ".",
    )


def test_the_page_shows_the_table_as_it_is() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text("utf-8")
    shown = page.split("<!-- devices -->\n")[1].split("\n<!-- end of devices -->")[0]
    assert shown == table_of_devices()
