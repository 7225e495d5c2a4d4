"""DiffusionOPD: loss and gradient by hand, what it equals, and which configs are refused."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import small
import torch
from toy import GRID, SAMPLER, Fixed, ToyPolicy, backward, in_fp64, roll_out, slope

from flowrl.algorithms import opd
from flowrl.config.load import load_config
from flowrl.types import Advantages, expand

TEACHER = {"adapter": "somewhere", "guidance": "none"}
ODE = SimpleNamespace(eta=0.0, init_noise="sample")
TOY = torch.tensor([1.0, 0.75, 0.5, 0.0], dtype=torch.float64)


def make(**options):
    return opd.ALGORITHM(opd.ALGORITHM.Config(teachers={"one": TEACHER}, **options))


class Taught(Fixed):
    """A policy of given velocities, and its teacher's."""

    def __init__(self, v, teacher, v_ref=None):
        super().__init__(v, v_ref=v_ref)
        self.teacher = teacher

    def taught(self, x, sigma, cond, rows):
        assert sigma.shape == rows.shape == (len(x),)
        return 1 * self.teacher


def rows_of(algorithm, sampler, grid=GRID, copies=2):
    rollout = roll_out(ToyPolicy(0.1), algorithm, sampler=sampler, grid=grid, copies=copies)
    ones = Advantages(leaf=torch.ones(len(rollout.leaf)))
    return rollout, algorithm.columns(rollout, ones, seed=0, iteration=0)


def prepared(algorithm, sampler, monkeypatch):
    """A rollout and its rows in fp64, and random velocities of student and teacher."""
    rollout, rows = in_fp64(monkeypatch, *rows_of(algorithm, sampler))
    draw = torch.Generator().manual_seed(0)
    v, teacher = (torch.randn(len(rows), 2, generator=draw, dtype=torch.float64) for _ in range(2))
    return rollout, rows, v.requires_grad_(), teacher


def loss(algorithm, policy, rollout, rows):
    return algorithm.loss(algorithm.score(policy, rollout, rows), rows).loss


def test_the_toy_numbers():
    """flow_sde, eta .7, s .75 -> .5: lambda .513429, so L = lambda^2 / 2 * .01; on the ODE edge
    .5 * .0625 * .01."""
    v, teacher = torch.tensor([[0.3, 0.3]], requires_grad=True), torch.tensor([[0.2, 0.4]])
    for sampler, expected, slopes in ((SAMPLER, 0.001318, 0.013181), (ODE, 0.0003125, 0.003125)):
        algorithm = make()
        rollout, rows = rows_of(algorithm, sampler, TOY)
        row = rows[torch.nonzero(rows.sigma == 0.75)[0]]
        policy = Taught(v, teacher)
        assert loss(algorithm, policy, rollout, row).item() == pytest.approx(expected, abs=1e-6)
        got = slope(algorithm, policy, rollout, row)[0].tolist()
        assert got == pytest.approx([slopes, -slopes], abs=1e-6)


@pytest.mark.parametrize("sampler", [SAMPLER, ODE])
@pytest.mark.parametrize("options", [{}, {"normalise": True}, {"target": "v"}, {"target": "x0"}])
def test_at_the_teacher_loss_and_gradient_are_exactly_0(sampler, options):
    algorithm = make(**options)
    rollout, rows = rows_of(algorithm, sampler)
    v = torch.randn(len(rows), 2, requires_grad=True)
    policy = Taught(v, v.detach().clone())
    assert loss(algorithm, policy, rollout, rows).item() == 0
    assert not slope(algorithm, policy, rollout, rows).any()


def test_the_gradient_by_hand_of_an_ode_step_is_2_c_step_square_times_the_gap(monkeypatch):
    algorithm = make(constant=0.7)
    rollout, rows, v, teacher = prepared(algorithm, ODE, monkeypatch)
    step = (rows.sigma - rows.sigma_next)[:, None]
    by_hand = 2 * 0.7 * step**2 * (v.detach() - teacher) / 2
    got = slope(algorithm, Taught(v, teacher), rollout, rows)
    torch.testing.assert_close(got, by_hand, rtol=1e-6, atol=1e-9)


def test_the_gradient_by_hand_of_a_flow_sde_step_is_lambda_square_times_the_gap(monkeypatch):
    """lambda = sqrt(step) / g * (1 + g^2 (1 - s) / 2 s), g^2 = eta^2 s / (1 - s)."""
    algorithm = make()
    rollout, rows, v, teacher = prepared(algorithm, SAMPLER, monkeypatch)
    s = rows.sigma
    g2 = 0.49 * s / (1 - s.masked_fill(s == 1, float(GRID[1])))
    lam2 = (s - rows.sigma_next) / g2 * (1 + g2 * (1 - s) / (2 * s)) ** 2
    got = slope(algorithm, Taught(v, teacher), rollout, rows)
    by_hand = lam2[:, None] * (v.detach() - teacher) / 2
    torch.testing.assert_close(got, by_hand, rtol=1e-5, atol=1e-9)


def test_target_v_on_ode_steps_is_flow_matching_to_the_teacher(monkeypatch):
    algorithm = make(target="v", constant=1)
    rollout, rows, v, teacher = prepared(algorithm, ODE, monkeypatch)
    expected = (v - teacher).square().mean(1).sum()
    torch.testing.assert_close(loss(algorithm, Taught(v, teacher), rollout, rows), expected)


@pytest.mark.parametrize("sampler", [SAMPLER, ODE])
def test_targets_differ_by_the_squares_of_their_slopes(sampler, monkeypatch):
    """MSE(xt) = Q^2 MSE(v), with Q the step on ODE edges; MSE(x0) = s^2 MSE(v)."""
    options = {"scaled": False, "constant": 1}
    rollout, rows, v, teacher = prepared(make(**options), sampler, monkeypatch)
    mse = (v - teacher).square().mean(1).detach()
    for target in ("xt", "v", "x0"):
        algorithm = make(target=target, **options)
        scale = algorithm.scales(rollout, rows).double()
        match = algorithm.matched(v - teacher, scale).detach()
        pull = {"v": torch.ones_like(mse), "x0": rows.sigma}.get(target)
        if pull is None:
            more = 0.49 / 2 * (rows.sigma < 1) if sampler is SAMPLER else 0
            pull = (rows.sigma - rows.sigma_next) * (1 + more)
        torch.testing.assert_close(match, pull**2 * mse, rtol=1e-5, atol=1e-9)


def test_normalised_gradients_have_one_size_whatever_the_step(monkeypatch):
    """d^2 / mean|d| of a gap g at scale q has the gradient q * 2 g / (mean|g| d)."""
    algorithm = make(normalise=True, constant=1)
    rollout, rows, v, teacher = prepared(algorithm, ODE, monkeypatch)
    gap, step = v.detach() - teacher, (rows.sigma - rows.sigma_next)[:, None]
    by_hand = 2 * step * gap / gap.abs().mean(1, keepdim=True) / 2
    got = slope(algorithm, Taught(v, teacher), rollout, rows)
    torch.testing.assert_close(got, by_hand, rtol=1e-5, atol=1e-6)


def test_a_mixture_is_the_sum_of_its_domains_by_their_share_of_rows(monkeypatch):
    algorithm = make()
    rollout, rows, v, teacher = prepared(algorithm, ODE, monkeypatch)
    whole = loss(algorithm, Taught(v, teacher), rollout, rows) / len(rows)
    parts = 0
    for prompts in ((0,), (1, 2)):
        at = torch.nonzero(torch.isin(rows.prompt, torch.tensor(prompts))).flatten()
        own = loss(algorithm, Taught(v[at], teacher[at]), rollout, rows[at]) / len(at)
        parts = parts + own * len(at) / len(rows)
    torch.testing.assert_close(whole, parts)


def test_a_kl_to_the_base_is_measured_as_the_distance_to_the_teacher_is(monkeypatch):
    algorithm = make(kl_weight=0.3)
    rollout, rows, v, teacher = prepared(algorithm, SAMPLER, monkeypatch)
    base = torch.zeros_like(teacher)
    got = loss(algorithm, Taught(v, teacher, v_ref=base), rollout, rows)
    plain = [loss(make(), Taught(v, other), rollout, rows) for other in (teacher, base)]
    torch.testing.assert_close(got, plain[0] + 0.3 * plain[1])


def test_steps_from_noise_on_are_trained_and_the_last_is_left_out():
    for sampler, share, expected in (
        (ODE, 0.99, 7),
        (SAMPLER, 0.99, 7),
        (ODE, 1, 8),
        (ODE, 0.5, 4),
    ):
        plan = make(range=share).plan(GRID, sampler=sampler, iteration=0, seed=0)
        assert plan.trained.tolist() == [step < expected for step in range(8)]
    assert make().most_rows(plan, 3) == 12


def test_a_student_learns_its_teacher():
    """Adam on ODE rollouts of the student: the distance to a teacher that is moved falls."""
    algorithm, policy, shift = make(target="v"), ToyPolicy(), torch.tensor([0.6, -0.4])

    def taught(x, sigma, cond, rows):
        with policy.view("reference"), torch.no_grad():
            return policy.velocity(x, sigma, cond, rows) + shift

    policy.taught = taught
    optimizer, distances = torch.optim.Adam(policy.net.parameters(), lr=1e-2), []
    for i in range(40):
        rollout = roll_out(policy, algorithm, sampler=ODE, iteration=i, copies=4)
        ones = Advantages(leaf=torch.ones(len(rollout.leaf)))
        rows = algorithm.columns(rollout, ones, seed=0, iteration=i)
        distances.append(float(backward(algorithm, policy, rollout, rows)[0]) / len(rows))
        optimizer.step()
    assert distances[-1] < 0.02 * distances[0]


@pytest.mark.parametrize(
    ("options", "sampler", "says"),
    [
        ({"range": 1}, SAMPLER, "trains the last step, whose std is 0"),
        ({}, SimpleNamespace(eta=5e-4, init_noise="sample"), "eta=0.0005 is nearly no noise"),
        ({"sde": "learned"}, SAMPLER, "takes noise that a policy learns"),
        ({"sde": "learned"}, ODE, "takes noise that a policy learns"),
        ({"reference": "ema"}, ODE, "read only with algorithm.kl_weight"),
    ],
)
def test_plans_that_cannot_be_scaled_are_refused(options, sampler, says):
    algorithm = make(**options)
    with pytest.raises(ValueError, match=says):
        algorithm.check(algorithm.plan(GRID, sampler=sampler, iteration=0, seed=0))
    if "range" in options or not options:
        free = make(scaled=False, **options)
        free.check(free.plan(GRID, sampler=sampler, iteration=0, seed=0))


A = "algorithm.teachers.a."
OWN = f"{A}guidance=none {A}adapter=LORA"
TWO = f"{OWN} {A}domains=[x] algorithm.teachers.b.guidance=2 algorithm.teachers.b.adapter=LORA"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "follows teachers, and none is named"),
        (f"{A}adapter=LORA", "guidance"),
        (f"{A}guidance=none", "has neither an adapter nor a model; give one of the two"),
        (f"{OWN} {A}model=shapes-sd3", "has an adapter and a model; give one of the two"),
        (f"{A}guidance=none {A}adapter=LORE", "does not exist"),
        (f"{OWN} output=LORA", "is what this run trains; name another run"),
        (f"{OWN} train.mode=full", "needs train.mode=lora; give the teacher as model"),
        (TWO, r"teachers.b is one of 2 and has no domains; write algorithm.teachers.b.domains="),
        (f"{TWO} algorithm.teachers.b.domains=[x]", 'the domain "x" has two teachers, a and b'),
        (f"{OWN} {A}domains=[x]", '1 of 3 prompts have no "domain", as "a star"'),
        (f"{OWN} {A}domains=[circles,y]", 'no teacher has the domain "squares" of prompts'),
        (f"{OWN} algorithm.route=kind {A}domains=[x]", '3 of 3 prompts have no "kind"'),
        (f"{OWN} reward.jpeg.weight=1", "climbs no reward, and jpeg would count; watch it"),
        (f"{OWN} data.sampler.mode=bayes", "mode=bayes does not go with teachers, and algorithm"),
        (f"{OWN} data.sampler.mode=bandit", "mode=bandit does not go with teachers"),
        (f"{OWN} draw.mode=refill", "draw.mode=refill does not go with teachers"),
        (f"{OWN} diversity.features=shapes diversity.novelty=1", "features=shapes does not go"),
        (f"{OWN} train.shard=[denoiser]", "shard=.denoiser. does not go with teachers, and teach"),
        (f"{OWN} stop.reward=1", "stop.reward=1.0 is a mean of rewards that count, and here none"),
        (f"{OWN} replay.size=2", "the states of denoising steps, which are not kept"),
    ],
)
def test_what_does_not_go_together_is_said(words, says, tmp_path, monkeypatch):
    monkeypatch.setitem(small.ALGORITHMS, "opd", {})
    small.load_once(monkeypatch)
    (tmp_path / "lora").mkdir()
    rows = [
        {"prompt": "a circle", "domain": "circles"},
        {"prompt": "a square", "domain": "squares"},
    ]
    if "circles" not in words:
        rows.append({"prompt": "a star"})
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows + rows[:1] * ("y" in words)))
    given = words.replace("LORA", str(tmp_path / "lora")).replace("LORE", "nowhere").split()
    usual = small.words(tmp_path / "run", "opd", data__train=str(data), data__eval="null")
    with pytest.raises(ValueError, match=says):
        small.Trainer(load_config(None, [*usual, "reward.jpeg.weight=0", *given]))


def test_a_sample_whose_watched_reward_failed_is_trained():
    rollout, rows = rows_of(make(), ODE)
    rewards = SimpleNamespace(total=torch.tensor([0.0, torch.nan]))
    assert make().leaf_advantages(rewards, torch.zeros(2)).tolist() == [1, 1]
    assert len(rows) == len(rollout.src) == 6 * 7
    assert dataclasses.is_dataclass(rollout) and expand(rows.scale, torch.ones(1, 2)).ndim == 2
