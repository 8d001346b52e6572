"""Tables as plain text or Markdown; the first column is text, the others are figures.

>>> print(text_table(("name", "GB"), [("fp16", "0.3")]))
name   GB
fp16  0.3
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]

_TAG = re.compile(r"<(?=[A-Za-z/!?])")
"""What Markdown takes for the beginning of an HTML element, which whoever shows it drops or obeys."""


def text_table(header: Sequence[str], rows: Rows, *, text_columns: Sequence[str] = ()) -> str:
    """Columns two spaces apart; figures are aligned right, the first column and `text_columns` left."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in (header[0], *text_columns) else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ).rstrip()
        for row in table
    )


def markdown_table(header: Sequence[str], rows: Rows, *, text_columns: Sequence[str] = ()) -> str:
    """A Markdown table; figures are aligned right, the first column and `text_columns` left.

    Pipes and line breaks in cells are taken care of.
    """
    marks = ["---" if name in (header[0], *text_columns) else "---:" for name in header]
    lines = [header, marks, *rows]
    return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)


def figure_cell(value: float | str | None, form: str) -> str:
    """A figure, or a word in its place, in the given format; a dash where it is missing."""
    return "–" if value is None else format(value, form)


def markdown_line(text: str) -> str:
    """Text that begins no list, heading or table of its own, and in which `<unk>` is a word and no element."""
    return _TAG.sub("&lt;", " ".join(text.split()))


def _markdown_cell(text: str) -> str:
    return markdown_line(text).replace("|", "\\|")
