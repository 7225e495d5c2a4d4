"""GARDO's gate: only samples with a suspect reward are held to the reference."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import small
import torch
from toy import gradient, prepared, rewards_of

from flowrl.advantages import suspects
from flowrl.advantages.suspicion import ranks
from flowrl.algorithms import Algorithm, awm, crd, grpo, nft, prdp, reward_gradient
from flowrl.algorithms.common.base import check_gated, checked_loss
from flowrl.config.compose import ConfigError
from flowrl.training import gradient as objective
from flowrl.types import Advantages, Columns

MAIN = [9.0, 9, 7, 5, 3, 1]
AUXILIARY = {"a": [1.0, 6, 5, 4, 4, 2], "b": [2.0, 3, 3, 3, 1, 6]}
METHODS = {
    "grpo exact": (grpo, {"kl_weight": 0.3}),
    "grpo flow_grpo": (grpo, {"kl_weight": 0.3, "kl": "flow_grpo"}),
    "grpo velocity": (grpo, {"kl_weight": 0.3, "kl": "velocity"}),
    "grpo of sequences": (grpo, {"kl_weight": 0.3, "ratio": "sequence"}),
    "tree": (grpo, {"kl_weight": 0.3, "plan": "tree", "window": {"size": 2}}),
    "nft": (nft, {"kl_weight": 0.3}),
    "awm": (awm, {"kl_weight": 0.3, "steps": 3}),
    "crd": (crd, {"kl_weight": 0.3, "steps": 2}),
    "prdp": (prdp, {"kl_weight": 0.3}),
    "draft": (reward_gradient, {"kl_weight": 0.3, "last": 2}),
}


def made(main=MAIN, valid=None, **auxiliary):
    raw = {"r": torch.tensor(main)} | {k: torch.tensor(v) for k, v in auxiliary.items()}
    rewards = rewards_of(main, raw=raw)
    return rewards if valid is None else replace(rewards, valid=torch.tensor(valid))


def gate(rewards, *, share=0.1, sign="hacked", main="r", auxiliary=("a", "b")):
    out = suspects(rewards, main=main, auxiliary=auxiliary, share=share, sign=sign)
    return out.tolist()


# --- who is suspect


def test_equal_scores_share_the_mean_of_their_ranks():
    assert ranks(torch.tensor(MAIN)).tolist() == [1.5, 1.5, 3, 4, 5, 6]
    assert ranks(torch.tensor(AUXILIARY["a"])).tolist() == [6, 1, 2, 3.5, 3.5, 5]
    assert ranks(torch.tensor(AUXILIARY["b"])).tolist() == [5, 3, 3, 3, 6, 1]


@pytest.mark.parametrize(
    ("sign", "share", "expected"),
    [
        ("hacked", 0.1, [1, 0, 0, 0, 0, 0]),
        ("hacked", 1.0, [1, 0, 0, 0, 0, 0]),  # the lowest of those at least 0 is never above it
        ("code", 0.1, [0, 0, 0, 0, 0, 1]),
        ("code", 0.5, [0, 0, 0, 1, 0, 1]),
        ("code", 1.0, [0, 0, 1, 1, 0, 1]),
    ],
)
def test_the_gate_of_six_samples_by_hand(sign, share, expected):
    """Mean ranks of a and b are 5.5 2 2.5 3.25 4.75 3, those of the main reward 1.5 1.5 3 4 5 6.

    hacked: u = 4 .5 -.5 -.75 -.25 -3, at least 0 are .5 4, percentiles 90 and 0 are 3.65 and .5.
    code: u = -4 -.5 .5 .75 .25 3; at least 0 are .25 .5 .75 3, percentiles 90, 50, 0: 2.325, .625
    and .25.
    """
    assert gate(made(**AUXILIARY), sign=sign, share=share) == expected


def test_code_is_the_formula_of_the_authors_and_hacked_its_mirror():
    """Without ties; with one auxiliary reward, changing places with it is changing the sign."""
    torch.manual_seed(0)
    main, a, b = torch.randn(3, 200)
    rewards = rewards_of(main, raw={"r": main, "a": a, "b": b})
    rank = [(-x.numpy()).argsort().argsort() + 1.0 for x in (main, a, b)]
    u = rank[0] - (rank[1] + rank[2]) / 2
    for share in (0.1, 0.25, 0.5):
        expected = u > np.percentile(u[u >= 0], 100 - share * 100)
        assert gate(rewards, share=share, sign="code") == expected.astype(float).tolist()
    one = {"share": 0.2, "auxiliary": ("a",)}
    assert gate(rewards, sign="code", **one) == gate(rewards, share=0.2, main="a", auxiliary=("r",))
    assert gate(rewards, sign="code", **one) != gate(rewards, **one)


def test_nobody_is_suspect_where_the_rewards_agree():
    assert gate(made(a=MAIN, b=MAIN)) == [0] * 6  # all u are 0, and none exceeds another
    one = {"main": [1.0], "a": [2.0], "b": [3.0]}
    assert gate(made(**one)) == [0]
    assert gate(made([float("nan")] * 2, a=[1.0, 2.0], b=[1.0, 2.0])) == [0, 0]


def test_a_sample_without_a_score_has_no_rank():
    """With and without it, the others' gates are the same; its own is 0."""
    nan = float("nan")
    expected = gate(made(**AUXILIARY), sign="code", share=0.5)
    for where in range(3):
        rows = [[*values, 10.0] for values in (MAIN, AUXILIARY["a"], AUXILIARY["b"])]
        rows[where][-1] = nan
        rewards = made(rows[0], valid=[True] * 7, a=rows[1], b=rows[2])
        assert gate(rewards, sign="code", share=0.5) == [*expected, 0]
    rows = [[*values, 10.0] for values in (MAIN, AUXILIARY["a"], AUXILIARY["b"])]
    rewards = made(rows[0], valid=[True] * 6 + [False], a=rows[1], b=rows[2])
    assert gate(rewards, sign="code", share=0.5) == [*expected, 0]


# --- what the gate does to a loss


def rows_of(name, found=None):
    """Policy, rollout, and rows with the gate `found` of each sample."""
    module, options = METHODS[name]
    algorithm = module.ALGORITHM(module.ALGORITHM.Config(**options))
    torch.manual_seed(3)
    policy, rollout, advantages, rows = prepared(algorithm)
    torch.nn.init.normal_(policy.net[2].bias, std=0.3)
    if found is not None:
        held = replace(advantages, kl_gate=found(len(rollout.leaf)))
        rows = algorithm.columns(rollout, held, seed=0, iteration=0)
    return algorithm, policy, rollout, rows


def trained(name, found=None, micro=10**6):
    algorithm, policy, rollout, rows = rows_of(name, found)
    policy.zero_grad()
    metrics = objective.accumulate(
        algorithm,
        policy,
        rollout,
        rows,
        micro=micro,
        total_weight=float(rows.weight.sum()),
        backward=lambda loss: loss.backward(),
    )
    return gradient(policy.net), {k: v.item() for k, v in metrics.items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_gate_of_ones_is_the_ordinary_kl_bit_for_bit(name):
    plain, metrics = trained(name)
    gated, same = trained(name, torch.ones)
    assert torch.equal(plain, gated) and metrics == same


@pytest.mark.parametrize("name", METHODS)
def test_a_gate_of_zeros_is_a_kl_weight_of_zero_and_keeps_the_metric(name, monkeypatch):
    _, metrics = trained(name)
    closed, same = trained(name, torch.zeros)
    assert same["policy/kl"] == metrics["policy/kl"] > 0
    module, options = METHODS[name]
    monkeypatch.setitem(METHODS, name, (module, options | {"kl_weight": 0.0}))
    free, _ = trained(name)
    torch.testing.assert_close(closed, free, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["grpo exact", "grpo of sequences", "tree", "nft", "prdp"])
def test_the_weight_of_a_gated_row_depends_on_no_micro_batch(name):
    """The trap of the authors' code, whose mean is over the gated rows of a micro-batch."""

    def some(n):
        return (torch.arange(n) % 5 == 0).float()

    whole, metrics = trained(name, some)
    part, same = trained(name, some, micro=7)
    torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-6)
    assert same["policy/kl"] == pytest.approx(metrics["policy/kl"], rel=1e-5)


def test_the_kl_is_the_sum_over_gated_rows_divided_by_all_rows():
    """Two rows of a method whose loss is the KL alone: gates 1 and 0, KLs 3 and 5, weights 1 and
    3: 1 x 1 x 3 + 3 x 0 x 5 = 3; policy/kl is 1 x 3 + 3 x 5 = 18."""
    algorithm = reward_gradient.ALGORITHM(reward_gradient.ALGORITHM.Config(kl_weight=1.0))
    kl = torch.tensor([3.0, 5.0], requires_grad=True)
    scores = {"reward": torch.zeros(2), "kl": kl}
    gates = {"weight": torch.tensor([1.0, 3.0]), "kl_gate": torch.tensor([1.0, 0.0])}
    out = checked_loss(algorithm, scores, Columns(gates))
    assert out.loss.item() == 3 and out.metrics["policy/kl"].item() == 18
    out.loss.backward()
    assert kl.grad.tolist() == [1, 0]


def test_a_step_that_samples_share_has_the_mean_of_their_gates():
    _, _, rollout, rows = rows_of("tree", lambda n: (torch.arange(n) % 4 == 0).float())
    assert rollout.plan.leaves == 4 and set(rows.kl_gate.tolist()) <= {0.0, 0.5, 1.0}
    depth = rollout.plan.depth[rollout.plan.trained].min()
    shallow = torch.isin(rows.dst, rollout.dst[rollout.plan.depth[rollout.edge] == depth])
    assert set(rows.kl_gate[shallow].tolist()) == {0.0, 0.5}


def test_a_method_that_drops_the_gate_is_found():
    held = Advantages(leaf=torch.ones(2), kl_gate=torch.ones(2))
    with pytest.raises(ValueError, match=r"Algorithm.columns gives no column kl_gate, so .*add"):
        check_gated(Algorithm(None), held, Columns({"adv": torch.ones(2)}))
    check_gated(Algorithm(None), replace(held, kl_gate=None), Columns({"adv": torch.ones(2)}))
    assert Algorithm(SimpleNamespace()).kl_gate(made()) is None


# --- a run

ON = {
    "reward__saturation__weight": "0",
    "algorithm__kl_gate__main": "jpeg",
    "algorithm__kl_gate__auxiliary": "[saturation]",
    "algorithm__kl_gate__share": "0.5",
    "algorithm__kl_weight": "0.5",
    "data__eval": "null",
    "batch__group": "4",
}


@pytest.mark.parametrize("more", [{}, {"draw__mode": "balance", "draw__rounds": "1"}])
def test_a_run_logs_the_share_that_is_held(tmp_path, more):
    trainer = small.trainer(tmp_path / "run", "flow_grpo", **(ON | more))
    trained = []
    update = trainer.learner.update
    trainer.learner.update = lambda batch, rows, *more: (
        trained.append(rows) or update(batch, rows, *more)
    )
    it = trainer.iterate(0)
    expected = suspects(
        it.rewards, main="jpeg", auxiliary=("saturation",), share=0.5, sign="hacked"
    )
    assert 0 < it.metrics["policy/kl_gate"] == float(expected.mean()) < 1
    assert {0.0, 1.0} == set(trained[-1].kl_gate.tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__kl_weight": "0"}, "main=jpeg chooses samples .* algorithm.kl_weight=0 holds"),
        ({"algorithm__kl_gate__auxiliary": "[]"}, r"main=jpeg and auxiliary=\[\]: the gate compar"),
        ({"algorithm__kl_gate__main": "null"}, r"main=null and auxiliary=\[saturation\]: the gate"),
        ({"algorithm__kl_gate__auxiliary": "[jpeg]"}, r"auxiliary=\[jpeg\]; name others there"),
        ({"algorithm__kl_gate__auxiliary": "[clip]"}, "names clip, and the rewards are jpeg, satu"),
        ({"algorithm__kl_gate__main": "clip"}, "or add it to be measured only, as reward.clip.we"),
        ({"reward__saturation__domains": "[a]"}, "one of them is asked for the prompts of some do"),
        ({"algorithm__kl_gate__share": "0"}, "kl_gate.share=0 should be greater than 0"),
        ({"algorithm__kl_gate__sign": "paper"}, "sign='paper' should be 'hacked' or 'code'"),
    ],
)
def test_gates_that_cannot_be_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        small.trainer(tmp_path / "run", "flow_grpo", **(ON | changes))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_old_samples_and_scores_that_are_missing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"replay.size=2 trains .*kl_gate.main=jpeg ranks"):
        small.trainer(tmp_path / "run", "nft", **(ON | {"replay__size": "2"}))
    with pytest.raises(ValueError, match="of reward b, which has no scores .* there are r, a"):
        gate(made(a=MAIN))
