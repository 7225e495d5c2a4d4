"""Runs whose weights and states leave the device, and whose prompts were encoded before, are those
without; what cannot leave is refused."""

import away
import long
import small
import torch

from flowrl.rewards import Reward
from flowrl.training.loop import Trainer
from flowrl.training.resume import check_resume


def test_a_run_is_the_same_whatever_leaves_the_device(tmp_path, monkeypatch):
    small.trainer(tmp_path / "plain", "mix_grpo", iterations="2").run()
    away.spoil(monkeypatch)
    leaving = {"model__encoders": "leave", "model__offload": "denoiser", "batch__states": "host"}
    made = small.trainer(tmp_path / "leaving", "mix_grpo", iterations="2", **leaving)
    made.run()
    turns = made.policy.turns
    assert turns.encoders.visits and turns.denoisers.visits >= 2
    assert small.same(tmp_path / "plain", tmp_path / "leaving")


@long.mark
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
    assert small.same(tmp_path / "first", tmp_path / "second")
    check_resume(small.config(tmp_path / "second", iterations="2"), tmp_path / "second")


class Seen(Reward):
    """Scores by a network, and notes whether the denoiser is there meanwhile."""

    name = "seen"
    scale = "0 to 1"

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(3, 1)
        torch.nn.init.ones_(self.network.weight)
        self.beside, self.turns = [], None

    def __call__(self, media, prompts, context):
        if self.turns is not None:
            self.beside.append(self.turns.denoisers.here)
        return self.network(media.mean((2, 3))).flatten().detach()


@long.mark
def test_rewards_that_leave_score_the_same_and_never_meet_the_denoiser(tmp_path, monkeypatch):
    """While they are away, their weights are NaN here. Scored are trials of the rewards, samples
    and evaluations."""
    torch.manual_seed(5)
    reward = Seen()

    def run(name, **changes):
        cfg = small.config(tmp_path / name, "mix_grpo", iterations="2", reward=None, **changes)
        made = Trainer(cfg, rewards={"seen": reward})
        reward.turns = made.policy.turns if changes else None
        made.run()
        return made

    run("plain")
    away.spoil(monkeypatch)
    made = run("leaving", model__offload="all", model__encoders="leave")
    (scorers,) = made.policy.turns.scorers
    assert scorers.visits >= 4
    assert reward.beside and not any(reward.beside)
    assert small.same(tmp_path / "plain", tmp_path / "leaving")
