"""A page from a template of this package, every text in it escaped.

html = html_page("plan.html.j2", title="27b", variants=rows)
"""

from __future__ import annotations

from typing import Any


def html_page(template: str, **content: Any) -> str:
    """The whole page. Raises jinja2's UndefinedError where the template asks for what `content` lacks."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pipeline"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(content)
