"""Rewards that depend on each other: gates, levels that keep their order, weights by iteration."""

import math
import random
import re

import pytest
import small
import torch
import yaml

from flowrl.advantages import combine, group_relative
from flowrl.algorithms.grpo import ALGORITHM as GRPO
from flowrl.config.live import place_rewards
from flowrl.config.load import ConfigError, dump, load_config, validated
from flowrl.config.training import GuardConfig
from flowrl.rewards import concat, load_set, readings, reward_metrics, score
from flowrl.rewards.core.climb import climb, without_gradient
from flowrl.rewards.core.counted import counted
from flowrl.training.watch.guards import signs
from flowrl.types import MediaContext

NAN = 9.0  # a value of the media with which a reward fails


def column(i):
    """A reward that reads media (B, D): column i."""
    return lambda media, *_: media[:, i].masked_fill(media[:, i] == NAN, math.nan)


def rewards_of(**rules):
    """Rewards a, b, ... that read columns 0, 1, ... of media."""
    return {label: {"reward": column(i), **rule} for i, (label, rule) in enumerate(rules.items())}


def scored(values, group=None, **rules):
    """values: label -> (B,) numbers, and each label's rule."""
    media = torch.tensor(list(values.values())).float().T.contiguous()
    group = None if group is None else torch.as_tensor(group)
    return score(media, ["x"] * len(media), rewards_of(**rules), MediaContext(group=group))


# --- gates


def test_a_reward_counts_only_where_every_named_one_reaches_its_threshold():
    """b = 2, 3, 4, 5 with a >= 0.5 at 1, 2, 3 and c >= 1 at 0, 2, 3; total = a + 10 b there."""
    out = scored(
        {"a": [0.25, 0.5, 0.5, 1.0], "b": [2, 3, 4, 5], "c": [1, 0, 1, 2]},
        a={},
        b={"weight": 10, "gate": {"a": 0.5, "c": 1}},
        c={"weight": 0},
    )
    assert out.counted["b"].tolist() == [0, 0, 4, 5] and out.raw["b"].tolist() == [2, 3, 4, 5]
    assert out.total.tolist() == [0.25, 0.5, 40.5, 51] and list(out.counted) == ["b"]
    assert reward_metrics(out)["reward/b/mean"] == 3.5  # raw


def test_a_threshold_is_reached_by_the_fp32_value_next_to_it():
    out = scored({"a": [0.7, 0.3], "b": [1, 1]}, a={}, b={"gate": {"a": 0.7}})
    assert out.counted["b"].tolist() == [1, 0]


def test_a_sample_is_invalid_where_its_total_depends_on_a_failure():
    """The gate g failed at 0; b failed at 1, where it counts, and at 2, where it does not."""
    values = {"g": [NAN, 1, 0, 1], "b": [1, NAN, NAN, 1]}
    out = scored(values, g={"weight": 0}, b={"gate": {"g": 1}})
    assert out.valid.tolist() == [False, False, True, True] and out.total[2:].tolist() == [0, 1]
    assert out.kinds == {"nan": 3}  # a gate's failures count, as they decide
    watched = scored(values, g={"weight": 0}, b={"weight": 0, "gate": {"g": 1}})
    assert bool(watched.valid.all()) and not watched.kinds and not watched.counted


@pytest.mark.parametrize("how", ["advantages", "gdpo"])
def test_z_scores_of_each_reward_are_of_what_counts(how):
    values = {"a": [0, 1, 1, 0, 1, 1], "b": [5, 3, 2, 7, 1, 4]}
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    gated = scored(values, a={}, b={"weight": 0.5, "gate": {"a": 1}})
    by_hand = scored(values | {"b": [0, 3, 2, 0, 1, 4]}, a={}, b={"weight": 0.5})
    assert torch.equal(combine(gated, group, how=how), combine(by_hand, group, how=how))
    parts = [group_relative(v, group, valid=gated.valid, clip=None) for v in gated.terms.values()]
    if how == "advantages":
        assert torch.allclose(combine(gated, group, how=how), parts[0] + 0.5 * parts[1])


def test_win_rates_are_of_what_counts():
    out = scored({"a": [0, 1, 1], "b": [5, 3, 2]}, a={}, b={"gate": {"a": 1}})
    found = GRPO(GRPO.Config(outcome="win_rate")).win_rates(out, torch.zeros(3))
    assert found.terms["b"].tolist() == [0, 1, 0.5]


def test_chunks_keep_what_counts():
    out = scored({"a": [0, 1], "b": [5, 3]}, a={}, b={"gate": {"a": 1}})
    assert concat([out, out]).counted["b"].tolist() == [0, 3, 0, 3]


# --- levels


def test_a_stratified_reward_fills_its_share_of_the_gap_between_levels():
    """Levels 0, 0.5 and 2 of weight 2: the gap is 1. b is 0.8 of it: from the lowest to the highest
    of a level, half of it where a sample is alone."""
    out = scored(
        {"a": [0, 0, 0, 0.5, 2, 2], "b": [10, 30, 15, -4, 6, 6]},
        group=[0] * 6,
        a={"weight": 2},
        b={"weight": 0.8, "stratify": "a"},
    )
    assert out.counted["b"].tolist() == [0, 1, 0.25, 0.5, 0.5, 0.5]
    assert out.total.tolist() == pytest.approx([0, 0.8, 0.2, 1.4, 4.4, 4.4])


def test_one_level_has_the_gap_of_the_weight_and_groups_have_their_own():
    """Group 0 has one level, up to 1e-7; group 1 has levels 0.25 apart."""
    out = scored(
        {"a": [1, 1 + 1.2e-7, 0.5, 0.75], "b": [3, 7, 1, 1]},
        group=[0, 0, 1, 1],
        a={"weight": 4},
        b={"weight": 0.5, "stratify": "a"},
    )
    assert out.counted["b"].tolist() == [0, 4, 0.5, 0.5]


def test_a_gate_on_a_stratified_reward_leaves_closed_samples_out_of_its_level():
    out = scored(
        {"a": [1, 1, 1], "b": [0, 5, 10], "g": [0, 1, 1]},
        group=[0] * 3,
        a={},
        b={"weight": 0.5, "stratify": "a", "gate": {"g": 1}},
        g={"weight": 0},
    )
    assert out.counted["b"].tolist() == [0, 0, 1]


def draw(rng):
    """Values of three rewards: levels that repeat, nearly tie and may fail."""
    count, levels = rng.randint(1, 24), [rng.choice([0, 0.25, 1, -2, 1 + 1e-6]) for _ in range(4)]
    failing = rng.choice([0.0, 0.2])

    def value(number):
        return NAN if rng.random() < failing else number

    values = {
        "a": [value(rng.choice(levels) + rng.choice([0, 2e-7])) for _ in range(count)],
        "b": [value(rng.choice([rng.gauss(0, 3), 1.0])) for _ in range(count)],
        "c": [value(rng.random()) for _ in range(count)],
    }
    first = rng.uniform(0.01, 0.98)
    shares = [first, rng.uniform(0, 0.99 - first)]
    rules = {"a": {"weight": rng.choice([0.1, 1, 3.7])}}
    rules |= {k: {"weight": w, "stratify": "a"} for k, w in zip("bc", shares, strict=True)}
    return values, [rng.randrange(3) for _ in range(count)], rules


@pytest.mark.parametrize("seed", range(40))
def test_totals_never_reorder_levels_whatever_the_others_say(seed):
    values, group, rules = draw(random.Random(seed))
    out, g = scored(values, group, **rules), torch.tensor(group)
    failed = torch.tensor([NAN in row for row in zip(*values.values(), strict=True)])
    assert torch.equal(out.valid, ~failed)
    a = out.raw["a"].double()
    higher = (a[:, None] - a[None] >= 1.5e-6) & (g[:, None] == g) & out.valid[:, None] & out.valid
    assert bool((out.total[:, None] >= out.total[None])[higher].all())
    assert bool((out.total - rules["a"]["weight"] * out.raw["a"] >= -1e-6)[out.valid].all())


@pytest.mark.parametrize("seed", range(10))
def test_levels_are_those_of_valid_samples_and_of_any_scale_of_the_secondary(seed):
    values, group, rules = draw(random.Random(seed))
    out = scored(values, group, **rules)
    kept = [i for i in range(len(group)) if bool(out.valid[i])]
    if not kept:
        return
    alone = scored(
        {k: [v[i] for i in kept] for k, v in values.items()}, [group[i] for i in kept], **rules
    )
    assert torch.equal(alone.total, out.total[kept])
    moved = {k: [NAN if x == NAN else 40 * x - 7 for x in values[k]] for k in "bc"}
    again = scored(values | moved, group, **rules)
    assert torch.allclose(again.total[kept], out.total[kept], atol=1e-4)


def test_evaluation_measures_a_stratified_reward_and_does_not_count_it():
    chosen = load_set(rewards_of(a={"weight": 2}, b={"weight": 0.5, "stratify": "a"}))
    assert "group" in chosen.needs
    alone, media = chosen.pointwise(), torch.tensor([[1.0, 5.0], [0.0, 7.0]])
    found = readings(media, ["x"] * 2, alone, MediaContext())
    assert found["b"].tolist() == [5, 7] and found["total"].tolist() == [2, 0]
    with pytest.raises(ValueError, match='"b" is scaled among the samples of a prompt'):
        score(media, ["x"] * 2, chosen)


def test_evaluation_does_not_count_a_reward_whose_gate_it_leaves_out():
    rank = {"name": "rank", "reward": "jpeg", "weight": 0}
    alone = load_set({"rank": rank, "jpeg": {"gate": {"rank": 0.5}}}).pointwise()
    assert alone.weights == {"jpeg": 0.0} and not alone.rules


# --- schedules


def test_a_weight_is_linear_between_iterations_and_constant_outside():
    chosen = load_set(rewards_of(a={"weight": {10: 1, 20: 0, 40: 4}}, b={}))
    found = {i: chosen.at(i).weights["a"] for i in (0, 10, 15, 20, 30, 40, 99)}
    assert found == {0: 1, 10: 1, 15: 0.5, 20: 0, 30: 2, 40: 4, 99: 4}
    assert chosen.weights == {"a": 4, "b": 1} == chosen.at(7).at(50).weights
    assert chosen.at(20).weighted == {"a", "b"} and chosen.at(20).decisive == {"b"}


def test_a_threshold_moves_with_the_iteration():
    chosen = load_set(rewards_of(a={"weight": 0}, b={"gate": {"a": {0: 0, 4: 1}}}))
    media = torch.tensor([[0.4, 1.0], [0.6, 1.0], [1.0, 1.0]])
    passed = [score(media, ["x"] * 3, chosen.at(i)).total.tolist() for i in (0, 2, 4)]
    assert passed == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert score(media, ["x"] * 3, chosen).total.tolist() == [0, 0, 1]  # as it ends


def test_a_constant_reward_that_does_not_count_yet_stops_no_run():
    chosen = load_set(rewards_of(a={}, b={"weight": {5: 0, 9: 1}}))
    metrics = {"optimizer/step": 1, "policy/rows": 0, "reward/b/mean": 0.0, "reward/b/std": 0.0}
    stops = [
        signs(metrics, {}, GuardConfig(), chosen.at(i))["constant b"].stops_after for i in (5, 6)
    ]
    assert stops == [None, GuardConfig().stop_after]


# --- gradients


def test_a_closed_gate_passes_no_gradient_and_no_gate_does():
    media = torch.tensor([[0.0, 2.0], [1.0, 3.0]], requires_grad=True)
    chosen = load_set(rewards_of(a={"weight": 0}, b={"weight": 5, "gate": {"a": 1}}))
    total = climb(media, ["x"] * 2, chosen, MediaContext())
    assert total.tolist() == [0, 15]
    (slope,) = torch.autograd.grad(total.sum(), media)
    assert slope.tolist() == [[0, 0], [0, 5]]


def test_what_gives_no_gradient_in_some_iteration_or_no_gradient_at_all_cannot_be_climbed():
    shapes = {"shapes": {}, "jpeg": {"weight": 0.5, "stratify": "shapes"}}
    levels = without_gradient(load_set(shapes))
    assert levels.endswith("write reward.jpeg.gate.shapes=0.5 in its place")
    later = load_set({"jpeg": {"weight": {0: 1, 9: 0}}}).at(9)
    assert "jpeg as loaded gives none" in without_gradient(later)
    gate = {"shapes": 0, "tiling": {"gate": {"shapes": 1}}}
    assert not without_gradient(load_set(gate))  # a gate needs no gradient


# --- what is refused


@pytest.mark.parametrize(
    ("b", "said"),
    [
        ({"gate": {"aa": 1}}, 'gate names "aa", which is not here; did you mean "a"?'),
        ({"gate": {"b": 1}}, "gate names b itself"),
        ({"gate": {"a": math.inf}}, "gate.a=inf is neither a finite number nor one by iteration"),
        ({"gate": {"a": "1"}}, "gate.a='1' is neither"),
        ({"gate": 0.5}, "write b.gate.shapes=0.5"),
        ({"stratify": "c", "weight": 0.5}, 'stratify names "c", which is not here'),
        ({"stratify": "b", "weight": 0.5}, "stratify names b itself"),
        ({"stratify": True, "weight": 0.5}, "stratify=True should name a reward"),
        ({"stratify": "a"}, "above 0 and below 1, and it is 1.0; write b.weight=0.5"),
        ({"stratify": "a", "weight": 0}, "above 0 and below 1, and it is 0.0"),
        ({"stratify": "minus", "weight": 0.5}, "stratify=minus needs its weight above 0"),
        ({"stratify": "inner", "weight": 0.5}, "which has stratify itself; write b.stratify=a"),
        ({"stratify": "a", "weight": 0.6}, "(inner, b) have weights of 1.1 together"),
        ({"weight": {0: 1, "x": 2}}, "should map iterations, counted from 0, to finite numbers"),
        ({"weight": {-1: 1}}, "should map iterations"),
        ({"weight": {}}, "should map iterations"),
        ({"weight": {0: 1, "0": 2}}, "should map iterations"),
        ({"weight": {0: math.nan}}, "should map iterations"),
    ],
)
def test_rules_that_cannot_hold_are_one_sentence(b, said):
    others = {"a": {}, "minus": {"weight": -1}, "inner": {"weight": 0.5, "stratify": "a"}}
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load_set(rewards_of(**others, b=b))
    assert "\n" not in str(error.value)


def test_shares_that_change_are_judged_where_they_are_highest_together():
    first, second = {0: 0.9, 10: 0}, {0: 0, 10: 0.9}
    rules = {"a": {}, "b": {"weight": first, "stratify": "a"}}
    assert load_set(rewards_of(**rules, c={"weight": second, "stratify": "a"})).strata
    late = {"weight": {0: 0, 5: 0.9}, "stratify": "a"}
    with pytest.raises(ValueError, match="weights of 1.35 together"):
        load_set(rewards_of(**rules, c=late))


def test_z_scores_of_each_reward_and_levels_are_refused_before_a_model_is_loaded(tmp_path):
    words = {"reward": "shapes", "reward__jpeg__stratify": "shapes", "reward__jpeg": "0.5"}
    with pytest.raises(ValueError, match="algorithm.combine=gdpo takes z-scores"):
        small.trainer(tmp_path, "flow_grpo", algorithm__combine="gdpo", **words)


# --- configs


RULES = ["reward.jpeg.weight={0: 1, 100: 0.2}", "reward.jpeg.gate.shapes={0: 0, 50: 1}"]


def test_a_config_states_rules_in_yaml_and_on_the_command_line(tmp_path):
    cfg = load_config(None, RULES)
    stated = {"weight": {0: 1.0, 100: 0.2}, "gate": {"shapes": {0: 0.0, 50: 1.0}}}
    assert cfg.reward == {"shapes": {"weight": 1.0}, "jpeg": stated}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"reward": {"shapes": 1.0, "jpeg": stated}}))
    assert load_config(path).reward == cfg.reward
    assert load_config(reward={"shapes": 1.0, "jpeg": stated}).reward == cfg.reward
    assert load_set(cfg.reward).at(50).weights["jpeg"] == 0.6


def test_a_run_reads_back_the_rules_that_it_wrote(tmp_path):
    cfg = load_config(None, [*RULES, "reward.clip=0.5", "reward.clip.stratify=shapes"])
    text = dump(cfg)
    assert validated(yaml.safe_load(text), []) == cfg
    path = tmp_path / "config.yaml"
    path.write_text(text)
    other = load_config(path, ["reward.jpeg.weight={0: 3, 10: 1}", "reward.jpeg.gate.shapes=1"])
    assert other.reward["jpeg"] == {"weight": {0: 3.0, 10: 1.0}, "gate": {"shapes": 1.0}}


def test_a_mapping_of_one_value_is_that_value():
    cfg = load_config(None, ["reward.jpeg.weight={0: 0, 5: 0}"])
    assert cfg.reward["jpeg"] == {"weight": 0.0}


def test_a_config_with_rules_that_cannot_hold_names_them_and_loads_nothing():
    with pytest.raises(ConfigError, match='gate names "shape", which is not here; did you mean'):
        load_config(None, ["reward.jpeg.gate.shape=1"])


def test_live_rewards_keep_their_rules_in_the_config():
    given = rewards_of(a={}, b={"weight": {0: 1, 9: 0}, "gate": {"a": 0.5}})
    for spec in (given, load_set(given)):
        tree = {}
        place_rewards(tree, spec)
        assert tree["reward"]["b"]["weight"] == {0: 1, 9: 0}
        assert tree["reward"]["b"]["gate"] == {"a": 0.5} and tree["reward"]["a"]["weight"] == 1


# --- whole runs

QUICK = {"data__eval": "null", "guard__check_rewards": "false", "batch__group": "4"}


def test_a_run_gates_and_changes_a_weight_by_its_iterations(tmp_path):
    rules = {"reward__shapes__weight": "{0: 1, 1: 0.5}", "reward__jpeg__gate__shapes": "0.5"}
    words = {"reward": "shapes", "reward__jpeg": "0.1", "iterations": "2"}
    run = small.trainer(tmp_path, "flow_grpo", **QUICK, **words, **rules)
    its = list(run)
    assert [it.rewards.weights["shapes"] for it in its] == [1.0, 0.5]
    for it in its:
        raw = it.rewards.raw
        gated = torch.where(raw["shapes"] >= 0.5, raw["jpeg"], 0.0)
        total = it.rewards.weights["shapes"] * raw["shapes"] + 0.1 * gated
        assert torch.allclose(it.rewards.total, total)
        assert it.metrics["reward/jpeg/mean"] == pytest.approx(raw["jpeg"].double().mean().item())


def test_a_run_shows_whole_groups_where_one_reward_is_stratified(tmp_path):
    words = {"reward": "shapes", "reward__jpeg": "0.5", "reward__jpeg__stratify": "shapes"}
    run = small.trainer(tmp_path, "flow_grpo", iterations="1", batch__decode="3", **QUICK, **words)
    (it,) = list(run)
    again = counted(run.source.rewards, it.rewards.raw, it.rollout.group)
    assert torch.equal(again["jpeg"], it.rewards.counted["jpeg"])
    assert it.rewards.counted["jpeg"].max() > 0


def test_all_rewards_that_cannot_be_loaded_are_named_at_once(monkeypatch):
    """For example on a machine without the hub, where each lacks its weights."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError) as error:
        load_set({"pickscore": 1, "jpeg": 1, "hpsv2": 0.5})
    first, second = str(error.value).splitlines()
    assert "PickScore" in first and "HPSv2" in second
