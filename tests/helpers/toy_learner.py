"""The trainer's gradient of several terms, of a toy policy in one process."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from flowrl.runtime.processes.world import World
from flowrl.training.update import Learner, Term

ALONE = World(
    SimpleNamespace(
        process_index=0,
        num_processes=1,
        is_main_process=True,
        clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
    )
)


def learner(policy):
    """What a Learner's gradient needs, around a toy policy."""
    made = object.__new__(Learner)
    policy.backward = torch.Tensor.backward
    made.policy, made.world, made.micro = policy, ALONE, 7
    made.cfg = SimpleNamespace(optimizer=SimpleNamespace(max_grad_norm=math.inf))
    parameters = dict(policy.net.named_parameters())
    made.weights = SimpleNamespace(
        parameters=parameters,
        optimizer=torch.optim.SGD(parameters.values()),
    )
    return made


def term(objective, rollout, rows):
    """The term of all rows, in one update."""
    whole = Term(objective=objective, rows=rows, rollout=rollout, turns=torch.zeros(3).long())
    return whole.part(0, ALONE)
