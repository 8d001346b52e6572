"""The file that a command writes a page to: looked at before any work, and never one that something else would lose.

file = page_file(Path("page.html"), option="--html")
write_page_file(file, html, option="--html page.html")
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import StageError, UsageError
from pipeline.store import write_atomically


def page_file(page: Path, *, option: str = "--html") -> Path:
    """Where a page goes: a new file, or a regular one that is replaced. Raises UsageError before any work."""
    try:
        file = page.expanduser().resolve()
        taken = file.exists() and not file.is_file()
        kept = file.is_file() and not _may_be_replaced(file)
        parent = file.parent
        while not parent.exists():
            parent = parent.parent
        nowhere = not parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"{option} {page}: is no usable path ({error}); name a file such as page.html"
        ) from None
    if taken or nowhere or not page.name:
        what = f"{parent} is no folder" if nowhere else "is no regular file"
        raise UsageError(f"{option} {page}: {what}; name a file such as page.html")
    if kept:
        raise UsageError(
            f"{option} {page}: is a file and no page, and would be lost; name one such as page.html"
        )
    return file


def _may_be_replaced(file: Path) -> bool:
    """A page, by its name or its beginning, or an empty file: never a report or a recipe that was named by mistake."""
    with file.open("rb") as opened:
        beginning = opened.read(100).lstrip().lower()
    named = file.suffix.lower() in (".html", ".htm")
    return named or not beginning or beginning.startswith(b"<!doctype html")


def write_page_file(file: Path, text: str, *, option: str) -> None:
    """Write the page. Raises UsageError in the option's name where that can't be done."""
    try:
        write_atomically(file, text)
    except (OSError, StageError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).split("; ")[0]
        raise UsageError(f"{option}: can't be written: {reason}; name another file") from None
