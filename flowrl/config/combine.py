"""Settings that do not combine, a record each: refused when a run starts, before a model is loaded.

What proposes settings (`flowrl budget`, the sentence of a run that is out of memory) asks the same
records, so that it names nothing that a start would refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.config.schema import Config

DEFAULTS = Config()
Settings = dict[str, Any]  # by their names, as {"batch.micro": 8}


@dataclass(frozen=True, slots=True)
class RefusedTogether:
    """settings: "section.key" is one at any value but its default, "section.key=value" at this one,
    or with it in its list. All of them together are refused; {0}, {1} of `why` are as given."""

    settings: tuple[str, ...]
    why: str


REFUSED = (
    RefusedTogether(
        ("model.encoders=leave", "train.parts=text_encoder"),
        "{0} is for frozen text encoders, and {1} has text_encoder, which is needed in every"
        " forward; use model.encoders=stay",
    ),
    RefusedTogether(
        ("model.quantize", "train.mode=full"),
        "{0} freezes the weights, and {1} trains them all; use train.mode=lora, or leave one of the"
        " two out",
    ),
    RefusedTogether(
        ("model.quantize", "train.shard"),
        "{0}: only whole floating-point weights are split by {1}; leave one of the two out",
    ),
    RefusedTogether(
        ("model.offload", "train.mode=full"),
        "{0} moves frozen weights, and {1} trains them all; use train.mode=lora, or leave"
        " model.offload out",
    ),
    RefusedTogether(
        ("model.offload", "train.shard"),
        "{0} moves whole weights, and {1} splits them; leave one of the two out",
    ),
    RefusedTogether(
        ("model.offload", "batch.overlap"),
        "{0} frees the device while samples are scored, and with {1} others are sampled meanwhile;"
        " leave one of the two out",
    ),
    RefusedTogether(
        ("train.shard", "train.compile"),
        "{0} gathers blocks as they are, and {1} compiles them; leave one of the two out",
    ),
    RefusedTogether(
        ("train.shard", "train.parts=text_encoder"),
        "{0} keeps calls of the denoiser in step, and with {1} a trained text encoder is called"
        " between them; leave one of the two out",
    ),
    RefusedTogether(
        ("train.sequence_parallel", "train.shard"),
        "{0} and {1} both split the network over the same processes; leave one of the two out",
    ),
    RefusedTogether(
        ("train.sequence_parallel", "train.compile"),
        "{0} hooks blocks that {1} would compile; leave one of the two out",
    ),
    RefusedTogether(
        ("train.sequence_parallel", "model.offload"),
        "{0}: the calls that a team shares were tried with weights that stay, and {1} moves them;"
        " leave one of the two out",
    ),
    RefusedTogether(
        ("train.sequence_parallel", "model.quantize"),
        "{0}: the calls that a team shares were tried with whole weights, and not with {1}; leave"
        " one of the two out",
    ),
    RefusedTogether(
        ("train.sequence_parallel", "train.parts=text_encoder"),
        "{0} adds up what each process has of the gradient of the denoiser alone, and {1} trains a"
        " text encoder; leave one of the two out",
    ),
    RefusedTogether(
        ("train.shard", "train.mode=full", "train.precision=fp16"),
        "{0} and {1}: the scaler of fp16 looks for overflow in whole gradients, and each process"
        " holds a share; use train.precision=bf16, or leave train.shard out",
    ),
    RefusedTogether(
        ("train.shard", "train.mode=full", "optimizer.name"),
        "{0} and {1}: moments are split as the weights are, and those of {2} are not; use"
        " optimizer.name=adamw",
    ),
)


def check(cfg: Config) -> None:
    """ValueError where settings of a config do not combine."""
    for sentence in refusals(cfg):
        raise ValueError(sentence)


def combines(cfg: Config, settings: Settings | None = None) -> bool:
    """Whether `check` passes, with other values of some settings."""
    return not any(refusals(changed(cfg, settings or {})))


def refusals(cfg: Config) -> Iterator[str]:
    """Why a config is refused, a sentence each."""
    for refused in REFUSED:
        given = [said(cfg, setting) for setting in refused.settings]
        if all(given):
            yield refused.why.format(*given)


def changed(cfg: Config, settings: Settings) -> Config:
    """The config with other values of settings of its sections."""
    for name, value in settings.items():
        section, key = name.split(".")
        own = getattr(cfg, section).model_copy(update={key: value})
        cfg = cfg.model_copy(update={section: own})
    return cfg


def words(settings: Settings) -> str:
    """Settings as a command line takes them."""
    return " ".join(f"{name}={written(value)}" for name, value in settings.items())


def said(cfg: Config, setting: str) -> str | None:
    """A setting of a record as the command line takes it; None where the config does not have it
    so."""
    name, _, wanted = setting.partition("=")
    value = value_of(cfg, name)
    if wanted:
        has = wanted in value if isinstance(value, list) else value == wanted
    else:
        has = value != value_of(DEFAULTS, name)
    return f"{name}={written(value)}" if has else None


def value_of(cfg: Config, name: str) -> Any:
    """The value of a setting of a section."""
    section, key = name.split(".")
    return getattr(getattr(cfg, section), key)


def written(value: Any) -> str:
    """A value as the command line takes it."""
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value).lower()
