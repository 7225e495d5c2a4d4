"""A masked generator as a policy: its states, guidance, rollouts, and what it refuses."""

import masked
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import flowrl
from flowrl.rollouts.generation import path_of
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import plan, sde, tree
from flowrl.samplers.common.unmasking import MASK
from flowrl.types import PromptBatch


def rolled(own, path, group=2, guidance="none"):
    from flowrl.rollouts.roll_out import roll_out

    batch = PromptBatch(text=masked.PROMPTS, ids=torch.arange(3), meta=[{}] * 3)
    options = {"guidance": guidance, "seed": 0, "iteration": 0, "micro": 64}
    return roll_out(own, batch, path, group=group, ledger=Ledger(), **options)


def test_a_rollout_reveals_each_token_once_and_keeps_what_is_known():
    own = masked.policy()
    path = plan.unmask(own.schedule(4).sigmas, init="group")
    made = rolled(own, path)
    assert made.states.dtype == torch.int32 and not bool((made.leaves == MASK).any())
    before, after = made.at(made.src).flatten(1), made.at(made.dst).flatten(1)
    known = before != MASK
    assert torch.equal(before[known], after[known])
    # 16 places at cos(pi r / 2): 14, 11, 6 and then 0 of them stay masked
    left = (after == MASK).sum(1).view(-1, 4)
    assert left.tolist() == [[14, 11, 6, 0]] * 6
    assert torch.equal((left / 16).double().flatten(), made.sigma_next)
    # the first state of each prompt is one, and is evaluated once
    assert made.nfe == plan.nfe(path, copies=2) * 3 == 3 * (1 + 3 * 2)
    assert len(torch.unique(made.leaves.flatten(1), dim=0)) == 6


@pytest.mark.parametrize("order", sde.UNMASKING)
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_log_probs_of_a_rollout_are_those_that_the_loss_finds(order, reduction):
    own = masked.policy()
    path = plan.unmask(own.schedule(3).sigmas, sde=order, eta=1.5, reduction=reduction)
    made = rolled(own, path, guidance=2.0)
    x = made.at(made.src)
    rows = made.prompt[made.src]
    logits = own.velocity(x, made.sigma, made.cond, rows, guidance=2.0)
    step = sde.transition(path, logits, x, made.sigma, made.sigma_next, made.eta)
    found = sde.log_prob(path, step, made.at(made.dst))
    assert found.shape == made.log_prob.shape == ((18, 16) if reduction == "none" else (18,))
    torch.testing.assert_close(found.detach(), made.log_prob, atol=2e-6, rtol=0)
    if order == "confidence":  # from 1.5 to 0 at the step that reveals the rest
        assert made.eta[:3].tolist() == [1.5, 0.75, 0.0]


def test_the_same_batch_has_a_ratio_of_exactly_one():
    """With the selection factor, at the behaviour policy: equal inputs give equal bits."""
    own = masked.policy()
    x = own.trial_states(4, cond := own.encode(masked.PROMPTS))
    rows, sigma = torch.arange(4) % 3, torch.full((4,), 0.5, dtype=torch.float64)
    x[:] = x[:1]  # all rows have equally many masks
    m = int((x[0] == MASK).sum())
    path = plan.unmask(own.schedule(3).sigmas, sde="confidence", eta=1.0)
    to = torch.full((4,), (m - 2) / 16, dtype=torch.float64)

    def step():
        logits = own.velocity(x, sigma, cond, rows)
        return sde.transition(path, logits, x, sigma, to, torch.ones(4))

    y = step().sample(torch.rand(4, 2, 4, 4, generator=torch.Generator().manual_seed(0)))
    old, new = step().log_prob(y).detach(), step().log_prob(y)
    assert torch.equal((new - old).exp(), torch.ones(4))


def test_guidance_extrapolates_logits_from_those_of_the_empty_text():
    own = masked.policy()
    cond = own.encode(masked.PROMPTS)
    x, rows = own.trial_states(3, cond), torch.arange(3)
    with torch.no_grad():
        c = own.velocity(x, 0.5, cond, rows)
        u = own.velocity(x, 0.5, own.encode([""]), torch.zeros(3, dtype=torch.int64))
        before = own.calls
        guided = own.velocity(x, 0.5, cond, rows, guidance=3.0)
    torch.testing.assert_close(guided, u + 3 * (c - u))
    assert own.calls - before == 6 and own.branches(3.0) == 2 and own.branches(1.0) == 1
    held = own.velocity(x, 0.5, cond, rows, guidance=3.0, detach_uncond=True)
    torch.testing.assert_close(held.detach(), guided)


class Text(nn.Module):
    """A net of 9 tokens whose vocabulary holds the mask token, 4."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.out = nn.Linear(8, 9)

    def forward(self, tokens, cond):
        return self.out(self.embed(tokens))


def test_a_mask_token_inside_the_vocabulary_is_never_drawn():
    torch.manual_seed(0)
    own = flowrl.load_policy(Text(), shape=(6,), kind="tokens", mask=4)
    own.self_check()
    tokens = flowrl.generate(own, ["any"] * 40, steps=3, guidance="none")
    assert tokens.shape == (40, 6) and not bool((tokens == 4).any())
    assert set(tokens.unique().tolist()) == {0, 1, 2, 3, 5, 6, 7, 8}
    assert own.describe().startswith("logits = Text(tokens (n, 6), masked where 4, None)")


def bert(vocabulary=20):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=vocabulary, intermediate_size=16, **sizes)
    return BertForMaskedLM(config).eval()


class Bert(nn.Module):
    """As in docs/masked.md: the prompt's tokens stand before those of the answer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, cond):
        return self.model(torch.cat([cond, tokens], 1)).logits[:, cond.shape[1] :]


def test_a_masked_language_model_of_transformers_is_a_policy():
    """As it is without prompts, and in a module that puts the prompt before the tokens."""
    model = bert()
    own = flowrl.load_policy(model, shape=(6,), kind="tokens", mask=3)
    own.self_check()
    states = torch.tensor([[5, MASK, 7, MASK, 9, 9]])
    logits = own.velocity(states, 0.5, own.encode(["any"]), torch.zeros(1, dtype=torch.int64))
    alone = model(torch.where(states == MASK, 3, states)).logits
    other = torch.arange(20) != 3
    torch.testing.assert_close(logits[..., other], alone[..., other])

    def cond(texts):
        return torch.tensor([[ord(c) % 20 for c in f"{text:4}"] for text in texts])

    described = {"shape": (6,), "kind": "tokens", "mask": 3, "cond": cond}
    with pytest.raises(ValueError, match="an attention mask where cond would be given; wrap it"):
        flowrl.load_policy(model, **described)
    own = flowrl.load_policy(Bert(model), **described, lora={"rank": 2, "targets": ["query"]})
    assert own.self_check(["2+2=", "3+1="]).wrong_rows > 0
    tokens = flowrl.generate(own, ["2+2="] * 8, steps=6, guidance="none")
    assert tokens.shape == (8, 6) and not bool((tokens == 3).any())


def test_samples_depend_on_their_seed_and_on_no_batch_mates():
    own = masked.policy()
    options = {"steps": 4, "guidance": "none"}
    all_of = flowrl.generate(own, masked.PROMPTS, **options)
    alone = flowrl.generate(own, masked.PROMPTS[1:2], places=[1], **options)
    assert torch.equal(all_of[1:2], alone)
    assert not torch.equal(all_of, flowrl.generate(own, masked.PROMPTS, seed=1, **options))
    best = flowrl.generate(own, masked.PROMPTS, best_of=8, reward=masked.counted, **options)
    score = masked.counted(best, masked.PROMPTS) - masked.counted(all_of, masked.PROMPTS)
    assert float(score.min()) >= 0 < float(score.max())


def test_the_law_of_samples_is_that_of_the_exact_enumeration():
    """Two tokens of two values: the golden numbers of test_unmasking.py, through the engine."""
    own = masked.table()
    draws = 20_000
    rows = torch.zeros(draws, dtype=torch.int64)
    cond = own.encode(["any"])
    grown = tree.grow(
        lambda x, sigma, rows: own.velocity(x, sigma, cond, rows),
        own.noise,
        path_of(own, 2, "euler"),
        shape=(2,),
        rows=rows,
        init=lambda noise, rows: own.init(noise, 1.0),
    )
    counts = torch.bincount((grown.leaves * torch.tensor([2, 1])).sum(1), minlength=4)
    law = torch.tensor([0.555, 0.055, 0.090, 0.300])
    z = (counts - draws * law) / (draws * law * (1 - law)).sqrt()
    assert float(z.abs().max()) < 4.5


# ------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mask": None}, "mask=None should be the number of the mask token"),
        ({"mask": "m"}, "mask='m' should be the number of the mask token"),
        ({"kind": "flow", "mask": 5}, "mask=5 is of masked generators, and kind='flow'"),
        ({"mask": 5, "cond": None, "empty": ""}, "there is no cond that reads texts"),
    ],
)
def test_a_wrong_description_is_refused(options, sentence):
    given = {"shape": masked.PLACES, "kind": "tokens", "cond": masked.cond, **options}
    with pytest.raises(ValueError, match=sentence):
        flowrl.load_policy(masked.TokenNet(), **given)


def test_a_mask_token_without_an_embedding_is_named():
    own = flowrl.load_policy(Text(), shape=(6,), kind="tokens", mask=9)
    with pytest.raises(ValueError, match="with the mask token 9 .* should have a row for it"):
        own.self_check()


def test_another_error_of_an_index_is_not_blamed_on_the_mask_token():
    class Short(Text):
        def forward(self, tokens, cond):
            return super().forward(tokens, cond)[:, [7]]

    own = flowrl.load_policy(Short(), shape=(6,), kind="tokens", mask=4)
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        own.self_check()


def test_a_net_of_other_shapes_is_named():
    class Flat(Text):
        def forward(self, tokens, cond):
            return super().forward(tokens, cond)[:, :, 0]

    own = flowrl.load_policy(Flat(), shape=(6,), kind="tokens", mask=4)
    with pytest.raises(ValueError, match=r"Flat made \(1, 6\) of tokens .* axis of the vocabulary"):
        own.self_check()


@pytest.mark.parametrize("value", (float("nan"), -float("inf")))
def test_logits_that_are_not_finite_are_named(value):
    class Odd(Text):
        def forward(self, tokens, cond):
            return super().forward(tokens, cond).masked_fill(torch.arange(9) == 2, value)

    own = flowrl.load_policy(Odd(), shape=(6,), kind="tokens", mask=4)
    with pytest.raises(ValueError, match="^the logits of a grid .* not finite: .* -1e4 in place"):
        own.self_check()


def test_steps_that_unmask_nothing_solvers_and_guidance_without_a_branch_are_refused():
    own = flowrl.load_policy(Text(), shape=(6,), kind="tokens", mask=4)
    with pytest.raises(ValueError, match="unmask nothing of 6 tokens; use 1 to 6"):
        flowrl.generate(own, ["any"], steps=7, guidance="none")
    with pytest.raises(ValueError, match="guidance=2.0: .* no unconditional branch"):
        flowrl.generate(own, ["any"], steps=3, guidance=2.0)
    with pytest.raises(ValueError, match="solver=dpm2 solves the ODE of flows, and a masked"):
        flowrl.generate(own, ["any"], steps=3, solver="dpm2")
    with pytest.raises(ValueError, match="no way from media back to tokens"):
        own.encode_media(torch.zeros(1, 6))
