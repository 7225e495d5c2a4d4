"""Facts that follow from a config, once its algorithm and its policy exist."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.algorithms.common.base import Algorithm
from flowrl.config.build import schedule
from flowrl.config.rules import climbs
from flowrl.config.schema import Config
from flowrl.policy import Policy
from flowrl.types import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A config with its algorithm, and the facts that follow for the policy."""

    cfg: Config  # every setting, validated
    algorithm: Algorithm  # the algorithm that the config names, or a live one
    sigmas: Tensor  # (T+1,) fp64, descending noise levels of rollouts
    plan: Plan  # plan of the first iteration; those of others differ if a window moves
    guidance: float | str  # guidance of rollouts: the algorithm's own, or sampler.guidance
    needs: frozenset[str]  # Algorithm.needs, and "reward" if rewards of mode=grad are climbed
    # number of network rows that one state costs, at the costlier guidance of the run
    state_rows: int
    states: int  # most states in one forward of the loss: batch.micro // state_rows, at least 1


def set_up(cfg: Config, algorithm: Algorithm, policy: Policy) -> Setup:
    """Make the Setup of a run; ValueError if plan or guidance do not suit method or model."""
    sigmas = schedule(cfg, policy)
    plan = algorithm.plan(sigmas, sampler=cfg.sampler, iteration=0, seed=cfg.seed)
    algorithm.check(plan)
    guidance = check_guidance(cfg, algorithm, policy)
    state_rows = rows_of_a_state(guidance, algorithm, policy)
    return Setup(
        cfg=cfg,
        algorithm=algorithm,
        sigmas=sigmas,
        plan=plan,
        guidance=guidance,
        needs=algorithm.needs | ({"reward"} if climbs(cfg.reward, algorithm.needs) else set()),
        state_rows=state_rows,
        states=max(1, cfg.batch.micro // state_rows),
    )


def rows_of_a_state(guidance: float | str, algorithm: Algorithm, policy: Policy) -> int:
    """Count network rows of a state in the loss: its reference may be guided, rollouts not."""
    return max(map(policy.branches, (guidance, algorithm.reference_guidance)))


def check_guidance(cfg: Config, algorithm: Algorithm, policy: Policy) -> float | str:
    """Return the guidance of rollouts. One that the model does not know -> ValueError."""
    guidance = cfg.sampler.guidance if algorithm.guidance is None else algorithm.guidance
    evaluated = (cfg.eval.guidance, cfg.eval.baseline_guidance or "none")
    helped = cfg.data.sampler.help.guidance or "none"
    for used in (guidance, *evaluated, algorithm.reference_guidance, helped):
        policy.branches(used)
    return guidance
