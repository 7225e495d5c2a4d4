"""Searches spend the calls they say, return what they scored, and nothing worse than the first."""

import math

import pytest
import small
import torch
from torch import nn

from flowrl import generate
from flowrl.policy.module import ModulePolicy
from flowrl.rewards import load_set
from flowrl.rollouts.inference.candidates import SampleRequest
from flowrl.rollouts.search import Search, neighbours, searched

STEPS = 4
# E and standard deviation of the largest of N standard normals, N = 2: 1/sqrt(pi) and
# sqrt(1 - 1/pi), by hand; N = 8: tables of normal order statistics (Harter 1961)
LARGEST = {2: (1 / math.sqrt(math.pi), math.sqrt(1 - 1 / math.pi)), 8: (1.42360, 0.61065)}


class Around(nn.Module):
    """Data N(c, width^2) of a prompt whose condition is c: an exact flow."""

    def __init__(self, width=0.1):
        super().__init__()
        self.variance = nn.Parameter(torch.tensor(width**2))

    def forward(self, x, t, cond):
        s, var = t[:, None], self.variance
        share = (s - (1 - s) * var) / ((1 - s) ** 2 * var + s**2)
        return share * (x - (1 - s) * cond) - cond


class Still(nn.Module):
    """v = 0, so that a sample is its noise."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x, t, cond):
        return self.weight * x


def still(size=2):
    return ModulePolicy(Still(), (size,))


def around(width=0.1):
    return ModulePolicy(
        Around(width), (2,), cond=lambda texts: torch.tensor([[float(t)] * 2 for t in texts])
    )


def first(media, prompts, context):
    """The first number of a sample."""
    return media[:, 0]


def found(policy, how, texts=("0", "1", "2"), reward=first, **options):
    own = {"steps": STEPS, "guidance": "none", **options}
    own |= {"seeds": torch.zeros(len(texts)).long(), "places": torch.arange(len(texts))}
    with torch.no_grad():
        return searched(
            SampleRequest(policy=policy, texts=list(texts), **own), load_set(reward), how
        )


WAYS = {
    "random": Search(how="random", calls=30),
    "zero_order": Search(how="zero_order", calls=30, neighbours=3, radius=0.8),
    "tree": Search(how="tree", calls=52, keep=2, children=3, forks=(2, 1)),
}


@pytest.mark.parametrize("n", LARGEST)
def test_best_of_n_gains_the_expected_largest_of_n_normals(n):
    """Within 4 standard errors over 4000 prompts; the first candidate has the mean 0."""
    texts, mean, std = ["x"] * 4000, *LARGEST[n]
    made = found(still(1), Search(how="random", calls=n), texts, steps=1, decode=40_000)
    error = 4 * std / math.sqrt(len(texts))
    assert abs(float(made.score.mean()) - mean) < error
    assert abs(float(made.score.std()) - std) < 2 * error
    assert abs(float(made.first.mean())) < 4 / math.sqrt(len(texts))


def test_a_neighbour_of_noise_is_standard_normal_and_as_near_as_its_radius_says():
    """Mean, variance, and correlation sqrt(1 - 0.6^2) = 0.8 with where it comes from, of n = 60,000
    numbers: within 5 standard errors, 1 / sqrt(n), sqrt(2 / n) and at most 1 / sqrt(n)."""
    generator = torch.Generator().manual_seed(1)
    pivot = torch.randn(2, 10_000, generator=generator)
    near = neighbours(pivot, torch.randn(2, 3, 10_000, generator=generator), 0.6)
    n = near.numel()
    assert near.shape == (2, 3, 10_000) and abs(near.mean()) < 5 / n**0.5
    assert abs(near.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((near * pivot[:, None]).mean() - 0.8) < 5 / n**0.5


def test_zero_order_climbs_a_planted_reward_and_more_calls_never_lose():
    """Minus the distance of the noise to a point at the distance sqrt(12) in 12 dimensions: a
    larger budget begins with the candidates of a smaller one, if whole rounds are bought."""

    def nearness(media, prompts, context):
        return -(media - 1).norm(dim=1)

    budgets = [1 + 4 * rounds for rounds in (1, 4, 16, 64)]
    scores = []
    for calls in budgets:
        how = Search(how="zero_order", calls=calls, neighbours=4, radius=0.3)
        scores.append(found(still(12), how, reward=nearness, steps=1).score)
    assert all(bool((b >= a).all()) for a, b in zip(scores, scores[1:], strict=False))
    more = found(still(12), Search(how="random", calls=budgets[-1]), reward=nearness, steps=1)
    assert (scores[-1] > more.score + 0.3).all()  # it climbs where fresh noise cannot


@pytest.mark.parametrize("name", WAYS)
def test_calls_are_counted_exactly(name):
    """random: 30 // 4 = 7 samples of 4 calls. zero_order: as many, in rounds of 3. tree: a fork at
    step k costs 1 call, and its 3 children 3 - k each: 2 paths x (1 + 6 + 1 + 3) = 22 of 52, which
    leaves 7 samples of 4 calls; 2 x 3 children at each of 2 forks more."""
    policy = around()
    made = found(policy, WAYS[name])
    calls, candidates = {"tree": (50, 19)}.get(name, (28, 7))
    assert policy.calls == made.calls == 3 * calls and made.candidates == 3 * candidates
    assert f"{candidates} candidates and {calls} network calls a prompt" in made.said()


@pytest.mark.parametrize("name", WAYS)
def test_what_is_returned_scores_what_it_says_and_the_first_is_the_plain_sample(name):
    policy, prompts = around(), ["0", "1", "2"]
    made, how = found(policy, WAYS[name]), {"steps": STEPS, "guidance": "none"}
    assert torch.equal(made.media[:, 0], made.score) and (made.score >= made.first).all()
    assert torch.equal(generate(policy, prompts, **how)[:, 0], made.first)
    assert (made.score > made.first).any()
    again = generate(policy, prompts, **how, search=WAYS[name], reward=first)
    assert torch.equal(again, made.media)
    centres = torch.tensor([[0.0], [1.0], [2.0]])
    assert (made.media - centres).abs().max() < 0.6  # each shows its own prompt


@pytest.mark.parametrize("name", WAYS)
def test_failed_candidates_never_win_and_the_first_is_kept_where_all_failed(name):
    """Samples of prompt 0 that are right of it fail, all of prompt 1, none of prompt 2."""

    def half(media, prompts, context):
        failed = [
            text == "1" or (text == "0" and x > 0)
            for x, text in zip(media[:, 0].tolist(), prompts, strict=True)
        ]
        return media[:, 0].masked_fill(torch.tensor(failed), torch.nan)

    policy = around()
    made, plain = found(policy, WAYS[name], reward=half), found(policy, WAYS[name])
    assert -1 < made.score[0] < 0 < plain.score[0] and made.score[2] == plain.score[2]
    assert made.score[1] == -torch.inf
    own = generate(policy, ["0", "1", "2"], steps=STEPS, guidance="none")
    assert torch.equal(made.media[1], own[1])
    assert "none could be scored for 1 prompts, which keep the first" in made.said()


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_without_noise_at_its_forks_a_tree_repeats_its_parents(solver):
    """A child at the noise level 1e-5 goes its parent's way from the parent's own state, at every
    fork, whoever of the best two is its parent. (dpm2 is of first order right after a fork.)"""
    seen = []

    def watched(media, prompts, context):
        seen.append(media[:, 0].clone())
        return media[:, 0]

    how = Search(how="tree", calls=80, keep=2, children=2, forks=[0, 1, 2], eta=1e-5)
    found(around(), how, ["0"], watched, solver=solver, decode=100)
    fresh, *stages = seen
    parents = fresh.sort(descending=True).values[:2]
    assert len(stages) == 3 and parents[0] - parents[1] > 0.01
    atol = 1e-4 if solver == "euler" else 0.03
    torch.testing.assert_close(stages[0], parents.repeat_interleave(2), rtol=0, atol=atol)
    for children in stages:
        assert (children[:, None] - parents).abs().min(1).values.max() < atol


def test_forks_with_noise_find_other_samples():
    how = Search(how="tree", calls=80, keep=2, children=2, forks=[0, 1, 2])
    made = found(around(), how, [str(i) for i in range(16)])
    fresh = made.candidates // 16 - 3 * 4
    plain = found(around(), Search(how="random", calls=4 * fresh), [str(i) for i in range(16)])
    assert (made.score >= plain.score).all() and (made.score > plain.score).float().mean() > 0.5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"how": "best", "calls": 8}, "search how='best' is unknown; choose random"),
        ({"how": "random", "calls": 0}, "search calls=0 should be a whole number from 1"),
        ({"how": "random", "calls": 7}, "calls=7 buy 1 samples of 4 network calls each.*8 or more"),
        ({"how": "random", "calls": 8, "radius": 0.5}, "is read with how=zero_order only"),
        ({"how": "zero_order", "calls": 8, "keep": 3}, "is read with how=tree only"),
        ({"how": "zero_order", "calls": 8, "radius": 1.5}, "radius=1.5 should be a number above"),
        ({"how": "tree", "calls": 9, "eta": 0.0}, "eta=0.0 should be a number above 0"),
        ({"how": "tree", "calls": 9, "children": 2.5}, "children=2.5 should be a whole number"),
        ({"how": "tree", "calls": 9, "forks": [3]}, r"forks=\[3\] should be steps from 0 to 2"),
        ({"how": "tree", "calls": 9, "forks": 3}, "forks=3 should be steps, such as"),
        ({"how": "tree", "calls": 9, "forks": []}, r"forks=\[\] should be steps from 0 to 2"),
        # 2 x (1 + 3 x 2) + 2 x (1 + 3 x 1) = 22 calls of forks at 1 and 2, 2 x 4 of fresh samples
        ({"how": "tree", "calls": 29}, "too few for a tree .* which needs 30"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused_in_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        found(around(), Search(**options))


def test_a_tree_needs_a_step_before_the_last():
    with pytest.raises(ValueError, match="forks before the last step, and steps=1"):
        found(around(), Search(how="tree", calls=99), steps=1)


def test_ways_are_not_combined_and_need_a_reward():
    how = {"steps": 2, "search": WAYS["random"]}
    with pytest.raises(ValueError, match="best_of and search cannot be combined"):
        generate(around(), ["1"], **how, best_of=2, reward=first)
    with pytest.raises(ValueError, match="search needs a reward"):
        generate(around(), ["1"], **how)


def test_the_command_searches(tmp_path):
    words = ["generate", "shapes-sd3", "a red circle", "--steps", 2, "--guidance", "none"]
    search = ["--search", "zero_order", "--search", "radius=0.5", "--calls", 6]
    made = small.invoke(*words, *search, "--reward", "jpeg", "-o", tmp_path / "a.png")
    assert made.exit_code == 0 and (tmp_path / "a.png").exists(), made.output
    assert "3 candidates and 6 network calls a prompt" in " ".join(made.output.split())
    for wrong, sentence in (
        (["--calls", 6], "--calls 6 is read with --search"),
        (["--search", "tree"], "--search needs one way (random, zero_order or tree), and --calls"),
        (["--search", "radius=0.5", "--calls", 6], "--search needs one way"),
        ([*search, "--search", "radios=1"], 'no such setting; did you mean "radius"'),
        (["--best-of", 2, "--enough", 0.5], "--enough 0.5 is read with --refine"),
    ):
        refused = small.invoke(*words, *wrong, "--reward", "jpeg", "-o", tmp_path / "b.png")
        assert refused.exit_code == 2 and sentence in " ".join(refused.stderr.split())
