"""What can be wrong with a run's settings, said before anything is written."""

from __future__ import annotations

from flowrl.algorithms.common.base import Algorithm
from flowrl.algorithms.common.transition_config import FORKING, OWN_STATISTICS
from flowrl.algorithms.raft import RAFTConfig
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


def check_batch(cfg: Config, *, processes: int, leaves: int) -> None:
    """The only two divisibility rules. leaves: media that one copy of the plan yields. Violations
    -> one ConfigError."""
    batch, problems = cfg.batch, []
    unit = processes * batch.updates
    if batch.prompts % unit:
        what = (
            f"{processes} process{'es' * (processes > 1)} x {batch.updates}"
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
    if algorithm.needs & {"log_prob", "reward"}:
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
