"""Methods and steps that are the same by their formulas, on toy networks in fp64."""

import math
from dataclasses import replace

import pytest
import torch
from toy import ToyPolicy, backward, gradient, prepared, roll_out
from toy_learner import learner, term

from flowrl.algorithms import dpo, grpo, nft, opd, raft, sft
from flowrl.algorithms.common.data_anchor import DataAnchor, paired
from flowrl.algorithms.common.step_weight import pulls, spreads, step_weight
from flowrl.rewards import reward_metrics, score
from flowrl.samplers import cps, dance_precise, ddim, ode, precise
from flowrl.types import Advantages, Columns, MediaContext

OPEN = (1e9, 1e9)  # a clip that never stops a step
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def fp64(monkeypatch):
    """New tensors are fp64, and the library's casts to fp32 are casts to fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(module, **options):
    return module.ALGORITHM(module.ALGORITHM.Config(**options))


def ones(rollout):
    return Advantages(leaf=torch.ones(len(rollout.leaf)))


def same(one, other):
    torch.testing.assert_close(one, other, **TIGHT)


# ---------------------------------------------------------------------------
# steps

GRID = [(1.0, 0.9), (0.75, 0.5), (0.5, 0.1)]  # pairs of noise levels
X, V = [[1.0, -1.0]], [[0.2, 0.4]]
levels = pytest.mark.parametrize(("s", "t"), GRID)
exact = pytest.mark.parametrize("module", [precise, dance_precise])


def step(module, s, t, eta):
    """One step of fixed latents -> (mean, std)."""
    v, x, s, t = map(torch.tensor, (V, X, s, t))
    made = module.transition(v, x, s, t, eta=eta)
    return made.mean, made.std.reshape(())


@levels
def test_precise_at_eta_sqrt_2_is_ancestral_ddim(s, t):
    same(step(precise, s, t, math.sqrt(2)), step(ddim, s, t, 1.0))


@levels
@exact
def test_precise_without_noise_is_the_ode(module, s, t):
    same(step(module, s, t, 0.0), step(ode, s, t, 0.0))


@levels
@exact
def test_precise_with_noise_without_end_is_cps_at_1_a_jump_to_x0(module, s, t):
    mean, std = step(module, s, t, 200.0)
    same((mean, std), step(cps, s, t, 1.0))
    x0 = torch.tensor(X) - s * torch.tensor(V)
    same((mean, float(std)), ((1 - t) * x0, t))


@levels
@pytest.mark.parametrize("eta", [0.3, 0.7, 1.5])
def test_a_precise_step_is_a_cps_step_with_an_angle_of_its_own(eta, s, t):
    rho = (t * (1 - s) / (s * (1 - t))) ** (eta**2 / 2)
    same(step(precise, s, t, eta), step(cps, s, t, 2 / math.pi * math.acos(rho)))


# ---------------------------------------------------------------------------
# methods on denoising steps


def trusting(threshold, divergence="scaled"):
    return make(grpo, trust={"threshold": threshold, "divergence": divergence}, clip=OPEN)


def moved(policy):
    """Move the policy away from the one that sampled."""
    torch.nn.init.normal_(policy.net[2].bias, std=0.3)


divergences = pytest.mark.parametrize("divergence", ["scaled", "raw", "velocity"])


@divergences
def test_a_trust_region_without_end_is_grpo_with_a_clip_without_end(divergence):
    wide, open_ = trusting(1e9, divergence), make(grpo, clip=OPEN)
    policy, rollout, _, rows = prepared(wide, ToyPolicy(0.1))
    moved(policy)
    same(*(backward(a, policy, rollout, rows) for a in (wide, open_)))
    # and not because nothing would ever be dropped
    tight = trusting(1e-9, divergence)
    metrics = tight.loss(tight.score(policy, rollout, rows), rows).metrics
    assert 0 < float(metrics["policy/clip_fraction"]) < len(rows)


@divergences
@pytest.mark.parametrize("clip", [(1e-4, 1e-4), OPEN])
def test_the_first_update_of_a_trust_region_is_grpo_clipped_or_not(clip, divergence):
    tight, plain = trusting(1e-9, divergence), make(grpo, clip=clip)
    policy, rollout, _, rows = prepared(tight, ToyPolicy(0.1))
    same(*(backward(a, policy, rollout, rows) for a in (tight, plain)))


def test_a_trust_regions_divergence_is_grpos_exact_kl_to_the_old_policy():
    """The anchor, which is reset now and then, is the policy that sampled."""
    own, held = trusting(1.0), make(grpo, kl_weight=1.0, reference="reset")
    policy, rollout, _, rows = prepared(own, ToyPolicy(0.1))
    moved(policy)
    one, other = (a.score(policy, rollout, rows) for a in (own, held))
    assert one["moved"].min() > 1e-4
    same(one["moved"], other["kl"])


def test_the_jacobian_weight_of_a_guard_is_inverse_lambda_of_a_plain_ratio():
    """On policy both give -A sign(Q) noise / d: unit weight on every step."""
    guard = make(grpo, ratio="guard", step_weight="jacobian", clip=OPEN)
    plain = make(grpo, step_weight="inverse_lambda", clip=OPEN)
    policy, grads = ToyPolicy(0.1), []
    for algorithm in (guard, plain):
        _, rollout, _, rows = prepared(algorithm, policy)
        grads.append(backward(algorithm, policy, rollout, rows)[1])
    same(*grads)
    lam = 1 / step_weight("inverse_lambda", rollout, rows)
    same(lam, pulls(rollout, rows) / spreads(rollout, rows))


@pytest.mark.parametrize("sde", ["flow_sde", "dance_sde", "precise", "cps", "ddim"])
def test_distillation_is_grpo_without_advantage_held_to_the_teacher(sde):
    """A = 0, KL weight 1 and kl=exact, of any SDE; the toy's teacher is its reference."""
    teacher = {"adapter": "somewhere", "guidance": "none"}
    own = make(opd, sde=sde, teachers={"one": teacher})
    other = make(grpo, sde=sde, kl_weight=1.0, clip=OPEN)
    policy = ToyPolicy(0.3)
    rollout = roll_out(policy, own)
    rows = own.columns(rollout, ones(rollout), seed=0, iteration=0)
    assert not (rollout.plan.trained != (rollout.plan.eta > 0)).any()
    assert torch.equal(rows.src, rollout.src)
    more = {"dst": rollout.dst, "log_prob": rollout.log_prob, "adv": 0 * rows.adv}
    moved(policy)
    loss, slope = backward(own, policy, rollout, rows)
    assert loss > 1e-3 and slope.norm() > 1e-3
    same((loss, slope), backward(other, policy, rollout, Columns({**rows.data, **more})))


# ---------------------------------------------------------------------------
# methods on the forward process, and media


def test_supervised_training_is_raft_with_every_sample_kept():
    class SFT(raft.RAFT):
        """Draws of levels and noise belong to a method's name."""

    own, other = make(sft, prompt_dropout=0), SFT(raft.ALGORITHM.Config(top=8))
    rollout, policy = roll_out(ToyPolicy(0.1), own), ToyPolicy(0.3)
    ranked = Advantages(leaf=torch.linspace(-1, 1, len(rollout.leaf)))
    rows = own.columns(rollout, ones(rollout), seed=0, iteration=0)
    alike = other.columns(rollout, ranked, seed=0, iteration=0)
    alike = Columns({**alike.data, "text": alike.prompt})[alike.state.argsort()]
    same(backward(own, policy, rollout, rows), backward(other, policy, rollout, alike))


def test_a_pair_of_files_is_the_best_and_the_worst_of_a_group():
    """The pair alone, as files bring it, and the group that it is the best and worst of."""
    algorithm, policy = make(dpo), ToyPolicy(0.3)
    group = roll_out(ToyPolicy(0.1), algorithm, prompts=1)
    worth = torch.tensor([0.0, 0.3, -0.2, 0.4, 0.0, -0.2, 0.1, -0.9])
    # the smallest key of a group's samples is that of its noise, so the pair has to hold it
    ends = torch.stack([group.leaf_key.argmin(), group.leaf_key.argmax()])
    worth[ends] = torch.tensor([1.5, -1.2])
    pair = replace(
        group,
        **{name: getattr(group, name)[ends] for name in ("leaf", "leaf_edge", "leaf_key", "group")},
    )
    found = []
    for rollout, leaf in ((group, worth), (pair, torch.tensor([1.0, -1.0]))):
        rows = algorithm.columns(rollout, Advantages(leaf=leaf), seed=0, iteration=0)
        found.append(backward(algorithm, policy, rollout, rows))
    same(*found)


def gradient_of(policy, *terms):
    learner(policy).gradient(list(terms))
    return gradient(policy.net).clone()


def test_a_data_anchor_of_weight_0_is_the_method_without_one():
    """A run makes no call for it, see tests/training/test_data_anchor.py."""
    algorithm, policy = make(nft), ToyPolicy(0.3)
    _, rollout, _, rows = prepared(algorithm, ToyPolicy(0.1))
    media = roll_out(ToyPolicy(0.5), algorithm, copies=4, seed=7)
    objective = DataAnchor(0.0)
    off = term(objective, media, objective.rows(media, seed=0, iteration=0))
    own = term(algorithm, rollout, rows)
    alone = gradient_of(policy, own)
    assert alone.norm() > 1e-3
    same(gradient_of(policy, own, off), alone)


def test_a_data_anchor_alone_is_supervised_fine_tuning():
    class Sft(sft.SFT):
        """Draws of levels and noise belong to a method's name."""

    Sft.__name__ = "DataAnchor"
    policy, method = ToyPolicy(0.3), Sft(sft.SFTConfig(prompt_dropout=0))
    data = roll_out(ToyPolicy(0.5), method, copies=4, seed=7)
    rows = method.columns(data, ones(data), seed=3, iteration=2)
    own = DataAnchor(1.0).rows(data, seed=3, iteration=2)
    assert torch.equal(own.sigma, rows.sigma) and torch.equal(own.noise_key, rows.noise_key)
    one = gradient_of(policy, term(method, data, rows))
    other = gradient_of(policy, term(DataAnchor(1.0), data, own))
    assert one.norm() > 1e-2 and torch.equal(one, other)


def test_a_data_anchor_on_the_policys_own_samples_at_the_methods_levels_is_raft():
    policy, method = ToyPolicy(0.3), make(raft, top=8)
    own = roll_out(ToyPolicy(0.1), method)
    rows = method.columns(own, ones(own), seed=0, iteration=0)
    rows = rows[rows.state.argsort()]
    beside = paired(DataAnchor(1.0).rows(own, seed=0, iteration=0), rows, own.group)
    one = backward(method, policy, own, rows)
    same(one, backward(DataAnchor(1.0), policy, own, beside))


# ---------------------------------------------------------------------------
# rewards


@pytest.mark.parametrize("outcome", ["reward", "win_rate"])
@pytest.mark.parametrize("std", ["group", "global", None])
@pytest.mark.parametrize("how", ["rewards", "advantages", "gdpo"])
def test_one_domain_is_as_without_domains_bit_for_bit(how, std, outcome, monkeypatch):
    monkeypatch.undo()  # scores are fp32
    torch.set_default_dtype(torch.float32)
    media = torch.tensor(
        [[1, 2, 30, 70, 4, 8, 20, 10], [0.1, 0.4, 5, 3, 0.2, 0.1, 1, 2]]
    ).T.contiguous()
    group = torch.arange(8) // 2
    context = MediaContext(meta=[{"domain": "a"}] * 8, group=group)

    def scored(**domains):
        read = {"x": lambda media, *_: media[:, 0], "y": lambda media, *_: media[:, 1]}
        rules = {"x": {}, "y": {"weight": 0.5}}
        rewards = {k: {"reward": read[k], **rules[k], **domains} for k in read}
        return score(media, ["p"] * 8, rewards, context)

    plain, one = scored(), scored(domains=["a"])
    assert plain.domain is None and one.domain == ["a"] * 8
    assert torch.equal(plain.total, one.total)
    algorithm = make(grpo, combine=how, std=std, outcome=outcome)
    leaves = [algorithm.leaf_advantages(found, group) for found in (plain, one)]
    assert torch.equal(*leaves) and bool(leaves[0].any())
    before, after = reward_metrics(plain), reward_metrics(one)
    assert before == {k: after[k] for k in before} and {*after} - {*before} == {"reward/total/a"}
