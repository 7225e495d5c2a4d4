"""Objects in place of names: what a config becomes of them, and every mistake in one sentence."""

import json
import re
from pathlib import Path

import pytest
import small
import torch
from torch import nn

import flowrl
from flowrl.algorithms.grpo import GRPO, GRPOConfig
from flowrl.algorithms.nft import ALGORITHM as NFT
from flowrl.config.live import check_given, named, with_live_objects
from flowrl.config.load import dump, load_config, read_config
from flowrl.policy.module import ModulePolicy
from flowrl.rewards import Reward, load_set
from flowrl.training.identity import of_live


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(193, 192)

    def forward(self, x, t, cond):
        return self.layer(torch.cat([x.flatten(1), t[:, None]], 1)).view_as(x)


class Pictures(ModulePolicy):
    def decode(self, x, sigma=0.0, cond=None, rows=None):
        return torch.sigmoid(x)


class Own(GRPO):
    """GRPO under another name."""


class Mean(Reward):
    name = "mean"

    def __call__(self, media, prompts, context=None):
        return media.flatten(1).mean(1)


def red(media, prompts, context=None):
    return media[:, 0].flatten(1).mean(1)


def policy(lora=None):
    torch.manual_seed(0)
    return Pictures(Net(), (3, 8, 8), lora=lora)


NAMED = {"rewards": "jpeg", "prompts": "ocr:train"}  # what a live policy needs beside it
SETTINGS = {
    "algorithm": "flow_grpo",
    "batch": {"prompts": 2, "group": 2, "updates": 1},
    "sampler": {"steps": 3, "guidance": "none"},
    "eval.every": 0,
    "eval.images": 2,
    "eval.steps": 2,
    "ema.every": 1,
    "iterations": 1,
    "trackers": [],
    "guard.check_rewards": False,
}


def test_objects_take_the_place_of_names_in_the_config():
    cfg, live = with_live_objects(
        SETTINGS, policy=policy(), rewards=[red, "jpeg"], algorithm=Own, prompts=["a", "b"]
    )
    assert cfg.model.source == "live:Net" and cfg.train.mode == "full"
    assert cfg.reward == {"red": {"weight": 1.0, "name": "live:red"}, "jpeg": cfg.reward["jpeg"]}
    assert cfg.algorithm == {
        "name": "live:Own",
        "label": "Own",
        **GRPOConfig().model_dump(mode="json"),
    }
    assert cfg.data.train == "live:2 prompts" and cfg.data.eval is None
    assert live.prompts == [{"prompt": "a"}, {"prompt": "b"}] and live.held_out is None
    assert list(live.rewards.rewards) == ["red", "jpeg"] and isinstance(live.algorithm, Own)


def test_a_config_of_live_objects_is_read_again(tmp_path):
    cfg, _ = with_live_objects(
        SETTINGS, policy=policy(), rewards={"r": {"reward": red, "weight": 0.5}}, prompts=["a"]
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump(cfg))
    assert read_config(path) == cfg and cfg.reward == {"r": {"weight": 0.5, "name": "live:red"}}
    assert named(read_config(path)) == {"policy": "Net", "rewards": "red", "prompts": "1 prompt"}


def test_the_usual_model_gives_a_live_policy_none_of_its_settings(monkeypatch):
    told = []
    monkeypatch.setattr("flowrl.config.live.logger.info", told.append)
    cfg, _ = with_live_objects(SETTINGS, policy=policy(), **NAMED)
    assert cfg.model.pipeline == {} and cfg.eval.baseline_guidance is None and not told
    cfg, _ = with_live_objects(load_config(None), policy=policy(), **NAMED)
    assert cfg.model.pipeline == {}
    assert told == [
        "model.pipeline: guidance_scale, max_sequence_length are those of the usual model; Net is"
        " called with its own"
    ]


def test_a_policy_says_itself_what_is_trained():
    cfg, _ = with_live_objects(SETTINGS, policy=policy({"rank": 2, "alpha": 3}), **NAMED)
    assert (cfg.train.mode, cfg.train.lora.rank, cfg.train.lora.alpha) == ("lora", 2, 3)
    cfg, _ = with_live_objects(SETTINGS, policy=Pictures(Net().bfloat16(), (3, 8, 8)), **NAMED)
    assert (cfg.train.mode, cfg.model.dtype) == ("full", "bf16")


def test_a_class_has_default_options_an_instance_its_own_and_a_run_that_goes_on_those_it_had():
    cfg, _ = with_live_objects(SETTINGS, algorithm=Own(GRPOConfig(kl_weight=0.25)))
    assert cfg.algorithm["kl_weight"] == 0.25
    again, live = with_live_objects(cfg, algorithm=Own)
    assert again == cfg and live.algorithm.config.kl_weight == 0.25
    assert with_live_objects(SETTINGS, algorithm=Own)[0].algorithm["kl_weight"] == 0.0


def test_what_ships_keeps_its_name():
    assert with_live_objects(SETTINGS, algorithm=NFT)[0].algorithm["name"] == "nft"
    cfg, live = with_live_objects(SETTINGS, prompts={"train": "shapes:train", "eval": ["x"]})
    assert cfg.data.train == "shapes:train" and cfg.data.eval == "live:1 prompt"
    assert len(live.prompts) > 100


def test_a_config_without_objects_is_left_as_it_is():
    cfg = load_config(None)
    assert with_live_objects(cfg)[0] is cfg and with_live_objects("quickstart")[0] == load_config(
        "quickstart"
    )
    assert with_live_objects({"iterations": 3})[0] == load_config(iterations=3)


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"policy": nn.Linear(2, 2)}, "a plain Linear, whose latents have any shape: pass flowrl"),
        ({"policy": "sd1.5"}, 'policy="sd1.5" is a name: give it to the config, as model=sd1.5'),
        ({"policy": 3}, "policy is a int; give a diffusers pipeline"),
        ({"algorithm": Net}, "algorithm: Net is not a subclass of flowrl.algorithms.Algorithm"),
        ({"algorithm": "nft"}, "algorithm: 'nft' is not a subclass"),
        ({"algorithm": type("Half", (Own,), {"Config": dict})}, "the Config of Half is not a sub"),
        ({"rewards": lambda media, prompts: 0}, "is called as <lambda>(media, prompts, context)"),
        ({"rewards": [red, red]}, 'two rewards are called "red"; give labels'),
        ({"rewards": {"r": "sum"}}, "weight='sum' is not a finite number"),
        ({"rewards": {"r": {"reward": 3}}}, 'reward "r" is a int; give a name, a Reward or'),
        ({"rewards": []}, "give at least one reward"),
        ({"rewards": "jpg"}, 'unknown reward "jpg"; did you mean "jpeg"'),
        ({"prompts": "a cat"}, "prompt file a cat does not exist"),
        ({"prompts": []}, "prompts is empty; it needs one prompt or more"),
        ({"prompts": 3}, "prompts should be a list of texts or of records"),
        ({"prompts": ["a", 3]}, 'prompts[1] needs a "prompt" that is a non-empty text'),
        ({"prompts": {"train": ["a"], "test": ["b"]}}, "prompts has the keys ['test', 'train']"),
        ({"prompts": {"train": ["a"], "eval": [{}]}}, "prompts['eval'][0] needs a"),
    ],
)
def test_objects_that_do_not_fit_are_one_sentence(objects, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        with_live_objects(SETTINGS, **objects)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "cfg",
    [
        {"model": "sd1.5"},
        {"model": {"source": "sd1.5"}},
        load_config(model="sd1.5", data="file", **{"data.train": "p.txt"}, reward="jpeg"),
    ],
)
def test_a_live_policy_and_another_model_are_refused(cfg):
    with pytest.raises(
        ValueError, match=r"model=\S+ and a live policy, Net, are both given; leave"
    ):
        with_live_objects(cfg, policy=policy())


def test_arguments_of_a_call_do_not_reach_a_policy_that_is_loaded():
    with pytest.raises(ValueError, match="give them to flowrl.load_policy"):
        with_live_objects({"model": {"pipeline": {"height": 64}}}, policy=policy())
    with pytest.raises(ValueError, match=r"data.offline=scored brings its own prompts"):
        with_live_objects({"data": {"offline": "scored"}}, prompts=["a"])


def test_each_object_that_is_missing_is_asked_for():
    cfg, live = with_live_objects({**SETTINGS, "data": "ocr"}, policy=policy(), rewards=red)
    check_given(cfg, live)
    with pytest.raises(ValueError) as caught:
        check_given(cfg, with_live_objects(cfg, rewards=red)[1])
    assert str(caught.value) == (
        "this run's policy (Net) was a live object; pass it: flowrl.train(..., policy=...)"
    )


def test_identity_knows_live_code_by_its_text():
    _, live = with_live_objects(SETTINGS, rewards=[red, Mean()], algorithm=Own)
    known = of_live(live)
    assert known.keys() == {"code of reward.red", "code of reward.mean", "code of algorithm"}
    _, other = with_live_objects(SETTINGS, rewards={"red": Mean(), "mean": Mean()}, algorithm=Own)
    differ = {key for key, value in of_live(other).items() if value != known[key]}
    assert differ == {"code of reward.red"}


def test_a_run_goes_on_with_the_same_policy_and_refuses_other_prompts(tmp_path):
    live = {"policy": policy({"rank": 2, "alpha": 2}), "rewards": red, "prompts": ["a", "b"]}
    out = tmp_path / "run"
    flowrl.train({**SETTINGS, "output": out}, **live)
    assert (out / "lora").is_dir() and json.loads((out / "environment.json").read_text())[
        "live prompts"
    ] == ("2 prompts")
    cfg = load_config(out / "config.yaml", iterations=2)
    with pytest.raises(ValueError, match=r"has changed since its newest checkpoint: prompts \("):
        flowrl.train(cfg, resume=out, **live | {"prompts": ["a", "c"]})
    flowrl.train(cfg, resume=out, **live)
    assert len(small.lines(out)) == 2


def test_a_policy_is_trained_twice_by_a_method_with_copies(tmp_path):
    live = {"policy": policy({"rank": 2, "alpha": 2}), "rewards": red, "prompts": ["a", "b"]}
    for name in ("one", "two"):
        settings = {**SETTINGS, "algorithm": "nft", "algorithm.steps": 1}
        made = flowrl.Trainer({**settings, "output": tmp_path / name}, **live)
        assert made.policy.trainable.has("old") and made.policy.same("default", "old")
        next(iter(made))


def test_policies_prompts_and_functions_reach_evaluate_generate_and_score():
    own = policy()
    row = flowrl.evaluate(own, ["a", {"prompt": "b"}], red, images=2, steps=2)
    media = flowrl.generate(own, [{"prompt": "a"}], steps=2, guidance="none", best_of=2, reward=red)
    assert row.values["red"].shape == (2,) and media.shape == (1, 3, 8, 8)
    assert flowrl.score(media, ["a"], [red, Mean]).raw.keys() == {"red", "mean"}
    assert load_set(Mean()).weights == {"mean": 1.0}


def test_a_pipeline_that_is_a_policy_already_is_refused():
    loaded = flowrl.load_policy("shapes-sd3", lora={"rank": 1, "alpha": 1})
    with pytest.raises(ValueError, match='is a policy already: its transformer has the adapter "d'):
        flowrl.load_policy(loaded.pipe)
    assert flowrl.load_policy(loaded) is loaded
    with pytest.raises(ValueError, match="a Policy already; give kind, height where it is"):
        flowrl.load_policy(loaded, kind="eps", height=64)
    with pytest.raises(ValueError, match="the model is a Policy already, which has the LoRA"):
        flowrl.load_policy(loaded, lora={"rank": 2})
    with pytest.raises(ValueError, match='model "/nowhere" does not exist; give a folder'):
        flowrl.load_policy(Path("/nowhere"))
