"""Constructors of Plan: which edges one copy of a prompt walks, which are stochastic, which are
trained.

full, ode, window: one path. branch, tree, fan, granular: several leaves share prefixes. compress: a
coarser ODE tail (MixGRPO-Flash). The last edge of every plan is deterministic: there std -> 0 and a
log-prob overflows. All take sigmas (T+1,) descending; step i goes from sigmas[i] to sigmas[i+1].
eta = 0 gives an all-ODE plan. `init` says which roots share x_T: "sample" none, "group" those of
one prompt, "batch" all.

Departures: the trunk of fan and granular ends at the last of `steps` (TempFlow-GRPO and G2RPO
sample it to the end). granular's sub-grids begin at the end of the branch (G2RPO's code goes one
fine step first, to k + 2), and its strides share the first network call. Windows drawn at random
are functions of (seed, iteration), equal on all processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from flowrl.samplers import flow_sde, keys, sde
from flowrl.samplers.sigmas import shift as shift_sigmas
from flowrl.types import ODE, SDE, Plan

Init = Literal["sample", "group", "batch"]


class _Edges:
    """A plan under construction: add edges in topological order, then build."""

    def __init__(self, sigmas: Tensor, eta: float, sde_name: str, init: Init):
        self.sigmas = torch.as_tensor(sigmas, dtype=torch.float64).cpu()
        s = self.sigmas
        if s.ndim != 1 or len(s) < 2 or not bool((s.diff() < 0).all()) or s[0] > 1 or s[-1] < 0:
            raise ValueError(
                "sigmas must fall strictly from at most 1 to at least 0 and hold two or more"
                f" values; got {s.tolist()}"
            )
        if init not in ("sample", "group", "batch"):
            raise ValueError(f'init="{init}" is unknown; choose "sample", "group" or "batch"')
        if not 0 <= eta < math.inf:
            raise ValueError(f"eta={eta} must be a finite number >= 0")
        sde.module(sde_name)
        if sde_name in ("cps", "ddim") and eta > 1:
            raise ValueError(
                f"eta={eta} is too much for {sde_name}: it is the share of noise that is fresh, in"
                " 0..1"
            )
        self.eta, self.sde, self.init, self.rows = float(eta), sde_name, init, []

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def add(self, parent: int, step: int, noisy: bool = False, *, end: int | None = None) -> int:
        """Append the edge sigmas[step] -> sigmas[end] (the next) below edge `parent` (-1: the
        root); noisy: SDE, trained. -> its index."""
        self.rows.append((parent, step, step + 1 if end is None else end, noisy and self.eta > 0))
        return len(self.rows) - 1

    def chain(
        self, parent: int, steps: Iterable[int], noisy: Callable[[int], bool] = lambda step: False
    ) -> int:
        for step in steps:
            parent = self.add(parent, step, noisy(step))
        return parent

    def build(self, **options) -> Plan:
        parent, start, end, noisy = (
            torch.tensor(column) for column in zip(*self.rows, strict=True)
        )
        capped = (
            self.sde == "flow_sde" and self.steps > 1 and float(self.sigmas[0]) > flow_sde.AT_ONE
        )
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
            **{"sigma_cap": float(self.sigmas[1]) if capped else None, **options},
        )


def _steps_before_last(name: str, steps: Iterable[int], last: int) -> list[int]:
    """Sorted distinct step numbers in 0..last-1; step `last` must stay ODE."""
    out = sorted(set(steps))
    if not out or out[0] < 0 or out[-1] >= last:
        raise ValueError(
            f"{name}={out} must be one or more steps in 0..{last - 1}: step {last} is the last of"
            " the schedule and stays ODE"
        )
    return out


def _at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def full(sigmas: Tensor, *, eta: float, sde: str = "flow_sde", init: Init = "sample") -> Plan:
    """Flow-GRPO, DanceGRPO: every step but the last is SDE and trained. NFE T, trained T-1."""
    edges = _Edges(sigmas, eta, sde, init)
    edges.chain(-1, range(edges.steps), noisy=lambda i: i < edges.steps - 1)
    return edges.build()


def ode(
    sigmas: Tensor, *, solver: Literal["euler", "dpm2"] = "dpm2", init: Init = "sample"
) -> Plan:
    """Deterministic sampling (DiffusionNFT's rollout, evaluation): nothing is trained, log-probs do
    not exist. NFE T."""
    edges = _Edges(sigmas, 0.0, "flow_sde", init)
    edges.chain(-1, range(edges.steps))
    return edges.build(solver=solver)


def window(
    sigmas: Tensor,
    *,
    eta: float,
    start: int,
    size: int,
    sde: str = "flow_sde",
    init: Init = "sample",
) -> Plan:
    """MixGRPO (arXiv:2507.21802), Flow-GRPO-Fast: steps start..start+size-1 are SDE and trained,
    the others ODE."""
    edges = _Edges(sigmas, eta, sde, init)
    _at_least_one(size=size)
    inside = _steps_before_last(
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
    """BranchGRPO (arXiv:2509.06040): SDE steps, and at each of `splits` every node has `children`
    children. Leaves children^len(splits).

    correlation: s of xi_b = (xi_0 + s eta_b) / sqrt(1 + s^2), which keeps each child N(0, I); None:
    independent.
    noisy: SDE steps beside the splits (BranchGRPO-Mix: a window, the rest ODE); None: every step
    but the last.
    """
    edges = _Edges(sigmas, eta, sde, init)
    last = edges.steps - 1
    _at_least_one(children=children)
    splits = _steps_before_last("splits", splits, last)
    noisy = set(splits) | set(
        range(last) if noisy is None else _steps_before_last("noisy", noisy, last)
    )
    if correlation is not None and correlation < 0:
        raise ValueError(
            f"correlation={correlation} must be >= 0 (0: identical siblings; large: independent) or"
            " None"
        )
    front = [-1]
    for i in range(edges.steps):
        front = [
            edges.add(node, i, i in noisy)
            for node in front
            for _ in range(children if i in splits else 1)
        ]
    return edges.build(correlation=correlation)


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
    """TreeGRPO: ODE to step `start`, then `depth` SDE steps with `children` children a node, then
    ODE. Leaves children^depth."""
    edges = _Edges(sigmas, eta, sde, init)
    _at_least_one(depth=depth, children=children)
    inside = _steps_before_last(
        f"tree start={start}, depth={depth}: steps", range(start, start + depth), edges.steps - 1
    )
    front = [-1]
    for i in range(edges.steps):
        front = [
            edges.add(node, i, i in inside)
            for node in front
            for _ in range(children if i in inside else 1)
        ]
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
    """TempFlow-GRPO (arXiv:2508.04324): an ODE trunk; at each of `steps`, `children` one-step SDE
    branches that go on as ODE.

    The trunk ends at the last of `steps`. Leaves children * len(steps); NFE max(steps) + 1 +
    children * sum(T - 1 - k for k in steps).
    """
    return granular(
        sigmas, steps=steps, children=children, strides=(1,), eta=eta, sde=sde, init=init
    )


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
    """Granular-GRPO (G2RPO, arXiv:2510.01982): fan, each branch of which is finished once per
    stride: leaves at several step sizes.

    From the end of a branch at step k, stride L walks the steps k+1, k+1+L, k+1+2L, ... and last T,
    by ODE. The leaves of a branch come in the order of `strides`, len(steps) * children *
    len(strides) in all. The first call below a branch serves all its strides, so NFE is max(steps)
    + 1 + children * sum over k of (1 + sum over L of (ceil((T-1-k) / L) - 1)). Strides that reach T
    in one edge are one node.
    """
    edges = _Edges(sigmas, eta, sde, init)
    _at_least_one(children=children)
    steps, strides, end = (
        _steps_before_last("steps", steps, edges.steps - 1),
        list(strides),
        edges.steps,
    )
    if not strides or min(strides) < 1 or len(set(strides)) < len(strides):
        raise ValueError(
            f"strides={strides} must be one or more different numbers >= 1; 1 keeps every step"
        )
    trunk = -1
    for k in range(steps[-1] + 1):
        for _ in range(children if k in steps else 0):
            branch = edges.add(trunk, k, noisy=True)
            for stride in strides:
                at = branch
                for a, b in itertools.pairwise([*range(k + 1, end, stride), end]):
                    at = edges.add(at, a, end=b)
        if k < steps[-1]:
            trunk = edges.add(trunk, k)
    return edges.build()


def compress(
    plan: Plan,
    *,
    tail: float,
    kappa: float | None = None,
    count: Literal["paper", "code"] = "paper",
    solver: Literal["euler", "dpm2"] = "dpm2",
) -> Plan:
    """MixGRPO-Flash (arXiv:2507.21802): after the last SDE edge of each path the R remaining ODE
    steps become about tail * R.

    count: "paper" ceil(R tail) steps, "code" int((R + 1) tail) - 1 as in the reference code; at
    least one here (the code may stop early). kappa: shift of the schedule; the new grid is uniform
    before it, as in the paper. None: uniform in steps, sigma interpolated
    linearly between the old ones. The tail's edges use `solver`, earlier ODE edges stay Euler.
    """
    if not 0 < tail <= 1:
        raise ValueError(f"tail={tail} must be in (0, 1]; 1 keeps every step")
    kids: list[list[int]] = [[] for _ in range(plan.edges)]
    for e, p in enumerate(plan.parent.tolist()):
        if p >= 0:
            kids[p].append(e)
    if not bool((plan.kind == SDE).any()):
        raise ValueError(
            "compress needs a plan with SDE steps: what follows the last one is compressed"
        )
    noisy_below = plan.kind == SDE
    for e in reversed(range(plan.edges)):
        if noisy_below[e] and plan.parent[e] >= 0:
            noisy_below[plan.parent[e]] = True
    rows: list[
        tuple[int, int, float, float]
    ] = []  # new parent, old edge whose other columns apply, sigma, sigma_next
    new = [-1] * plan.edges
    highest = 0.0
    for e in range(plan.edges):
        if not noisy_below[e]:
            continue
        p = int(plan.parent[e])
        new[e] = len(rows)
        rows.append((new[p] if p >= 0 else -1, e, float(plan.sigma[e]), float(plan.sigma_next[e])))
        for head in [k for k in kids[e] if not noisy_below[k]]:
            chain = [head]
            while kids[chain[-1]]:
                chain.append(kids[chain[-1]][0])
            grid = _coarser(
                [float(plan.sigma[head])] + plan.sigma_next[chain].tolist(), tail, kappa, count
            )
            highest, at = max(highest, grid[0]), new[e]
            for sigma, sigma_next in zip(grid[:-1], grid[1:], strict=True):
                rows.append((at, head, sigma, sigma_next))
                at = len(rows) - 1
    parent, old = torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])
    sigma, sigma_next = torch.tensor([r[2:] for r in rows], dtype=torch.float64).T
    columns = {name: getattr(plan, name)[old] for name in ("root", "kind", "eta", "trained")}
    return dataclasses.replace(
        plan,
        parent=parent,
        sigma=sigma,
        sigma_next=sigma_next,
        **columns,
        solver=solver,
        dpm_from=highest,
    )


def _coarser(grid: list[float], tail: float, kappa: float | None, count: str) -> list[float]:
    """A grid with the same ends and fewer steps."""
    old = len(grid) - 1
    steps = max(
        math.ceil(old * tail - 1e-9) if count == "paper" else int((old + 1) * tail + 1e-9) - 1, 1
    )
    s = torch.tensor(grid, dtype=torch.float64)
    if steps == old:
        return grid
    if kappa is not None:
        first, last = (s[[0, -1]] / (kappa - (kappa - 1) * s[[0, -1]])).tolist()
        out = shift_sigmas(torch.linspace(first, last, steps + 1, dtype=torch.float64), kappa)
    else:
        place = torch.linspace(0, old, steps + 1, dtype=torch.float64)
        low = place.floor().long().clamp(max=old - 1)
        out = torch.lerp(s[low], s[low + 1], place - low)
    return [grid[0], *out[1:-1].tolist(), grid[-1]]


Schedule = Literal["progressive", "random", "geometric", "decay", "exp_decay", "frozen"]


def window_start(
    schedule: Schedule,
    iteration: int,
    *,
    steps: int,
    size: int,
    low: int = 0,
    high: int | None = None,
    every: int = 25,
    stride: int = 1,
    every_min: int = 1,
    rate: float = 0.1,
    knee: int = 13,
    seed: int = 0,
) -> int:
    """First step of the SDE window at an iteration (MixGRPO, arXiv:2507.21802, sec. 3), a pure
    function: nothing to save or resume.

    The window of `size` steps stays inside [low, high), high = steps - 1 by default (the last step
    is ODE).
    progressive: moves on by `stride` every `every` iterations and returns to `low` at the end.
    decay, exp_decay: the same, with a stay of max(every_min, int(every (1 - l/M) + every_min l/M)),
    M = steps - 2, or ceil(every exp(-rate max(l - knee, 0))), at position l. random: uniform at
    each iteration (Flow-GRPO-Fast). geometric: i-th of the n positions with probability (1-r) r^i /
    (1 - r^n), r = rate in (0, 1), small: early (TreeGRPO, arXiv:2512.08153, r = .5). frozen: always
    `low`.
    """
    high = steps - 1 if high is None else high
    if steps < 2:
        raise ValueError(
            f"a window needs at least 2 steps, of which the last stays ODE; sampler.steps={steps}"
        )
    if high > steps - 1:
        raise ValueError(
            f"a window cannot end at window.high={high} of {steps} steps: the last stays ODE;"
            f" choose at most {steps - 1}"
        )
    if not 0 <= low < high:
        raise ValueError(
            f"a window cannot start at window.low={low} and end at {high}; choose low in"
            f" 0..{high - 1}"
        )
    if not 1 <= size <= high - low:
        raise ValueError(
            f"a window of {size} steps does not fit into steps {low}..{high - 1} of {steps} (the"
            f" last stays ODE); choose size in 1..{high - low}, or a wider range"
        )
    _at_least_one(every=every, stride=stride, every_min=every_min)
    positions = range(low, high - size + 1, stride)
    if schedule == "frozen":
        return low
    if schedule in ("random", "geometric"):
        return low + _drawn(
            schedule,
            high - size - low + 1,
            rate,
            float(keys.uniform(keys.key("window", seed, iteration))),
        )
    if schedule == "progressive":
        stays = [every for _ in positions]
    elif schedule == "decay":
        end = max(steps - 2, 1)  # M of the reference code, whatever range is chosen here
        stays = [
            max(every_min, int(every * (1 - l / end) + every_min * l / end)) for l in positions
        ]
    elif schedule == "exp_decay":
        stays = [math.ceil(every * math.exp(-rate * max(l - knee, 0))) for l in positions]
    else:
        raise ValueError(
            f'window schedule "{schedule}" is unknown; choose progressive, random, geometric,'
            " decay, exp_decay or frozen"
        )
    left = iteration % sum(stays)
    for position, stay in zip(positions, stays, strict=True):
        if left < stay:
            return position
        left -= stay
    raise AssertionError("unreachable: left < sum(stays)")


def _drawn(schedule: str, n: int, rate: float, u: float) -> int:
    """Where the distribution function over 0..n-1 passes u in [0, 1)."""
    if schedule == "random":
        return int(u * n)
    if not 0 < rate < 1:
        raise ValueError(
            f"rate={rate} of a geometric window must lie between 0 and 1 (TreeGRPO: 0.5); rate=1"
            " would be schedule random"
        )
    return min(int(math.log1p(-u * (1 - rate**n)) / math.log(rate)), n - 1)  # rounding may reach n


def nfe(plan: Plan, copies: int = 1) -> int:
    """Distinct states the network sees for `copies` copies of the plan on one prompt (times the
    branches of guidance = network rows).

    Counted on the table: copies or roots that share x_T also share every state reached from it by
    ODE edges alone.
    """
    shares = plan.init != "sample"
    nodes: dict[tuple, int] = {}  # a node: (node before it, what leads here) -> number
    common: dict[int, bool] = {}  # node -> is it one for all copies
    number, sources = [], set()
    leaf_edges = set(plan.leaf_edges.tolist())
    for e in range(plan.edges):
        p = int(plan.parent[e])
        source = (
            number[p]
            if p >= 0
            else nodes.setdefault(("x_T", -1 if shares else int(plan.root[e])), len(nodes))
        )
        common.setdefault(source, shares)
        sources.add(source)
        same = int(plan.kind[e]) == ODE
        how = (
            (source, float(plan.sigma[e]), float(plan.sigma_next[e]), e in leaf_edges)
            if same
            else (source, e)
        )
        number.append(nodes.setdefault(how, len(nodes)))
        common.setdefault(number[e], same and common[source])
    return sum(1 if common[n] else copies for n in sources)
