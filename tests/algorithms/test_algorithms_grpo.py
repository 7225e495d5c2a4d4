"""GRPO: at the behaviour policy, by hand, against closed forms, and learning."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from toy import (
    SAMPLER,
    ToyPolicy,
    advantages_of,
    gradient,
    learn,
    prepared,
    rewards_of,
    roll_out,
    to_the_right,
)

from flowrl import advantages as credit
from flowrl.algorithms.grpo import ALGORITHM
from flowrl.config import build
from flowrl.config.facts import of_config
from flowrl.config.load import load_config
from flowrl.samplers import plan, sigmas
from flowrl.types import Columns


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


CONFIGS = {
    "full": {},
    "window": {"plan": "window", "window": {"size": 2}},
    "dance": {"sde": "dance_sde", "timestep_fraction": 0.6},
    "cps": {"sde": "cps", "plan": "window", "window": {"size": 3, "high": 4, "schedule": "random"}},
    "ddim": {"sde": "ddim"},
    "flash": {"plan": "window", "window": {"size": 2, "schedule": "frozen"}, "tail": 0.4},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_at_the_behaviour_policy_the_ratio_is_one_and_the_loss_minus_the_mean_advantage(name):
    algorithm = make(**CONFIGS[name])
    policy, rollout, _, rows = prepared(algorithm)
    scores = algorithm.score(policy, rollout, rows)
    assert (
        scores["log_prob"] - rows.log_prob
    ).abs().max() < 2e-6  # not the rollout's batch: rounding only
    exact = Columns({**rows.data, "log_prob": scores["log_prob"].detach()})
    out = algorithm.loss(scores, exact)
    assert float(out.metrics["policy/clip_fraction"]) == 0
    assert float(out.metrics["policy/log_ratio"]) == 0
    assert out.loss.item() == pytest.approx(-float(rows.adv.sum()), abs=1e-4)
    out.loss.backward()
    got = gradient(policy.net)
    policy.zero_grad()
    (-(rows.adv * algorithm.score(policy, rollout, rows)["log_prob"]).sum()).backward()
    assert torch.allclose(got, gradient(policy.net), rtol=1e-4, atol=1e-5)
    assert float(got.abs().max()) > 1e-3


def test_a_group_of_advantages_sums_to_zero_and_so_does_the_loss():
    algorithm = make()
    policy, rollout, advantages, rows = prepared(algorithm)
    assert float(advantages.leaf.view(3, 8).sum(1).abs().max()) < 1e-5
    assert abs(algorithm.loss(algorithm.score(policy, rollout, rows), rows).loss.item()) < 1e-3


@pytest.mark.parametrize(
    ("adv", "log_ratio", "term", "clipped"),
    [
        (2.0, 0.0, -2.0, 0),
        (2.0, 0.5, -2.0 * 1.2, 1),  # e^.5 = 1.65 > 1.2: clipped
        (2.0, -0.5, -2.0 * math.exp(-0.5), 0),  # the pessimistic side is not clipped
        (-1.0, -0.5, 0.9, 1),  # e^-.5 = .61 < .9: clipped
        (-1.0, 0.5, math.exp(0.5), 0),
    ],
)
def test_clipped_surrogate_by_hand(adv, log_ratio, term, clipped):
    algorithm = make(clip=(0.1, 0.2))
    one = torch.ones(1)
    batch = Columns({"adv": adv * one, "log_prob": -3 * one, "weight": 2 * one})
    scores = {"log_prob": (-3 + log_ratio) * one}
    out = algorithm.loss(scores, batch)
    assert float(out.loss) == pytest.approx(2 * term, rel=1e-6)
    assert float(out.metrics["policy/clip_fraction"]) == 2 * clipped
    assert float(out.metrics["policy/log_ratio"]) == pytest.approx(2 * abs(log_ratio), abs=1e-6)


def test_kl_closed_forms():
    """D x exact = (dt/2)(1/g + g(1-s)/2s)^2 |v - v_ref|^2; flow_grpo = exact x dt;
    velocity = mean square;
    mean = exact x 2 std^2, which tends to velocity x dt^2 without noise (Flow-Factory's two)."""
    policy = ToyPolicy(0.3)
    _, rollout, _, rows = prepared(make(), policy)
    kl = {
        kind: make(kl=kind, kl_weight=1.0).score(policy, rollout, rows)["kl"]
        for kind in ("exact", "flow_grpo", "velocity", "mean")
    }
    x, s, dt = rollout.states[rows.src], rows.sigma, rows.sigma - rows.sigma_next
    v = policy.velocity(x, s, None, rows.prompt)
    with policy.view("reference"):
        square = (v - policy.velocity(x, s, None, rows.prompt)).square().sum(1).double()
    capped = torch.where(s == 1, rollout.plan.sigma_cap, s)
    g = 0.7 * (s / (1 - capped)).sqrt()
    expected = dt / 2 * (1 / g + g * (1 - s) / (2 * s)) ** 2 * square
    assert torch.allclose(2 * kl["exact"].double(), expected, rtol=1e-4, atol=1e-8)
    assert torch.allclose(kl["flow_grpo"].double(), kl["exact"].double() * dt, rtol=1e-5)
    assert torch.allclose(2 * kl["velocity"].double(), square, rtol=1e-5)
    assert torch.allclose(kl["mean"].double(), kl["exact"].double() * 2 * g**2 * dt, rtol=1e-4)
    assert all(value.requires_grad for value in kl.values())


def dance_kl(s, t, eta=0.3):
    """(dt/2) (1/eta + eta (1-s)/2s)^2: Flow-SDE's with g = eta."""
    return (s - t) / 2 * (1 / eta + eta * (1 - s) / (2 * s)) ** 2


def cps_kl(s, t, eta=0.8):
    """|d mean|^2 / 2 std^2, mean = (1-t)(x - s v) + t cos(a) (x + (1-s) v), std = t sin(a)."""
    a = eta * math.pi / 2
    return (t * math.cos(a) * (1 - s) - (1 - t) * s) ** 2 / (2 * (t * math.sin(a)) ** 2)


def ddim_kl(s, t, eta=0.6):
    """DDIM in its own coordinates: d x0 = -s dv, d eps = (1-s) dv; a change of coordinates leaves a
    KL as it is."""
    abar, after = ((1 - u) ** 2 / ((1 - u) ** 2 + u**2) for u in (s, t))
    var = eta**2 * (1 - after) / (1 - abar) * (1 - abar / after)
    return (-after.sqrt() * s + (1 - after - var).sqrt() * (1 - s)) ** 2 / (2 * var)


@pytest.mark.parametrize(
    ("name", "eta", "form"),
    [("dance_sde", 0.3, dance_kl), ("cps", 0.8, cps_kl), ("ddim", 0.6, ddim_kl)],
)
def test_exact_kl_is_the_closed_form_of_every_sde(name, eta, form):
    """Of every SDE: D x kl = coefficient(s, s') |v - v_ref|^2."""
    policy, algorithm = ToyPolicy(0.3), make(sde=name, kl_weight=1.0)
    _, rollout, _, rows = prepared(
        algorithm, policy, sampler=SimpleNamespace(eta=eta, init_noise="sample")
    )
    kl = algorithm.score(policy, rollout, rows)["kl"]
    x = rollout.states[rows.src]
    v = policy.velocity(x, rows.sigma, None, rows.prompt)
    with policy.view("reference"):
        square = (
            (v - policy.velocity(x, rows.sigma, None, rows.prompt))
            .square()
            .sum(1)
            .double()
            .detach()
        )
    expected = form(rows.sigma, rows.sigma_next) * square
    assert torch.allclose(2 * kl.double(), expected, rtol=1e-3, atol=1e-9)
    assert float(expected.max()) > 1e-2
    assert kl.requires_grad and torch.unique(rows.sigma).numel() == 7


def test_closed_form_kl_is_the_expected_log_ratio():
    """Over the step's own noise, E[lp - lp_ref] = KL, and k3 = e^x - 1 - x >= 0."""
    policy = ToyPolicy(0.5)
    algorithm = make(kl="exact", kl_weight=1.0)
    _, rollout, _, rows = prepared(algorithm, policy, copies=600, prompts=1)
    with torch.no_grad():
        scores = algorithm.score(policy, rollout, rows)
        with policy.view("reference"):
            x = scores["log_prob"] - algorithm.score(policy, rollout, rows)["log_prob"]
    assert float(x.mean()) == pytest.approx(
        float(scores["kl"].mean()), abs=4 * float(x.std()) / len(x) ** 0.5
    )
    assert bool((torch.expm1(-x) + x >= -1e-6).all())


def test_kl_is_zero_at_the_reference_and_enters_the_loss_with_its_weight():
    algorithm = make(kl_weight=0.5)
    policy, rollout, _, rows = prepared(algorithm, ToyPolicy())
    scores = algorithm.score(policy, rollout, rows)
    assert scores["kl"].abs().max().item() == 0 and algorithm.needs == {"log_prob", "reference"}
    shifted = {**scores, "kl": torch.ones_like(scores["kl"])}
    gap = algorithm.loss(shifted, rows).loss.detach() - algorithm.loss(scores, rows).loss.detach()
    assert float(gap) == pytest.approx(0.5 * len(rows), rel=1e-5)
    assert float(algorithm.loss(shifted, rows).metrics["policy/kl"]) == len(rows)


def test_each_distinct_state_is_evaluated_once():
    algorithm = make()
    policy = ToyPolicy(0.1)
    grown = plan.tree(sigmas.shifted(8, 3), start=2, depth=2, children=3, eta=0.7)
    algorithm.plan = lambda *args, **kwargs: grown
    rollout = roll_out(policy, algorithm, copies=1, prompts=1)
    reward = rewards_of(torch.randn(9))
    rows = algorithm.columns(
        rollout, advantages_of(algorithm, rollout, reward), seed=0, iteration=0
    )
    policy.rows = 0
    algorithm.score(policy, rollout, rows)
    assert len(rows) == 12 and policy.rows == 4  # 3 + 9 edges from 1 + 3 states


def test_rollout_and_loss_use_the_same_guidance():
    algorithm = make(detach_uncond=True)
    policy, rollout, _, rows = prepared(algorithm)
    policy.guidances.clear()
    algorithm.score(policy, replace(rollout, guidance=4.5), rows)
    assert policy.guidances == [4.5]


class Guided(ToyPolicy):
    """v = u + w (c - u): the conditional branch is ToyPolicy's, the unconditional one has a weight
    of its own."""

    def __init__(self):
        super().__init__(0.1)
        self.uncond = torch.nn.Parameter(torch.tensor([0.2, -0.1]))

    def velocity(self, x, sigma, cond, rows, *, guidance="pipeline", detach_uncond=False):
        c = super().velocity(x, sigma, cond, rows, guidance=guidance)
        if guidance == "none":
            return c
        u = x * self.uncond
        return (u.detach() if detach_uncond else u) + guidance * (
            c - (u.detach() if detach_uncond else u)
        )


def test_detach_uncond_stops_the_gradient_of_the_unconditional_branch_only():
    """Both settings give the same loss; d v / d u = 1 - w reaches its weight only where it is not
    detached."""
    losses, gradients = [], []
    for detach in (False, True):
        torch.manual_seed(1)
        algorithm, policy = make(detach_uncond=detach), Guided()
        _, rollout, _, rows = prepared(algorithm, policy)
        scores = algorithm.score(policy, replace(rollout, guidance=4.5), rows)
        loss = (rows.adv * scores["log_prob"]).sum()
        loss.backward()
        losses.append(loss.item())
        gradients.append((policy.uncond.grad, gradient(policy.net)))
    (free, net), (stopped, same) = gradients
    assert losses[0] == losses[1] and torch.equal(net, same) and float(net.abs().max()) > 0.1
    assert float(free.abs().min()) > 0.1 and stopped is None


def test_re_evaluated_ddpo_ratios_are_one():
    """Ancestral DDIM, eta = 1; every row at once, which is not how the rollout batched
    them."""
    algorithm = make(sde="ddim")
    policy, rollout, _, rows = prepared(
        algorithm, sampler=SimpleNamespace(eta=1.0, init_noise="sample")
    )
    ratio = (
        algorithm.score(policy, rollout, rows)["log_prob"].detach().double()
        - rows.log_prob.double()
    ).exp()
    assert float((ratio - 1).abs().max()) < 1e-6 and len(ratio) > 100


def test_a_window_is_blind_to_its_ode_steps():
    """Perturbing every stored state outside the window changes no score."""
    algorithm = make(**CONFIGS["window"])
    policy, rollout, _, rows = prepared(algorithm)
    inside = torch.zeros(len(rollout.states), dtype=torch.bool)
    inside[torch.cat([rollout.src, rollout.dst])] = True
    states = torch.where(inside[:, None], rollout.states, rollout.states + 100)
    assert not torch.equal(states, rollout.states)
    a, b = (
        algorithm.score(policy, rollout, rows),
        algorithm.score(policy, replace(rollout, states=states), rows),
    )
    assert torch.equal(a["log_prob"], b["log_prob"])
    assert len(rollout.states) == 24 * (2 + 1 + 1)  # window + 1 states and the leaf


def test_groups_without_signal_give_no_rows():
    algorithm = make()
    rollout = roll_out(ToyPolicy(), algorithm)
    total = torch.randn(24)
    total[8:16] = 0.5
    total[20] = torch.nan
    rows = algorithm.columns(
        rollout, advantages_of(algorithm, rollout, rewards_of(total)), seed=0, iteration=0
    )
    assert set(rows.prompt.tolist()) == {0, 2} and len(rows) == 7 * 8 + 7 * 7
    none = algorithm.columns(
        rollout, advantages_of(algorithm, rollout, rewards_of(torch.zeros(24))), seed=0, iteration=0
    )
    assert len(none) == 0


def test_dance_trains_a_random_share_of_each_samples_steps():
    algorithm = make(timestep_fraction=0.6)
    policy = ToyPolicy()
    rollout = roll_out(policy, algorithm, copies=200, prompts=1)
    advantages = advantages_of(algorithm, rollout, to_the_right(rollout))
    draw = algorithm.drawn(rollout, 0, 0).view(200, 7)
    assert bool((draw.sum(1) == 4).all())  # floor(7 x .6)
    assert bool(((draw.float().mean(0) - 4 / 7).abs() < 0.13).all())
    again, next_iteration = (algorithm.drawn(rollout, 0, i).view(200, 7) for i in (0, 1))
    assert torch.equal(draw, again) and not torch.equal(draw, next_iteration)
    assert (
        len(algorithm.columns(rollout, advantages, seed=0, iteration=0))
        == 800
        == algorithm.most_rows(rollout.plan, 200)
    )
    least = make(timestep_fraction=0.1)  # never none
    assert int(least.drawn(rollout, 0, 0).sum()) == least.most_rows(rollout.plan, 200) == 200


def test_plans_follow_the_config():
    grid = sigmas.shifted(25, 3)

    def planned(iteration=0, sampler=SAMPLER, **options):
        return make(**options).plan(grid, sampler=sampler, iteration=iteration, seed=0)

    mix = {"plan": "window", "window": {"size": 4, "every": 25}}
    assert torch.nonzero(planned(30, **mix).trained).flatten().tolist() == [1, 2, 3, 4]
    assert int(planned().trained.sum()) == 24 and planned(sde="cps").sde == "cps"
    assert planned(sampler=SimpleNamespace(eta=0.3, init_noise="batch")).init == "batch"
    assert planned(**mix, tail=0.4).edges == 4 + 9
    assert planned(**mix, tail=0.4, tail_count="code").edges == 4 + 7


def test_a_plan_without_sde_steps_is_refused():
    with pytest.raises(ValueError, match="set sampler.eta > 0"):
        make().plan(
            sigmas.linear(8),
            sampler=SimpleNamespace(eta=0.0, init_noise="sample"),
            iteration=0,
            seed=0,
        )
    with pytest.raises(ValueError, match="sampler.steps >= 2"):
        make().plan(sigmas.linear(1), sampler=SAMPLER, iteration=0, seed=0)
    with pytest.raises(ValueError, match="algorithm=nft"):
        make().check(plan.ode(sigmas.linear(8)))


def test_reward_independent_of_the_sample_gives_no_gradient():
    algorithm = make()
    rollout = roll_out(ToyPolicy(), algorithm)
    advantages = advantages_of(algorithm, rollout, rewards_of(torch.full((24,), 3.0)))
    assert bool((advantages.leaf == 0).all())
    assert torch.equal(advantages.transition, credit.spread(rollout, advantages.leaf))


# --- the files of configs/algorithm: name -> (media of one copy, edges of it that are trained, what
# makes it small enough for the toy)

WINDOW = {"schedule": "progressive", "size": 2, "every": 5}
SHIPPED = {
    "flow_grpo": (1, 7, {}),
    "flow_grpo_fast": (1, 3, {}),
    "dance_grpo": (1, 9, {}),  # 60% of 15
    "mix_grpo": (1, 4, {}),
    "mix_grpo_flash": (1, 4, {}),
    "branch_grpo": (
        16,
        218 - 16,
        {"tree": {"splits": (0, 2, 4), "correlation": 1.0}},
    ),  # 218 edges, the last of each leaf ODE
    "branch_grpo_mix": (
        16,
        34,
        {"tree": {"splits": (0, 2, 4), "correlation": 1.0, "noisy": "window"}, "window": WINDOW},
    ),
    "tree_grpo": (27, 3 + 9 + 27, {"window": {"schedule": "geometric", "size": 2, "rate": 0.5}}),
    "tempflow_grpo": (54, 54, {"tree": {"children": 4, "steps": (0, 1, 2, 3)}}),
    "granular_grpo": (288, 96, {"tree": {"children": 4, "steps": (0, 1, 2, 3), "strides": (1, 2)}}),
    "dense_grpo": (10, 9, {}),
    "flow_dppo": (1, 3, {"trust": {"threshold": 0.02}}),
    "mix_dppo": (1, 4, {"trust": {"threshold": 0.02}}),
    "grpo_guard": (1, 7, {}),
    "reg_grpo": (1, 7, {"ratio_eps": 0.05}),
    "prdp": (1, 49, {"beta": 0.3, "clip": 0.2}),
    "pref_grpo": (1, 14, {}),  # 60% of 24
    "ddpo": (1, 49, {}),
    "dpok": (1, 49, {}),
}
# calls of one copy that are not one a step, with the last step ODE and the trunks cut off
NFE = {
    "mix_grpo_flash": 4 + 9,  # ceil(.4 x 21)
    "branch_grpo": 203,
    "branch_grpo_mix": 203,
    "tree_grpo": 1 + (1 + 3 + 9) + 27 * 4,  # of 8 steps, from the step drawn for iteration 0
    "tempflow_grpo": 9 + 6 * 45,
    "dense_grpo": 55,
    "granular_grpo": (
        8 + 12 * sum(1 + sum(-(-(15 - k) // stride) - 1 for stride in (1, 2, 3)) for k in range(8))
    ),
}


def shipped(name, **changes):
    cfg = load_config(None, [f"algorithm={name}", "reward=jpeg"])
    return cfg, build.make_algorithm(cfg.model_copy(update={"algorithm": cfg.algorithm | changes}))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_configuration_has_a_plan_that_its_batch_fits(name):
    """At its own number of steps: the published trees, and as many samples a prompt as whole
    copies of the plan give."""
    cfg, algorithm = shipped(name)
    planned = algorithm.plan(
        sigmas.shifted(cfg.sampler.steps, 3), sampler=cfg.sampler, iteration=0, seed=0
    )
    of_config(cfg, processes=1, plan=planned)
    assert (planned.leaves, algorithm.most_rows(planned, planned.leaves)) == SHIPPED[name][:2]
    assert plan.nfe(planned) == NFE.get(name, cfg.sampler.steps)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_toy_flow_learns_with_every_shipped_configuration(name):
    """Two dims are few: ratios move by .2, not 1e-4. Minus the reward, 2 + 2 x .25 at first, falls
    to less than 60% within 20 steps."""
    changes = SHIPPED[name][2]
    cfg, algorithm = shipped(
        name, **({} if name in ("reg_grpo", "prdp") else {"clip": (0.2, 0.2)}), **changes
    )
    history = learn(
        algorithm,
        iterations=20,
        copies=8 if cfg.algorithm["plan"] in ("full", "window", "dense") else 1,
        sampler=cfg.sampler,
    )
    assert sum(history[-5:]) / 5 > 0.6 * sum(history[:3]) / 3
