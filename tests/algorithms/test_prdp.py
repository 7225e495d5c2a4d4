"""PRDP: differences of log-likelihood ratios regress differences of rewards."""

import pytest
import torch
from toy import ToyPolicy, backward, gradient, prepared, rewards_of

from flowrl.algorithms.prdp import ALGORITHM, pair_terms
from flowrl.types import Columns

NAN, DIMS = float("nan"), 4


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**{"std": None, "adv_clip": 1e6, **options}))


def batch_of(reward, old, group=None):
    """Rows of B samples of T steps each: reward (B,), old (B, T) log-probs of the old policy, group
    (B,)."""
    reward, old = torch.as_tensor(reward), torch.as_tensor(old)
    b, t = old.shape
    group = torch.zeros(b, dtype=torch.int64) if group is None else torch.as_tensor(group)
    columns = {"adv": reward, "sample": torch.arange(b) * 10, "unit": group, "prompt": group}
    flat = {name: value.repeat_interleave(t) for name, value in columns.items()}
    return Columns(
        {
            **flat,
            "log_prob": old.flatten(),
            "dims": torch.full((b * t,), float(DIMS)),
            "weight": torch.ones(b * t),
        }
    )


def evaluate(algorithm, batch, new, ref):
    """(mean loss, its derivative by each step's log-prob (B, T), LossOutput) at log-probs new and
    ref (B, T)."""
    new = torch.as_tensor(new).clone().requires_grad_()
    out = algorithm.loss(
        {"log_prob": new.flatten(), "log_prob_ref": torch.as_tensor(ref).flatten()}, batch
    )
    return float(out.loss.detach()) / len(batch), torch.autograd.grad(out.loss, new)[0], out


def all_pairs(d):
    return [(d[i] - d[j]) ** 2 for i in range(len(d)) for j in range(i)]


# --- the regression


def test_loss_is_zero_at_the_reference_for_equal_rewards():
    ref = torch.randn(5, 3)
    loss, grad, out = evaluate(make(), batch_of(torch.full((5,), 2.0), ref), ref, ref)
    assert loss == 0 and not bool(grad.any()) and float(out.metrics["policy/clip_fraction"]) == 0
    assert evaluate(make(), batch_of(torch.arange(5.0), ref), ref, ref)[0] > 0.01


def test_loss_by_hand():
    """beta 2, rewards 1 5, two steps of 4 dims: r_hat = 4 (.1 + .2) = 1.2 and 4 (0 - .05) = -.2;
    (1.4 - (-4 / 2))^2 = 11.56."""
    ref = torch.tensor([[-1.0, -2.0], [0.5, 0.0]])
    new = ref + torch.tensor([[0.1, 0.2], [0.0, -0.05]])
    loss, grad, _ = evaluate(make(beta=2.0, clip=100.0), batch_of([1.0, 5.0], ref), new, ref)
    assert loss == pytest.approx(11.56, rel=1e-5)
    # 4 rows, 4 dims
    assert grad.flatten().tolist() == pytest.approx(
        [x * 2 * 3.4 * 4 * 4 for x in (1, 1, -1, -1)], rel=1e-5
    )


def test_loss_is_zero_just_where_ratios_differ_as_rewards_do():
    """r_hat = r / beta + c, each group with its own c (log Z); any other spread costs."""
    reward, beta = torch.tensor([3.0, -1.0, 7.0, 2.0, 2.5, 100.0]), 10.0
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    ref = torch.randn(6, 3)
    r_hat = reward / beta + torch.tensor([5.0, -7.0])[group]
    share = torch.rand(6, 3)
    share = share / share.sum(1, keepdim=True)  # however it is spread over the steps
    new = ref + r_hat[:, None] * share / DIMS
    algorithm, batch = make(beta=beta, clip=1e6), batch_of(reward, ref, group)
    assert evaluate(algorithm, batch, new, ref)[0] < 1e-9
    for i in range(6):
        moved = new.clone()
        moved[i, 1] += 0.1 / DIMS
        # 2 of 3 pairs, half the groups
        assert evaluate(algorithm, batch, moved, ref)[0] == pytest.approx(
            2 * 2 * 0.1**2 / 2 / 6, rel=1e-2
        )


def test_sum_over_pairs_is_the_variance():
    """sum_{i<j} (d_i - d_j)^2 = B sum (d_i - mean)^2; the terms are means over
    each sample's B - 1 others."""
    d = torch.randn(7, dtype=torch.float64)
    term, held = pair_terms(d, d, torch.zeros(7))
    assert float(term.sum() * 6 / 2) == pytest.approx(sum(all_pairs(d.tolist())), rel=1e-12)
    assert float(term.sum() * 6 / 2) == pytest.approx(
        float(7 * (d - d.mean()).square().sum()), rel=1e-12
    )
    assert float(term.mean()) == pytest.approx(sum(all_pairs(d.tolist())) / 21, rel=1e-12)
    assert not bool(held.any())


def test_pairs_stay_within_their_group_and_a_single_sample_has_none():
    d, group = torch.tensor([1.0, 4.0, 100.0, 7.0, 2.0]), torch.tensor([0, 1, 2, 0, 1])
    assert pair_terms(d, d, group)[0].tolist() == [36.0, 4.0, 0.0, 36.0, 4.0]


def prepared_off(algorithm, size=0.3, **options):
    """Rollout of a policy that is not the reference, then the policy moves away."""
    policy, rollout, advantages, rows = prepared(algorithm, ToyPolicy(0.3), **options)
    policy.update("old", 0.0)
    torch.nn.init.normal_(policy.net[2].bias, std=size)
    return policy, rollout, advantages, rows


def step_ratios(algorithm, policy, rollout, rows, view="default"):
    """r_hat of each step from means and stds: (|y - mu_ref|^2 - |y - mu|^2) / 2 std^2 -> (samples,
    steps)."""
    with torch.no_grad():
        with policy.view(view):
            new = algorithm.transition(policy, rollout, rows)[0]
        with policy.view("reference"):
            ref = algorithm.transition(policy, rollout, rows)[0]
    y = rollout.states[rows.dst]
    gap = (y - ref.mean).square() - (y - new.mean).square()
    return (gap / (2 * new.std**2)).sum(1).double().view(-1, 7)


def test_a_huge_clip_is_rdp_on_a_rollout():
    """Mean over pairs of (r_hat_i - r_hat_j - (r_i - r_j) / beta)^2, r_hat by its closed form.

    Sums over dims and steps.
    """
    algorithm = make(beta=2.0, clip=1e6)
    policy, rollout, advantages, rows = prepared_off(algorithm)
    d = step_ratios(algorithm, policy, rollout, rows).sum(1) - advantages.leaf.double() / 2.0
    expected = sum(sum(all_pairs(group.tolist())) / 28 for group in d.view(3, 8)) / 3
    loss, _ = backward(algorithm, policy, rollout, rows)
    assert float(loss) / len(rows) == pytest.approx(expected, rel=1e-4) and expected > 0.1


def test_proximal_loss_is_the_larger_of_both_for_each_pair():
    """Each step's r_hat is kept within D clip of the old policy's; the clipped regression is the
    other candidate."""
    algorithm = make(beta=2.0, clip=0.02)
    policy, rollout, advantages, rows = prepared_off(algorithm)
    now, old = (step_ratios(algorithm, policy, rollout, rows, view) for view in ("default", "old"))
    near = torch.minimum(torch.maximum(now, old - 2 * 0.02), old + 2 * 0.02)
    target = advantages.leaf.double() / 2.0
    pairs = [
        [max(a, b) for a, b in zip(all_pairs(x.tolist()), all_pairs(y.tolist()), strict=True)]
        for x, y in zip(
            (now.sum(1) - target).view(3, 8), (near.sum(1) - target).view(3, 8), strict=True
        )
    ]
    loss, _ = backward(algorithm, policy, rollout, rows)
    expected = sum(sum(p) / 28 for p in pairs) / 3
    assert float(loss) / len(rows) == pytest.approx(expected, rel=1e-4)
    plain = sum(sum(all_pairs(x.tolist())) / 28 for x in (now.sum(1) - target).view(3, 8)) / 3
    assert expected > 1.01 * plain and float((now != near).double().mean()) > 0.1


# --- the clip


def test_a_step_beyond_the_clip_gets_no_gradient_where_the_clipped_loss_is_larger():
    """Rewards 0 and 10, so the second should rise. Its first step rose by .5 (clip .1): enough. Its
    second, by .05, may go on."""
    ref = torch.zeros(2, 2)
    new = torch.tensor([[0.0, 0.0], [0.5, 0.05]])
    loss, grad, out = evaluate(make(beta=1.0, clip=0.1), batch_of([0.0, 10.0], ref), new, ref)
    gap = DIMS * (0.1 + 0.05) - 10
    assert loss == pytest.approx(gap**2, rel=1e-5)
    assert grad[1, 0] == 0 and float(grad[1, 1]) == pytest.approx(4 * DIMS * 2 * gap, rel=1e-5)
    assert float(out.metrics["policy/clip_fraction"]) == 1
    assert float(out.metrics["policy/held"]) == 4


def test_a_step_beyond_the_clip_on_the_wrong_side_is_pulled_back():
    """It fell by .5 though its reward is higher: the unclipped loss is the larger, and its gradient
    stays."""
    ref = torch.zeros(2, 2)
    new = torch.tensor([[0.0, 0.0], [-0.5, 0.05]])
    loss, grad, out = evaluate(make(beta=1.0, clip=0.1), batch_of([0.0, 10.0], ref), new, ref)
    gap = DIMS * (-0.5 + 0.05) - 10
    assert loss == pytest.approx(gap**2, rel=1e-5)
    assert grad[1].tolist() == pytest.approx([4 * DIMS * 2 * gap] * 2, rel=1e-5)
    assert float(out.metrics["policy/held"]) == 0


def test_the_clip_is_around_the_old_policy_and_not_the_reference():
    """Where the old policy already is .5 above the reference, staying there is no step at all."""
    ref, old = torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [0.5, 0.5]])
    _, grad, out = evaluate(make(beta=1.0, clip=0.1), batch_of([0.0, 10.0], old), old, ref)
    assert float(out.metrics["policy/clip_fraction"]) == 0 and bool((grad[1] < 0).all())
    _, grad, out = evaluate(make(beta=1.0, clip=0.1), batch_of([0.0, 10.0], old), old + 0.2, ref)
    assert float(out.metrics["policy/clip_fraction"]) == 4 and not bool(grad.any())


def test_all_steps_clipped_leave_no_gradient():
    """All moved the right way, the further the better or worse they are, and beyond the clip: no
    pair pulls on until the next rollout."""
    reward = torch.tensor([4.0, 2.0, -2.0, -4.0])
    ref = torch.randn(4, 3)
    loss, grad, out = evaluate(
        make(beta=0.1, clip=0.1), batch_of(reward, ref), ref + 0.1 * reward[:, None], ref
    )
    assert float(out.metrics["policy/clip_fraction"]) == 12 and loss > 1
    assert not bool(grad.any())


# --- on rollouts


def test_the_first_gradient_is_that_of_reinforce_with_a_baseline():
    """At theta = old = ref, B samples: grad of the mean over pairs = -4 / (beta (B - 1)) sum (r_i -
    mean) grad log p_i."""
    algorithm, policy = make(beta=2.0), ToyPolicy()
    _, rollout, _, rows = prepared(algorithm, policy)
    loss, got = backward(algorithm, policy, rollout, rows)
    policy.zero_grad()
    (
        -4 / (2.0 * 7) * (rows.adv * 2 * algorithm.score(policy, rollout, rows)["log_prob"]).sum()
    ).backward()
    assert torch.allclose(got / len(rows), gradient(policy.net) / 3, rtol=1e-3, atol=1e-4)
    assert float(got.abs().max()) > 10


def test_the_reference_is_part_of_the_method_and_a_kl_can_be_added():
    assert make().needs == {"log_prob", "reference"}
    assert make(reference="ema").needs == {
        "log_prob",
        "anchor",
    }
    policy, rollout, _, rows = prepared_off(make())
    assert set(make().score(policy, rollout, rows)) == {"log_prob", "log_prob_ref"}
    scores = make(kl_weight=0.5).score(policy, rollout, rows)
    gap = make(kl_weight=0.5).loss(scores, rows).loss - make().loss(scores, rows).loss
    assert float(gap.detach()) == pytest.approx(0.5 * float(scores["kl"].detach().sum()), rel=1e-3)
    assert not scores["log_prob_ref"].requires_grad


def test_a_sample_at_the_mean_is_compared_and_an_invalid_one_is_not():
    """Group 0: rewards 1 2 3, the mean among them; group 1 all equal; group 2 has an invalid
    sample."""
    reward = torch.tensor([1.0, 2, 3, 4, 4, 4, NAN, 1, 5])
    _, rollout, advantages, rows = prepared(make(), copies=3, reward=reward)
    assert len(rows) == 7 * (3 + 0 + 2) and set(rows.unit.tolist()) == {0, 2}
    trained = {int(torch.nonzero(rollout.dst == d)) // 7 for d in rows.dst}
    assert trained == {0, 1, 2, 7, 8} and not bool(rows.adv.isnan().any())
    assert advantages.transition[:21].view(3, 7)[1].abs().max() == 0


def test_reward_differences_are_not_clipped_by_the_configuration():
    """configs/algorithm/prdp.yaml: rewards of kilobytes are far apart, and their differences are
    what is regressed."""
    from flowrl.config.load import load_config
    from flowrl.config.schema import options_of

    options = load_config(None, ["algorithm=prdp", "reward=jpeg"]).algorithm
    algorithm = ALGORITHM(ALGORITHM.Config(**options_of(options)))
    leaf = algorithm.leaf_advantages(rewards_of([0.0, 80.0, 10.0, 30.0]), torch.zeros(4))
    assert leaf.tolist() == [-30, 50, -20, 0]
