"""Frozen teachers of a distillation: LoRA on the network that is trained, or whole models.

A prompt's teacher is that of its domain, and is asked with the guidance that it was trained with.
No checkpoint holds teachers: a run's identity does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flowrl.policy.lora_read as lora_read
from flowrl.policy.base import Policy
from flowrl.policy.replay.arguments import Cond
from flowrl.runtime.ledger import CountedPolicy
from flowrl.runtime.store.run_folder import is_run, lora_folder


@dataclass(slots=True, kw_only=True)
class Teacher:
    """A frozen velocity field."""

    policy: Policy  # the student's, for a LoRA on its network; else one of its own
    view: str  # view of that policy's weights
    guidance: float | str  # see Policy.velocity
    domains: Sequence[str] | None  # domains of the prompts that it teaches; None: all prompts
    encoded: tuple[Any, Any] = (None, None)  # newest cond of the student, and the teacher's own


class Teachers:
    """The teachers of a run by name, and which of them each prompt of an iteration has."""

    def __init__(self, table: Mapping[str, Teacher], route: str) -> None:
        self.table, self.route = dict(table), route  # route: field of metadata with the domain
        self.number = torch.empty(0, dtype=torch.int64)  # (P,) place of each prompt's teacher

    def begin(self, meta: Sequence[Mapping[str, Any]]) -> None:
        """Take over the P prompts of an iteration, by their metadata."""
        domains = [teacher.domains for teacher in self.table.values()]
        own = [
            next(k for k, known in enumerate(domains) if known is None or row[self.route] in known)
            for row in meta
        ]
        self.number = torch.tensor(own)

    @torch.no_grad()
    def velocity(
        self, student: CountedPolicy, x: Tensor, sigma: Tensor, cond: Cond, rows: Tensor
    ) -> Tensor:
        """Return the velocity (n, *L) fp32 of each row's teacher, by one call of each teacher; its
        guidance may make more network rows of them than the student has.

        x (n, *L), sigma (n,) and rows (n,) into cond, the student's: see Policy.velocity. student:
        in whose books the calls are.
        """
        out, number = torch.zeros_like(x, dtype=torch.float32), self.number.to(rows.device)[rows]
        for k, teacher in enumerate(self.table.values()):
            if not len(at := (number == k).nonzero().flatten()):
                continue
            books: dict[str, Any] = {"autocast": student.autocast, "phase": student.phase}
            asked, own = CountedPolicy(teacher.policy, student.ledger, **books), cond
            with asked.view(teacher.view):
                if teacher.policy is not student.policy:
                    if teacher.encoded[0] is not cond:  # a model of its own encodes them again
                        given = [item.conditions for item in cond.items]
                        made = teacher.policy.encode([*map(str, cond.prompts)], given)
                        teacher.encoded = cond, made
                    own = teacher.encoded[1]
                place = x[at], sigma[at], own, rows[at]
                out[at] = asked.velocity(*place, guidance=teacher.guidance)
        return out


def load(
    student: Policy, options: Any, steps: int, load_model: Callable[[str], Policy]
) -> Teachers:
    """Load the teachers of a method's options (algorithms/opd.py); ValueError for one that does not
    fit the student. steps: of rollouts; load_model: makes the policy of a whole model."""
    table = {}
    for name, own in options.teachers.items():
        what, policy, view = f"algorithm.teachers.{name}", student, f"teacher_{name}"
        try:
            if own.adapter is not None:
                path, pipe = lora_folder(Path(own.adapter)), getattr(student, "pipe", None)
                if is_run(path):  # and not the LoRA in it
                    word = f"let it end, or give a run that trained all weights as {what}.model"
                    raise ValueError(f"the run {path} has written no LoRA; {word}")
                layers = lora_read.layers_of(path, student.trainable.modules, pipe)
                student.trainable.add_frozen(view, layers)
            else:
                policy, view = load_model(own.model), "default"
                check_alike(student, policy, steps)
                policy.trainable.freeze()
                for network in policy.networks.values():
                    network.eval()
            policy.branches(own.guidance)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error
        kind = {"policy": policy, "view": view, "guidance": own.guidance}
        table[name] = Teacher(**kind, domains=own.domains)
    return Teachers(table, options.route)


def check_alike(student: Policy, teacher: Policy, steps: int) -> None:
    """ValueError for a teacher with the student's own network, with other latents or other noise
    levels."""
    if {*map(id, teacher.networks.values())} & {*map(id, student.networks.values())}:
        raise ValueError("it is the network that is trained; load a model of its own")

    def facts(policy: Policy) -> dict[str, Any]:
        known, coords = policy.schedule(steps), getattr(policy, "coords", None)
        levels = [round(sigma, 4) for sigma in known.sigmas.tolist()]
        times = [round(float(time), 2) for time in known.times]
        kind = getattr(coords, "prediction", None)
        shape = {"latents of shape": policy.latent_shape, "the prediction type": kind}
        return {**shape, "the noise levels": levels, "the times": times}

    for (fact, own), other in zip(facts(student).items(), facts(teacher).values(), strict=True):
        if own != other:
            raise ValueError(
                f"it has {fact} {other}, and the model that is trained {own}; use a teacher of the"
                " student's latent space and levels"
            )
