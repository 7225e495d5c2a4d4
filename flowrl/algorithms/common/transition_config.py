"""The options of methods that train denoising steps: plan, credit, pruning, distance."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from flowrl.algorithms.common import base
from flowrl.runtime import registry
from flowrl.runtime.rule import Rule, read_above, read_when, read_with
from flowrl.samplers import sde
from flowrl.types import Plan

# kinds of KL that are of velocities or Gaussian steps, and not of tokens
GAUSSIAN_KL = ("velocity", "mean")
BRANCHING = ("branch", "tree", "fan", "granular")  # plans whose nodes have children to choose
FORKING = (*BRANCHING, "dense")  # plans whose samples share steps
# credit rules that z-score edges, not samples
OWN_STATISTICS = ("depth", "siblings", "granular", "dense")


def known_sde(name: str) -> str:
    """Return the name of a denoising step, a file's path made absolute; raise ValueError for an
    unknown name."""
    sde.check_known(name := registry.absolute(name))
    if name not in sde.SDES:
        own_sde(name)
    return name


def own_sde(name: str) -> sde.Sde:
    """Try a step of one's own, in the module itself: an excerpt of it (runtime/excerpt.py) has
    another class Transition than the file of the step."""
    return import_module("flowrl.samplers.sde").find(name)


def is_learned(name: str) -> bool:
    """Whether a denoising step takes noise that a policy learned."""
    return name == "learned" if name in sde.SDES else own_sde(name).learned


planned = partial(read_when, "algorithm.plan")
scheduled = partial(read_when, "algorithm.window.schedule")
credited = partial(read_when, "algorithm.credit")
WINDOWED = planned("window", "tree") | planned("branch") & read_when(
    "algorithm.tree.noisy", "window"
)


class Window(base.Options):
    """The window of steps that are SDE while the others are ODE."""

    schedule: Literal[
        "progressive", "random", "geometric", "decay", "exp_decay", "frozen", "adaptive"
    ] = Field(
        "progressive",
        description=(
            "How the window moves; adaptive moves it to the steps where branches were measured to"
            " differ most (plan=tree)."
        ),
    )
    size: PositiveInt = Field(4, description="SDE steps in the window; the depth of plan=tree.")
    low: int = Field(0, ge=0, description="First step the window may hold.")
    high: PositiveInt | None = Field(
        None,
        description=(
            "The window ends before this step; none: before the last step, which stays ODE."
        ),
    )
    every: Annotated[PositiveInt, scheduled("progressive", "decay", "exp_decay")] = Field(
        25,
        description=(
            "Iterations that the window stays at one place (the longest stay, for decay and"
            " exp_decay)."
        ),
    )
    stride: Annotated[PositiveInt, scheduled("progressive", "decay", "exp_decay", "adaptive")] = (
        Field(1, description="Steps the window moves at a time.")
    )
    rate: Annotated[PositiveFloat, scheduled("geometric", "exp_decay")] = Field(
        0.1, description="Rate of exp_decay per step beyond the 13th; ratio of geometric, below 1."
    )


class Tree(base.Options):
    """The forks of trajectories."""

    children: Annotated[PositiveInt, planned(*BRANCHING)] = Field(
        2, description="Children of a node that forks."
    )
    splits: Annotated[tuple[int, ...], planned("branch")] = Field(
        (0, 3, 6, 9), description="Steps at which every node forks."
    )
    noisy: Annotated[Literal["all", "window"], planned("branch")] = Field(
        "all",
        description=(
            "Which steps beside the splits are SDE: all, or those of the window (BranchGRPO-Mix)."
        ),
    )
    correlation: Annotated[NonNegativeFloat | None, planned("branch")] = Field(
        None,
        description=(
            "How far the noise of siblings differs (BranchGRPO's s): 0 makes it equal, a large"
            " number almost independent; none: independent."
        ),
    )
    steps: Annotated[tuple[int, ...] | None, planned("fan", "granular")] = Field(
        None, description="Steps that fork off the trunk; none: all but the last."
    )
    strides: Annotated[tuple[PositiveInt, ...], planned("granular")] = Field(
        (1, 2, 3), description="Step lengths of the ODE paths that end a branch."
    )


class Prune(base.Options):
    """Edges of a branching plan that are not trained."""

    width: Literal["none", "parent", "extremes"] = Field(
        "none",
        description=(
            "Which edges after the last split are trained: all, the best of each node's children"
            " (parent), or the paths to a prompt's best and worst leaves (extremes)."
        ),
    )
    leaves: Annotated[PositiveInt, read_when("algorithm.prune.width", "extremes")] = Field(
        4,
        description=(
            "How many of the best leaves, and how many of the worst, have their paths trained."
        ),
    )
    depth: NonNegativeInt = Field(
        0,
        description=(
            "How many consecutive depths are left out, at or after the last split; 0: none."
        ),
    )
    every: Annotated[PositiveInt, read_above("algorithm.prune.depth", 0)] = Field(
        30, description="Iterations after which the depths left out move by one."
    )
    slide: Annotated[Literal["later", "earlier"], read_above("algorithm.prune.depth", 0)] = Field(
        "later",
        description=(
            "How the depths left out move: later, from the last split to the end and again;"
            " earlier, from the end back to the last split, where they stay."
        ),
    )

    @property
    def active(self) -> bool:
        return self.width != "none" or self.depth > 0


def prunable(plan: Plan, splits: tuple[int, ...]) -> int:
    """Noisy steps of a branching plan from the last split on."""
    return int(plan.depth[plan.trained].max()) + 1 - max(splits)


def of_gaussian(setting: str, *values: object) -> Rule:
    """Refuse values of a setting (none: all but null) where steps draw tokens: they read the
    Gaussian noise of a step, or its velocity."""
    return Rule(
        (f"algorithm.{setting}", "algorithm.sde"),
        "{0} is of steps with Gaussian noise, and those of {1} draw tokens; leave it out",
        when=lambda value, step: (
            step in sde.UNMASKING and (value in values if values else value is not None)
        ),
    )


PRUNED = ("algorithm.prune.depth", "plan", "algorithm.tree.splits", "algorithm.plan")
RULES = (
    of_gaussian("plan", "window", *FORKING),
    of_gaussian("kl", *GAUSSIAN_KL),
    Rule(
        ("draw.mode", "algorithm.plan"),
        "{0} chooses whole samples, and plan={algorithm.plan} forks; use draw.mode=refill or once",
        when=lambda mode, plan: mode == "balance" and plan in FORKING,
    ),
    Rule(
        ("draw.mode", "algorithm.credit"),
        "{0} has a baseline of all draws, and credit={algorithm.credit} one of the samples kept;"
        " use draw.mode=refill or once",
        when=lambda mode, credit: mode == "balance" and credit in OWN_STATISTICS,
    ),
    Rule(
        ("diversity.entropy", "algorithm.credit"),
        "diversity.entropy={diversity.entropy:g} scales all advantages of a group alike, and {1}"
        " divides by a spread later; set it to 0",
        when=lambda entropy, credit: entropy and credit in OWN_STATISTICS,
    ),
    Rule(
        ("sampler.eta", "plan.kind", "method.config.learns_noise"),
        "the policy learns its noise, within algorithm.noise",
        when=lambda _, kind, learned: learned and bool(kind.any()),
        kind="unread",
    ),
    Rule(
        ("algorithm.credit", "plan.leaves", "plan.init"),
        "no samples share a step here, which makes it credit=leaf; set algorithm.plan=tree or"
        " branch",
        when=lambda credit, leaves, init: (
            leaves == 1 and (credit == "backup" or (credit == "td" and init == "sample"))
        ),
        kind="unread",
    ),
    Rule(
        ("algorithm.credit", "batch.group", "plan.leaves"),
        "{1} is one trajectory with its completions, and {0} compares the gains of several at each"
        " step; use a multiple of {plan.leaves}",
        when=lambda credit, group, leaves: credit == "dense" and group == leaves,
    ),
    Rule(
        ("algorithm.prune.width", "algorithm.prune.leaves", "batch.group"),
        "prune.leaves={algorithm.prune.leaves} best and as many worst are all of {2}; lower"
        " prune.leaves",
        when=lambda width, leaves, group: width == "extremes" and 2 * leaves >= group,
        kind="unread",
    ),
    *(
        Rule(
            (moved, *PRUNED),
            lambda _, depth, plan, splits, __: (
                f"algorithm.prune.depth={depth} covers all {prunable(plan, splits)} noisy steps"
                " from the last split on, so nothing can move"
            ),
            when=lambda _, depth, plan, splits, name: (
                name == "branch" and depth and depth >= prunable(plan, splits)
            ),
            kind="unread",
        )
        for moved in ("algorithm.prune.every", "algorithm.prune.slide")
    ),
    Rule(
        PRUNED,
        lambda depth, plan, splits, _: (
            f"there are {prunable(plan, splits)} noisy steps from the last split on, and all of"
            " them are left out, always; choose less"
        ),
        when=lambda depth, plan, splits, name: name == "branch" and depth > prunable(plan, splits),
        kind="unread",
    ),
)


class TransitionConfig(base.Credit, base.Anchor):
    learns_noise: ClassVar[bool] = False  # whether the policy predicts the std of a step

    @property
    def by_place(self) -> bool:
        """Whether the loss compares each token of a step by itself."""
        return False

    plan: Literal["full", "window", "branch", "tree", "fan", "granular", "dense"] = Field(
        "full",
        description=(
            "Which steps are SDE: every step but the last (full), those of a window (window), or,"
            " with forks, at splits (branch), in a window (tree) or off an ODE trunk (fan,"
            " granular). dense: full, and every state is finished by ODE, too."
        ),
    )
    window: Annotated[Window, WINDOWED] = Field(
        Window(), description="Where the window lies, and how it moves."
    )
    tree: Tree = Field(Tree(), description="The forks of plan=branch, tree, fan and granular.")
    sde: Annotated[str, AfterValidator(known_sde)] = Field(
        "flow_sde",
        description=(
            "The SDE step: flow_sde, dance_sde, precise, dance_precise, langevin, cps, ddim, or a"
            " transition of your own, path/to/file.py:NAME; sampler.eta is its noise level. Of"
            " masked generators: random_order, with eta the temperature of tokens, or confidence,"
            " with eta the first temperature of the choice."
        ),
    )
    tail: Annotated[float | None, WINDOWED] = Field(
        None,
        gt=0,
        le=1,
        description="MixGRPO-Flash: share of the ODE steps kept after the window; none: all.",
    )
    tail_count: Annotated[Literal["paper", "code"], read_with("algorithm.tail")] = Field(
        "paper", description="How tail is rounded: up (paper) or as the reference code counts."
    )
    credit: Literal["leaf", "depth", "backup", "td", "siblings", "granular", "dense"] = Field(
        "leaf",
        description=(
            "Advantage of a step: the mean over its leaves (leaf); z-scored at each depth (depth);"
            " backed up from its leaves by log-prob (backup); the mean over its leaves plus the"
            " gain over the node it starts from (td); z-scored among siblings (siblings); the same"
            " for each stride, summed (granular); z-scored gain of the step, by the rewards of the"
            " ODE completions of its two states (dense)."
        ),
    )
    fusion: Annotated[Literal["mean", "path", "recursive"], credited("depth")] = Field(
        "mean", description="How leaf rewards are fused upwards."
    )
    scope: Annotated[Literal["prompt", "tree"], credited("depth")] = Field(
        "prompt",
        description=(
            "Whether z-scores are taken over all trees of a prompt, or over each tree alone."
        ),
    )
    temperature: Annotated[PositiveFloat, credited("backup")] = Field(
        1.0, description="Temperature of the softmax over siblings' mean log-probs."
    )
    prune: Prune = Field(
        Prune(), description="Edges of plan=branch that are walked but not trained."
    )
    timestep_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of its SDE steps that each sample trains, drawn at random.",
    )
    kl: Annotated[
        Literal["exact", "flow_grpo", "velocity", "mean"], read_above("algorithm.kl_weight", 0)
    ] = Field("exact", description="Which distance to the reference kl_weight multiplies.")
    detach_uncond: bool = Field(
        False, description="Let no gradient pass through the unconditional branch of guidance."
    )

    rules: ClassVar[tuple[Rule, ...]] = RULES

    @model_validator(mode="after")
    def check_credit(self) -> TransitionConfig:
        if self.credit in OWN_STATISTICS and self.std != "group":
            raise ValueError(
                f"algorithm.std={self.std} has no meaning for credit={self.credit}, which z-scores"
                " edges; use std=group"
            )
        if (self.plan == "dense") != (self.credit == "dense"):
            raise ValueError(
                f"algorithm.plan={self.plan} with credit={self.credit}: plan=dense completes every"
                " state, and credit=dense compares these completions; set both, or neither"
            )
        if self.keep is not None and (self.plan in FORKING or self.credit != "leaf"):
            raise ValueError(
                f"algorithm.keep={self.keep} leaves out whole samples, which plan={self.plan} with"
                f" credit={self.credit} would not; use it with plan=full or window and credit=leaf"
            )
        return self

    @model_validator(mode="after")
    def check_sde(self) -> TransitionConfig:
        if is_learned(self.sde) and not self.learns_noise:
            raise ValueError(
                f"algorithm.sde={self.sde} takes noise that a policy learned, which this method"
                " does not train; use algorithm=reinflow"
            )
        return self

    @model_validator(mode="after")
    def check_plan_options(self) -> TransitionConfig:
        if self.tail is not None and self.plan in ("fan", "granular", "dense"):
            raise ValueError(
                f"algorithm.tail={self.tail} shortens what follows the last noisy step, and"
                f" plan={self.plan} has several; drop it"
            )
        if self.tree.correlation is not None and self.plan != "branch":
            raise ValueError(
                f"algorithm.tree.correlation={self.tree.correlation} is of plan=branch, and the"
                f" plan is {self.plan}; drop it"
            )
        if self.timestep_fraction < 1 and self.plan in FORKING:
            raise ValueError(
                f"algorithm.timestep_fraction={self.timestep_fraction} draws steps of each sample,"
                f" and samples of plan={self.plan} share them; set it to 1"
            )
        return self


def needs_whole_samples(config: TransitionConfig, name: str) -> None:
    """Raise ValueError where samples share steps, for losses that compare whole samples."""
    if config.plan in FORKING or config.credit != "leaf":
        raise ValueError(
            f"{name} compares whole samples; algorithm.plan={config.plan} with"
            f" credit={config.credit} does not fit: use plan=full, credit=leaf"
        )
    if config.keep is not None:
        raise ValueError(
            f"{name} compares all samples of a group; algorithm.keep={config.keep} would leave some"
            " out: set it to null"
        )
