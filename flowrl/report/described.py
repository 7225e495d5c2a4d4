"""What each metric shows, by the one table of all metrics: templates/metrics.yaml."""

from __future__ import annotations

import functools
import re
from importlib import resources

import yaml


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Read the table: heading -> name of a metric -> sentences. Words in capitals in a name stand
    for any text."""
    file = resources.files("flowrl.report") / "templates" / "metrics.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@functools.cache
def sentence(metric: str) -> str:
    """Say what a metric shows, in the first sentence of its entry; "" for one that the table does
    not have, as of an algorithm outside the package."""
    for entries in table().values():
        for name, said in entries.items():
            if re.fullmatch(re.sub(r"[A-Z]{2,}", ".+", name), metric):
                return said.partition(". ")[0].removesuffix(".").replace("`", "") + "."
    return ""
