"""Runs whose weights and states leave the device, and whose prompts were encoded before, are those
without; what cannot leave is refused."""

import away
import small
import torch

from flowrl.training.resume import check_resume


def same(one, other):
    first, second = small.weights(one), small.weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert small.numbers(one) == small.numbers(other)


def test_a_run_is_the_same_whatever_leaves_the_device(tmp_path, monkeypatch):
    small.trainer(tmp_path / "plain", "mix_grpo", iterations="2").run()
    away.spoil(monkeypatch)
    leaving = {"model__encoders": "leave", "model__offload": "denoiser", "batch__states": "host"}
    made = small.trainer(tmp_path / "leaving", "mix_grpo", iterations="2", **leaving)
    made.run()
    turns = made.policy.turns
    assert turns.encoders.visits and turns.denoisers.visits >= 2
    same(tmp_path / "plain", tmp_path / "leaving")


def test_a_second_run_makes_no_encoder_call_and_may_go_on_without_its_cache(tmp_path):
    how = {"model__prompt_cache": str(tmp_path / "cache"), "model__encoders": "leave"}
    small.trainer(tmp_path / "first", iterations="1", **how).run()
    second = small.trainer(tmp_path / "second", iterations="1", **how)
    calls = []
    for name in ("text_encoder", "text_encoder_2"):
        for module in getattr(second.policy.pipe, name).children():
            module.register_forward_hook(lambda *call: calls.append(call))
    second.run()
    assert second.policy.turns.encoders.visits == 0 and not calls
    same(tmp_path / "first", tmp_path / "second")
    check_resume(small.config(tmp_path / "second", iterations="2"), tmp_path / "second")
