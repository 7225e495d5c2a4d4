"""A rollout never waits for its device between two steps; tests/helpers/far.py counts waits."""

import far
import pytest
import torch
from far import Away, send

from flowrl.policy import load_policy
from flowrl.policy.replay.arguments import map_tensors
from flowrl.rollouts.roll_out import roll_out
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import plan
from flowrl.types import PromptBatch

STEPS = 4


@pytest.fixture(scope="module")
def policy():
    """The embedded model, far away, and two prompts that were encoded before."""
    made = load_policy("shapes-sd3", lora={"rank": 2}, device="cpu")
    cond = made.encode(["a red circle", "two blue squares"])
    made.schedule(STEPS)
    for group in cond.groups:
        group.kept, group.shared = (map_tensors(far.far, v) for v in (group.kept, group.shared))
    send(made.modules["transformer"])
    made.encode = lambda *prompts: cond
    return made


@pytest.mark.parametrize("kind", ["noisy", "mixed", "second order"])
def test_a_rollout_waits_at_its_end_alone(kind, policy, monkeypatch):
    """Its columns are brought to the device, and one number is read: was every density finite?"""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator("cpu"))
    sigmas = policy.schedule(STEPS).sigmas
    path = {
        "noisy": lambda: plan.full(sigmas, eta=0.7),
        "mixed": lambda: plan.window(sigmas, start=1, size=2, eta=0.7),
        "second order": lambda: plan.ode(sigmas, solver="dpm2"),
    }[kind]()
    batch = PromptBatch(text=["a", "b"], ids=torch.arange(2), meta=[{}, {}])
    how = {"guidance": "pipeline", "seed": 0, "iteration": 0, "micro": 64, "group": 2}
    at_steps, advance = [], policy._velocity
    monkeypatch.setattr(
        policy, "_velocity", lambda r: at_steps.append(sum(far.waits.values())) or advance(r)
    )
    far.waits.clear()
    with Away():
        rollout = roll_out(policy, batch, path, ledger=Ledger("cpu"), **how)
    assert at_steps == [0] * STEPS and rollout.states.device == far.DEVICE
    assert far.waits["_local_scalar_dense"] == 1 and set(far.waits) <= {
        "_local_scalar_dense",
        "upload",
    }
