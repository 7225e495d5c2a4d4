"""Log-probs and precision: Flow-CPS's surrogate, masks, the law of ratios, always fp32."""

import math

import pytest
import torch

from flowrl.samplers import (
    cps,
    dance_sde,
    ddim,
    dpmpp,
    flow_sde,
    keys,
    ode,
    plan,
    sde,
    sigmas,
    tree,
)
from flowrl.types import SDE, Transition, expand

GRID = sigmas.shifted(6, 3)
ETA = {"flow_sde": 0.7, "dance_sde": 0.3, "langevin": 0.7, "cps": 0.8, "ddim": 1.0}


def steps_of(name, dims=7):
    """A plan's SDE edges with random v and x: (plan, v (5, dims), arguments of sde.transition after
    v)."""
    p = plan.full(GRID, eta=ETA[name], sde=name)
    noisy = p.kind == SDE
    v, x = torch.randn(5, dims), torch.randn(5, dims)
    return p, v, (x, p.sigma[noisy], p.sigma_next[noisy], p.eta[noisy])


# --- which log-prob a plan uses


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "ddim"])
def test_a_gaussian_plans_log_prob_is_the_gaussian_one(name):
    p, v, rest = steps_of(name)
    step, y = sde.transition(p, v, *rest), torch.randn(5, 7)
    assert torch.equal(sde.log_prob(p, step, y), step.log_prob(y))


def test_a_cps_plans_log_prob_is_the_surrogate_and_so_is_its_gradient():
    """At y = mean + std z: log-prob -std^2 mean(z^2), gradient in v (2/D) std z dmean/dv: without
    1/std^2 noisy steps weigh more."""
    p, v, rest = steps_of("cps")
    v, z = v.requires_grad_(), torch.randn(5, 7)
    step = sde.transition(p, v, *rest)
    y = step.sample(z).requires_grad_()
    lp = sde.log_prob(p, step, y)
    assert torch.equal(lp, cps.log_prob(step, y)) and not torch.allclose(
        lp, step.log_prob(y), atol=0.1
    )
    assert torch.allclose(lp, -(step.std**2 * z**2).mean(1), atol=1e-6)
    (slope,) = torch.autograd.grad(lp.sum(), v)
    s, t = (u[:, None].float() for u in rest[1:3])
    on_v = t * math.cos(0.4 * math.pi) * (1 - s) - (1 - t) * s  # eps = x + (1 - s) v, x0 = x - s v
    assert torch.allclose(slope, 2 / 7 * step.std.detach() * z * on_v, atol=1e-6)
    # y is data
    assert torch.autograd.grad(sde.log_prob(p, step, y).sum(), y, allow_unused=True) == (None,)


def test_a_cps_rollout_stores_the_surrogate():
    p = plan.full(GRID, eta=0.8, sde="cps")
    grown = tree.grow(
        lambda x, s, r: torch.tanh(x),
        lambda k: keys.gaussian(k, (7,)),
        p,
        shape=(7,),
        rows=torch.arange(3),
    )
    z = keys.gaussian(keys.key("own", grown.noise_key), (7,))
    std = grown.sigma_next * math.sin(0.4 * math.pi)
    assert torch.allclose(
        grown.log_prob.double(), -(std**2) * z.double().square().mean(1), rtol=1e-4, atol=1e-6
    )


# --- masks


def two_by_three():
    step = Transition(mean=torch.randn(2, 3, 4), std=torch.tensor([0.3, 0.8]).reshape(2, 1, 1))
    return step, torch.randn(2, 3, 4)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_masked_log_prob_is_that_of_the_selected_dims(reduction):
    step, y = two_by_three()
    keep = torch.tensor([True, False, True])  # the same frames in both rows
    part = Transition(mean=step.mean[:, keep], std=step.std).log_prob(
        y[:, keep], reduction=reduction
    )
    assert torch.allclose(
        step.log_prob(y, reduction=reduction, mask=keep[:, None]), part, atol=1e-6
    )
    assert torch.allclose(
        step.log_prob(y, reduction=reduction, mask=torch.ones(1, 1, 1).bool()),
        step.log_prob(y, reduction=reduction),
    )
    each = torch.rand(2, 3, 4) < 0.5  # other dims in each row
    expected = [
        torch.distributions.Normal(step.mean[i], step.std[i]).log_prob(y[i])[each[i]]
        for i in range(2)
    ]
    expected = torch.stack([e.mean() if reduction == "mean" else e.sum() for e in expected])
    assert torch.allclose(step.log_prob(y, reduction=reduction, mask=each), expected, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["mean", "y"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_a_mask_leaves_out_reaches_neither_value_nor_gradient(where, bad, reduction):
    """Select before arithmetic, 0 * NaN = NaN."""
    step, y = two_by_three()
    mask = torch.rand(2, 3, 4) < 0.5
    mean = step.mean.clone().requires_grad_()
    clean = Transition(mean=mean, std=step.std).log_prob(y, reduction=reduction, mask=mask)
    (expected,) = torch.autograd.grad(clean.sum(), mean)
    spoilt = torch.where(
        mask, mean.detach(), bad if where == "mean" else mean.detach()
    ).requires_grad_()
    out = Transition(mean=spoilt, std=step.std).log_prob(
        torch.where(mask, y, bad if where == "y" else y), reduction=reduction, mask=mask
    )
    (slope,) = torch.autograd.grad(out.sum(), spoilt)
    assert torch.equal(out, clean) and torch.equal(slope, expected)
    assert bool((slope[~mask] == 0).all()) and bool((slope[mask] != 0).all())


def test_a_mask_may_leave_out_whole_rows_deterministic_ones_too():
    step, y = two_by_three()
    mask = torch.tensor([False, True]).reshape(2, 1, 1)
    flat = Transition(mean=step.mean, std=torch.tensor([0.0, 0.8]).reshape(2, 1, 1))
    for reduction in ("mean", "sum"):
        out = flat.log_prob(y, reduction=reduction, mask=mask)
        assert float(out[0]) == 0 and torch.allclose(
            out[1], step.log_prob(y, reduction=reduction)[1], atol=1e-6
        )
    with pytest.raises(ValueError, match="deterministic"):
        flat.log_prob(y, mask=~mask)


# --- the law of ratios


@pytest.mark.parametrize("dims", [2, 5])
def test_the_expected_ratio_is_one_for_sums_and_below_one_for_means(dims):
    """E[ratio] = exp(-(K/D)(1 - 1/D)) with mean reduction, K = |delta mean|^2 / (2
    std^2); 1 with sum reduction."""
    n, std, delta = 200_000, 0.4, torch.full((dims,), 0.7 * 0.4)
    old = Transition(mean=torch.zeros(n, dims), std=torch.tensor(std))
    new = Transition(mean=old.mean + delta, std=old.std)
    y = old.sample(keys.gaussian(torch.tensor([1]), (n, dims))[0])
    k = float(delta.square().sum()) / (2 * std**2)
    for reduction, expected in (("sum", 1.0), ("mean", math.exp(-k / dims * (1 - 1 / dims)))):
        ratio = (
            (new.log_prob(y, reduction=reduction) - old.log_prob(y, reduction=reduction))
            .double()
            .exp()
        )
        assert float(ratio.mean()) == pytest.approx(
            expected, abs=4 * float(ratio.std()) / n**0.5
        ), reduction
    assert expected < 0.95  # the two laws are told apart


# --- precision

TRANSITIONS = {
    "ode": lambda v, x, s, t: ode.transition(v, x, s, t),
    "flow_sde": lambda v, x, s, t: flow_sde.transition(v, x, s, t, eta=0.7, sigma_cap=0.95),
    "dance_sde": lambda v, x, s, t: dance_sde.transition(v, x, s, t, eta=0.3),
    "cps": lambda v, x, s, t: cps.transition(v, x, s, t, eta=0.8),
    "ddim": lambda v, x, s, t: ddim.transition(v, x, s, t, eta=1.0),
}
# exact in bf16
S, NEXT = (
    torch.tensor([1.0, 0.9375, 0.5, 0.25, 0.03125]),
    torch.tensor([0.9375, 0.75, 0.375, 0.125, 0.015625]),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", TRANSITIONS)
def test_every_transition_computes_in_fp64_and_answers_in_fp32_whatever_comes_in(name, dtype):
    """bf16 overflows in the mean; x' - mean is small and would be rounded away."""
    v, x = torch.randn(5, 4).to(dtype), torch.randn(5, 4).to(dtype)
    for s, t in ((S, NEXT), (S[2], NEXT[2]), (S.to(dtype), NEXT.to(dtype))):
        got, expected = (
            TRANSITIONS[name](v, x, s, t),
            TRANSITIONS[name](v.double(), x.double(), s.double(), t.double()),
        )
        assert got.mean.dtype == got.std.dtype == torch.float32
        assert torch.equal(got.mean, expected.mean) and torch.equal(got.std, expected.std)
        if name != "ode":
            lp = got.log_prob(x)
            assert lp.dtype == torch.float32 and torch.equal(lp, expected.log_prob(x.float()))


def test_the_cps_surrogate_is_fp32_whatever_the_sample_is():
    step, y = (
        Transition(mean=torch.randn(3, 5), std=torch.tensor(0.2)),
        torch.randn(3, 5).bfloat16(),
    )
    assert cps.log_prob(step, y).dtype == torch.float32 and torch.equal(
        cps.log_prob(step, y), cps.log_prob(step, y.float())
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_dpmpp_step_computes_and_answers_in_fp32_whatever_comes_in(dtype):
    v, x, prev = (torch.randn(5, 4).to(dtype) for _ in range(3))
    for s, t, p in ((S, NEXT, (S + 0.03125).clamp(max=1)), (S[2], NEXT[2], S[1])):
        for history in (None, prev):
            got = dpmpp.step(v, x, s, t, history, p)
            expected = dpmpp.step(
                v.float(),
                x.float(),
                s.double(),
                t.double(),
                None if history is None else prev.float(),
                p.double(),
            )
            assert got.dtype == torch.float32 and torch.equal(got, expected)


def published(name, s, t):
    """(on x, on v, std) of the published formulas in Python floats: fp64 from start to end."""
    d = s - t
    if name in ("flow_sde", "dance_sde"):
        g = 0.7 * math.sqrt(s / (1 - (0.95 if s == 1 else s))) if name == "flow_sde" else 0.3
        return 1 - g**2 * d / (2 * s), -(1 + g**2 * (1 - s) / (2 * s)) * d, g * math.sqrt(d)
    if name == "cps":
        std, kept = t * math.sin(0.4 * math.pi), t * math.cos(0.4 * math.pi)
    else:
        a, a2 = ((1 - u) ** 2 / ((1 - u) ** 2 + u**2) for u in (s, t))
        std = t * math.sqrt((1 - a / a2) / (1 - a))
        kept = math.sqrt(t * t - std * std)
    return (1 - t) + kept, kept * (1 - s) - (1 - t) * s, std


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "cps", "ddim"])
def test_every_transition_is_the_specs_formula_to_fp32_accuracy(name):
    """Also where 1 - s or s - s' is small: coefficients are fp64 before they are rounded once."""
    for s, t in ((1.0, 0.95), (0.9989, 0.9988), (0.9, 0.3), (0.5, 0.49999), (0.02, 0.001)):
        on_x, on_v, std = published(name, s, t)
        x = torch.tensor([[1.0, 0.0]])
        step = TRANSITIONS[name](x.flip(1), x, *torch.tensor([s, t], dtype=torch.float64))
        assert step.mean[0].tolist() == pytest.approx([on_x, on_v], rel=1.5e-7, abs=1e-9), (s, t)
        assert float(step.std) == pytest.approx(std, rel=1.5e-7), (s, t)


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "cps", "ddim"])
def test_log_probs_are_bit_exact_when_kernel_and_batch_are_the_same(name):
    """Each step of a rollout again, on the same rows."""

    def velocity(x, s, rows):
        return torch.tanh(x) * expand(0.5 + s, x).float() + 0.3 * expand(rows, x).float()

    p = plan.full(GRID, eta=ETA[name], sde=name)
    grown = tree.grow(
        velocity,
        lambda k: keys.gaussian(k, (3, 4)),
        p,
        shape=(3, 4),
        rows=torch.tensor([0, 1, 0, 2]),
    )
    for step in range(5):
        rows = torch.nonzero(grown.edge == step).flatten()
        x, y = grown.states[grown.src[rows]], grown.states[grown.dst[rows]]
        v = velocity(x, grown.state_sigma[grown.src[rows]], grown.prompt[grown.src[rows]])
        now = sde.transition(p, v, x, grown.sigma[rows], grown.sigma_next[rows], grown.eta[rows])
        assert torch.equal(sde.log_prob(p, now, y), grown.log_prob[rows]), step
