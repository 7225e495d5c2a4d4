"""Which denoising steps are walked: the plan that a config asks for, and whether it can serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flowrl.algorithms.common.base import Sampler
from flowrl.algorithms.common.prune import prunes_all
from flowrl.algorithms.common.transition_config import FORKING, TransitionConfig
from flowrl.samplers import plan as plans
from flowrl.samplers import sde
from flowrl.samplers.common import window as windows
from flowrl.types import Plan


def windowed(c: TransitionConfig) -> bool:
    """Whether a window says which steps are SDE."""
    return c.plan in ("window", "tree") or (c.plan == "branch" and c.tree.noisy == "window")


def window_start(
    c: TransitionConfig, steps: int, *, iteration: int, seed: int, memory: Mapping[str, float]
) -> int:
    """First step of the window in an iteration. memory: tree/variance/STEP as measured so far."""
    w = c.window
    if w.schedule != "adaptive":
        return windows.window_start(**w.model_dump(), iteration=iteration, steps=steps, seed=seed)
    high = steps - 1 if w.high is None else w.high
    windows.check_window(steps, w.size, w.low, high)
    places = range(w.low, high - w.size + 1, w.stride)
    # a step that was never measured counts most, so that each is measured once
    unseen = float("inf")

    def decided(place: int) -> float:
        steps_inside = range(place, place + w.size)
        return sum(memory.get(f"tree/variance/{i}", unseen) for i in steps_inside)

    return max(places, key=lambda place: (decided(place), -place))


def make_plan(c: TransitionConfig, sigmas: Tensor, sampler: Sampler, start: int) -> Plan:
    """The plan of a config: sigmas (T+1,) fp64; start: first step of the window."""
    plan = without_tail(c, sigmas, sampler, start)
    check_plan(c, plan)
    return plan if c.tail is None else plans.compress(plan, tail=c.tail, count=c.tail_count)


def without_tail(c: TransitionConfig, sigmas: Tensor, sampler: Sampler, start: int) -> Plan:
    """The plan before algorithm.tail shortens what follows its last noisy step."""
    t, size = c.tree, c.window.size
    common: dict[str, Any] = {"eta": sampler.eta, "sde": c.sde, "init": sampler.init_noise}
    if c.sde in sde.UNMASKING:
        return plans.unmask(sigmas, reduction="none" if c.by_place else "mean", **common)
    if c.plan == "full":
        return plans.full(sigmas, last=c.learns_noise, **common)
    if c.plan == "window":
        return plans.window(sigmas, start=start, size=size, **common)
    if c.plan == "tree":
        return plans.tree(sigmas, start=start, depth=size, children=t.children, **common)
    if c.plan == "branch":
        common |= {"splits": t.splits, "children": t.children, "correlation": t.correlation}
        noisy = range(start, start + size) if t.noisy == "window" else None
        return plans.branch(sigmas, noisy=noisy, **common)
    if c.plan == "dense":
        etas = [common.pop("eta")] * (len(sigmas) - 2)
        return plans.dense(sigmas, etas=etas, **common)
    forks = range(len(sigmas) - 2) if t.steps is None else t.steps
    if c.plan == "fan":
        return plans.fan(sigmas, steps=forks, children=t.children, **common)
    return plans.granular(sigmas, steps=forks, children=t.children, strides=t.strides, **common)


def check_plan(c: TransitionConfig, plan: Plan) -> None:
    """Raise ValueError, which says what setting to change, where the method cannot use the plan."""
    if not bool(plan.trained.any()):
        raise ValueError(
            "this method trains SDE steps and its plan has none: set sampler.eta > 0 (0.7 for"
            " flow_sde) and sampler.steps >= 2, or train with algorithm=nft, which needs no SDE"
        )
    check_compared(c, plan)
    check_strides(c)
    check_adaptive_window(c)
    check_prune(c, plan)


def check_compared(c: TransitionConfig, plan: Plan) -> None:
    """Raise ValueError where the credit rule has nothing to compare on this plan."""
    if c.credit == "siblings" and c.plan not in FORKING and plan.init == "sample":
        raise ValueError(
            f"algorithm.credit=siblings compares children of one node, and plan={c.plan} never"
            " forks; set algorithm.plan=tree, or credit=leaf"
        )
    if c.plan in FORKING and c.tree.children == 1 and c.credit in ("siblings", "granular"):
        raise ValueError(
            f"algorithm.tree.children=1 leaves credit={c.credit} nothing to compare: an only"
            " child has no siblings; set children to 2 or more, or credit=leaf"
        )
    if c.credit == "depth" and c.scope == "tree" and plan.leaves == 1:
        raise ValueError(
            f"algorithm.scope=tree compares the leaves of one tree, and a tree of plan={c.plan}"
            " has a single one here; use scope=prompt, or a plan that forks, as"
            " algorithm.plan=branch"
        )


def check_strides(c: TransitionConfig) -> None:
    """Raise ValueError where credit sums over strides that the plan does not have."""
    if c.credit == "granular" and c.plan != "granular":
        raise ValueError(
            f"algorithm.credit=granular sums over strides, which plan={c.plan} does not have; set"
            " algorithm.plan=granular"
        )


def check_adaptive_window(c: TransitionConfig) -> None:
    """Raise ValueError where the window follows a measurement that the plan does not make."""
    if c.window.schedule == "adaptive" and c.plan != "tree":
        raise ValueError(
            "algorithm.window.schedule=adaptive measures how children differ at each step of"
            f" the window, and plan={c.plan} does not fork at all of them; set"
            " algorithm.plan=tree"
        )


def check_prune(c: TransitionConfig, plan: Plan) -> None:
    """Raise ValueError where pruning has no effect, or leaves nothing to train."""
    if c.prune.active and c.plan != "branch":
        raise ValueError(
            f"algorithm.prune leaves out edges of plan=branch, and the plan is {c.plan}; set"
            " algorithm.plan=branch"
        )
    if c.prune.depth and prunes_all(c.prune, plan, c.tree.splits):
        raise ValueError(
            f"algorithm.prune.depth={c.prune.depth} leaves out every noisy step of this plan,"
            " so that nothing would be trained; choose less"
        )
