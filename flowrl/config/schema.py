"""What a run is made of: the pydantic schema holds every default once; flowrl/config/compose.py
puts files and overrides on top of it.

`load_config` returns a validated, frozen Config or raises ConfigError with every problem found, one
a line. Model, algorithm, reward and data are independent groups in configs/; a YAML there states
only what differs from the schema. The section `algorithm` is checked by the chosen algorithm's own
Config, and a reward's settings by the reward itself.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from flowrl.algorithms.common.find import algorithm_class
from flowrl.config.compose import one_form, options
from flowrl.runtime import registry
from flowrl.runtime.read_when import read_when
from flowrl.types import Solver

Guidance = float | Literal["none", "pipeline"]


Beta = Annotated[float, Field(ge=0, lt=1)]


Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelConfig(Section):
    source: str = Field(
        "shapes-sd3",
        description=(
            "An embedded model, a folder in diffusers layout, a hub id, or path/to/file.py:FACTORY."
        ),
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Type of the frozen weights; trained weights are always fp32."
    )
    self_check: bool = Field(
        True,
        description=(
            "Compare the replayed network with the pipeline itself before training: three short"
            " runs."
        ),
    )
    pipeline: dict[str, Any] = Field(
        {}, description="Arguments of the pipeline's call, such as height, width, num_frames."
    )
    hints: str | dict[str, Any] | None = Field(
        None,
        description=(
            "For a pipeline whose inference is not unique: arguments of"
            " flowrl.policy.replay.hints.register, or path/to/file.py:NAME of such a mapping."
        ),
    )

    _places = pydantic.field_validator("source", "hints")(registry.absolute)


class SamplerConfig(Section):
    steps: PositiveInt = Field(10, description="Denoising steps of a rollout.")
    eta: NonNegativeFloat = Field(
        0.7,
        description=(
            "Noise level of SDE steps, in the unit of the transition that the algorithm names."
        ),
    )
    init_noise: Literal["sample", "group", "batch"] = Field(
        "sample",
        description="Which samples share the initial noise: none, those of one prompt, all.",
    )
    schedule: Literal["pipeline", "linear"] = Field(
        "pipeline",
        description="Where sigmas come from: the pipeline's own scheduler, or evenly spaced.",
    )
    guidance: Guidance = Field(
        "none",
        description="Guidance in rollouts: a scale, none (one branch), or the pipeline's setting.",
    )


class BatchConfig(Section):
    prompts: PositiveInt = Field(
        8, description="Prompts an iteration, over all processes; divides by processes x updates."
    )
    group: PositiveInt = Field(
        16, description="Samples a prompt, at least 2; a multiple of the plan's leaves."
    )
    updates: PositiveInt = Field(1, description="Optimizer steps an iteration.")
    micro: PositiveInt = Field(
        64,
        description=(
            "Most network rows (states x guidance branches) in one forward; a cap, never an error."
        ),
    )
    decode: PositiveInt = Field(32, description="Most samples decoded and scored at once.")
    overlap: NonNegativeInt = Field(
        0,
        description=(
            "Prompts sampled at a time, while the rewards of those before are computed in a thread;"
            " 0: all, then their rewards."
        ),
    )


class LoraConfig(Section):
    rank: PositiveInt = Field(32, description="Rank of the update.")
    alpha: PositiveFloat = Field(64, description="The update is scaled by alpha / rank.")
    targets: list[str] | None = Field(
        None,
        description=(
            "Endings of the names of adapted layers; none given: the attention projections."
        ),
    )
    init: Literal["gaussian", "kaiming"] = Field(
        "gaussian", description="Distribution of A; B starts at 0: training starts at the base."
    )


class DrawConfig(Section):
    mode: Literal["once", "refill", "balance"] = Field(
        "once",
        description=(
            "Sample each group once; add fresh prompts for groups whose rewards are equal (dynamic"
            " sampling); or sample a prompt again until half a group is good and half is not"
            " (Reinforce-Ada)."
        ),
    )
    rounds: Annotated[PositiveInt, read_when("draw.mode", "refill", "balance")] = Field(
        3, description="Most further rounds."
    )
    spread: Annotated[NonNegativeFloat, read_when("draw.mode", "refill")] = Field(
        1e-6, description="Standard deviation of a group's rewards up to which they are equal."
    )
    positive: Annotated[float | None, read_when("draw.mode", "balance")] = Field(
        None, description="A good sample's reward exceeds this; none: the first round's median."
    )


class TrainConfig(Section):
    parts: list[Literal["denoiser"]] = Field(
        ["denoiser"], min_length=1, description="What is trained."
    )
    mode: Literal["lora", "full"] = Field("lora", description="Low-rank adapters, or every weight.")
    lora: LoraConfig = Field(LoraConfig(), description="The adapters, when mode is lora.")
    init_lora: str | None = Field(None, description="Folder of an existing LoRA to start from.")
    # YAML 1.1 reads a bare `no` as false
    precision: Annotated[
        Literal["no", "bf16", "fp16"], BeforeValidator(lambda v: "no" if v is False else v)
    ] = Field(
        "no",
        description="Mixed precision of the forward: none, bf16 or fp16 with a gradient scaler.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward: less memory, a quarter more time.",
    )


class OptimizerConfig(Section):
    lr: PositiveFloat = Field(3e-4, description="Peak learning rate of AdamW.")
    warmup: NonNegativeInt = Field(
        0, description="Optimizer steps over which the rate rises linearly from 0."
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Course after warm-up; cosine and linear end at 0."
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="Decay of the moments.")
    weight_decay: NonNegativeFloat = Field(1e-4, description="Decoupled weight decay.")
    eps: PositiveFloat = Field(1e-8, description="Added to the root of the second moment.")
    max_grad_norm: PositiveFloat = Field(
        1.0, description="Gradients are scaled down to this global norm."
    )


class EmaConfig(Section):
    decay: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="Highest decay of the averaged weights, used in evaluation; 0: no averaging.",
    )
    every: PositiveInt = Field(8, description="Optimizer steps between two averagings.")


class EvalConfig(Section):
    every: NonNegativeInt = Field(
        20,
        description=(
            "Iterations between evaluations on held-out prompts; 0: only before and after training."
        ),
    )
    steps: PositiveInt = Field(40, description="ODE steps of an evaluation sample.")
    solver: Solver = Field("euler", description="ODE solver of an evaluation sample.")
    guidance: Guidance = Field("none", description="Guidance of the rows before and after.")
    baseline_guidance: PositiveFloat | None = Field(
        None, description="Adds the row 'before, guided': untrained, at this guidance."
    )
    images: PositiveInt = Field(
        512, description="Samples an evaluation, spread evenly over the held-out prompts."
    )
    at_start: bool = Field(
        True, description="Evaluate before the first iteration, so that the report can compare."
    )
    seed: Seed = Field(
        0,
        description=(
            "Seed of evaluation noise; the same before and after, and independent of the run's"
            " seed."
        ),
    )


class CheckpointConfig(Section):
    every: PositiveInt = Field(
        50,
        description=(
            "Iterations between checkpoints; one is always written before the first, at the end and"
            " when stopped."
        ),
    )
    minutes: PositiveFloat | None = Field(
        15.0, description="Most minutes between checkpoints, whatever every says; none: no limit."
    )
    keep: PositiveInt = Field(2, description="Newest checkpoints kept.")


class StopConfig(Section):
    kl: PositiveFloat | None = Field(
        None,
        description=(
            "Stop when policy/kl exceeds this; it is measured with algorithm.kl_weight above 0."
        ),
    )
    reward: float | None = Field(None, description="Stop when reward/total reaches this.")
    hours: PositiveFloat | None = Field(
        None, description="Stop after this time, resumed runs counted from their start."
    )


class GuardConfig(Section):
    nonfinite: PositiveInt = Field(
        5,
        description=(
            "Non-finite updates in a row (skipped, batch written out), or iterations in a row whose"
            " gradient is exactly 0, before the run stops."
        ),
    )
    warn_after: PositiveInt = Field(
        10,
        description=(
            "Iterations in a row without an optimizer step, or in which a reward is the same for"
            " all samples, before it is said."
        ),
    )
    stop_after: PositiveInt | None = Field(
        100,
        description=(
            "Such iterations in a row, or those with huge rewards, before the run stops with exit"
            " code 1; none: never."
        ),
    )
    huge: PositiveFloat = Field(
        1e6, description="A reward times its weight beyond this, either way, is huge."
    )
    reward_seconds: PositiveFloat | None = Field(
        1800,
        description=(
            "Most seconds that a reward may take for a chunk of batch.decode samples before the run"
            " stops. null: no limit."
        ),
    )
    rank_seconds: PositiveFloat = Field(
        3600,
        description=(
            "Most seconds that a process waits for the others, of which one may still score."
        ),
    )
    invalid_fraction: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Stop when more than this share of samples has no valid reward.",
    )
    check_rewards: bool = Field(
        True,
        description=(
            "Try the rewards on the first samples: batch mates, determinism, noise against spread."
        ),
    )


class ChoiceConfig(Section):
    mode: Literal["uniform", "bayes", "bandit"] = Field(
        "uniform",
        description=(
            "Which prompts an iteration sees: shuffled epochs; those whose success is nearest a"
            " target, by a draw from what is believed of each; or of the tags that taught most."
        ),
    )
    target: Annotated[float, Field(gt=0, lt=1), read_when("data.sampler.mode", "bayes")] = Field(
        0.5, description="Success that is looked for."
    )
    success: Annotated[float | None, read_when("data.sampler.mode", "bayes")] = Field(
        None,
        description="Reward from which a sample is a success; none: rewards are shares, 0 to 1.",
    )
    forgetting: Annotated[float, Field(ge=0, le=1), read_when("data.sampler.mode", "bayes")] = (
        Field(0.7, description="Share of a prompt's counts that is kept when it is seen again.")
    )
    tag: Annotated[str, Field(min_length=1), read_when("data.sampler.mode", "bandit")] = Field(
        "tag", description="Column of the prompts whose values are the arms."
    )
    rate: Annotated[float, Field(gt=0, le=1), read_when("data.sampler.mode", "bandit")] = Field(
        0.5, description="How far the value of an arm goes towards its newest gain."
    )
    temperature: Annotated[PositiveFloat, read_when("data.sampler.mode", "bandit")] = Field(
        0.2, description="Arms are drawn by a softmax of their value over this."
    )


class DataConfig(Section):
    train: str = Field(
        "shapes:train",
        description=(
            "Prompts: a .txt (one a line), .jsonl, .csv or .parquet file, shapes:train,"
            " hf:OWNER/NAME (a dataset), or path/to/file.py:NAME."
        ),
    )
    eval: str | None = Field(
        "shapes:eval", description="Held-out prompts, as train; none: no evaluation."
    )
    offline: str | None = Field(
        None,
        description=(
            "Folder of `flowrl score` to train on, in place of rollouts; its prompts replace train."
        ),
    )

    columns: dict[str, str] = Field(
        {},
        description=(
            "Of a table: {prompt: caption, image: before} takes these two columns alone, under"
            " these names; empty: all columns as they are."
        ),
    )

    sampler: ChoiceConfig = Field(ChoiceConfig(), description="Which prompts an iteration sees.")

    _places = pydantic.field_validator("train", "eval")(registry.absolute)

    @pydantic.field_validator("train")
    @classmethod
    def check_train(cls, value: str) -> str:
        if not value:
            raise ValueError(
                "no prompts are named; add data.train=prompts.txt (one a line), a .jsonl file, or"
                " data=shapes"
            )
        return value


class LiveOptions(BaseModel):
    """Options of an algorithm that a script handed over, as they were."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Config(Section):
    """One run. `algorithm` is {name, **options} with the algorithm's defaults filled in; `reward`
    is name -> {weight, **settings}."""

    model: ModelConfig = Field(ModelConfig(), description="The pretrained model.")
    algorithm: dict[str, Any] = Field({}, description="name, and the options of that algorithm.")
    reward: dict[str, dict[str, Any]] = Field(
        {}, description="Name -> weight, or name -> {weight, settings}."
    )
    data: DataConfig = Field(DataConfig(), description="Prompts.")
    sampler: SamplerConfig = Field(SamplerConfig(), description="How rollouts are sampled.")
    batch: BatchConfig = Field(BatchConfig(), description="How many of everything.")
    draw: DrawConfig = Field(DrawConfig(), description="How often prompts are sampled.")
    train: TrainConfig = Field(
        TrainConfig(), description="What is trained, and in which precision."
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW.")
    ema: EmaConfig = Field(EmaConfig(), description="Averaged weights.")
    eval: EvalConfig = Field(EvalConfig(), description="Held-out evaluation.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="When to save.")
    stop: StopConfig = Field(StopConfig(), description="When to stop before the last iteration.")
    guard: GuardConfig = Field(GuardConfig(), description="When to give up.")
    iterations: PositiveInt = Field(
        100, description="Iterations: a rollout, its rewards, its updates."
    )
    seed: Seed = Field(
        0, description="Every random choice of a run is a function of this and of ids."
    )
    output: str | None = Field(None, description="Run folder; none: runs/ and the time of day.")
    trackers: list[str] = Field(
        ["tensorboard"], description="Trackers of accelerate: tensorboard, wandb, trackio ..."
    )

    @pydantic.field_validator("algorithm", mode="before")
    @classmethod
    def check_algorithm(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError(
                f"no algorithm is named; choose algorithm={'|'.join(options('algorithm'))}"
            )
        name = registry.absolute(value["name"])  # a run resumes from any folder
        return {"name": name} | algorithm_schema(name).model_validate(
            {k: v for k, v in value.items() if k != "name"}
        ).model_dump()

    @pydantic.field_validator("reward", mode="before")
    @classmethod
    def check_reward(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not value:
            raise ValueError(
                "no reward is named; choose reward=NAME of"
                f" {', '.join(registry.choices('flowrl.rewards'))}"
            )
        from flowrl.rewards.core import rules

        out, problems, found = {}, [], {}
        for label, entry in one_form(value).items():
            out[label] = entry = {"weight": 1.0} | entry
            if registry.is_place(entry.get("name")):
                entry["name"] = registry.absolute(entry["name"])
            try:
                check_reward_entry(label, entry)
                found[label] = rule = rules.parse_rule(label, entry)
                out[label] = rule.stated | {k: v for k, v in entry.items() if k not in rules.KEYS}
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))
        rules.check_rules(found)
        return out


def check_reward_entry(label: str, entry: dict[str, Any]) -> None:
    """Judge {weight, gate, stratify, name (when the label is not the reward's name), **settings}
    without loading the reward; wrong -> ValueError."""
    from flowrl.rewards.core import reward as core_reward
    from flowrl.rewards.core.rules import KEYS
    from flowrl.rewards.core.schedule import is_number

    weight = entry["weight"]
    settings = {k: v for k, v in entry.items() if k not in (*KEYS, "name")}
    name = str(entry.get("name", label))
    live = registry.is_live(name)
    schema = core_reward.Settings if live else core_reward.reward_class(name).Settings
    if not isinstance(weight, dict) and not is_number(weight):
        raise ValueError(f"reward.{label}={weight!r} should be its weight, a finite number")
    core_reward.parse(schema, settings, what=f"reward.{label}", prefix=f"reward.{label}.")


def algorithm_schema(name: str) -> type[BaseModel]:
    """The pydantic schema of an algorithm's options; of a live one, which is not at hand, any."""
    return LiveOptions if registry.is_live(name) else algorithm_class(name).Config
