"""Figures as SVG that is put straight into an HTML page: no request, no script, the same bytes each time.

Texts stay texts (searchable, crisp, small), names are never read as formulas, and whatever could tell when or
where a figure was drawn is left out.

    svg = inline_svg("cost", size_in=(5, 4), title="Cost against batch size", paint=paint)

`paint` draws on a `matplotlib.figure.Figure` and returns hover texts by the `gid` of what it has drawn.
"""

from __future__ import annotations

import io
import os
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS_PER_INCH = 72
INK, FAINT = "#222222", "#767676"
FONT_POINTS = 9.0

_STYLE: dict[Any, object] = {
    "font.size": FONT_POINTS,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.dpi": POINTS_PER_INCH,
    "savefig.transparent": True,
    "legend.frameon": False,
}


def inline_svg(
    key: str, *, size_in: tuple[float, float], title: str, paint: Callable[[Figure], Mapping[str, str]]
) -> str:
    """An `<svg>` element that is an image called `title`; `key` keeps its ids apart from another figure's.

    `size_in` is width and height in inches at 72 points each; the element itself scales with its box.
    """
    # Read when matplotlib is first imported; notebooks set it to a backend that may not be installed here.
    os.environ["MPLBACKEND"] = "svg"
    import matplotlib
    from matplotlib.figure import Figure

    written = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has the glyphs that matplotlib's own font lacks; only its layout is a guess then.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": key})
        figure = Figure(figsize=size_in)
        tips = paint(figure)
        figure.savefig(written, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    _without_namespaces(root)
    for element in root.findall("metadata"):
        root.remove(element)
    _with_tips(root, tips)
    _with_own_ids(root, key)
    return ElementTree.tostring(_named(root, key=key, title=title), encoding="unicode")


def _without_namespaces(root: ElementTree.Element) -> None:
    """In HTML an `<svg>` needs none, and without them the page holds no address at all."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name in [name for name in element.attrib if "}" in name]:
            element.attrib[name.rpartition("}")[2]] = element.attrib.pop(name)


def _with_tips(root: ElementTree.Element, tips: Mapping[str, str]) -> None:
    for element in root.iter("g"):
        tip = tips.get(element.attrib.get("id", ""))
        if tip is not None:
            title = ElementTree.Element("title")
            title.text = printable(tip)
            element.insert(0, title)


def _with_own_ids(root: ElementTree.Element, key: str) -> None:
    """Every figure numbers its parts from one; side by side in a page they would be the same ids."""
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "id":
                element.attrib[name] = f"{key}-{value}"
            elif name == "href":
                element.attrib[name] = value.replace("#", f"#{key}-", 1)
            elif "url(#" in value:  # of its own, or among the properties of a style
                element.attrib[name] = value.replace("url(#", f"url(#{key}-")


def _named(root: ElementTree.Element, *, key: str, title: str) -> ElementTree.Element:
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"id": f"{key}-plot", "role": "img", "aria-label": printable(title)}
    element = ElementTree.Element("title")
    element.text = printable(title)
    root.insert(0, element)
    return root


def printable(text: str) -> str:
    """`text` on one line without control characters, which neither SVG nor a reader can take."""
    return "".join(character if character.isprintable() else " " for character in text)
