"""Search at inference: network calls are spent on samples of which the best by a reward is kept.

Ma et al., "Inference-Time Scaling for Diffusion Models beyond Scaling Denoising Steps"
(arXiv:2501.09732). All three ways score finished samples, not one-step predictions of them, so that
the score is that of what is returned; and the first candidate is the sample that would be made
without a search, so that nothing worse than it comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.rewards import RewardSet
from flowrl.rollouts.inference.candidates import BestSamples, Candidates, SampleRequest
from flowrl.rollouts.roll_out import noise_of
from flowrl.samplers import keys, plan
from flowrl.types import Plan, expand

How = Literal["random", "zero_order", "tree"]
READ = {
    "random": (),
    "zero_order": ("neighbours", "radius"),
    "tree": ("keep", "children", "forks", "eta"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How to search, and at what cost.

    random: samples from fresh noise (best-of-N). zero_order: rounds of neighbours of the best noise
    so far, sqrt(1 - radius^2) w + radius eta. tree: samples from fresh noise, of which the best
    `keep` go on; at each fork each of them gets children by a Flow-SDE step, finished by ODE, and
    the best `keep` of parents and children go on.
    """

    how: How  # random, zero_order or tree
    # most network calls for each prompt, with all branches of guidance and RLG; a remainder too
    # small for a whole candidate is not used
    calls: int
    neighbours: int = 4  # zero_order: candidates in each round
    radius: float = 0.3  # zero_order: how far they are from the best noise, above 0 and at most 1
    keep: int = 2  # tree: how many samples go on at each fork
    children: int = 3  # tree: children of each sample that goes on
    # tree: steps at which paths fork; None: at 1/3 and 2/3 of the way
    forks: Sequence[int] | None = None
    eta: float = 0.7  # tree: noise level of the step at a fork

    def __post_init__(self) -> None:
        if self.how not in READ:
            raise ValueError(
                f"search how={self.how!r} is unknown; choose {', '.join(get_args(How))}"
            )
        for name in ("calls", "neighbours", "keep", "children"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"search {name}={value!r} should be a whole number from 1")
        for name, most in (("radius", 1.0), ("eta", 10.0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= most:
                raise ValueError(
                    f"search {name}={value!r} should be a number above 0 and at most {most:g}"
                )
        steps = [] if self.forks is None else self.forks
        if not isinstance(steps, list | tuple) or not all(type(k) is int for k in steps):
            raise ValueError(f"search forks={self.forks!r} should be steps, such as [2, 4]")
        self._check_read()

    def _check_read(self) -> None:
        """Raise ValueError where a setting was set that this way of searching does not read."""
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default and field.name not in READ[self.how]:
                reader = next(how for how, own in READ.items() if field.name in own)
                raise ValueError(
                    f"search {field.name}={value!r} is read with how={reader} only, and this one"
                    f" has how={self.how}; leave it out"
                )


def searched(request: SampleRequest, rewards: RewardSet, how: Search) -> BestSamples:
    """Find the best samples of the prompts asked for; too few calls -> ValueError."""
    ways: dict[str, Callable[[Candidates, Search], None]] = {
        "random": random,
        "zero_order": zero_order,
        "tree": tree,
    }
    counted = Candidates(request, rewards)
    if request.policy.unmasks and how.how != "random":
        raise ValueError(
            f"search how={how.how} moves the noise of flows, and the model is a masked generator;"
            " use how=random, or best_of"
        )
    ways[how.how](counted, how)
    return counted.found()


def random(made: Candidates, how: Search) -> None:
    """Make as many candidates from fresh noise as the calls buy (best-of-N)."""
    fresh(made, affordable(made.request, how), made.request.path)


def zero_order(made: Candidates, how: Search) -> None:
    """Move the best noise of a prompt to the best of its neighbours, where one is better."""
    request, left = made.request, affordable(made.request, how) - 1
    prompts = torch.arange(len(request.texts))
    pivot = made.noise(request.names(prompts, torch.zeros_like(prompts)))
    score, rounds = walk(made, pivot[:, None], 0)[:, 0], 0
    while left:
        count, rounds = min(how.neighbours, left), rounds + 1
        own = request.seeds[:, None], "neighbour", rounds, request.places[:, None]
        names = keys.key(*own, torch.arange(count))
        drawn = noise_of(request.policy)(names.flatten()).unflatten(0, names.shape)
        near = neighbours(pivot, drawn, how.radius)
        found, place = walk(made, near, rounds).max(1)
        better = expand(found > score, pivot).to(pivot.device)
        pivot = torch.where(better, near[prompts, place], pivot)
        score, left = found.maximum(score), left - count


def neighbours(pivot: Tensor, own: Tensor, radius: float) -> Tensor:
    """Mix noise (P, *L) with fresh noise (P, n, *L) -> (P, n, *L), standard normal like both."""
    return (1 - radius**2) ** 0.5 * pivot[:, None] + radius * own


def walk(made: Candidates, noise: Tensor, number: int) -> Tensor:
    """Finish and score the noise of a round (P, n, *L) -> (P, n)."""
    whose = torch.arange(len(noise)).repeat_interleave(noise.shape[1])
    names = keys.key("round", number, torch.arange(len(whose)))  # no noise on the way
    x = made.start(noise.flatten(0, 1), whose)
    return made.offer(made.grow(made.request.path, x, whose, names), whose).view(noise.shape[:2])


def tree(made: Candidates, how: Search) -> None:
    """Fork sampling paths on their way, and let the best ones go on."""
    request = made.request
    forks = forks_of(request, how)
    sigmas = request.policy.schedule(request.steps).sigmas.double().cpu()
    stages = [stage(sigmas[k:], how, request) for k in forks]
    spent = how.keep * request.unit * sum(plan.nfe(path) for path in stages)
    count = (how.calls - spent) // request.cost
    if count < how.keep:
        least = spent + how.keep * request.cost
        raise ValueError(
            f"search calls={how.calls} are too few for a tree of keep={how.keep},"
            f" children={how.children} and forks={list(forks)}, which needs {least}; give so many,"
            " or make it smaller"
        )
    prompts = len(request.texts)
    score, states = fresh(made, count, keeping(request.path, sigmas[list(forks)]))
    for number, path in enumerate(stages):
        score, states = best(score, states, how.keep)
        whose = torch.arange(prompts).repeat_interleave(how.keep)
        which = request.places[whose] * how.keep + torch.arange(how.keep).repeat(prompts)
        names = keys.key(request.seeds[whose], "fork", number, which)
        path = keeping(path, sigmas[list(forks[number + 1 :])])
        grown = made.grow(path, states[:, :, 0].flatten(0, 1), whose, names)
        own = made.offer(grown, whose.repeat_interleave(how.children))
        each = (prompts, how.keep * how.children, len(forks) - number - 1)
        after = grown.states[grown.src].unflatten(0, each)
        score = torch.cat([score, own.view(each[:2])], 1)
        states = torch.cat([states[:, :, 1:], after], 1)


def forks_of(request: SampleRequest, how: Search) -> tuple[int, ...]:
    """The steps at which paths fork, in ascending order; the last step has no noise to fork
    with."""
    last = request.path.edges - 2
    if last < 0:
        raise ValueError("search how=tree forks before the last step, and steps=1; use 2 or more")
    if how.forks is None:
        return tuple(sorted({min(request.path.edges * i // 3, last) for i in (1, 2)}))
    found = tuple(sorted(set(how.forks)))
    if not found or found[0] < 0 or found[-1] > last:
        raise ValueError(
            f"search forks={list(how.forks)} should be steps from 0 to {last}, the last but one of"
            f" steps={request.path.edges}"
        )
    return found


def stage(sigmas: Tensor, how: Search, request: SampleRequest) -> Plan:
    """The plan of the children of a state at sigmas[0], each finished by ODE."""
    path = plan.fan(sigmas, steps=[0], children=how.children, eta=how.eta)
    return replace(path, solver=request.solver)


def keeping(path: Plan, sigmas: Tensor) -> Plan:
    """Let a plan keep the states at which its edges from these sigmas start."""
    return replace(path, trained=torch.isin(path.sigma, sigmas))


def fresh(made: Candidates, count: int, path: Plan) -> tuple[Tensor, Tensor]:
    """Make `count` samples of each prompt from noise of their own -> scores (P, count), and the F
    states that the plan keeps of each (P, count, F, *L)."""
    prompts = len(made.request.texts)
    whose = torch.arange(prompts).repeat_interleave(count)
    names = made.request.names(whose, torch.arange(count).repeat(prompts))
    grown = made.grow(path, made.start(made.noise(names), whose), whose, names)
    states = grown.states[grown.src].unflatten(0, (prompts, count, int(path.trained.sum())))
    return made.offer(grown, whose).view(prompts, count), states


def best(score: Tensor, states: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Keep the best of each prompt, the first one among equals: scores (P, n), states
    (P, n, F, *L) -> (P, keep), (P, keep, F, *L)."""
    order = score.argsort(dim=1, descending=True, stable=True)[:, :keep]
    return score.gather(1, order), states[torch.arange(len(score))[:, None], order]


def affordable(request: SampleRequest, how: Search) -> int:
    """How many samples the calls buy; fewer than two -> ValueError."""
    count = how.calls // request.cost
    if count < 2:
        raise ValueError(
            f"search calls={how.calls} buy {count} samples of {request.cost} network calls each,"
            f" and a search needs two; give {2 * request.cost} or more"
        )
    return count
