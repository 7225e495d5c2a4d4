"""Runs whose rewards know how alike samples are: what they log, resume, and what is refused."""

import pytest
import small
import torch

import flowrl
from flowrl.advantages import diversity
from flowrl.config.load import ConfigError, load_config
from flowrl.rewards.core.features import load_features
from flowrl.training.checks import check_comparable
from flowrl.training.loop import Trainer

ON = {
    "diversity__features": "shapes",
    "diversity__redundancy": "3",
    "diversity__novelty": "0.5",
    "diversity__entropy": "0.5",
    "data__eval": "null",
    "batch__group": "4",
    "guard__check_rewards": "false",
}
KEYS = ["diversity/similarity", "diversity/novelty", "diversity/entropy", "diversity/discount"]
for name in ("dpo", "draft", "granular_grpo", "raft", "rwr"):
    small.ALGORITHMS.setdefault(name, {})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two iterations, written down."""
    folder = tmp_path_factory.mktemp("diversity") / "run"
    small.trainer(folder, "flow_grpo", iterations="2", **ON).run()
    return folder


def test_a_run_writes_down_how_alike_its_samples_are(run):
    for line in small.lines(run):
        assert [key for key in line if key.startswith("diversity/")] == KEYS
        assert 0 < line["diversity/similarity"] < 1 and line["diversity/novelty"] > 0
        assert "reward/diversity/novelty/mean" not in line  # logged rewards are those given


def test_a_resumed_run_equals_the_uninterrupted_one(run, tmp_path):
    small.trainer(tmp_path / "run", "flow_grpo", iterations="1", **ON).run()
    result = small.invoke("train", "--resume", tmp_path / "run", "iterations=2")
    assert result.exit_code == 0, result.output
    assert small.same(tmp_path / "run", run)


def test_groups_that_are_drawn_again_are_compared_whole(tmp_path):
    """draw.mode=balance: all draws of a prompt are one group, however they are decoded."""
    more = {"draw__mode": "balance", "draw__rounds": "1", "batch__decode": "3"}
    result = small.trainer(tmp_path / "run", "flow_grpo", **(ON | more)).iterate(0)
    rewards, group = result.rewards, result.rollout.group
    assert len(rewards.features) == len(group) > 8
    found = diversity.spread(rewards.features, group, rewards.valid)
    assert result.metrics["diversity/novelty"] == pytest.approx(found.novelty.mean().item())


def test_a_live_function_gives_features_and_is_asked_for_again(tmp_path):
    def colour(media):
        return media.flatten(2).mean(2)

    cfg = load_config(None, small.words(tmp_path / "run", **ON))
    made = Trainer(cfg, features=colour)
    assert made.cfg.diversity.features == "live:colour"
    assert made.source.rewards.features.of(torch.rand(2, 3, 4, 4), torch.arange(2)).shape == (2, 3)
    assert "code of features" in made.parts.identity["live"]
    with pytest.raises(ValueError, match=r"features \(colour\) was a live object; pass it: .*feat"):
        Trainer(made.cfg)
    with pytest.raises(ValueError, match="features is a str; give a function of media"):
        Trainer(cfg, features="clip")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"diversity__features": "null"}, "redundancy=3 compares features .* names none; choose"),
        ({"diversity__features": "klip"}, 'diversity.features: "klip" is not known; choose clip'),
        ({"diversity__entropy": "2"}, "diversity.entropy=2 should be less than or equal to 1"),
        ({"diversity__novelty": "-1"}, "diversity.novelty=-1 should be greater than or equal to 0"),
        ({"diversity__temperature": "0"}, "diversity.temperature=0 should be greater than 0"),
        ({"diversity__above": "mean"}, "diversity.above='mean' should be 'lowest' or 'zero'"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, small.words(tmp_path / "run", **(ON | changes)))


def test_a_model_of_other_media_needs_features_of_its_own():
    class Path(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(11, 10)

        def forward(self, x, t, cond):
            return self.layer(torch.cat([x.flatten(1), t[:, None]], 1)).view_as(x)

    policy = flowrl.load_policy(Path(), shape=(5, 2))
    with pytest.raises(ValueError, match=r"shapes takes images .* makes samples of shape \(5, 2\)"):
        check_comparable(load_features("shapes"), policy)
    check_comparable(load_features("live:f", live=lambda media: media.flatten(1)), policy)


def test_a_function_that_breaks_its_word_ends_the_run_with_a_sentence(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def flat(media):\n    return media.flatten(1).mean(1)\n")
    words = small.words(tmp_path / "run", **(ON | {"diversity__features": f"{file}:flat"}))
    result = small.invoke("train", *words)
    assert result.exit_code == 1 and "diversity.features=flat returned a float32" in result.output
    assert "Traceback" not in result.output
