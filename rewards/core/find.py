"""The settings of a reward by its name; settings of rewards that flowrl ships need no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.rewards.core.rules import TEXTS, settings_of
from flowrl.rewards.core.settings import Settings, parse
from flowrl.runtime import registry
from flowrl.runtime.typed_text import TEXT, Kinds, kinds_at

PACKAGE = "flowrl.rewards"
WEIGHT = ("weight", "gain", "scale", "coef", "coefficient")  # words for a weight in other trainers


def settings_class(name: str) -> type[Settings]:
    """The schema of a reward's settings; raises ValueError as `reward_class` does."""
    if name in WEIGHT:
        raise ValueError(f'"{name}" is no reward; the weight of one is reward.clip.weight=2')
    found = registry.declared(PACKAGE, name, "REWARD", "Settings", what="reward")
    if found is None:
        from flowrl.rewards.core.reward import reward_class  # imported here: it imports torch

        found = reward_class(name).Settings
    return found  # type: ignore[no-any-return]


def setting_kinds(name: str, path: Sequence[str]) -> Kinds:
    """Types that a key of an entry for reward `name` takes; none if the reward is not known."""
    if path[0] in TEXTS:
        return TEXT
    try:
        return kinds_at(settings_class(name), path)
    except ValueError:  # loading the reward reports the mistake
        return frozenset()


def check_settings(label: str, entry: Mapping[str, Any], *, what: str, prefix: str) -> None:
    """ValueError where the settings of an entry {name (when the label is not the reward's), weight,
    gate, stratify, mode, **settings} do not suit its reward, which is not loaded.

    what, prefix: what the sentence begins with, and what a user writes before a setting.
    """
    name = str(entry.get("name", label))
    schema = Settings if registry.is_live(name) else settings_class(name)
    try:
        settings = settings_of(entry, schema.model_fields)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    settings.pop("name", None)
    parse(schema, settings, what=what, prefix=prefix)
