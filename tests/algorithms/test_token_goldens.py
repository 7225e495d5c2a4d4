"""Likelihoods of one sample of two tokens by each method's own scores, against numbers by hand.

The grid is masked.table: from two masks p_0 = (.7, .3), p_1 = (.6, .4), and the sample is x = 00,
whose second token has .9 after the first and .8 before it.
"""

from math import log
from types import SimpleNamespace

import masked
import pytest
import torch

from flowrl.algorithms.grpo import GRPO, GRPOConfig
from flowrl.algorithms.remask import Remask, RemaskConfig
from flowrl.types import Columns

ORDERS = ((0, 1), (1, 0))  # which place is revealed first, which second


def rows_of(algorithm):
    """(policy, rollout of 64 samples, their rows)."""
    own = masked.table()
    sampler = SimpleNamespace(eta=1.0, init_noise="sample")
    made = masked.roll_out(own, algorithm, copies=64, prompts=1, steps=2, sampler=sampler)
    advantages = algorithm.advantages(made, torch.ones(64))
    return own, made, algorithm.columns(made, advantages, seed=0, iteration=0)


def of_masks(*masks):
    """log p (n,) of x = 00, summed over masked tokens, with the places of each mask masked."""
    own, made, rows = rows_of(algorithm := Remask(RemaskConfig()))
    zeros = torch.nonzero((made.at(rows.state) == 0).all(1)).flatten()[:1]
    chosen = rows[zeros.repeat(len(masks))]
    chosen = Columns({**chosen.data, "masked": torch.tensor(masks)})
    return algorithm.score(own, made, chosen)["log_prob"].sum(1).detach()


def of_trace(order, **options):
    """log p of the steps that reveal x = 00 in an order: the sum of what rows have."""
    own, made, rows = rows_of(algorithm := GRPO(GRPOConfig(kl_weight=0.0, **options)))
    after = made.at(rows.dst).view(64, 2, 2)
    first = torch.where(torch.arange(2) == order[0], 0, -1)
    found = (after == torch.stack([first, torch.zeros(2)])).flatten(1).all(1)
    sample = int(torch.nonzero(found)[0])
    score = algorithm.score(own, made, rows)["log_prob"].view(64, 2, -1)[sample].sum()
    return float(score.detach()) * (1 if options["ratio"] == "token" else 2)  # 2 places


def test_with_all_tokens_masked_the_likelihood_is_the_mean_fields():
    assert float(of_masks([True, True])) == pytest.approx(-0.867501, abs=1e-6)


def test_masks_of_every_share_give_the_elbo():
    """Each share weighs alike, and its tokens N over their number; no estimate is above the exact
    log-likelihood."""
    one, other, both = of_masks([True, False], [False, True], [True, True]).tolist()
    elbo = (2 * (one + other) / 2 + both) / 2
    assert elbo == pytest.approx(-0.598002, abs=1e-6) and elbo < log(0.555)


def test_the_steps_of_all_orders_sum_to_the_exact_likelihood():
    options = {"sde": "random_order", "ratio": "ppo"}
    total = torch.tensor([of_trace(order, **options) for order in ORDERS]).logsumexp(0)
    assert float(total) == pytest.approx(-0.588787, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "product"),
    [
        ({"sde": "random_order", "ratio": "token"}, 0.7 * 0.9),
        ({"sde": "confidence", "ratio": "token"}, 0.7 * 0.9),  # the choice has no share
        ({"sde": "random_order", "ratio": "ppo"}, 0.5 * 0.7 * 0.9),
        ({"sde": "confidence", "ratio": "ppo"}, 0.363902),  # .404336 x .9
    ],
)
def test_a_trace_has_the_product_of_its_tokens_and_with_ppo_of_its_choices(options, product):
    assert of_trace(ORDERS[0], **options) == pytest.approx(log(product), abs=2e-6)
