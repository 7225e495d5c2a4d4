"""The records that travel through one iteration. This module imports no other of flowrl.

Letters: P prompts, G samples per prompt, B = P*G samples, T steps, E edges of a plan, N stored
transitions, M stored states, *L latent dims. Everything is a flow: x_s = (1-s) x0 + s eps, s =
sigma in [0, 1], 1 = noise, v = eps - x0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

ODE, SDE = 0, 1
BRIEF = 500  # most letters of a record's repr
Solver = Literal["euler", "dpm2"]  # how ODE edges are stepped


def brief(record: object, *facts: str) -> str:
    """Write a record's repr: facts about it, in place of the numbers that it holds."""
    text = f"{type(record).__name__}({', '.join(facts)})"
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 4]}...)"


def weighted(weights: dict[str, float]) -> str:
    """Write rewards with their weights, as "1 x shapes"."""
    return " + ".join(f"{weight:g} x {name}" for name, weight in weights.items())


def expand(value: Tensor, like: Tensor) -> Tensor:
    """Append dims of length 1 to value, (B,) or (), until it broadcasts against like, (B, *L)."""
    if value.ndim in (0, like.ndim):
        return value
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim))


def fp64(like: Tensor, *values: Tensor | float) -> list[Tensor]:
    """Move values, each (B, *L), (B,) or (), to fp64 on like's device; they broadcast against like.

    A step computes in fp64 and rounds once: its coefficients are differences of nearly equal
    numbers. (Apple's GPUs have no fp64; there it is fp32.)
    """
    exact = torch.float32 if like.device.type == "mps" else torch.float64
    # non_blocking: else the host would wait until the device has finished all its work
    to = {"device": like.device, "dtype": exact, "non_blocking": True}
    return [expand(torch.as_tensor(v).to(**to), like) for v in values]


Reduction = Literal["mean", "sum", "none"]


class SamplingStep(Protocol):
    """The distribution p(y | x) of one sampling step, of latents (Transition) or of tokens
    (samplers/common/unmasking.py); losses ask nothing else of it."""

    def sample(self, noise: Tensor) -> Tensor:
        """Take the step (B, *L) by the noise of a policy."""

    def log_prob(self, y: Tensor, *, reduction: Reduction = "mean") -> Tensor:
        """Log-probability of y: over the size of a state -> (B,), or for each place alone."""

    def kl(self, other: Self, *, reduction: Reduction = "mean") -> Tensor:
        """KL(self || other) of two steps from one state, reduced alike."""


NO_DENSITY = "log_prob of a deterministic transition (std = 0); only SDE steps have a density"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Gaussian p(y | x) of one sampling step."""

    mean: Tensor  # (B, *L) fp32
    std: Tensor  # () or (B, 1, ...) fp32, 0 for a deterministic step

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std * noise; noise: (B, *L) fp32."""
        return self.mean + self.std * noise

    def log_prob(
        self, y: Tensor, *, reduction: Reduction = "mean", mask: Tensor | None = None
    ) -> Tensor:
        """Log-density of y (B, *L), detached, over latent dims where mask is true -> (B,).

        "mean" divides by the number of dims D (the field's convention: ratios become r**(1/D));
        "none" gives that of each dim, (B, *L), and 0 where mask is false. std
        == 0 where mask is true -> ValueError on the CPU; on other devices the check would make the
        host wait, so the density is infinite there. Dims where mask is false enter neither value
        nor gradient, even if they are NaN; a row without any dim has log-density 0.
        """
        gap, std = y.detach().float() - self.mean, self.std
        if mask is not None:  # select before arithmetic: 0 * NaN is NaN
            mask = mask.expand_as(gap)
            gap, std = torch.where(mask, gap, 0.0), torch.where(mask, std, 1.0)
        if std.device.type == "cpu" and not bool((std > 0).all()):
            raise ValueError(NO_DENSITY)
        lp = -0.5 * (gap / std).square() - torch.log(std) - 0.5 * math.log(2 * math.pi)
        if std.device.type != "cpu":
            lp = torch.where(std > 0, lp, torch.inf)
        if reduction == "none":
            return lp if mask is None else torch.where(mask, lp, 0.0)
        if mask is None:
            flat = lp.flatten(1)
            return flat.mean(1) if reduction == "mean" else flat.sum(1)
        total = torch.where(mask, lp, 0.0).flatten(1).sum(1)
        return total / mask.flatten(1).sum(1).clamp(min=1) if reduction == "mean" else total

    def kl(self, other: Transition, *, reduction: Reduction = "mean") -> Tensor:
        """KL(self || other) of two Gaussians: a mean or sum over latent dims (B,), or of each."""
        gap = (self.mean - other.mean) / other.std / 2**0.5
        # the part that different standard deviations add is exactly 0 where they are equal
        log_ratio = self.std.log() - other.std.log()
        spread = 0.5 * (2 * log_ratio).expm1() - log_ratio
        if reduction == "none":
            return gap.square() + spread
        kl = gap.square().flatten(1).mean(1)
        kl = kl + (spread.flatten(1).mean(1) if spread.ndim > 1 else spread)
        return kl if reduction == "mean" else kl * gap[0].numel()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An explicit forest of sampling edges for one prompt; the constructors live in
    flowrl.samplers.plan.

    Edge e leads from the end of edge parent[e] (or from the noise x_T of root[e] when parent[e] ==
    -1) at sigma[e] to sigma_next[e]. Edges are in topological order: parent[e] < e.
    """

    parent: Tensor  # (E,) int64, -1 at a root
    root: Tensor  # (E,) int64, index of the x_T this edge descends from
    sigma: Tensor  # (E,) fp64, sigma where the edge starts
    sigma_next: Tensor  # (E,) fp64, sigma where it ends
    kind: Tensor  # (E,) int64, ODE or SDE
    eta: Tensor  # (E,) fp64, noise level of SDE edges, 0 on ODE edges
    trained: Tensor  # (E,) bool, edges of which the loss reads both ends; most are SDE edges
    sde: str = "flow_sde"  # gives SDE transitions: in flowrl.samplers, file.py:NAME or a plugin
    solver: Solver = "euler"  # how ODE edges are stepped
    # ODE edges that start at sigma <= dpm_from use dpm2 when solver == "dpm2"
    dpm_from: float = 1.0
    # roots that share x_T: none ("sample"), those of one prompt ("group"), all ("batch")
    init: Literal["sample", "group", "batch"] = "sample"
    # share r of a root's own noise in its x_T, sqrt(1 - r^2) shared + r own; None: all is its own
    spread: float | None = None
    sigma_cap: float | None = None  # stands in for a first sigma of 1 in Flow-SDE
    # BranchGRPO's s, for correlated siblings; None: siblings are independent
    correlation: float | None = None
    # log-probs of steps: one a step, or one for each place of a grid of tokens
    reduction: Literal["mean", "none"] = "mean"

    @cached_property
    def edges(self) -> int:
        return self.parent.numel()

    @cached_property
    def leaf_edges(self) -> Tensor:
        """Edges without children, in order of appearance -> (leaves,)."""
        has_child = torch.zeros(self.edges, dtype=torch.bool)
        has_child[self.parent[self.parent >= 0]] = True
        return torch.nonzero(~has_child).flatten()

    @cached_property
    def leaves(self) -> int:
        """Media that one copy of the plan yields."""
        return self.leaf_edges.numel()

    @cached_property
    def roots(self) -> int:
        return int(self.root.max()) + 1

    @cached_property
    def depth(self) -> Tensor:
        """Count the edges between each edge and its root, (E,)."""
        out = [0] * self.edges
        for e, p in enumerate(self.parent.tolist()):
            out[e] = 0 if p < 0 else out[p] + 1
        return torch.tensor(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts of one iteration."""

    text: list[str]  # texts of the P prompts
    ids: Tensor  # (P,) int64 places of the prompts in the data, stable over the run
    meta: list[dict[str, Any]]  # P records that rewards may read

    def __len__(self) -> int:
        return len(self.text)

    def __repr__(self) -> str:
        return brief(self, f"{len(self)} prompts", f"text={self.text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Denoising trajectories as a forest: states are stored once, transitions are pairs of rows."""

    # (M, *L) fp32 flow coordinates, or int32 tokens; read through `at`
    states: Tensor
    prompt: Tensor  # (M,) int64, row of cond that each state belongs to
    state_sigma: Tensor  # (M,) fp64, sigma of each state
    src: Tensor  # (N,) int64, row of states where the transition starts
    dst: Tensor  # (N,) int64, row of states where it ends
    parent: Tensor  # (N,) int64, previous stored transition on the path, or -1
    edge: Tensor  # (N,) int64, edge of the plan
    sigma: Tensor  # (N,) fp64, sigma at src
    sigma_next: Tensor  # (N,) fp64, sigma at dst
    eta: Tensor  # (N,) fp64, noise level
    noise_key: Tensor  # (N,) int64, key of the noise that was drawn
    # (N,) fp32 log-density under the behaviour policy, or (N, places) with plan.reduction="none";
    # None: nothing stochastic was stored
    log_prob: Tensor | None
    trained: Tensor  # (N,) bool, the loss trains this transition
    leaf: Tensor  # (B,) int64, row of states that holds the final state
    leaf_edge: Tensor  # (B,) int64, last stored transition on the leaf's path, or -1
    # (B,) int64, hash of (prompt key, copy, path): names a sample wherever it lies in the batch
    leaf_key: Tensor
    group: Tensor  # (B,) int64, row of cond: leaves of one prompt are one group
    tree: Tensor  # (B,) int64, number of the root (copy, root) that the leaf grew from
    plan: Plan  # the forest that every copy of a prompt grew
    nfe: int  # number of rows that went through the network (x branches of guidance not counted)
    cond: Any = None  # P prompts, encoded by the policy (Cond); None without a policy
    guidance: float | str = "none"  # guidance with which states were sampled, see Policy.velocity
    # (B,) int64, key of each leaf's initial noise; None: it came from files
    start_key: Tensor | None = None
    # numbers (B,) fp32 that media and pairs of a user's own state: "label", the share of raters who
    # prefer a file of a pair, and "weight", that of its pair
    stated: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        return brief(
            self,
            f"{len(self.leaf)} samples",
            f"states {tuple(self.states.shape)} on {self.states.device}",
            f"{len(self.src)} transitions",
            f"guidance={self.guidance!r}",
            f"nfe={self.nfe}",
        )

    def at(self, rows: Tensor) -> Tensor:
        """Return the states (n, *L) of these rows (n,), on the device of the rows: with
        batch.states=host the states are kept in host memory."""
        return self.states[rows.to(self.states.device)].to(rows.device)

    @property
    def leaves(self) -> Tensor:
        """(B, *L) final states, on the device where states are kept; in a policy's rollout they are
        the data at sigma 0 that `decode` shows."""
        return self.states[self.leaf.to(self.states.device)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaContext:
    """Optional columns a reward may declare in `needs`; absent ones are None."""

    # B records: facts that the prompts' source gives about each
    meta: list[dict[str, Any]] | None = None
    group: Tensor | None = None  # (B,) group number of each sample
    source: Tensor | None = None  # (B, 3, H, W) images that the samples edit or animate
    actions: Tensor | None = None  # (B, ...) actions in each clip of a world model
    reference: Tensor | None = None  # (B, 3, H, W) or (B, F, 3, H, W) media to compare with


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Scores of B samples: each part as the reward gave it, and their weighted sum."""

    raw: dict[str, Tensor]  # name -> (B,) fp32 scores
    weights: dict[str, float]  # weight of each reward in the total, at this iteration
    total: Tensor  # (B,) fp32 weighted sum, NaN where invalid
    valid: Tensor  # (B,) bool, every reward gave a score
    # name -> (B,) fp32 scores of rewards that depend on others: weights multiply these, not `raw`
    counted: dict[str, Tensor] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # first message of each failed chunk or sample
    # reason -> samples without a score, see rewards/core/failures.py; rewards of weight 0 apart
    kinds: dict[str, int] = field(default_factory=dict)
    # (B, d) fp32 features of the media, NaN where there are none; None: diversity.features not set
    features: Tensor | None = None
    # detector -> (B,) or (B, D) fp32 reading of watch.detectors; NaN where a pixel is not finite
    seen: dict[str, Tensor] = field(default_factory=dict)
    # name -> (B,) bool, samples for which a reward with domains is asked; the others have no score
    asked: dict[str, Tensor] = field(default_factory=dict)
    # (B,) the domain of each sample; None: no reward states domains, and all are alike
    domain: list[str] | None = None

    def __repr__(self) -> str:
        failed = (f"{count} without a score: {kind}" for kind, count in self.kinds.items())
        return brief(self, weighted(self.weights), f"{len(self.total)} samples", *failed)

    @property
    def terms(self) -> dict[str, Tensor]:
        """Return the scores that weights multiply, name -> (B,) fp32."""
        return self.raw | self.counted

    @property
    def unscored(self) -> Tensor:
        """(B,) bool: a reward that is asked for the sample gave no score, be its weight 0."""
        failed = [
            value.isnan() & self.asked[name] if name in self.asked else value.isnan()
            for name, value in self.raw.items()
        ]
        return torch.stack(failed).any(0)

    def by_domain(self) -> dict[str, Tensor]:
        """Each domain, in the order of its name -> its samples, (B,) bool; {}: all are alike."""
        names, device = self.domain or [], self.total.device
        return {
            one: torch.tensor([name == one for name in names], device=device)
            for one in sorted(set(names))
        }

    @property
    def within(self) -> Tensor | None:
        """(B,) int64 number of the domain whose statistics each sample enters; None: all are
        alike."""
        if self.domain is None:
            return None
        place = {name: i for i, name in enumerate(sorted(set(self.domain)))}
        return torch.tensor([place[name] for name in self.domain], device=self.total.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """How much each sample, or each step of it, is worth to the update."""

    leaf: Tensor  # (B,) fp32 advantage of each sample
    # (N,) fp32 advantage of each transition, for methods that train these
    transition: Tensor | None = None
    # (B,) fp32 factor of the KL of each sample, 0 or 1; None: that of all samples counts
    kl_gate: Tensor | None = None


LARGEST = "_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Sums over the rows given; the caller divides them by the weight of the update."""

    loss: Tensor  # () sum that the optimizer minimises
    # name -> () detached sum; where the name ends in LARGEST, the largest value of a row
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Columns:
    """Named tensors of equal length n: the rows that one optimizer step trains. Index it to take a
    micro-batch."""

    data: dict[str, Tensor]  # name -> (n, ...), each a column
    # name -> copy on the CPU of a column that the host reads, so that it waits for no device
    near: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {k: v.shape[0] for k, v in self.data.items()}
        assert len(set(lengths.values())) <= 1, f"columns differ in length: {lengths}"

    def __len__(self) -> int:
        return next(iter(self.data.values())).shape[0] if self.data else 0

    def __getitem__(self, rows: Tensor) -> Columns:
        """Return the rows (m,) int64; with columns near by, `rows` are on the CPU."""
        near = {k: v[rows] for k, v in self.near.items()}
        if near:
            rows = rows.to(next(iter(self.data.values())).device, non_blocking=True)
        return Columns({k: v[rows] for k, v in self.data.items()}, near)

    def brought_near(self) -> Columns:
        """Copy to the CPU what the host reads: places, keys and noise levels (int64 and fp64)."""
        read = {k: v for k, v in self.data.items() if v.dtype in (torch.int64, torch.float64)}
        return Columns(self.data, {k: v.cpu() for k, v in read.items()})

    def host(self, name: str) -> Tensor:
        """Return a column on the CPU: the copy that is near by, or one that is waited for."""
        return self.near[name] if name in self.near else getattr(self, name).cpu()

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.data[name]
        except KeyError as error:
            raise AttributeError(f"no column {name!r}; there are {sorted(self.data)}") from error
