"""Plugins in files of the user's: "path/to/file.py:NAME" of every kind, every mistake in one
sentence; and configs from mappings."""

import re
from pathlib import Path

import pytest
import small
import torch

import flowrl
from flowrl.config.compose import ConfigError
from flowrl.config.load import load_config
from flowrl.data.prompts import load_prompts
from flowrl.policy.replay import hints
from flowrl.samplers import flow_sde, plan, sde
from flowrl.training import identity

OWN = """
import torch
from flowrl.algorithms.common import transitions
from flowrl.algorithms.common.base import Algorithm
from flowrl.policy.module import ModulePolicy
from flowrl.samplers import flow_sde
from flowrl.types import Transition

class Hollow(Algorithm): pass
class Headless(transitions.TransitionMethod): pass
class Misspelt(transitions.TransitionMethod):
    def loss(self, scores, batch): return self.score_of(scores)
    def score_of(self, scores): return scores
    def leaf_advantage(self, rewards, group): return rewards
class Wrong: pass
NUMBER = 3
HINTS = {"guidance": "norm"}
ODD = {"guidanse": "norm"}

def step(v, x, sigma, sigma_next, *, eta):
    return flow_sde.transition(v, x, sigma, sigma_next, eta=eta)
def capped(v, x, sigma, sigma_next, *, eta, sigma_cap=None):
    return flow_sde.transition(v, x, sigma, sigma_next, eta=eta, sigma_cap=sigma_cap)
def bare(v, x, sigma): return x
def pair(v, x, sigma, sigma_next, *, eta): return x, eta
def narrow(v, x, sigma, sigma_next, *, eta): return Transition(mean=x[:, :1], std=eta[:, None])

TEXTS = ["a", "b"]
def texts(): return iter(TEXTS)
def asks(part): return TEXTS
def fails(): raise KeyError("colour")
def one(): return "a cat"
def none(): return []

def module():
    torch.manual_seed(0)
    return ModulePolicy(torch.nn.Linear(2, 2), (2,))
def adapted():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    return ModulePolicy(net, (2,), lora={"rank": 1, "alpha": 1})
def nothing(): return 7
def name(): return "shapes-sd3"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("algorithm=gone.py:Own", "algorithm=gone.py:Own: there is no file gone.py"),
        ("algorithm=own.py:Hollo", 'own.py has no "Hollo"; did you mean "Hollow"?'),
        ("algorithm=own.py:Wrong", "Wrong is not a subclass of flowrl.algorithms.Algorithm"),
        ("algorithm=own.py:NUMBER", "3 is not a subclass of flowrl.algorithms.Algorithm"),
        ("algorithm=own.py:Hollow", "Hollow does not define plan, columns, score, loss, fit"),
        ("algorithm=own.py:Headless", "Headless does not define loss; a subclass of Transition"),
        ("algorithm=own.py:Misspelt", "nothing reads Misspelt.leaf_advantage; call it leaf_adv"),
        ("algorithm.sde=own.py:stepp", 'own.py has no "stepp"; did you mean "step"?'),
        ("algorithm.sde=own.py:NUMBER", "tried on two rows: TypeError: 'int' object is not call"),
        ("algorithm.sde=own.py:bare", "should be transition(v, x, sigma, sigma_next, *, eta) -> T"),
        ("algorithm.sde=own.py:pair", "in fp32 of x's shape; tried on x of shape (2, 3): tuple"),
        ("algorithm.sde=own.py:narrow", "mean torch.float32 (2, 1), std (2, 1)"),
        ("algorithm.sde=flow_ode", 'unknown sde "flow_ode"; did you mean "flow_sde"'),
        ("model.hints=[1]", "model.hints"),
    ],
)
def test_what_a_file_does_not_give_is_said_before_anything_is_loaded(own, words, said):
    given = [words] if words.startswith("algorithm=") else ["algorithm=flow_grpo", words]
    result = small.invoke("train", *given)
    assert result.exit_code == 2 and not Path("runs").exists()
    sentences = [line for line in result.output.splitlines() if line.startswith("flowrl: ")]
    assert len(sentences) == 1 and "Traceback" not in result.output
    assert said.format(folder=own.parent) in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data=own.py:text", 'own.py has no "text"; did you mean "texts"'),
        ("data=own.py:asks", "is called without arguments: missing a required argument: 'part'"),
        ("data=own.py:fails", "failed: KeyError: 'colour'"),
        ("data=own.py:one", "what it gives should be a list of texts or of records"),
        ("data=own.py:none", "what it gives is empty"),
        ("data=own.py:NUMBER", "not a int"),
        ("model=own.py:modules", 'own.py has no "modules"; did you mean "module"'),
        ("model=own.py:asks", "is called without arguments"),
        ("model=own.py:nothing", "a model should be a diffusers pipeline, its folder or hub id"),
        ("model=own.py:NUMBER", "is a int; it should be a factory or a name"),
        ("model=own.py:module", "a Policy already, which trains all its weights: leave lora= out"),
        ("model=own.py:adapted train.mode=full", "trains with train.mode=lora, and the config has"),
        ("model.hints=own.py:ODD", 'unknown hint "guidanse"; did you mean "guidance"?'),
        ("model.hints=own.py:NUMBER", "is a int; it should be a mapping"),
        ("model.hints=norm", 'model.hints "norm" should be path/to/file.py:NAME, or a mapping'),
    ],
)
def test_what_a_function_makes_is_judged_in_a_sentence(own, words, said):
    named = ["reward=jpeg", *["data=shapes"] * ("data=" not in words)]
    result = small.invoke("train", *named, *words.split())
    assert result.exit_code == 2 and not any(Path("runs").glob("*")), result.output
    assert said in " ".join(result.output.split())


def test_names_in_a_config_are_whole_paths_and_the_folder_of_a_run_ends_in_the_short_one(own):
    cfg = load_config(
        None, ["algorithm=flow_grpo", "algorithm.sde=own.py:step", "data=own.py:texts"]
    )
    assert cfg.algorithm["sde"] == f"{own}:step"
    assert (cfg.data.train, cfg.data.eval) == (f"{own}:texts", None)
    before = identity.of_config(cfg)["files"]
    assert str(own) in before
    own.write_text(OWN + "# edited\n")
    assert identity.of_config(cfg)["files"][str(own)] != before[str(own)]


def test_prompts_come_from_a_function_a_list_and_are_called_for_once(own):
    assert load_prompts("own.py:texts") == [{"prompt": "a"}, {"prompt": "b"}]
    assert load_prompts(f"{own}:TEXTS") == load_prompts("own.py:texts")


def test_a_step_of_ones_own_is_the_step_it_calls_and_gets_the_cap_if_it_takes_one(own):
    grid = torch.linspace(0.9, 0, 5)
    theirs = plan.full(grid, eta=0.5, sde=f"{own}:step")
    v, x = torch.randn(2, 3), torch.randn(2, 3)
    sigma, after, eta = torch.tensor([0.9, 0.5]), torch.tensor([0.7, 0.2]), torch.full((2,), 0.5)
    got = sde.transition(theirs, v, x, sigma, after, eta)
    want = flow_sde.transition(v, x, sigma, after, eta=eta)
    assert torch.equal(got.mean, want.mean) and torch.equal(got.std, want.std)

    whole = torch.linspace(1, 0, 5)
    assert plan.full(whole, eta=0.5, sde=f"{own}:capped").sigma_cap == 0.75
    assert plan.full(whole, eta=0.5, sde=f"{own}:step").sigma_cap is None


def test_a_factory_gives_a_policy_or_another_name(own):
    policy = flowrl.load_policy("own.py:module")
    assert policy.latent_shape == (2,)
    assert flowrl.load_policy("own.py:name").pipe is not None


def test_hints_are_registered_for_the_class_of_the_pipeline(own, monkeypatch):
    known = {}
    monkeypatch.setattr(
        hints, "register", lambda pipeline, *, guidance=None: known.update({pipeline: guidance})
    )
    flowrl.load_policy("shapes-sd3", hints={"guidance": "linear"})
    assert known == {"StableDiffusion3Pipeline": "linear"}


# ---------------------------------------------------------------------- mappings


def test_mappings_and_keywords_say_what_words_say():
    words = ["algorithm=flow_grpo", "batch.prompts=4", "iterations=2", "reward=jpeg", "seed=3"]
    want = load_config(None, words)
    tree = {"algorithm": "flow_grpo", "batch.prompts": 4, "iterations": 2, "reward": "jpeg"}
    assert load_config(tree, seed=3) == want
    assert load_config({"batch": {"prompts": 4}}, words[:1] + words[2:]) == want
    assert load_config("quickstart", iterations=3) == load_config("quickstart", ["iterations=3"])
    both = {"algorithm": "nft", "algorithm.steps": 3, "reward": {"jpeg": 0.5}}
    assert load_config(both) == load_config(
        None, ["algorithm=nft", "algorithm.steps=3", "~reward", "reward.jpeg=0.5"]
    )
    assert load_config(output=Path("a") / "b").output == "a/b"


@pytest.mark.parametrize(
    ("name", "overrides", "values", "said"),
    [
        (5, (), {}, "a config is an experiment's name, a YAML file or a mapping, not a int"),
        (None, "iterations=2", {}, 'should be a list of words: ["iterations=2"]'),
        ({"batch.prompt": 3}, (), {}, 'unknown key "batch.prompt"; did you mean "batch.prompts"'),
        ({"model": "sd9"}, (), {}, 'unknown model "sd9"; did you mean'),
        ({"batch": [1]}, (), {}, "Cannot merge"),
        (None, (), {"itertions": 2}, 'unknown key "itertions"; did you mean "iterations"'),
        (None, (), {"seed": object()}, "the config: Value 'object' is not a supported"),
        (
            {"model": "sd1.5", "data": "ocr", "reward": "jpeg"},
            ["~model"],
            {},
            '"~model" leaves out what model chooses',
        ),
        ("quickstrt", (), {}, 'unknown experiment "quickstrt"; did you mean "quickstart"'),
    ],
)
def test_wrong_values_of_a_script_are_one_sentence(name, overrides, values, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load_config(name, overrides, **values)
    assert "\n" not in str(caught.value)
