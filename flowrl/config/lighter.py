"""Settings that save memory: one list for `flowrl budget` (budget/fit.py) and for a run that is out
of memory (out_of_memory.py), so that both name the same ones in the same order.

A way to save memory is one record of CHANGES: the phases that it makes smaller, and a function from
a config to the settings that save memory, or to None where it can save no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowrl.config.build import make_algorithm
from flowrl.config.compose import ConfigError
from flowrl.config.facts import of_config
from flowrl.config.schema import Config
from flowrl.rewards.core.reward_set import sizes
from flowrl.runtime.registry import is_live
from flowrl.runtime.rule import as_word

Settings = dict[str, Any]  # name -> value, as {"batch.micro": 8}

START, BETWEEN = "start-up", "between phases"  # names for the times outside a run's phases
NETWORK = frozenset({"rollout", "evaluation", "reference", "update"})
# phases from the first decoding to the update
SCORING = frozenset({"decode", "reward", "advantages"})
ALL = NETWORK | SCORING | {"encode", "optimizer", BETWEEN}
WHOLE_BATCH = 16  # samples; decoding more at once is hardly faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A shortage of memory: where it is, and in which run."""

    phase: str  # phase of a run or of a budget, as "update"
    # whether the memory that stays is too much already, before the phase adds to it
    held: bool = False
    gpus: int = 1  # processes of the run
    state: int = 1  # network rows of one state, the fewest that a forward can have
    cuda: bool = True  # whether a GPU's memory is short, and not the host's
    # whether a checkpoint holds AdamW's moments in 32 bits, which the 8-bit optimizer cannot take
    moments: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A way to save memory."""

    phases: frozenset[str]  # phases in which it saves memory
    # (config, shortage) -> settings to change in the config; None where it can save no more
    settings: Callable[[Config, Shortage], Settings | None]
    stays: bool = False  # whether less stays in memory from phase to phase
    hosts: bool = False  # whether it moves something to host memory
    modelled: bool = True  # whether a Planner knows what it saves


def away(cfg: Config) -> frozenset[str]:
    """Phases in which a denoiser that leaves (model.offload) is in host memory."""
    return SCORING | {"encode"} if cfg.model.encoders == "leave" else SCORING


def next_change(cfg: Config, short: Shortage, *, modelled: bool = False) -> Settings | None:
    """Settings of the first change that helps. modelled: only changes that a Planner knows."""
    for change in CHANGES:
        if short.phase not in change.phases or (short.held and not change.stays):
            continue
        if (change.hosts and not short.cuda) or (modelled and not change.modelled):
            continue
        settings = change.settings(cfg, short)
        if settings is not None and starts(changed(cfg, settings)):
            return settings
    return None


def starts(cfg: Config) -> bool:
    """Whether no rule over its words and its algorithm refuses a config."""
    live = is_live(cfg.algorithm["name"])
    try:
        of_config(cfg, **({} if live else {"method": make_algorithm(cfg)}))
    except ConfigError:
        return False
    return True


def changed(cfg: Config, settings: Settings) -> Config:
    """A copy of the config in which these settings have new values."""
    for name, value in settings.items():
        section, key = name.split(".")
        own = getattr(cfg, section).model_copy(update={key: value})
        cfg = cfg.model_copy(update={section: own})
    return cfg


def value_of(cfg: Config, name: str) -> Any:
    """The value of a setting of a section."""
    section, key = name.split(".")
    return getattr(getattr(cfg, section), key)


def as_words(settings: Settings) -> str:
    """Settings as a command line takes them."""
    return " ".join(as_word(name, value) for name, value in settings.items())


def _decode(cfg: Config, short: Shortage) -> Settings | None:
    """Halve batch.decode, or the samples of a process where those are fewer."""
    b = cfg.batch
    now = min(b.decode, WHOLE_BATCH, b.prompts // short.gpus * b.group)
    return {"batch.decode": now // 2} if now > 1 else None


def _micro(cfg: Config, short: Shortage) -> Settings | None:
    """Halve batch.micro, or the rows of a rollout where those are fewer. Below those of one state
    it would change nothing."""
    b = cfg.batch
    rows = b.prompts // short.gpus * b.group * short.state
    now = min(b.micro, rows) if short.phase == "rollout" else b.micro
    return {"batch.micro": now // 2} if now // 2 >= short.state else None


def _switch(name: str, value: Any) -> Callable[[Config, Shortage], Settings | None]:
    """Give a setting this value, if it has another."""

    def settings(cfg: Config, short: Shortage) -> Settings | None:
        return None if value_of(cfg, name) == value else {name: value}

    return settings


def _denoiser(cfg: Config, short: Shortage) -> Settings | None:
    """Move the denoiser out; it makes room for text encoders only where these leave in turn."""
    wanted = {"model.offload": "denoiser"} if cfg.model.offload == "none" else {}
    if short.phase == "encode" and cfg.model.encoders == "stay":
        wanted["model.encoders"] = "leave"
    return wanted or None


def _rewards(cfg: Config, short: Shortage) -> Settings | None:
    """Let the networks of rewards, if they are known to have any, leave with the denoiser."""
    if cfg.model.offload == "all":
        return None
    try:
        found = any(sizes(cfg.reward).values())
    except Exception:  # missing files: the caller's sentence about memory matters more
        return None
    return {"model.offload": "all"} if found else None


def _shard(cfg: Config, short: Shortage) -> Settings | None:
    no = short.gpus == 1 or cfg.train.shard
    return None if no else {"train.shard": ["denoiser"]}


def _bf16(cfg: Config, short: Shortage) -> Settings | None:
    return {"model.dtype": "bf16"} if cfg.model.dtype == "fp32" else None


def _quantize(kind: str) -> Callable[[Config, Shortage], Settings | None]:
    """Quantise weights, which then stay on the device if rewards do; nothing is gained in phases
    where they were away."""

    def settings(cfg: Config, short: Shortage) -> Settings | None:
        gone = cfg.model.offload != "none" and short.phase in away(cfg)
        if cfg.model.quantize in (kind, "nf4") or gone:
            return None
        alone = cfg.model.offload == "denoiser"
        return {"model.quantize": kind} | ({"model.offload": "none"} if alone else {})

    return settings


def _checkpointing(cfg: Config, short: Shortage) -> Settings | None:
    """Recompute every second block, then all."""
    now = float(cfg.train.gradient_checkpointing)
    return None if now == 1 else {"train.gradient_checkpointing": 0.5 if now < 0.5 else True}


def _adamw8bit(cfg: Config, short: Shortage) -> Settings | None:
    known = cfg.optimizer.name == "adamw8bit" or short.moments
    return None if known else {"optimizer.name": "adamw8bit"}


# Changes that cost the least time come first, for the budget as for a run. A Planner is made for
# one model.dtype, so a search by the budget leaves out the change of it.
CHANGES = (
    Change(phases=frozenset({"decode", "reward"}), settings=_decode),
    Change(phases=frozenset({"decode"}), settings=_switch("model.tiling", True)),
    Change(
        phases=ALL - {"encode"} | {START},
        settings=_switch("model.encoders", "leave"),
        stays=True,
        hosts=True,
    ),
    Change(
        phases=SCORING | {"encode"},
        settings=_denoiser,
        stays=True,
        hosts=True,
    ),
    Change(
        phases=ALL - SCORING | {START},
        settings=_rewards,
        stays=True,
        hosts=True,
    ),
    Change(
        phases=ALL - {"encode", "rollout", "optimizer"},
        settings=_switch("batch.states", "host"),
        hosts=True,
    ),
    Change(phases=ALL | {START}, settings=_shard, stays=True),
    # a reference call inside an update adds to the activations that the update keeps
    Change(phases=frozenset({"update", "reference"}), settings=_checkpointing),
    Change(phases=ALL | {START}, settings=_bf16, stays=True, modelled=False),
    Change(phases=ALL | {START}, settings=_quantize("int8"), stays=True),
    Change(phases=NETWORK, settings=_micro),
    Change(phases=ALL, settings=_adamw8bit, stays=True),
    Change(phases=ALL | {START}, settings=_quantize("nf4"), stays=True),
)
