"""Old samples beside new ones: what they weigh, that they are what they were, and that a run with
them resumes bit for bit."""

from types import SimpleNamespace

import pytest
import small
import torch

from flowrl.config.facts import of_config
from flowrl.config.load import load_config
from flowrl.config.training import ReplayConfig
from flowrl.rollouts.replay_buffer import ReplayBuffer
from flowrl.training.loop import Trainer
from flowrl.training.update import Term

# two steps leave one noise level; no clipping, so that gradients add up
OWN = {
    "data__eval": "null",
    "sampler__steps": "2",
    "algorithm__steps": "1",
    "optimizer__max_grad_norm": "1e9",
}
small.ALGORITHMS.setdefault("dgpo", {})


def made(folder, algorithm="nft", **changes):
    return small.trainer(folder, algorithm, **{**OWN, **changes})


def gradient(trainer, rollout, rows):
    """Gradient of the mean loss of some rows by the present policy."""
    turns = torch.zeros(len(rows)).long()
    whole = Term(objective=trainer.algorithm, rows=rows, rollout=rollout, turns=turns)
    trainer.learner.gradient([whole.part(0, trainer.world)])
    parameters = trainer.parts.weights.parameters.values()
    return torch.cat([(0 * p if p.grad is None else p.grad).flatten() for p in parameters])


@pytest.mark.parametrize(("algorithm", "taper"), [("nft", 0.25), ("dgpo", 1.0)])
def test_the_gradient_is_the_weighted_mean_of_that_of_the_new_and_of_the_old_samples(
    tmp_path, algorithm, taper
):
    """(W_new g_new + taper W_old g_old) / (W_new + taper W_old), where g_old and W_old are those of
    the first iteration's own samples and advantages, without the buffer."""
    trainer = made(
        tmp_path / "run", algorithm, iterations="2", replay__size="1", replay__taper=str(taper)
    )
    method, update, advantages, seen = trainer.algorithm, trainer.learner.update, [], []
    credit = method.advantages
    method.advantages = lambda _, leaf: advantages.append(credit(_, leaf)) or advantages[-1]
    trainer.learner.update = lambda *given: seen.append(given) or update(*given)
    first = next(iter(trainer))
    trainer.iterate(1)
    trained, rows = seen[1][:2]
    joined = trained.rollout
    new = rows.prompt < 2
    old = method.columns(first.rollout, advantages[0], seed=0, iteration=1)
    parts = [(joined, rows[torch.nonzero(new).flatten()]), (first.rollout, old)]
    weights = [float(part.weight.sum()) for _, part in parts]
    weights[1] *= taper
    gs = [gradient(trainer, *part) for part in parts]
    expected = sum(g * w for g, w in zip(gs, weights, strict=True)) / sum(weights)
    assert float(rows.weight.sum()) == pytest.approx(sum(weights)) and min(weights) > 0
    assert (gradient(trainer, joined, rows) - expected).norm() < 1e-4 * expected.norm()
    assert (gs[0] - expected).norm() > 1e-2 * expected.norm()  # the old ones say something else


def test_what_weighs_nothing_is_not_trained_and_size_0_keeps_nothing(tmp_path):
    plain = made(tmp_path / "plain", iterations="2")
    zero = made(tmp_path / "zero", iterations="2", replay__size="2", replay__taper="0")
    list(plain), list(zero)
    a, b = small.weights(plain.path), small.weights(zero.path)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert {name.split("/")[0] for name in b.keys() - a.keys()} == {"replay"}
    for x, y in zip(small.numbers(plain.path), small.numbers(zero.path), strict=True):
        assert y == x | {"replay/groups": 0, "replay/age": 0}


LONG = {
    "iterations": "3",
    "batch__updates": "2",
    "replay__size": "2",
    "replay__taper": "0.5",
    "replay__share": "2",
}


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run of three iterations -> the trainer, its results, and (rollout, rows) of its updates."""
    trainer, seen = made(tmp_path_factory.mktemp("replay") / "run", **LONG), []
    step = trainer.learner.gradient
    trainer.learner.gradient = lambda parts: (
        seen.append((parts[0].rollout, parts[0].rows)) or step(parts)
    )
    return trainer, list(trainer), seen


def test_weights_are_the_taper_to_the_power_of_the_age_and_metrics_are_of_new_samples(long):
    """The third iteration trains 2 new groups and the 4 of the two before, half in each update."""
    trainer, results, seen = long
    assert "at most 12 trained rows" in trainer.describe()  # 6 groups of 2, at one noise level
    for i, it in enumerate(results):
        updates = seen[2 * i : 2 * i + 2]
        ages = [0, 0] + [age for age in (1, 2)[:i] for _ in range(2)]
        found = {int(r.prompt[k]): float(r.weight[k]) for _, r in updates for k in range(len(r))}
        assert sorted(found.values()) == sorted(0.5**age for age in ages)
        for u, (rollout, rows) in enumerate(updates):
            news = rows.prompt[rows.weight == 1].unique()
            assert news.tolist() == [u] and len(rows) == 2 * (1 + i)
            new = torch.nonzero(rows.prompt == u).flatten()
            assert torch.equal(
                rollout.states[rows.state[new]], it.rollout.leaves[it.rollout.group == u]
            )
        assert it.metrics["replay/groups"] == 2 * i and it.metrics["replay/age"] == [0, 1, 1.5][i]
        assert it.metrics["policy/rows"] == 4 * (1 + i)
        # what is measured and shown is new
        assert it.metrics["reward/total"] == pytest.approx(float(it.rewards.total.mean()))
        assert len(it.batch) == 2 and len(it.rollout.leaf) == len(it.rewards.total) == 4


def test_a_resumed_run_replays_what_it_would_have_replayed(tmp_path, long):
    trainer = made(tmp_path / "run", **LONG)
    for it in trainer:
        if it.number == 2:
            break
    trainer.save()
    trainer.parts.lock.release()
    list(Trainer(resume=tmp_path / "run"))
    whole = long[0].path
    assert small.same(tmp_path / "run", whole)
    assert {f"replay/{i}/x0" for i in (0, 1, 2)} & small.weights(whole).keys() == {
        "replay/1/x0",
        "replay/2/x0",
    }


# --- the buffer by itself

PROMPTS = [{"prompt": f"p {i}"} for i in range(9)]


def filled(**config):
    """Groups 0..5 of iterations 0, 1 and 2, two samples each, of which group i of iteration i has
    equal rewards."""
    buffer = ReplayBuffer(ReplayConfig(size=2, **config), PROMPTS, seed=4)
    for i in range(3):
        ids = torch.tensor([5, 3, 1, 0, 2, 4])
        batch = SimpleNamespace(ids=ids, text=[PROMPTS[k]["prompt"] for k in ids.tolist()])
        group = torch.arange(6).repeat(2)
        leaf = torch.where(ids[group] == i, 0.0, torch.tensor([1.0, -1.0]).repeat_interleave(6))
        places, x0 = torch.arange(12), torch.randn(12, 3)
        rollout = SimpleNamespace(group=group, leaf_key=places, leaf=places, at=x0.__getitem__)
        buffer.keep(i, batch, rollout, leaf, SimpleNamespace(gather=lambda value: value))
    return buffer


def test_a_draw_is_a_function_of_seed_and_iteration_among_groups_with_a_signal():
    buffer = filled()
    everything = {(i, k) for i in (1, 2) for k in range(6) if k != i}
    assert set(buffer.drawn(3, 100)) == everything and set(buffer.kept) == {1, 2}
    counts = dict.fromkeys(everything, 0)
    for seed in range(300):
        buffer.seed = seed
        for group in buffer.drawn(3, 4):
            counts[group] += 1
    assert sum(counts.values()) == 1200 and 90 < min(counts.values()) < max(counts.values()) < 150
    assert filled().drawn(3, 4) == filled().drawn(3, 4) != filled().drawn(2, 4)
    group = buffer.leaves((1, 4))
    assert group["id"].tolist() == [4, 4] and group["advantage"].tolist() == [1.0, -1.0]
    assert group["name"].tolist() == [5, 11]


def test_an_unfinished_iteration_is_not_saved_and_its_draw_comes_again():
    buffer = filled()
    before = filled().drawn(2, 100)  # of 0 and 1
    again = ReplayBuffer(buffer.config, PROMPTS, seed=4)
    again.restore(buffer.state(2))
    assert again.drawn(2, 100) == before and {i for i, _ in before} == {0, 1}


def test_prompts_that_have_gone_are_forgotten():
    state = filled().state(3)
    fewer = ReplayBuffer(ReplayConfig(size=2), [{"prompt": "new"}, *PROMPTS[1:3]], seed=4)
    fewer.restore(state)
    assert set(fewer.drawn(3, 100)) == {(1, 2), (2, 1)}


def test_a_gigabyte_is_said():
    cfg = load_config(None, ["replay.size=4", "batch.prompts=48", "batch.group=24"])
    policies = [SimpleNamespace(latent_shape=(channels, 64, 64)) for channels in (16, 4)]
    large, small = (of_config(cfg, policy=policy) for policy in policies)
    assert "replay.size=4 keeps up to 4608 samples, which are 1,208 MB" in str(large.warnings())
    assert "MB" not in str(small.warnings())
