"""Rewards by domain: absent scores, totals of own rewards, statistics of each domain, refusals."""

import dataclasses
import json
import math

import pytest
import torch

from flowrl.advantages import combine, group_relative
from flowrl.advantages.suspicion import suspects
from flowrl.algorithms.grpo import ALGORITHM as GRPO
from flowrl.config.load import ConfigError, load_config
from flowrl.data import scored_dataset, scored_folder
from flowrl.data.samples import Sample
from flowrl.data.scored_folder import ScoredSample
from flowrl.rewards import concat, load_set, readings, reward_metrics, score
from flowrl.rewards.core.climb import climb
from flowrl.rewards.core.domains import check_domains
from flowrl.rewards.core.score import check_meta, check_valid
from flowrl.rollouts.from_files import with_domains
from flowrl.types import MediaContext, Rewards

FAILS = 9.0  # a value of the media with which a reward fails
GROUP = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
DOMAINS = ["a", "a", "b", "b", "a", "a", "b", "b"]
VALUES = {"x": [1, 2, 30, 70, 4, 8, 20, 10], "y": [0.1, 0.4, 5, 3, 0.2, 0.1, 1, 2]}
STATISTICS = [
    {"combine": how, "std": std, "outcome": outcome}
    for how in ("rewards", "advantages", "gdpo")
    for std in ("group", "global", None)
    for outcome in ("reward", "win_rate")
]


def column(i, calls=None):
    """A reward that reads media (B, D): column i; calls gets the number of samples of each call."""

    def read(media, *_):
        if calls is not None:
            calls.append(len(media))
        return media[:, i].masked_fill(media[:, i] == FAILS, math.nan)

    return read


def media_of(values):
    return torch.tensor(list(values.values())).float().T.contiguous()


def scored(values, domains, group=GROUP, **rules):
    """values: label -> (B,) numbers; rules: label -> rule."""
    media = media_of(values)
    rewards = {k: {"reward": column(i), **rules.get(k, {})} for i, k in enumerate(values)}
    context = MediaContext(meta=[{"domain": name} for name in domains], group=group)
    return score(media, ["p"] * len(media), rewards, context)


def advantages(found, group=GROUP, **options):
    return GRPO(GRPO.Config(**options)).leaf_advantages(found, group)


# --- scores


def test_a_reward_is_asked_for_its_domains_alone_and_absent_elsewhere():
    calls = []
    rewards = {
        "x": {"reward": column(0, calls), "domains": ["a"]},
        "y": {"reward": column(1), "weight": 10, "domains": "b"},
        "z": {"reward": column(2), "weight": 0.5},
    }
    media = media_of({"x": [1, 2, 3, 4], "y": [1, 2, 3, 4], "z": [2, 2, 2, 2]})
    context = MediaContext(meta=[{"domain": d} for d in "abba"])
    found = score(media, ["p"] * 4, rewards, context)
    assert calls == [2] and found.total.tolist() == [1 + 1, 20 + 1, 30 + 1, 4 + 1]
    assert found.raw["x"].isnan().tolist() == [False, True, True, False]
    assert bool(found.valid.all()) and not found.errors and not found.kinds
    assert found.domain == [*"abba"] and found.asked["y"].tolist() == [False, True, True, False]
    assert list(found.asked) == ["x", "y"] and not bool(found.unscored.any())
    seen = reward_metrics(found)
    assert (
        seen["reward/x/mean"] == 2.5 and seen["reward/y/std"] == 0.5 and seen["reward/z/std"] == 0
    )
    assert seen["reward/total/a"] == 3.5 and seen["reward/total/b"] == 26
    assert readings(media, ["p"] * 4, load_set(rewards), context)["y"][1:3].tolist() == [2, 3]


def test_a_failure_is_no_absence():
    """x fails for the second sample, of its domain; the third has no x at all."""
    values = {"x": [1, FAILS, FAILS], "y": [1, 1, 1]}
    found = scored(values, "aab", None, x={"domains": ["a"]}, y={})
    assert found.valid.tolist() == [True, False, True] and found.kinds == {"nan": 1}
    assert found.unscored.tolist() == [False, True, False]
    check_valid(found, 0.5)


def test_a_reward_without_a_sample_is_not_called():
    calls = []
    rewards = {"x": {"reward": column(0, calls), "domains": ["a"]}, "y": column(1)}
    context = MediaContext(meta=[{"domain": "b"}] * 2)
    found = score(torch.ones(2, 2), ["p"] * 2, rewards, context)
    assert not calls and bool(found.raw["x"].isnan().all()) and found.total.tolist() == [1, 1]
    assert "reward/x/mean" not in reward_metrics(found)


def test_a_gate_and_levels_hold_inside_a_domain():
    """a: y counts 0 where x < 3. b: y is absent, and its closed gate makes no 0 of it."""
    found = scored(
        {"x": [1, 4, 1, 4], "y": [5, 6, 7, 8]},
        "aabb",
        None,
        x={},
        y={"gate": {"x": 3}, "domains": ["a"]},
    )
    assert found.counted["y"][:2].tolist() == [0, 6] and bool(found.counted["y"][2:].isnan().all())
    assert found.total.tolist() == [1, 10, 1, 4]
    # levels of x in group 0: 1 and 2, a gap of 1; y orders samples of a level, in domain a alone
    rules = {"x": {}, "y": {"stratify": "x", "weight": 0.5, "domains": ["a"]}}
    values = {"x": [1, 1, 2, 1, 1, 2], "y": [0, 5, 9.5, 0, 5, 9.5]}
    found = scored(values, "aaabbb", torch.tensor([0, 0, 0, 1, 1, 1]), **rules)
    assert found.total.tolist() == [1, 1.5, 2.25, 1, 1, 2] and bool(found.valid.all())


def test_chunks_join_to_the_whole():
    rules = {"x": {"domains": ["a"]}, "y": {"domains": ["b"]}}
    whole = scored(VALUES, DOMAINS, **rules)
    parts = [
        scored({k: v[i : i + 3] for k, v in VALUES.items()}, DOMAINS[i : i + 3], None, **rules)
        for i in range(0, 8, 3)
    ]
    joined = concat(parts)
    assert joined.domain == whole.domain and torch.equal(joined.total, whole.total)
    assert torch.equal(joined.asked["x"], whole.asked["x"])


def test_a_climbed_reward_has_no_gradient_in_other_domains():
    rewards = load_set(
        {"x": {"reward": column(0), "domains": ["a"]}, "y": {"reward": column(1), "weight": 3}}
    )
    media = torch.tensor([[2.0, 5.0], [3.0, 7.0]], requires_grad=True)
    context = MediaContext(meta=[{"domain": "a"}, {"domain": "b"}])
    total = climb(media, ["p", "p"], rewards, context)
    assert total.tolist() == [2 + 15, 21]
    assert torch.autograd.grad(total.sum(), media)[0].tolist() == [[1, 3], [0, 3]]
    alone = dataclasses.replace(rewards, weights={"x": 1.0, "y": 0.0})
    other = MediaContext(meta=[{"domain": "b"}] * 2)
    total = climb(media, ["p", "p"], alone, other)
    assert total.tolist() == [0, 0] and total.requires_grad
    assert not bool(torch.autograd.grad(total.sum(), media)[0].any())


# --- advantages


@pytest.mark.parametrize("options", STATISTICS)
def test_domains_with_the_same_rewards_are_one_but_for_global_statistics(options):
    rules = {"x": {}, "y": {"weight": 0.5}}
    one = scored(VALUES, DOMAINS, **rules)
    both = {k: rule | {"domains": ["a", "b"]} for k, rule in rules.items()}
    two = scored(VALUES, DOMAINS, **both)
    same = torch.equal(advantages(one, **options), advantages(two, **options))
    # win rates in groups of two are 0 and 1, which deviate alike in every domain
    of_sum = options["std"] == "global" and options["outcome"] == "reward"
    assert same == {"rewards": not of_sum, "advantages": True, "gdpo": False}[options["combine"]]


@pytest.mark.parametrize("options", STATISTICS)
def test_each_domain_has_the_advantages_that_it_has_alone(options):
    """Rewards of other units elsewhere change no bit, and neither does the domains' order."""
    rules = {"x": {"domains": ["a"]}, "y": {"domains": ["b"]}}
    found = advantages(scored(VALUES, DOMAINS, **rules), **options)
    for name, label in (("a", "x"), ("b", "y")):
        rows = torch.tensor([domain == name for domain in DOMAINS])
        own = torch.tensor(VALUES[label]).float()[rows]
        alone = scored({label: own.tolist()}, [name] * 4, GROUP[rows])
        assert torch.equal(found[rows], advantages(alone, GROUP[rows], **options))
    swapped = [{"a": "b", "b": "a"}[name] for name in DOMAINS]
    again = scored(VALUES, swapped, x={"domains": ["b"]}, y={"domains": ["a"]})
    assert torch.equal(found, advantages(again, **options))


@pytest.mark.parametrize("options", STATISTICS)
def test_a_domain_of_weight_0_contributes_nothing_and_changes_nothing_else(options):
    rules = {"x": {"domains": ["a"]}, "y": {"domains": ["b"]}}
    whole = advantages(scored(VALUES, DOMAINS, **rules), **options)
    rules["y"]["weight"] = 0
    found = advantages(scored(VALUES, DOMAINS, **rules), **options)
    rows = torch.tensor([name == "a" for name in DOMAINS])
    assert torch.equal(found[rows], whole[rows]) and not bool(found[~rows].any())


def test_a_global_deviation_is_of_the_samples_of_a_domain():
    """x of a: 1, 2, 4, 8, whose groups have means 1.5 and 6."""
    found = scored(VALUES, DOMAINS, x={"domains": ["a"]}, y={"domains": ["b"]})
    own = torch.tensor([1.0, 2, 4, 8], dtype=torch.float64)
    expected = torch.tensor([-0.5, 0.5, -2, 2]) / (own.std(correction=0) + 1e-4)
    adv = group_relative(found.total, GROUP, std="global", within=found.within)
    assert adv[[0, 1, 4, 5]].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_z_score_is_over_the_samples_that_have_the_reward():
    """z covers both domains, so that its global deviation is of all samples, and x of a alone."""
    values = VALUES | {"z": [3, 1, 4, 1, 5, 8, 2, 6]}
    found = scored(values, DOMAINS, x={"domains": ["a"]}, y={"weight": 0, "domains": ["b"]})
    adv = combine(found, GROUP, how="advantages", std="global", clip=None)
    z = group_relative(media_of(values)[:, 2], GROUP, std="global", clip=None)
    a = torch.tensor([name == "a" for name in DOMAINS])
    x = group_relative(media_of(values)[a, 0], GROUP[a], std="global", clip=None)
    assert torch.equal(adv[~a], z[~a]) and torch.equal(adv[a], x + z[a])


def test_suspects_are_sought_in_each_domain_by_itself():
    """The gate of the distance to the reference: x of a and of b have other units."""
    values = {"x": [1, 2, 30, 70, 4, 8, 20, 10], "z": [8, 3, 5, 1, 5, 2, 4, 6]}
    found = scored(values, DOMAINS, x={"domains": ["a", "b"]})
    how = {"main": "x", "auxiliary": ("z",), "share": 1.0, "sign": "hacked"}
    gate = suspects(found, **how)
    for name in "ab":
        rows = torch.tensor([domain == name for domain in DOMAINS])
        own = {k: torch.tensor(v)[rows].tolist() for k, v in values.items()}
        alone = scored(own, [name] * 4, GROUP[rows])
        assert torch.equal(gate[rows], suspects(alone, **how)) and bool(gate[rows].any())
    absent = scored(values, DOMAINS, x={"domains": ["a"]})
    assert not bool(suspects(absent, **how)[[2, 3, 6, 7]].any())


# --- scored folders


def test_a_scored_folder_keeps_what_is_absent(tmp_path):
    """A total without an absent score is read again; its samples are of a domain of their own."""
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"")
    rows = [("a.png", {"x": 1.0, "y": math.nan}, 1.0), ("b.png", {"x": math.nan, "y": 2.0}, 4.0)]
    made = [
        ScoredSample(
            sample=Sample(path=tmp_path / name, prompt=name, meta={}), scores=scores, total=total
        )
        for name, scores, total in rows
    ]
    path = scored_folder.write(tmp_path / "list.jsonl", made, {"x": 1.0, "y": 2.0})
    assert json.loads(path.read_text().splitlines()[0])["scores"] == {"x": 1.0, "y": None}
    found = scored_dataset.load(path)
    (first,), (second,) = found.items
    assert found.mixed and first.total == 1 and math.isnan(first.scores["y"])
    assert second.scores["y"] == 2 and math.isnan(second.scores["x"])
    rewards = Rewards(
        raw={"x": torch.tensor([1, math.nan]), "y": torch.tensor([math.nan, 2])},
        weights={"x": 1.0, "y": 2.0},
        total=torch.tensor([1.0, 4.0]),
        valid=torch.tensor([True, True]),
    )
    assert with_domains(rewards).domain == ["x", "y"]


# --- refusals

SET = load_set({"x": {"reward": column(0), "domains": ["photo"]}})
TWO = load_set(
    {
        "x": {"reward": column(0), "domains": ["photo"]},
        "y": {"reward": column(1), "domains": ["text"]},
    }
)
ROWS = [{"prompt": "p", "domain": "photo"}, {"prompt": "q", "domain": "text"}]


@pytest.mark.parametrize(
    ("rewards", "rows", "sentence"),
    [
        (SET, ROWS, 'no reward is asked for domain "text", which the prompt "q" in data.train has'),
        (TWO, ROWS[:1], 'reward.y.domains names "text", which no prompt has; choose from photo'),
        (TWO, [*ROWS, {"prompt": "r"}], '"domain" of the prompt "r" in data.train is not there'),
        (TWO, [*ROWS, {"prompt": "r", "domain": [1]}], '"r" in data.train is [1]; give every'),
        (
            load_set({"x": {"reward": column(0), "domains": ["photo", "x"]}}),
            [ROWS[0], {"prompt": "q", "domain": "x"}],
            'has domain "x", and metrics are called eval/DOMAIN/REWARD',
        ),
    ],
)
def test_prompts_and_rewards_of_other_domains_are_refused_in_a_sentence(rewards, rows, sentence):
    with pytest.raises(ValueError) as raised:
        check_meta(rewards, {"data.train": rows}, whole=True)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


def test_a_method_that_reads_no_rewards_takes_prompts_without_one():
    check_domains(SET, {"data.train": ROWS}, whole=True, scored=False)
    check_domains(TWO, {"data.eval": ROWS[:1]})  # an evaluation may lack a domain
    check_domains(load_set({"x": column(0)}), {"data.train": [{"prompt": "p"}]}, whole=True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("reward.jpeg.domains=[]", "domains=[] should be names of domains; write jpeg.domains="),
        ("reward.jpeg.domains={a: 1}", "should be names of domains"),
        (
            "reward.jpeg.domains=[a] reward.tiling.gate.jpeg=0.5",
            'gate names "jpeg", which is asked for domains [a] alone, and tiling for all',
        ),
        (
            "reward.jpeg.domains=[a] reward.tiling={stratify: jpeg, weight: 0.5, domains: [b]}",
            'stratify names "jpeg", which is asked for domains [a] alone, and tiling for b',
        ),
    ],
)
def test_wrong_domains_of_a_reward_are_refused_in_a_sentence(words, sentence):
    with pytest.raises(ConfigError) as raised:
        load_config(None, _split(words))
    assert sentence in str(raised.value)


def _split(words):
    first, _, second = words.partition(" reward.tiling")
    return [first, *([f"reward.tiling{second}"] if second else [])]


def test_a_config_keeps_domains():
    found = load_config(None, ["reward.jpeg.domains=[a,b]", "data.domain=kind"])
    assert found.reward["jpeg"] == {"weight": 1.0, "domains": ["a", "b"]}
    assert load_set(found.reward).domains == {"jpeg": ("a", "b")}


def test_scoring_without_facts_is_refused():
    with pytest.raises(ValueError, match='states domains, and the context column "meta"'):
        score(torch.ones(1, 1), ["p"], SET)
    with pytest.raises(ValueError, match='"domain" of a sample is not there'):
        score(torch.ones(1, 1), ["p"], SET, MediaContext(meta=[{}]))
