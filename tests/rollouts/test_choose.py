"""Which prompts an iteration sees: what learns finds what was planted, in few iterations."""

import itertools
import json

import long
import numpy as np
import pytest
import small
import torch

from flowrl.config.sampling import ChoiceConfig
from flowrl.data import prompts as data
from flowrl.rollouts.choose import all_seen, chooser, seen_by
from flowrl.training.loop import Trainer

PROMPTS = [{"prompt": f"p {i}", "tag": f"arm {i % 4}"} for i in range(200)]
DIFFICULTY = torch.linspace(0, 1, 200)  # share of a prompt's samples that succeed
NOISE = np.random.default_rng(0)


def make(mode, prompts=PROMPTS, size=8, seed=3, **options):
    return chooser(prompts, ChoiceConfig(mode=mode, **options), size=size, seed=seed)


def show(choice, batch, success, gain=None, samples=16):
    """Binomial successes of a batch's prompts."""
    drawn = torch.from_numpy(NOISE.binomial(samples, success.double().numpy())).double()
    gain = torch.zeros(len(batch)) if gain is None else gain
    table = [batch.ids.double(), torch.full((len(batch),), float(samples)), drawn, gain.double()]
    return choice.learn(all_seen(torch.stack(table, 1)))


def test_uniform_is_the_shuffled_epochs():
    choice = make("uniform")
    for i in (0, 7, 30):
        assert choice.choose(i, 8).ids.tolist() == (
            data.batch(PROMPTS, iteration=i, size=8, seed=3).ids.tolist()
        )


@pytest.mark.parametrize("target", [0.5, 0.2])
def test_thompsons_draws_converge_to_the_planted_difficulty(target):
    choice, found = make("bayes", target=target), []
    for i in range(150):
        batch = choice.choose(i, 8)
        assert len(set(batch.ids.tolist())) == 8
        found.append(DIFFICULTY[batch.ids])
        metrics = show(choice, batch, found[-1])
    early, late = torch.cat(found[:10]), torch.cat(found[-50:])
    assert (late - target).abs().mean() < 0.12 < 0.2 < (early - target).abs().mean()
    assert late.mean() == pytest.approx(target, abs=0.06)
    assert metrics["prompts/expected"] == pytest.approx(target, abs=0.12)
    assert metrics["prompts/seen"] == len(choice.state) / 200


def test_what_is_believed_of_a_prompt_follows_it_as_fast_as_it_forgets():
    last = {}
    for forgetting in (0.0, 1.0):
        choice = make("bayes", PROMPTS[:1], size=1, forgetting=forgetting)
        for success in (0.0, 0.0, 0.0, 1.0):
            show(choice, choice.choose(0, 1), torch.tensor([success]))
        a, b = choice.posterior()
        last[forgetting] = float(a[0] / (a[0] + b[0]))
    assert last[0.0] == pytest.approx(17 / 18) and last[1.0] == pytest.approx(17 / 66)


def test_the_bandit_goes_where_the_gain_is_and_leaves_when_it_is_gone():
    choice, shares = make("bandit"), []
    for i in range(120):
        best = "arm 1" if i < 60 else "arm 3"
        batch = choice.choose(i, 8)
        assert len(set(batch.ids.tolist())) == 8
        tags = [PROMPTS[k]["tag"] for k in batch.ids.tolist()]
        gain = torch.tensor([0.8 if tag == best else 0.1 for tag in tags])
        metrics = show(choice, batch, torch.full((8,), 0.5), gain)
        shares.append([metrics[f"prompts/share/arm {k}"] for k in range(4)])
    before, after = np.mean(shares[30:60], 0), np.mean(shares[90:], 0)
    assert before[1] > 0.7 and after[3] > 0.7 and after[1] < 0.2
    assert metrics["prompts/gain/arm 3"] == pytest.approx(0.8, abs=0.01)


def test_an_arm_that_runs_out_of_prompts_leaves_the_batch_to_the_others():
    rows = [{"prompt": str(i), "tag": "few" if i < 2 else "many"} for i in range(10)]
    choice = make("bandit", rows, temperature=0.01)
    choice.state["few"] = 1.0
    tags = [rows[i]["tag"] for i in choice.choose(0, 8).ids.tolist()]
    assert tags.count("few") == 2 and tags.count("many") == 6


@pytest.mark.parametrize("mode", ["bayes", "bandit"])
def test_a_choice_is_a_function_of_seed_iteration_and_state(mode):
    one, other = make(mode), make(mode)
    for i in range(5):
        show(one, one.choose(i, 8), torch.rand(8), torch.rand(8))
    other.restore(json.loads(json.dumps(one.state)))
    assert other.choose(5, 8).ids.tolist() == one.choose(5, 8).ids.tolist()
    chosen = [tuple(one.choose(i, 8).ids.tolist()) for i in (5, 6)]
    chosen.append(tuple(make(mode, seed=4).choose(5, 8).ids.tolist()))
    assert all(a != b for a, b in itertools.combinations(chosen, 2))


def test_a_state_survives_prompts_that_go_and_change_places():
    rows = [{"prompt": text} for text in ("a", "b", "b", "c")]
    choice = make("bayes", rows, size=1)
    for i, success in enumerate((0.0, 0.5, 1.0, 1.0)):
        show(choice, data.select(rows, torch.tensor([i])), torch.tensor([success]))
    other = make("bayes", [{"prompt": text} for text in ("c", "b", "b", "new")], size=1)
    other.restore(choice.state)
    before, after = choice.posterior(), other.posterior()
    for own, others in zip(after, before, strict=True):
        assert own.tolist() == [others[3], others[1], others[2], 1.0]


# --- what samples show


def seen(totals, mode="bayes", **options):
    batch = data.select(PROMPTS, torch.tensor([5, 9]))
    config = ChoiceConfig(mode=mode, **options)
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.5])
    group = torch.tensor([0, 0, 1, 1])
    return all_seen(seen_by(batch, group, torch.tensor(totals), advantages, config))


def test_shares_of_success_are_rewards_or_what_reaches_a_threshold():
    shares = seen([0.25, 0.5, 1.0, float("nan")])
    assert shares.ids.tolist() == [5, 9] and shares.samples.tolist() == [2, 1]
    assert shares.successes.tolist() == [0.75, 1.0] and shares.gain.tolist() == [1.0, 0.0]
    assert seen([22.0, 20.0, 21.0, 25.0], success=21).successes.tolist() == [1, 2]
    assert seen([22.0, 20.0, 21.0, 25.0], "bandit").gain.tolist() == [1.0, 0.25]


def test_rewards_that_are_no_shares_need_a_threshold():
    with pytest.raises(ValueError, match=r"and they are 20 to 25; set data.sampler.success"):
        seen([22.0, 20.0, 21.0, 25.0])


# --- runs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.sampler=bandit"], 'reads the column "tag" of each prompt, and prompt "'),
        (["data.sampler=bandit", "data.sampler.tag=prompt"], "have 314; it takes 2 to 64"),
    ],
)
def test_what_cannot_choose_is_refused_in_a_sentence(tmp_path, words, said):
    own = small.words(tmp_path / "run", algorithm__steps=None)
    result = small.invoke("train", *own, *words, "iterations=1")
    assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", long.but(["bayes", "bandit"], {"bayes"}))
def test_a_resumed_run_chooses_what_it_would_have_chosen(tmp_path, mode):
    own = {"data__sampler__mode": mode, "reward": "shapes", "data__eval": "null"}
    own |= {"data__sampler__tag": "task"} if mode == "bandit" else {}
    whole = small.trainer(tmp_path / "whole", iterations="4", **own)
    ids = [it.batch.ids.tolist() for it in whole]
    part = small.trainer(tmp_path / "part", iterations="4", **own)
    for it in part:
        if it.number == 2:
            break
    part.save()
    part.parts.lock.release()
    again = Trainer(resume=tmp_path / "part")
    assert [it.batch.ids.tolist() for it in again] == ids[2:]
    assert {"prompts/success", "prompts/seen"} <= set(it.metrics) or mode == "bandit"
    assert again.source.chooser.state == whole.source.chooser.state != {}
