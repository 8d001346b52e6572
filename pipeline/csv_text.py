"""Tables as CSV that spreadsheets and scripts read alike.

>>> csv_text(("name", "noisy"), [("=1+1", True)])
"name,noisy\\n'=1+1,true\\n"
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

Cell = str | int | float | None
FORMULA_STARTS = ("=", "+", "-", "@")
"""A text cell that starts so is computed by spreadsheets (OWASP, "CSV Injection")."""


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """RFC 4180 with "\\n" at a line's end; what is missing is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def _cell(cell: Cell) -> Cell:
    """Numbers whole; text on one line, and never a formula."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if not isinstance(cell, str):
        return cell
    line = " ".join(cell.splitlines()).strip()
    return f"'{line}" if line.startswith(FORMULA_STARTS) else line
