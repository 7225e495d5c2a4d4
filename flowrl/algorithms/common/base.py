"""The functions that the training loop asks of an algorithm; they depend on arguments, not on
state.

An algorithm owns no loop, no optimizer and no random state. A plugin is a module of
flowrl/algorithms with `ALGORITHM`, a subclass of Algorithm. One iteration:

    plan = algorithm.plan(sigmas, ...)                 which edges are walked, which are trained
    leaf = algorithm.leaf_advantages(rewards, group)   from rewards of all processes
    advantages = algorithm.advantages(rollout, leaf)   credit of each leaf and each transition
    rows = algorithm.columns(rollout, advantages, ...) what is trained: a row a term of the loss
    scores = algorithm.score(policy, rollout, rows)    (n,) each, differentiable: calls the network
    loss = algorithm.loss(scores, rows)                pure; summed over rows

Methods that train transitions build on transitions.py, those that train finished samples on
forward.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from torch import Tensor

from flowrl import advantages as credit
from flowrl.runtime.rule import Rule, read_above, read_when, read_with
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rewards, Rollout, Transition


class Options(BaseModel):
    """Base of every algorithm's Config; unknown keys are errors, and values cannot change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
    # rules that refuse the options beside other settings, or say where they are not read
    rules: ClassVar[tuple[Rule, ...]] = ()


def undone_levels(how: str, strata: dict[str, str]) -> str:
    """Sentence that says why z-scores of each single reward do not go with levels.

    strata: label of a reward -> name of the reward within whose levels it is scaled.
    """
    if how == "rewards" or not strata:
        return ""
    label, primary = next(iter(strata.items()))
    return (
        f"algorithm.combine={how} takes z-scores of each reward by itself, which undo"
        f" reward.{label}.stratify={primary}; use algorithm.combine=rewards, or"
        f" reward.{label}.gate.{primary}=0.5 in place of stratify"
    )


def counting(rewards: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Say which rewards count, beside a method that climbs none."""
    if not (found := [label for label, entry in rewards.items() if entry.get("weight", 1) != 0]):
        return ""
    return (
        f"algorithm={name} climbs no reward, and {', '.join(found)} would count; watch it with"
        f" reward.{found[0]}.weight=0, or use another algorithm"
    )


WATCHED = Rule(("reward", "algorithm.name"), counting)  # for methods that read no advantages


class Credit(Options):
    """Options of credit, the way from rewards to advantages of samples, the same for every
    method."""

    outcome: Literal["reward", "win_rate"] = Field(
        "reward",
        description=(
            "Value from which credit starts: the reward, or the share of the group's other members"
            " whose reward it exceeds."
        ),
    )
    combine: Literal["rewards", "advantages", "gdpo"] = Field(
        "rewards",
        description=(
            "How several rewards are combined: z-score of their sum (rewards), sum of their"
            " z-scores (advantages), or that sum over its standard deviation in the iteration"
            " (gdpo)."
        ),
    )
    std: Literal["group", "global"] | None = Field(
        "group",
        description=(
            "Standard deviation that divides an advantage: that of its group, that of all samples"
            " (global), or none."
        ),
    )
    ddof: Literal[0, 1] = Field(
        0, description="Degrees of freedom taken from the standard deviation."
    )
    eps: NonNegativeFloat = Field(
        1e-4, description="Number added to the standard deviation before the division."
    )
    adv_clip: PositiveFloat = Field(5.0, description="Advantages are clipped to this size.")
    keep: int | None = Field(
        None,
        ge=2,
        description=(
            "How many samples of each group are trained, half of them the best and half the worst;"
            " none: all."
        ),
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("algorithm.keep", "draw.mode"),
            "{1} and {0} both choose what is trained; drop one of them",
            when=lambda keep, mode: keep is not None and mode == "balance",
        ),
        Rule(
            ("algorithm.keep", "batch.group"),
            "a group has {1} samples; choose less",
            when=lambda keep, group: (keep or 0) >= group,
            kind="unread",
        ),
        Rule(("algorithm.combine", "rewards.strata"), undone_levels),
    )


class KLGate(Options):
    """GARDO's gate (arXiv:2512.24138): samples with a suspect reward are held to the reference."""

    main: str | None = Field(
        None,
        description=(
            "Label of the trained reward: only samples that it ranks higher than others do are held"
            " to the reference (GARDO); none: all samples."
        ),
    )
    auxiliary: Annotated[tuple[str, ...], read_with("algorithm.kl_gate.main")] = Field(
        (),
        description="Labels of the rewards whose mean rank main's is compared with.",
    )
    share: Annotated[float, read_with("algorithm.kl_gate.main")] = Field(
        0.1,
        gt=0,
        le=1,
        description=(
            "Share of the samples ranked at least as high by main that are held to the reference."
        ),
    )
    sign: Annotated[credit.Sign, read_with("algorithm.kl_gate.main")] = Field(
        "hacked",
        description=(
            "Which samples are suspect: those that main ranks higher than auxiliary does (hacked),"
            " or lower (code: as in the authors' code)."
        ),
    )

    @model_validator(mode="after")
    def check_labels(self) -> KLGate:
        given = f"main={self.main or 'null'}"
        if (self.main is None) != (not self.auxiliary):
            raise ValueError(
                f"{given} and auxiliary=[{','.join(self.auxiliary)}]: the gate compares one reward"
                " with others; name both, or neither"
            )
        if self.main in self.auxiliary or len(set(self.auxiliary)) < len(self.auxiliary):
            raise ValueError(
                f"{given} is compared with other rewards, each named once, and"
                f" auxiliary=[{','.join(self.auxiliary)}]; name others there"
            )
        return self


def unknown_labels(gate: dict[str, Any], rewards: dict[str, Any], dataset: Any) -> str:
    """Sentence that says which label of the gate is no reward's.

    rewards: by label; dataset: the folder whose scores are trained in their place, or None.
    """
    known = list(rewards if dataset is None else dataset.weights)
    if gate["main"] is None:
        return ""
    missing = [label for label in (gate["main"], *gate["auxiliary"]) if label not in known]
    if not missing:
        return ""
    where = "rewards" if dataset is None else "scores in data.offline"
    return (
        f"algorithm.kl_gate names {missing[0]}, and the {where} are {', '.join(known) or 'none'};"
        f" name one of them, or add it to be measured only, as reward.{missing[0]}.weight=0"
    )


class Anchor(Options):
    """The reference that the policy is kept near, and how strongly."""

    kl_weight: NonNegativeFloat = Field(
        0.0, description="Weight of the distance to the reference; 0: it is not computed."
    )
    reference: Literal["frozen", "ema", "reset"] = Field(
        "frozen",
        description=(
            "The reference: the base model (without train.init_lora), a moving average of the"
            " policy, or the policy of some iterations ago (reset)."
        ),
    )
    reference_decay: Annotated[float, read_when("algorithm.reference", "ema")] = Field(
        0.99, ge=0, lt=1, description="Decay of the moving average, applied after each iteration."
    )
    reference_every: Annotated[PositiveInt, read_when("algorithm.reference", "reset")] = Field(
        40, description="Iterations after which the reference becomes the policy again."
    )
    kl_gate: Annotated[KLGate, read_above("algorithm.kl_weight", 0)] = Field(
        KLGate(), description="Which samples are held to the reference."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("algorithm.kl_gate", "rewards.rewards", "dataset"), unknown_labels),
        Rule(
            ("algorithm.kl_gate.main", "algorithm.kl_gate.auxiliary", "rewards.domains"),
            "{0} and {1} are ranked over all samples, and one of them is asked for the prompts of"
            " some domains alone; name rewards of all prompts",
            when=lambda main, auxiliary, domains: {main, *auxiliary} & domains.keys(),
        ),
        Rule(
            ("replay.size", "algorithm.kl_gate.main"),
            "{0} trains samples of earlier iterations again, and {1} ranks those of one; leave one"
            " of the two out",
            when=lambda size, main: size and main is not None,
        ),
    )

    @model_validator(mode="after")
    def check_gate(self) -> Anchor:
        if self.kl_gate.main is not None and not self.kl_weight:
            raise ValueError(
                f"algorithm.kl_gate.main={self.kl_gate.main} chooses samples that are held to the"
                " reference, and algorithm.kl_weight=0 holds none; give it a weight"
            )
        return self


class Sampler(Protocol):
    """The sampler's settings that shape a plan."""

    eta: float  # noise level of SDE steps
    init_noise: Literal["sample", "group", "batch"]


class VelocityField(Protocol):
    """The functions that a loss asks of a policy (flowrl.policy.Policy), or of an object in its
    place."""

    def velocity(
        self,
        x: Tensor,
        sigma: Tensor,
        cond: Any,
        rows: Tensor,
        *,
        guidance: float | str = "pipeline",
        detach_uncond: bool = False,
    ) -> Tensor: ...
    def reward(
        self, x: Tensor, rollout: Rollout, samples: Tensor, sigma: float = 0.0
    ) -> Tensor: ...
    def taught(self, x: Tensor, sigma: Tensor, cond: Any, rows: Tensor) -> Tensor: ...
    def step_std(self, cond: Any, sigma: Tensor, rows: Tensor, most: Tensor) -> Tensor: ...
    def initial(self, cond: Any, rows: Tensor) -> Transition: ...
    def view(self, name: str) -> AbstractContextManager[None]: ...
    def same(self, a: str, b: str) -> bool: ...


class Algorithm:
    """One instance a run; holds its config, and in `memory` what a later plan may depend on."""

    Config: ClassVar[type[Options]] = Options
    # needs of the loss from rollout and policy, a subset of "log_prob" | "leaves" | "reference" |
    # "old" | "anchor" | "reward" | "start" | "states"
    needs: frozenset[str] = frozenset()
    # rows that one term of the loss joins; for "sample" and "group": those with equal column "unit"
    couples: Literal["row", "sample", "group"] = "row"
    rollout_view: Literal["default", "old"] = "default"  # view of the weights that samples
    guidance: Literal["none"] | None = None  # guidance of the rollout; None: the sampler's setting
    left_out: float = 0.0  # advantage of a sample that `keep` does not train
    trains_network: bool = True  # False: only heads are trained
    unmasks: bool = False  # True: it trains tokens of masked generators, and no flows
    reads_rewards: bool = True  # False: a prompt may have no reward that is asked for its domain
    # whether old log-probs are those of the training forward, computed before the first update
    rescored: bool = False
    # clip range against which the ratio's self-test holds low-precision errors
    clip_size: float = 1e-4

    def __init__(self, config: Any):
        self.config = config
        self.memory: dict[str, float] = {}  # checkpoints hold it

    @property
    def views(self) -> list[str]:
        """Copies of the trained weights that are kept beside them."""
        return sorted(self.needs & {"old", "anchor"})

    @property
    def heads(self) -> dict[str, dict[str, Any]]:
        """Options of the small networks that the method trains beside the policy's own network, by
        the names that train.parts has for them (flowrl/policy/weights/heads.py)."""
        return {}

    @property
    def reference_guidance(self) -> float | str:
        """Guidance of the reference in the loss, where the method has one of its own."""
        return getattr(self.config, "reference_guidance", "none")

    def plan(self, sigmas: Tensor, *, sampler: Sampler, iteration: int, seed: int) -> Plan:
        """The sampling plan of an iteration; sigmas (T+1,) fp64 fall."""
        raise NotImplementedError

    def check(self, plan: Plan) -> None:
        """Raise ValueError, which says what setting to change, where the method cannot use the
        plan."""

    def most_rows(self, plan: Plan, group: int) -> int:
        """Most rows of the loss that a group of `group` samples gives."""
        return int(plan.trained.sum()) * group // plan.leaves

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        """The advantage of each sample (B,) fp32, NaN where it failed, from rewards and groups of
        all processes."""
        c = self.config
        scored = rewards if c.outcome == "reward" else self.win_rates(rewards, group)
        stats: dict[str, Any] = {"std": c.std, "ddof": c.ddof, "eps": c.eps, "clip": c.adv_clip}
        if c.combine == "rewards":  # z-score of the weighted sum
            stats |= {"valid": scored.valid, "within": scored.within}
            adv = credit.group_relative(scored.total, group, **stats)
        else:
            adv = credit.combine(scored, group, how=c.combine, **stats)
        if c.keep is not None:
            adv = torch.where(credit.best_worst(adv, group, c.keep), adv, self.left_out)
        return torch.where(rewards.valid, adv, torch.nan)

    def win_rates(self, rewards: Rewards, group: Tensor) -> Rewards:
        """Win rates within groups, of each reward and of their sum, in place of the rewards."""
        raw = {
            label: credit.win_rate(value.masked_fill(~rewards.valid, float("nan")), group)
            for label, value in rewards.terms.items()
        }
        total = credit.win_rate(rewards.total, group)
        return dataclasses.replace(rewards, raw=raw, counted={}, total=total)

    def kl_gate(self, rewards: Rewards) -> Tensor | None:
        """Factor of each sample's KL, (B,) fp32, from rewards of all processes; None: all count.
        `columns` then gives it to its rows, see `gate_column`."""
        return None

    def advantages(self, rollout: Rollout, leaf: Tensor) -> Advantages:
        """Credit of this process's leaves and transitions from its leaf advantages (B,)."""
        return Advantages(leaf=leaf)

    def observe(self, rollout: Rollout, rewards: Rewards) -> dict[str, float]:
        """Numbers about this process's rollout; their averages over processes are logged, and
        `remember` gets them."""
        return {}

    def remember(self, observed: dict[str, float]) -> None:
        """Keep in `memory` what later plans need of the averaged numbers of `observe`."""

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """The rows with a signal, one term of the loss each, with at least the columns "prompt"
        (n,), the row of cond, and "adv" and "weight" (n,) fp32."""
        raise NotImplementedError

    def network_rows(self, batch: Columns) -> Tensor:
        """Numbers (n,) int64 on the CPU: rows of the batch with equal numbers share a row of the
        network's forward."""
        return torch.arange(len(batch))

    def score(self, policy: VelocityField, rollout: Rollout, batch: Columns) -> dict[str, Tensor]:
        """Named (n,) fp32 numbers, differentiable in the policy's weights."""
        raise NotImplementedError

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """Sum over rows of weight * term; metrics are summed likewise.

        The caller divides both by the weight of the update.
        """
        raise NotImplementedError

    def fit(self, policy: VelocityField, rollout: Rollout, batch: Columns) -> Tensor:
        """How well the policy's present view explains each row (n,): a log-prob, or minus an
        error."""
        raise NotImplementedError

    def follow(self, step: int, iteration: int) -> dict[str, float]:
        """The decay d of each view that follows the weights theta after an iteration, by
        view <- d view + (1 - d) theta. iteration counts from 0; step: optimizer steps so far."""
        return {}


class Anchored(Algorithm):
    """An algorithm whose config is an Anchor; `anchor` names the view that is its reference."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.anchor = "reference" if config.reference == "frozen" else "anchor"

    def check_anchor(self) -> None:
        """Raise ValueError where a reference is chosen that the loss would not read."""
        if self.config.reference != "frozen" and "anchor" not in self.needs:
            raise ValueError(
                f"algorithm.reference={self.config.reference} is read only with algorithm.kl_weight"
                " above 0; set it, or leave it out"
            )

    def anchor_needs(self, always: bool = False) -> set[str]:
        """The view of the reference, where the loss reads it or `always`."""
        return {self.anchor} if always or self.config.kl_weight else set()

    def kl_gate(self, rewards: Rewards) -> Tensor | None:
        """1 for samples with a suspect reward, 0 for the others, where the config asks for it."""
        gate = self.config.kl_gate
        return None if gate.main is None else credit.suspects(rewards, **gate.model_dump())

    def follow(self, step: int, iteration: int) -> dict[str, float]:
        c = self.config
        if "anchor" not in self.needs:
            return {}
        if c.reference == "ema":
            return {"anchor": c.reference_decay}
        return {"anchor": 0.0} if (iteration + 1) % c.reference_every == 0 else {}


def gate_column(gate: Tensor | None, rows: Tensor) -> dict[str, Tensor]:
    """The column kl_gate (n,) of the loss's rows, whose places in the gate (m,) are `rows` (n,);
    {}: the KL of all of them counts."""
    return {} if gate is None else {"kl_gate": gate[rows]}


def check_gated(algorithm: Algorithm, advantages: Advantages, rows: Columns) -> None:
    """Raise ValueError where a method of one's own gave the gate of the KL to no row."""
    if advantages.kl_gate is not None and "kl_gate" not in rows.data:
        raise ValueError(
            f"{type(algorithm).__name__}.columns gives no column kl_gate, so that algorithm.kl_gate"
            " would change nothing; add **gate_column(advantages.kl_gate, rows) to its columns"
        )


def plus_kl(
    term: Tensor, scores: dict[str, Tensor], metrics: dict[str, Tensor], weight: Tensor | float
) -> Tensor:
    """Add weight times scores["kl"] (n,), the distance to the reference, to the term (n,), where
    that score exists; it becomes the metric policy/kl."""
    if "kl" not in scores:
        return term
    metrics["policy/kl"] = scores["kl"]
    return term + weight * scores["kl"]


held = plus_kl  # name of plus_kl in methods that were written for version 0.1


def summed(term: Tensor, metrics: dict[str, Tensor], batch: Columns) -> LossOutput:
    """The sums over rows of a term (n,) and of metrics (n,), weighted by the rows' weights."""
    return LossOutput(
        loss=(batch.weight * term).sum(),
        metrics={name: (batch.weight * value.detach()).sum() for name, value in metrics.items()},
    )


def checked_loss(algorithm: Algorithm, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
    """The algorithm's loss, with policy/old_deviation where the old policy was compared; ValueError
    where it is not one number with a gradient.

    A column kl_gate (n,) multiplies the score kl. The loss stays a mean over all rows, so that the
    weight of a gated row depends on no micro-batch; policy/kl is the distance of all rows.
    """
    counted = scores
    if gated := "kl_gate" in batch.data and "kl" in scores:
        counted = {**scores, "kl": batch.kl_gate * scores["kl"]}
    out: Any = algorithm.loss(counted, batch)
    loss = getattr(out, "loss", out)
    shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
    if isinstance(out, LossOutput) and shape == " of shape ()" and loss.requires_grad:
        if "old_deviation" in scores:  # one place for every method that reads the old policy
            far = (batch.weight * scores["old_deviation"].detach()).sum()
            out.metrics["policy/old_deviation"] = far
        if gated:
            out.metrics["policy/kl"] = (batch.weight * scores["kl"].detach()).sum()
        return out
    raise ValueError(
        f"{type(algorithm).__name__}.loss returned a {type(out).__name__}{shape}, and not a"
        " LossOutput of one number that depends on the scores; return summed(term, metrics, batch)"
    )


def sums(value: Tensor, unit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add up values (n,) by their unit (n,) -> sums of units (u,), rows of units (u,), and the unit
    of each row (n,), numbered from 0.

    unit may be on the CPU: then nothing waits for the values' device.
    """
    found = torch.unique(unit, return_inverse=True, return_counts=True)[1:]
    place, count = (t.to(value.device, non_blocking=True) for t in found)
    zeros = torch.zeros(len(count), dtype=value.dtype, device=value.device)
    return zeros.index_add(0, place, value), count, place


def mean_of_unit(value: Tensor, unit: Tensor) -> Tensor:
    """Each row's value replaced by the mean over the rows of its unit: (n,) -> (n,)."""
    total, count, place = sums(value, unit)
    return (total / count)[place]


def clipped_surrogate(ratio: Tensor, clipped: Tensor, adv: Tensor) -> tuple[Tensor, Tensor]:
    """PPO's max(-A ratio, -A clipped), and 1 where the clip stops the gradient: (n,) each."""
    stopped = (ratio < clipped) & (adv < 0) | (ratio > clipped) & (adv > 0)
    return torch.maximum(-adv * ratio, -adv * clipped), stopped.float()
