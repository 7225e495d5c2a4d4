"""Records and objects of a run say in a few words what they are, without numbers of tensors."""

import dataclasses
from pathlib import Path

import pytest
import small

from flowrl.training.records import Run
from flowrl.types import BRIEF


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Name of a class -> the repr of an object of a small run."""
    trainer = small.trainer(tmp_path_factory.mktemp("reprs") / "run", iterations="1")
    it = next(iter(trainer))
    run = Run(path=Path("runs/a"), metrics=[{}] * 9, evaluation={"rows": [{"name": "before"}]})
    things = (trainer, it, it.rollout, it.rewards, it.batch, trainer.policy, trainer.cfg, run)
    wide = {f"reward-{i}": 1.0 for i in range(200)}
    long = dataclasses.replace(it.rewards, weights=wide)
    return {
        **{type(thing).__name__: repr(thing) for thing in things},
        "Policy": repr(trainer.policy),
        "RewardSet": repr(trainer.parts.source.rewards),
        "parts": repr(trainer.parts),
        "long Rewards": repr(long),
        "long Iteration": repr(dataclasses.replace(it, rewards=long)),
        "long PromptBatch": repr(dataclasses.replace(it.batch, text=["a cat"] * 900)),
        "long Rollout": repr(dataclasses.replace(it.rollout, guidance="a" * 900)),
        "long Run": repr(Run(path=Path("a" * 900))),
        "long Config": repr(trainer.cfg.model_copy(update={"output": "a" * 900})),
    }


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "Trainer": ["Trainer(nft on ", "iteration 1 of 1", "run'"],
        "Iteration": ["Iteration(number=1", "2 prompts", "4 samples", "reward/total", "1 x jpeg"],
        "Rollout": ["Rollout(4 samples", "states (", "on cpu", "transitions", "guidance='none'"],
        "Rewards": ["Rewards(1 x jpeg", "4 samples"],
        "RewardSet": ["RewardSet(1 x jpeg"],
        "Policy": ["Policy(networks transformer", "trained: denoiser", "latents (B, "],
        "Config": ["Config(model=", "algorithm='nft'", "reward='jpeg'", "iterations=1"],
        "Run": ["Run(path='runs/a'", "9 iterations", "evaluated: before"],
        "PromptBatch": ["PromptBatch(2 prompts, text=["],
        "parts": ["RunParts"],
        "long Iteration": ["Iteration(number=1", "1 x reward-0 + "],
        "long PromptBatch": ["PromptBatch(900 prompts, text=['a cat', "],
        "long Rollout": ["Rollout(4 samples", "..."],
        "long Rewards": ["1 x reward-0 + 1 x reward-1 + "],
        "long Run": ["Run(path='aaa", "..."],
        "long Config": ["Config(model=", "..."],
    }.items(),
)
def test_a_repr_is_short_and_useful(shown, name, said):
    text = shown[name]
    assert len(text) <= BRIEF and text.count("\n") < 6 and "tensor(" not in text
    for words in said:
        assert words in text, text
