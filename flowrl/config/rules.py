"""Rules on settings that a start refuses, warns of, or does not read beside others.

These rules read words alone, and import no torch; those of run_rules.py read the named things, too.
Options of an algorithm have rules of their own (flowrl/runtime/rule.py says how they are declared),
and the checks of a single value stand beside the setting, in its pydantic class.
flowrl/algorithms/common/planning.py checks plans of denoising steps. Starts, `flowrl budget` and
the sentence of a run that is out of memory ask the same rules (flowrl/config/facts.py), so that
nothing is proposed that a start would refuse.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.runtime import excerpt, registry
from flowrl.runtime.paths import nearby
from flowrl.runtime.rule import Rule

HELP = "data.sampler.help."
HOW = (f"{HELP}guidance", f"{HELP}steps", f"{HELP}column")


def climbs(rewards: Mapping[str, Mapping[str, Any]], needs: frozenset[str]) -> bool:
    """Whether a gradient passes through rewards and the decoder: the method climbs a reward, or one
    is climbed beside it. needs: Algorithm.needs of the method."""
    return "reward" in needs or any(entry.get("mode") == "grad" for entry in rewards.values())


def _is_table(source: str | None) -> bool:
    from flowrl.data.tables import is_table

    return bool(source) and is_table(source)


def unknown_model(source: str) -> str:
    """The sentence of a name or a path that no model has; "" of all others, which are loaded."""
    if registry.is_outside("flowrl.models", source) or registry.is_live(source):
        return ""
    try:
        found = excerpt.part("flowrl.policy.load", "resolve_source")(source)[0]
    except ValueError as error:
        return str(error)
    return (
        "" if found != source else str(excerpt.part("flowrl.policy.folder", "not_a_model")(source))
    )


def no_folder(output: str | None) -> str:
    """The sentence of a run folder that cannot be made; "" of others."""
    if not output:
        return ""
    path = Path(output)
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        return f"output={output}: {there} is a file; name a folder"
    return "" if os.access(there, os.W_OK) else f"output={output}: {there} cannot be written to"


RULES = (
    Rule(("output",), no_folder),
    # rules on weights, and on which of them are trained
    Rule(
        ("train.init_lora", "train.mode"),
        "{0} loads adapters, and {1} trains none; leave one of the two out",
    ),
    Rule(
        ("train.init_lora",),
        lambda start: f"train.init_lora={start} does not exist{nearby(start)}",
        when=lambda start: start and not Path(start).exists(),
    ),
    Rule(("model.source",), unknown_model),
    Rule(
        ("model.encoders", "train.parts"),
        "{0} is for frozen text encoders, and {1} has text_encoder, which is needed in every"
        " forward; use model.encoders=stay",
        when=lambda encoders, parts: encoders == "leave" and "text_encoder" in parts,
    ),
    Rule(
        ("model.quantize", "train.mode"),
        "{0} freezes the weights, and {1} trains them all; use train.mode=lora, or leave one of the"
        " two out",
    ),
    Rule(
        ("model.quantize", "train.shard"),
        "{0}: only whole floating-point weights are split by {1}; leave one of the two out",
    ),
    Rule(
        ("model.offload", "train.mode"),
        "{0} moves frozen weights, and {1} trains them all; use train.mode=lora, or leave"
        " model.offload out",
    ),
    Rule(
        ("model.offload", "train.shard"),
        "{0} moves whole weights, and {1} splits them; leave one of the two out",
    ),
    Rule(
        ("model.offload", "batch.overlap"),
        "{0} frees the device while samples are scored, and with {1} others are sampled meanwhile;"
        " leave one of the two out",
    ),
    Rule(
        ("train.shard", "train.compile"),
        "{0} gathers blocks as they are, and {1} compiles them; leave one of the two out",
    ),
    Rule(
        ("train.shard", "train.parts"),
        "{0} keeps calls of the denoiser in step, and with {1} a trained text encoder is called"
        " between them; leave one of the two out",
        when=lambda shard, parts: shard and "text_encoder" in parts,
    ),
    Rule(
        ("train.sequence_parallel", "train.shard"),
        "{0} and {1} both split the network over the same processes; leave one of the two out",
    ),
    Rule(
        ("train.sequence_parallel", "train.compile"),
        "{0} hooks blocks that {1} would compile; leave one of the two out",
    ),
    Rule(
        ("train.sequence_parallel", "model.offload"),
        "{0}: the calls that a team shares were tried with weights that stay, and {1} moves them;"
        " leave one of the two out",
    ),
    Rule(
        ("train.sequence_parallel", "model.quantize"),
        "{0}: the calls that a team shares were tried with whole weights, and not with {1}; leave"
        " one of the two out",
    ),
    Rule(
        ("train.sequence_parallel", "train.parts"),
        "{0} adds up what each process has of the gradient of the denoiser alone, and {1} trains a"
        " text encoder; leave one of the two out",
        when=lambda members, parts: members > 1 and "text_encoder" in parts,
    ),
    Rule(
        ("train.shard", "train.mode", "train.precision"),
        "{0} and {1}: the scaler of fp16 looks for overflow in whole gradients, and each process"
        " holds a share; use train.precision=bf16, or leave train.shard out",
        when=lambda shard, mode, precision: shard and mode == "full" and precision == "fp16",
    ),
    Rule(
        ("train.shard", "train.mode", "optimizer.name"),
        "{0} and {1}: moments are split as the weights are, and those of {2} are not; use"
        " optimizer.name=adamw",
    ),
    # rules on samples, and on which of them are kept
    Rule(
        ("data.sampler.mode", "data.offline"),
        "{0} learns from new samples, and data.offline has none; leave it out",
    ),
    Rule(
        (f"{HELP}after", "data.offline"),
        "{0} helps new samples, and data.offline has none; leave it out",
    ),
    Rule(
        (f"{HELP}after", *HOW),
        "{0} says when prompts are helped, but not how; add data.sampler.help.guidance=4,"
        " data.sampler.help.steps=40 or data.sampler.help.column=help_prompt",
        when=lambda after, *how: after and not any(how),
    ),
    Rule(
        ("replay.size", "data.offline"),
        "{0} keeps new samples, and data.offline has none; leave it out",
    ),
    Rule(
        ("diversity.features", "data.offline"),
        "{0} compares new samples, and data.offline has none; leave it out",
    ),
    Rule(
        ("reward", "data.offline", "algorithm.name"),
        lambda rewards, *_: (
            f"every reward has weight 0 ({', '.join(rewards)}), so nothing would be trained; give"
            " one another weight"
        ),
        when=lambda rewards, offline, name: (
            not offline
            and name != "opd"
            and not any(entry.get("weight", 1) for entry in rewards.values())
        ),
    ),
    # rules on media trained beside the method
    Rule(
        ("anchor.data.weight", "anchor.data.source"),
        "{0} trains media of your own; name them with anchor.data.source=FOLDER",
        when=lambda weight, source: weight and not source,
    ),
    Rule(
        ("anchor.data.weight", "algorithm.name"),
        "{0} adds the loss of algorithm=sft, which is the method already; put all media into"
        " data.offline, and leave the anchor out",
        when=lambda weight, name: weight and name == "sft",
    ),
    # rules on watching the reward
    Rule(
        ("stop.watch", "watch.held_out"),
        "{0} needs a held-out reward; add one that is only measured, as reward.clip.weight=0, and"
        " name it: watch.held_out=clip",
        when=lambda stop, label: stop != "none" and label is None,
    ),
    Rule(
        ("watch.held_out", "reward"),
        lambda label, rewards: (
            f"watch.held_out={label} is none of the rewards ({', '.join(rewards)}); name one of"
            f" weight 0, or add it with reward.{label}.weight=0"
        ),
        when=lambda label, rewards: label is not None and label not in rewards,
    ),
    Rule(
        ("checkpoint.every", "watch.smooth", "watch.held_out"),
        "{0} is more than {1}: the checkpoint nearest the peak may lie far from it; lower"
        " checkpoint.every",
        when=lambda every, smooth, label: label is not None and every > smooth,
        kind="warn",
    ),
    Rule(
        ("ema.every", "ema.decay", "iterations", "batch.updates"),
        lambda every, decay, iterations, updates: (
            f"ema.every={every} exceeds the run's {iterations * updates} optimizer steps: the"
            " averaged weights, which are evaluated and exported, will be those before training"
        ),
        when=lambda every, decay, iterations, updates: decay and every > iterations * updates,
        kind="warn",
    ),
    Rule(
        ("tracking.entity", "trackers"),
        "{0} is read by wandb and swanlab alone, and here is {1}; write trackers=[wandb], or leave"
        " it out",
        when=lambda team, used: team and used and not {"wandb", "swanlab", "all"} & {*used},
    ),
    Rule(
        ("data.mixture", "data.train"), "{1} and data.mixture both name prompts; drop one of them"
    ),
    Rule(
        ("data.mixture", "data.offline"),
        "{1} replaces the prompts of data.mixture; leave one of the two out",
    ),
    *(
        Rule(
            ("data.mixture", setting),
            f"data.mixture draws prompts by weight, and {{1}} by {how}; drop one of them",
            when=lambda files, mode, other=other: files and mode in other,
        )
        for setting, other, how in (
            ("data.sampler.mode", ("bayes", "bandit"), "what they have shown"),
            ("draw.mode", ("refill",), "what groups lack"),
        )
    ),
    # settings that nothing reads
    Rule(
        ("gradient", "reward"),
        "read only with a reward of mode=grad; write reward.NAME.mode=grad",
        when=lambda _, rewards: not climbs(rewards, frozenset()),
        kind="unread",
    ),
    Rule(
        ("data.columns", "data.offline", "data.mixture", "data.train", "data.eval"),
        "neither data.train nor data.eval is a .jsonl, .csv or .parquet file or hf:NAME",
        when=lambda _, offline, files, *sources: (
            offline or not any(map(_is_table, [*sources, *(file["path"] for file in files)]))
        ),
        kind="unread",
    ),
)
