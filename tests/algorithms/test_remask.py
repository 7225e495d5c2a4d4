"""Methods that mask finished samples again: masks, scores, and the loss by hand."""

import masked
import pytest
import torch

from flowrl.algorithms import remask
from flowrl.samplers.common.unmasking import MASK
from flowrl.training.loop import Trainer


def prepared(own, **options):
    """(algorithm, rollout, its rows) of two samples of each prompt, one with advantage 1."""
    algorithm = remask.Remask(remask.RemaskConfig(**options))
    made = masked.roll_out(own, algorithm)
    advantages = algorithm.advantages(made, torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0]))
    return algorithm, made, algorithm.columns(made, advantages, seed=0, iteration=0)


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"mask": "all"}, [16]),
        ({"mask": "ramp", "mask_from": 0.5, "draws": 4}, [10, 12, 14, 16]),
        ({"mask": "cosine", "draws": 5}, None),
    ],
)
def test_masks_have_their_shares_are_stored_and_depend_on_names_alone(options, counts):
    own = masked.policy()
    _, made, rows = prepared(own, **options)
    again = prepared(own, **options)[2]
    assert torch.equal(rows.masked, again.masked) and rows.masked.dtype == torch.bool
    found = rows.masked.sum(1).view(4, -1)  # samples without a signal have no rows
    if counts is None:
        assert int(found.min()) >= 1 and len(torch.unique(found)) > 3
    else:
        assert found.tolist() == [counts] * 4
    torch.testing.assert_close(rows.weight.sum(1), torch.ones(len(rows)))
    assert torch.equal(rows.weight > 0, rows.masked)


def test_with_all_masked_scores_are_the_log_probs_of_the_empty_grid():
    own = masked.policy()
    algorithm, made, rows = prepared(own, mask="all")
    found = algorithm.score(own, made, rows)["log_prob"]
    blank = torch.full((4, 4, 4), MASK)
    log_p = own.velocity(blank, 1.0, made.cond, rows.prompt).log_softmax(-1).flatten(1, 2)
    tokens = made.at(rows.state).flatten(1).long()[..., None]
    torch.testing.assert_close(found, log_p.gather(-1, tokens)[..., 0])


def test_without_a_ratio_the_gradient_is_that_of_the_weighted_cross_entropy():
    """-A grad log p, which PPO's clipped ratio has, too, at the old policy."""
    own = masked.policy()
    parameters = list(own.modules["module"].parameters())

    def gradient(clip):
        algorithm, made, rows = prepared(own, mask="cosine", draws=2, clip=clip)
        scores = algorithm.score(own, made, rows)
        if clip is not None:
            rows = type(rows)({**rows.data, "log_prob": scores["log_prob"].detach()})
        out = algorithm.loss(scores, rows)
        return torch.autograd.grad(out.loss, parameters), out, made, rows

    plain, _, made, rows = gradient(None)
    ratio, out, *_ = gradient((0.2, 0.2))
    for a, b in zip(plain, ratio, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert float(out.metrics["policy/clip_fraction"]) == 0
    x0 = made.at(rows.state).flatten(1).long()
    x = torch.where(rows.masked, MASK, x0).view(-1, 4, 4)
    logits = own.velocity(x, 0.5, made.cond, rows.prompt).flatten(1, 2)
    error = torch.nn.functional.cross_entropy(logits.mT, x0, reduction="none")
    mean = (error * rows.masked).sum(1) / rows.masked.sum(1)
    for a, b in zip(
        plain, torch.autograd.grad((rows.adv[:, 0] * mean).sum(), parameters), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_ratio_beyond_the_clip_gives_no_gradient():
    algorithm = remask.Remask(remask.RemaskConfig(clip=(0.2, 0.2)))
    log_prob = torch.tensor([[0.0, 0.3, -0.3]] * 2, requires_grad=True)
    rows = {"adv": torch.tensor([[2.0], [-1.0]]), "weight": torch.ones(2, 3) / 3}
    batch = remask.Columns({**rows, "log_prob": torch.zeros(2, 3)})
    out = algorithm.loss({"log_prob": log_prob}, batch)
    out.loss.backward()
    moved = (log_prob.grad != 0).tolist()
    assert moved == [[True, False, True], [True, True, False]]
    # per token -A max-min: -2 (1, 1.2, exp(-.3)) and 1 (1, exp(.3), .8)
    by_hand = (-2 * (1 + 1.2 + 0.740818) + (1 + 1.349859 + 0.8)) / 3
    assert float(out.loss.detach()) == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": "all", "clip": [0.5, 0.5], "std": None, "kl_weight": 0.04},
        {"mask": "cosine", "draws": 2, "clip": None},
    ],
)
def test_runs_train_and_are_off_their_old_policy_in_the_second_update(options, tmp_path):
    settings = {
        "algorithm": {"name": "remask", **options},
        "batch": {"prompts": 2, "group": 4, "updates": 2},
        "optimizer": {"lr": 3e-2},
        "sampler": {"steps": 3, "eta": 1.0, "guidance": "none", "init_noise": "group"},
        "guard": {"check_rewards": False},
        "train": {"mode": "full"},
        "data": {"eval": None},
        "iterations": 2,
        "output": str(tmp_path / "run"),
    }
    live = {"rewards": masked.counted, "prompts": {"train": masked.PROMPTS}}
    for it in Trainer(settings, policy=masked.policy(), **live):
        assert it.metrics["policy/rows"] > 0 and it.metrics["policy/grad_norm"] > 0
        assert ("policy/log_ratio" in it.metrics) == (options["clip"] is not None)
        assert it.metrics.get("policy/log_ratio", 1.0) > 0  # the weights moved in between


def test_old_samples_are_masked_again_beside_new_ones(tmp_path):
    """replay.size: their tokens weigh less, by the taper of their age."""
    settings = {
        "algorithm": "masked_ce",
        "batch": {"prompts": 1, "group": 4, "updates": 1},
        "sampler": {"steps": 3, "eta": 1.0, "guidance": "none", "init_noise": "group"},
        "replay": {"size": 2, "taper": 0.5},
        "guard": {"check_rewards": False},
        "train": {"mode": "full"},
        "data": {"eval": None},
        "iterations": 3,
        "output": str(tmp_path / "run"),
    }
    live = {"rewards": masked.counted, "prompts": {"train": masked.PROMPTS}}
    found = [it.metrics for it in Trainer(settings, policy=masked.policy(), **live)]
    assert [m["replay/groups"] > 0 for m in found] == [False, True, True]
    assert all(m["policy/grad_norm"] > 0 for m in found)
