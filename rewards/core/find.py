"""The settings of a reward by its name; of those that flowrl ships, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.rewards.core.settings import Settings
from flowrl.runtime import registry
from flowrl.runtime.typed_text import Kinds, kinds_at

PACKAGE = "flowrl.rewards"


def settings_class(name: str) -> type[Settings]:
    """The schema of a reward's settings. ValueError: see `reward_class`."""
    found = registry.declared(PACKAGE, name, "REWARD", "Settings")
    if found is None:
        from flowrl.rewards.core.reward import reward_class  # which imports torch

        found = reward_class(name).Settings
    return found  # type: ignore[no-any-return]


def setting_kinds(name: str, path: Sequence[str]) -> Kinds:
    """What a setting of reward `name` takes; nothing of a reward that is not known."""
    try:
        return kinds_at(settings_class(name), path)
    except ValueError:  # who loads it says so
        return frozenset()
