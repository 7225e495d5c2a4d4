"""Options that were set but that nothing reads under the others, such as a window of plan=full: a
table of rules, and `unread` to apply it.

An option counts as set when it differs from its default. These are warnings, not mistakes:
`algorithm.plan=full` on the command line leaves the other options of a shipped file behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowrl.algorithms.awm import AWMConfig
from flowrl.algorithms.common.base import Algorithm, Anchor, Credit
from flowrl.algorithms.common.prune import depths
from flowrl.algorithms.common.transitions import FORKING, TransitionConfig
from flowrl.algorithms.crd import CRDConfig
from flowrl.algorithms.dgpo import DGPOConfig
from flowrl.algorithms.raft import RAFTConfig
from flowrl.config.load import flatten
from flowrl.config.schema import Config
from flowrl.types import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What rules look at."""

    cfg: Config
    c: Any  # options of the algorithm
    plan: Plan  # of the first iteration
    spare: int  # prompts beside those of a batch, for each process

    @property
    def windowed(self) -> bool:
        return self.c.plan in ("window", "tree") or (
            self.c.plan == "branch" and self.c.tree.noisy == "window"
        )

    @property
    def depths(self) -> int:
        """Noisy steps of plan=branch from the last split on."""
        return depths(self.plan, self.c.tree.splits)


class Rule(NamedTuple):
    of: type  # algorithms with these options
    keys: tuple[str, ...]  # dotted names
    unread: Callable[[Start], bool]
    why: str  # ends the sentence "KEY=VALUE has no effect"; may name values of Start


def not_scheduled(schedules: tuple[str, ...]) -> Callable[[Start], bool]:
    return lambda s: s.windowed and s.c.window.schedule not in schedules


def not_planned(plans: tuple[str, ...]) -> Callable[[Start], bool]:
    return lambda s: s.c.plan not in plans


# option of algorithm.window -> schedules that read it; size, low and high are read by all
WINDOW = {
    "every": ("progressive", "decay", "exp_decay"),
    "every_min": ("decay",),
    "stride": ("progressive", "decay", "exp_decay", "adaptive"),
    "rate": ("geometric", "exp_decay"),
    "knee": ("exp_decay",),
}
TREE = {  # option of algorithm.tree -> plans that read it; correlation is refused elsewhere
    "children": FORKING,
    "splits": ("branch",),
    "noisy": ("branch",),
    "steps": ("fan", "granular"),
    "strides": ("granular",),
}
RULES = [
    Rule(
        object,
        ("draw.rounds",),
        lambda s: s.cfg.draw.mode == "once",
        ": draw.mode=once has one round; set draw.mode=refill or balance",
    ),
    Rule(
        object,
        ("draw.spread",),
        lambda s: s.cfg.draw.mode != "refill",
        ": it says which groups draw.mode=refill adds prompts for, and draw.mode={s.cfg.draw.mode}",
    ),
    Rule(
        object,
        ("draw.positive",),
        lambda s: s.cfg.draw.mode != "balance",
        ": it says which samples draw.mode=balance counts as good, and draw.mode={s.cfg.draw.mode}",
    ),
    Rule(
        object,
        ("draw.mode",),
        lambda s: s.cfg.draw.mode == "refill" and s.spare < 1,
        ": too few prompts are left beside those of a batch; add prompts, or lower"
        " batch.prompts={s.cfg.batch.prompts}",
    ),
    Rule(
        object,
        ("sampler.eta",),
        lambda s: not bool(s.plan.kind.any()),
        ": this method samples without noise; methods on denoising steps, as algorithm=flow_grpo,"
        " read it",
    ),
    Rule(
        Anchor,
        ("algorithm.reference_decay",),
        lambda s: s.c.reference != "ema",
        ": it is of algorithm.reference=ema, and the reference is {s.c.reference}",
    ),
    Rule(
        Anchor,
        ("algorithm.reference_every",),
        lambda s: s.c.reference != "reset",
        ": it is of algorithm.reference=reset, and the reference is {s.c.reference}",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.kl",),
        lambda s: not s.c.kl_weight,
        ": no distance is computed; set algorithm.kl_weight above 0",
    ),
    Rule(
        TransitionConfig,
        tuple(f"algorithm.window.{key}" for key in ("size", "low", "high", "schedule", *WINDOW)),
        lambda s: not s.windowed,
        ": plan={s.c.plan} has no window; set algorithm.plan=window or tree, or"
        " algorithm.tree.noisy=window with plan=branch",
    ),
    *(
        Rule(
            TransitionConfig,
            (f"algorithm.window.{key}",),
            not_scheduled(schedules),
            ": window.schedule={s.c.window.schedule} does not read it; it is of"
            f" {', '.join(schedules)}",
        )
        for key, schedules in WINDOW.items()
    ),
    *(
        Rule(
            TransitionConfig,
            (f"algorithm.tree.{key}",),
            not_planned(plans),
            f": it is of algorithm.plan={', '.join(plans)}, and the plan is {{s.c.plan}}",
        )
        for key, plans in TREE.items()
    ),
    Rule(
        TransitionConfig,
        ("algorithm.tail",),
        lambda s: s.c.plan in ("full", "branch") and not s.windowed,
        ": all steps but the last are noisy, so there is no ODE tail to shorten; set"
        " algorithm.plan=window or tree",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.tail_count",),
        lambda s: s.c.tail is None,
        ": it rounds algorithm.tail, which is not set",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.credit",),
        lambda s: (
            s.plan.leaves == 1
            and (s.c.credit == "backup" or s.c.credit == "td" and s.plan.init == "sample")
        ),
        ": no samples share a step here, which makes it credit=leaf; set algorithm.plan=tree or"
        " branch",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.fusion", "algorithm.scope"),
        lambda s: s.c.credit != "depth",
        ": algorithm.credit=depth alone reads that, and credit={s.c.credit}",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.temperature",),
        lambda s: s.c.credit != "backup",
        ": it is of algorithm.credit=backup, and credit={s.c.credit}",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.prune.leaves",),
        lambda s: s.c.prune.width != "extremes",
        ": it is of algorithm.prune.width=extremes, and the width is {s.c.prune.width}",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.prune.width",),
        lambda s: s.c.prune.width == "extremes" and 2 * s.c.prune.leaves >= s.cfg.batch.group,
        ": prune.leaves={s.c.prune.leaves} best and as many worst are all of"
        " batch.group={s.cfg.batch.group}; lower prune.leaves",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.prune.every", "algorithm.prune.slide"),
        lambda s: not s.c.prune.depth,
        ": no depths are left out that could move; set algorithm.prune.depth above 0",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.prune.every", "algorithm.prune.slide"),
        lambda s: s.c.plan == "branch" and s.c.prune.depth >= s.depths,
        ": algorithm.prune.depth={s.c.prune.depth} covers all {s.depths} noisy steps from the last"
        " split on, so nothing can move",
    ),
    Rule(
        TransitionConfig,
        ("algorithm.prune.depth",),
        lambda s: s.c.plan == "branch" and s.c.prune.depth > s.depths,
        " beyond {s.depths}, the noisy steps from the last split on: all of them are left out,"
        " always; choose less",
    ),
    Rule(
        Credit,
        ("algorithm.keep",),
        lambda s: s.c.keep is not None and s.c.keep >= s.cfg.batch.group,
        ": a group has batch.group={s.cfg.batch.group} samples; choose less",
    ),
    Rule(
        AWMConfig,
        ("algorithm.clip", "algorithm.ratio"),
        lambda s: not s.c.off_policy,
        ": on-policy the ratio is 1 whatever is learned; set algorithm.off_policy=true",
    ),
    Rule(
        AWMConfig,
        ("algorithm.power",),
        lambda s: s.c.weighting != "ghuber",
        ": it is of algorithm.weighting=ghuber, and the weighting is {s.c.weighting}",
    ),
    Rule(
        AWMConfig,
        ("algorithm.old_slope", "algorithm.old_decay"),
        lambda s: not (s.c.off_policy or s.c.ema_weight),
        ": no old policy is kept; set algorithm.ema_weight above 0, or algorithm.off_policy=true",
    ),
    Rule(
        DGPOConfig,
        ("algorithm.old_slope", "algorithm.old_decay"),
        lambda s: s.c.clip is None,
        ": no old policy is kept; set algorithm.clip",
    ),
    Rule(
        CRDConfig,
        ("algorithm.reference_guidance", "algorithm.kl_floor"),
        lambda s: not s.c.kl_weight,
        ": the reference is not read; set algorithm.kl_weight above 0",
    ),
    Rule(
        RAFTConfig,
        ("algorithm.temperature",),
        lambda s: s.c.select != "softmax",
        ": it is of algorithm.select=softmax, and select={s.c.select}",
    ),
    Rule(
        RAFTConfig,
        ("algorithm.top",),
        lambda s: s.c.select != "best",
        ": it is of algorithm.select=best, and select={s.c.select}",
    ),
]


def unread(cfg: Config, algorithm: Algorithm, plan: Plan, *, spare: int) -> list[str]:
    """A sentence for each rule that some option breaks: which, why it has no effect, and what would
    give it one.

    spare: prompts beside those of a batch, for each process.
    """
    start = Start(cfg=cfg, c=algorithm.config, plan=plan, spare=spare)
    default = Config.model_construct().model_dump(mode="json") | {
        "algorithm": type(start.c).model_construct().model_dump(mode="json")
    }
    before, now, sentences = flatten(default), flatten(cfg.model_dump(mode="json")), []
    for rule in RULES:
        named = [
            f"{key}={now[key]}" for key in rule.keys if key in now and now[key] != before.get(key)
        ]
        if named and isinstance(start.c, rule.of) and rule.unread(start):
            sentences.append(
                f"{', '.join(named)} {'has' if len(named) == 1 else 'have'} no"
                f" effect{rule.why.format(s=start)}"
            )
    return sentences
