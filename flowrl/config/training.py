"""Settings of training: what is trained, how, when it is saved and when it ends."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictBool,
    field_validator,
)

from flowrl.config.section import Place, Section
from flowrl.runtime import excerpt, registry
from flowrl.runtime.rule import Condition, read_above, read_when, read_with
from flowrl.runtime.store.run_folder import lora_folder

Beta = Annotated[float, Field(ge=0, lt=1)]
Sigma = Annotated[float, Field(gt=0, le=1)]
# settings of section diversity that a value other than 0 turns on
USES = ("redundancy", "entropy", "novelty")
OPTIMIZERS = ("adamw", "adamw8bit")  # names of optimizers; others are paths of classes
OF_A_CLASS = Condition(
    keys=("optimizer.name",),
    holds=lambda settings: settings["optimizer.name"] not in OPTIMIZERS,
    words="the path of a class in optimizer.name",
)
# options of peft's LoraConfig that adapters here have -> their values; None: any
PEFT: dict[str, tuple[Any, ...] | None] = {
    "use_rslora": (True, False),
    "exclude_modules": None,
    "init_lora_weights": ("orthogonal",),
}
# options that are asked for often, and the reason that adapters here do not have them
NOT_PEFT = {
    "use_dora": "the copies of an adapter hold A and B alone, and DoRA has a third tensor",
    "lora_bias": "the copies of an adapter hold A and B alone",
    "lora_dropout": "dropout draws anew in each call, and a ratio needs the same network twice",
    "rank_pattern": "the files of a run hold one rank; use train.lora.rank",
    "alpha_pattern": "the files of a run hold one scale; use train.lora.alpha",
    "r": "it is train.lora.rank",
    "lora_alpha": "it is train.lora.alpha",
    "target_modules": "it is train.lora.targets",
}


class DiversityConfig(Section):
    features: Place | None = Field(
        None,
        description=(
            "Features by which the samples of a prompt are compared: clip, dino, shapes (the tiny"
            " CLIP of the embedded world), or path/to/file.py:NAME, a function media (n, ...) ->"
            " (n, d); none: they are not compared."
        ),
    )
    weights: Annotated[Place | None, read_when("diversity.features", "clip", "dino")] = Field(
        None,
        description=(
            "Folder or hub id of the network of these features; none:"
            " openai/clip-vit-large-patch14 or facebook/dinov2-base."
        ),
    )
    redundancy: NonNegativeFloat = Field(
        0.0,
        description=(
            "Discount of a sample that is like the others of its group: its reward is divided by 1"
            " + this x mean similarity (DRA-GRPO); 0: none."
        ),
    )
    above: Annotated[Literal["lowest", "zero"], read_above("diversity.redundancy", 0)] = Field(
        "lowest",
        description=(
            "Which part of a reward is discounted: its part above the group's lowest reward, or"
            " above 0 (as in the paper, for rewards that are never negative)."
        ),
    )
    temperature: Annotated[PositiveFloat | None, read_above("diversity.redundancy", 0)] = Field(
        None,
        description=(
            "Similarity is exp((cosine - 1) / this): at a low value only near copies count; none:"
            " similarity is the cosine, at least 0."
        ),
    )
    entropy: float = Field(
        0.0,
        ge=-1,
        le=1,
        description=(
            "Advantages of a group are multiplied by 1 - this x its semantic entropy, 0 to 1"
            " (SEED-GRPO); below 0: groups that differ count for more."
        ),
    )
    threshold: Annotated[float, read_with("diversity.features")] = Field(
        0.9,
        gt=-1,
        le=1,
        description="Cosine from which on two samples belong to one cluster, for the entropy.",
    )
    novelty: NonNegativeFloat = Field(
        0.0,
        description=(
            "Weight of a bonus beside the rewards: 1 - cosine with the nearest sample of the group."
        ),
    )

    _places = pydantic.field_validator("features", "weights")(registry.absolute)

    @pydantic.field_validator("features")
    @classmethod
    def check_features(cls, value: str | None) -> str | None:
        if value is not None:
            excerpt.part("flowrl.rewards.core.features", "check_name")(value)
        return value

    @pydantic.model_validator(mode="after")
    def check_used(self) -> DiversityConfig:
        if self.features is None and (used := self.used):
            raise ValueError(
                f"{used}={getattr(self, used):g} compares features of the samples, and"
                " diversity.features names none; choose clip, dino, shapes or path/to/file.py:NAME"
            )
        return self

    @property
    def used(self) -> str | None:
        """The first use that is on."""
        return next((use for use in USES if getattr(self, use)), None)


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
        "gaussian",
        description="Distribution of A; B starts at 0, so that training starts at the base model.",
    )
    peft: dict[str, Any] = Field(
        {},
        description=(
            "Further options of peft's LoraConfig: use_rslora, exclude_modules and"
            " init_lora_weights=orthogonal. Others are refused by name, with the reason."
        ),
    )

    @field_validator("peft")
    @classmethod
    def check_peft(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, given in value.items():
            if name not in PEFT:
                why = NOT_PEFT.get(name) or f"it has {', '.join(PEFT)}"
                raise ValueError(f"train.lora.peft does not take {name}: {why}")
            if (allowed := PEFT[name]) and given not in allowed:
                may = " or ".join(str(v).lower() for v in allowed)
                raise ValueError(f"train.lora.peft: {name}={given} should be {may}")
        return value


class TrainConfig(Section):
    parts: list[Literal["denoiser", "text_encoder", "step_noise", "initial_noise"]] = Field(
        ["denoiser"],
        min_length=1,
        description=(
            "Which networks are trained: the denoiser, the text encoders (whose prompts are then"
            " encoded with a gradient), or both; and small networks of a method's own for the noise"
            " of its steps (reinflow) or the initial noise (dsrl)."
        ),
    )
    mode: Literal["lora", "full"] = Field("lora", description="Low-rank adapters, or every weight.")
    lora: LoraConfig = Field(LoraConfig(), description="The adapters, when mode is lora.")
    init_lora: Place | None = Field(
        None, description="A LoRA to start from: of a run, or a file or folder of any trainer."
    )
    # YAML 1.1 reads a bare `no` as false
    precision: Annotated[
        Literal["no", "bf16", "fp16"], BeforeValidator(lambda v: "no" if v is False else v)
    ] = Field(
        "no",
        description="Mixed precision of the forward: none, bf16 or fp16 with a gradient scaler.",
    )
    gradient_checkpointing: StrictBool | Annotated[float, Field(gt=0, lt=1)] = Field(
        False,
        description=(
            "Recompute activations in the backward pass, for less memory and a quarter more time."
            " A number below 1: only in this share of the network's blocks."
        ),
    )
    attention: str | None = Field(
        None,
        description=(
            "Attention backend, by its name in diffusers: native, flash, sage, xformers, ...; none:"
            " diffusers' choice. Tried at the start, with a gradient."
        ),
    )
    compile: Literal["none", "blocks"] = Field(
        "none",
        description=(
            "blocks: the network's repeated blocks are compiled in place, for a few batch sizes, to"
            " which the last rows of a batch are padded."
        ),
    )
    shard: list[Literal["denoiser"]] = Field(
        [],
        description=(
            "Which networks are split over the processes, so that each keeps a share of their"
            " weights and, with train.mode=full, of their gradients, moments and copies:"
            " [denoiser]; none: every process keeps all of them."
        ),
    )
    sequence_parallel: PositiveInt = Field(
        1,
        description=(
            "How many processes share each call of the network, each with a part of its tokens;"
            " prompts are dealt to teams of this size. For transformers with a context-parallel"
            " plan in diffusers."
        ),
    )

    @field_validator("init_lora")
    @classmethod
    def find_lora(cls, value: str | None) -> str | None:
        return None if value is None else str(lora_folder(Path(value)))


class OptimizerConfig(Section):
    name: str = Field(
        "adamw",
        description=(
            "The optimizer; adamw8bit keeps the moments of matrices of 4096 values or more in 8"
            " bits (bitsandbytes), a quarter of their memory, and needs the extra quantize. Or a"
            " class of PyTorch's form by its path: torch.optim.Adafactor, torch.optim.Muon,"
            " prodigyopt.Prodigy, my.py:MyOptimizer."
        ),
    )
    options: Annotated[dict[str, Any], OF_A_CLASS] = Field(
        {},
        description=(
            "Further arguments of a class that optimizer.name names by its path. It is given lr"
            " and, if it takes one, weight_decay."
        ),
    )
    lr: PositiveFloat = Field(3e-4, description="Peak learning rate.")
    warmup: NonNegativeInt = Field(
        0, description="Optimizer steps over which the rate rises linearly from 0."
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant",
        description="Course of the learning rate after warm-up; cosine and linear end at 0.",
    )
    betas: Annotated[tuple[Beta, Beta], read_when("optimizer.name", *OPTIMIZERS)] = Field(
        (0.9, 0.999), description="Decay of the moments."
    )
    weight_decay: NonNegativeFloat = Field(1e-4, description="Decoupled weight decay.")
    eps: Annotated[PositiveFloat, read_when("optimizer.name", *OPTIMIZERS)] = Field(
        1e-8, description="Number added to the root of the second moment."
    )
    max_grad_norm: PositiveFloat = Field(
        1.0, description="Gradients are scaled down to this global norm."
    )

    @field_validator("name")
    @classmethod
    def find_class(cls, value: str) -> str:
        if value in OPTIMIZERS or registry.is_place(value):
            return registry.absolute(value)
        package = value.partition(".")[0]
        if package == value:
            near = registry.did_you_mean(value, OPTIMIZERS)
            raise ValueError(
                f"{value} is neither of {' and '.join(OPTIMIZERS)}{near}; a class is named by its"
                " path, as torch.optim.Adafactor, prodigyopt.Prodigy or my.py:MyOptimizer"
            )
        if find_spec(package) is None:
            raise ValueError(f"{value}: the package {package} is not installed here")
        return value


class ReplayConfig(Section):
    size: NonNegativeInt = Field(
        0,
        description=(
            "Iterations whose samples are kept, to be trained again beside new ones, by methods on"
            " finished samples; 0: none."
        ),
    )
    share: Annotated[PositiveFloat, read_above("replay.size", 0)] = Field(
        1.0, description="How many old groups an iteration trains, as a share of batch.prompts."
    )
    taper: Annotated[float, Field(ge=0, le=1), read_above("replay.size", 0)] = Field(
        0.7, description="A sample that is k iterations old weighs this to the power of k."
    )


class GradientConfig(Section):
    sigma: Sigma | tuple[Sigma, Sigma] = Field(
        (0.1, 0.5),
        description=(
            "Noise level of the estimates, or a range from which each draws its own: enough noise"
            " for v to matter, and little enough for an estimate that looks like a sample."
        ),
    )
    samples: PositiveInt | None = Field(
        None,
        description=(
            "How many samples of each group are noised, drawn anew in each iteration; none: all."
        ),
    )
    scale: PositiveFloat = Field(
        1.0, description="Factor of the weighted sum of these rewards in the loss."
    )

    @field_validator("sigma")
    @classmethod
    def check_sigma(cls, value: float | tuple[float, float]) -> float | tuple[float, float]:
        if isinstance(value, tuple) and value[0] > value[1]:
            raise ValueError(f"a range goes from low to high; write [{value[1]:g}, {value[0]:g}]")
        return value


ANCHORED = read_above("anchor.data.weight", 0)


class DataAnchorConfig(Section):
    weight: NonNegativeFloat = Field(
        0.0, description="Weight of the mean error on these media in the loss; 0: none are read."
    )
    source: Annotated[Place | None, ANCHORED] = Field(
        None, description="Media with their prompts: a folder or a list, as data.offline takes."
    )
    per_row: Annotated[PositiveFloat, ANCHORED] = Field(
        1.0,
        description=(
            "Rows of these media for each row that the method may have; 1: as many media as"
            " samples, at as many noise levels each."
        ),
    )
    levels: Annotated[Literal["rl", "own"], ANCHORED] = Field(
        "rl",
        description=(
            "Noise levels and noise of these rows: those of the method's rows of the same prompt,"
            " or logit-normal levels and noise of their own."
        ),
    )
    start: Annotated[NonNegativeInt, ANCHORED] = Field(
        0, description="Iterations that pass before these media are trained."
    )
    unconditional: Annotated[StrictBool, ANCHORED] = Field(
        False, description="Take rows with an empty prompt, which train the model without one."
    )


class AnchorConfig(Section):
    data: DataAnchorConfig = Field(DataAnchorConfig(), description="Media of your own.")


class EmaConfig(Section):
    decay: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="Highest decay of the averaged weights, used in evaluation; 0: no averaging.",
    )
    every: PositiveInt = Field(8, description="Optimizer steps between two averagings.")


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
    keep: PositiveInt = Field(2, description="How many of the newest checkpoints are kept.")


class StopConfig(Section):
    kl: PositiveFloat | None = Field(
        None,
        description=(
            "Stop when policy/kl exceeds this; it is measured with algorithm.kl_weight above 0."
        ),
    )
    reward: float | None = Field(None, description="Stop when reward/total reaches this.")
    domain: Annotated[str | None, read_with("stop.reward")] = Field(
        None,
        description=(
            "Domain whose mean total, reward/total/DOMAIN, stop.reward reads; needed where rewards"
            " state domains, because totals of different rewards have no common scale."
        ),
    )
    hours: PositiveFloat | None = Field(
        None, description="Stop after this time, resumed runs counted from their start."
    )
    watch: Literal["none", "stop", "lower"] = Field(
        "none",
        description=(
            "Once watch.held_out lies significantly below its peak: go on, stop, or lower the"
            " learning rate to a tenth."
        ),
    )


Detector = Literal["sharpness", "saturation", "tiling", "diversity", "drift"]


class WatchConfig(Section):
    held_out: str | None = Field(
        None,
        description="Label of a reward of weight 0, whose peak on the training samples is sought.",
    )
    detectors: list[Detector] = Field(
        [], description="Cheap signs of a hacked reward, read on the training samples."
    )
    smooth: Annotated[PositiveInt, read_with("watch.held_out")] = Field(
        10, description="Iterations of the running mean of the held-out reward."
    )
    errors: Annotated[PositiveFloat, read_with("watch.held_out")] = Field(
        4.0,
        description=(
            "Standard errors below its peak at which the held-out reward counts as below it."
        ),
    )
    patience: Annotated[PositiveInt, read_with("watch.held_out")] = Field(
        5, description="Iterations in a row below the peak before stop.watch acts."
    )


def _label(text: str) -> str:
    if not text.strip() or not text.isprintable() or set(text) & set("/\\#?%:"):
        raise ValueError(f"{text!r} should be one line of text without / \\ # ? % :, not empty")
    return text


Label = Annotated[str, AfterValidator(_label)]


class TrackingConfig(Section):
    project: Label = Field("flowrl", description="Project in which a tracker lists the run.")
    entity: Label | None = Field(None, description="Team, for wandb and swanlab; none: yourself.")
    name: Label | None = Field(None, description="Name of the run; none: that of its first folder.")
    group: Label | None = Field(None, description="Group of runs; none: the method, as nft.")
    tags: list[str] = Field([], description="Words by which runs are filtered, as [paper].")


class GuardConfig(Section):
    nonfinite: PositiveInt = Field(
        5,
        description=(
            "Non-finite updates in a row (skipped, batch written out), or iterations in a row whose"
            " gradient is exactly 0, before the run stops."
        ),
    )
    stop_after: PositiveInt | None = Field(
        100,
        description=(
            "Iterations in a row without an optimizer step, in which a reward is the same for all"
            " samples, or with huge rewards, before the run stops with exit code 1; none: never."
        ),
    )
    huge: PositiveFloat = Field(
        1e6, description="Size beyond which a reward times its weight is huge, above or below 0."
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
            "Most seconds that a process waits for the others, one of which may still compute"
            " rewards."
        ),
    )
    invalid_fraction: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Stop when more than this share of samples has no valid reward.",
    )
    fits: bool = Field(
        True,
        description=(
            "Refuse a run whose budget exceeds the memory of its GPU; false: say what it needs, and"
            " start."
        ),
    )
    check_rewards: bool = Field(
        True,
        description=(
            "Try rewards of your own on two grey pictures before a model is loaded, and all of them"
            " on the first samples: whether batch mates change them, whether they repeat, and how"
            " large their noise is beside their spread."
        ),
    )
