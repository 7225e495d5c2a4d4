"""Rules on the words of a config beside the things that they name: the algorithm, rewards, prompts,
the policy and the plan of a run. See rules.py; each rule waits for what it reads.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from flowrl.config.rules import HELP, climbs
from flowrl.config.training import USES
from flowrl.runtime import excerpt, registry
from flowrl.runtime.paths import packaged
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.rule import Rule
from flowrl.runtime.text import printable

# method, kind of data.offline and of data.validation
VALIDATED = {("sft", "media", "media"), ("dpo", "pairs", "pairs")}
LARGE = 1000  # MB of kept samples beyond which a start warns
DISTILLED = (
    "turbo",
    "lightning",
    "schnell",
    "lcm",
    "tcd",
    "hyper",
    "distill",
    "dmd",
    "sprint",
    "klein-4b",
)


def _divisible(prompts: int, updates: int, members: int, processes: int) -> str:
    unit = processes * updates
    if not prompts % unit:
        return ""
    kind, many = ("process", "es") if members == 1 else ("team", "s")
    what = f"{processes} {kind}{many * (processes > 1)} x {updates} update{'s' * (updates > 1)}"
    return f"batch.prompts={prompts} does not divide by {what}; try {_nearest(prompts, unit)}"


def _whole_trees(group: int, leaves: int) -> str:
    if not group % leaves:
        return ""
    return (
        f"batch.group={group} is not a multiple of the plan's {leaves} leaves; try"
        f" {_nearest(group, leaves)}"
    )


def _nearest(value: int, unit: int) -> str:
    """Multiples of unit on both sides of value."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _parts(parts: list[str], name: str, wanted: Mapping[str, Any], network: bool) -> str:
    """wanted: heads that the method trains; network: whether it trains the network too."""
    # imported here: the method, which is known by now, has imported torch
    from flowrl.policy.weights.heads import KINDS

    own = [part for part in parts if part not in KINDS]
    full = [*(own or ["denoiser"]) * network, *wanted]
    fix = f"use train.parts=[{', '.join(full)}]"
    if odd := [part for part in parts if part in KINDS and part not in wanted]:
        return f"train.parts has {odd[0]}, which algorithm={name} does not train; {fix}"
    if missing := [head for head in wanted if head not in parts]:
        return f"algorithm={name} trains {missing[0]}, which train.parts lacks; {fix}"
    if network and not own:
        return (
            f"algorithm={name} trains the network too, as samples without noise would not change;"
            f" {fix}"
        )
    if own and not network:
        return f"algorithm={name} leaves the network as it is, and train.parts has {own[0]}; {fix}"
    return ""


def _help_texts(after: int, column: str | None, prompts: Sequence[Mapping[str, Any]]) -> str:
    if not after or column is None:
        return ""
    texts = [row[column] for row in prompts if row.get(column) and column != "prompt"]
    what = f"{HELP}column={column}"
    if not texts:
        return (
            f"{what}: no prompt has a text in that column; write"
            f' {{"prompt": ..., "{column}": ...}} in a .jsonl of prompts'
        )
    wrong = [text for text in texts if not isinstance(text, str)]
    return f"{what} holds {printable(repr(wrong[0]), 60)}, which is no text" if wrong else ""


def _replayed(size: int, name: str, needs: frozenset[str], unmasks: bool) -> str:
    if not size or "leaves" in needs:
        return ""
    what = "reads the log-probs of denoising steps, which are not kept"
    if "reward" in needs:
        what = "climbs rewards of new samples"
    elif "states" in needs:
        what = "reads the states of denoising steps, which are not kept"
    elif "start" in needs:
        what = "trains the initial noise, which is not kept"
    other = "masked_ce" if unmasks else "nft or dpo"
    return (
        f"replay.size={size} trains finished samples of earlier iterations, and algorithm={name}"
        f" {what}; use a method on the forward process, as algorithm={other}, or replay.size=0"
    )


def _shared(prompts: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]) -> str:
    """A prompt is the same where its text and its pictures are."""
    from flowrl.data.conditions import arguments_of  # prompts are there, and torch with it

    def whole(row: Mapping[str, Any]) -> str:
        return f"{' '.join(row['prompt'].split()).casefold()} {sorted(arguments_of(row).items())}"

    known = {whole(row) for row in prompts}
    if not (both := [row["prompt"] for row in held_out if whole(row) in known]):
        return ""
    return (
        f"{len(both)} of the {len(held_out)} prompts of data.eval are in data.train, too, as"
        f' "{printable(both[0], 60)}": evaluations show in part what was learned by heart'
    )


def _learned(dataset: Any, held: Any) -> str:
    """dataset, held: the Datasets of data.offline and data.validation."""
    known, files = ({os.path.normpath(str(p)) for p in data.paths} for data in (dataset, held))
    if not (both := sorted(known & files)):
        return ""
    return (
        f"{len(both)} of the {len(files)} files of data.validation are in data.offline, too, as"
        f" {both[0]}: its loss shows in part what was learned by heart"
    )


def _kept_samples(size: int, prompts: int, group: int, shape: Sequence[int]) -> str:
    samples = size * prompts * group
    megabytes = 4 * samples * math.prod(shape) / 1e6
    if megabytes <= LARGE:
        return ""
    return (
        f"replay.size={size} keeps up to {samples} samples, which are {megabytes:,.0f} MB of the"
        " memory of each process"
    )


def _rewritten(diversity: Mapping[str, Any], needs: frozenset[str]) -> str:
    used = next((use for use in USES if diversity[use]), None)
    if used is None or "reward" not in needs:
        return ""
    return (
        f"diversity.{used} changes what advantages are made of, and this method climbs the reward"
        " of each sample by itself; set it to 0"
    )


def _held_out(label: str | None, rules: Mapping[str, Any]) -> str:
    """rules: how rewards depend on each other."""
    deciding = [k for k, r in rules.items() if label in r.gate or label == r.stratify]
    if label is None or not deciding:
        return ""
    return (
        f"watch.held_out={label} decides how reward.{deciding[0]} counts, so that it is not held"
        " out; name another reward of weight 0"
    )


def _climbed(rewards: Any, needs: frozenset[str], name: str, offline: str | None) -> str:
    """Say why mode=grad leaves nothing to do, or that no gradient comes back. rewards:
    RewardSet."""
    from flowrl.rewards.core.climb import without_gradient

    climbers = ", ".join(sorted(rewards.climbers))
    if "reward" in needs:
        if climbers:
            return (
                f"mode=grad of {climbers} says nothing here: algorithm={name} climbs the gradient"
                " of every reward; leave it out"
            )
        return without_gradient(rewards)
    if not climbers:
        return ""
    if offline:
        return (
            f"mode=grad of {climbers} cannot be taken out of the scores in data.offline, which are"
            " totals; leave one of the two out"
        )
    if not rewards.credited().weighted:
        return (
            f"every reward with a weight has mode=grad ({climbers}), which leaves none to compare"
            " samples by; use algorithm=draft without mode, or give another reward a weight"
        )
    # each sample has a gradient of its own, so a climbed reward must not read other samples
    climbed = rewards.climbed()
    together = [k for k, r in climbed.rewards.items() if "group" in r.needs]
    if (flat := without_gradient(climbed)) or not together:
        return flat
    return (
        f"{', '.join(together)} compares the samples of a group, and the gradient of {climbers} is"
        " taken of each by itself; leave mode=grad or that gate out"
    )


def _files(files: Sequence[Any], dataset: Any, needs: frozenset[str], mode: str, own: Any) -> str:
    """Media from files serve methods that read leaves alone. own: what the rewards need."""
    if not files:
        return ""
    what = (
        "data.offline trains on media from files"
        if dataset
        else 'a prompt with a "reference" adds an image from a file'
    )
    if needs & {"log_prob", "reward", "start", "states"}:
        return (
            f"{what}, which have no denoising steps to train; use a method on the forward process,"
            " as algorithm=nft or dpo"
        )
    if dataset and mode != "once":
        return (
            f"draw.mode={mode} samples again, and data.offline samples nothing; use draw.mode=once"
        )
    if mode == "balance":
        return (
            "draw.mode=balance chooses among samples, and a reference image is none; use"
            " draw.mode=refill or once"
        )
    if not dataset and "group" in own:
        return (
            f"{what}, which a reward that compares the members of a group cannot judge alone; drop"
            " one of the two"
        )
    return ""


def _anchored(data: Any, unconditional: bool) -> str:
    """data: the Dataset of anchor.data."""
    if data.kind != "media":
        return (
            f"anchor.data.source holds {data.kind} rows, and takes media with their prompts alone;"
            " train these with data.offline, or name another folder"
        )
    empty = sum(not row["prompt"].strip() for row in data.prompts)
    return (
        f"{empty} of {len(data.prompts)} rows of anchor.data.source have an empty prompt, which"
        " trains the model without one; write their prompts, or mean it with"
        " anchor.data.unconditional=true"
        if empty and not unconditional
        else ""
    )


def _distilled(source: str, needs: frozenset[str], policy: Any, dataset: Any) -> str:
    """Forward-process losses take v as that of a flow-matching model, which few-step distilled
    models are not."""
    scheduler = type(getattr(getattr(policy, "pipe", None), "scheduler", None)).__name__
    named = f"{source} {scheduler}".lower()
    if "leaves" not in needs or not any(word in named for word in DISTILLED):
        return ""
    return (
        f"{source} with {scheduler} looks like a few-step distilled model: methods on the forward"
        " process tend to blur it or make it collapse; use its base model"
        + ("" if dataset else ", or a method on denoising steps")
    )


def _unmasked(trains: bool, model: bool | None, name: str) -> str:
    """trains: whether the method trains tokens; model: whether the policy has tokens, None: not
    known yet."""
    if model is None or trains == model:
        return ""
    if model:
        return (
            f"algorithm={name} trains flows, and the model is a masked generator, whose tokens are"
            " drawn; use algorithm=trace_rl, diffu_grpo, unigrpo or masked_ce"
        )
    return (
        f"algorithm={name} trains the tokens of masked generators, and the model is a flow; use"
        " algorithm=flow_grpo or nft, or a masked generator as the model (docs/masked.md)"
    )


def has_tokens(source: str) -> bool | None:
    """Whether a model is a masked generator, by its class of pipeline; None: only loading tells."""
    name = pipeline_of(source)
    return None if name is None else name == "AmusedPipeline"


def pipeline_of(source: str) -> str | None:
    """The class of pipeline that a model's folder's index or configs/architecture names; None: only
    loading tells."""
    if registry.is_outside("flowrl.models", source) or registry.is_live(source):
        return None
    try:
        name = str(excerpt.part("flowrl.policy.load", "resolve_source")(source)[0])
    except ValueError:  # a name of no model, which a rule of its own refuses
        return None
    named = Path(packaged(name)) / "model_index.json"
    if named.is_file():
        texts = [named.read_text(encoding="utf-8")]
    else:
        known = (resources.files("flowrl.configs") / "architecture").iterdir()
        every = [file.read_text(encoding="utf-8") for file in known]
        texts = [text for text in every if f"\nsource: {name}\n" in f"\n{text}"]
    classes = [re.search(r'^(?:pipeline:|\s*"_class_name":) "?(\w+)', t, re.M) for t in texts]
    return next((found[1] for found in classes if found), None)


def _few_images(images: int, held_out: Sequence[Mapping[str, Any]], field: str) -> str:
    """field: column of the prompts' domains."""
    left = {str(row[field]) for row in held_out[images:] if field in row}
    left -= {str(row[field]) for row in held_out[:images] if field in row}
    return (
        f"eval.images={images} samples the first {images} of the {len(held_out)} prompts of"
        f" data.eval, and none of the {field} {', '.join(sorted(left))}; with"
        f" eval.images={len(held_out)} each is seen"
        if left
        else ""
    )


def _stop_domain(
    reward: float, name: str | None, rewards: Any, prompts: Sequence[Mapping[str, Any]]
) -> str:
    """Totals of different rewards have no common scale: say which domain is meant. rewards:
    RewardSet."""
    what = f"stop.reward={reward:g}"
    if not rewards.domains:
        return f"stop.domain={name}: no reward states domains; leave it out" if name else ""
    known = sorted({str(prompt.get(rewards.domain_field)) for prompt in prompts})
    if name is None:
        return (
            f"{what} reads reward/total, the mean of totals of different rewards, which have no"
            f" common scale; name a domain by stop.domain={known[0]}"
        )
    if name in known:
        return ""
    return f'{what}: no prompt has the domain "{name}"{did_you_mean(name, known)}'


# Beside words, the facts are: method (the algorithm), processes (of a run, or its teams), rewards
# (a RewardSet), prompts, held_out (prompts of evaluations), files (media to train on), dataset (the
# folder that they are from, or None), anchored and validation (the Datasets of anchor.data and
# data.validation), policy, plan (of the first iteration), spare (prompts of a process beside its
# batch's).
RULES = (
    Rule(("batch.prompts", "batch.updates", "train.sequence_parallel", "processes"), _divisible),
    Rule(("batch.group", "plan.leaves"), _whole_trees),
    Rule(("train.parts", "algorithm.label", "method.heads", "method.trains_network"), _parts),
    Rule(
        ("data.sampler.mode", "method.needs"),
        "{0} learns from advantages, and this method has none; use bayes",
        when=lambda mode, needs: mode == "bandit" and "reward" in needs,
    ),
    Rule(
        (f"{HELP}after", "method.needs"),
        "{0} samples some prompts with guidance, steps or texts of their own, and"
        " algorithm={algorithm.label} trains how a sample was made; use a method on the forward"
        " process, as algorithm=nft or dpo, or leave it out",
        when=lambda after, needs: after and "leaves" not in needs,
    ),
    Rule((f"{HELP}after", f"{HELP}column", "prompts"), _help_texts),
    Rule(("replay.size", "algorithm.label", "method.needs", "method.unmasks"), _replayed),
    Rule(
        ("sampler.rlg", "method.needs"),
        "sampler.rlg={sampler.rlg:g} samples from another distribution than the one whose"
        " denoising steps {algorithm.label} trains; use a method on finished samples, as"
        " algorithm=nft, or sampler.rlg=1",
        when=lambda rlg, needs: rlg != 1 and needs & {"log_prob", "reward", "states"},
    ),
    Rule(("diversity", "method.needs"), _rewritten),
    Rule(
        ("draw.mode", "method.needs"),
        "{0} looks for groups whose rewards differ, and this method climbs the reward of each"
        " sample by itself; leave it out",
        when=lambda mode, needs: mode != "once" and "reward" in needs,
    ),
    Rule(
        ("batch.group", "method.needs", "algorithm.name"),
        "{0}: an advantage is a reward minus its group's mean, which is 0 for a single sample; use"
        " at least 2",
        when=lambda group, needs, name: (
            group == 1 and "reward" not in needs and name not in ("sft", "opd")
        ),
    ),
    Rule(
        ("stop.kl", "method.config"),
        "{0} needs policy/kl, which is measured only with algorithm.kl_weight above 0",
        when=lambda kl, options: kl is not None and not getattr(options, "kl_weight", 0),
    ),
    Rule(
        ("model.offload", "reward", "method.needs"),
        "{0}: the gradient of a reward passes through its networks and on through the denoiser, and"
        " only one of them would be there; use model.offload=denoiser, or leave that gradient out",
        when=lambda offload, rewards, needs: offload == "all" and climbs(rewards, needs),
    ),
    Rule(
        ("train.shard", "reward", "method.needs"),
        "{0}: the gradient of a reward computes calls of the network again in its backward, where"
        " processes cannot be kept in step; leave train.shard, or that gradient, out",
        when=lambda shard, rewards, needs: shard and climbs(rewards, needs),
    ),
    Rule(
        ("train.sequence_parallel", "reward", "method.needs"),
        "{0}: the gradient of a reward passes through several calls of the network, and members of"
        " a team know that of their own tokens alone; leave one of the two out",
        when=lambda members, rewards, needs: members > 1 and climbs(rewards, needs),
    ),
    Rule(
        ("train.sequence_parallel", "method.heads"),
        "{0}: algorithm.name={algorithm.label} trains a head beside the network, which members of a"
        " team do not share; leave one of the two out",
        when=lambda members, heads: members > 1 and heads,
    ),
    # rules on rewards
    Rule(
        ("draw.mode", "rewards.needs"),
        "draw.mode=balance compares rewards of several draws, and a reward that compares a group"
        " judges one; use draw.mode=refill or once",
        when=lambda mode, needs: mode == "balance" and "group" in needs,
    ),
    Rule(
        ("rewards", "method.needs", "algorithm.label", "data.offline", "rewards.climbers"),
        lambda rewards, needs, name, offline, _: _climbed(rewards, needs, name, offline),
    ),
    Rule(
        ("watch.held_out", "rewards.weighted", "rewards.weights"),
        lambda label, _, weights: (
            f"watch.held_out={label} is trained on, with weight {weights[label]:g}, so that it is"
            f" not held out; give it reward.{label}.weight=0, or name another reward"
        ),
        when=lambda label, weighted, _: label in weighted,
    ),
    Rule(("watch.held_out", "rewards.rules"), _held_out),
    Rule(
        ("stop.reward", "stop.domain", "rewards", "prompts"),
        _stop_domain,
        when=lambda reward, *_: reward is not None,
    ),
    Rule(
        ("stop.reward", "rewards.weighted", "dataset"),
        "{0} is a mean of rewards that count, and here none does: media without scores, or rewards"
        " of weight 0; leave it out",
        when=lambda reward, weighted, data: (
            reward is not None and (data.kind != "scored" if data else not weighted)
        ),
    ),
    *(
        Rule(
            (setting, "rewards.domains"),
            "{0} is one threshold for the totals of all prompts, and with rewards by domain these"
            " are sums of different rewards; leave it out",
            when=lambda value, domains: value is not None and domains,
        )
        for setting in ("draw.positive", "data.sampler.success")
    ),
    # rules on media from files
    Rule(
        ("watch.held_out", "watch.detectors", "files"),
        "watch reads the samples of the policy, and this run trains on media from files"
        " (data.offline, or prompts with a reference); leave watch out",
        when=lambda label, detectors, files: (label or detectors) and files,
    ),
    Rule(("files", "dataset", "method.needs", "draw.mode", "rewards.needs"), _files),
    Rule(
        ("dataset", "algorithm.name"),
        "data.offline holds media without scores, and {algorithm.label} compares samples by their"
        " scores; use algorithm=sft, or score them with `flowrl score` first",
        when=lambda data, name: data and data.kind == "media" and name != "sft",
    ),
    Rule(
        ("masks", "algorithm.name"),
        "data.offline has masks, which weigh the errors of pairs in algorithm=dpo alone;"
        " {algorithm.label} would not read them: leave the column out",
        when=lambda masks, name: masks and name != "dpo",
    ),
    Rule(
        ("data.labels", "dataset", "algorithm.name"),
        "data.labels={0} weighs the two orders of a pair, and only algorithm=dpo reads pairs;"
        " others train the chosen file at reward 1 and the rejected one at 0; leave it out",
        when=lambda labels, data, name: (
            labels == "soft" and not (name == "dpo" and data and data.kind == "pairs")
        ),
    ),
    Rule(
        ("dataset", "prompts"),
        "data.offline holds a single image of every prompt, whose advantage is 0; score several of"
        " each, or keep more of them",
        when=lambda dataset, prompts: dataset and dataset.singles == len(prompts),
    ),
    Rule(
        ("dataset", "prompts"),
        lambda dataset, prompts: (
            f"{dataset.singles} of {len(prompts)} prompts have a single image in data.offline: its"
            " advantage is always 0"
        ),
        when=lambda dataset, prompts: dataset and dataset.singles,
        kind="warn",
    ),
    Rule(
        ("validation", "dataset", "algorithm.name"),
        "data.validation holds {validation.kind} rows; it takes media for algorithm=sft or pairs"
        " for algorithm=dpo, of the kind that data.offline trains on",
        when=lambda held, data, name: held.items and (name, data.kind, held.kind) not in VALIDATED,
    ),
    Rule(("dataset", "validation"), _learned, when=lambda _, held: held.items, kind="warn"),
    # rules on media beside the samples
    Rule(("anchored", "anchor.data.unconditional"), _anchored),
    Rule(
        ("anchor.data.weight", "method.trains_network", "algorithm.label"),
        "{0} trains the network on media, and {algorithm.label} leaves it as it is; leave the"
        " anchor out",
        when=lambda weight, network, _: weight and not network,
    ),
    Rule(
        ("anchor.data.levels", "anchor.data.weight", "method.needs", "algorithm.label"),
        "{0} takes the noise levels of the method's rows, and those of {algorithm.label} are whole"
        " samples; use anchor.data.levels=own",
        when=lambda levels, weight, needs, _: (
            weight and levels == "rl" and needs & {"reward", "start"}
        ),
    ),
    Rule(("prompts", "held_out"), _shared, kind="warn"),
    Rule(("eval.images", "held_out", "data.domain"), _few_images, kind="warn"),
    # rules on the policy and the plan
    Rule(
        ("model.source",),
        lambda source: str(excerpt.part("flowrl.policy.amused", "beyond")(pipeline_of(source))),
    ),
    *(
        Rule(
            (f"{section}.steps", "policy.unmasks", "policy.latent_shape", "held_out"),
            "{0} would have steps that unmask nothing of {policy.latent_shape} tokens; use at most"
            " one step a token",
            when=lambda steps, unmasks, shape, held, used=section == "sampler": (
                unmasks and steps > math.prod(shape) and (used or held)
            ),
        )
        for section in ("sampler", "eval")
    ),
    Rule(
        ("eval.solver", "policy.unmasks"),
        "{0} solves the ODE of flows, and a masked generator draws tokens; leave it out",
        when=lambda solver, unmasks: unmasks and solver != "euler",
    ),
    Rule(("method.unmasks", "policy.unmasks", "algorithm.label"), _unmasked),
    Rule(
        ("method.unmasks", "model.source", "algorithm.label"),
        lambda trains, source, name: _unmasked(trains, has_tokens(source), name),
    ),
    Rule(
        ("method.unmasks", "reward", "algorithm.label"),
        "algorithm={algorithm.label} trains tokens, which are drawn, and the gradient of a reward"
        " cannot pass through them; leave its mode=grad out",
        when=lambda trains, rewards, _: trains and climbs(rewards, frozenset()),
    ),
    Rule(("model.source", "method.needs", "policy", "dataset"), _distilled, kind="warn"),
    Rule(
        ("replay.size", "batch.prompts", "batch.group", "policy.latent_shape"),
        _kept_samples,
        kind="warn",
    ),
    Rule(
        ("sampler.init_noise", "plan.init", "plan.kind", "batch.group", "data.offline"),
        "{0} starts all samples of a prompt from one noise, and this method's sampler adds none, so"
        " that they would be equal; use sampler.init_noise=sample",
        when=lambda _, init, kind, group, offline: (
            init != "sample" and not kind.any() and group > 1 and not offline
        ),
    ),
    Rule(
        ("draw.mode", "spare", "batch.prompts"),
        "too few prompts are left beside those of a batch; add prompts, or lower {2}",
        when=lambda mode, spare, _: mode == "refill" and spare < 1,
        kind="unread",
    ),
    Rule(
        ("sampler.eta", "plan.kind"),
        "this method samples without noise; methods on denoising steps, as algorithm=flow_grpo,"
        " read it",
        when=lambda eta, kind: eta and not kind.any(),
        kind="unread",
    ),
)
