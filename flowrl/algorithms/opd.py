"""DiffusionOPD (arXiv:2605.15055): the student follows a teacher at the states that it visits.

The student makes its own trajectories; at each trained step its velocity should be that of its
prompt's teacher. An SDE step's loss is the KL of the student's step to the teacher's, per latent
dim; an ODE step's is the square distance of their ends. The gradient is analytic: it needs no
reward, no advantage and no group.

docs/algorithms/opd.md says how it differs from paper and code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from operator import ne
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field, PositiveFloat
from torch import Tensor

from flowrl.algorithms.common import base
from flowrl.algorithms.common.forward import distance
from flowrl.algorithms.common.step_weight import pulls, spreads
from flowrl.algorithms.common.transition_config import known_sde
from flowrl.runtime import registry
from flowrl.runtime.paths import expanded, nearby
from flowrl.runtime.rule import Rule, read_above, read_when
from flowrl.runtime.text import printable
from flowrl.samplers import plan as plans
from flowrl.samplers import sde as sdes
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rewards, Rollout, expand

LEAST_ETA = 1e-3  # with less noise, the square by which a step's loss is divided vanishes
NEEDS_REWARDS = "and algorithm=opd has no rewards that count"
WHOLE_NETWORK = "and teachers are not shared out with the network"
REFUSED = {  # setting -> (value that does not matter, why another does not go with teachers)
    "data.sampler.mode": ("uniform", NEEDS_REWARDS),
    "draw.mode": ("once", NEEDS_REWARDS),
    "diversity.features": (None, NEEDS_REWARDS),
    "train.shard": ([], WHOLE_NETWORK),
    "train.sequence_parallel": (1, WHOLE_NETWORK),
}


class TeacherOptions(base.Options):
    adapter: Annotated[str, AfterValidator(expanded)] | None = Field(
        None, description="A LoRA of any rank: a run's folder, or a LoRA's folder or file."
    )
    model: Annotated[str, AfterValidator(expanded), AfterValidator(registry.absolute)] | None = (
        Field(None, description="A whole model in place of a LoRA, named as model.source is.")
    )
    guidance: float | Literal["pipeline", "none"] = Field(
        description="The teacher's guidance: that with which it was trained."
    )
    domains: tuple[str, ...] | None = Field(
        None, min_length=1, description="Domains of its prompts; none: all prompts."
    )


def wrong_teachers(teachers: Mapping[str, Any], output: str | None, mode: str) -> str:
    """Say what is wrong with the teachers of a config; "": nothing."""
    if not teachers:
        return (
            "algorithm=opd follows teachers, and none is named; write"
            " algorithm.teachers.NAME.adapter=RUN and algorithm.teachers.NAME.guidance=pipeline"
        )
    owners: dict[str, str] = {}
    for name, own in teachers.items():
        what, path = f"algorithm.teachers.{name}", own["adapter"]
        if (path is None) == (own["model"] is None):
            found = "neither an adapter nor a model" if path is None else "an adapter and a model"
            return f"{what} has {found}; give one of the two"
        if path and output and Path(path).resolve().is_relative_to(Path(output).resolve()):
            return f"{what}.adapter={path} is what this run trains; name another run"
        if path and mode == "full":
            return f"{what}.adapter={path} needs train.mode=lora; give the teacher as model"
        if own["domains"] is None and len(teachers) > 1:
            return (
                f"{what} is one of {len(teachers)} and has no domains; write {what}.domains=[...]"
            )
        for domain in own["domains"] or ():
            if (other := owners.setdefault(domain, name)) != name:
                return f'the domain "{domain}" has two teachers, {other} and {name}; leave one'
    return ""


def missing(teachers: Mapping[str, Any], processes: int) -> str:
    """Say which adapter is not there; "": all are. processes: of the start that loads them; a
    student that is only sampled needs no teachers, which may be gone."""
    for name, own in teachers.items():
        if (path := own["adapter"]) and not Path(path).exists():
            what = f"algorithm.teachers.{name}.adapter={path} does not exist{nearby(path)}"
            return f"{what}; give the folder of a run, or of a LoRA"
    return ""


def unrouted(teachers: Mapping[str, Any], route: str, prompts: Sequence[Mapping[str, Any]]) -> str:
    """Say which prompts have no teacher; "": all have one."""
    domains = [name for own in teachers.values() for name in own["domains"] or ()]
    if not domains:  # a single teacher, of all prompts
        return ""
    if bare := [row["prompt"] for row in prompts if not isinstance(row.get(route), str)]:
        return (
            f'{len(bare)} of {len(prompts)} prompts have no "{route}", as'
            f' "{printable(bare[0], 60)}"; write {{"prompt": ..., "{route}": "{domains[0]}"}} in a'
            " .jsonl of prompts, or name another column with algorithm.route"
        )
    if lost := [row[route] for row in prompts if row[route] not in domains]:
        word = printable(lost[0], 60)
        return (
            f'no teacher has the {route} "{word}" of prompts{registry.did_you_mean(word, domains)}'
        )
    return ""


class OPDConfig(base.Anchor):
    teachers: dict[Annotated[str, Field(pattern=r"^\w[\w-]*$")], TeacherOptions] = Field(
        {}, description="Teachers: name -> {adapter or model, guidance, domains}."
    )
    route: str = Field("domain", description="Column of the prompts that has the domain of each.")
    target: Literal["xt", "v", "x0"] = Field(
        "xt",
        description=(
            "What is compared with the teacher's: the mean of the next state (xt), the velocity"
            " (v) or the clean prediction (x0)."
        ),
    )
    scaled: Annotated[bool, read_when("algorithm.target", "xt") & read_above("sampler.eta", 0)] = (
        Field(
            True,
            description="Divide an SDE step's distance by its std: then the loss is the steps' KL.",
        )
    )
    constant: PositiveFloat = Field(
        0.5, description="Factor of the mean square distance; 1/2 is that of the KL."
    )
    normalise: bool = Field(
        False,
        description=(
            "Divide a step's square distance by its mean distance, which has no gradient: then the"
            " gradient has one size at all steps."
        ),
    )
    range: float = Field(
        0.99, gt=0, le=1, description="Share of the steps, from noise on, that is trained."
    )
    sde: Annotated[str, AfterValidator(known_sde), read_above("sampler.eta", 0)] = Field(
        "flow_sde", description="The SDE step of rollouts."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("algorithm.teachers", "output", "train.mode"), wrong_teachers),
        Rule(("algorithm.teachers", "processes"), missing),
        Rule(("algorithm.teachers", "algorithm.route", "prompts"), unrouted),
        base.WATCHED,
        *(
            Rule(
                (key,),
                f"{{0}} does not go with teachers, {why}; leave it out",
                when=partial(ne, usual),
            )
            for key, (usual, why) in REFUSED.items()
        ),
    )


class OPD(base.Anchored):
    Config = OPDConfig
    config: OPDConfig

    def __init__(self, config: OPDConfig):
        super().__init__(config)
        self.needs = frozenset({"states"} | self.anchor_needs())
        # whether an SDE step's loss is divided by its variance
        self.divides = config.scaled and config.target == "xt"

    def plan(self, sigmas: Tensor, *, sampler: base.Sampler, iteration: int, seed: int) -> Plan:
        """Every step but the last is SDE, with noise; the first `range` of all are trained."""
        plan = plans.full(sigmas, eta=sampler.eta, sde=self.config.sde, init=sampler.init_noise)
        number = max(1, int(plan.edges * self.config.range + 1e-9))
        return dataclasses.replace(plan, trained=torch.arange(plan.edges) < number)

    def check(self, plan: Plan) -> None:
        self.check_anchor()
        eta = plan.eta[plan.trained]
        if sdes.find(plan.sde).learned:
            raise ValueError(f"algorithm.sde={plan.sde} takes noise that a policy learns; use cps")
        if not self.divides or not eta.any():
            return
        if not eta.all():
            raise ValueError(
                f"algorithm.range={self.config.range:g} trains the last step, whose std is 0, and"
                " the loss divides by it; use range=0.99, or algorithm.scaled=false"
            )
        if eta.min() < LEAST_ETA:
            raise ValueError(
                f"sampler.eta={eta.min():g} is nearly no noise, and the loss divides by it; use"
                f" sampler.eta=0 or at least {LEAST_ETA:g}, or algorithm.scaled=false"
            )

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        """1 for every sample, also where a reward that is only watched failed."""
        return torch.ones_like(rewards.total)

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """A row for each sample and trained step. scale (n,): of the distance of velocities, in the
        target's terms, over the step's std where the loss divides by it."""
        names = ("src", "sigma", "sigma_next", "eta", "noise_key")
        data = {name: getattr(rollout, name) for name in names}
        ones = torch.ones(len(rollout.src), device=rollout.src.device)
        data |= {"prompt": rollout.prompt[rollout.src], "weight": ones, "adv": ones}
        sample = torch.arange(len(ones), device=ones.device) // int(rollout.plan.trained.sum())
        data |= base.gate_column(advantages.kl_gate, sample)
        return Columns({**data, "scale": self.scales(rollout, Columns(data))})

    def scales(self, rollout: Rollout, rows: Columns) -> Tensor:
        """|Q| (n,) of a step x' = P x + Q v for xt, over its std; 1 for v; s of x0 = x - s v."""
        if self.config.target != "xt":
            return rows.sigma.float() if self.config.target == "x0" else rows.weight
        euler = (rows.sigma - rows.sigma_next).float()
        scale = pulls(rollout, rows)
        scale = scale / spreads(rollout, rows) if self.divides else scale
        return torch.where(rows.eta > 0, scale, euler)

    def velocities(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> tuple[Tensor, Tensor]:
        """The velocity of the present view, with the rollout's guidance, and that of the teacher,
        (n, *L) fp32 each; the teacher's first, so that no graph of the student waits meanwhile."""
        x = rollout.at(batch.src)
        place = x, batch.sigma, rollout.cond, batch.prompt
        target = policy.taught(*place)
        return policy.velocity(*place, guidance=rollout.guidance).float(), target

    def score(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> dict[str, Tensor]:
        """match (n,), the loss of a row; distance (n,), the mean square of v - the teacher's v;
        kl (n,), the loss towards the reference in place of the teacher, where it has a weight."""
        v, target = self.velocities(policy, rollout, batch)
        scores = {
            "match": self.matched(v - target, batch.scale),
            "distance": distance(v.detach(), target),
        }
        if self.config.kl_weight:
            place = rollout.at(batch.src), batch.sigma, rollout.cond, batch.prompt
            with torch.no_grad(), policy.view(self.anchor):
                other = policy.velocity(*place, guidance=rollout.guidance).float()
            scores["kl"] = self.matched(v - other, batch.scale)
        return scores

    def matched(self, gap: Tensor, scale: Tensor) -> Tensor:
        """constant * mean d^2 (n,) in fp32, d = scale * gap of velocities (n, *L); normalised, over
        mean |d| + 1e-8."""
        d = gap * expand(scale, gap)
        size = d.detach().abs().flatten(1).mean(1) + 1e-8 if self.config.normalise else 1
        return self.config.constant * d.square().flatten(1).mean(1) / size

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """Sum over rows of weight * (match + kl_weight * kl)."""
        metrics = {"policy/teacher_distance": scores["distance"]}
        term = base.plus_kl(scores["match"], scores, metrics, self.config.kl_weight)
        return base.summed(term, metrics, batch)

    def fit(self, policy: base.VelocityField, rollout: Rollout, batch: Columns) -> Tensor:
        v, target = self.velocities(policy, rollout, batch)
        return -distance(v, target)


ALGORITHM = OPD
