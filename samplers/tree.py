"""The engine: grows a plan from noise, evaluates each distinct state once, level by level, as one
batch.

Every random number is keyed by (prompt key, copy, path of child indices), never by a place in the
batch, so a rollout does not depend on how copies are ordered, chunked or spread over processes. Two
nodes are one when they start from equal x_T and only equal ODE edges
lead to them. The x0 prediction made at a node is the solver history that its children inherit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.samplers import dpmpp, sde
from flowrl.samplers.keys import digest, key
from flowrl.types import ODE, Plan, Rollout, expand

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
Noise = Callable[[Tensor], Tensor]


@torch.no_grad()
def grow(
    velocity: Velocity,
    noise: Noise,
    plan: Plan,
    *,
    shape: Sequence[int],
    rows: Tensor,
    prompt_keys: Tensor | None = None,
    copies: Tensor | None = None,
    shared_key: int = 0,
    init: Noise | None = None,
    micro: int | None = None,
) -> Rollout:
    """Sample R copies of `plan` -> Rollout with cond None and guidance "none" (the caller fills
    them in).

    velocity(x (n, *L) fp32, sigma (n,) fp64 on the CPU, rows (n,)) -> v; noise(keys (n,)) -> (n,
    *L) fp32.
    rows (R,): conditioning row of each copy.
    prompt_keys (R,): key of each copy's prompt, equal for copies of one prompt (default: from
    rows).
    copies (R,): number of the copy within its prompt (default: c-th occurrence of its row); give it
    when copies of one prompt are spread over calls or processes. shared_key: names the x_T that
    init="batch" shares. init(noise) -> x_T, default the identity.
    micro: most rows in one velocity call.
    """
    rows = torch.as_tensor(rows).cpu().long()
    prompt_keys = (
        key("prompt", rows) if prompt_keys is None else torch.as_tensor(prompt_keys).cpu().long()
    )
    copies = _occurrence(rows) if copies is None else torch.as_tensor(copies).cpu().long()
    sizes = {"rows": len(rows), "prompt_keys": len(prompt_keys), "copies": len(copies)}
    if not len(rows) == len(prompt_keys) == len(copies) > 0:
        raise ValueError(
            "rows, prompt_keys and copies must have one value per copy, at least one; their"
            f" lengths are {sizes}"
        )
    names = _Names(plan, rows, prompt_keys, copies, shared_key)
    forest = _Forest(plan, rows, names, lambda k: _checked(noise(k), (len(k), *shape)))
    level, at_root = forest.roots(init)
    at = torch.empty(
        len(rows), plan.edges, dtype=torch.int64
    )  # place in the current level where an edge ends
    nfe = 0
    for depth in range(int(plan.depth.max()) + 1):
        edges = torch.nonzero(plan.depth == depth).flatten()
        source = (
            at_root[:, plan.root[edges]] if depth == 0 else at[:, plan.parent[edges]]
        )  # (R, edges)
        if not _is_all(source.flatten(), len(level.row)):
            used, source = torch.unique(source, return_inverse=True)
            level = level.take(used)
        v = _evaluate(velocity, level, micro)
        nfe += len(v)
        level, at[:, edges] = forest.advance(level, v, edges, source)
    return forest.rollout(nfe)


def own_noise(noise: Noise, path: Tensor) -> Tensor:
    """Noise of SDE edges named by their path, (n,) int64 -> (n, *L); of correlated siblings, the
    part they do not share."""
    return noise(key("own", path))


def _evaluate(velocity: Velocity, level: _Level, micro: int | None) -> Tensor:
    n, row = len(level.row), level.row.to(level.x.device)
    most = micro or n
    chunks = [slice(i, i + most) for i in range(0, n, most)]
    return torch.cat([velocity(level.x[c], level.sigma[c], row[c]).float() for c in chunks])


def _checked(noise: Tensor, shape: tuple[int, ...]) -> Tensor:
    assert noise.shape == shape, f"noise gave {tuple(noise.shape)}, expected {shape}"
    return noise.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """n nodes at one depth, with what their children need."""

    x: Tensor  # (n, *L) fp32
    row: Tensor  # (n,) row of the conditioning
    sigma: Tensor  # (n,) fp64
    stored: Tensor  # (n,) row among the kept states, -1: not kept
    x0: (
        Tensor | None
    )  # (n, *L) data prediction at the node before, the solver's history; None: no history
    sigma_x0: Tensor  # (n,) fp64 where it was made; 1: no history

    def take(self, rows: Tensor) -> _Level:
        if _is_all(rows, len(self.row)):
            return self
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _Level(
            **{name: None if value is None else value[rows] for name, value in values.items()}
        )


def _occurrence(rows: Tensor) -> Tensor:
    """How many equal values come before each one."""
    seen: dict[int, int] = {}
    out = []
    for row in rows.tolist():
        out.append(seen.get(row, 0))
        seen[row] = out[-1] + 1
    return torch.tensor(out)


def _distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """values (n,) -> (place of the first of each distinct value, in order of appearance; for each
    value its number among them)."""
    unique, inverse = torch.unique(values, return_inverse=True)
    first = torch.full_like(unique, len(values)).scatter_reduce_(
        0, inverse, torch.arange(len(values)), "amin"
    )
    order = first.argsort()
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order))
    return first[order], number[inverse]


def _is_all(rows: Tensor, n: int) -> bool:
    """Whether rows are 0, 1, ..., n-1: taking them would be a copy."""
    return len(rows) == n and bool((rows == torch.arange(n)).all())


class _Names:
    """Keys of every node of R copies: path (R, E) names its noise, node (R, E) its state;
    path_root, root (R, roots) those of x_T."""

    def __init__(
        self, plan: Plan, rows: Tensor, prompt_keys: Tensor, copies: Tensor, shared_key: int
    ):
        trunk = torch.arange(plan.roots)
        self.path_root = key(prompt_keys[:, None], copies[:, None], trunk)
        if plan.init == "sample":
            self.noise_root = key("x_T", self.path_root)
        else:
            base = prompt_keys if plan.init == "group" else torch.full_like(prompt_keys, shared_key)
            self.noise_root = key("x_T", base[:, None]).expand(-1, plan.roots)
        self.root = key(self.noise_root, rows[:, None], prompt_keys[:, None])
        way, flow, anchor = _spell(plan)
        root = plan.root
        self.path = key(self.path_root[:, root], way)
        self.parent_path = torch.where(
            plan.parent < 0, self.path_root[:, root], self.path[:, plan.parent]
        )
        noisy = key("sde", rows[:, None], self.path[:, anchor])
        self.node = key(torch.where(anchor < 0, self.root[:, root], noisy), flow)


def _spell(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Of every edge (E,): 64 bits of the child indices from the root to it, of the ODE edges since
    the last SDE edge, and which that is."""
    way: list[str] = []
    flow: list[str] = []
    anchor: list[int] = []
    children: dict[tuple[int, int], int] = {}
    leaves = set(plan.leaf_edges.tolist())
    columns = (plan.parent, plan.root, plan.kind == ODE, plan.sigma, plan.sigma_next)
    for e, (p, r, ode, sigma, sigma_next) in enumerate(
        zip(*(c.tolist() for c in columns), strict=True)
    ):
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


class _Forest:
    """Makes the next level from the last, and keeps the states that losses and rewards will
    read."""

    def __init__(self, plan: Plan, rows: Tensor, names: _Names, noise: Noise):
        self.plan, self.rows, self.names, self.noise = plan, rows, names, noise
        self.src, self.dst = torch.full((2, len(rows), plan.edges), -1).unbind(
            0
        )  # (R, E) kept rows at both ends of an edge
        self.log_prob = torch.full((len(rows), plan.edges), torch.nan)
        self.is_leaf = torch.zeros(plan.edges, dtype=torch.bool)
        self.is_leaf[plan.leaf_edges] = True
        self.kept: list[_Level] = []
        self.size = 0

    def roots(self, init: Noise | None) -> tuple[_Level, Tensor]:
        """The distinct x_T -> (level, place in it of each root (R, roots))."""
        first, place = _distinct(self.names.root.flatten())
        x = self.noise(self.names.noise_root.flatten()[first])
        x = x if init is None else init(x).float()
        top = self.plan.parent < 0
        sigma = torch.zeros(self.plan.roots, dtype=torch.float64).index_put(
            (self.plan.root[top],), self.plan.sigma[top]
        )
        none = torch.full_like(first, -1)
        row, sigma = self.rows[first // self.plan.roots], sigma[first % self.plan.roots]
        return _Level(
            x=x, row=row, sigma=sigma, stored=none, x0=None, sigma_x0=torch.ones_like(sigma)
        ), place.view_as(self.names.root)

    def keep(self, level: _Level, which: Tensor) -> None:
        """Store the states of rows `which` of a level, once."""
        which = torch.unique(which)
        which = which[level.stored[which] < 0]
        level.stored[which] = torch.arange(self.size, self.size + len(which))
        self.kept.append(level.take(which))
        self.size += len(which)

    def advance(
        self, level: _Level, v: Tensor, edges: Tensor, source: Tensor
    ) -> tuple[_Level, Tensor]:
        """Walk `edges` from rows `source` (R, edges) of the level -> (next level, place in it of
        each end (R, edges))."""
        plan, starts = self.plan, source.flatten()
        if len(edges) == 1 and _is_all(starts, len(v)):  # one child each: all ends are distinct
            copy = place = torch.arange(len(v))
            edge, before = edges.expand(len(v)), level
        else:
            first, place = _distinct(self.names.node[:, edges].flatten())
            copy, edge, start = first // len(edges), edges[first % len(edges)], starts[first]
            before, v = level.take(start), v[start]
        x0 = before.x - expand(before.sigma, v).to(v) * v if plan.solver == "dpm2" else None
        y, log_prob = self.walk(before, v, copy, edge)
        stored = torch.full((len(y),), -1)
        after = _Level(
            x=y,
            row=before.row,
            sigma=plan.sigma_next[edge],
            stored=stored,
            x0=x0,
            sigma_x0=before.sigma,
        )
        place = place.view_as(source)
        self.record(level, after, edges, source, place, log_prob)
        return after, place

    def walk(self, before: _Level, v: Tensor, copy: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        """Edges of both kinds from nodes `before` -> (states at their ends, log-prob, nan of ODE
        edges)."""
        ode = self.plan.kind[edge] == ODE
        if bool(ode.all()):
            return self.straight(before, v, edge)
        if not bool(ode.any()):
            return self.noisy(before, v, copy, edge)
        y, log_prob = torch.empty_like(before.x), torch.empty(len(edge))
        some, others = torch.nonzero(ode).flatten(), torch.nonzero(~ode).flatten()
        y[some], log_prob[some] = self.straight(before.take(some), v[some], edge[some])
        y[others], log_prob[others] = self.noisy(
            before.take(others), v[others], copy[others], edge[others]
        )
        return y, log_prob

    def straight(self, before: _Level, v: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        """ODE edges from nodes `before` -> (states at their ends, nan). The last edge of a path and
        one without history are first-order."""
        history = 1.0
        if before.x0 is not None:
            second_order = (before.sigma <= self.plan.dpm_from) & ~self.is_leaf[edge]
            history = torch.where(second_order, before.sigma_x0, 1.0)
        y = dpmpp.step(v, before.x, before.sigma, self.plan.sigma_next[edge], before.x0, history)
        return y, torch.full((len(y),), torch.nan)

    def noisy(self, before: _Level, v: Tensor, copy: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        """SDE edges from nodes `before` -> (states at their ends, log-prob of exactly these
        states)."""
        plan, names = self.plan, self.names
        step = sde.transition(
            plan, v, before.x, plan.sigma[edge], plan.sigma_next[edge], plan.eta[edge]
        )
        y = step.sample(self.xi(names.path[copy, edge], names.parent_path[copy, edge]))
        return y, sde.log_prob(plan, step, y).cpu()

    def record(
        self,
        level: _Level,
        after: _Level,
        edges: Tensor,
        source: Tensor,
        place: Tensor,
        log_prob: Tensor,
    ) -> None:
        """Keep both ends of trained edges and the ends of leaf edges."""
        trained = self.plan.trained[edges]
        ends = trained | self.is_leaf[edges]
        if not bool(ends.any()):
            return
        self.keep(level, source[:, trained])
        self.keep(after, place[:, ends])
        self.src[:, edges[trained]] = level.stored[source[:, trained]]
        self.dst[:, edges[ends]] = after.stored[place[:, ends]]
        self.log_prob[:, edges] = log_prob[place]

    def xi(self, path: Tensor, parent_path: Tensor) -> Tensor:
        """Noise of SDE edges; siblings of a correlated plan share a part: (xi_0 + s eta_b) / sqrt(1
        + s^2) (BranchGRPO)."""
        own = own_noise(self.noise, path)
        s = self.plan.correlation
        return (
            own
            if s is None
            else (self.noise(key("siblings", parent_path)) + s * own) / (1 + s * s) ** 0.5
        )

    def rollout(self, nfe: int) -> Rollout:
        """Transitions and leaves copy by copy, each in the order of the plan's table."""
        plan, copies = self.plan, len(self.rows)
        trained = torch.nonzero(plan.trained).flatten()
        place = torch.full(
            (plan.edges,), -1
        )  # place of the last trained edge at or above each edge, among the trained
        place[trained] = torch.arange(len(trained))
        above = torch.full_like(place, -1)
        for e, p in enumerate(plan.parent.tolist()):
            above[e] = place[p] if p >= 0 else -1
            place[e] = above[e] if place[e] < 0 else place[e]
        offset = torch.arange(copies)[:, None] * len(trained)

        def index(of: Tensor) -> Tensor:
            return torch.where(of < 0, -1, of + offset).flatten()

        def each(column: Tensor) -> Tensor:
            return column.repeat(copies)

        device = self.kept[-1].x.device
        leaf_edges = plan.leaf_edges
        fields = {
            "prompt": torch.cat([k.row for k in self.kept]),
            "state_sigma": torch.cat([k.sigma for k in self.kept]),
            "src": self.src[:, trained].flatten(),
            "dst": self.dst[:, trained].flatten(),
            "parent": index(above[trained]),
            "edge": each(trained),
            "sigma": each(plan.sigma[trained]),
            "sigma_next": each(plan.sigma_next[trained]),
            "eta": each(plan.eta[trained]),
            "noise_key": self.names.path[:, trained].flatten(),
            "log_prob": self.log_prob[:, trained].flatten() if len(trained) else None,
            "trained": torch.ones(copies * len(trained), dtype=torch.bool),
            "leaf": self.dst[:, leaf_edges].flatten(),
            "leaf_edge": index(place[leaf_edges]),
            "leaf_key": self.names.path[:, leaf_edges].flatten(),
            "group": self.rows.repeat_interleave(len(leaf_edges)),
            "tree": (torch.arange(copies)[:, None] * plan.roots + plan.root[leaf_edges]).flatten(),
        }
        fields = {
            name: None if value is None else value.to(device) for name, value in fields.items()
        }
        return Rollout(states=torch.cat([k.x for k in self.kept]), plan=plan, nfe=nfe, **fields)
