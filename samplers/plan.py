"""Constructors of Plan: which edges one copy of a prompt walks, which are SDE, which are trained.

full, ode, window, unmask: one path. branch, tree, fan, granular, dense: several leaves share
prefixes. compress: a coarser ODE tail (MixGRPO-Flash). The last edge of every plan of flows is
deterministic: there std -> 0 and a log-prob overflows; only noise that a policy learned does not
vanish there (full(last=True)). All take sigmas (T+1,) descending; step i goes from sigmas[i] to
sigmas[i+1]. eta = 0 gives an all-ODE plan. `init` says which roots share x_T: "sample" none,
"group" those of one prompt, "batch" all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.samplers import flow_sde
from flowrl.samplers import sde as sdes
from flowrl.samplers.common.checks import (
    check_counts,
    check_noise,
    check_sigmas,
    steps_before_last,
)
from flowrl.samplers.sigmas import shift as shift_sigmas
from flowrl.types import ODE, SDE, Plan, Solver

Init = Literal["sample", "group", "batch"]


class PlanBuilder:
    """A plan under construction: add edges in topological order, then build."""

    def __init__(self, sigmas: Tensor, eta: float, sde_name: str, init: Init):
        self.sigmas = torch.as_tensor(sigmas, dtype=torch.float64).cpu()
        check_sigmas(self.sigmas)
        check_noise(eta, sde_name)
        if init not in ("sample", "group", "batch"):
            raise ValueError(f'init="{init}" is unknown; choose "sample", "group" or "batch"')
        self.eta, self.sde, self.init = float(eta), sde_name, init
        # a row per edge: parent, first and last place in sigmas, is it noisy
        self.rows: list[tuple[int, int, int, bool]] = []

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def add(self, parent: int, step: int, noisy: bool = False, *, end: int | None = None) -> int:
        """Append the edge sigmas[step] -> sigmas[end] below edge `parent` -> its index.

        parent -1: the root. end: by default the next step. noisy: SDE, trained.
        """
        self.rows.append((parent, step, step + 1 if end is None else end, noisy and self.eta > 0))
        return len(self.rows) - 1

    def chain(
        self, parent: int, steps: Iterable[int], noisy: Callable[[int], bool] = lambda step: False
    ) -> int:
        """Append the edges of consecutive `steps` below `parent` -> index of the last."""
        for step in steps:
            parent = self.add(parent, step, noisy(step))
        return parent

    def grow(self, children: Callable[[int], int], noisy: Callable[[int], bool]) -> None:
        """Append all edges of a tree in which every node has children(step) children."""
        front = [-1]
        for i in range(self.steps):
            front = [self.add(node, i, noisy(i)) for node in front for _ in range(children(i))]

    @property
    def sigma_cap(self) -> float | None:
        """Return the value in place of a first sigma of 1, for steps that divide by 1 - sigma."""
        at_one = float(self.sigmas[0]) > flow_sde.AT_ONE
        capped = sdes.find(self.sde).capped
        return float(self.sigmas[1]) if capped and self.steps > 1 and at_one else None

    def build(self, **options: Any) -> Plan:
        """Return the plan; options: its further fields."""
        columns = (torch.tensor(column) for column in zip(*self.rows, strict=True))
        parent, start, end, noisy = columns
        return Plan(
            parent=parent,
            root=torch.zeros_like(parent),
            sigma=self.sigmas[start],
            sigma_next=self.sigmas[end],
            kind=torch.where(noisy, SDE, ODE),
            eta=noisy.double() * self.eta,
            trained=noisy,
            sde=self.sde,
            init=self.init,
            sigma_cap=self.sigma_cap,
            **options,
        )


def full(
    sigmas: Tensor,
    *,
    eta: float,
    sde: str = "flow_sde",
    init: Init = "sample",
    last: bool = False,
) -> Plan:
    """Flow-GRPO, DanceGRPO: every step but the last is SDE and trained. NFE T, trained T-1.

    last: the last step is SDE, too, for noise that does not vanish there (ReinFlow).
    """
    edges = PlanBuilder(sigmas, eta, sde, init)
    edges.chain(-1, range(edges.steps), noisy=lambda i: last or i < edges.steps - 1)
    return edges.build()


def ode(
    sigmas: Tensor,
    *,
    solver: Solver = "dpm2",
    init: Init = "sample",
    kept: int | None = None,
) -> Plan:
    """Deterministic sampling (DiffusionNFT's rollout, evaluation): no edge is noisy. NFE T.

    kept: a step whose two ends are stored for the loss, like those of trained steps.
    """
    edges = PlanBuilder(sigmas, 0.0, "flow_sde", init)
    edges.chain(-1, range(edges.steps))
    plan = edges.build(solver=solver)
    if kept is None:
        return plan
    return dataclasses.replace(plan, trained=torch.arange(edges.steps) == kept)


def neighbours(sigmas: Tensor, *, spread: float) -> Plan:
    """Neighbor GRPO: Euler steps without noise, all stored for the loss; the samples of a prompt
    start at sqrt(1 - spread^2) e + spread e_i, where they share e."""
    edges = PlanBuilder(sigmas, 0.0, "flow_sde", "sample")
    edges.chain(-1, range(edges.steps))
    plan = edges.build(solver="euler", spread=spread)
    return dataclasses.replace(plan, trained=torch.ones(edges.steps, dtype=torch.bool))


def unmask(
    sigmas: Tensor,
    *,
    eta: float = 1.0,
    sde: str = "random_order",
    init: Init = "sample",
    reduction: Literal["mean", "none"] = "mean",
) -> Plan:
    """Masked generators: every step draws tokens, the last too, and all are trained. NFE T.

    sigmas: shares of masked tokens, see `sigmas.unmasking`. eta: temperature of the tokens
    (random_order), or of the first step's choice by confidence, from which it falls evenly to 0 at
    the last one, as in aMUSEd (confidence). reduction: "none" keeps a log-prob for each token.
    """
    edges = PlanBuilder(sigmas, eta, sde, init)
    edges.chain(-1, range(edges.steps))
    plan = edges.build(reduction=reduction)
    level = torch.full_like(plan.eta, eta)
    if sde == "confidence":
        level = torch.linspace(eta, 0, edges.steps, dtype=torch.float64)
    elif eta <= 0:
        raise ValueError(f"eta={eta} is the temperature of tokens, and must be above 0; 1 is usual")
    every = torch.ones(edges.steps, dtype=torch.bool)
    return dataclasses.replace(plan, kind=every * SDE, eta=level, trained=every)


def window(
    sigmas: Tensor,
    *,
    eta: float,
    start: int,
    size: int,
    sde: str = "flow_sde",
    init: Init = "sample",
) -> Plan:
    """MixGRPO (arXiv:2507.21802), Flow-GRPO-Fast: `size` SDE steps from `start`, else ODE."""
    edges = PlanBuilder(sigmas, eta, sde, init)
    check_counts(size=size)
    inside = steps_before_last(
        f"window start={start}, size={size}: steps", range(start, start + size), edges.steps - 1
    )
    edges.chain(-1, range(edges.steps), noisy=lambda i: i in inside)
    return edges.build()


def branch(
    sigmas: Tensor,
    *,
    splits: Iterable[int],
    children: int,
    eta: float,
    correlation: float | None = None,
    noisy: Iterable[int] | None = None,
    sde: str = "dance_sde",
    init: Init = "sample",
) -> Plan:
    """BranchGRPO (arXiv:2509.06040): at each of `splits` every node has `children` children.

    noisy: SDE steps beside the splits (BranchGRPO-Mix: a window, the rest ODE); None: every step
    but the last. correlation: s of xi_b = (xi_0 + s eta_b) / sqrt(1 + s^2), which keeps each child
    N(0, I); None: independent. Leaves children^len(splits).
    """
    edges = PlanBuilder(sigmas, eta, sde, init)
    last = edges.steps - 1
    check_counts(children=children)
    splits = steps_before_last("splits", splits, last)
    others = range(last) if noisy is None else steps_before_last("noisy", noisy, last)
    noisy = {*splits, *others}
    check_correlation(correlation)
    edges.grow(lambda i: children if i in splits else 1, noisy=lambda i: i in noisy)
    return edges.build(correlation=correlation)


def check_correlation(s: float | None) -> None:
    """ValueError unless s is a share of noise that siblings can have of their own."""
    if s is not None and s < 0:
        raise ValueError(
            f"correlation={s} must be >= 0 (0: identical siblings; large: independent) or None"
        )


def tree(
    sigmas: Tensor,
    *,
    start: int,
    depth: int,
    children: int,
    eta: float,
    sde: str = "flow_sde",
    init: Init = "sample",
) -> Plan:
    """TreeGRPO (arXiv:2512.08153): `depth` SDE steps from `start`, `children` children a node.

    ODE before and after. Leaves children^depth.
    """
    edges = PlanBuilder(sigmas, eta, sde, init)
    check_counts(depth=depth, children=children)
    inside = steps_before_last(
        f"tree start={start}, depth={depth}: steps", range(start, start + depth), edges.steps - 1
    )
    edges.grow(lambda i: children if i in inside else 1, noisy=lambda i: i in inside)
    return edges.build()


def fan(
    sigmas: Tensor,
    *,
    steps: Iterable[int],
    children: int,
    eta: float,
    sde: str = "flow_sde",
    init: Init = "sample",
) -> Plan:
    """TempFlow-GRPO (arXiv:2508.04324): one-step SDE branches off an ODE trunk, then ODE.

    `children` branches at each of `steps`, the last of which ends the trunk. Leaves children *
    len(steps); NFE max(steps) + 1 + children * sum(T - 1 - k for k in steps).
    """
    return granular(
        sigmas, steps=steps, children=children, strides=(1,), eta=eta, sde=sde, init=init
    )


def dense(
    sigmas: Tensor,
    *,
    etas: Sequence[float],
    sde: str = "flow_sde",
    init: Init = "sample",
) -> Plan:
    """DenseGRPO (arXiv:2601.20218): full, and each of its states finished by ODE, too.

    etas: noise level of each step but the last. The first leaf ends the chain itself, and is the
    completion of its last noisy step; the others complete x_T and the states after the steps before
    that, in this order. Leaves T; NFE T (T + 1) / 2, since a completion shares its first call with
    the chain; trained T - 1.
    """
    edges = PlanBuilder(sigmas, max(etas, default=0.0), sde, init)
    last = edges.steps - 1
    if len(etas) != last:
        raise ValueError(
            f"etas has {len(etas)} noise levels, and {edges.steps} steps have {last} noisy ones;"
            " give one for each step but the last"
        )
    edges.chain(-1, range(edges.steps), noisy=lambda i: i < last)
    for k in range(last):  # edge k - 1 leads to the state of step k
        finish(edges, k - 1, k, 1)
    plan = edges.build()
    eta = torch.zeros_like(plan.eta)
    eta[:last] = torch.tensor(list(etas), dtype=torch.float64)
    return dataclasses.replace(plan, eta=eta)


def granular(
    sigmas: Tensor,
    *,
    steps: Iterable[int],
    children: int,
    strides: Iterable[int] = (1, 2, 3),
    eta: float,
    sde: str = "flow_sde",
    init: Init = "sample",
) -> Plan:
    """Granular-GRPO (G2RPO, arXiv:2510.01982): fan, each branch finished once per stride.

    From the end of a branch at step k, stride L walks the steps k+1, k+1+L, k+1+2L, ... and last T,
    by ODE. The leaves of a branch come in the order of `strides`, len(steps) * children *
    len(strides) in all. The first call below a branch serves all its strides, so NFE is max(steps)
    + 1 + children * sum over k of (1 + sum over L of (ceil((T-1-k) / L) - 1)). Strides that reach T
    in one edge are one node. The trunk ends at the last of `steps`.
    """
    edges = PlanBuilder(sigmas, eta, sde, init)
    check_counts(children=children)
    steps, strides = steps_before_last("steps", steps, edges.steps - 1), list(strides)
    check_strides(strides)
    trunk = -1  # each branch leaves the trunk before the trunk's own step
    for k in range(steps[-1] + 1):
        for _ in range(children if k in steps else 0):
            branch = edges.add(trunk, k, noisy=True)
            for stride in strides:
                finish(edges, branch, k + 1, stride)
        if k < steps[-1]:
            trunk = edges.add(trunk, k)
    return edges.build()


def check_strides(strides: list[int]) -> None:
    """ValueError unless strides are different numbers of steps."""
    if not strides or min(strides) < 1 or len(set(strides)) < len(strides):
        raise ValueError(
            f"strides={strides} must be one or more different numbers >= 1; 1 keeps every step"
        )


def finish(edges: PlanBuilder, branch: int, step: int, stride: int) -> None:
    """Append ODE edges below `branch` from `step` to the end, `stride` steps at a time."""
    at, end = branch, edges.steps
    for a, b in itertools.pairwise([*range(step, end, stride), end]):
        at = edges.add(at, a, end=b)


def compress(
    plan: Plan,
    *,
    tail: float,
    kappa: float | None = None,
    count: Literal["paper", "code"] = "paper",
    solver: Solver = "dpm2",
) -> Plan:
    """MixGRPO-Flash (arXiv:2507.21802): fewer ODE steps after the last SDE edge of each path.

    R steps become about tail * R. count: "paper" ceil(R tail), "code" int((R + 1) tail) - 1, at
    least one. kappa: shift of the schedule, before which the new grid is uniform; None: uniform in
    steps, with sigma interpolated linearly between the old ones. The tail's edges use `solver`,
    earlier ODE edges stay Euler.
    """
    if not 0 < tail <= 1:
        raise ValueError(f"tail={tail} must be in (0, 1]; 1 keeps every step")
    if not bool((plan.kind == SDE).any()):
        raise ValueError(
            "compress needs a plan with SDE steps: what follows the last one is compressed"
        )
    rows, dpm_from = with_new_tails(plan, partial(coarser, tail=tail, kappa=kappa, count=count))
    parent, old = torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])
    sigma, sigma_next = torch.tensor([r[2:] for r in rows], dtype=torch.float64).T
    columns = {name: getattr(plan, name)[old] for name in ("root", "kind", "eta", "trained")}
    columns |= {"parent": parent, "sigma": sigma, "sigma_next": sigma_next}
    return dataclasses.replace(plan, **columns, solver=solver, dpm_from=dpm_from)


def with_new_tails(
    plan: Plan, new_grid: Callable[[list[float]], list[float]]
) -> tuple[list[tuple[int, int, float, float]], float]:
    """Return edges of a plan whose ODE tails walk new_grid(their sigmas), and the highest tail's
    sigma. An edge is (its parent, the old edge whose other columns it takes, sigma, sigma_next).
    """
    noisy, children = noise_at_or_below(plan), children_of(plan)
    rows: list[tuple[int, int, float, float]] = []
    new: dict[int, int] = {}  # old edge -> its place among the rows
    highest = 0.0
    for e in torch.nonzero(noisy).flatten().tolist():
        new[e] = len(rows)
        above = new.get(int(plan.parent[e]), -1)
        rows.append((above, e, float(plan.sigma[e]), float(plan.sigma_next[e])))
        for head in [child for child in children[e] if not noisy[child]]:
            grid, at = new_grid(sigmas_down(plan, head, children)), new[e]
            highest = max(highest, grid[0])
            for sigma, sigma_next in itertools.pairwise(grid):
                rows.append((at, head, sigma, sigma_next))
                at = len(rows) - 1
    return rows, highest


def noise_at_or_below(plan: Plan) -> Tensor:
    """Mark edges that are SDE or lead to one: (E,) bool."""
    noisy = plan.kind == SDE
    for e in reversed(range(plan.edges)):
        if noisy[e] and plan.parent[e] >= 0:
            noisy[plan.parent[e]] = True
    return noisy


def children_of(plan: Plan) -> list[list[int]]:
    """List the edges right below each edge."""
    children: list[list[int]] = [[] for _ in range(plan.edges)]
    for e, p in enumerate(plan.parent.tolist()):
        if p >= 0:
            children[p].append(e)
    return children


def sigmas_down(plan: Plan, head: int, children: list[list[int]]) -> list[float]:
    """List the sigmas of the path without forks that begins with edge `head`."""
    edges = [head]
    while children[edges[-1]]:
        edges.append(children[edges[-1]][0])
    return [float(plan.sigma[head]), *plan.sigma_next[edges].tolist()]


def coarser(grid: list[float], *, tail: float, kappa: float | None, count: str) -> list[float]:
    """Return a grid with the same ends and fewer steps (see compress)."""
    old = len(grid) - 1
    wanted = math.ceil(old * tail - 1e-9) if count == "paper" else int((old + 1) * tail + 1e-9) - 1
    steps = max(wanted, 1)
    if steps == old:
        return grid
    s = torch.tensor(grid, dtype=torch.float64)
    if kappa is not None:
        first, last = (s[[0, -1]] / (kappa - (kappa - 1) * s[[0, -1]])).tolist()
        out = shift_sigmas(torch.linspace(first, last, steps + 1, dtype=torch.float64), kappa)
    else:
        place = torch.linspace(0, old, steps + 1, dtype=torch.float64)
        low = place.floor().long().clamp(max=old - 1)
        out = torch.lerp(s[low], s[low + 1], place - low)
    return [grid[0], *out[1:-1].tolist(), grid[-1]]


def nfe(plan: Plan, copies: int = 1) -> int:
    """Count the distinct states that the network sees for `copies` copies of the plan on one
    prompt.

    Multiply by the branches of guidance to get network rows. The count reads the table: copies or
    roots that share x_T also share every state that ODE edges alone reach from it.
    """
    shares = plan.init != "sample"
    nodes: dict[tuple, int] = {}  # way that leads to a node -> number of the node
    common: dict[int, bool] = {}  # number of a node -> do all copies share it?
    after: list[int] = []  # number of the node that each edge leads to
    sources = set()
    leaf_edges = set(plan.leaf_edges.tolist())
    for e, p in enumerate(plan.parent.tolist()):
        # the node where the edge starts
        root = -1 if shares else int(plan.root[e])
        source = after[p] if p >= 0 else nodes.setdefault(("x_T", root), len(nodes))
        common.setdefault(source, shares)
        sources.add(source)
        # the node where it ends; equal ODE edges from one node end in one node
        deterministic = int(plan.kind[e]) == ODE
        step = (float(plan.sigma[e]), float(plan.sigma_next[e]), e in leaf_edges)
        way = (source, *step) if deterministic else (source, e)
        after.append(nodes.setdefault(way, len(nodes)))
        common.setdefault(after[e], deterministic and common[source])
    return sum(1 if common[n] else copies for n in sources)
