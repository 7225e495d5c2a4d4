"""Micro-batches change no gradient, for losses that couple rows too."""

import pytest
import torch
from torch.nn import functional as F
from toy import ToyPolicy, advantages_of, gradient, roll_out, to_the_right

from flowrl import objective
from flowrl.algorithms import nft
from flowrl.algorithms.grpo import ALGORITHM as GRPO
from flowrl.types import LossOutput


class Paired(nft.NFT):
    """A DPO-like loss: sample i against sample i + n/2, and one sigmoid over the whole batch, as DGPO has over a group."""

    couples = "group"

    def loss(self, scores, batch):
        error, half = scores["positive"], len(batch) // 2
        pair = -F.logsigmoid(2.0 * (error[half:] - error[:half])).sum()
        group = torch.sigmoid((batch.adv * error).mean()) * (batch.adv * error).sum()
        return LossOutput(loss=pair + group, metrics={"policy/error": error.detach().sum()})


def prepared(algorithm):
    policy = ToyPolicy(0.3)
    rollout = roll_out(policy, algorithm)
    torch.nn.init.normal_(policy.net[2].bias, std=0.1)  # off the behaviour policy
    rows = algorithm.columns(rollout, advantages_of(algorithm, rollout, to_the_right(rollout)), seed=0, iteration=0)
    return policy, rollout, rows[: len(rows) // 2 * 2]


def accumulated(algorithm, policy, rollout, rows, **options):
    policy.zero_grad()
    calls = []

    def backward(loss):
        calls.append(loss.item())
        loss.backward()

    metrics = objective.accumulate(algorithm, policy, rollout, rows, backward=backward, **{"micro": 7, "total_weight": 10.0, **options})
    return gradient(policy.net), metrics, calls


ALGORITHMS = {"grpo": GRPO(GRPO.Config(clip=(0.2, 0.2))), "nft": nft.NFT(nft.NFTConfig()), "paired": Paired(nft.NFTConfig())}


@pytest.mark.parametrize("micro", [1, 7, 50])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_give_the_gradient_of_the_whole_batch(name, micro):
    """couples = "row": one pass; otherwise the exact two-pass form (relative error <= 1e-6 of the largest entry)."""
    algorithm = ALGORITHMS[name]
    policy, rollout, rows = prepared(algorithm)
    got, metrics, calls = accumulated(algorithm, policy, rollout, rows, micro=micro)
    policy.zero_grad()
    out = algorithm.loss(algorithm.score(policy, rollout, rows), rows)
    (out.loss / 10).backward()
    whole = gradient(policy.net)
    assert len(calls) > 1 and float(whole.abs().max()) > 1e-2
    assert float((got - whole).abs().max() / whole.abs().max()) < 1e-6 * (1 if name == "paired" else 2)
    for metric, value in out.metrics.items():
        assert float(metrics[metric]) == pytest.approx(float(value), rel=1e-4, abs=1e-4), metric


def test_one_pass_would_be_wrong_for_a_coupled_loss():
    """The test above can fail: treating the same loss as a sum over micro-batches gives another gradient."""

    class Wrong(Paired):
        couples = "row"

    policy, rollout, rows = prepared(ALGORITHMS["paired"])
    right, _, _ = accumulated(ALGORITHMS["paired"], policy, rollout, rows, micro=8)
    wrong, _, _ = accumulated(Wrong(nft.NFTConfig()), policy, rollout, rows, micro=8)
    assert float((right - wrong).abs().max() / right.abs().max()) > 0.05


def test_scale_and_weight_scale_the_gradient():
    policy, rollout, rows = prepared(ALGORITHMS["grpo"])
    a, _, _ = accumulated(ALGORITHMS["grpo"], policy, rollout, rows)
    b, _, _ = accumulated(ALGORITHMS["grpo"], policy, rollout, rows, scale=4.0, total_weight=20.0)
    assert torch.allclose(b, 2 * a, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_padding_to_a_common_number_of_micro_batches_adds_nothing(name):
    algorithm = ALGORITHMS[name]
    policy, rollout, rows = prepared(algorithm)
    a, metrics, calls = accumulated(algorithm, policy, rollout, rows, micro=50)
    b, padded, more = accumulated(algorithm, policy, rollout, rows, micro=50, count=len(calls) + 3)
    assert len(more) == len(calls) + 3 and torch.equal(a, b)
    assert all(torch.equal(metrics[key], padded[key]) for key in metrics)


def test_micro_caps_network_rows_and_keeps_rows_of_a_state_together():
    algorithm = ALGORITHMS["grpo"]
    _, rollout, rows = prepared(algorithm)
    shared = type(rows)({**rows.data, "src": rows.src // 3})
    parts = objective.split(algorithm, shared, 4)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(rows)))
    assert all(torch.unique(shared.src[p]).numel() <= 4 for p in parts)
    owners = [set(shared.src[p].tolist()) for p in parts]
    assert sum(map(len, owners)) == len(set.union(*owners))
    with pytest.raises(ValueError, match="micro=0"):
        objective.split(algorithm, rows, 0)


def test_an_empty_batch_is_no_micro_batch():
    algorithm = ALGORITHMS["nft"]
    policy, rollout, rows = prepared(algorithm)
    assert objective.split(algorithm, rows[:0], 5) == []
    metrics = objective.accumulate(algorithm, policy, rollout, rows[:0], micro=5, total_weight=1.0, backward=torch.Tensor.backward)
    assert metrics == {}
