"""The pipelines that every test of policies uses."""

from __future__ import annotations

from functools import partial

import tiny

from zoo.case import Case

CASES = {
    name: Case(make=partial(tiny.pipeline, name), call=tiny.CALLS[name]) for name in tiny.NAMES
}
