"""The engine: grows a plan from noise and evaluates each distinct state once, level by level.

Every random number is keyed by (prompt key, copy, path of child indices), never by a place in the
batch, so a rollout does not depend on how copies are ordered, chunked or spread over processes. Two
nodes are the same when they start from equal x_T and only equal ODE edges lead to them. The x0
prediction made at a node is the solver history that its children inherit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowrl.samplers import dpmpp, ode, sde
from flowrl.samplers.common.forest import Kept, Level, NodeKeys, distinct, named, own_noise
from flowrl.samplers.keys import key
from flowrl.types import ODE, Plan, Rollout, expand

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
Noise = Callable[[Tensor], Tensor]
Std = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    init: Callable[..., Tensor] | None = None,
    micro: int | None = None,
    std: Std | None = None,
    host: bool = False,
) -> Rollout:
    """Sample R copies of `plan` -> Rollout, whose cond and guidance the caller fills in.

    velocity(x (n, *L) fp32, sigma (n,) fp64 on the CPU, rows (n,)) -> v; noise(keys (n,)) ->
    (n, *L) fp32 of `shape`; init(noise, rows=(n,)) -> x_T, default the identity. In plans of masked
    generators x is tokens of any type, velocity gives logits (n, *L, V), noise (n, 2, *L) uniform
    numbers, and init the masked grids.
    rows (R,): conditioning row of each copy.
    prompt_keys (R,): key of each copy's prompt, equal for copies of one prompt; default: from rows.
    copies (R,): number of the copy within its prompt; default: c-th occurrence of its row. Give it
    when copies of one prompt are spread over calls or processes.
    shared_key: names the x_T that plan.init="batch" shares. micro: most rows in a velocity call.
    std(sigma (n,), rows (n,), eta (n,)) -> (n, ...): noise of steps that learn theirs.
    host: keep the states in host memory, and all else where the noise is.
    """
    rows, prompt_keys, copies = named(rows, prompt_keys, copies)
    names = NodeKeys(plan, rows, prompt_keys, copies, shared_key)
    kept = Kept(plan, rows, names, host=host)
    forest = Forest(plan, names, kept, noise, std)

    level, at_root = forest.roots(rows, init)
    assert level.x.shape[1:] == tuple(shape), f"noise gave {tuple(level.x.shape)}, not {shape}"
    # (copies, E) row in its level where an edge ends
    at = torch.empty(len(rows), plan.edges, dtype=torch.int64)
    nfe = 0
    for depth in range(int(plan.depth.max()) + 1):
        edges = torch.nonzero(plan.depth == depth).flatten()
        source = at_root[:, plan.root[edges]] if depth == 0 else at[:, plan.parent[edges]]
        used, source = torch.unique(source, return_inverse=True)
        if len(used) < len(level.row):  # nodes that are not in use are leaves
            level = level.take(used)
        v = evaluate(velocity, level, micro)
        nfe += len(v)
        level, at[:, edges] = forest.advance(level, v, edges, source)
    return kept.rollout(nfe)


def evaluate(velocity: Velocity, level: Level, micro: int | None) -> Tensor:
    """Compute v (n, *L), or logits (n, *L, V), of all nodes of a level, at most `micro` in a
    call."""
    n = len(level.row)
    chunks = [slice(i, i + (micro or n)) for i in range(0, n, micro or n)]
    return torch.cat([velocity(level.x[c], level.sigma[c], level.row[c]).float() for c in chunks])


class Forest:
    """A forest that grows: it makes the next level from the last."""

    def __init__(self, plan: Plan, names: NodeKeys, kept: Kept, noise: Noise, std: Std | None):
        self.plan, self.names, self.kept, self.noise, self.std = plan, names, kept, noise, std

    def roots(self, rows: Tensor, init: Callable[..., Tensor] | None) -> tuple[Level, Tensor]:
        """Draw the distinct x_T -> (level, row of it for each root (R, roots))."""
        plan, names = self.plan, self.names
        first, place = distinct(names.root.flatten())
        x = self.noise(names.noise_root.flatten()[first])
        if (r := plan.spread) is not None:
            shared = self.noise(names.noise_shared.flatten()[first])
            x = math.sqrt(1 - r * r) * shared + r * x
        x = x if init is None else init(x, rows=rows[first // plan.roots])
        top = plan.parent < 0
        at_root = torch.zeros(plan.roots, dtype=torch.float64)
        sigma = at_root.index_put((plan.root[top],), plan.sigma[top])[first % plan.roots]
        level = Level.first(x, rows[first // plan.roots], sigma)
        return level, place.view_as(names.root)

    def advance(
        self, level: Level, v: Tensor, edges: Tensor, source: Tensor
    ) -> tuple[Level, Tensor]:
        """Walk `edges` from rows `source` (R, edges) -> next level, its rows at their ends."""
        # edges that lead to one node are walked once
        first, place = distinct(self.names.node[:, edges].flatten())
        copy, edge, start = first // len(edges), edges[first % len(edges)], source.flatten()[first]
        before = level.take(start)
        v = v if before is level else v[start.to(v.device, non_blocking=True)]
        y, log_prob = self.walk(before, v, copy, edge)
        after = Level(
            x=y,
            row=before.row,
            sigma=self.plan.sigma_next[edge],
            stored=torch.full((len(y),), -1),
            x0=before.x - expand(before.sigma, v).to(v, non_blocking=True) * v
            if self.plan.solver == "dpm2"
            else None,
            sigma_x0=before.sigma,
        )
        place = place.view_as(source)
        self.kept.record(level, after, edges, source, place, log_prob)
        return after, place

    def walk(self, before: Level, v: Tensor, copy: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        """Walk edges of both kinds from `before` -> (states at their ends, log-prob or NaN)."""
        straight = self.plan.kind[edge] == ODE
        if not bool(straight.any()):
            return self.noisy(before, v, copy, edge)
        log_prob = v.new_full((len(edge),), torch.nan)
        if bool(straight.all()):
            return self.straight(before, v, edge), log_prob
        y = torch.empty_like(before.x)
        some, others = torch.nonzero(straight).flatten(), torch.nonzero(~straight).flatten()
        a, b = (t.to(v.device, non_blocking=True) for t in (some, others))
        y[a] = self.straight(before.take(some), v[a], edge[some])
        y[b], log_prob[b] = self.noisy(before.take(others), v[b], copy[others], edge[others])
        return y, log_prob

    def straight(self, before: Level, v: Tensor, edge: Tensor) -> Tensor:
        """Walk ODE edges. The last edge of a path, and one without history, are first-order."""
        x, sigma, sigma_next = before.x, before.sigma, self.plan.sigma_next[edge]
        if self.plan.solver == "euler" or before.x0 is None:  # x_T has no history
            return ode.step(v, x, sigma, sigma_next)
        second_order = (sigma <= self.plan.dpm_from) & ~self.kept.is_leaf[edge]
        history = torch.where(second_order, before.sigma_x0, 1.0)
        return dpmpp.step(v, x, sigma, sigma_next, before.x0, history)

    def noisy(self, before: Level, v: Tensor, copy: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        """Walk SDE edges -> (states at their ends, log-prob of exactly these states)."""
        plan, names = self.plan, self.names
        sigma, sigma_next, eta = plan.sigma[edge], plan.sigma_next[edge], plan.eta[edge]
        std = None if self.std is None else self.std(sigma, before.row, eta)
        step = sde.transition(plan, v, before.x, sigma, sigma_next, eta, std)
        xi = own_noise(self.noise, names.path[copy, edge])
        # BranchGRPO: (xi_0 + s eta_b) / sqrt(1 + s^2) has variance 1
        if plan.correlation is not None:
            s, shared = plan.correlation, key("siblings", names.parent_path[copy, edge])
            xi = (self.noise(shared) + s * xi) / (1 + s * s) ** 0.5
        y = step.sample(xi)
        return y, sde.log_prob(plan, step, y)
