"""Bytes of what llama.cpp allocates, from the lines that it logs about them.

Its C API tells the size of a model but not of a cache, of work buffers or of weights that it rearranges for a
processor; the log does, in MiB with two decimals. Where the shape of a cache is known the exact bytes come from that.

>>> lines = ["llama_kv_cache: size =   33.75 MiB (   512 cells,  30 layers,  3/3 seqs), K (f16):   16.88 MiB"]
>>> caches(lines, values_per_cell=384)[0].allocated_bytes
35389440
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.llama_library import KV_ELEMENT_BYTES

_MIB = 2**20
_ROUNDING_MIB = 0.011
_CACHE = re.compile(
    r"^(?P<what>\w+): size = +(?P<mib>[\d.]+) MiB \( *(?P<cells>\d+) cells, *(?P<layers>\d+) layers, *"
    r"(?P<sequences>\d+)(?:/(?P<streams>\d+))? seqs"
)
_BUFFER = re.compile(r"^\w+: +(?P<place>\S+) +(?P<what>model|compute) buffer size = +(?P<mib>[\d.]+) MiB")
_WIDTH = re.compile(r"^print_info: n_embd_(?P<what>[kv])_gqa += (?P<width>\d+)$")
_ATTENTION = re.compile(r"Flash Attention (enabled|disabled)")


class Cache(NamedTuple):
    """One cache of a context: `cells` of each of `streams` sequences, or recurrent state (no cells that grow)."""

    allocated_bytes: int
    cells: int
    streams: int
    grows: bool

    def filled_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of the cells that hold tokens when sequences are so long."""
        if not self.grows:
            return self.allocated_bytes
        cell_bytes = self.allocated_bytes / (self.cells * self.streams)
        return round(cell_bytes * sum(min(length, self.cells) for length in lengths))


class Buffers(NamedTuple):
    """Buffers of one kind by where they lie ("CPU", "CPU_REPACK", "CUDA0"), in bytes rounded to 0.01 MiB."""

    by_place: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.by_place.values())


def buffers(lines: Iterable[str], what: str) -> Buffers:
    """Buffers of kind "model" or "compute"; work buffers that are reserved anew are logged again, and count once."""
    by_place: dict[str, int] = {}
    for match in (match for line in lines if (match := _BUFFER.match(line)) and match["what"] == what):
        before = 0 if what == "compute" else by_place.get(match["place"], 0)
        by_place[match["place"]] = before + round(float(match["mib"]) * _MIB)
    return Buffers(by_place)


def cache_width(lines: Iterable[str]) -> int | None:
    """Values of all keys and values of one cell in one layer; None where layers differ."""
    widths = {match["what"]: int(match["width"]) for line in lines if (match := _WIDTH.match(line))}
    return sum(widths.values()) if set(widths) == {"k", "v"} else None


def caches(lines: Iterable[str], *, values_per_cell: int | None) -> list[Cache]:
    """A context's caches. Exact where `values_per_cell` (of `cache_width`) explains the logged size."""
    return [_cache(match, values_per_cell) for line in lines if (match := _CACHE.match(line))]


def _cache(match: re.Match[str], values_per_cell: int | None) -> Cache:
    cells, layers, streams = int(match["cells"]), int(match["layers"]), int(match["streams"] or 1)
    logged, exact = float(match["mib"]), None
    if values_per_cell is not None:
        exact = cells * streams * layers * values_per_cell * KV_ELEMENT_BYTES
    known = exact is not None and abs(exact / _MIB - logged) <= _ROUNDING_MIB
    return Cache(
        allocated_bytes=exact if known and exact is not None else round(logged * _MIB),
        cells=cells,
        streams=streams,
        grows="recurrent" not in match["what"],
    )


def flash_attention(lines: Iterable[str]) -> bool | None:
    """Whether a context uses it; None where it doesn't say."""
    found = [match[1] for line in lines if (match := _ATTENTION.search(line))]
    return found[-1] == "enabled" if found else None
