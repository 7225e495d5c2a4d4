"""A plain nn.Module as a policy."""

import pytest
import tiny
import torch

from flowrl.policy import load_policy


class Eps(torch.nn.Module):
    """Predicts a linear noise estimate; enough to check coordinates."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.w = kind, torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, x, t, cond):
        return self.w * x + cond


@pytest.mark.parametrize("kind", ["flow", "eps", "x0"])
def test_a_module_becomes_a_velocity_whatever_it_predicts(kind):
    """x_s = (1-s) x0 + s eps: v = eps - x0 = (eps - x) / (1 - s) = (x - x0) / s."""
    policy = load_policy(Eps(kind), shape=(2,), kind=kind, cond=tiny.toy_cond)
    x, s, rows = (
        torch.randn(3, 2),
        torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64),
        torch.tensor([1, 0, 1]),
    )
    out = 0.3 * x + tiny.toy_cond(tiny.PROMPTS)[rows]
    t = s.float()[:, None]
    expected = {"flow": out, "eps": (out - x) / (1 - t), "x0": (x - out) / t}[kind]
    assert torch.allclose(
        policy.velocity(x, s, policy.encode(tiny.PROMPTS), rows), expected, atol=1e-5
    )
    assert policy.calls == 3 and policy.latent_shape == (2,)


def test_the_exact_flow_of_a_gaussian_carries_noise_to_it():
    """x0 ~ N(cond, 0.5^2): after 100 Euler steps the sample has that mean and spread (4,000
    samples, 4 standard errors, Euler bias 0.01)."""
    policy = load_policy(tiny.GaussianFlow(2, 0.5), shape=(2,), cond=tiny.toy_cond)
    cond, rows, n = policy.encode(tiny.PROMPTS), torch.ones(4000, dtype=torch.long), 100
    schedule = policy.schedule(n)
    x = policy.init(torch.randn(4000, 2), 1.0)
    with torch.no_grad():
        for s0, s1 in zip(schedule.sigmas, schedule.sigmas[1:], strict=False):
            x = x + policy.velocity(x, s0, cond, rows) * (s1 - s0).item()
    assert torch.allclose(x.mean(0), tiny.toy_cond(tiny.PROMPTS)[1], atol=0.05)
    assert torch.allclose(x.std(0), torch.full((2,), 0.5), atol=0.04)


def test_the_toy_flow_learns_a_gaussian_in_seconds():
    policy = load_policy(tiny.pretrain_toy(tiny.ToyFlow()), shape=(2,), cond=tiny.toy_cond)
    x, cond, rows = (
        torch.randn(1000, 2),
        policy.encode(tiny.PROMPTS),
        torch.zeros(1000, dtype=torch.long),
    )
    with torch.no_grad():
        for s0, s1 in zip(policy.schedule(20).sigmas, policy.schedule(20).sigmas[1:], strict=False):
            x = x + policy.velocity(x, s0, cond, rows) * (s1 - s0).item()
    assert x.mean(0).abs().max() < 0.2 and (x.std(0) - 1).abs().max() < 0.2


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 2}], ids=["full", "lora"])
def test_views_state_and_files_work_for_modules(lora, tmp_path):
    def fresh():
        return load_policy(tiny.ToyFlow(), shape=(2,), cond=tiny.toy_cond, lora=lora)

    policy = fresh()
    x, cond, rows = torch.randn(4, 2), policy.encode(tiny.PROMPTS), torch.tensor([0, 1, 1, 0])
    start = policy.velocity(x, 0.5, cond, rows).detach()
    policy.trainable.add_view("old")
    with torch.no_grad():
        for p in policy.parts["denoiser"].values():
            p.add_(0.1)
    moved = policy.velocity(x, 0.5, cond, rows)
    assert not torch.allclose(moved, start, atol=1e-3)
    with torch.no_grad(), policy.view("old"):
        assert torch.allclose(policy.velocity(x, 0.5, cond, rows), start)
    moved.sum().backward()
    assert all(p.grad is not None for p in policy.parts["denoiser"].values())
    other = fresh()
    other.trainable.load("default", policy.state())
    assert torch.allclose(other.velocity(x, 0.5, cond, rows), moved)
    if lora:
        policy.save_lora(tmp_path)
        another = fresh()
        another.load_lora(tmp_path)
        assert torch.allclose(another.velocity(x, 0.5, cond, rows), moved)
        more = load_policy(
            tiny.ToyFlow(), shape=(2,), cond=tiny.toy_cond, lora={"rank": 2, "alpha": 8}
        )
        more.load_lora(tmp_path)
        assert torch.allclose(more.velocity(x, 0.5, cond, rows), moved, atol=1e-6)
    else:
        with pytest.raises(ValueError, match="no LoRA adapter"):
            policy.save_lora(tmp_path)


def test_misuse_of_a_module_policy_is_explained():
    with pytest.raises(ValueError, match="needs shape"):
        load_policy(tiny.ToyFlow())
    with pytest.raises(ValueError, match="allowed are flow, eps"):
        load_policy(tiny.ToyFlow(), shape=(2,), kind="score")
    policy = load_policy(tiny.ToyFlow(), shape=(2,), cond=tiny.toy_cond)
    cond, rows = policy.encode(tiny.PROMPTS), torch.tensor([0])
    with pytest.raises(ValueError, match="no unconditional branch"):
        policy.velocity(torch.zeros(1, 2), 0.5, cond, rows, guidance=2.0)
    with pytest.raises(ValueError, match=r"expected \(n, 2\)"):
        policy.velocity(torch.zeros(1, 3), 0.5, cond, rows)
