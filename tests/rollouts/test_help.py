"""Help for prompts that never succeed: who gets it and when it ends, and that what is scored and
trained is the prompt itself."""

import json
import shutil
from types import SimpleNamespace

import pytest
import small
import torch

from flowrl.config.sampling import ChoiceConfig, HelpConfig
from flowrl.data import prompts as data
from flowrl.rewards import load_set
from flowrl.rollouts import draw
from flowrl.rollouts.choose import chooser, seen_by
from flowrl.rollouts.help import Helper
from flowrl.runtime.store import checkpoint
from flowrl.training import build
from flowrl.training.loop import Trainer

EASY, HARD, HELP = "a red circle", "two blue squares", "a blue square"
FIRST = torch.tensor([0])


def visit(helper, success, iteration=0, samples=4.0):
    """One visit of the first prompt -> what is logged."""
    return helper.learn(iteration, FIRST, torch.tensor([samples]), torch.tensor([success]))


# --- who is helped


def test_help_begins_after_so_many_failures_and_ends_with_the_first_success(monkeypatch):
    monkeypatch.setattr("flowrl.rollouts.help.FADE", 0.0)
    helper = Helper(HelpConfig(after=2, guidance=4), ["a"], 0)
    found = []
    for success in (0.0, 0.0, 0.0, 1.0, 0.0):
        found.append((bool(helper.helps(0, FIRST)), visit(helper, success)["prompts/helped"]))
    assert found == [(False, 0), (False, 0), (True, 1), (True, 1), (False, 0)]
    assert helper.state == {"a": [3, 1]}


def test_a_prompt_that_succeeds_in_time_is_never_helped_and_failed_scoring_is_no_visit(monkeypatch):
    monkeypatch.setattr("flowrl.rollouts.help.FADE", 1.0)
    helper = Helper(HelpConfig(after=2, guidance=4), ["a"], 0)
    for success in (0.0, 1.0, 0.0, 0.0, 0.0):
        visit(helper, success)
        assert not helper.helps(0, FIRST)
    unscored = Helper(HelpConfig(after=1, guidance=4), ["a"], 0)
    visit(unscored, 0.0, samples=0.0)
    assert unscored.state == {"a": [0, 0]}


def test_help_decays_with_visits_that_succeed():
    """0.5 ** 1 after one, 0.5 ** 2 after two; drawn by seed, iteration and prompt."""
    helper = Helper(HelpConfig(after=1, guidance=4), [str(i) for i in range(4000)], 3)
    ids = torch.arange(4000)
    for n in (0, 1, 2):
        helper.state = {name: [1, n] for name in helper.names}
        share = helper.helps(5, ids).double().mean().item()
        assert share == pytest.approx(0.5**n, abs=0.03)
    assert torch.equal(helper.helps(5, ids), helper.helps(5, ids))
    assert not torch.equal(helper.helps(5, ids), helper.helps(6, ids))
    again = Helper(helper.config, helper.names[::-1], 3)
    again.restore(helper.state | {"gone": [9, 9]})
    assert again.state == helper.state


def test_rewards_that_are_no_shares_need_a_threshold():
    batch = data.select([{"prompt": "p"}], FIRST)
    given = batch, torch.tensor([0, 0]), torch.tensor([20.0, 22.0]), torch.zeros(2)
    with pytest.raises(ValueError, match=r"help.after=3 takes rewards in \[0, 1\]"):
        seen_by(*given, ChoiceConfig(help={"after": 3}))
    found = seen_by(*given, ChoiceConfig(help={"after": 3}, success=21))
    assert found[0, 1:3].tolist() == [2.0, 1.0]


def test_without_help_nothing_is_counted():
    choice = chooser([{"prompt": "p"}], ChoiceConfig(), size=1, seed=0)
    assert not choice.learns and choice.helper is None  # so that no iteration asks them


# --- runs


HELPED = {"after": "2", "guidance": "3", "steps": "3", "column": "better"}
HELPED = {f"data__sampler__help__{name}": value for name, value in HELPED.items()}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run whose second prompt succeeds only where it is helped, and one without help.

    seen: (texts, guidance, steps) of rollouts; trained: (rollout, rows) of iterations.
    """
    folder = tmp_path_factory.mktemp("help")
    rows = [{"prompt": EASY}, {"prompt": HARD, "better": HELP}]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen, trained, roll_out = [], [], draw.roll_out

    def watched(policy, batch, plan, **options):
        seen.append((batch.text, options["guidance"], plan.edges))
        return roll_out(policy, batch, plan, **options)

    def reward(media, prompts, context):
        """The first of each group of two succeeds, if its prompt is easy or was helped."""
        assert set(prompts) <= {EASY, HARD}  # never what helped
        able = torch.tensor([p == EASY or seen[-1][1] == 3.0 for p in prompts]).float()
        return able * (torch.arange(len(prompts)) % 2 == 0)

    own = {"data__train": str(folder / "p.jsonl"), "data__eval": "null", "iterations": "4"}
    own |= {"guard__check_rewards": "false", "algorithm__steps": "1", "sampler__steps": "2"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "roll_out", watched)
        patch.setattr("flowrl.rollouts.help.FADE", 0.0)
        patch.setattr(build, "load_set", lambda _: load_set({"planted": reward}))
        untouched = list(small.trainer(folder / "plain", **(own | {"iterations": "3"})))
        assert all(set(texts) == {EASY, HARD} and g == "none" for texts, g, _ in seen)
        seen.clear()
        trainer = small.trainer(folder / "run", checkpoint__keep="9", **own, **HELPED)
        update = trainer.learner.update
        trainer.learner.update = lambda *given: trained.append(given[:2]) or update(*given)
        yield SimpleNamespace(
            untouched=untouched, trainer=trainer, results=list(trainer), seen=seen, trained=trained
        )


def test_a_prompt_that_succeeds_only_with_help_gets_it_until_it_has_succeeded(ran):
    """After two failures it is helped once, and by then it has succeeded."""
    assert [it.metrics["prompts/helped"] for it in ran.results] == [0, 0, 1, 0]
    assert [it.metrics["prompts/helped_success"] for it in ran.results] == [0, 0, 1, 0]
    alone = [call for call in ran.seen[:5] if len(call[0]) == 1]
    assert alone == [([EASY], "none", 2), ([HELP], 3.0, 3)]


def test_a_helped_sample_is_trained_under_its_own_text_as_the_others_are(ran):
    (trained, rows), it = ran.trained[2], ran.results[2]
    rollout = trained.rollout
    assert list(rollout.cond.prompts) == it.batch.text and set(it.batch.text) == {EASY, HARD}
    assert rollout.guidance == "none" and rollout.plan.edges == 2
    of_hard = rows.prompt == it.batch.text.index(HARD)
    leaves = it.rollout.leaves[it.rollout.group == it.batch.text.index(HARD)]
    assert torch.equal(rollout.states[rows.state[of_hard]], leaves)
    # without help it has no signal
    assert [len(set(rows.prompt.tolist())) for _, rows in ran.trained] == [1, 1, 2, 1]
    # pictures stand in the order of samples
    shown = ran.trainer.policy.decode(it.rollout.leaves)
    assert torch.allclose(it.shown, shown, atol=1e-5) and len(it.shown) == 4


def test_who_is_not_helped_is_sampled_as_without_help(ran):
    """From the same noise, and the same but for the rounding of encoders and smaller batches."""
    for i, (a, b) in enumerate(zip(ran.results[:3], ran.untouched, strict=True)):
        assert a.batch.text == b.batch.text
        for row, text in enumerate(a.batch.text):
            mine, before = a.rollout.group == row, b.rollout.group == row
            same = torch.allclose(a.rollout.leaves[mine], b.rollout.leaves[before], atol=1e-4)
            assert same == (i < 2 or text == EASY)
            if same:
                assert torch.equal(a.rollout.leaf_key[mine], b.rollout.leaf_key[before])


def test_a_resumed_run_helps_whom_it_would_have_helped(ran, tmp_path):
    """From the checkpoint of the second iteration on."""
    whole, run = ran.trainer.path, tmp_path / "run"
    shutil.copytree(whole, run)
    for folder in checkpoint.steps(run)[3:]:
        shutil.rmtree(folder)
    again = Trainer(resume=run)
    assert again.iteration == 2
    list(again)
    assert small.numbers(run) == small.numbers(whole)
    assert again.source.chooser.helper.state == ran.trainer.source.chooser.helper.state
    a, b = small.weights(run), small.weights(whole)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def test_a_draw_in_which_all_are_helped_is_as_plain(ran):
    source = ran.trainer.source
    state, source.chooser.helper.state = (
        source.chooser.helper.state,
        {name: [5, 0] for name in source.chooser.names},
    )
    drawn = draw.draw(source, 9, ran.trainer.parts.setup.plan)
    source.chooser.helper.state = state
    assert set(ran.seen.pop()[0]) == {EASY, HELP}
    assert drawn.rollout.guidance == "none" and drawn.rollout.plan.edges == 2
    assert list(drawn.rollout.cond.prompts) == drawn.batch.text
    assert set(drawn.batch.text) == {EASY, HARD}
