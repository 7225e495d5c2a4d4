"""Settings of what is sampled: the model, the prompts, rollouts and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from flowrl.config.section import Guidance, Place, Section, Seed
from flowrl.runtime import registry
from flowrl.runtime.rule import read_above, read_when, read_with


class ModelConfig(Section):
    source: Place = Field(
        "shapes-sd3",
        description=(
            "An embedded model, a folder in diffusers layout, a hub id, or path/to/file.py:FACTORY."
        ),
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description=(
            "Type of the frozen weights, and of the VAE where no gradient passes; trained weights"
            " are always fp32."
        ),
    )
    quantize: Literal["none", "int8", "nf4"] = Field(
        "none",
        description=(
            "Frozen weights of the denoiser's blocks in 8 bits (int8, by torchao) or 4 (nf4, by"
            " bitsandbytes); LoRA on top stays fp32. Needs the extra quantize."
        ),
    )
    tiling: bool = Field(
        False,
        description=(
            "Decode a tile at a time, for large pictures and videos; batch.decode is how many"
            " samples."
        ),
    )
    encoders: Literal["stay", "leave"] = Field(
        "stay",
        description=(
            "leave: the text encoders wait in host memory, and are on the device only while a"
            " prompt is new; they cannot be trained then."
        ),
    )
    prompt_cache: Place | None = Field(
        None,
        description=(
            "Folder that keeps what text encoders answer, for runs to come and processes beside;"
            " none: each run encodes its prompts."
        ),
    )
    prompt_cache_gb: Annotated[PositiveFloat, read_with("model.prompt_cache")] = Field(
        20.0, description="Most that it holds; what was used longest ago goes first."
    )
    offload: Literal["none", "denoiser", "all"] = Field(
        "none",
        description=(
            "denoiser: its frozen weights wait in host memory while samples are decoded and scored,"
            " and while a text encoder is there that leaves. all: and so do the networks of rewards"
            " while none is scored."
        ),
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
    hints: Place | dict[str, Any] | None = Field(
        None,
        description=(
            "For a pipeline whose inference is not unique: arguments of"
            " flowrl.policy.replay.hints.register, or path/to/file.py:NAME of such a mapping."
        ),
    )

    _places = pydantic.field_validator("source", "hints")(registry.absolute)

    @pydantic.field_validator("prompt_cache")
    @classmethod
    def check_prompt_cache(cls, value: str | None) -> str | None:
        return None if value is None else str(Path(value).absolute())


HELPING = read_above("data.sampler.help.after", 0)
COUNTING = read_when("data.sampler.mode", "bayes") | HELPING


class HelpConfig(Section):
    after: NonNegativeInt = Field(
        0,
        description=(
            "Visits of a prompt without a successful sample after which its samples are helped; for"
            " methods on finished samples; 0: never."
        ),
    )
    guidance: Annotated[PositiveFloat | None, HELPING] = Field(
        None, description="Guidance of helped samples; none: that of the others."
    )
    steps: Annotated[PositiveInt | None, HELPING] = Field(
        None, description="Denoising steps of helped samples; none: those of the others."
    )
    column: Annotated[str | None, HELPING] = Field(
        None,
        description=(
            "Column of the prompts with a text to sample helped ones with, where it has one; none:"
            " their own."
        ),
    )
    decay: Annotated[float, Field(ge=0, le=1), HELPING] = Field(
        0.5,
        description="A visit is helped with this probability to the power of those that succeeded.",
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
    success: Annotated[float | None, COUNTING] = Field(
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
    help: HelpConfig = Field(HelpConfig(), description="For prompts that never succeeded.")


class DataConfig(Section):
    train: Place = Field(
        "shapes:train",
        description=(
            "Prompts: a file (one a line, JSON, a table, parquet, a tar shard), shapes:train,"
            " hf:OWNER/NAME (a dataset), or path/to/file.py:NAME."
        ),
    )
    eval: Place | None = Field(
        "shapes:eval", description="Held-out prompts, as train; none: no evaluation."
    )
    offline: Place | None = Field(
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

    @pydantic.model_validator(mode="after")
    def check_train(self) -> Self:
        if not self.train and not self.offline:
            raise ValueError("no prompts are named; add data.train=prompts.txt")
        return self


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
    rlg: NonNegativeFloat = Field(
        1.0,
        description=(
            "Weight of Reinforcement Learning Guidance in rollouts, of methods on finished samples:"
            " 0 the base model, 1 the trained one, above 1 beyond it; twice the calls."
        ),
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
    states: Literal["device", "host"] = Field(
        "device",
        description=(
            "Where the states of rollouts are kept for the update; host: each forward fetches its"
            " rows."
        ),
    )
    overlap: NonNegativeInt = Field(
        0,
        description=(
            "Prompts sampled at a time, while the rewards of those before are computed in a thread;"
            " 0: all, then their rewards."
        ),
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


class EvalConfig(Section):
    every: NonNegativeInt = Field(
        20,
        description=(
            "Iterations between evaluations on held-out prompts; 0: only before and after training."
        ),
    )
    steps: PositiveInt = Field(40, description="ODE steps of an evaluation sample.")
    solver: Literal["euler", "dpm2"] = Field(
        "euler", description="ODE solver of an evaluation sample."
    )
    guidance: Guidance = Field("none", description="Guidance of the rows before and after.")
    rlg: NonNegativeFloat = Field(
        1.0,
        description=(
            "Weight of Reinforcement Learning Guidance in evaluations: 0 the base model, 1 the"
            " trained one, above 1 beyond it; twice the calls."
        ),
    )
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
