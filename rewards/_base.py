"""What a reward is, and how one is found by name.

A reward is a module rewards/<name>.py that exposes `REWARD`, a subclass of Reward with a pydantic `Settings` schema. The file is the
registration: nothing else has to be edited. Shared parts live in modules that start with "_".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import pydantic
from torch import Tensor, nn

from flowrl.registry import did_you_mean, find
from flowrl.types import MediaContext

COLUMNS = tuple(field.name for field in dataclasses.fields(MediaContext))


class RewardBug(RuntimeError):
    """A reward broke its contract (shape, dtype, device, an unknown column). The run stops: no retry would help."""


class Settings(pydantic.BaseModel):
    """Base of every reward's settings: an unknown key is an error, values do not change after loading."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Reward:
    """Scores media for their prompts; higher is always better.

    name: what the log calls it. scale: one sentence that says what a number means. needs: MediaContext columns that it reads.
    reads: keys of each prompt's meta that it cannot do without; checked before a run.
    differentiable: whether a gradient reaches the media (as loaded: settings may decide).
    """

    Settings: ClassVar[type[Settings]] = Settings
    name: str = ""
    scale: str = ""
    needs: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    differentiable: bool = False

    def __init__(self, settings: Any = None):
        """settings: an instance of this class's Settings; None: their defaults."""
        self.settings: Any = self.Settings() if settings is None else settings

    def __call__(self, media: Tensor, prompts: list[str], context: MediaContext | None = None) -> Tensor:
        """media: (B, 3, H, W) or (B, F, 3, H, W) fp32 in [0, 1] -> (B,) fp32 on media's device; NaN marks a sample that failed."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        """What is wrong with what a prompt carries under the keys that this reward reads, as the end of a sentence; None: nothing."""
        return None

    def parts(self, media: Tensor, prompts: list[str], context: MediaContext | None = None) -> dict[str, Tensor]:
        """Readings that evaluation shows beside the score, as eval/<label>/<part>: name -> (B,) fp32. Most rewards have none."""
        return {}

    def to(self, device: Any) -> Reward:
        """Move the networks among our attributes to device; free when they are there already."""
        for value in vars(self).values():
            if isinstance(value, nn.Module):
                value.to(device)
        return self

    def __repr__(self) -> str:
        return f"<reward {self.name}: {self.scale}>"


class FunctionReward(Reward):
    """Any function (media, prompts, context) -> (B,) as a reward."""

    def __init__(self, function: Callable[..., Tensor], name: str):
        super().__init__()
        self.function, self.name = function, name
        self.needs = frozenset(getattr(function, "needs", ()))
        self.scale = getattr(function, "scale", "as the function gives it")

    def __call__(self, media: Tensor, prompts: list[str], context: MediaContext | None = None) -> Tensor:
        return self.function(media, prompts, context)


def reward_class(name: str) -> type[Reward]:
    """The class behind a reward's name, unloaded: for listings and schemas. Unknown -> ValueError with the nearest names."""
    cls = getattr(find("flowrl.rewards", name, what="reward"), "REWARD", None)
    if not (isinstance(cls, type) and issubclass(cls, Reward)):
        said = "exposes no REWARD" if cls is None else f"exposes REWARD = {cls!r}, which is no subclass of flowrl.rewards.Reward"
        raise ValueError(f'reward "{name}": its file {said}; end it with REWARD = YourClass')
    return cls


def load(name: str, **settings: Any) -> Reward:
    """Load reward `name` with its settings. Unknown reward or setting -> ValueError naming the nearest valid ones."""
    cls = reward_class(name)
    checked = parse(cls.Settings, settings, what=f'reward "{name}"')
    try:
        return cls(checked)
    except ImportError as error:
        raise ValueError(f'reward "{name}" needs a package that cannot be imported: {error}') from error


def parse(schema: type[Settings], settings: Mapping[str, Any], *, what: str) -> Settings:
    """Validate settings against schema; all problems are reported together, as one ValueError."""
    try:
        return schema.model_validate(dict(settings))
    except pydantic.ValidationError as error:
        raise ValueError(f"{what}: " + "; ".join(_sentence(problem, schema) for problem in error.errors())) from None


def _sentence(problem: Any, schema: type[Settings]) -> str:
    key = ".".join(map(str, problem["loc"])) or "settings"
    if problem["type"] == "extra_forbidden":
        return f'unknown setting "{key}"' + (did_you_mean(key, schema.model_fields) or "; it has no settings")
    return f"{key}={problem['input']!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def check_columns(rewards: Mapping[str, Reward], columns: Iterable[str]) -> None:
    """Every column that a reward declares must be offered; see flowrl.rewards.check_needs."""
    offered = set(columns)
    for label, reward in rewards.items():
        for column in sorted(reward.needs):
            if column not in COLUMNS:
                raise RewardBug(f'reward "{label}" needs "{column}", which is no context column{did_you_mean(column, COLUMNS)}')
            if column not in offered:
                have = ", ".join(sorted(offered)) or "none"
                raise ValueError(
                    f'reward "{label}" needs the context column "{column}", which is not provided (provided: {have}); '
                    f'give data that holds "{column}", or leave this reward out'
                )
