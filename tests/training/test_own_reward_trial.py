"""A reward of one's own is tried on two grey pictures before a model is loaded."""

import re

import pytest
import small

from flowrl.config import build
from flowrl.rewards import reward_class

MINE = """
import torch
import flowrl

CALLS = []

def whole(media, prompts, context=None):
    CALLS.append((media.shape, tuple(prompts), context.meta, context.group.tolist()))
    return media.flatten(1).mean(1)

def frames(media, prompts, context=None):
    return media.mean((1, 2, 3, 4))

def raises(media, prompts, context=None):
    return media.mean((1, 2, 3)) / prompts[5]

def nan(media, prompts, context=None):
    return media.flatten(1).mean(1) * float("nan")

def half(media, prompts, context=None):
    return media.flatten(1).mean(1).double()

def one(media, prompts, context=None):
    return media.mean()

def listed(media, prompts, context=None):
    return [0.5 for _ in prompts]

for name in ("whole", "frames", "raises", "nan", "half", "one", "listed"):
    globals()[name] = flowrl.reward(globals()[name])
"""


class Loaded(Exception):
    """The rewards were taken: a model would be loaded now."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """The output of a start that ends before a model is loaded."""

    def load(*_, **__):
        raise Loaded

    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "load_policy", load)

    def run(name, *words):
        result = small.invoke("train", f"reward=mine.py:{name}", "output=run", *words)
        assert not (tmp_path / "run").exists()
        return result, " ".join(result.output.split())

    return run


WAN = ["model=wan2.1-1.3b", "data=shapes"]
TRIAL = "two grey pictures before a model is loaded: correct the reward, or set guard.check_rewards"


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("raises", [], f"raises: IndexError: list index out of range (in a chunk of 2; .*{TRIAL}"),
        ("nan", [], f"nan: NaN or inf for 2 of 2 samples; this was a trial on {TRIAL}"),
        ("half", [], 'reward "half" returned a float64 tensor of shape (2,) on cpu; expected a'),
        ("one", [], 'reward "one" returned a float32 tensor of shape () on cpu; expected'),
        ("listed", [], 'reward "listed" returned a builtins.list; expected a float32 tensor'),
        ("nan", WAN, "this was a trial on two grey videos before a model is loaded"),
    ],
)
def test_what_is_wrong_with_it_is_one_sentence(start, name, words, sentence):
    result, text = start(name, *words)
    assert result.exit_code == 2 and "Traceback" not in text
    pattern = re.escape(sentence).replace(r"\.\*", ".*")
    assert re.search(pattern, text) and text.count("flowrl: ") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("whole", []),
        ("frames", []),  # a model may make videos
        ("frames", WAN),
        ("nan", ["guard.check_rewards=false"]),
    ],
)
def test_what_scores_them_goes_on(start, name, words):
    result, _ = start(name, *words)
    assert isinstance(result.exception, Loaded)


def test_it_is_called_once_with_a_prompt_of_the_run_and_one_that_ships_is_not(start):
    start("whole", "reward.jpeg.weight=0")
    calls = reward_class("mine.py:whole").function.__globals__["CALLS"]
    (shape, texts, meta, group), *others = calls
    assert not others and tuple(shape) == (2, 3, 64, 64) and group == [0, 0]
    assert texts[0] == texts[1] and meta[0] == meta[1] and meta[0]["task"]
