"""Unmasking steps against exact enumeration, hand-made numbers and diffusers' AmusedScheduler."""

import itertools
import math

import pytest
import torch
from diffusers import AmusedScheduler

from flowrl.samplers import confidence, random_order, sigmas
from flowrl.samplers.common.unmasking import MASK

RANDOM = None  # in place of tau: random order
TAUS = (RANDOM, 4.0, 2.0, 1.0, 0.5, 0.25)


def step_of(logits, x, left, tau):
    """The step to `left` masked places, by confidence or in random order."""
    share = torch.tensor(left / x[0].numel(), dtype=torch.float64)
    module, eta = (random_order, 1.0) if tau is RANDOM else (confidence, tau)
    return module.transition(logits, x, share, share, eta=eta)


def ends(x, left, values):
    """All states (n, N) in which a step from x (N,) to `left` masks can end."""
    masked = torch.nonzero(x == MASK).flatten().tolist()
    out = []
    for places in itertools.combinations(masked, len(masked) - left):
        for tokens in itertools.product(range(values), repeat=len(places)):
            y = x.clone()
            y[list(places)] = torch.tensor(tokens, dtype=x.dtype)
            out.append(y)
    return torch.stack(out)


def law_of_step(logits, x, left, tau):
    """Ends (n, N) of a step from x (N,), and their probabilities (n,)."""
    y = ends(x, left, logits.shape[-1])
    step = step_of(logits.expand(len(y), -1, -1), x.expand(len(y), -1), left, tau)
    return y, step.log_prob(y, reduction="sum").exp()


# ------------------------------------------------------------- two tokens of two values, by hand

FIRST = [[0.7, 0.3], [0.6, 0.4]]
AFTER = {  # known place and value -> distribution of the other place
    (0, 0): [0.9, 0.1],
    (0, 1): [0.2, 0.8],
    (1, 0): [0.8, 0.2],
    (1, 1): [0.1, 0.9],
}
GOLDEN = {  # probability of (place, value): 00, 01, 10, 11; law of x: 00, 01, 10, 11
    RANDOM: ((0.35, 0.15, 0.30, 0.20), (0.555, 0.055, 0.090, 0.300)),
    2.0: ((0.377549, 0.130251, 0.307353, 0.184848), (0.585676, 0.056240, 0.087521, 0.270564)),
    1.0: ((0.404336, 0.111429, 0.313846, 0.170390), (0.614979, 0.057473, 0.085055, 0.242494)),
    0.5: ((0.453195, 0.079200, 0.321882, 0.145723), (0.665381, 0.059892, 0.080216, 0.194511)),
    0.0: ((0.70, 0.0, 0.18, 0.12), (0.774, 0.082, 0.036, 0.108)),
}


@pytest.mark.parametrize("tau", GOLDEN)
def test_two_tokens_have_the_probabilities_of_the_enumerated_law(tau):
    first = torch.tensor(FIRST, dtype=torch.float64).log()
    start = torch.full((2,), MASK)
    states, probability = law_of_step(first, start, 1, tau)
    expected, law = GOLDEN[tau]
    torch.testing.assert_close(probability, torch.tensor(expected).double(), atol=1e-6, rtol=0)
    found = torch.zeros(2, 2, dtype=torch.float64)
    for state, p in zip(states, probability, strict=True):
        place = int(state[1] != MASK)
        other = torch.tensor(AFTER[place, int(state[place])], dtype=torch.float64).log()
        for end, q in zip(*law_of_step(other.expand(2, 2), state, 0, tau), strict=True):
            found[tuple(end.tolist())] += p * q
    torch.testing.assert_close(found.flatten(), torch.tensor(law).double(), atol=1e-6, rtol=0)


# ------------------------------------------------------------- one step of four places


def random_logits(seed, *shape):
    return 1.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("tau", (*TAUS, 0.0))
@pytest.mark.parametrize("left", (0, 1, 2, 3))
def test_probabilities_of_a_step_sum_to_one(tau, left):
    x = torch.full((4,), MASK)
    _, probability = law_of_step(random_logits(0, 4, 3), x, left, tau)
    assert float(probability.sum()) == pytest.approx(1, abs=1e-8)


def plackett_luce(logits, y, tau):
    """P(y) from an all-masked grid by brute force: sum over discarded draws and kept orders."""
    p = logits.softmax(-1)
    kept = [i for i, token in enumerate(y.tolist()) if token != MASK]
    rest = [i for i in range(len(y)) if i not in kept]
    total = 0.0
    for draws in itertools.product(range(p.shape[1]), repeat=len(rest)):
        v = y.clone()
        v[rest] = torch.tensor(draws)
        chance = p.gather(1, v[:, None])[:, 0]
        w = chance ** (1 / tau)
        orders = 0.0
        for order in itertools.permutations(kept):
            left, product = float(w.sum()), 1.0
            for i in order:
                product *= float(w[i]) / left
                left -= float(w[i])
            orders += product
        total += float(chance.prod()) * orders
    return total


@pytest.mark.parametrize("tau", (2.0, 1.0, 0.3))
def test_the_selection_factor_is_the_sum_over_discarded_draws(tau):
    logits, y = random_logits(1, 4, 3), torch.tensor([2, MASK, 0, MASK])
    step = step_of(logits[None], torch.full((1, 4), MASK), 2, tau)
    found = float(step.log_prob(y[None], reduction="sum").exp())
    assert found == pytest.approx(plackett_luce(logits, y, tau), rel=1e-7)


def test_limits_of_the_temperature_are_random_order_and_certain_choice():
    logits, x = random_logits(2, 4, 3), torch.full((4,), MASK)
    hot, random = (law_of_step(logits, x, 2, tau)[1] for tau in (1e4, RANDOM))
    torch.testing.assert_close(hot, random, atol=1e-4, rtol=0)
    cold, certain = (law_of_step(logits, x, 2, tau)[1] for tau in (1e-3, 0.0))
    torch.testing.assert_close(cold, certain, atol=1e-4, rtol=0)


def worst_z(ends_seen, y, probability, draws):
    """Largest |z| of the counts of states (n, N) among those seen (draws, N)."""
    base = 10 ** torch.arange(y.shape[1])
    number = ((ends_seen + 1) * base).sum(1)
    counts = torch.stack([(number == n).sum() for n in ((y + 1) * base).sum(1)]).double()
    assert int(counts.sum()) == draws, "a state was reached that has no probability"
    spread = (draws * probability * (1 - probability)).sqrt()
    return float(((counts - draws * probability) / spread).abs().max())


@pytest.mark.parametrize("left", (1, 2))
def test_equal_confidences_without_noise_are_kept_in_the_order_of_places(left):
    """The probabilities are still those of the draws: of a flat network, and of one with a tie."""
    tied = torch.tensor([[0.0, 0.0, -1.0], [0.0, 0.0, 1.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]])
    for logits in (torch.zeros(4, 3), tied):
        x, draws = torch.full((4,), MASK), 20_000
        y, probability = law_of_step(logits, x, left, 0.0)
        assert float(probability.sum()) == pytest.approx(1, abs=1e-6)
        step = step_of(logits.expand(draws, -1, -1), x.expand(draws, -1), left, 0.0)
        seen = step.sample(torch.rand(draws, 2, 4, generator=torch.Generator().manual_seed(0)))
        possible = probability > 0
        assert worst_z(seen, y[possible], probability[possible].double(), draws) < 4.5


@pytest.mark.parametrize("tau", (RANDOM, 1.0, 0.0))
def test_draws_of_a_step_follow_its_probabilities(tau):
    logits, draws = random_logits(3, 4, 3), 100_000
    x = torch.tensor([MASK, 1, MASK, MASK])
    step = step_of(logits.expand(draws, -1, -1), x.expand(draws, -1), 1, tau)
    noise = torch.rand(draws, 2, 4, generator=torch.Generator().manual_seed(0))
    y, probability = law_of_step(logits, x, 1, tau)
    possible = probability > 0
    assert worst_z(step.sample(noise), y[possible], probability[possible], draws) < 4.5


@pytest.mark.parametrize("tau", (2.0, 0.6))
def test_log_probs_are_those_of_simulated_steps_of_diffusers(tau):
    logits, draws = random_logits(4, 4, 3).float(), 100_000
    scheduler = AmusedScheduler(mask_token_id=3, masking_schedule="linear")
    scheduler.set_timesteps(2, temperature=(tau, tau))  # 2 of 4 places stay masked
    sample = torch.full((draws, 4), 3)
    generator = torch.Generator().manual_seed(0)
    seen = scheduler.step(logits.expand(draws, -1, -1), 1, sample, generator=generator).prev_sample
    y, probability = law_of_step(logits.double(), torch.full((4,), MASK), 2, tau)
    assert worst_z(seen.where(seen != 3, MASK), y, probability, draws) < 4.5


def test_a_step_keeps_known_tokens_and_the_dtype_and_reveals_the_count_even_on_ties():
    x = torch.full((5, 6), MASK, dtype=torch.int32)
    x[:, 2] = 1
    noise = torch.rand(5, 2, 6, generator=torch.Generator().manual_seed(0))
    noise[:, 1] = 0.5  # all scores are equal
    for tau in (RANDOM, 2.0, 0.0):
        y = step_of(torch.zeros(5, 6, 3, dtype=torch.float16), x, 2, tau).sample(noise)
        assert y.dtype == torch.int32 and bool((y[:, 2] == 1).all())
        assert bool(((y == MASK).sum(1) == 2).all())


def test_a_token_without_probability_is_never_drawn():
    logits = torch.zeros(50, 4, 3)
    logits[..., 1] = -torch.inf
    noise = torch.rand(50, 2, 4, generator=torch.Generator().manual_seed(0))
    noise[0, 0], noise[1, 0] = 0, 1 - 2**-24
    x = torch.full((50, 4), MASK)
    for tau in (RANDOM, 1.0):
        step = step_of(logits, x, 2, tau)
        y = step.sample(noise)
        assert not bool((y == 1).any()) and bool(step.log_prob(y).isfinite().all())
    logits.requires_grad_()
    step_of(logits, x, 2, 1.0).log_prob(y).sum().backward()
    assert bool(logits.grad.isfinite().all())


# ------------------------------------------------------------- gradients


def test_only_the_choice_by_confidence_has_a_gradient_where_nothing_is_revealed():
    x, y = torch.tensor([[MASK, 1, MASK, MASK]]), torch.tensor([[2, 1, MASK, MASK]])
    for tau, moved in ((RANDOM, [True, False, False, False]), (1.0, [True, False, True, True])):
        logits = random_logits(5, 1, 4, 3).requires_grad_()
        step_of(logits, x, 2, tau).log_prob(y).backward()
        assert (logits.grad.abs().sum(-1) > 0).tolist() == [moved]


def test_the_gradient_of_the_selection_factor_is_its_difference_quotient():
    x, y = torch.full((1, 4), MASK), torch.tensor([[2, MASK, 0, MASK]])
    logits = random_logits(6, 1, 4, 3).requires_grad_()

    def factor(logits):
        return step_of(logits, x, 2, 0.7).selection(y)

    assert torch.autograd.gradcheck(factor, logits)


def test_places_that_stay_masked_may_be_taken_one_at_a_time(monkeypatch):
    """A limit on how many numbers a term has leaves the factor and its gradient as they are."""
    x, y = torch.full((1, 6), MASK), torch.tensor([[2, MASK, 0, MASK, MASK, MASK]])
    found = []
    for limit in (confidence.AT_ONCE, 1):
        monkeypatch.setattr(confidence, "AT_ONCE", limit)
        logits = random_logits(6, 1, 6, 3).requires_grad_()
        factor = step_of(logits, x, 4, 0.7).selection(y)
        factor.sum().backward()
        found.append((factor.detach(), logits.grad))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, atol=1e-12, rtol=1e-12)


def enumerated(logits_of, rewards, left, tau):
    """(J, surrogate with exact steps, with tokens alone, of mean fields) of four places' traces.

    logits_of: (4^4, 4, 3) logits by state, whose number counts masks as the value 3.
    """
    weight = 4 ** torch.arange(4)
    probability = {(MASK,) * 4: torch.ones((), dtype=torch.float64)}
    edges, masks = [], 4
    for n in left:
        after = {}
        for state, p in probability.items():
            x = torch.tensor(state)
            logits = logits_of[((x % 4) * weight).sum()]
            y, q = law_of_step(logits, x, n, tau)
            step = step_of(logits.expand(len(y), -1, -1), x.expand(len(y), -1), n, tau)
            alone = step.log_prob(y, reduction="none").sum(1)
            for end, chance, tokens in zip(y.tolist(), q, alone, strict=True):
                after[tuple(end)] = after.get(tuple(end), 0) + p * chance
                edges.append((masks, state, tuple(end), p, chance, tokens))
        probability, masks = after, n
    J = sum(p * rewards[((torch.tensor(x)) * weight).sum()] for x, p in probability.items())
    blank = logits_of[(3 * weight).sum()].log_softmax(-1)  # of the grid with all places masked
    mean_field = sum(
        (p.detach() * rewards[(torch.tensor(x) * weight).sum()]) * blank[range(4), list(x)].sum()
        for x, p in probability.items()
    )
    # value to go of each state, then the policy gradient theorem over edges
    value = {x: rewards[(torch.tensor(x) * weight).sum()] for x in probability}
    exact = tokens_only = 0
    for _, state, end, p, chance, tokens in reversed(edges):
        value[state] = value.get(state, 0) + chance.detach() * value[end]
        share = (p * chance).detach() * value[end]
        exact, tokens_only = exact + share * chance.log(), tokens_only + share * tokens
    return J, exact, tokens_only, mean_field


@pytest.mark.parametrize("tau", (RANDOM, 1.0, 0.5))
def test_the_policy_gradient_by_exact_steps_is_that_of_the_expected_reward(tau):
    """And that by tokens alone is the same in random order, and only near it by confidence; that of
    mean fields, as in diffu-GRPO, is farther from it in both."""
    logits_of = random_logits(7, 256, 4, 3).requires_grad_()
    rewards = random_logits(8, 256)
    values = enumerated(logits_of, rewards, (3, 2, 0), tau)
    true, full, partial, crude = (
        torch.autograd.grad(value, logits_of, retain_graph=True)[0].flatten() for value in values
    )
    torch.testing.assert_close(full, true, atol=1e-7, rtol=1e-6)
    cosine, far = (float(torch.cosine_similarity(g, true, dim=0)) for g in (partial, crude))
    assert 0 < far < 0.9 * cosine
    if tau is RANDOM:
        torch.testing.assert_close(partial, true, atol=1e-12, rtol=1e-12)
    else:
        assert 0.9 < cosine < 0.9995


# ------------------------------------------------------------- divergence


def test_the_kl_of_random_order_is_that_of_the_enumerated_steps():
    x = torch.tensor([MASK, 0, MASK, MASK])
    mine, other = random_logits(9, 4, 3), random_logits(10, 4, 3)
    for left in (0, 1, 2):
        _, p = law_of_step(mine, x, left, RANDOM)
        _, q = law_of_step(other, x, left, RANDOM)
        a, b = (step_of(logits[None], x[None], left, RANDOM) for logits in (mine, other))
        d = q.log() - p.log()
        estimate = float((p * (d.exp() - 1 - d)).sum())  # E[k3]
        found = float(a.kl(b, reduction="sum"))
        assert found == pytest.approx(estimate, rel=1e-10) and found > 0
        assert float(a.kl(b)) == pytest.approx(found / 4)
        each = a.kl(b, reduction="none")[0]
        assert float(each.sum()) * (3 - left) / 3 == pytest.approx(found) and float(each[1]) == 0


def test_the_kl_to_itself_is_zero_and_so_is_its_gradient():
    logits = random_logits(11, 2, 4, 3).requires_grad_()
    x = torch.full((2, 4), MASK)
    kl = step_of(logits, x, 2, 1.0).kl(step_of(logits.detach(), x, 2, 1.0))
    kl.sum().backward()
    assert float(kl.detach().abs().max()) == 0 and float(logits.grad.abs().max()) < 1e-15


# ------------------------------------------------------------- reductions and schedules


def test_a_single_place_and_a_single_step_need_no_selection_factor():
    logits = random_logits(12, 1, 4, 3)
    x, y = torch.full((1, 4), MASK), torch.tensor([[2, 1, 0, 0]])
    expected = logits.log_softmax(-1)[0, range(4), [2, 1, 0, 0]]
    for tau in TAUS:
        step = step_of(logits, x, 0, tau)
        torch.testing.assert_close(step.log_prob(y, reduction="none")[0], expected)
        assert float(step.log_prob(y, reduction="sum")) == pytest.approx(float(expected.sum()))
        assert float(step.log_prob(y)) == pytest.approx(float(expected.mean()))


def test_means_over_the_grid_weigh_every_token_alike():
    """In random order the means of all steps sum to the mean log-prob of the trace's tokens, but
    for the constant of the choices."""
    logits = random_logits(13, 1, 4, 3)
    grids = [[MASK] * 4, [MASK, 1, MASK, MASK], [0, 1, MASK, 2], [0, 1, 1, 2]]
    x = [torch.tensor([grid]) for grid in grids]
    total, constant = 0.0, math.log(1 / 4) + math.log(1 / 3)
    for a, b in itertools.pairwise(x):
        total += float(step_of(logits, a, int((b == MASK).sum()), RANDOM).log_prob(b))
    tokens = logits.log_softmax(-1)[0, range(4), grids[-1]]
    assert total == pytest.approx((float(tokens.sum()) + constant) / 4)


def test_the_cosine_schedule_reveals_these_counts():
    def revealed(places, steps, **how):
        return (-sigmas.unmasking(places, steps, **how).diff() * places).round().int().tolist()

    assert revealed(64, 6) == [3, 6, 10, 13, 16, 16]
    assert revealed(64, 8) == [2, 3, 6, 8, 10, 11, 12, 12]
    assert revealed(64, 10) == [1, 3, 3, 6, 6, 8, 8, 10, 9, 10]
    assert revealed(64, 12) == [1, 2, 2, 4, 5, 5, 7, 6, 8, 8, 8, 8]
    assert revealed(4, 4) == [1] * 4 and revealed(4, 3) == [1, 1, 2] and revealed(4, 2) == [2, 2]
    assert revealed(4, 1) == [4] and revealed(8, 4, how="linear") == [2] * 4
    for places in range(1, 40):
        for steps in range(1, places + 1):
            assert sum(revealed(places, steps)) == places and min(revealed(places, steps)) >= 1


@pytest.mark.parametrize("steps", (0, 5, 9))
def test_a_schedule_that_unmasks_nothing_is_refused(steps):
    with pytest.raises(ValueError, match=rf"^steps={steps} .* use 1 to 4"):
        sigmas.unmasking(4, steps)
