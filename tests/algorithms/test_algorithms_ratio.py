"""How GRPO compares old and new policy: ratios, their clips, RatioNorm, the weights of steps."""

import math
from dataclasses import replace

import pytest
import torch
from toy import GRID, SAMPLER, ToyPolicy, backward, gradient, prepared

from flowrl.algorithms.grpo import ALGORITHM
from flowrl.config.load import load_config
from flowrl.config.schema import options_of
from flowrl.samplers import keys, sigmas
from flowrl.types import Columns, Transition

RATIOS = ("ppo", "log", "guard", "sequence")


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


def move(policy, size=0.1):
    """The policy leaves the one that sampled, which its view "old" keeps."""
    policy.update("old", 0.0)
    torch.nn.init.normal_(policy.net[2].bias, std=size)


def derivative(algorithm, adv, log_ratio, **columns):
    """Rows of the given advantages and log-ratios -> (LossOutput, its derivative by each
    log-ratio)."""
    adv, leaf = torch.tensor(adv), torch.tensor(log_ratio, requires_grad=True)
    batch = Columns(
        {"adv": adv, "log_prob": torch.zeros_like(adv), "weight": torch.ones_like(adv), **columns}
    )
    out = algorithm.loss({"log_prob": leaf, "normed": leaf}, batch)
    return replace(out, loss=out.loss.detach()), torch.autograd.grad(out.loss, leaf)[0].tolist()


# --- clips, by hand


@pytest.mark.parametrize(
    ("adv", "log_ratio", "term", "slope"),
    [
        (2.0, 0.15, -0.3, -2.0),
        (2.0, 0.5, -2 * 0.2, 0.0),  # above the upper bound, where a good sample gains nothing
        (2.0, -0.5, 1.0, -2.0),  # the pessimistic side is not clipped
        (-1.0, -0.5, -0.1, 0.0),  # below the lower bound, the other one
        (-1.0, 0.5, 0.5, 1.0),
    ],
)
def test_log_ratio_is_clipped_where_the_ratio_would_be(adv, log_ratio, term, slope):
    out, grad = derivative(make(ratio="log", clip=(0.1, 0.2)), [adv], [log_ratio])
    assert float(out.loss) == pytest.approx(term) and grad == [slope]
    assert float(out.metrics["policy/clip_fraction"]) == (slope == 0)
    assert float(out.metrics["policy/log_ratio"]) == pytest.approx(abs(log_ratio))


@pytest.mark.parametrize("ratio", ["ppo", "guard", "sequence"])
def test_clip_is_asymmetric(ratio):
    """clip=(.1, .3): e^.2 = 1.22 is inside above, e^-.2 = .82 outside below; a good and a bad
    sample at each."""
    unit = {"unit": torch.arange(4), "normed": torch.zeros(4)}
    out, grad = derivative(
        make(ratio=ratio, clip=(0.1, 0.3)), [1.0, -1.0, 1.0, -1.0], [0.2, 0.2, -0.2, -0.2], **unit
    )
    up, down = math.exp(0.2), math.exp(-0.2)
    assert float(out.loss) == pytest.approx(-up + up - down + 0.9)
    assert grad == pytest.approx([-up, up, -down, 0.0])
    assert float(out.metrics["policy/clip_fraction"]) == 1
    _, tight = derivative(
        make(ratio=ratio, clip=(0.3, 0.1)), [1.0, -1.0, 1.0, -1.0], [0.2, 0.2, -0.2, -0.2], **unit
    )
    assert tight == pytest.approx([0.0, up, -down, down])


@pytest.mark.parametrize(("ratio", "bound"), [("ppo", 3.0), ("log", math.log(3.0))])
def test_dual_clip_bounds_what_a_bad_sample_costs(ratio, bound):
    """e^1.5 = 4.5 > 3: with A = -2 the term stays at 2 x 3 and its gradient is 0; e^1 = 2.7 < 3 and
    good samples are left alone."""
    log_ratio, adv = [1.5, 1.0, 1.5, -1.5], [-2.0, -2.0, 2.0, 2.0]
    dual, slope = derivative(make(ratio=ratio, clip=(0.2, 0.2), dual_clip=3.0), adv, log_ratio)
    plain, without = derivative(make(ratio=ratio, clip=(0.2, 0.2)), adv, log_ratio)
    of = math.exp if ratio == "ppo" else float
    assert without[0] == pytest.approx(2 * (of(1.5) if ratio == "ppo" else 1)) and slope[0] == 0
    assert slope[1:] == without[1:] and slope[2] == 0 and slope[1] > 0 > slope[3]
    # row 2; row 0 too
    assert float(plain.metrics["policy/clip_fraction"]) == 1
    assert float(dual.metrics["policy/clip_fraction"]) == 2
    assert float(plain.loss - dual.loss) == pytest.approx(2 * (of(1.5) - bound), rel=1e-6)


def test_log_ratio_clip_goes_with_a_kl_of_drifts():
    """ratio=log and kl=velocity: loss and gradient are those of the clipped logarithm plus weight
    times mean((v - v_ref)^2)."""
    options, policy = {"ratio": "log", "clip": (0.02, 0.02), "kl": "velocity"}, ToyPolicy(0.1)
    both, alone = make(**options, kl_weight=0.7), make(**options)
    _, rollout, _, rows = prepared(both, policy)
    move(policy)
    loss, grad = backward(both, policy, rollout, rows)
    without, rest = backward(alone, policy, rollout, rows)
    x, s = rollout.states[rows.src], rows.sigma
    policy.zero_grad()
    with policy.view("reference"):
        v_ref = policy.velocity(x, s, None, rows.prompt)
    kl = (policy.velocity(x, s, None, rows.prompt) - v_ref).square().mean(1).sum()
    kl.backward()
    kl = float(kl.detach())
    assert float(loss - without) == pytest.approx(0.7 * kl, rel=1e-4) and kl > 0.1
    assert torch.allclose(grad - rest, 0.7 * gradient(policy.net), rtol=1e-3, atol=1e-3)
    metrics = both.loss(both.score(policy, rollout, rows), rows).metrics
    assert 0 < float(metrics["policy/clip_fraction"]) < len(rows)
    assert float(metrics["policy/kl"]) == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize("ratio", RATIOS)
def test_approx_kl_is_half_the_mean_square_change_of_the_log_prob(ratio):
    """Of each step's own log-prob, whatever the ratio makes of it: (.2^2 + .4^2 + 0)
    / 2, summed over rows."""
    batch = Columns(
        {
            "adv": torch.ones(3),
            "weight": torch.ones(3),
            "log_prob": torch.ones(3),
            "normed": torch.zeros(3),
            "unit": torch.arange(3),
        }
    )
    out = make(ratio=ratio).loss(
        {"log_prob": torch.tensor([1.2, 0.6, 1.0]), "normed": torch.rand(3)}, batch
    )
    assert float(out.metrics["policy/approx_kl"]) == pytest.approx(0.1, rel=1e-5)


# --- one ratio a sample


def test_sequence_ratio_is_the_exponential_of_the_mean_step_and_is_clipped_once():
    """Sample 0: (.5 + -.1) / 2 = .2, e^.2 = 1.22 > 1.1; sample 1: -.4; sample 2: (.5 - .5) / 2 = 0,
    though both steps leave the clip."""
    adv, log_ratio = [1.0, 1.0, 1.0, 2.0, 2.0], [0.5, -0.1, -0.4, 0.5, -0.5]
    unit = {"unit": torch.tensor([7, 7, 8, 9, 9])}
    out, grad = derivative(make(ratio="sequence", clip=(0.1, 0.1)), adv, log_ratio, **unit)
    down = math.exp(-0.4)
    assert float(out.loss) == pytest.approx(-1.1 * 2 - down - 2 * 2)
    assert grad == pytest.approx([0, 0, -down, -2, -2])
    assert float(out.metrics["policy/clip_fraction"]) == 2
    _, steps = derivative(make(clip=(0.1, 0.1)), adv, log_ratio)
    assert steps == pytest.approx([0, -math.exp(-0.1), -down, 0, -2 * math.exp(-0.5)])


def test_rows_of_a_sample_are_one_unit():
    algorithm = make(ratio="sequence")
    _, rollout, advantages, rows = prepared(algorithm)
    assert algorithm.couples == "sample" and make().couples == "row"
    assert torch.unique(rows.unit, return_counts=True)[1].tolist() == [7] * 24
    by_sample = {int(u): rows[rows.unit == u] for u in torch.unique(rows.unit)}
    for leaf, own in zip(advantages.leaf, by_sample.values(), strict=True):
        assert torch.equal(own.dst[:-1], own.src[1:])
        assert own.adv.tolist() == pytest.approx([float(leaf)] * 7)


def test_one_ratio_a_sample_gives_another_gradient_than_one_a_step():
    algorithm, policy = make(ratio="sequence", clip=(0.05, 0.05)), ToyPolicy(0.1)
    _, rollout, _, rows = prepared(algorithm, policy)
    move(policy, 0.3)
    _, whole = backward(algorithm, policy, rollout, rows)
    _, single = backward(make(clip=(0.05, 0.05)), policy, rollout, rows)
    assert float((single - whole).abs().max()) > 0.01 * float(whole.abs().max())


# --- the first update


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_first_gradient_is_the_score_functions(ratio):
    """It is - sum A grad log p; of RatioNorm, whose log-ratio is std log p to first order,
    - sum A std grad log p."""
    algorithm = make(ratio=ratio)
    policy, rollout, _, rows = prepared(algorithm)
    rows = Columns(
        {**rows.data, "log_prob": algorithm.score(policy, rollout, rows)["log_prob"].detach()}
    )
    loss, got = backward(algorithm, policy, rollout, rows)
    size = algorithm.transition(policy, rollout, rows)[0].std.flatten() if ratio == "guard" else 1.0
    policy.zero_grad()
    (-(size * rows.adv * algorithm.score(policy, rollout, rows)["log_prob"]).sum()).backward()
    assert torch.allclose(got, gradient(policy.net), rtol=1e-4, atol=1e-5)
    assert float(got.abs().max()) > 0.1
    assert float(loss) == pytest.approx(0.0 if ratio == "log" else -float(rows.adv.sum()), abs=1e-3)


def test_ddpos_first_update_is_the_policy_gradient():
    """The configuration itself: per-prompt z-scores with eps 1e-6, ancestral DDIM, clip 1e-4 that
    the first minibatch does not feel."""
    options = load_config(None, ["algorithm=ddpo", "reward=jpeg"]).algorithm
    algorithm = make(**options_of(options))
    policy, rollout, advantages, rows = prepared(algorithm)
    assert rollout.plan.sde == "ddim" and algorithm.config.clip == (1e-4, 1e-4)
    assert advantages.leaf.view(3, 8).std(1, correction=0).tolist() == pytest.approx(
        [1, 1, 1], abs=1e-5
    )
    _, got = backward(algorithm, policy, rollout, rows)
    policy.zero_grad()
    (-(rows.adv * algorithm.score(policy, rollout, rows)["log_prob"]).sum()).backward()
    assert torch.allclose(got, gradient(policy.net), rtol=1e-3, atol=1e-3)
    assert float(got.abs().max()) > 1


# --- GRPO-Guard


def test_guards_log_ratio_is_noise_times_the_shift_of_the_mean():
    """mean(eps * dmu) = std (lp - lp_old + |d|^2 / 2D), d = dmu / std; eps read off the
    stored states."""
    algorithm, policy = make(ratio="guard"), ToyPolicy(0.1)
    _, rollout, _, rows = prepared(algorithm, policy)
    at_home = algorithm.score(policy, rollout, rows)["normed"].detach()
    move(policy)
    with torch.no_grad():
        scores = algorithm.score(policy, rollout, rows)
        new = algorithm.transition(policy, rollout, rows)[0]
        with policy.view("old"):
            old = algorithm.transition(policy, rollout, rows)[0]
    shift, std = new.mean - old.mean, old.std.flatten()
    eps = (rollout.states[rows.dst] - old.mean) / old.std
    from_log_prob = std * (
        scores["log_prob"] - rows.log_prob + (shift / old.std).square().mean(1) / 2
    )
    assert torch.allclose(scores["normed"], (eps * shift).mean(1), atol=2e-6)
    assert float(scores["normed"].abs().max()) > 0.05
    assert torch.allclose(scores["normed"], from_log_prob, atol=2e-6)
    assert float(at_home.abs().max()) < 1e-6


def test_guards_log_ratio_does_not_depend_on_std_given_the_noise():
    algorithm, batch = make(ratio="guard"), Columns({"noise_key": keys.key("x", torch.arange(50))})
    old, shift = torch.randn(50, 4), torch.randn(50, 4)
    seen = []
    for std in (0.05, 0.5, 3.0):
        y = old + std * keys.gaussian(keys.key("own", batch.noise_key), (4,))
        step = Transition(mean=old + shift, std=torch.full((50, 1), std))
        seen.append(algorithm.more_scores(None, batch, step, y)["normed"])
    assert torch.allclose(seen[0], seen[1], atol=1e-5)
    assert torch.allclose(seen[0], seen[2], atol=1e-5)
    assert float(seen[0].abs().mean()) > 0.2


def test_guards_log_ratio_has_mean_zero_where_the_plain_one_has_not():
    """E[lp - lp_old] = -|d|^2 / 2D."""
    algorithm, policy = make(ratio="guard"), ToyPolicy(0.1)
    _, rollout, _, rows = prepared(algorithm, policy, copies=600, prompts=1)
    move(policy, 0.5)
    with torch.no_grad():
        scores, new = (
            algorithm.score(policy, rollout, rows),
            algorithm.transition(policy, rollout, rows)[0],
        )
        with policy.view("old"):
            d = (new.mean - algorithm.transition(policy, rollout, rows)[0].mean) / new.std
    normed, plain = scores["normed"], scores["log_prob"] - rows.log_prob
    noise, expected = float(plain.std()) / len(rows) ** 0.5, -float(d.square().mean()) / 2
    assert abs(float(normed.mean())) < 2 * float(normed.std()) / len(rows) ** 0.5
    assert float(plain.mean()) == pytest.approx(expected, abs=2 * noise) and expected < -6 * noise


def test_equal_steps_make_inverse_step_a_rescaled_loss():
    """Eight steps of 1/8."""
    weighted, plain = (
        make(ratio="guard", step_weight=w, clip=(0.01, 0.01)) for w in ("inverse_step", "none")
    )
    policy = ToyPolicy(0.1)
    _, rollout, advantages, rows = prepared(weighted, policy, grid=sigmas.linear(8))
    move(policy)
    loss, grad = backward(weighted, policy, rollout, rows)
    other, same = backward(
        plain, policy, rollout, plain.columns(rollout, advantages, seed=0, iteration=0)
    )
    assert float(loss) == pytest.approx(8 * float(other), rel=1e-5) and abs(float(other)) > 0.1
    assert torch.allclose(grad, 8 * same, rtol=1e-4, atol=1e-4)
    _, _, _, bent = prepared(weighted, policy)
    assert torch.allclose(
        bent.scale.double() * (bent.sigma - bent.sigma_next),
        torch.ones(len(bent)).double(),
        atol=1e-6,
    )


# --- TempFlow-GRPO


FORKS = {
    "full": {},
    "window": {"plan": "window", "window": {"size": 3}},
    "fan": {"plan": "fan", "tree": {"steps": (0, 2, 5), "children": 4}},
    "branch": {"plan": "branch", "tree": {"splits": (0, 3)}},  # late steps have more rows
}


@pytest.mark.parametrize("name", FORKS)
def test_noise_weights_are_the_steps_std_with_mean_one(name):
    """std = eta sqrt(s / (1 - s~)) sqrt(dt) over its mean over the plan's SDE steps,
    however many rows a step has."""
    algorithm = make(
        step_weight="noise", credit="siblings" if name == "fan" else "leaf", **FORKS[name]
    )
    _, rollout, _, rows = prepared(algorithm)
    s, first = rows.sigma, float(GRID[1])
    std = (
        SAMPLER.eta
        * (s / (1 - torch.where(s == 1, first, s))).sqrt()
        * (s - rows.sigma_next).sqrt()
    )
    levels = {float(a): float(b) for a, b in zip(s, std, strict=True)}
    mean = sum(levels.values()) / len(levels)
    assert rows.scale.tolist() == pytest.approx((std / mean).tolist(), rel=1e-5)
    scales = {float(a): float(b) for a, b in zip(s, rows.scale, strict=True)}
    assert sum(scales.values()) / len(scales) == pytest.approx(1.0, rel=1e-6)
    assert max(scales.values()) > 1.1
    assert len(levels) == {"full": 7, "branch": 7, "window": 3, "fan": 3}[name]


def test_equal_std_makes_all_noise_weights_one():
    """Dance-SDE on an even grid: std = eta sqrt(1/8) at every step."""
    algorithm = make(step_weight="noise", sde="dance_sde")
    _, _, _, rows = prepared(algorithm, grid=sigmas.linear(8))
    assert torch.allclose(rows.scale, torch.ones(len(rows)), atol=1e-6) and len(rows) == 24 * 7


def test_step_weights_multiply_the_policy_term_and_not_the_kl():
    algorithm = make(step_weight="noise", kl_weight=0.5)
    one, two = torch.ones(2), torch.tensor([2.0, 3.0])
    batch = Columns({"adv": one, "log_prob": one, "weight": one, "scale": two})
    out = algorithm.loss({"log_prob": one, "kl": torch.tensor([4.0, 6.0])}, batch)
    assert float(out.loss) == pytest.approx(-2 - 3 + 0.5 * 10)
