"""Settings that were removed, and that a config.yaml of an earlier run may still name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A setting that was removed; it changed no number of a run, so that runs go on without it."""

    default: Any  # value that a config had where nobody set it
    since: str  # day on which the setting was removed
    instead: str  # advice what to do now, as the end of a sentence


GONE = {
    "train.profile_memory": Gone(
        default=False,
        since="2026-11-26",
        instead="scripts/bench/budget.py counts what each phase allocates on a CPU",
    ),
}


def without_gone(tree: Any) -> Any:
    """Return a config without removed settings; raise ValueError where one had another value than
    its default. A value that is no config is returned as it is."""
    if not isinstance(tree, dict):
        return tree
    out = dict(tree)
    for key, gone in GONE.items():
        name, _, setting = key.partition(".")
        section = out.get(name)
        if not isinstance(section, dict) or setting not in section:
            continue
        if section[setting] != gone.default:
            raise ValueError(
                f"{key}={str(section[setting]).lower()} is a setting that is gone since"
                f" {gone.since}; leave it out: {gone.instead}"
            )
        out[name] = {k: v for k, v in section.items() if k != setting}
    return out
