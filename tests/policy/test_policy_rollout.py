"""Stable Diffusion through rollout, scores and gradients: a schedule that starts below sigma 1 and
ends above 0."""

from contextlib import closing

import pytest
import tiny
import torch

from flowrl.algorithms.grpo import GRPO
from flowrl.algorithms.nft import NFT
from flowrl.rewards import load_set
from flowrl.rollouts.roll_out import roll_out
from flowrl.rollouts.scorer import SHOWN, Scorer, decode_into
from flowrl.runtime.ledger import Ledger
from flowrl.types import PromptBatch

BATCH = PromptBatch(text=tiny.PROMPTS, ids=torch.arange(2), meta=[{}, {}])


class Settings:
    eta, init_noise = 0.7, "sample"


@pytest.fixture(scope="module")
def policy():
    policy = tiny.policy("sd15", lora={"rank": 2, "alpha": 2})
    policy.trainable.add_view("old")
    return policy


def iteration(policy, algorithm, guidance, other=9):
    """Rollout of 2 prompts x 3 samples at 4 steps, its columns, and the states that were decoded;
    an evaluation asks for `other` steps in between."""
    decoded, decoder = [], policy.decoder
    plan = algorithm.plan(policy.schedule(4).sigmas, sampler=Settings, iteration=0, seed=0)
    policy.schedule(other)
    ledger = Ledger(policy.device)
    rollout = roll_out(
        policy,
        BATCH,
        plan,
        group=3,
        guidance=guidance,
        seed=0,
        iteration=0,
        micro=64,
        ledger=ledger,
    )
    policy.decoder = lambda x, *whose: decoded.append(x) or decoder(x)
    try:
        with closing(Scorer(load_set({"jpeg": 1.0}), ledger)) as scorer:
            decode_into(scorer, policy, rollout, BATCH, decode=4)
            rewards = scorer.scores()
    finally:
        policy.decoder = decoder
    leaf = algorithm.leaf_advantages(rewards, rollout.group)
    assert rewards.valid.all() and (leaf != 0).any()
    return (
        rollout,
        algorithm.columns(rollout, algorithm.advantages(rollout, leaf), seed=0, iteration=0),
        torch.cat(decoded),
    )


@pytest.mark.parametrize("decode", [1, 3, 16])
def test_media_of_the_first_samples_are_kept_however_few_are_decoded_at_once(policy, decode):
    ledger = Ledger(policy.device)
    plan = GRPO(GRPO.Config()).plan(
        policy.schedule(2).sigmas, sampler=Settings, iteration=0, seed=0
    )
    rollout = roll_out(
        policy, BATCH, plan, group=6, guidance="none", seed=0, iteration=0, micro=64, ledger=ledger
    )
    with closing(Scorer(load_set({"jpeg": 1.0}), ledger)) as scorer:
        shown = decode_into(scorer, policy, rollout, BATCH, decode=decode)
    assert len(shown) == {1: SHOWN, 3: 9, 16: 12}[decode]
    torch.testing.assert_close(
        shown[:SHOWN], policy.decode(rollout.leaves[:SHOWN], 0.0), atol=1e-4, rtol=1e-4
    )


def gradient(policy, algorithm, rollout, columns):
    scores = algorithm.score(policy, rollout, columns)
    parameters = policy.parts["denoiser"]
    grads = torch.autograd.grad(
        algorithm.loss(scores, columns).loss, list(parameters.values()), allow_unused=True
    )
    found = dict(zip(parameters, grads, strict=True))
    assert all(g is None or g.isfinite().all() for g in found.values())
    reached = {k for k, g in found.items() if g is not None and g.abs().max() > 0}
    assert reached == {k for k in parameters if "lora_B" in k}, (
        "B starts at zero, so only its own gradient is not zero"
    )
    return scores


def test_grpo_has_ratio_one_at_the_behaviour_policy_and_a_gradient(policy):
    algorithm = GRPO(GRPO.Config())
    rollout, columns, _ = iteration(policy, algorithm, "pipeline")
    start = rollout.states[rollout.state_sigma == rollout.plan.sigma.max()]
    assert start.std().item() == pytest.approx(policy.schedule(4).start, rel=0.05)
    scores = gradient(policy, algorithm, rollout, columns)
    assert len(columns) == 6 * 3 and (scores["log_prob"] - columns.log_prob).abs().max() <= 1e-5


def test_a_rollout_does_not_depend_on_the_steps_of_an_evaluation(policy):
    one, _, _ = iteration(policy, GRPO(GRPO.Config()), "none", other=9)
    two, _, _ = iteration(policy, GRPO(GRPO.Config()), "none", other=30)
    assert torch.equal(one.states, two.states)


def test_nft_trains_on_the_data_that_was_decoded_and_scored(policy):
    """The rollout ends at s = .0283; what is decoded there is 1.028 times the state, and that is
    the x0 of NFT's loss."""
    algorithm = NFT(NFT.Config(steps=2))
    rollout, columns, decoded = iteration(policy, algorithm, "none")
    assert len(columns) == 6 * 2 and not rollout.state_sigma[rollout.leaf].any()
    assert torch.equal(decoded, rollout.leaves)
    assert torch.equal(rollout.states[columns.state], decoded.repeat_interleave(2, 0))
    end = policy.schedule(4).sigmas[-1].item()
    ended = rollout.states[(rollout.state_sigma - end).abs() < 1e-9]
    assert end > 0.02 and torch.allclose(
        decoded, ended * policy.coords.scale(torch.tensor(end)).item(), rtol=1e-6
    )
    gradient(policy, algorithm, rollout, columns)
