"""What a model is trained on, and by: defaults are for the embedded models alone."""

import pytest
import small
import torch

from flowrl.config.compose import ConfigError, is_embedded, options
from flowrl.config.live import with_live_objects
from flowrl.config.load import composed, dump, load_config, read_config
from flowrl.policy.module import ModulePolicy

OTHERS = [name for name in options("model") if not is_embedded(name)]
BOTH = "no prompts and no reward are named for {}, and only the embedded models have defaults; add"
WORDS = f"{BOTH} data=everyday (or data.train=prompts.txt) and reward=pickscore, for example"
PROMPTS = "no prompts are named for {}, and only the embedded models have defaults; add"
REWARD = "no reward is named for {}, and only the embedded models have defaults; add"


def said(*given, **values):
    with pytest.raises(ConfigError) as caught:
        load_config(*given, **values)
    return str(caught.value)


def test_the_embedded_models_are_those_of_the_package():
    assert len(OTHERS) == 21 and {*options("model")} - {*OTHERS} == {
        "shapes-edit",
        "shapes-masked",
        "shapes-sd",
        "shapes-sd3",
        "shapes-wan",
    }


@pytest.mark.parametrize("command", ["show", "train", "budget"])
def test_every_command_refuses_a_model_without_prompts_and_reward(command):
    result = small.invoke(command, "model=sd3.5-medium")
    source = "stabilityai/stable-diffusion-3.5-medium"
    assert result.exit_code == 2 and WORDS.format(source) in " ".join(result.output.split())


@pytest.mark.parametrize("model", OTHERS)
def test_a_named_model_has_no_prompts_and_no_reward_by_default(model):
    source = composed(None, [f"model={model}"])[0]["model"]["source"]
    assert said(None, [f"model={model}"]).startswith(WORDS.format(source))
    cfg = load_config(None, [f"model={model}", "data=ocr", "reward=pickscore"])
    assert cfg.data.train == "ocr:train" and list(cfg.reward) == ["pickscore"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model=owner/pipeline"], BOTH.format("owner/pipeline")),
        (["model.source=owner/pipeline"], BOTH.format("owner/pipeline")),
        (["model=."], BOTH.format(".")),
        (["model=owner/pipeline", "reward=jpeg"], PROMPTS.format("owner/pipeline")),
        (["model=owner/pipeline", "data=ocr"], REWARD.format("owner/pipeline")),
        (["model=owner/pipeline", "data.eval=ocr:eval", "reward.jpeg=1"], "no prompts are named"),
        (["~reward"], "no reward is named; add reward=pickscore, for example"),
        (
            ["data=file"],
            "no prompts are named; add data=everyday (or data.train=prompts.txt), for example",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(words, sentence):
    assert said(None, words).startswith(sentence) and "\n" not in said(None, words)
    assert said(None, [*words, "seed=-1"]).count("\n") == 1  # beside every other mistake


@pytest.mark.parametrize(
    ("words", "train", "held_out", "rewards"),
    [
        (["data.train=a.txt", "reward.jpeg=1"], "a.txt", None, ["jpeg"]),  # nothing of shapes
        (["data.offline=scored", "reward=jpeg"], "", None, ["jpeg"]),
        (["data=shapes", "reward=shapes"], "shapes:train", "shapes:eval", ["shapes"]),
    ],
)
def test_what_is_named_is_all_there_is(tmp_path, words, train, held_out, rewards):
    cfg = load_config(None, ["model=sd1.5", *words])
    assert (cfg.data.train, cfg.data.eval, list(cfg.reward)) == (train, held_out, rewards)
    (tmp_path / "config.yaml").write_text(dump(cfg))
    assert read_config(tmp_path / "config.yaml") == load_config(tmp_path / "config.yaml") == cfg


def test_a_file_of_ones_own_is_read_alike(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {source: owner/pipeline}\n")
    assert said(path).startswith(BOTH.format("owner/pipeline"))
    path.write_text(path.read_text() + "data: {train: a.txt}\nreward: {jpeg: 0.5}\n")
    cfg = load_config(path)
    assert (cfg.data.train, cfg.data.eval) == ("a.txt", None) and list(cfg.reward) == ["jpeg"]


@pytest.mark.parametrize("cfg", [None, {"iterations": 1}, load_config(None)])
def test_a_live_policy_asks_for_both_and_live_objects_count(cfg):
    policy = ModulePolicy(torch.nn.Linear(4, 4), (4,))
    with pytest.raises(ConfigError, match="for Linear, .* add prompts=.* and rewards="):
        with_live_objects(cfg, policy=policy)
    made, _ = with_live_objects(cfg, policy=policy, prompts=["a", "b"], rewards="jpeg")
    assert made.data.train == "live:2 prompts" and list(made.reward) == ["jpeg"]
