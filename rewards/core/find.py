"""The settings of a reward by its name; settings of rewards that flowrl ships need no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.rewards.core.rules import parse_rules, settings_of
from flowrl.rewards.core.settings import Settings, parse
from flowrl.runtime import registry
from flowrl.runtime.typed_text import Kinds, kinds_at

PACKAGE = "flowrl.rewards"


def settings_class(name: str) -> type[Settings]:
    """The schema of a reward's settings; raises ValueError as `reward_class` does."""
    found = registry.declared(PACKAGE, name, "REWARD", "Settings", what="reward")
    if found is None:
        from flowrl.rewards.core.reward import reward_class  # imported here: it imports torch

        found = reward_class(name).Settings
    return found  # type: ignore[no-any-return]


def setting_kinds(name: str, path: Sequence[str]) -> Kinds:
    """Types that a setting of reward `name` takes; none if the reward is not known."""
    try:
        return kinds_at(settings_class(name), path)
    except ValueError:  # loading the reward reports the mistake
        return frozenset()


def check_settings(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError where `load_set` would refuse these entries before it loads a network."""
    parse_rules(entries)
    for label, entry in entries.items():
        schema = settings_class(name := str(entry.get("name", label)))
        given = settings_of({k: v for k, v in entry.items() if k != "name"}, schema.model_fields)
        parse(schema, given, what=f'reward "{name}"', prefix=f"{label}.")
