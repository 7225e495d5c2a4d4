"""Fills the templates in report/templates: text is escaped, a name without a value is an error."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flowrl.runtime.text import visible


def _shown(value: Any) -> Any:
    """Make control characters of a text visible; markup stays as we made it."""
    return visible(value) if type(value) is str else value


TEMPLATES = Environment(
    loader=PackageLoader("flowrl.report"),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["px"] = "{:.1f}".format  # writes a number of pixels


def render(template: str, **values: Any) -> Markup:
    """Fill a template. The result is markup, so it is not escaped again inside another template."""
    return Markup(TEMPLATES.get_template(template).render(values))
