"""How long a run takes from its start to its end: iterations, evaluations, and loading weights."""

from __future__ import annotations

import math

from flowrl.config.schema import Config
from flowrl.training.budget.call_costs import Costs
from flowrl.training.budget.modelled_tokens import Modelled
from flowrl.training.budget.rehearsal import PolicyCall
from flowrl.training.budget.weight_costs import WeightCosts, encoders_size, size_of

DISK = 1e9  # bytes/s at which weights are read, of a plain solid-state disk


def evaluations(cfg: Config, costs: Costs, weights: WeightCosts, gpus: int) -> float:
    """Return the seconds of all evaluations of a run."""
    return sum(evaluation(cfg, guidance, costs, weights, gpus) for guidance in guidances(cfg))


def loading(policy: Modelled, rewards: float) -> float:
    """Return the seconds in which all weights are read. rewards: bytes of their networks."""
    networks = sum(map(size_of, policy.networks.values())) + size_of(policy.vae)
    return (networks + encoders_size(policy) + rewards) / DISK


def guidances(cfg: Config) -> list[float | str]:
    """Return the guidance of each evaluation of a run, in no order."""
    e = cfg.eval
    if cfg.data.eval is None:
        return []
    between = (cfg.iterations - 1) // e.every if e.every else 0
    guided = [e.baseline_guidance] if e.at_start and e.baseline_guidance else []
    return [*[e.guidance] * (e.at_start + between + 1), *guided]


def images_of(cfg: Config, gpus: int) -> int:
    """Return the number of media that a process makes in an evaluation."""
    return math.ceil(cfg.eval.images / gpus)


def networks(cfg: Config) -> int:
    """Return how often an evaluation asks the network about a medium, each time for all branches of
    guidance."""
    return cfg.eval.steps * (1 if cfg.eval.rlg == 1 else 2)  # the reference answers, too


def evaluation(
    cfg: Config, guidance: float | str, costs: Costs, weights: WeightCosts, gpus: int
) -> float:
    """Return the seconds of the network and the decoder in one evaluation."""
    device, branches = costs.device, costs.policy.branches(guidance)
    images = images_of(cfg, gpus)
    states = min(images, costs.policy.states(cfg.batch.micro, guidance))
    call = PolicyCall(
        what="velocity",
        rows=states,
        branches=branches,
        guidance="guided" if branches > 1 else "none",
    )
    step = weights.paid(costs.of(call, cfg)[0], device, 1.0, backward=False)
    decoded = min(images, cfg.batch.decode)
    decode = costs.of(PolicyCall(what="decode", rows=decoded), cfg)[0]
    sampled = images / states * networks(cfg) * device.call(step.seconds, step.operators)
    return sampled + images / decoded * device.call(decode.seconds, decode.operators)


def hours(seconds: float) -> str:
    """Write seconds as hours and minutes.

    >>> hours(25_500)
    '7:05'
    """
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}"
