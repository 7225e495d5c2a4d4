"""Neither a rollout between two steps nor an update between two micro-batches waits for its device;
tests/helpers/far.py counts waits."""

from dataclasses import fields, replace
from types import SimpleNamespace

import far
import long
import pytest
import torch
from far import Away, send

from flowrl.algorithms import grpo, nft
from flowrl.policy import load_policy
from flowrl.policy.replay.arguments import map_tensors
from flowrl.rollouts.roll_out import roll_out
from flowrl.runtime.ledger import CountedPolicy, Ledger
from flowrl.samplers import plan
from flowrl.training.gradient import accumulate
from flowrl.types import Advantages, Columns, PromptBatch

STEPS = 4


@pytest.fixture(scope="module")
def policy():
    """The embedded model, far away, and two prompts that were encoded before."""
    made = load_policy("shapes-sd3", lora={"rank": 2}, device="cpu")
    cond = made.encode(["a red circle", "two blue squares"])
    made.schedule(STEPS)
    made.trainable.add_view("old")
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


METHODS = {
    "flow_grpo": (grpo, {"plan": "full", "kl_weight": 0.04}),
    "mix_grpo": (grpo, {"plan": "window", "window": {"size": 2}}),
    "tree_grpo": (grpo, {"plan": "tree", "tree": {"children": 2}, "window": {"size": 2}}),
    "sequences": (grpo, {"plan": "full", "ratio": "sequence"}),
    "nft": (nft, {}),
}


@pytest.mark.parametrize("name", long.but(METHODS, METHODS.keys() - {"flow_grpo"}))
def test_an_update_waits_before_its_first_micro_batch_alone(name, policy, monkeypatch):
    """Places, keys and noise levels are brought to the host once; gradients arrive far away."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator("cpu"))
    module, options = METHODS[name]
    algorithm = module.ALGORITHM(module.ALGORITHM.Config(**options))
    sampler = SimpleNamespace(eta=0.7, init_noise="sample")
    path = algorithm.plan(policy.schedule(STEPS).sigmas, sampler=sampler, iteration=0, seed=0)
    batch = PromptBatch(text=["a", "b"], ids=torch.arange(2), meta=[{}, {}])
    how = {"guidance": "pipeline", "seed": 0, "iteration": 0, "micro": 64}
    ledger, at_steps, advance = Ledger("cpu"), [], policy._velocity
    with Away():
        rollout = roll_out(policy, batch, path, ledger=ledger, group=2 * path.leaves, **how)
    rows = columns(algorithm, rollout)[far.far(torch.arange(6))]
    parameters = list(policy.parts["denoiser"].values())
    policy.same("default", "old")  # compared once a step, before it
    monkeypatch.setattr(
        policy, "_velocity", lambda r: at_steps.append(sum(far.waits.values())) or advance(r)
    )
    far.waits.clear()
    with Away():
        counted = CountedPolicy(policy, ledger)
        accumulate(
            algorithm,
            counted,
            rollout,
            rows,
            micro=1,
            total_weight=float(len(rows)),
            backward=counted.backward,
        )
    assert len(at_steps) > 2 and set(at_steps) == {at_steps[0]}
    assert sum(far.waits.values()) == at_steps[0] and set(far.waits) == {"download"}
    assert all(isinstance(p.grad, far.Far) for p in parameters if p.requires_grad)


def columns(algorithm, rollout):
    """What an algorithm trains of a rollout, found near by and sent away."""
    at_hand = {f.name: far.near(getattr(rollout, f.name)) for f in fields(rollout)}
    rollout = replace(rollout, **at_hand)
    draw = torch.Generator().manual_seed(1)
    leaf, edge = (torch.randn(len(t), generator=draw) for t in (rollout.leaf, rollout.src))
    rows = algorithm.columns(rollout, Advantages(leaf=leaf, transition=edge), seed=0, iteration=0)
    return Columns({name: far.far(column) for name, column in rows.data.items()})
