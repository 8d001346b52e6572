"""Puts this project's predictions beside speeds that others published, as docs/predictions.md shows them.

Each figure of docs/published_figures.yaml is predicted as `plan` predicts (weights by shape, KV cache, the
roofline of the device's data sheet). The ratio is the share of the ceiling that was really reached: near one
the ceiling is right, above 1.05 somebody is wrong, and the typical share is what a plan may count on.

    python -m scripts.compare_published            # print both tables
    python -m scripts.compare_published --write    # and put them into docs/predictions.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.data_sheet import DATA_SHEET
from pipeline.footprint import ShapeFacts, WeightReads, cached_shape_facts, weight_reads
from pipeline.quantizers.base import StoredBytes
from pipeline.roof import Roof, mean_depth_tokens
from pipeline.roofline import step_floor_s
from pipeline.text_table import markdown_table
from pipeline.values import Value
from pipeline.yaml_document import parse, read_text

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "published_figures.yaml"
PAGE = ROOT / "docs" / "predictions.md"
ARCHITECTURES = ROOT / "recipes" / "architectures"
SHAPES = Path(".pipeline") / "shapes"

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]


class Format(Value):
    """How weights lie in memory; what `footprint` asks of a quantizer."""

    class_bits: Literal[16, 8, 4]
    bits_per_weight: Positive
    other_bits: Positive
    multiplies_in: Literal["fp16", "fp8", "int8"]
    kv_bytes: Literal[1, 2] = 2

    def predicted_parts(self, out_features: int, in_features: int) -> StoredBytes:
        """Bytes of one quantized matrix, scales and zero-points included, which aren't told apart here."""
        return StoredBytes(packed=round(out_features * in_features * self.bits_per_weight / 8))

    def resident_parts(self, out_features: int, in_features: int, *, float_bytes: int) -> StoredBytes:  # noqa: ARG002
        """The same: these engines compute on weights as they are stored."""
        return self.predicted_parts(out_features, in_features)

    @property
    def other_bytes_per_weight(self) -> float:
        """Bytes of each weight of the head and of norms."""
        return self.other_bits / 8

    def table_bytes_per_weight(self, columns: int, *, is_head: bool) -> float | None:
        """Head and norms alike."""
        del columns, is_head
        return None


class Source(Value):
    """Where figures were read, and what holds for all of them."""

    title: str
    url: str
    conditions: str


class Figure(Value):
    """One published speed. `seconds` (of a prefill, or a batch of requests) may stand for `tokens_per_s`."""

    source: str
    device: str
    devices: Count = 1
    model: str
    format: str
    kind: Literal["decode", "prefill", "request"]
    batch_size: Count = 1
    context_tokens: Count | None = None
    prompt_tokens: Count | None = None
    new_tokens: Count | None = None
    tokens_per_s: Positive | None = None
    seconds: Positive | None = None
    because: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _lengths_of_its_kind(self) -> Self:
        wanted = {"decode": {"context"}, "prefill": {"prompt"}, "request": {"prompt", "new"}}[self.kind]
        given = {name for name in ("context", "prompt", "new") if getattr(self, f"{name}_tokens") is not None}
        if given != wanted:
            raise ValueError(f"a {self.kind} figure needs {sorted(wanted)} tokens, has {sorted(given)}")
        if (self.tokens_per_s is None) == (self.seconds is None):
            raise ValueError("give either tokens_per_s or seconds")
        return self

    @property
    def published_tokens_per_s(self) -> float:
        """Tokens per second of the whole batch: of the prompt for prefill, of the answers otherwise."""
        if self.tokens_per_s is not None:
            return self.tokens_per_s
        assert self.seconds is not None
        return self.batch_size * (self.new_tokens or self.prompt_tokens or 0) / self.seconds

    @property
    def what(self) -> str:
        """What was timed, in a few words."""
        if self.kind == "decode":
            return f"decode at {self.context_tokens}"
        return (
            f"prefill {self.prompt_tokens}"
            if self.kind == "prefill"
            else f"{self.prompt_tokens} → {self.new_tokens}"
        )


class Published(Value):
    """The whole file."""

    formats: dict[str, Format]
    sources: dict[str, Source]
    reasons: dict[str, str]
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Comparison:
    """A published figure and the ceiling predicted for it, in tokens per second."""

    figure: Figure
    class_bits: int
    layers: int
    ceiling_tokens_per_s: float

    @property
    def share(self) -> float:
        """Published ÷ predicted ceiling."""
        return self.figure.published_tokens_per_s / self.ceiling_tokens_per_s

    @property
    def above_floor_s(self) -> float | None:
        """Seconds that a step took longer than its floor; of requests the mean step, None for a prefill."""
        if self.figure.kind == "prefill":
            return None
        batch = self.figure.batch_size
        return batch / self.figure.published_tokens_per_s - batch / self.ceiling_tokens_per_s


def read_published(path: Path = FIGURES) -> Published:
    """The figures, checked: every source, format and device that is named exists."""
    document = parse(read_text(path))
    if document.faults:
        raise ValueError("; ".join(map(str, document.faults)))
    found = Published.model_validate_json(json.dumps(document.data))
    for figure in found.figures:
        for name, known in (
            ("source", found.sources),
            ("format", found.formats),
            ("device", DATA_SHEET),
            ("because", found.reasons),
        ):
            if getattr(figure, name) not in known:
                raise ValueError(f"unknown {name}: {getattr(figure, name)!r}")
    return found


def shapes_of(models: Iterable[str], *, cache_folder: Path = SHAPES) -> dict[str, ShapeFacts]:
    """Shape facts of models by their config's name in recipes/architectures."""
    configs = {name: json.loads((ARCHITECTURES / f"{name}.json").read_text("utf-8")) for name in set(models)}
    return {
        name: cached_shape_facts(config, cache_folder=cache_folder, source=f"{name}.json")
        for name, config in configs.items()
    }


def compare(published: Published, *, shapes: Mapping[str, ShapeFacts]) -> list[Comparison]:
    """Every figure with its ceiling, in the file's order."""
    found = []
    for figure in published.figures:
        stored = published.formats[figure.format]
        roof = _roof(figure, stored, facts=shapes[figure.model])
        found.append(
            Comparison(
                figure=figure,
                class_bits=stored.class_bits,
                layers=shapes[figure.model].layers,
                ceiling_tokens_per_s=_ceiling_tokens_per_s(figure, roof),
            )
        )
    return found


class _Roof(Roof):
    """A roof whose head may be quantized too, where `footprint` takes it to be a float."""

    @cached_property
    def reads(self) -> WeightReads:
        """Weight bytes that a pass reads, the head at the format's own width."""
        as_floats = weight_reads(self.facts, quantizer=self.quantizer, compute_bytes=2)
        saved = 2 - self.quantizer.other_bytes_per_weight
        dense_bytes = as_floats.dense_bytes - saved * self.facts.unquantized_weights_read_per_token
        return as_floats.model_copy(update={"dense_bytes": dense_bytes})


def _roof(figure: Figure, stored: Format, *, facts: ShapeFacts) -> Roof:
    device = DATA_SHEET[figure.device]
    assert device.bandwidth_bytes_per_s is not None
    peak = device.peak_flops_per_s.get(stored.multiplies_in)
    return _Roof(
        facts=facts,
        quantizer=stored,
        kv_element_bytes=stored.kv_bytes,
        compute_bytes=None,
        bandwidth_bytes_per_s=figure.devices * device.bandwidth_bytes_per_s,
        peak_flops_per_s=None if peak is None else figure.devices * peak,
    )


def _ceiling_tokens_per_s(figure: Figure, roof: Roof) -> float:
    batch = figure.batch_size
    if figure.kind == "decode":
        assert figure.context_tokens is not None
        return batch / roof.step_s(batch, context_tokens=figure.context_tokens)
    assert figure.prompt_tokens is not None
    prompts = batch * figure.prompt_tokens
    prefill_s = step_floor_s(
        read_bytes=roof.reads.bytes(prompts),
        flops=batch * roof.prefill_flops(figure.prompt_tokens),
        bandwidth_bytes_per_s=roof.bandwidth_bytes_per_s,
        peak_flops_per_s=roof.peak_flops_per_s,
    )
    if figure.kind == "prefill":
        return prompts / prefill_s
    assert figure.new_tokens is not None
    depth = mean_depth_tokens(figure.prompt_tokens, figure.new_tokens)
    decode_s = (figure.new_tokens - 1) * roof.step_s(batch, context_tokens=depth)
    return batch * figure.new_tokens / (prefill_s + decode_s)


# --- tables ----------------------------------------------------------------------------------------------

HEADER = (
    *("source", "device", "model", "weights", "timed", "batch", "tok/s", "ceiling", "share"),
    *("ms above floor", "why below"),
)
TEXT_COLUMNS = ("source", "device", "model", "weights", "timed", "why below")


def figures_table(comparisons: Iterable[Comparison]) -> str:
    """Every figure, published and predicted."""
    return markdown_table(HEADER, [_row(one) for one in comparisons], text_columns=TEXT_COLUMNS)


def _row(one: Comparison) -> tuple[str, ...]:
    figure = one.figure
    count = f"{figure.devices} × " if figure.devices > 1 else ""
    above_s = one.above_floor_s
    return (
        figure.source,
        f"{count}`{figure.device}`",
        figure.model,
        figure.format,
        figure.what,
        str(figure.batch_size),
        _three_digits(figure.published_tokens_per_s),
        _three_digits(one.ceiling_tokens_per_s),
        f"{one.share:.2f}",
        "–" if above_s is None else f"{1000 * above_s:.1f}",
        figure.because,
    )


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def sources_table(sources: Mapping[str, Source]) -> str:
    """Where each figure was read."""
    rows = [(name, f"[{one.title}]({one.url})", one.conditions) for name, one in sources.items()]
    header = ("source", "page", "conditions")
    return markdown_table(header, rows, text_columns=header)


def _group(one: Comparison) -> str:
    figure = one.figure
    if figure.kind == "prefill":
        return "prefill, of the peak FLOP/s"
    if figure.devices > 1:
        return "decode, one stream, 8 cards, of their summed bandwidth"
    if figure.kind == "decode":
        return f"decode, one stream, {one.class_bits}-bit weights, of the bandwidth"
    several = "one at a time" if figure.batch_size == 1 else "8 and more at once"
    return f"whole requests, {several}, {one.class_bits}-bit weights"


def shares_table(comparisons: Iterable[Comparison]) -> str:
    """Median and range of the achieved shares."""
    groups: dict[str, list[float]] = {}
    for one in comparisons:
        groups.setdefault(_group(one), []).append(one.share)
    return markdown_table(("share of the ceiling", *SPREAD), _spread(groups))


def fixed_costs_table(comparisons: Iterable[Comparison]) -> str:
    """Milliseconds a layer that single streams on one device take above their floor."""
    groups: dict[str, list[float]] = {}
    for one in comparisons:
        figure, above_s = one.figure, one.above_floor_s
        if above_s is not None and figure.devices == figure.batch_size == 1:
            maker = "Apple" if DATA_SHEET[figure.device].kind == "mps" else "CUDA"
            groups.setdefault(f"{maker}, {one.class_bits}-bit weights", []).append(
                1000 * above_s / one.layers
            )
            groups.setdefault(f"{maker}, all", []).append(1000 * above_s / one.layers)
    return markdown_table(("ms a layer above the floor, one stream", *SPREAD), _spread(groups))


SPREAD = ("figures", "median", "range")


def _spread(groups: Mapping[str, list[float]]) -> list[tuple[str, ...]]:
    return [
        (name, str(len(found)), f"{statistics.median(found):.2f}", f"{min(found):.2f} – {max(found):.2f}")
        for name, found in sorted(groups.items())
    ]


def tables(*, cache_folder: Path = SHAPES) -> dict[str, str]:
    """The page's generated parts by the name of their markers."""
    published = read_published()
    shapes = shapes_of((figure.model for figure in published.figures), cache_folder=cache_folder)
    found = compare(published, shapes=shapes)
    return {
        "figures": figures_table(found),
        "shares": shares_table(found),
        "fixed costs": fixed_costs_table(found),
        "reasons": "\n".join(f"- **{name}**: {text}" for name, text in published.reasons.items()),
        "sources": sources_table(published.sources),
    }


def with_tables(page: str, parts: Mapping[str, str]) -> str:
    """`page` with each part between its markers `<!-- NAME -->` and `<!-- end of NAME -->`."""
    for name, part in parts.items():
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        if not end:
            raise ValueError(f"the page has no place for {name!r}")
        page = f"{before}<!-- {name} -->\n{part}\n{end}{after}"
    return page


def main() -> int:
    """Print the tables; with --write also put them into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help=f"replace the tables of {PAGE.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    parts = tables()
    print("\n\n".join(parts.values()))
    if options.write:
        PAGE.write_text(with_tables(PAGE.read_text("utf-8"), parts), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
