"""Small networks beside a policy's own: what they read, their views, and frozen networks."""

import pytest
import tiny
import torch
from torch import nn

from flowrl.policy import load_policy
from flowrl.policy.weights import heads

NOISE = {"step_noise": {"least": 0.1}}
START = {"initial_noise": {"offset": 1.0, "spread": 2.0, "cells": 2}}


def module_policy(lora=None):
    def cond(texts):
        return torch.tensor([[float(len(text)), 1.0] for text in texts])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x, t, cond):
            return self.layer(torch.cat([x, t[:, None], cond], 1))

    torch.manual_seed(0)
    return load_policy(Net(), shape=(2,), cond=cond, lora=lora)


def with_heads(lora=None, options=NOISE, seed=0):
    policy = module_policy(lora)
    policy.trainable.set_heads(heads.make(options, (2,), seed))
    return policy


@pytest.mark.parametrize(
    ("name", "argument"), [("sd3", "pooled_projections"), ("sd15", "encoder_hidden_states")]
)
def test_a_pipelines_features_are_what_its_conditional_branch_gets(name, argument):
    policy = tiny.policy(name, lora={"rank": 2, "alpha": 4})
    seen = []
    policy.modules[next(iter(policy.modules))].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs[argument]), with_kwargs=True
    )
    cond, rows = policy.encode(tiny.PROMPTS), torch.tensor([1, 0, 1])
    policy.velocity(torch.randn(3, *policy.latent_shape), 0.5, cond, rows, guidance="none")
    given = seen[-1].float() if seen[-1].ndim == 2 else seen[-1].float().mean(1)
    found = policy.features(cond, rows)
    assert torch.allclose(found, given) and not found.requires_grad
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])


def test_a_modules_features_are_its_cond_and_none_without_one():
    policy = module_policy()
    cond = policy.encode(["a", "abc"])
    assert policy.features(cond, torch.tensor([1, 0])).tolist() == [[3.0, 1.0], [1.0, 1.0]]
    policy.cond = None
    assert policy.features(policy.encode(["a"]), torch.tensor([0])) is None
    head = heads.make(NOISE, (2,), 0)["step_noise"]
    assert head(torch.ones(3), None, torch.full((3,), 0.2)).shape == (3, 2)


def test_first_values_are_functions_of_the_seed_and_the_name():
    def weights(seed):
        made = heads.make({**NOISE, **START}, (2, 4, 4), seed)
        return {name: head.layers[0].weight for name, head in made.items()}

    torch.manual_seed(5)
    a, b, c = weights(0), weights(0), weights(1)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["step_noise"], c["step_noise"])
    assert not torch.equal(a["step_noise"], a["initial_noise"])


@pytest.mark.parametrize("lora", [None, {"rank": 1, "alpha": 1}])
def test_views_hold_heads_too_and_the_reference_is_how_they_began(lora):
    policy = with_heads(lora)
    policy.trainable.add_view("old")
    if lora is None:
        policy.trainable.add_view("reference")
    weight = policy.parts["step_noise"]["step_noise.layers.4.bias"]
    began = weight.detach().clone()
    weight.data.fill_(1.0)
    policy.trainable.copy("default", "old", decay=0.5)
    seen = {}
    for name in ("default", "old", "reference"):
        with policy.view(name):
            seen[name] = weight.detach().clone()
    assert torch.equal(seen["default"], torch.ones(2)) and torch.equal(weight, torch.ones(2))
    assert torch.equal(seen["old"], torch.full((2,), 0.5)) and torch.equal(seen["reference"], began)


def test_state_holds_both_and_is_loaded_strictly():
    policy, other = with_heads({"rank": 1, "alpha": 1}), with_heads({"rank": 1, "alpha": 1}, seed=1)
    state = policy.state()
    assert {name.partition(".")[0] for name in state} == {"module", "step_noise"}
    other.trainable.load("default", state)
    assert all(torch.equal(state[name], value) for name, value in other.state().items())
    lost = {k: v for k, v in state.items() if k != "step_noise.layers.0.bias"}
    with pytest.raises(ValueError, match=r"missing \['step_noise.layers.0.bias'\]"):
        other.trainable.load("default", lost)
    other.trainable.set_heads(None)
    with pytest.raises(ValueError, match="step_noise"):
        other.trainable.load("default", state)


def test_the_lora_file_has_no_heads(tmp_path):
    policy = with_heads({"rank": 1, "alpha": 1})
    policy.save_lora(tmp_path)
    plain = module_policy({"rank": 1, "alpha": 1})
    plain.load_lora(tmp_path)
    policy.load_lora(tmp_path)  # its heads stay
    assert policy.trainable.heads and not plain.trainable.heads
    assert [file.name for file in heads.save(policy.trainable.heads, tmp_path)] == [
        "step_noise.safetensors"
    ]


@pytest.mark.parametrize("lora", [None, {"rank": 1, "alpha": 1}])
def test_a_frozen_policy_trains_its_heads_alone_and_thaws(lora):
    policy = with_heads(lora)
    own = {id(p) for p in policy.parts["denoiser"].values()}
    policy.trainable.freeze()
    policy.trainable.freeze()
    assert set(policy.parts) == {"step_noise"} and set(policy.state()) == set(
        policy.parts["step_noise"]
    )
    assert not any(p.requires_grad for p in policy.modules["module"].parameters())
    policy.trainable.add_view("old")
    policy.trainable.load("old", policy.state())
    with pytest.raises(ValueError, match="own weights are not trained"):
        policy.trainable.load("default", {"module.layer.weight": torch.ones(2, 5)})
    policy.trainable.freeze(False)
    assert {id(p) for p in policy.parts["denoiser"].values()} == own
    assert all(p.requires_grad for p in policy.parts["denoiser"].values())


def test_a_head_that_is_not_there_is_named():
    policy = module_policy()
    cond = policy.encode(["a"])
    with pytest.raises(ValueError, match="no head step_noise; add it to train.parts"):
        policy.step_std(cond, torch.ones(1), torch.tensor([0]), torch.ones(1))
