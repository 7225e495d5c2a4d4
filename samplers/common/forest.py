"""The engine's record of a forest: the name of every node, and the states that are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.samplers.keys import digest, key
from flowrl.types import NO_DENSITY, ODE, Plan, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """n nodes at one depth, with what their children need."""

    x: Tensor  # (n, *L) fp32 states, or tokens
    row: Tensor  # (n,) row of the conditioning
    sigma: Tensor  # (n,) fp64 noise levels
    stored: Tensor  # (n,) row among the kept states, -1: not kept
    x0: Tensor | None  # (n, *L) the solver's history: the data prediction one node before
    sigma_x0: Tensor  # (n,) fp64 sigma where x0 was predicted; 1: no history

    @classmethod
    def first(cls, x: Tensor, row: Tensor, sigma: Tensor) -> Level:
        """Make the level of the roots: nothing is kept of them yet, and there is no history."""
        stored, none = torch.full((len(row),), -1), torch.ones_like(sigma)
        return cls(x=x, row=row, sigma=sigma, stored=stored, x0=None, sigma_x0=none)

    def take(self, rows: Tensor) -> Level:
        """Return the nodes at `rows`, in that order; if these are all nodes in order, return the
        level itself."""
        if is_all(rows, len(self.row)):
            return self
        there = rows.to(self.x.device, non_blocking=True)
        return Level(
            x=self.x[there],
            row=self.row[rows],
            sigma=self.sigma[rows],
            stored=self.stored[rows],
            x0=None if self.x0 is None else self.x0[there],
            sigma_x0=self.sigma_x0[rows],
        )


class NodeKeys:
    """64-bit names of the nodes of R copies of a plan.

    path (R, E) names the noise of an edge, parent_path (R, E) that of the node it leaves, node
    (R, E) the state it leads to: nodes are one where equal x_T and equal ODE edges lead to them.
    noise_root, root (R, roots): the noise of x_T, and the state.
    """

    def __init__(
        self, plan: Plan, rows: Tensor, prompt_keys: Tensor, copies: Tensor, shared_key: int
    ) -> None:
        path_root = key(prompt_keys[:, None], copies[:, None], torch.arange(plan.roots))
        if plan.init == "sample":
            self.noise_root = key("x_T", path_root)
        else:
            shared = torch.full_like(prompt_keys, shared_key)
            base = prompt_keys if plan.init == "group" else shared
            self.noise_root = key("x_T", base[:, None]).expand(-1, plan.roots)
        # the part of x_T that the roots of one prompt share, with plan.spread
        self.noise_shared = key("x_T", prompt_keys[:, None]).expand(-1, plan.roots)
        self.root = key(self.noise_root, rows[:, None], prompt_keys[:, None])

        way, flow, anchor = spell(plan)
        from_root = path_root[:, plan.root]
        self.path = key(from_root, way)
        self.parent_path = torch.where(plan.parent < 0, from_root, self.path[:, plan.parent])
        after_noise = key("sde", rows[:, None], self.path[:, anchor])
        above = torch.where(anchor < 0, self.root[:, plan.root], after_noise)
        self.node = key(above, flow)


def spell(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every edge (E,) its way from the root, the ODE edges since the last SDE edge, and
    that edge.

    The way is child indices, the ODE edges are sigmas; both are 64 bits of their spelling.
    """
    way: list[str] = []
    flow: list[str] = []
    anchor: list[int] = []
    children: dict[tuple[int, int], int] = {}
    leaves = set(plan.leaf_edges.tolist())
    columns = (plan.parent, plan.root, plan.kind == ODE, plan.sigma, plan.sigma_next)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for e, (p, r, ode, sigma, sigma_next) in enumerate(rows):
        child = children[p, r] = children.get((p, r), -1) + 1
        above = (way[p], flow[p], anchor[p]) if p >= 0 else ("", "", -1)
        way.append(f"{above[0]}/{child}")
        flow.append(f"{above[1]}/{sigma.hex()},{sigma_next.hex()},{e in leaves}" if ode else "")
        anchor.append(above[2] if ode else e)
    return (
        torch.tensor([digest(w) for w in way]),
        torch.tensor([digest(f) for f in flow]),
        torch.tensor(anchor),
    )


class Kept:
    """The states that losses and rewards will read, and the transitions between them. host: each
    state goes to host memory as soon as it is made; the other columns stay."""

    def __init__(self, plan: Plan, rows: Tensor, names: NodeKeys, *, host: bool = False) -> None:
        self.plan, self.rows, self.names, self.host = plan, rows, names, host
        ends = torch.full((2, len(rows), plan.edges), -1)
        self.src, self.dst = ends.unbind(0)  # (R, E) kept rows at both ends of an edge
        self.log_prob = torch.full((len(rows), plan.edges), torch.nan)
        self.is_leaf = torch.zeros(plan.edges, dtype=torch.bool)
        self.is_leaf[plan.leaf_edges] = True
        self.levels: list[Level] = []
        self.size = 0

    def keep(self, level: Level, which: Tensor) -> None:
        """Store the states of rows `which` of a level, once."""
        which = torch.unique(which)
        which = which[level.stored[which] < 0]
        level.stored[which] = torch.arange(self.size, self.size + len(which))
        own = replace(level, x0=None).take(which)  # without x0: losses read no solver history
        self.levels.append(replace(own, x=own.x.cpu()) if self.host else own)
        self.size += len(which)

    def record(
        self,
        before: Level,
        after: Level,
        edges: Tensor,
        source: Tensor,
        place: Tensor,
        log_prob: Tensor,
    ) -> None:
        """Keep both ends of trained edges, and the ends of leaf edges.

        source, place (R, edges): rows of the levels before and after where the edges start and end.
        log_prob: of the rows of the level after.
        """
        trained = self.plan.trained[edges]
        ends = trained | self.is_leaf[edges]
        if not bool(ends.any()):
            return
        self.keep(before, source[:, trained])
        self.keep(after, place[:, ends])
        self.src[:, edges[trained]] = before.stored[source[:, trained]]
        self.dst[:, edges[ends]] = after.stored[place[:, ends]]
        # log-probs stay on their device: fetching them would make the host wait
        device = log_prob.device
        self.log_prob = self.log_prob.to(device, non_blocking=True)
        if log_prob.ndim > self.log_prob.ndim - 1:  # one log-prob for each place of a grid
            self.log_prob = self.log_prob[..., None].repeat(1, 1, log_prob.shape[1])
        columns, rows = (t.to(device, non_blocking=True) for t in (edges, place))
        self.log_prob[:, columns] = log_prob[rows]

    def rollout(self, nfe: int) -> Rollout:
        """Return transitions and leaves copy by copy, each in the order of the plan's table."""
        plan, copies, leaf_edges = self.plan, len(self.rows), self.plan.leaf_edges
        trained = torch.nonzero(plan.trained).flatten()
        last, above = trained_above(plan, trained)
        offset = torch.arange(copies)[:, None] * len(trained)
        parent, leaf_edge = above[trained], last[leaf_edges]
        columns = {
            "prompt": torch.cat([level.row for level in self.levels]),
            "state_sigma": torch.cat([level.sigma for level in self.levels]),
            "src": self.src[:, trained].flatten(),
            "dst": self.dst[:, trained].flatten(),
            "parent": torch.where(parent < 0, -1, parent + offset).flatten(),
            "edge": trained.repeat(copies),
            "sigma": plan.sigma[trained].repeat(copies),
            "sigma_next": plan.sigma_next[trained].repeat(copies),
            "eta": plan.eta[trained].repeat(copies),
            "noise_key": self.names.path[:, trained].flatten(),
            "trained": torch.ones(copies * len(trained), dtype=torch.bool),
            "leaf": self.dst[:, leaf_edges].flatten(),
            "leaf_edge": torch.where(leaf_edge < 0, -1, leaf_edge + offset).flatten(),
            "leaf_key": self.names.path[:, leaf_edges].flatten(),
            "start_key": self.names.noise_root[:, plan.root[leaf_edges]].flatten(),
            "group": self.rows.repeat_interleave(len(leaf_edges)),
            "tree": (torch.arange(copies)[:, None] * plan.roots + plan.root[leaf_edges]).flatten(),
        }
        states = torch.cat([level.x for level in self.levels])
        device = self.log_prob.device if self.host else states.device
        log_prob = self.log_prob.to(device)[:, trained.to(device)].flatten(0, 1)
        # `log_prob` marks std == 0 by inf on a device, where a check would have made the host wait
        if bool((log_prob == torch.inf).any()):
            raise ValueError(NO_DENSITY)
        return Rollout(
            states=states,
            log_prob=log_prob if len(trained) else None,
            plan=plan,
            nfe=nfe,
            **{name: column.to(device) for name, column in columns.items()},
        )


def trained_above(plan: Plan, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Find for each edge (E,) the last trained edge at or above it, and the last one above it.

    Both are places among `trained`; -1: none.
    """
    last = torch.full((plan.edges,), -1)
    last[trained] = torch.arange(len(trained))
    above = torch.full_like(last, -1)
    for e, p in enumerate(plan.parent.tolist()):
        above[e] = last[p] if p >= 0 else -1
        last[e] = above[e] if last[e] < 0 else last[e]
    return last, above


def named(
    rows: Tensor, prompt_keys: Tensor | None, copies: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, prompt_keys and copies (R,) on the CPU, with the defaults of `tree.grow`."""
    rows = torch.as_tensor(rows).cpu().long()
    prompt_keys = key("prompt", rows) if prompt_keys is None else torch.as_tensor(prompt_keys)
    copies = occurrence(rows) if copies is None else torch.as_tensor(copies)
    if not len(rows) == len(prompt_keys) == len(copies) > 0:
        sizes = {"rows": len(rows), "prompt_keys": len(prompt_keys), "copies": len(copies)}
        raise ValueError(
            "rows, prompt_keys and copies must have one value per copy, at least one; their lengths"
            f" are {sizes}"
        )
    return rows, prompt_keys.cpu().long(), copies.cpu().long()


def occurrence(rows: Tensor) -> Tensor:
    """Count for each value how many equal ones come before it."""
    seen: dict[int, int] = {}
    out = []
    for row in rows.tolist():
        out.append(seen.get(row, 0))
        seen[row] = out[-1] + 1
    return torch.tensor(out)


def distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """Find the distinct values of (n,) -> (first place of each, which of these each value is).

    In order of appearance.
    """
    unique, inverse = torch.unique(values, return_inverse=True)
    places = torch.arange(len(values))
    if len(unique) == len(values):
        return places, places
    first = torch.full_like(unique, len(values)).scatter_reduce_(0, inverse, places, "amin")
    order = first.argsort()
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order))
    return first[order], number[inverse]


def is_all(rows: Tensor, n: int) -> bool:
    """Whether rows, on the CPU, are 0 to n - 1 in order: nothing is to be gathered."""
    return len(rows) == n and torch.equal(rows, torch.arange(n))


def own_noise(noise: Callable[[Tensor], Tensor], path: Tensor) -> Tensor:
    """Draw the noise of SDE edges named by their path, (n,) int64 -> (n, *L).

    For correlated siblings this is the part that they do not share.
    """
    return noise(key("own", path))
