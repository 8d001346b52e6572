"""The report's Markdown sections as blocks for a page, so that both show the same figures to the digit.

Not a Markdown parser: it reads headings, paragraphs and tables as `text_table.markdown_table` writes them.

>>> [block.kind for block in blocks("### Tasks\\n\\n| a | n |\\n| --- | ---: |\\n| x | 1 |\\n\\nTwo.")]
['heading', 'table', 'text']
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from pipeline.plan_tables import Column, Table, table

_BAR = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Block:
    """A heading or a paragraph with its text, or a table."""

    kind: Literal["heading", "text", "table"]
    text: str = ""
    table: Table | None = None


def blocks(markdown: str, *, title: str = "") -> tuple[Block, ...]:
    """What stands between empty lines; tables are called by the heading above them, else by `title`."""
    found: list[Block] = []
    for part in markdown.split("\n\n"):
        if part.startswith("#"):
            title = part.lstrip("#").strip()
            found.append(Block("heading", text=title))
        elif part.startswith("| ") and len(lines := part.splitlines()) > 2:
            found.append(Block("table", table=_table(title, lines)))
        elif part:
            found.append(Block("text", text=part))
    return tuple(found)


def rows_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: Sequence[str] = ()
) -> Table:
    """Cells that are texts already; the first column and `text_columns` are aligned left."""
    texts = [place == 0 or name in text_columns for place, name in enumerate(header)]
    return _of_cells(title, header, texts, rows)


def _table(title: str, lines: Sequence[str]) -> Table:
    header, marks, *rows = (_cells(line) for line in lines)
    return _of_cells(title, header, [not mark.endswith(":") for mark in marks], rows)


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|").replace("&lt;", "<") for cell in _BAR.split(line)[1:-1]]


def _of_cells(
    title: str, header: Sequence[str], texts: Sequence[bool], rows: Sequence[Sequence[str]]
) -> Table:
    columns = [
        Column(label, "", itemgetter(place), text=is_text)
        for place, (label, is_text) in enumerate(zip(header, texts, strict=True))
    ]
    return table(title, columns, rows)
