"""Settings that were set but that nothing reads under the others, such as a window of plan=full.

Most say themselves on their field under which settings they are read (flowrl/runtime/read_when.py);
what depends on the plan, the prompts or the size of a group stands here as a function each. A
setting counts as set when it differs from its default. These are warnings, not mistakes:
`algorithm.plan=full` on the command line leaves the other options of a shipped file behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from flowrl.algorithms.common.base import Algorithm, Credit
from flowrl.algorithms.common.prune import depths
from flowrl.algorithms.common.transition_config import TransitionConfig
from flowrl.config.load import flatten
from flowrl.config.schema import Config
from flowrl.config.training import GradientConfig
from flowrl.data.tables import is_table
from flowrl.runtime.read_when import Condition, as_yaml, conditions
from flowrl.types import Plan

Unread = tuple[tuple[str, ...], str]  # dotted keys, and what ends "KEYS have no effect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run at its start."""

    cfg: Config
    options: Any  # of the algorithm
    plan: Plan  # of the first iteration
    spare: int  # prompts beside those of a batch, for each process


def unused_options(cfg: Config, algorithm: Algorithm, plan: Plan, *, spare: int) -> list[str]:
    """Sentences: which settings have no effect, why, and what would give them one.

    spare: prompts beside those of a batch, for each process.
    """
    start = Start(cfg=cfg, options=algorithm.config, plan=plan, spare=spare)
    now, sentences = flatten(cfg.model_dump(mode="json")), []
    before = flatten(defaults(type(start.options)))
    for keys, why in chain(without_condition(start, now), *(rule(start) for rule in RULES)):
        named = [f"{key}={now[key]}" for key in keys if now[key] != before.get(key)]
        if named:
            verb = "has" if len(named) == 1 else "have"
            sentences.append(f"{', '.join(named)} {verb} no effect: {why}")
    return sentences


def defaults(options: type[Any]) -> dict[str, Any]:
    """A config in which nothing was set."""
    algorithm = options.model_construct().model_dump(mode="json")
    return Config.model_construct().model_dump(mode="json") | {"algorithm": algorithm}


def without_condition(start: Start, now: Mapping[str, object]) -> Iterator[Unread]:
    """Keys whose declared condition does not hold, those of one condition together."""
    unread: dict[str, tuple[Condition, list[str]]] = {}
    schemas = conditions(Config), conditions(type(start.options), "algorithm.")
    for key, declared in chain(*schemas):
        failing = next((c for c in declared if not c.holds(now)), None)
        if failing is not None:
            unread.setdefault(failing.words, (failing, []))[1].append(key)
    for condition, keys in unread.values():
        present = " and ".join(
            f"{key}={as_yaml(now[key])}" for key in dict.fromkeys(condition.keys)
        )
        yield tuple(keys), f"read only with {condition.words}; here {present}"


def too_few_prompts(start: Start) -> Iterator[Unread]:
    """draw.mode=refill needs prompts beside those of a batch."""
    if start.cfg.draw.mode == "refill" and start.spare < 1:
        yield (
            ("draw.mode",),
            "too few prompts are left beside those of a batch; add prompts, or lower"
            f" batch.prompts={start.cfg.batch.prompts}",
        )


def no_noisy_steps(start: Start) -> Iterator[Unread]:
    if not bool(start.plan.kind.any()):
        yield (
            ("sampler.eta",),
            "this method samples without noise; methods on denoising steps, as"
            " algorithm=flow_grpo, read it",
        )
    elif isinstance(start.options, TransitionConfig) and start.options.learns_noise:
        yield ("sampler.eta",), "the policy learns its noise, within algorithm.noise"


def no_shared_steps(start: Start) -> Iterator[Unread]:
    """Credit rules that pass rewards up a tree, where no samples share a step."""
    if not isinstance(start.options, TransitionConfig) or start.plan.leaves > 1:
        return
    credit = start.options.credit
    if credit == "backup" or credit == "td" and start.plan.init == "sample":
        yield (
            ("algorithm.credit",),
            "no samples share a step here, which makes it credit=leaf; set algorithm.plan=tree"
            " or branch",
        )


def keeps_all(start: Start) -> Iterator[Unread]:
    group = start.cfg.batch.group
    if isinstance(start.options, Credit) and (start.options.keep or 0) >= group:
        yield ("algorithm.keep",), f"a group has batch.group={group} samples; choose less"


def prunes_no_leaves(start: Start) -> Iterator[Unread]:
    """prune.width=extremes that names all leaves of a group."""
    if not isinstance(start.options, TransitionConfig):
        return
    prune, group = start.options.prune, start.cfg.batch.group
    if prune.width == "extremes" and 2 * prune.leaves >= group:
        yield (
            ("algorithm.prune.width",),
            f"prune.leaves={prune.leaves} best and as many worst are all of batch.group={group};"
            " lower prune.leaves",
        )


def prunes_all_depths(start: Start) -> Iterator[Unread]:
    """prune.depth that covers every noisy step from the last split on."""
    if not isinstance(start.options, TransitionConfig) or start.options.plan != "branch":
        return
    prune, most = start.options.prune, depths(start.plan, start.options.tree.splits)
    if prune.depth and prune.depth >= most:
        yield (
            ("algorithm.prune.every", "algorithm.prune.slide"),
            f"algorithm.prune.depth={prune.depth} covers all {most} noisy steps from the last"
            " split on, so nothing can move",
        )
    if prune.depth > most:
        yield (
            ("algorithm.prune.depth",),
            f"there are {most} noisy steps from the last split on, and all of them are left out,"
            " always; choose less",
        )


def names_columns_of_no_table(start: Start) -> Iterator[Unread]:
    data = start.cfg.data
    if data.offline or not any(is_table(source) for source in (data.train, data.eval) if source):
        yield (
            tuple(f"data.columns.{name}" for name in data.columns),
            "neither data.train nor data.eval is a .jsonl, .csv or .parquet file or hf:NAME",
        )


def climbs_nothing(start: Start) -> Iterator[Unread]:
    """Section `gradient` without a reward that it is about."""
    if not any(entry.get("mode") == "grad" for entry in start.cfg.reward.values()):
        yield (
            tuple(f"gradient.{name}" for name in GradientConfig.model_fields),
            "read only with a reward of mode=grad; write reward.NAME.mode=grad",
        )


RULES = (
    climbs_nothing,
    names_columns_of_no_table,
    too_few_prompts,
    no_noisy_steps,
    no_shared_steps,
    keeps_all,
    prunes_no_leaves,
    prunes_all_depths,
)
