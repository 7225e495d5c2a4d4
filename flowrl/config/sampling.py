"""Settings of sampling: the model, the prompts, rollouts and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from flowrl.config.section import Guidance, NotNamed, Place, Section, Seed
from flowrl.runtime import registry
from flowrl.runtime.rule import read_above, read_when, read_with

Crop = Literal["none", "center"]


def _whole(folder: str | None) -> str | None:
    """The absolute path of a folder, so that a run resumes from any other one."""
    return None if folder is None else str(Path(folder).absolute())


class ModelConfig(Section):
    source: Place = Field(
        "shapes-sd3",
        description=(
            "Model to train: an embedded model, a folder in diffusers layout, a hub id, or"
            " path/to/file.py:FACTORY."
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
            "Keep the frozen weights of the denoiser's blocks in 8 bits (int8, by torchao) or 4"
            " (nf4, by bitsandbytes); LoRA on top stays fp32. Needs the extra quantize."
        ),
    )
    tiling: bool = Field(
        False,
        description=(
            "Decode one tile at a time, for large pictures and videos; batch.decode says how many"
            " samples at once."
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
            "Folder that keeps the outputs of text encoders, for later runs and for other"
            " processes; none: each run encodes its prompts."
        ),
    )
    prompt_cache_gb: Annotated[PositiveFloat, read_with("model.prompt_cache")] = Field(
        20.0,
        description=(
            "Largest size of the prompt cache, in GB; what was used longest ago is removed first."
        ),
    )
    offload: Literal["none", "denoiser", "all"] = Field(
        "none",
        description=(
            "Which networks wait in host memory. denoiser: its frozen weights, while samples are"
            " decoded and scored, and while a text encoder that leaves (model.encoders) is on the"
            " device. all: also the networks of rewards, while nothing is scored."
        ),
    )
    self_check: bool = Field(
        True,
        description=(
            "Compare the replayed network with the pipeline itself before training, in three short"
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

    _folders = pydantic.field_validator("prompt_cache")(_whole)


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
            "Column of the prompts whose text, where there is one, replaces the prompt of helped"
            " samples; none: they keep their prompt."
        ),
    )


class ChoiceConfig(Section):
    mode: Literal["uniform", "bayes", "bandit"] = Field(
        "uniform",
        description=(
            "Which prompts an iteration sees: shuffled epochs (uniform); prompts whose chance of"
            " success, drawn from its posterior, is nearest a target (bayes); or prompts of the"
            " tags with the largest gain (bandit)."
        ),
    )
    target: Annotated[float, Field(gt=0, lt=1), read_when("data.sampler.mode", "bayes")] = Field(
        0.5, description="Chance of success that is sought."
    )
    success: Annotated[float | None, COUNTING] = Field(
        None,
        description=(
            "Reward from which on a sample is a success; none: rewards lie in 0 to 1 and are"
            " shares of success."
        ),
    )
    forgetting: Annotated[float, Field(ge=0, le=1), read_when("data.sampler.mode", "bayes")] = (
        Field(0.7, description="Share of a prompt's counts that is kept when it is seen again.")
    )
    tag: Annotated[str, Field(min_length=1), read_when("data.sampler.mode", "bandit")] = Field(
        "tag", description="Column of the prompts whose values are the arms."
    )
    rate: Annotated[float, Field(gt=0, le=1), read_when("data.sampler.mode", "bandit")] = Field(
        0.5, description="Share of the way that the value of an arm moves towards its newest gain."
    )
    temperature: Annotated[PositiveFloat, read_when("data.sampler.mode", "bandit")] = Field(
        0.2, description="Arms are drawn by a softmax of their value over this."
    )
    help: HelpConfig = Field(HelpConfig(), description="Help for prompts that never succeeded.")


class MixtureFile(Section):
    path: Place = Field(description="Prompts, given as those of data.train.")
    weight: float = Field(1.0, description="Share of an iteration's prompts, over the sum of all.")
    domain: str | None = Field(
        None, min_length=1, description="Domain of each prompt; none: the prompts carry theirs."
    )

    _places = pydantic.field_validator("path")(registry.absolute)


class DataConfig(Section):
    train: Place = Field(
        "shapes:train",
        description=(
            "Prompts: a file (one a line, JSON, a table, parquet, a tar shard), shapes:train,"
            " hf:OWNER/NAME (a dataset), or path/to/file.py:NAME."
        ),
    )
    eval: Place | None = Field(
        "shapes:eval",
        description="Held-out prompts, given as those of data.train; none: no evaluation.",
    )
    offline: Place | None = Field(
        None,
        description=(
            "Files to train on in place of rollouts, whose prompts replace train: a folder of"
            " `flowrl score`, media with their prompts (sft), or preference pairs (dpo)."
        ),
    )
    crop: Annotated[Crop, read_with("data.offline") | read_above("anchor.data.weight", 0)] = Field(
        "none",
        description=(
            "What happens to files of another size than the model's: they are refused, or resized"
            " and cropped to their middle (center)."
        ),
    )
    latent_cache: Annotated[
        Place | None, read_with("data.offline") | read_above("anchor.data.weight", 0)
    ] = Field(
        None,
        description=(
            "Folder that keeps the latents of media, for later epochs and runs and for other"
            " processes; none: the VAE encodes a file whenever it is drawn."
        ),
    )
    validation: Annotated[Place | None, read_with("data.offline")] = Field(
        None,
        description=(
            "Held-out media (sft) or pairs (dpo), given as those of data.offline, whose loss is"
            " logged every eval.every iterations, at noise that never changes."
        ),
    )
    labels: Annotated[Literal["hard", "soft"], read_with("data.offline")] = Field(
        "hard",
        description=(
            "Labels of pairs: the file that most raters prefer wins, and ties are left out (hard);"
            " or the share p of raters weighs both orders (soft)."
        ),
    )
    temperature: Annotated[PositiveFloat, read_when("data.labels", "soft")] = Field(
        1.0,
        description="Margins and differences of scores m give the share p = sigmoid(m / this).",
    )

    columns: dict[str, str] = Field(
        {},
        description=(
            "Columns to take from a table: {prompt: caption, image: before} takes these two alone,"
            " under these names; empty: all columns as they are."
        ),
    )

    mixture: list[MixtureFile] = Field(
        [],
        description=(
            "Several files in place of train, {path, weight, domain} each: an iteration draws from"
            " each by its weight. domain is that of a file whose prompts carry none."
        ),
    )
    domain: str = Field(
        "domain",
        min_length=1,
        description=(
            "Column of the prompts that names their domain, which rewards with domains read."
        ),
    )
    sampler: ChoiceConfig = Field(ChoiceConfig(), description="Which prompts an iteration sees.")

    _places = pydantic.field_validator("train", "eval")(registry.absolute)
    _folders = pydantic.field_validator("latent_cache")(_whole)

    @property
    def sources(self) -> list[str]:
        """The sources of the prompts to train on."""
        return [file.path for file in self.mixture] or [self.train]

    @pydantic.field_validator("mixture")
    @classmethod
    def check_mixture(cls, files: list[MixtureFile]) -> list[MixtureFile]:
        if wrong := next((file for file in files if file.weight <= 0), None):
            raise ValueError(
                f"{wrong.path} has weight {wrong.weight:g}, which should be above 0; leave the file"
                " out to draw nothing from it"
            )
        if len({file.path for file in files}) < len(files):
            raise ValueError("names a file twice; name it once, with the sum of its weights")
        return files

    @pydantic.model_validator(mode="after")
    def check_train(self) -> Self:
        if not self.train and not self.offline:
            raise NotNamed("no prompts are named; add data.train=prompts.txt")
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
            "Weight of Reinforcement Learning Guidance in rollouts, for methods on finished"
            " samples: 0 is the base model, 1 the trained one, above 1 goes beyond it; other"
            " weights take twice the network calls."
        ),
    )


class BatchConfig(Section):
    prompts: PositiveInt = Field(
        8,
        description=(
            "Prompts of an iteration, over all processes; divisible by processes x updates."
        ),
    )
    group: PositiveInt = Field(
        16, description="Samples of each prompt, at least 2; a multiple of the plan's leaves."
    )
    updates: PositiveInt = Field(1, description="Optimizer steps of an iteration.")
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
            "Prompts that are sampled at a time, while a thread computes the rewards of those"
            " before; 0: all are sampled, then scored."
        ),
    )


class DrawConfig(Section):
    mode: Literal["once", "refill", "balance"] = Field(
        "once",
        description=(
            "How groups are drawn: each once (once); with fresh prompts added for groups whose"
            " rewards are equal (refill, dynamic sampling); or each prompt again until half a group"
            " is good and half is not (balance, Reinforce-Ada)."
        ),
    )
    rounds: Annotated[PositiveInt, read_when("draw.mode", "refill", "balance")] = Field(
        3, description="Most further rounds of sampling in an iteration."
    )
    spread: Annotated[NonNegativeFloat, read_when("draw.mode", "refill")] = Field(
        1e-6, description="Standard deviation of a group's rewards up to which they count as equal."
    )
    positive: Annotated[float | None, read_when("draw.mode", "balance")] = Field(
        None, description="Reward that a good sample exceeds; none: the first round's median."
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
    guidance: Guidance = Field(
        "none", description="Guidance of the evaluations before and after training."
    )
    rlg: NonNegativeFloat = Field(
        1.0,
        description=(
            "Weight of Reinforcement Learning Guidance in evaluations: 0 is the base model, 1 the"
            " trained one, above 1 goes beyond it; other weights take twice the network calls."
        ),
    )
    baseline_guidance: PositiveFloat | None = Field(
        None,
        description=(
            "Guidance of the untrained model in the additional row 'before, guided'; none: no such"
            " row."
        ),
    )
    images: PositiveInt = Field(
        512, description="Samples of an evaluation, spread evenly over the held-out prompts."
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
    height: PositiveInt | None = Field(
        None,
        description=(
            "Height of evaluation samples in pixels, where it is not that of training: train at"
            " 512, report at 1024. None: the same."
        ),
    )
    width: PositiveInt | None = Field(None, description="Width of evaluation samples, likewise.")
