"""Fills the templates in report/templates: text is escaped, a name without a value is an error."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Environment(
    loader=PackageLoader("flowrl.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["px"] = "{:.1f}".format  # pixels


def render(template: str, **values: Any) -> Markup:
    """A filled template. Being markup, it is not escaped again inside another one."""
    return Markup(TEMPLATES.get_template(template).render(values))
