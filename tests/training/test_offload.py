"""Runs whose weights and states leave the device, and whose prompts were encoded before, are those
without; what cannot leave is refused."""

import away
import pytest
import small
import torch

from flowrl.config.load import load_config
from flowrl.runtime import checkpoint
from flowrl.training.offload import check_moving


def same(one, other):
    first, second = small.weights(one), small.weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert small.numbers(one) == small.numbers(other)


@pytest.mark.parametrize("algorithm", ["mix_grpo", "nft"])
def test_a_run_is_the_same_whatever_leaves_the_device(algorithm, tmp_path, monkeypatch):
    """A second run with the same cache makes no encoder call."""
    small.trainer(tmp_path / "plain", algorithm, iterations="2").run()
    leaving = {
        "model__encoders": "leave",
        "model__offload": "denoiser",
        "batch__states": "host",
        "model__prompt_cache": str(tmp_path / "cache"),
        "iterations": "2",
    }
    first = small.trainer(tmp_path / "first", algorithm, **leaving)
    first.run()
    turns = first.policy.turns
    assert turns.encoders.visits and turns.denoisers.visits >= 2
    away.spoil(monkeypatch)
    del leaving["model__prompt_cache"]
    spoilt = small.trainer(tmp_path / "spoilt", algorithm, **leaving)
    spoilt.run()
    same(tmp_path / "plain", tmp_path / "first")
    same(tmp_path / "plain", tmp_path / "spoilt")


def test_a_second_run_makes_no_encoder_call_and_a_plain_one_goes_on_as_it(tmp_path):
    how = {"model__prompt_cache": str(tmp_path / "cache"), "model__encoders": "leave"}
    small.trainer(tmp_path / "first", "mix_grpo", iterations="1", **how).run()
    second = small.trainer(tmp_path / "second", "mix_grpo", iterations="1", **how)
    calls = []
    for name in ("text_encoder", "text_encoder_2"):
        for module in getattr(second.policy.pipe, name).children():
            module.register_forward_hook(lambda *call: calls.append(call))
    second.run()
    assert second.policy.turns.encoders.visits == 0 and not calls
    same(tmp_path / "first", tmp_path / "second")
    run = tmp_path / "first"
    result = small.invoke(
        "train", "--resume", run, "iterations=2", "model.encoders=stay", "model.prompt_cache=null"
    )
    assert result.exit_code == 0 and checkpoint.latest(run).name.endswith("2"), result.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model.encoders=leave", "train.parts=[text_encoder]"], "use model.encoders=stay"),
        (["model.offload=denoiser", "train.mode=full"], "train.mode=full trains them all"),
        (["model.offload=denoiser", "train.shard=[denoiser]"], r"shard=\[denoiser\] splits them"),
        (["model.offload=denoiser", "batch.overlap=2"], "batch.overlap=2 others are sampled"),
    ],
)
def test_what_does_not_go_together_is_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_moving(load_config(None, words))
