"""Fills the templates in report/templates: text is escaped, a name without a value is an error."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flowrl.runtime.text import visible


def _shown(value: Any) -> Any:
    """Control characters of a text are visible; markup is as we made it."""
    return visible(value) if type(value) is str else value


TEMPLATES = Environment(
    loader=PackageLoader("flowrl.report"),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["px"] = "{:.1f}".format  # pixels


def render(template: str, **values: Any) -> Markup:
    """A filled template. Being markup, it is not escaped again inside another one."""
    return Markup(TEMPLATES.get_template(template).render(values))
