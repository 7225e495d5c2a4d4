"""Runs over a quantised base and with an 8-bit optimizer: resumed bit for bit, loaded again as they
were, refused where they cannot be."""

import long
import pytest
import small
import torch
from torch import nn

import flowrl
from flowrl.config.build import load_run, make_policy
from flowrl.config.live import with_live_objects
from flowrl.config.training import OptimizerConfig
from flowrl.policy.weights.quantised import kind_of
from flowrl.runtime.store import checkpoint
from flowrl.training import optimizer

FEW = {
    "model__quantize": "nf4",
    "optimizer__name": "adamw8bit",
    "train__lora__rank": "64",
    "iterations": "2",
    "guard__check_rewards": "false",
    "eval__at_start": "false",
    "eval__images": "2",
}


@pytest.fixture(autouse=True)
def backends():
    pytest.importorskip("bitsandbytes")


@long.mark
def test_a_run_resumes_bit_for_bit_and_is_loaded_quantised_again(tmp_path):
    small.trainer(tmp_path / "whole", **FEW).run()
    first = small.trainer(tmp_path / "parts", **FEW)
    for it in first:
        if it.number == 1:
            first.save()
            break
    first.parts.lock.__exit__(None, None, None)
    flowrl.Trainer(resume=tmp_path / "parts").run()
    whole, parts = (small.weights(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert not [name for name in whole if not torch.equal(whole[name], parts[name])]
    few = [name for name, value in whole.items() if value.dtype == torch.uint8]
    assert few and all(name.endswith(("state1", "state2")) for name in few)
    assert [line["policy/grad_norm"] > 0 for line in small.lines(tmp_path / "whole")] == [True] * 2

    cfg, policy, *_ = load_run(tmp_path / "whole")
    assert cfg.model.quantize == "nf4" and kind_of(policy.pipe.transformer) == "nf4"
    with pytest.raises(ValueError, match=r"model.quantize 'nf4' -> 'none'"):
        flowrl.Trainer(
            small.config(tmp_path / "whole", **{**FEW, "model__quantize": "none"}),
            resume=tmp_path / "whole",
        )


@pytest.mark.parametrize(
    "words, sentence",
    [
        ({"train__mode": "full"}, "model.quantize=int8 freezes the weights, and train.mode=full"),
        ({"train__shard": "[denoiser]"}, "model.quantize=int8: only whole floating-point weights"),
    ],
)
def test_what_does_not_go_with_a_quantised_base_is_a_sentence(words, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        make_policy(small.config(tmp_path, model__quantize="int8", **words))


def test_a_live_policy_that_is_quantised_says_so_in_its_config(tmp_path):
    policy = flowrl.load_policy("shapes-sd3", lora={"rank": 2, "alpha": 2}, quantize="nf4")
    cfg, live = with_live_objects(small.config(tmp_path), policy=policy, prompts="shapes:train")
    assert cfg.model.quantize == "nf4" and make_policy(cfg, live=live) is policy
    cfg = small.config(tmp_path, model__quantize="int8")
    with pytest.raises(ValueError, match="model.quantize=int8 is read when a pipeline is loaded"):
        with_live_objects(cfg, policy=policy, prompts="shapes:train")


# ---------------------------------------------------------------------- the optimizer


def test_8_bit_moments_take_a_quarter_and_step_nearly_as_AdamW():
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(128, 128)) for _ in range(2)]
    weights[1].data.copy_(weights[0])
    start, held = weights[0].detach().clone(), []
    for name, weight in zip(("adamw", "adamw8bit"), weights, strict=True):
        made = optimizer.make(OptimizerConfig(name=name, lr=1e-3), [weight])
        before = weight._version
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            weight.grad = 1 + torch.randn(weight.shape, generator=generator)
            made.step()
        assert weight._version > before  # copies of the weights are told
        packed = checkpoint.pack_optimizer(made, {"w": weight})
        held.append(sum(t.numel() * t.element_size() for t in packed.values()))
    moved, other = weights[0] - start, weights[1] - start
    assert (moved - other).norm() < 0.05 * moved.norm()
    assert held[1] < 0.3 * held[0]


def test_an_optimizer_that_is_missing_or_fails_is_a_sentence(monkeypatch):
    monkeypatch.setattr(optimizer, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="adamw8bit needs bitsandbytes, which is not installed"):
        optimizer.eight_bit("cpu")
    monkeypatch.undo()
    monkeypatch.setattr("bitsandbytes.optim.AdamW8bit.step", failing)
    with pytest.raises(ValueError, match=r"adamw8bit \(bitsandbytes\) does not work here, on cpu"):
        optimizer.eight_bit("cpu")


def failing(self, *call):
    raise RuntimeError("no kernel")
