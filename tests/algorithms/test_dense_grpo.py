"""DenseGRPO: every state of a trajectory is completed by ODE, and a step gets its own gain."""

from dataclasses import replace

import pytest
import small
import torch
from toy import GRID, SAMPLER, ToyPolicy, advantages_of, rewards_of, roll_out, to_the_right

from flowrl import advantages as credit
from flowrl.algorithms import grpo
from flowrl.config.compose import ConfigError
from flowrl.samplers import ode, plan
from flowrl.types import SDE

DENSE = {"plan": "dense", "credit": "dense"}
STEPS = len(GRID) - 1
small.ALGORITHMS.setdefault("dense_grpo", {})
RUN = {"data__eval": "null", "batch__group": "6", "sampler__steps": "3", "iterations": "2"}


def made(**options):
    return grpo.ALGORITHM(grpo.ALGORITHM.Config(**(DENSE | options)))


def grown(copies=4, **options):
    algorithm = made(**options)
    return algorithm, roll_out(ToyPolicy(0.1), algorithm, copies=copies)


# --- the plan


def test_leaves_calls_and_trained_steps_of_four_steps_by_hand():
    """A chain of 3 SDE edges and its ODE end; x_T is completed by 4 ODE edges, the states after the
    first and second step by 3 and 2. Calls: 4 of the chain, 3 + 2 + 1 more of completions."""
    p = plan.dense(torch.linspace(1, 0, 5), etas=[0.7] * 3)
    assert p.parent.tolist() == [-1, 0, 1, 2, -1, 4, 5, 6, 0, 8, 9, 1, 11]
    assert p.kind.eq(SDE).tolist() == [True] * 3 + [False] * 10
    assert p.leaf_edges.tolist() == [3, 7, 10, 12] and int(p.trained.sum()) == 3
    assert plan.nfe(p) == 4 + 3 + 2 + 1


@pytest.mark.parametrize("steps", [2, 3, 8, 10])
def test_counts_are_formulas_of_the_steps(steps):
    p = plan.dense(torch.linspace(1, 0, steps + 1), etas=[0.7] * (steps - 1))
    assert (p.leaves, int(p.trained.sum())) == (steps, steps - 1)
    for copies in (1, 3):
        assert plan.nfe(p, copies) == copies * steps * (steps + 1) // 2


def test_each_step_has_a_noise_level_of_its_own():
    etas = [0.3, 0.5, 0.9]
    p = plan.dense(torch.linspace(1, 0, 5), etas=etas)
    assert p.eta[p.trained].tolist() == etas and not bool(p.eta[~p.trained].any())
    with pytest.raises(ValueError, match="etas has 2 noise levels, and 4 steps have 3 noisy ones"):
        plan.dense(torch.linspace(1, 0, 5), etas=etas[:2])


def test_a_leaf_is_the_ode_completion_of_its_state():
    """Walked by hand with Euler steps of the same policy, from the stored states."""
    policy = ToyPolicy(0.1)
    rollout = roll_out(policy, made(), copies=1)
    at = rollout.leaf_edge
    for n in range(len(rollout.src)):
        x, s = rollout.states[rollout.dst[n]][None], float(rollout.sigma_next[n])
        for a, b in zip(GRID[:-1], GRID[1:], strict=True):
            if float(a) <= s + 1e-12:
                row = rollout.prompt[rollout.dst[n]][None]
                v = policy.velocity(x, a[None], None, row)
                x = ode.step(v, x, a[None], b[None])
        leaf = rollout.leaves[at == n]
        assert len(leaf) == 1  # exactly one leaf completes a state
        torch.testing.assert_close(leaf, x, rtol=1e-5, atol=1e-5)


# --- credit


def test_gains_add_up_to_the_reward_of_the_trajectory_minus_that_of_the_ode():
    _, rollout = grown()
    reward = to_the_right(rollout).total
    gain = credit.gains(rollout, reward)
    depth = credit.trees.depths(rollout)
    tree = credit.trees.of_transitions(rollout, rollout.tree)
    for t in range(int(rollout.tree.max()) + 1):
        mine = rollout.tree == t
        start = reward[mine & (rollout.leaf_edge < 0)]
        last = mine & (rollout.leaf_edge >= 0) & (depth[rollout.leaf_edge] == STEPS - 2)
        assert len(start) == 1 and int(last.sum()) == 1
        assert float(gain[tree == t].sum()) == pytest.approx(float(reward[last] - start), abs=1e-5)


def test_without_noise_no_step_gains_anything():
    """All leaves of a tree are one state, whose edges the loss reads none the less."""
    policy, algorithm = ToyPolicy(0.1), made()
    still = plan.dense(GRID, etas=[0.0] * (STEPS - 1))
    assert not bool(still.trained.any())
    kept = torch.zeros(still.edges, dtype=torch.bool)
    kept[: STEPS - 1] = True
    algorithm.plan = lambda *_, **__: replace(still, trained=kept)
    rollout = roll_out(policy, algorithm, copies=3)
    assert rollout.nfe == 3 * 3 * STEPS  # equal ODE edges are walked once
    gain = credit.gains(rollout, to_the_right(rollout).total)
    assert len(gain) == 9 * (STEPS - 1) and not bool(gain.any())


def test_z_scores_of_two_steps_by_hand():
    """Three steps, two trajectories of one prompt; leaves: own end, of x_T, after the first step.

    Rewards (5, 1, 2) and (4, 2, 6): gains of step 0 are 1 and 4, of step 1 are 3 and -2. With mean
    2.5 and std 1.5, and .5 and 2.5, all z-scores are +-1; a gain says nothing of other steps.
    """
    grid = torch.linspace(1, 0, 4)
    rollout = roll_out(ToyPolicy(0.1), made(), copies=2, prompts=1, grid=grid)
    reward = torch.tensor([5.0, 1, 2, 4, 2, 6])
    assert credit.gains(rollout, reward).tolist() == [1, 3, 4, -2]
    assert credit.dense(rollout, reward, eps=0.0).tolist() == [-1, 1, 1, -1]
    found = credit.step_gains(rollout, rewards_of(reward))
    assert found == {
        "dense/reward": 4.5,
        "dense/gain/0": 2.5,
        "dense/balance/0": 1.0,
        "dense/gain/1": 0.5,
        "dense/balance/1": 0.0,
    }
    same = torch.tensor([5.0, 1, 2, 4, 3, 4])  # step 0 gains 1 in both, and teaches nothing
    assert credit.dense(rollout, same, eps=0.0).tolist() == [0, 1, 0, -1]


def test_a_completion_without_a_score_leaves_out_the_two_steps_that_it_joins():
    """Of the first trajectory the completion after its first step fails: both of its steps get 0,
    and those of the other trajectories are compared among themselves."""
    grid = torch.linspace(1, 0, 4)
    rollout = roll_out(ToyPolicy(0.1), made(), copies=3, prompts=1, grid=grid)
    reward = torch.tensor([5.0, 1, float("nan"), 4, 2, 6, 1, 0, 0])
    assert credit.dense(rollout, reward, eps=0.0).tolist() == [0, 0, 1, -1, -1, 1]
    assert credit.step_gains(rollout, rewards_of(reward))["dense/gain/0"] == 2.0


def test_rows_are_the_noisy_steps_with_their_own_credit():
    algorithm, rollout = grown()
    rewards = to_the_right(rollout)
    found = advantages_of(algorithm, rollout, rewards)
    rows = algorithm.columns(rollout, found, seed=0, iteration=0)
    expected = credit.dense(rollout, rewards.total, ddof=0, eps=1e-4, clip=5.0)
    assert torch.equal(found.transition, expected)
    assert len(rows) == 12 * (STEPS - 1) == 12 * algorithm.most_rows(rollout.plan, STEPS)


def test_completions_have_the_guidance_of_the_rollout():
    """One engine asks one function for all velocities: none is asked with another guidance."""
    policy, algorithm = ToyPolicy(0.1), made()
    roll_out(policy, algorithm, copies=2)
    assert set(policy.guidances) == {"none"} and policy.rows == 6 * STEPS * (STEPS + 1) // 2


# --- runs


def test_a_run_scores_all_leaves_and_a_resumed_one_equals_it(tmp_path):
    """Two prompts of six samples: two trajectories with three leaves each."""
    small.trainer(tmp_path / "whole", "dense_grpo", **RUN).run()
    for line in small.lines(tmp_path / "whole"):
        assert {f"dense/{what}/{k}" for what in ("gain", "balance") for k in range(2)} < set(line)
        assert line["policy/rows"] <= 2 * 2 * 2 and line["nfe/rollout"] == 2 * 2 * 6
    small.trainer(tmp_path / "run", "dense_grpo", **(RUN | {"iterations": "1"})).run()
    result = small.invoke("train", "--resume", tmp_path / "run", "iterations=2")
    assert result.exit_code == 0, result.output
    assert small.same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__credit": "leaf"}, "plan=dense with credit=leaf: plan=dense completes every"),
        ({"algorithm__plan": "full"}, "plan=full with credit=dense: .* set both, or neither"),
        ({"batch__group": "8"}, "batch.group=8 is not a multiple of the plan's 3 leaves; try 6"),
        ({"batch__group": "3"}, "group=3 is one trajectory with its completions, and algorithm.cr"),
        (
            {"algorithm__std": "global"},
            "std=global has no meaning for credit=dense, which z-sco",
        ),
        ({"draw__mode": "balance"}, "chooses whole samples, and plan=dense forks; use draw.mode"),
        ({"algorithm__keep": "2"}, "keep=2 leaves out whole samples, which plan=dense"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        small.trainer(tmp_path / "run", "dense_grpo", **(RUN | changes))


def test_the_sampler_s_noise_is_that_of_every_step():
    p = made().plan(GRID, sampler=SAMPLER, iteration=0, seed=0)
    assert set(p.eta[p.trained].tolist()) == {SAMPLER.eta}
