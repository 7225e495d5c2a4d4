"""What can be wrong with a run's settings, said before anything is written."""

from __future__ import annotations

import math

from flowrl.algorithms.common.base import Algorithm
from flowrl.algorithms.common.transition_config import FORKING, OWN_STATISTICS
from flowrl.algorithms.dpo import DPOConfig
from flowrl.algorithms.raft import RAFTConfig
from flowrl.config import combine
from flowrl.config.build import check_parts
from flowrl.config.compose import ConfigError
from flowrl.config.schema import Config
from flowrl.data import conditions, scored_dataset
from flowrl.data import prompts as data
from flowrl.policy import Policy
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.rewards import RewardSet
from flowrl.rewards.core.climb import check_climbable
from flowrl.rollouts import from_files
from flowrl.runtime.log import logger
from flowrl.runtime.memory import ran_out
from flowrl.runtime.text import printable
from flowrl.types import Plan

MOST_KINDS = 8  # of conditions that are tried before a run
LARGE = 1000  # megabytes of kept samples that are worth a word


def check_batch(cfg: Config, *, processes: int, leaves: int) -> None:
    """The only two divisibility rules. leaves: media that one copy of the plan yields. Violations
    -> one ConfigError."""
    batch, problems = cfg.batch, []
    unit = processes * batch.updates
    if batch.prompts % unit:
        kind = "process" if cfg.train.sequence_parallel == 1 else "team"
        many = "es" if kind == "process" else "s"
        what = (
            f"{processes} {kind}{many * (processes > 1)} x {batch.updates}"
            f" update{'s' * (batch.updates > 1)}"
        )
        problems.append(
            f"batch.prompts={batch.prompts} does not divide by {what}; try"
            f" {_nearest(batch.prompts, unit)}"
        )
    if batch.group % leaves:
        problems.append(
            f"batch.group={batch.group} is not a multiple of the plan's {leaves} leaves; try"
            f" {_nearest(batch.group, leaves)}"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _nearest(value: int, unit: int) -> str:
    """Multiples of unit on both sides of value."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def check_signal(cfg: Config, algorithm: Algorithm, plan: Plan, needs: frozenset[str]) -> None:
    """Settings with which a run would go on without doing what it says -> ValueError, or a warning
    where the run still trains.

    needs: columns that the rewards declare.
    """
    if cfg.draw.mode != "once" and "reward" in algorithm.needs:
        raise ValueError(
            f"draw.mode={cfg.draw.mode} looks for groups whose rewards differ, and this method"
            " climbs the reward of each sample by itself; leave it out"
        )
    if cfg.batch.group == 1 and "reward" not in algorithm.needs:
        raise ValueError(
            "batch.group=1: an advantage is a reward minus its group's mean, which is 0 for a"
            " single sample; use at least 2"
        )
    if not cfg.data.offline:
        check_samples(cfg, algorithm, plan)
    if cfg.draw.mode == "balance":
        check_balance(cfg, needs)
    if cfg.stop.kl is not None and not getattr(algorithm.config, "kl_weight", 0):
        raise ValueError(
            f"stop.kl={cfg.stop.kl} needs policy/kl, which is measured only with"
            " algorithm.kl_weight above 0"
        )
    steps = cfg.iterations * cfg.batch.updates
    if cfg.ema.decay and cfg.ema.every > steps:
        logger.warning(
            f"ema.every={cfg.ema.every} exceeds the run's {steps} optimizer steps: the averaged"
            " weights, which are evaluated and exported, will be those before training"
        )


def check_samples(cfg: Config, algorithm: Algorithm, plan: Plan) -> None:
    """Samples that all score 0, that are all equal within a prompt, or all trained whatever their
    rewards -> ValueError."""
    if not any(entry["weight"] for entry in cfg.reward.values()):
        raise ValueError(
            f"every reward has weight 0 ({', '.join(cfg.reward)}), so nothing would be trained;"
            " give one another weight"
        )
    alone = cfg.batch.group == 1
    if plan.init != "sample" and not bool(plan.kind.any()) and not alone:
        raise ValueError(
            f"sampler.init_noise={plan.init} starts all samples of a prompt from one noise, and"
            " this method's sampler adds none, so that they would be equal; use"
            " sampler.init_noise=sample"
        )
    c = algorithm.config
    if isinstance(c, RAFTConfig) and c.select == "best" and c.top >= cfg.batch.group:
        raise ValueError(
            f"algorithm.top={c.top} of batch.group={cfg.batch.group} trains every sample, whatever"
            " its reward; lower it, or raise the group"
        )


def check_balance(cfg: Config, needs: frozenset[str]) -> None:
    """draw.mode=balance trains a part of the draws with a baseline of all -> ValueError where a
    method needs its groups whole."""
    a, instead = cfg.algorithm, "use draw.mode=refill or once"
    if a.get("plan") in FORKING:
        raise ValueError(
            f"draw.mode=balance chooses whole samples, and plan={a['plan']} forks; {instead}"
        )
    if a.get("credit") in OWN_STATISTICS:
        raise ValueError(
            f"draw.mode=balance has a baseline of all draws, and credit={a['credit']} one of the"
            f" samples kept; {instead}"
        )
    if "group" in needs:
        raise ValueError(
            "draw.mode=balance compares rewards of several draws, and a reward that compares a"
            f" group judges one; {instead}"
        )
    if a.get("keep") is not None:
        raise ValueError(
            f"draw.mode=balance and algorithm.keep={a['keep']} both choose what is trained; drop"
            " one of them"
        )
    if a["name"] == "dgpo":
        raise ValueError(
            "dgpo needs advantages that add up to 0 over a group, which draw.mode=balance trains a"
            f" part of; {instead}"
        )


def check_method(
    cfg: Config, algorithm: Algorithm, prompts: data.Prompts, rewards: RewardSet
) -> None:
    """ValueError where a method is not one for its prompts and rewards; no model is needed."""
    check_parts(cfg, algorithm)
    check_choice(cfg, algorithm)
    check_help(cfg, algorithm, prompts)
    check_replay(cfg, algorithm)
    check_extrapolated(cfg, algorithm)
    check_combined(rewards, algorithm)
    check_diversity(cfg, algorithm)
    check_climbed(cfg, rewards, algorithm)
    check_apart(cfg, "reward" in algorithm.needs or bool(rewards.climbers))
    check_sequence(cfg, algorithm, rewards)


def check_apart(cfg: Config, climbed: bool) -> None:
    """ValueError where the gradient of a reward is climbed, and needs at once what a run holds
    apart."""
    if climbed and cfg.model.offload == "all":
        raise ValueError(
            "model.offload=all: the gradient of a reward passes through its networks and on through"
            " the denoiser, and only one of them would be there; use model.offload=denoiser, or"
            " leave that gradient out"
        )
    if climbed and cfg.train.shard:
        raise ValueError(
            f"{combine.said(cfg, 'train.shard')}: the gradient of a reward computes calls of the"
            " network again in its backward, where processes cannot be kept in step; leave"
            " train.shard, or that gradient, out"
        )


def check_sequence(cfg: Config, algorithm: Algorithm, rewards: RewardSet) -> None:
    """ValueError where a run's gradient is not a sum over the tokens of single calls; no model is
    needed. Settings that do not go with it: flowrl/config/combine.py."""
    if cfg.train.sequence_parallel == 1:
        return
    asked = f"train.sequence_parallel={cfg.train.sequence_parallel}"
    if "reward" in algorithm.needs or rewards.climbers:
        raise ValueError(
            f"{asked}: the gradient of a reward passes through several calls of the network, and"
            " members of a team know that of their own tokens alone; leave one of the two out"
        )
    if algorithm.heads:
        raise ValueError(
            f"{asked}: algorithm.name={cfg.algorithm['name']} trains a head beside the network,"
            " which members of a team do not share; leave one of the two out"
        )


def check_combined(rewards: RewardSet, algorithm: Algorithm) -> None:
    """ValueError where statistics of each reward by itself would undo levels."""
    how = getattr(algorithm.config, "combine", "rewards")
    for label, primary in rewards.strata.items():
        if how != "rewards":
            raise ValueError(
                f"algorithm.combine={how} takes z-scores of each reward by itself, which undo"
                f" reward.{label}.stratify={primary}; use algorithm.combine=rewards, or"
                f" reward.{label}.gate.{primary}=0.5 in place of stratify"
            )


def check_watch(cfg: Config, rewards: RewardSet, *, files: bool) -> None:
    """ValueError where what is watched is missing, is trained on, or is no sample. files: whether
    media from files are trained on."""
    watch, label = cfg.watch, cfg.watch.held_out
    if (label or watch.detectors) and files:
        raise ValueError(
            "watch reads the samples of the policy, and this run trains on media from files"
            " (data.offline, or prompts with a reference); leave watch out"
        )
    if label is None:
        if cfg.stop.watch != "none":
            raise ValueError(
                f"stop.watch={cfg.stop.watch} needs a held-out reward; add one that is only"
                " measured, as reward.clip.weight=0, and name it: watch.held_out=clip"
            )
        return
    if label not in rewards.rewards:
        raise ValueError(
            f"watch.held_out={label} is none of the rewards ({', '.join(rewards.rewards)}); name"
            f" one of weight 0, or add it with reward.{label}.weight=0"
        )
    if label in rewards.weighted:
        raise ValueError(
            f"watch.held_out={label} is trained on, with weight {rewards.weights[label]:g}, so"
            f" that it is not held out; give it reward.{label}.weight=0, or name another reward"
        )
    deciding = [k for k, r in rewards.rules.items() if label in r.gate or label == r.stratify]
    if deciding:
        raise ValueError(
            f"watch.held_out={label} decides how reward.{deciding[0]} counts, so that it is not"
            " held out; name another reward of weight 0"
        )
    if cfg.checkpoint.every > watch.smooth:
        logger.warning(
            f"checkpoint.every={cfg.checkpoint.every} is more than watch.smooth={watch.smooth}: the"
            " checkpoint nearest the peak may lie far from it; lower checkpoint.every"
        )


def check_climbed(cfg: Config, rewards: RewardSet, algorithm: Algorithm) -> None:
    """ValueError where rewards that are climbed by their gradient give none, or where mode=grad
    leaves nothing to do."""
    climbers = ", ".join(sorted(rewards.climbers))
    if "reward" in algorithm.needs:
        if climbers:
            raise ValueError(
                f"mode=grad of {climbers} says nothing here: algorithm={cfg.algorithm['name']}"
                " climbs the gradient of every reward; leave it out"
            )
        return check_climbable(rewards)
    if not climbers:
        return None
    if cfg.data.offline:
        raise ValueError(
            f"mode=grad of {climbers} cannot be taken out of the scores in data.offline, which are"
            " totals; leave one of the two out"
        )
    climbed = rewards.climbed()
    if not rewards.credited().weighted:
        raise ValueError(
            f"every reward with a weight has mode=grad ({climbers}), which leaves none to compare"
            " samples by; use algorithm=draft without mode, or give another reward a weight"
        )
    check_climbable(climbed)
    together = [k for k, r in climbed.rewards.items() if "group" in r.needs]
    if together:
        raise ValueError(
            f"{', '.join(together)} compares the samples of a group, and the gradient of"
            f" {climbers} is taken of each by itself; leave mode=grad or that gate out"
        )
    return None


def check_choice(cfg: Config, algorithm: Algorithm) -> None:
    """ValueError where what chooses prompts is not told how they did."""
    mode = cfg.data.sampler.mode
    if mode != "uniform" and cfg.data.offline:
        raise ValueError(
            f"data.sampler.mode={mode} learns from new samples, and data.offline has none; leave it"
            " out"
        )
    if mode == "bandit" and "reward" in algorithm.needs:
        raise ValueError(
            "data.sampler.mode=bandit learns from advantages, and this method has none; use bayes"
        )


def check_help(cfg: Config, algorithm: Algorithm, prompts: data.Prompts) -> None:
    """ValueError where prompts that never succeed cannot be helped as it is said."""
    c = cfg.data.sampler.help
    if not c.after:
        return
    what = f"data.sampler.help.after={c.after}"
    if "leaves" not in algorithm.needs:
        raise ValueError(
            f"{what} samples some prompts with guidance, steps or texts of their own, and"
            f" algorithm={cfg.algorithm['name']} trains how a sample was made; use a method on the"
            " forward process, as algorithm=nft or dpo, or leave it out"
        )
    if cfg.data.offline:
        raise ValueError(f"{what} helps new samples, and data.offline has none; leave it out")
    if c.guidance is None and c.steps is None and c.column is None:
        raise ValueError(
            f"{what} says when prompts are helped, but not how; add data.sampler.help.guidance=4,"
            " data.sampler.help.steps=40 or data.sampler.help.column=help_prompt"
        )
    if c.column is None:
        return
    texts = [row[c.column] for row in prompts if row.get(c.column) and c.column != "prompt"]
    if not texts:
        raise ValueError(
            f"data.sampler.help.column={c.column}: no prompt has a text in that column; write"
            f' {{"prompt": ..., "{c.column}": ...}} in a .jsonl of prompts'
        )
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(
            f"data.sampler.help.column={c.column} holds {printable(repr(wrong[0]), 60)}, which is"
            " no text"
        )


def check_replay(cfg: Config, algorithm: Algorithm) -> None:
    """ValueError where old samples cannot be trained again."""
    if not cfg.replay.size:
        return
    if "leaves" not in algorithm.needs:
        what = "reads the log-probs of denoising steps, which are not kept"
        if "reward" in algorithm.needs:
            what = "climbs rewards of new samples"
        elif "start" in algorithm.needs:
            what = "trains the initial noise, which is not kept"
        raise ValueError(
            f"replay.size={cfg.replay.size} trains finished samples of earlier iterations, and"
            f" algorithm={cfg.algorithm['name']} {what}; use a method on the forward process, as"
            " algorithm=nft or dpo, or replay.size=0"
        )
    if cfg.data.offline:
        raise ValueError(
            f"replay.size={cfg.replay.size} keeps new samples, and data.offline has none; leave it"
            " out"
        )


def warn_large(cfg: Config, policy: Policy) -> None:
    """Samples that replay.size keeps may take more than a GB."""
    samples = cfg.replay.size * cfg.batch.prompts * cfg.batch.group
    megabytes = 4 * samples * math.prod(policy.latent_shape) / 1e6
    if megabytes > LARGE:
        logger.warning(
            f"replay.size={cfg.replay.size} keeps up to {samples} samples, which are"
            f" {megabytes:,.0f} MB of the memory of each process"
        )


def check_extrapolated(cfg: Config, algorithm: Algorithm) -> None:
    """ValueError where samples would come from another distribution than the one whose steps are
    trained."""
    if cfg.sampler.rlg != 1 and algorithm.needs & {"log_prob", "reward"}:
        raise ValueError(
            f"sampler.rlg={cfg.sampler.rlg:g} samples from another distribution than the one whose"
            f" denoising steps {cfg.algorithm['name']} trains; use a method on finished samples, as"
            " algorithm=nft, or sampler.rlg=1"
        )


def check_diversity(cfg: Config, algorithm: Algorithm) -> None:
    """ValueError where samples have no features, or where what these change is not read."""
    d, c, method = cfg.diversity, algorithm.config, cfg.algorithm["name"]
    if d.features is None:
        return
    if cfg.data.offline:
        raise ValueError(
            f"diversity.features={d.features} compares new samples, and data.offline has none;"
            " leave it out"
        )
    if d.used and "reward" in algorithm.needs:
        raise ValueError(
            f"diversity.{d.used} changes what advantages are made of, and this method climbs the"
            " reward of each sample by itself; set it to 0"
        )
    own = getattr(c, "credit", None) in OWN_STATISTICS
    ranked = isinstance(c, DPOConfig) or isinstance(c, RAFTConfig) and c.select == "best"
    if d.entropy and (own or ranked):
        why = (
            f"algorithm.credit={c.credit} divides by a spread later"
            if own
            else f"{method} reads only the order of samples in their group"
        )
        raise ValueError(
            f"diversity.entropy={d.entropy:g} scales all advantages of a group alike, and {why};"
            " set it to 0"
        )


def check_files(
    algorithm: Algorithm,
    policy: Policy,
    dataset: scored_dataset.Dataset | None,
    prompts: data.Prompts,
    rewards: RewardSet,
    *,
    draw: str,
) -> None:
    """Media from files serve methods that read leaves alone; wrong files or another method ->
    ValueError."""
    files = dataset.paths if dataset else data.references(prompts)
    if not files:
        return
    what = (
        "data.offline trains on media from files"
        if dataset
        else 'a prompt with a "reference" adds an image from a file'
    )
    if algorithm.needs & {"log_prob", "reward", "start"}:
        raise ValueError(
            f"{what}, which have no denoising steps to train; use a method on the forward process,"
            " as algorithm=nft or dpo"
        )
    if dataset and draw != "once":
        raise ValueError(
            f"draw.mode={draw} samples again, and data.offline samples nothing; use draw.mode=once"
        )
    if draw == "balance":
        raise ValueError(
            "draw.mode=balance chooses among samples, and a reference image is none; use"
            " draw.mode=refill or once"
        )
    if not dataset and "group" in rewards.needs:
        raise ValueError(
            f"{what}, which a reward that compares the members of a group cannot judge alone; drop"
            " one of the two"
        )
    from_files.check(policy, files)
    if dataset and dataset.singles == len(prompts):
        raise ValueError(
            "data.offline holds a single image of every prompt, whose advantage is 0; score several"
            " of each, or keep more of them"
        )
    if dataset and dataset.singles:
        logger.warning(
            f"{dataset.singles} of {len(prompts)} prompts have a single image in data.offline: its"
            " advantage is always 0"
        )


def columns_read(cfg: Config, rewards: RewardSet) -> frozenset[str]:
    """Columns of prompts that something else than the pipeline reads."""
    own = {"prompt", "conditions", "reference", cfg.data.sampler.help.column or "prompt"}
    return frozenset(own).union(*(reward.reads for reward in rewards.rewards.values()))


def check_conditions(policy: Policy, prompts: data.Prompts, read: frozenset[str]) -> None:
    """ValueError where the policy does not take what prompts bring: a prompt of each kind is tried,
    not to find it in the middle of a run."""
    if isinstance(policy, PipelinePolicy):
        policy.check_columns(sorted({key for row in prompts for key in row} - read))
    places = conditions.kinds(prompts)
    if len(places) > MOST_KINDS:
        logger.info(f"{len(places)} kinds of conditions; {MOST_KINDS} are tried before the run")
    for place in places[:MOST_KINDS]:
        if own := conditions.of([prompts[place]]):
            try:
                policy.encode([prompts[place]["prompt"]], own)
            except (ValueError, RuntimeError) as error:
                if ran_out(error):
                    raise
                text = printable(prompts[place]["prompt"], 60)
                raise ValueError(f'the conditions of prompt "{text}": {error}') from error


def warn_distilled(algorithm: Algorithm, policy: Policy, source: str) -> None:
    """Forward-process losses take v as that of a flow-matching model, which few-step distilled
    models are not."""
    scheduler = type(getattr(getattr(policy, "pipe", None), "scheduler", None)).__name__
    words = ("turbo", "lightning", "schnell", "lcm", "tcd", "hyper", "distill", "dmd")
    if "leaves" in algorithm.needs and any(
        word in f"{source} {scheduler}".lower() for word in words
    ):
        logger.warning(
            f"{source} with {scheduler} looks like a few-step distilled model: methods on the"
            " forward process tend to blur it or make it collapse; use its base model, or a method"
            " on denoising steps"
        )
