"""A reward made of another one: how it names the inner one, and how it needs, reads and refuses
the same as the inner one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from flowrl.rewards.core.reward import FunctionReward, Reward, load, network_bytes


def load_inner(value: Any, settings: Mapping[str, Any], *, reward: str, setting: str) -> Any:
    """Load the reward that `setting` of `reward` names, with its settings; Python may also give a
    loaded one, a comparator or a function."""
    key = f"reward.{reward}.{setting}"
    if value is None:
        raise ValueError(
            f"reward {reward} works on another reward: set {key} to its name, for example"
            f" {key}=clip"
        )
    if isinstance(value, str):
        return load(value, **settings)
    return _loaded(value, settings, key)


def inner_bytes(value: Any, settings: Mapping[str, Any]) -> float | None:
    """Reward.network_bytes of the reward that a setting names; None for an object from Python."""
    return network_bytes(value, **settings) if isinstance(value, str) else None


def _loaded(value: Any, settings: Mapping[str, Any], key: str) -> Any:
    """A reward, comparator or function that Python gives."""
    if settings:
        raise ValueError(
            f"{key} is already loaded, so {sorted(settings)} cannot be set; leave"
            f" {key}_settings out"
        )
    if hasattr(value, "REWARD"):  # a function under @flowrl.reward
        return value.REWARD()
    if isinstance(value, Reward) or hasattr(value, "compare"):
        return value
    if callable(value):
        return FunctionReward(value, getattr(value, "__name__", key.rpartition(".")[2]))
    raise ValueError(
        f"{key}={value!r} is not a reward; give a reward's name, or in Python a reward, a"
        " comparator or a function"
    )


class Around(Reward):
    """A reward that asks `inner`, which moves with it, keeps its records in the same run and says
    why a sample failed.

    If the inner one is a judge that writes, its `read_reply` is passed on. asks: name of the
    setting that names the inner one; the setting with _settings at its end holds the inner
    settings.
    """

    asks: ClassVar[str] = "reward"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        self.inner = inner = load_inner(
            *self._asked(self.settings), reward=self.name, setting=self.asks
        )
        self.needs = type(self).needs | frozenset(getattr(inner, "needs", ()))
        self.reads = frozenset(getattr(inner, "reads", ()))
        self.reads_prompt = getattr(inner, "reads_prompt", False)
        self.takes = getattr(inner, "takes", "any")
        self.video = getattr(inner, "video", "yes")
        self.remedies = getattr(inner, "remedies", {})
        self.quality = getattr(inner, "quality", False)
        self.verifies = getattr(inner, "verifies", frozenset())
        if hasattr(inner, "read_reply"):
            self.read_reply = inner.read_reply

    @classmethod
    def _asked(cls, settings: Any) -> tuple[Any, Mapping[str, Any]]:
        return getattr(settings, cls.asks), getattr(settings, f"{cls.asks}_settings")

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        return inner_bytes(*cls._asked(settings))

    def inner_rewards(self) -> list[Reward]:
        return [self.inner] if isinstance(self.inner, Reward) else []

    def to(self, device: torch.device | str) -> Reward:
        # a comparator, which is no Reward
        if hasattr(self.inner, "to") and not isinstance(self.inner, Reward):
            self.inner.to(device)
        return super().to(device)
