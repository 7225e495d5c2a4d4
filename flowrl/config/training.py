"""Settings of training: what is trained, how, when it is saved and when it ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from flowrl.config.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]
Sigma = Annotated[float, Field(gt=0, le=1)]


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


class GradientConfig(Section):
    sigma: Sigma | tuple[Sigma, Sigma] = Field(
        (0.1, 0.5),
        description=(
            "Noise level of the estimates, or a range from which each copy draws one: enough noise"
            " for v to matter, and little enough for an estimate that looks like a sample."
        ),
    )
    copies: PositiveInt = Field(1, description="Times that a sample is noised again.")
    samples: PositiveInt | None = Field(
        None, description="Samples of each group that are noised, drawn anew; none: all."
    )
    scale: PositiveFloat = Field(
        1.0, description="The weighted sum of these rewards is multiplied by it in the loss."
    )
    rescale: bool = Field(
        True, description="Divide the gradient of an estimate by its sigma, which values keep."
    )

    @field_validator("sigma")
    @classmethod
    def check_sigma(cls, value: float | tuple[float, float]) -> float | tuple[float, float]:
        if isinstance(value, tuple) and value[0] > value[1]:
            raise ValueError(f"a range goes from low to high; write [{value[1]:g}, {value[0]:g}]")
        return value


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
