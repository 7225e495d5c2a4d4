"""The settings of a run: the pydantic schema holds every default once, in the sections of
sampling.py and training.py; flowrl/config/compose.py puts files and overrides on top of it.

`load_config` returns a validated, frozen Config or raises ConfigError with every problem found, one
a line. Model, algorithm, reward and data are independent groups in configs/; a YAML there states
only what differs from the schema. The section `algorithm` is checked by the chosen algorithm's own
Config, and a reward's settings by the reward itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from flowrl.config.compose import one_form, options
from flowrl.config.sampling import (
    BatchConfig,
    DataConfig,
    DrawConfig,
    EvalConfig,
    ModelConfig,
    SamplerConfig,
)
from flowrl.config.section import NotNamed, Place, Section, Seed
from flowrl.config.training import (
    AnchorConfig,
    CheckpointConfig,
    DiversityConfig,
    EmaConfig,
    GradientConfig,
    GuardConfig,
    OptimizerConfig,
    ReplayConfig,
    StopConfig,
    TrackingConfig,
    TrainConfig,
    WatchConfig,
)
from flowrl.runtime import registry
from flowrl.runtime.text import printable


class LiveOptions(BaseModel):
    """Options of an algorithm that a script handed over, kept as they were."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Config(Section):
    """One run. `algorithm` is {name, **options} with the algorithm's defaults filled in; `reward`
    is name -> {weight, **settings}."""

    model: ModelConfig = Field(ModelConfig(), description="The pretrained model.")
    # validate_default: a file that leaves one of the two out is refused, as an empty one is
    algorithm: dict[str, Any] = Field(
        {},
        validate_default=True,
        description=(
            "Name of the algorithm; label, by which the run calls its method (its file of"
            " configs/algorithm); and the options of that algorithm."
        ),
    )
    reward: dict[str, dict[str, Any]] = Field(
        {},
        validate_default=True,
        description="Rewards: name -> weight, or name -> {weight, settings}.",
    )
    data: DataConfig = Field(DataConfig(), description="Prompts.")
    sampler: SamplerConfig = Field(SamplerConfig(), description="How rollouts are sampled.")
    batch: BatchConfig = Field(
        BatchConfig(), description="How many prompts and samples, and how many rows at once."
    )
    draw: DrawConfig = Field(DrawConfig(), description="How often prompts are sampled.")
    diversity: DiversityConfig = Field(
        DiversityConfig(),
        description="How likeness to its group changes a sample's reward or advantage.",
    )
    train: TrainConfig = Field(
        TrainConfig(), description="What is trained, and in which precision."
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="Settings of the optimizer.")
    gradient: GradientConfig = Field(
        GradientConfig(), description="Rewards with mode=grad, climbed beside the method's loss."
    )
    anchor: AnchorConfig = Field(
        AnchorConfig(), description="What the policy is kept near, beside algorithm.kl_weight."
    )
    replay: ReplayConfig = Field(ReplayConfig(), description="Old samples, trained again.")
    ema: EmaConfig = Field(EmaConfig(), description="Averaged weights.")
    eval: EvalConfig = Field(EvalConfig(), description="Held-out evaluation.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="When to save.")
    stop: StopConfig = Field(StopConfig(), description="When to stop before the last iteration.")
    watch: WatchConfig = Field(
        WatchConfig(), description="Signs that the trained reward is being hacked."
    )
    guard: GuardConfig = Field(
        GuardConfig(), description="When a run warns of trouble, and when it gives up."
    )
    iterations: PositiveInt = Field(
        100, description="Iterations: a rollout, its rewards, its updates."
    )
    seed: Seed = Field(
        0, description="Every random choice of a run is a function of this and of ids."
    )
    output: Place | None = Field(None, description="Run folder; none: runs/ and the time of day.")
    trackers: list[str] = Field(
        ["tensorboard"],
        description="Trackers, through accelerate: tensorboard, wandb, trackio, swanlab ...",
    )
    tracking: TrackingConfig = Field(
        TrackingConfig(), description="What trackers other than tensorboard call the run."
    )

    def __repr__(self) -> str:
        rewards = ", ".join(self.reward)
        facts = f"algorithm={self.algorithm['label']!r}, reward={rewards!r}"
        facts = f"model={self.model.source!r}, {facts}, iterations={self.iterations}"
        return printable(f"Config({facts}, seed={self.seed}, output={self.output!r})", 500)

    @pydantic.field_validator("algorithm", mode="before")
    @classmethod
    def check_algorithm(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError(
                f"no algorithm is named; choose algorithm={'|'.join(options('algorithm'))}"
            )
        name = registry.absolute(value["name"])  # a run may be resumed elsewhere
        label = value.get("label", registry.label_of(name))  # earlier runs have no label
        if not isinstance(label, str) or not re.fullmatch(r"[\w.+-]+", label):
            raise ValueError(f"algorithm.label={label!r} should be letters, digits and . + - _")
        own = algorithm_schema(name).model_validate(options_of(value)).model_dump()
        return {"name": name, "label": label, **own}

    @pydantic.field_validator("reward", mode="before")
    @classmethod
    def check_reward(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not value:
            raise NotNamed("no reward is named; add reward=pickscore, for example")
        from flowrl.rewards.core import find, rules, schedule

        out, problems, found = {}, [], {}
        for label, entry in one_form(value).items():
            out[label] = entry = {"weight": 1.0} | entry
            if registry.is_place(entry.get("name")):
                entry["name"] = registry.absolute(entry["name"])
            what, weight = f"reward.{label}", entry["weight"]
            try:
                if not isinstance(weight, dict) and not schedule.is_number(weight):
                    raise ValueError(f"{what}={weight!r} should be its weight, a finite number")
                find.check_settings(label, entry, what=what, prefix=f"{what}.")
                found[label] = rule = rules.parse_rule(label, entry)
                out[label] = rule.stated | rules.settings_of(entry)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))
        rules.check_rules(found)
        return out


def options_of(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a section that the algorithm's own class reads."""
    return {key: value for key, value in algorithm.items() if key not in ("name", "label")}


def algorithm_schema(name: str) -> type[BaseModel]:
    """Return the schema of an algorithm's options; for a live algorithm, which is not at hand, a
    schema that takes any options."""
    if registry.is_live(name):
        return LiveOptions
    found = registry.declared("flowrl.algorithms", name, "ALGORITHM", "Config", what="algorithm")
    if found is None:
        from flowrl.algorithms.common.find import algorithm_class  # imported here: it imports torch

        found = algorithm_class(name).Config
    return found  # type: ignore[no-any-return]
